"""Runs of the personalised recipes, and the random choices they made, that several tests look at."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedtangent._src.engine import Devices, simulate
from fedtangent._src.engine.history import Run
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.aggregate import optax_server
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.algorithms.personalised import PersonalTraining
from fedtangent._src.federated.compose import compose
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import per_client_permutations, uniform_sampling
from fedtangent._src.types import Algorithm, Local, PyTree, Schedule

from . import reference
from .toys import (
    EVERYBODY,
    NUM_CLIENTS,
    SIZES,
    Recording,
    cohorts,
    go,
    models_of,
    owned_rows,
    record,
    recording_local,
    two_layer,
    uneven_data,
)

SEED, RATE, ROUNDS = 3, 0.2, 3
MODEL, DATA = two_layer(), uneven_data()
X, Y, OWNED = np.asarray(DATA.x), np.asarray(DATA.y), owned_rows(DATA)
GLOBAL, OWN = Work(steps=3, batch_size=2), Work(epochs=2, batch_size=3)
TOLERANCE, VISIBLE = 1e-10, 1e-4  # of a right loop; of a loop with one thing wrong
PARTIAL, PERMUTED = uniform_sampling(6, 4), per_client_permutations(6, 2)

recorded = functools.cache(lambda: record(DATA, EVERYBODY, GLOBAL, 8, 4, SEED))


def train(t: int, i: int, params: reference.Params) -> reference.Params:
    return reference.sgd(params, X, Y, recorded().batches(t, i), RATE, "squared_error")


def by_examples(i: int) -> float:
    return SIZES[i]


def selections(schedule: Schedule, k: int, rounds: int = ROUNDS) -> list[list[int]]:
    drawn = cohorts(schedule, SEED, rounds)
    return [drawn.client[t][(drawn.weight[t] > 0) & (drawn.model[t] == k)].tolist() for t in range(rounds)]


def own_of(states: PyTree, k: int, i: int) -> reference.Params:
    return {name: np.asarray(leaf[k, i]) for name, leaf in states.items() if leaf is not None}


@functools.cache
def ran(name: str) -> tuple[Algorithm, Run]:
    common = {"client_learning_rate": RATE, "work": GLOBAL}
    algorithm, rounds = {
        "ditto": lambda: (
            algorithms.ditto(
                MODEL,
                PARTIAL,
                personal_training=PersonalTraining(0.7, personal_learning_rate=0.1, personal_work=OWN),
                **common,
            ),
            ROUNDS,
        ),
        "lg_fed_avg": lambda: (
            algorithms.lg_fed_avg(
                MODEL,
                PERMUTED,
                private="[Wb]",
                averaging=Averaging(weighting="uniform", server_learning_rate=0.7),
                **common,
            ),
            4,
        ),
        "local_only": lambda: (algorithms.local_only(MODEL, PARTIAL, **common), ROUNDS),
        "fed_avg": lambda: (algorithms.fed_avg(MODEL, PARTIAL, **common), ROUNDS),
    }[name]()
    return algorithm, simulate(algorithm, DATA, num_rounds=rounds, seed=SEED, devices=Devices("scan"))


@functools.cache
def start(name: str) -> list[reference.Params]:
    return [{n: np.asarray(v) for n, v in m.items()} for m in models_of_state(ran(name)[0])]


def models_of_state(algorithm: Algorithm) -> list[PyTree]:
    """The initial models, as ``init`` makes them for any algorithm on this schedule and seed."""
    plain = algorithms.fed_avg if algorithm.schedule.num_models == 1 else algorithms.fed_ensemble
    same = plain(MODEL, algorithm.schedule, client_learning_rate=RATE, work=GLOBAL)
    return models_of(same, same.init(SEED, NUM_CLIENTS))


@functools.cache
def personal_batches() -> dict[tuple[int, int], list[np.ndarray]]:
    """The minibatches of Ditto's personal models: those of a key folded once more than the global model's."""
    model, local = recording_local(OWN, len(X), 4)

    def update(key: Any, *args: Any) -> Any:
        return local.update(jax.random.fold_in(key, jnp.uint32(2**31)), *args)

    algorithm = compose("aside", model, Local(local.init, update), optax_server(optax.sgd(1.0)), EVERYBODY)
    coded = DATA._replace(x=jnp.eye(len(X)), y=-jnp.ones((len(X), 4)))
    infos = go(algorithm, coded, "scan", ROUNDS, algorithm.init(SEED, NUM_CLIENTS))[1]
    seen = Recording(infos["share"], infos["cohort"].client, infos)
    return {(t, i): seen.batches(t, i) for t in range(ROUNDS) for i in range(NUM_CLIENTS)}
