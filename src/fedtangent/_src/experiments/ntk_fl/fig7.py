"""NTK-FL, fig. 7: test accuracy by round on CIFAR-10 of label skew, Dirichlet alpha = .1."""

from __future__ import annotations

from fedtangent._src.experiments.lab.runner import by_scale, with_changes
from fedtangent._src.experiments.ntk_fl.baselines import DIGITS, IMAGES, BaselineSettings, figure_4

CLAIM = "NTK-FL outperforms other FL algorithms and is close to the centralised training (curves only)"
PAPER = BaselineSettings(alpha=0.1)
SMALL = with_changes(PAPER, IMAGES, "num_train=2400 num_validation=400 num_test=0")
SCALES = {"digits": by_scale(with_changes(PAPER, DIGITS)), "cifar10": by_scale(SMALL, paper=PAPER)}
ENTRIES = (figure_4(__name__, "fig. 7: test accuracy by round on CIFAR-10 of label skew", SCALES, CLAIM),)
