"""NTK-FL, fig. 4(b): test accuracy by round on MNIST of label skew, Dirichlet alpha = .5."""

from __future__ import annotations

from fedtangent.experiments.lab.cohort import DIGITS, IMAGES, CohortSettings
from fedtangent.experiments.lab.cohort_report import CURVES, figure_4
from fedtangent.experiments.lab.settings import by_scale, same

SMALL = CohortSettings(**IMAGES)

ENTRIES = (
    figure_4(
        __name__,
        {"digits": same(CohortSettings(**DIGITS)), "mnist": by_scale(SMALL, SMALL, CohortSettings())},
        {"digits": "scikit-learn's digits stand in for MNIST: name mnist and its folder for the paper's"},
        CURVES,
    ),
)
