"""NTK-FL, fig. 7: test accuracy by round on CIFAR-10 of label skew, Dirichlet alpha = .1."""

from __future__ import annotations

from fedtangent._src.experiments.lab.cohort import DIGITS, IMAGES, CohortSettings
from fedtangent._src.experiments.lab.cohort_report import figure_4
from fedtangent._src.experiments.lab.runner import by_scale

CLAIM = "NTK-FL outperforms other FL algorithms and is close to the centralised training (curves only)"
SMALL = CohortSettings(**{**IMAGES, "num_train": 2400, "num_validation": 400, "num_test": 0}, alpha=0.1)
SCALES = {
    "digits": by_scale(CohortSettings(**DIGITS, alpha=0.1)),
    "cifar10": by_scale(SMALL, paper=CohortSettings(alpha=0.1)),
}
ENTRIES = (figure_4(__name__, "fig. 7: test accuracy by round on CIFAR-10 of label skew", SCALES, CLAIM),)
