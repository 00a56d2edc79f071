"""NTK-FL, fig. 4(a): test accuracy by round on FEMNIST's digits, where clients are writers: feature skew."""

from __future__ import annotations

from dataclasses import replace

from fedtangent.experiments.lab.cohort_curves import figure_4
from fedtangent.experiments.lab.cohort_settings import DIGITS, IMAGES, Settings

# The writers of digits in LEAF's sample of FEMNIST, of which the paper has 300; of another sample: --set num_clients=
WRITERS = Settings(partition="writers", num_clients=102, num_validation=1000)

EXPERIMENT = figure_4(
    "NTK-FL against its baselines by round, digits by writer (feature skew): accuracy, rounds to FedAvg's",
    "NTK-FL outperforms all baseline FL algorithms and is close to the ideal centralised training (curves only)",
    {
        ("digits", "smoke"): replace(DIGITS, partition="shifted"),
        ("digits", "paper"): replace(DIGITS, partition="shifted"),
        ("femnist_digits", "smoke"): replace(
            IMAGES, partition="writers", num_clients=WRITERS.num_clients, clients_per_round=20, num_train=0, num_test=0
        ),
        ("femnist_digits", "paper"): WRITERS,
    },
    {
        "digits": "no writers are known for scikit-learn's digits: each client distorts its images in its own way "
        "(contrast, brightness, a shift by a pixel), in the test set clients are drawn at random",
        "femnist_digits": "the writers of the data folder's sample of FEMNIST, fewer than the paper's 300",
    },
)
