"""The options of federated training that the flow is checked with, on both sides: one entry of ``OPTIONS`` each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedtangent.federated import algorithms, graph, schedule
from fedtangent.types import Algorithm, Schedule

NUM_CLIENTS = 5
NUM_STRATA = 2
DECAY = 0.2
SHRINKING = (1.0, 0.5, 0.25, 0.125)  # factors of the local steps' sizes


class Option(NamedTuple):
    """One option, on both sides; a new one is a new entry of ``OPTIONS``."""

    name: str
    schedule: Callable[[], Schedule]
    recipe: Callable[..., Algorithm] = algorithms.fed_avg
    simulated: dict[str, Any] = {}  # further options of the recipe  # noqa: RUF012
    predicted: dict[str, Any] = {}  # further fields of the flow's Rule  # noqa: RUF012
    ignored: dict[str, Any] | None = None  # those of a theory that ignores the option; None: it ignores the schedule
    uniform: bool = False  # clients weigh the same rather than by examples
    lazy: bool = True  # networks of growing width approach it


def every_client(num_models: int = 1) -> Schedule:
    """Every client trains every model in every round."""
    return schedule.all_clients(NUM_CLIENTS, num_models)


def shrinking(rate: float | jax.Array) -> optax.GradientTransformation:
    """Local gradient descent with steps of ``SHRINKING`` times the rate."""
    return optax.chain(optax.sgd(rate), optax.scale_by_schedule(lambda step: jnp.asarray(SHRINKING)[step]))


def decaying(rate: float | jax.Array) -> optax.GradientTransformation:
    """Local gradient descent with weight decay."""
    return optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(rate))


OPTIONS = (
    Option("every client, every round", every_client, ignored={"local_steps": 1}),
    Option("2 of 5 clients drawn", partial(schedule.uniform_sampling, NUM_CLIENTS, 2)),
    Option("permutations, K = 3", partial(schedule.per_client_permutations, NUM_CLIENTS, 3)),
    Option("strata, 1 of each, K = 2", partial(schedule.strata, NUM_CLIENTS, 2, NUM_STRATA, 1)),
    Option("random models, K = 3", partial(schedule.random_models, NUM_CLIENTS, 3)),
    Option("random walk on a ring, K = 2", lambda: schedule.random_walk(graph.ring(NUM_CLIENTS), 2)),
    Option(
        "equal weights",
        partial(schedule.uniform_sampling, NUM_CLIENTS, 3),
        simulated={"weighting": "uniform"},
        ignored={"uniform": False},
        uniform=True,
    ),
    Option(
        "server rate 0.7",
        every_client,
        simulated={"server_learning_rate": 0.7},
        predicted={"server_learning_rate": 0.7},
        ignored={"server_learning_rate": 1.0},
    ),
    Option(
        "FedProx, 2 of 5 clients",
        partial(schedule.uniform_sampling, NUM_CLIENTS, 2),
        algorithms.fed_prox,
        {"mu": 0.5},
        {"mu": 0.5},
        {"mu": 0.0},
    ),
    Option(
        "FedDyn, 3 of 5 clients",
        partial(schedule.uniform_sampling, NUM_CLIENTS, 3),
        algorithms.fed_dyn,
        {"mu": 0.5},
        {"algorithm": "fed_dyn", "mu": 0.5},
        {"algorithm": "fed_avg", "mu": 0.0},
        uniform=True,
    ),
    Option(
        "SCAFFOLD, permutations, K = 2",
        partial(schedule.per_client_permutations, NUM_CLIENTS, 2),
        algorithms.scaffold,
        {},
        {"algorithm": "scaffold"},
        {"algorithm": "fed_avg"},
        uniform=True,
    ),
    Option(
        "FedAvgM, 2 of 5 clients",
        partial(schedule.uniform_sampling, NUM_CLIENTS, 2),
        algorithms.fed_avg_m,
        {"momentum": 0.5, "server_learning_rate": 0.5},
        {"server_momentum": 0.5, "server_learning_rate": 0.5},
        {"server_momentum": 0.0},
    ),
    Option(
        "Nesterov momentum of the server",
        every_client,
        algorithms.fed_avg_m,
        {"momentum": 0.5, "nesterov": True, "server_learning_rate": 0.5},
        {"server_momentum": 0.5, "nesterov": True, "server_learning_rate": 0.5},
        {"nesterov": False, "server_momentum": 0.0},  # the look ahead alone is less than a network's own gap
    ),
    Option(
        "local steps that shrink",
        every_client,
        simulated={"client_optimizer": shrinking},
        predicted={"step_weights": SHRINKING},
        ignored={"step_weights": None},
    ),
    Option(
        "weight decay",
        every_client,
        simulated={"client_optimizer": decaying},
        predicted={"weight_decay": DECAY},
        ignored={"weight_decay": 0.0},
        lazy=False,  # the weights, and with them the tangent kernel, shrink alike at every width
    ),
)
