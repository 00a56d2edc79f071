"""What the NumPy loops of the corrected and adaptive averages are fed with: cohorts, batches and models of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedtangent._src.federated import algorithms
from fedtangent._src.federated.local import Work
from fedtangent._src.types import Algorithm, FederatedData, Model, Schedule

from . import reference
from .reference_corrected import Clients
from .toys import (
    EVERYBODY,
    NUM_CLIENTS,
    SIZES,
    arguments_of,
    cohorts,
    go,
    models_of,
    owned_rows,
    record,
    two_layer,
    uneven_data,
)

SEED = 3
MODEL = two_layer()
TOLERANCE, VISIBLE = 1e-10, 1e-4  # of a right loop; of a loop with one thing wrong

Loop = Callable[..., reference.Params]  # (model, selections, clients, **how) -> model


class Case(NamedTuple):
    """A recipe with its options, the loop with the same ones, and the mistakes that must show."""

    recipe: Callable[..., Algorithm]
    options: dict[str, Any]
    loop: Loop
    how: dict[str, Any]
    schedule: Schedule
    rounds: int
    work: Work
    rate: Any = 0.2  # the recipe's client rate, and the loop's
    rate_at: Callable[[int], float] = lambda t: 0.2
    loss: str = "squared_error"
    momentum: float = 0.0
    wrong: tuple[str, ...] = ()


def by_examples(i: int) -> float:
    """McMahan et al.'s weight of a client."""
    return SIZES[i]


def alike(i: int) -> float:
    """A plain mean."""
    return 1.0


def build(case: Case, model: Model = MODEL) -> Algorithm:
    """The algorithm of a case; an ensemble where its schedule has several models."""
    arguments = {"client_learning_rate": case.rate, "work": case.work, "loss": case.loss, **case.options}
    arguments = arguments_of(case.recipe, arguments)
    if case.schedule.num_models > 1:
        return algorithms.fed_ensemble(model, case.schedule, base=case.recipe, **arguments)
    return case.recipe(model, case.schedule, **arguments)


def simulated(
    case: Case, mapping: str = "scan", algorithm: Algorithm | None = None
) -> tuple[list[reference.Params], list[reference.Params]]:
    """The models before and after a run of the engine; runs of one ``algorithm`` share a program."""
    algorithm = build(case) if algorithm is None else algorithm
    start = algorithm.init(SEED, NUM_CLIENTS)
    data = uneven_data(labels=case.loss == "cross_entropy")
    end, _ = go(algorithm, data, mapping, case.rounds, start)
    return models_of(algorithm, start), models_of(algorithm, end)


def stepped(algorithm: Algorithm, data: FederatedData, rounds: int, mapping: str = "scan", seed: int = SEED) -> Any:
    """The state after ``rounds`` rounds, and each round's info."""
    state, infos = go(algorithm, data, mapping, rounds, algorithm.init(seed, data.num_clients))
    return state, [jax.tree.map(lambda leaf, t=t: leaf[t], infos) for t in range(rounds)]


@functools.cache
def batches(work: Work, rounds: int) -> dict[tuple[int, int], list[np.ndarray]]:
    """The rows of each local step of (round, client): full batches, or the minibatches that the engine drew."""
    data = uneven_data()
    if work.batch_size is None:
        steps = work.steps or work.epochs or 0
        return {(t, i): [rows] * steps for t in range(rounds) for i, rows in enumerate(owned_rows(data))}
    seen = record(data, EVERYBODY, work, 8, rounds, SEED)
    return {(t, i): seen.batches(t, i) for t in range(rounds) for i in range(NUM_CLIENTS)}


def replayed(case: Case, start: list[reference.Params], wrong: str = "") -> list[reference.Params]:
    """The models after the NumPy loop, each model on its own, with one thing wrong if asked."""
    data, cohort = uneven_data(labels=case.loss == "cross_entropy"), cohorts(case.schedule, SEED, case.rounds)
    clients = Clients(
        np.asarray(data.x), np.asarray(data.y), batches(case.work, case.rounds), case.rate_at, case.loss, case.momentum
    )
    ends = []
    for k, model in enumerate(start):
        mine = (cohort.weight > 0) & (cohort.model == k)
        selections = [cohort.client[t][mine[t]].tolist() for t in range(case.rounds)]
        how = {**case.how, "wrong": wrong} if wrong else case.how
        ends.append(case.loop(model, selections, clients, **how))
    return ends
