"""NTK-FL, fig. 4(c): test accuracy by round on Fashion-MNIST of label skew, Dirichlet alpha = .5.

With ``--set alpha=0.1`` it is the comparison at the heterogeneity of Table 1 and Fig. 6.
"""

from __future__ import annotations

from fedtangent.experiments.lab.cohort import DIGITS, IMAGES, CohortSettings
from fedtangent.experiments.lab.cohort_report import CURVES, figure_4
from fedtangent.experiments.lab.settings import by_scale, same

SMALL = CohortSettings(**IMAGES)

ENTRIES = (
    figure_4(
        __name__,
        {"digits": same(CohortSettings(**DIGITS)), "fashion_mnist": by_scale(SMALL, SMALL, CohortSettings())},
        {"digits": "scikit-learn's digits stand in for Fashion-MNIST: name fashion_mnist and its folder"},
        CURVES,
    ),
)
