"""NTK-FL, fig. 4(b): test accuracy by round on MNIST of label skew, Dirichlet alpha = .5."""

from __future__ import annotations

from fedtangent.experiments.lab.cohort_curves import figure_4
from fedtangent.experiments.lab.cohort_settings import DIGITS, IMAGES, Settings

EXPERIMENT = figure_4(
    "NTK-FL against its baselines by round, MNIST with label skew: accuracy, rounds to FedAvg's, paired seeds",
    "NTK-FL outperforms all baseline FL algorithms and is close to the ideal centralised training (curves only)",
    {
        ("digits", "smoke"): DIGITS,
        ("digits", "paper"): DIGITS,
        ("mnist", "smoke"): IMAGES,
        ("mnist", "paper"): Settings(),
    },
    {"digits": "scikit-learn's digits stand in for MNIST: name mnist and its folder for the paper's"},
)
