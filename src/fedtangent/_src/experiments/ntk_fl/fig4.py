"""NTK-FL, fig. 4 and 7: test accuracy by round, of clients that differ as writers (4a) or in labels (4b, 4c, fig7)."""

from __future__ import annotations

from fedtangent._src.experiments.lab.runner import by_scale, with_changes
from fedtangent._src.experiments.ntk_fl.baselines import DIGITS, IMAGES, BaselineSettings, figure_4

FIGURE_7 = "NTK-FL outperforms other FL algorithms and is close to the centralised training (curves only)"
PAPER = BaselineSettings()
# The writers of digits in LEAF's sample of FEMNIST, of which the paper has 300; of another sample: --set num_clients=
WRITERS = with_changes(PAPER, "partition=writers num_clients=102 num_validation=1000")
LABELS = by_scale(with_changes(PAPER, IMAGES), paper=PAPER)
DIGIT_LABELS = by_scale(with_changes(PAPER, DIGITS))
WRITING = {
    "digits": by_scale(with_changes(PAPER, DIGITS, "partition=shifted")),
    "femnist_digits": by_scale(
        with_changes(WRITERS, IMAGES, "num_clients=102 clients_per_round=20 num_train=0 num_test=0"), paper=WRITERS
    ),
}
SKEWED = BaselineSettings(alpha=0.1)
COLOURED = {
    "digits": by_scale(with_changes(SKEWED, DIGITS)),
    "cifar10": by_scale(with_changes(SKEWED, IMAGES, "num_train=2400 num_validation=400 num_test=0"), paper=SKEWED),
}
SUMMARIES = {
    "a": "fig. 4(a): test accuracy by round on FEMNIST's digits, clients are writers",
    "b": "fig. 4(b): test accuracy by round on MNIST of label skew, Dirichlet alpha = .5",
    "c": "fig. 4(c): test accuracy by round on Fashion-MNIST of label skew, Dirichlet alpha = .5 (fig. 6's: .1)",
    "7": "fig. 7: test accuracy by round on CIFAR-10 of label skew",
}
ENTRIES = (
    figure_4(f"{__name__}a", SUMMARIES["a"], WRITING),
    figure_4(f"{__name__}b", SUMMARIES["b"], {"digits": DIGIT_LABELS, "mnist": LABELS}),
    figure_4(f"{__name__}c", SUMMARIES["c"], {"digits": DIGIT_LABELS, "fashion_mnist": LABELS}),
    figure_4("ntk_fl.fig7", SUMMARIES["7"], COLOURED, FIGURE_7),
)
