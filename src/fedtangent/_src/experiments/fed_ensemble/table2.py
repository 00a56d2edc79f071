"""Table II of Fed-ensemble: accuracy of FedAvg, FedProx, FedBE and Fed-ensemble, i.i.d. and two classes a client.

The papers train a two-layer CNN on MNIST and ResNet-18 on CIFAR-10, of 100 clients, ten local epochs in batches of 16,
K = 5; ResNet-34 on CIFAR-100 and an LSTM on Shakespeare's characters, of ten clients, i.i.d.; MobileNetV2 on OpenImage
by uploader (``--set model=shufflenet_v2`` is its other row), 130 asked and the first 100 kept. All methods send the
same bytes: every client that takes part trains one model in a round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fedtangent._src.experiments.lab import league, league_report
from fedtangent._src.experiments.lab.league import LeagueSettings
from fedtangent._src.experiments.lab.results import Outcome
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment
from fedtangent._src.experiments.lab.trials import IID, USERS

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
    "cifar100": {("fed_avg", IID): 56.25, ("fed_prox", IID): 55.91, ("fed_be", IID): 49.24,
                 ("fed_ensemble-5", IID): 58.09},
    "shakespeare": {("fed_avg", IID): 60.05, ("fed_prox", IID): 60.18, ("fed_be_no_distillation", IID): 61.52,
                    ("fed_ensemble-5", IID): 62.49},
}  # fmt: skip
OF_OPENIMAGE = {  # by network
    "mobilenet_v2": {("fed_avg", USERS): 51.85, ("fed_prox", USERS): 52.93, ("fed_ensemble-5", USERS): 53.92},
    "shufflenet_v2": {("fed_avg", USERS): 53.98, ("fed_prox", USERS): 54.42, ("fed_ensemble-5", USERS): 55.75},
}


def run(study: Study) -> Outcome:
    """Trains with every method of the table."""
    published = {**PUBLISHED, "openimage": OF_OPENIMAGE.get(study.settings.model, {})}
    return league_report.outcome(study, "Table II", published, partial(league_report.ahead, of="fed_ensemble"))


SMOKE: dict[str, Any] = {
    "num_clients": 10, "num_rounds": 6, "local_epochs": 2, "model": "mlp", "width": 32, "tuning_rounds": 4,
    "learning_rates": (0.1, 0.3), "weight_decay": 0.0, "num_train": 300, "num_validation": 200, "num_test": 200,
    "server_examples": 50, "distillation_epochs": 300,
}  # fmt: skip
DIGITS: dict[str, Any] = {
    "num_clients": 50, "num_rounds": 60, "local_epochs": 5, "model": "mlp", "width": 64, "tuning_rounds": 20,
    "learning_rates": (0.03, 0.1, 0.3, 1.0), "weight_decay": 0.0, "num_validation": 288, "server_examples": 100,
    "distillation_epochs": 300,
}  # fmt: skip
IMAGES: dict[str, Any] = {
    "num_clients": 50, "num_rounds": 40, "local_epochs": 2, "tuning_rounds": 10, "learning_rates": (0.01, 0.03, 0.1),
    "width": 8, "num_train": 5000, "num_validation": 1000, "num_test": 2000, "server_examples": 500,
    "distillation_epochs": 80,
}  # fmt: skip
# Settings of the paper's CIFAR-10, CIFAR-100, Shakespeare and OpenImage that are not those of its MNIST. Those of the
# two last it does not give: the number of rounds and, of Shakespeare, of local epochs.
CIFAR10: dict[str, Any] = {"model": "resnet18", "learning_rates": (0.001, 0.003, 0.005, 0.01, 0.03)}
CIFAR100: dict[str, Any] = {"model": "resnet34", "learning_rates": (0.003, 0.01, 0.03), "num_clients": 10,
                            "classes_per_client": (IID,)}  # fmt: skip
TEXT: dict[str, Any] = {
    "methods": ("fed_avg", "fed_prox", "fed_be_no_distillation", "fed_ensemble"), "num_clients": 10,
    "classes_per_client": (IID,), "num_rounds": 60, "local_epochs": 5, "batch_size": 128, "model": "lstm",
    "optimizer": "adam", "learning_rates": (0.0003, 0.001, 0.003), "weight_decay": 0.0,
}  # fmt: skip
UPLOADERS: dict[str, Any] = {
    "methods": ("fed_avg", "fed_prox", "fed_ensemble"), "num_clients": 0, "classes_per_client": (USERS,),
    "clients_per_round": 130, "keep_first": 100, "model": "mobilenet_v2",
}  # fmt: skip
# What a text's smaller scales change.
TEXT_SMOKE: dict[str, Any] = {
    "num_rounds": 4, "tuning_rounds": 3, "local_epochs": 1, "batch_size": 16, "width": 8, "num_train": 200,
    "num_validation": 50, "num_test": 100, "learning_rates": (0.003, 0.01),
}  # fmt: skip
TEXT_DEFAULT: dict[str, Any] = {
    "num_rounds": 20, "tuning_rounds": 6, "local_epochs": 1, "batch_size": 32, "width": 64, "num_train": 6000,
    "num_validation": 500, "num_test": 1000, "learning_rates": (0.003, 0.01),
}  # fmt: skip
FEW_UPLOADERS: dict[str, Any] = {"num_clients": 0, "clients_per_round": 10, "keep_first": 8}


def image_scales(
    paper: LeagueSettings, smoke: Mapping[str, Any] = {}, default: Mapping[str, Any] = {}
) -> dict[str, dict[str, LeagueSettings]]:
    """Returns settings by data set and scale of a table of image data sets.

    Args:
        paper: The paper's settings for MNIST.
        smoke: Changes of SMOKE.
        default: Changes of DIGITS and IMAGES.
    """
    small, medium = replace(paper, **{**SMOKE, **smoke}), replace(paper, **{**IMAGES, **default})
    return {
        "digits": by_scale(small, replace(paper, **{**DIGITS, **default})),
        "mnist": by_scale(small, medium, paper),
        "fashion_mnist": by_scale(small, medium, paper),
        "cifar10": by_scale(small, medium, replace(paper, **CIFAR10)),
    }


PAPER = LeagueSettings(methods=METHODS)
OF_TEXT, OF_UPLOADERS = LeagueSettings(**TEXT), LeagueSettings(**UPLOADERS)
SCALES = {
    **image_scales(PAPER),
    "cifar100": by_scale(
        replace(PAPER, **SMOKE, classes_per_client=(IID,)),
        replace(PAPER, **{**IMAGES, "num_clients": 10}, classes_per_client=(IID,)),
        replace(PAPER, **CIFAR100),
    ),
    "shakespeare": by_scale(replace(OF_TEXT, **TEXT_SMOKE), replace(OF_TEXT, **TEXT_DEFAULT), OF_TEXT),
    "openimage": by_scale(
        replace(OF_UPLOADERS, **{**SMOKE, **FEW_UPLOADERS}),
        replace(OF_UPLOADERS, **{**IMAGES, "num_clients": 0}, model="cnn"),
        OF_UPLOADERS,
    ),
}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), check=league.check, least_seeds=2),)
