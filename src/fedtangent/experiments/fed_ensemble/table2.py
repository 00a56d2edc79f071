"""Table II of Fed-ensemble: accuracy of FedAvg, FedProx, FedBE and Fed-ensemble, i.i.d. and two classes a client.

The papers train a two-layer CNN on MNIST and ResNet-18 on CIFAR-10, of 100 clients, ten local epochs in batches of 16,
K = 5. All methods send the same bytes: every client trains one model in every round.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fedtangent.experiments.lab import league
from fedtangent.experiments.lab.league import LeagueSettings
from fedtangent.experiments.lab.results import Outcome
from fedtangent.experiments.lab.runner import Study, by_scale, experiment
from fedtangent.experiments.lab.trials import IID

METHODS = ("fed_avg", "fed_prox", "fed_be", "fed_be_no_distillation", "fed_ensemble")
PUBLISHED = {  # FE-2024, Table II, percent: by data set, of (entrant, classes a client)
    "mnist": {
        ("fed_avg", IID): 95.08, ("fed_prox", IID): 95.76, ("fed_be", IID): 95.21, ("fed_ensemble-5", IID): 97.75,
        ("fed_avg", 2): 90.17, ("fed_prox", 2): 90.75, ("fed_ensemble-5", 2): 95.44,
    },
    "cifar10": {
        ("fed_avg", IID): 86.43, ("fed_prox", IID): 86.77, ("fed_be", IID): 83.13,
        ("fed_be_no_distillation", IID): 86.78, ("fed_ensemble-5", IID): 87.99,
        ("fed_avg", 2): 66.11, ("fed_prox", 2): 66.62, ("fed_ensemble-5", 2): 71.18,
    },
}  # fmt: skip


def run(study: Study) -> Outcome:
    """Every method of the table."""
    return league.outcome(study, "Table II", PUBLISHED, partial(league.ahead, of="fed_ensemble"))


SMOKE: dict[str, Any] = {
    "num_clients": 10, "num_rounds": 6, "local_epochs": 2, "model": "mlp", "width": 32, "tuning_rounds": 4,
    "learning_rates": (0.1, 0.3), "weight_decay": 0.0, "num_train": 300, "num_validation": 200, "num_test": 200,
    "server_examples": 50, "distillation_epochs": 300,
}  # fmt: skip
DIGITS: dict[str, Any] = {
    "num_clients": 50, "num_rounds": 60, "local_epochs": 5, "model": "mlp", "tuning_rounds": 20,
    "learning_rates": (0.03, 0.1, 0.3, 1.0), "weight_decay": 0.0, "num_validation": 288, "server_examples": 100,
    "distillation_epochs": 300,
}  # fmt: skip
IMAGES: dict[str, Any] = {
    "num_clients": 50, "num_rounds": 40, "local_epochs": 2, "tuning_rounds": 10, "learning_rates": (0.01, 0.03, 0.1),
    "num_train": 5000, "num_validation": 1000, "num_test": 2000, "server_examples": 500,
    "distillation_epochs": 80,
}  # fmt: skip
PAPER = LeagueSettings(methods=METHODS)
IMAGES_SCALES = by_scale(replace(PAPER, **SMOKE), replace(PAPER, **IMAGES), PAPER)
SCALES = {
    "digits": by_scale(replace(PAPER, **SMOKE), replace(PAPER, **DIGITS)),
    "mnist": IMAGES_SCALES,
    "fashion_mnist": IMAGES_SCALES,
    "cifar10": IMAGES_SCALES,
}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), check=league.check, least_seeds=2),)
