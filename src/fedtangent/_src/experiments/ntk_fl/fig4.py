"""NTK-FL, fig. 4: test accuracy by round of clients that differ as writers (a) or in their labels (b, c)."""

from __future__ import annotations

from fedtangent._src.experiments.lab.cohort import DIGITS, IMAGES, CohortSettings
from fedtangent._src.experiments.lab.cohort_report import figure_4
from fedtangent._src.experiments.lab.runner import by_scale

# The writers of digits in LEAF's sample of FEMNIST, of which the paper has 300; of another sample: --set num_clients=
WRITERS = CohortSettings(partition="writers", num_clients=102, num_validation=1000)
FEW = {**IMAGES, "num_clients": WRITERS.num_clients, "clients_per_round": 20, "num_train": 0, "num_test": 0}
LABELS = by_scale(CohortSettings(**IMAGES), paper=CohortSettings())
DIGIT_LABELS = by_scale(CohortSettings(**DIGITS))
WRITING = {
    "digits": by_scale(CohortSettings(**DIGITS, partition="shifted")),
    "femnist_digits": by_scale(CohortSettings(**FEW, partition="writers"), paper=WRITERS),
}

ENTRIES = (
    figure_4(f"{__name__}a", "fig. 4(a): test accuracy by round on FEMNIST's digits, clients are writers", WRITING),
    figure_4(
        f"{__name__}b",
        "fig. 4(b): test accuracy by round on MNIST of label skew, Dirichlet alpha = .5",
        {"digits": DIGIT_LABELS, "mnist": LABELS},
    ),
    figure_4(
        f"{__name__}c",
        "fig. 4(c): test accuracy by round on Fashion-MNIST of label skew, Dirichlet alpha = .5 (fig. 6's: .1)",
        {"digits": DIGIT_LABELS, "fashion_mnist": LABELS},
    ),
)
