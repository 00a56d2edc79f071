"""NTK-FL, fig. 7: test accuracy by round on CIFAR-10 of label skew, Dirichlet alpha = .1."""

from __future__ import annotations

from dataclasses import replace

from fedtangent.experiments.lab.cohort_curves import figure_4
from fedtangent.experiments.lab.cohort_settings import DIGITS, IMAGES, Settings

EXPERIMENT = figure_4(
    "NTK-FL against its baselines by round, CIFAR-10 with label skew (alpha .1): accuracy, rounds to FedAvg's",
    "NTK-FL outperforms other FL algorithms and is close to the centralised training (curves only)",
    {
        ("digits", "smoke"): replace(DIGITS, alpha=0.1),
        ("digits", "paper"): replace(DIGITS, alpha=0.1),
        ("cifar10", "smoke"): replace(IMAGES, alpha=0.1, num_train=2400, num_validation=400, num_test=0),
        ("cifar10", "paper"): Settings(alpha=0.1),
    },
    {
        "digits": "scikit-learn's digits stand in for CIFAR-10: name cifar10 and its folder for the paper's",
        "cifar10": "as much of CIFAR-10 as the data folder has; the paper trains on 50,000 images",
    },
)
