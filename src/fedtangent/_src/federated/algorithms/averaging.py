"""Algorithms that average locally trained models: FedAvg, FedSGD, and Fed-ensemble around any other algorithm."""

from __future__ import annotations

from typing import Any

from fedtangent._src.federated.algorithms.common import DEFAULT_WORK, Averaging, train_and_average, trained
from fedtangent._src.federated.algorithms.entry import recipe
from fedtangent._src.federated.local import Work
from fedtangent._src.losses import Loss
from fedtangent._src.optimizers import Optimizer, Rate
from fedtangent._src.types import Algorithm, Model, Recipe, Schedule, wrapped


@recipe(papers=("mcmahan2017",), parts="local SGD; mean; SGD", inside=True)
def fed_avg(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds FedAvg: clients run local SGD from the broadcast model, and the server takes the weighted mean.

    Source: McMahan et al., 2017, algorithm 1.

    Args:
        averaging: Weights, server step and channel. A ``server_learning_rate`` other than 1 is the fraction of the way
            to the mean that the server moves.

    Example, 20 of 100 clients a round, and each passes once over its data:

        >>> import fedtangent as ft
        >>> model = ft.models.mlp(784, 10, (100,), parameterization="standard")
        >>> schedule = ft.schedules.uniform_sampling(100, clients_per_round=20)
        >>> work = ft.Work(epochs=1, batch_size=10)
        >>> algorithm = ft.fed_avg(model, schedule, client_learning_rate=0.1, work=work)
        >>> algorithm.name, ft.cite(algorithm).splitlines()[0]
        ('fed_avg', '@inproceedings{mcmahan2017,')
    """
    training = trained(model, client_learning_rate, client_optimizer, work, loss)
    return train_and_average("fed_avg", training, schedule, averaging, rule={})


@recipe(papers=("mcmahan2017",), parts="one gradient; mean; SGD")
def fed_sgd(
    model: Model,
    schedule: Schedule,
    learning_rate: Rate | None = None,
    loss: str | Loss | None = None,
    optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds FedSGD: clients send full-batch gradients, the server steps by the mean (McMahan et al., 2017, section 2).

    It is FedAvg with one full-batch local step.

    Args:
        learning_rate: Step size of the mean gradient, a number or a schedule of the round.
        optimizer: An optax optimiser of the clients, in place of a rate.
    """
    training = trained(model, learning_rate, optimizer, Work(steps=1, batch_size=None), loss, "")
    return train_and_average("fed_sgd", training, schedule, averaging, rule={})


def check_base(base: object) -> None:
    """Raises ``ValueError`` unless ``base`` is a recipe (a function, not the name of one)."""
    if not callable(base):
        raise ValueError(f"base: got {base!r}, must be a recipe such as fedtangent.fed_avg")


@recipe(papers=("shi2024", "shi2021"), parts="as --base, for K models in permutations", schedule="permutations")
def fed_ensemble(model: Model, schedule: Schedule, *, base: Recipe = fed_avg, **options: Any) -> Algorithm:
    """Builds Fed-ensemble: K models, trained by ``base`` under a schedule that gives each client one model a round.

    The schedule decides which version it is: ``schedules.per_client_permutations`` gives algorithm 1 of the paper
    FE-2024, and ``schedules.strata`` algorithm 1 of the paper FE-2021. With ``base=fed_dyn`` it is FedDyn-ensemble
    (FE-2024, section V-D). The prediction is the mean of the models' predictions (FE-2024, eq. 2).

    Args:
        schedule: Which client trains which of the K models in which round.

    Raises:
        ValueError: ``base`` is no recipe, or raises it for the other arguments.
    """
    check_base(base)
    algorithm = base(model, schedule, **options)
    return wrapped(algorithm, "fed_ensemble" if base is fed_avg else f"{algorithm.name}_ensemble")
