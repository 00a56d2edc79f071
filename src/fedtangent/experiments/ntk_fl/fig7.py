"""NTK-FL, fig. 7: test accuracy by round on CIFAR-10 of label skew, Dirichlet alpha = .1."""

from __future__ import annotations

from fedtangent.experiments.lab.cohort import DIGITS, IMAGES, CohortSettings
from fedtangent.experiments.lab.cohort_report import figure_4
from fedtangent.experiments.lab.settings import by_scale, same

SMALL = CohortSettings(**{**IMAGES, "num_train": 2400, "num_validation": 400, "num_test": 0}, alpha=0.1)

ENTRIES = (
    figure_4(
        __name__,
        {
            "digits": same(CohortSettings(**DIGITS, alpha=0.1)),
            "cifar10": by_scale(SMALL, SMALL, CohortSettings(alpha=0.1)),
        },
        {
            "digits": "scikit-learn's digits stand in for CIFAR-10: name cifar10 and its folder for the paper's",
            "cifar10": "as much of CIFAR-10 as the data folder has; the paper trains on 50,000 images",
        },
        "NTK-FL outperforms other FL algorithms and is close to the centralised training (curves only)",
    ),
)
