"""Averages of locally trained models: FedAvg, FedSGD, and Fed-ensemble around any algorithm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Unpack

from fedtangent.federated.algorithms.common import Options, train_and_average
from fedtangent.federated.algorithms.entry import (
    TRAINED,
    Around,
    Laws,
    Mean,
    Sending,
    ServerStep,
    Stepping,
    entry_of,
    plain,
)
from fedtangent.federated.local import Work
from fedtangent.federated.rates import Rate
from fedtangent.types import Algorithm, Model, Schedule, wrapped


def fed_avg(
    model: Model, schedule: Schedule, *, client_learning_rate: Rate, work: Work, **options: Unpack[Options]
) -> Algorithm:
    """FedAvg (McMahan et al., 2017, algorithm 1): local SGD from the broadcast model, weighted mean of the models.

    With ``server_learning_rate`` other than 1 the server moves that fraction of the way to the mean. Rates may be
    schedules of the round (``federated.rates``). Further options: ``algorithms.common.Options``.

    Example, 20 of 100 clients a round, each of which passes once over its data:

        >>> import fedtangent as ft
        >>> model = ft.models.mlp(784, 10, (100,), parameterization="standard")
        >>> some = ft.federated.schedule.uniform_sampling(100, clients_per_round=20)
        >>> work = ft.federated.local.Work(epochs=1, batch_size=10)
        >>> algorithm = ft.federated.algorithms.fed_avg(model, some, client_learning_rate=0.1, work=work)
        >>> algorithm.name, ft.cite(algorithm).splitlines()[0]
        ('fed_avg', '@inproceedings{mcmahan2017,')
    """
    return train_and_average("fed_avg", model, schedule, client_learning_rate, work, options)


def fed_sgd(model: Model, schedule: Schedule, *, learning_rate: Rate, **options: Unpack[Options]) -> Algorithm:
    """FedSGD (McMahan et al., 2017, section 2): each client sends one full-batch gradient, the server steps.

    It is FedAvg with one local step; ``learning_rate`` is the step size of the mean gradient.
    """
    return train_and_average("fed_sgd", model, schedule, learning_rate, Work(steps=1), options)


def check_base(base: Any) -> None:
    """Raise ``ValueError`` unless ``base`` is a recipe, that is a function and not its name."""
    if not callable(base):
        raise ValueError(f"base: got {base!r}, must be a recipe such as algorithms.fed_avg")


def fed_ensemble(
    model: Model, schedule: Schedule, *, base: Callable[..., Algorithm] = fed_avg, **options: Any
) -> Algorithm:
    """Fed-ensemble: K models under a schedule that gives each client one model a round, around any algorithm.

    FE-2024, algorithm 1 with ``schedule.per_client_permutations``; FE-2021, algorithm 1 with ``schedule.strata``.
    Prediction is the mean of the models (eq. 2). It is ``base`` with another schedule: K = 1 is ``base`` exactly.
    ``options`` are those of ``base``; FedDyn-ensemble (FE-2024, section V-D) is ``base=fed_dyn``.
    """
    check_base(base)
    algorithm = base(model, schedule, **options)
    return wrapped(algorithm, "fed_ensemble" if base is fed_avg else f"{algorithm.name}_ensemble")


@dataclasses.dataclass(frozen=True)
class FedSgdOptions(Sending, ServerStep, Mean, Stepping):
    """Options of FedSGD, which has no local work."""


ENTRIES = (
    entry_of(
        fed_avg,
        "local SGD, weighted mean of the clients' models (McMahan et al., 2017)",
        papers=("mcmahan2017",),
        parts="local SGD; mean; SGD",
        inside=True,
        rule=plain,
    ),
    entry_of(
        fed_sgd,
        "one full-batch gradient of each client (McMahan et al., 2017)",
        FedSgdOptions,
        renamed={"client_learning_rate": "learning_rate"},
        papers=("mcmahan2017",),
        parts="one gradient; mean; SGD",
        rule=plain,
        laws=Laws({"learning_rate": 0.2}),
    ),
    entry_of(
        fed_ensemble,
        "K models, each client trains one a round, around --base (Fed-ensemble, 2021 and 2024)",
        Around,
        papers=("shi2024", "shi2021"),
        parts="those of --base, K models, permutations",
        schedule="permutations",
        laws=Laws(
            {**TRAINED, "work": Work(steps=4, batch_size=4), "server_learning_rate": 0.8, "weighting": "uniform"}
        ),
    ),
)
