"""Centralised training on the cohort's pooled data, and data sharing, against NumPy loops."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedtangent._src.data import sharing
from fedtangent._src.engine import Devices, simulate
from fedtangent._src.engine.clients import engine_for
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.aggregate import stack
from fedtangent._src.federated.algorithms.pooled import pool_server
from fedtangent._src.federated.compose import Parts, compose
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.ntk_fl import send_examples
from fedtangent._src.federated.schedule import all_clients, per_client_permutations, uniform_sampling
from fedtangent._src.losses import squared_error
from fedtangent._src.types import FederatedData, Model, Partition, Schedule

from ..nightly import nightly
from . import reference
from .toys import (
    NUM_CLIENTS,
    SIZES,
    cohorts,
    distance,
    federated,
    fixed,
    models_of,
    owned_rows,
    two_layer,
    uneven_data,
)

SEED, RATE, ROUNDS = 3, 0.2, 3
MODEL, DATA = two_layer(), uneven_data()
X, Y, OWNED = np.asarray(DATA.x), np.asarray(DATA.y), owned_rows(DATA)
TOLERANCE, VISIBLE = 1e-10, 1e-4  # of a right loop; of a loop with one thing wrong
POOLED = Work(epochs=2, batch_size=4)
SCHEDULES = {"sampled": uniform_sampling(6, 4), "two models": per_client_permutations(6, 2)}
MOST_STEPS = 2 * 6


@functools.cache
def batches(name: str) -> list[list[list[np.ndarray]]]:
    """The rows of ``DATA`` in each step of the server, by round and model.

    The weights of a linear model on one-hot inputs, trained from 0 by an optimiser whose step s moves column s only,
    are each row's share in the gradient of each step.
    """

    def update(gradient: Any, step: Any, params: Any = None) -> tuple[Any, Any]:
        return -gradient * (jnp.arange(MOST_STEPS) == step)[None].astype(gradient.dtype), step + 1

    shape = (len(X), MOST_STEPS)
    model = Model("record", lambda key: jnp.zeros(shape), lambda w, x: x @ w, None, MOST_STEPS)
    optimizer = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
    schedule = SCHEDULES[name]
    server, places = pool_server(model, squared_error, optimizer, POOLED), stack(schedule.num_slots)
    algorithm = compose("record", model, send_examples(), server, schedule, Parts(aggregate=places))
    coded = DATA._replace(x=jnp.eye(len(X)), y=-jnp.ones(shape))
    step, state, found = jax.jit(algorithm.step, static_argnums=2), algorithm.init(SEED, NUM_CLIENTS), []
    for _ in range(ROUNDS):
        state, _ = step(state, coded, engine_for(coded, "scan"))
        shares = -np.asarray(state.server)
        found.append([[np.flatnonzero(column) for column in model.T if column.any()] for model in shares])
        state = state._replace(server=jnp.zeros_like(state.server))
    return found


def chosen(schedule: Schedule, t: int, k: int) -> list[int]:
    drawn = cohorts(schedule, SEED, ROUNDS)
    return drawn.client[t][(drawn.weight[t] > 0) & (drawn.model[t] == k)].tolist()


@functools.cache
def ran(name: str, mapping: str = "scan") -> tuple[list[reference.Params], list[reference.Params], Any]:
    algorithm = algorithms.centralised(MODEL, SCHEDULES[name], learning_rate=RATE, work=POOLED)
    begin = models_of(algorithm, algorithm.init(SEED, NUM_CLIENTS))
    run = simulate(algorithm, DATA, num_rounds=ROUNDS, seed=SEED, devices=Devices(mapping))
    return begin, models_of(algorithm, run.state), run


@pytest.mark.parametrize("name", nightly(SCHEDULES, ["two models"]))
def test_every_epoch_goes_once_through_the_pooled_rows(name: str) -> None:
    for t, of_round in enumerate(batches(name)):
        for k, steps in enumerate(of_round):
            pool = np.sort(np.concatenate([OWNED[i] for i in chosen(SCHEDULES[name], t, k)]))
            per_epoch = -(-len(pool) // 4)
            assert len(steps) == 2 * per_epoch
            for epoch in (steps[:per_epoch], steps[per_epoch:]):
                assert np.array_equal(np.sort(np.concatenate(epoch)), pool)
            mixed = [{i for i, own in enumerate(OWNED) if np.isin(rows, own).any()} for rows in steps]
            assert max(map(len, mixed)) > 1  # minibatches mix the clients' rows


@pytest.mark.parametrize("name", nightly(SCHEDULES, ["two models"]))
def test_centralised_equals_the_loop(name: str) -> None:
    """SGD on the pooled minibatches; local training and averaging, or one batch less, would be something else."""
    begin, end, _ = ran(name)
    for k, params in enumerate(begin):
        right, short, averaged = params, params, params
        for t in range(ROUNDS):
            right = reference.sgd(right, X, Y, batches(name)[t][k], RATE, "squared_error")
            short = reference.sgd(short, X, Y, batches(name)[t][k][:-1], RATE, "squared_error")
            mine = chosen(SCHEDULES[name], t, k)
            locally = [reference.sgd(averaged, X, Y, [OWNED[i]] * 2, RATE, "squared_error") for i in mine]
            averaged = reference.mean(locally, [SIZES[i] for i in mine])
        assert distance(end[k], right) < TOLERANCE
        assert min(distance(end[k], short), distance(end[k], averaged)) > VISIBLE


def test_full_batch_steps_weigh_every_example_alike() -> None:
    schedule = all_clients(6)
    algorithm = algorithms.centralised(MODEL, schedule, learning_rate=RATE, work=Work(steps=4, batch_size=None))
    (params,) = models_of(algorithm, algorithm.init(SEED, NUM_CLIENTS))
    run = simulate(algorithm, DATA, num_rounds=2, seed=SEED, devices=Devices("vmap"))
    end = reference.sgd(params, X, Y, [np.arange(len(X))] * 8, RATE, "squared_error")
    assert distance(models_of(algorithm, run.state)[0], end) < TOLERANCE
    assert run.history.rounds["server_steps"].tolist() == [[4], [4]]


def test_the_ledger_charges_the_cohorts_examples_and_nothing_down() -> None:
    _, _, run = ran("sampled")
    examples = sum(SIZES[i] for t in range(ROUNDS) for i in chosen(SCHEDULES["sampled"], t, 0))
    ends = run.history.evaluations[-1]
    assert (ends.uplink_bytes, ends.downlink_bytes) == (examples * 8 * (3 + 2), 0)
    pooled = [sum(SIZES[i] for i in chosen(SCHEDULES["sampled"], t, 0)) for t in range(ROUNDS)]
    assert run.history.rounds["pooled"][:, 0].tolist() == pooled
    labelled = uneven_data(labels=True)
    algorithm = algorithms.centralised(MODEL, all_clients(6), learning_rate=1.0, work=POOLED, loss="cross_entropy")
    assert algorithm.cost(labelled, engine_for(labelled, "scan"))[:3] == (0, 8 * 3 + 4, 0)


def test_clients_without_a_place_in_the_pool_are_reported() -> None:
    algorithm = algorithms.centralised(
        MODEL,
        fixed(6, 1, [(i, 0, 1.0) for i in (4, 0, 5, 2)]),
        learning_rate=RATE,
        work=Work(steps=2, batch_size=None),
        slots_per_model=3,
    )
    (params,) = models_of(algorithm, algorithm.init(SEED, NUM_CLIENTS))
    run = simulate(algorithm, DATA, num_rounds=1, seed=SEED, devices=Devices("scan"))
    rows = np.concatenate([OWNED[i] for i in (4, 0, 5)])
    end = reference.sgd(params, X, Y, [rows] * 2, RATE, "squared_error")
    assert distance(models_of(algorithm, run.state)[0], end) < TOLERANCE
    assert run.history.rounds["dropped"].tolist() == [[1]]


# --- data sharing -----------------------------------------------------------------------------------------------

SHARED = np.array([2, 9, 17])


def shared_data(fraction: float = 1.0) -> FederatedData:
    held = sharing.with_shared(Partition(np.asarray(DATA.indices), np.asarray(DATA.offsets)), SHARED, fraction, seed=1)
    return federated(X, Y, [held.client(i) for i in range(NUM_CLIENTS)])


def test_data_sharing_is_fed_avg_on_own_and_shared_examples() -> None:
    schedule, data = uniform_sampling(6, 4), shared_data()
    algorithm = algorithms.data_sharing(
        MODEL, schedule, shared=SHARED, client_learning_rate=RATE, work=Work(steps=3, batch_size=None)
    )
    (params,) = models_of(algorithm, algorithm.init(SEED, NUM_CLIENTS))
    run = simulate(algorithm, data, num_rounds=ROUNDS, seed=SEED, devices=Devices("scan"))

    def end(owned: list[np.ndarray]) -> reference.Params:
        return reference.fed_avg(
            params,
            [chosen(schedule, t, 0) for t in range(ROUNDS)],
            lambda t, i, w: reference.sgd(w, X, Y, [owned[i]] * 3, RATE, "squared_error"),
            lambda i: len(owned[i]),
            1.0,
        )

    found = models_of(algorithm, run.state)[0]
    assert distance(found, end([np.union1d(own, SHARED) for own in OWNED])) < TOLERANCE
    assert distance(found, end(OWNED)) > VISIBLE
    assert distance(found, end([np.concatenate([own, SHARED]) for own in OWNED])) > VISIBLE  # an own one twice
    once = NUM_CLIENTS * len(SHARED) * 8 * (3 + 2)
    assert (run.history.cost.uplink_once, run.history.cost.downlink_once) == (0, once)
    assert run.history.evaluations[0].downlink_bytes == once


def test_data_sharing_charges_the_fraction_and_goes_around_any_algorithm() -> None:
    data = shared_data(0.67)
    algorithm = algorithms.data_sharing(
        MODEL,
        per_client_permutations(6, 2),
        shared=SHARED,
        fraction=0.67,
        base=algorithms.fed_ensemble,
        client_learning_rate=RATE,
        work=Work(steps=1, batch_size=None),
    )
    assert algorithm.name == "fed_ensemble_data_sharing" and algorithm.schedule.num_models == 2
    assert algorithm.cost(data, engine_for(data, "scan")).downlink_once == NUM_CLIENTS * 2 * 8 * (3 + 2)


def test_data_that_was_not_shared_is_an_error() -> None:
    algorithm = algorithms.data_sharing(
        MODEL, all_clients(6), shared=SHARED, client_learning_rate=RATE, work=Work(steps=1, batch_size=None)
    )
    for data in (DATA, shared_data(0.5)):
        with pytest.raises(
            ValueError, match=r"data: client \d holds \d of the shared examples, must hold 3 .*with_shared"
        ):
            simulate(algorithm, data, num_rounds=1, seed=SEED, devices=Devices("scan"))
    beyond = algorithms.data_sharing(
        MODEL, all_clients(6), shared=[99], client_learning_rate=RATE, work=Work(steps=1, batch_size=None)
    )
    with pytest.raises(ValueError, match="shared: has the index 99, but data has 21 examples"):
        simulate(beyond, DATA, num_rounds=1, seed=SEED, devices=Devices("scan"))


GOOD: dict[str, dict[str, Any]] = {
    "centralised": {"learning_rate": 0.1, "work": Work(steps=1, batch_size=None)},
    "data_sharing": {"shared": [0, 1], "client_learning_rate": 0.1, "work": Work(steps=1, batch_size=None)},
}


@pytest.mark.parametrize(
    ("recipe", "changed", "named"),
    [
        ("centralised", {"learning_rate": 0.0}, r"learning_rate: got 0\.0"),
        ("centralised", {"work": Work()}, "exactly one of steps and epochs"),
        ("centralised", {"loss": "hinge"}, "loss: got 'hinge'"),
        ("centralised", {"slots_per_model": 7}, "slots_per_model: got 7, must be a whole number from 1 to 6"),
        ("centralised", {"slots_per_model": 0}, "slots_per_model: got 0"),
        ("data_sharing", {"shared": []}, r"shared: got shape .*, must be whole numbers \[n\]"),
        ("data_sharing", {"shared": [1, 1]}, "shared: got .*, must be indices of at least 0, each once"),
        ("data_sharing", {"shared": [-1]}, "shared: got .*, must be indices of at least 0"),
        ("data_sharing", {"shared": [0.5]}, "shared: got shape .*float64, must be whole numbers"),
        ("data_sharing", {"fraction": 0.0}, "fraction: got 0.0, must be above 0 and at most 1"),
        ("data_sharing", {"fraction": 1.5}, "fraction: got 1.5, must be above 0 and at most 1"),
        ("data_sharing", {"client_learning_rate": -1.0}, "client_learning_rate"),
    ],
)
def test_bad_arguments(recipe: str, changed: dict[str, Any], named: str) -> None:
    arguments = GOOD[recipe] | changed
    with pytest.raises(ValueError, match=named):
        getattr(algorithms, recipe)(MODEL, all_clients(6), **arguments)
