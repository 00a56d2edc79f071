"""NTK-FL, fig. 4(c): test accuracy by round on Fashion-MNIST of label skew, Dirichlet alpha = .5.

With ``--set alpha=0.1`` it is the comparison at the heterogeneity of Table 1 and Fig. 6.
"""

from __future__ import annotations

from fedtangent.experiments.lab.cohort_curves import figure_4
from fedtangent.experiments.lab.cohort_settings import DIGITS, IMAGES, Settings

EXPERIMENT = figure_4(
    "NTK-FL against its baselines by round, Fashion-MNIST with label skew: accuracy, rounds to FedAvg's, paired seeds",
    "NTK-FL outperforms all baseline FL algorithms and is close to the ideal centralised training (curves only)",
    {
        ("digits", "smoke"): DIGITS,
        ("digits", "paper"): DIGITS,
        ("fashion_mnist", "smoke"): IMAGES,
        ("fashion_mnist", "paper"): Settings(),
    },
    {"digits": "scikit-learn's digits stand in for Fashion-MNIST: name fashion_mnist and its folder for the paper's"},
)
