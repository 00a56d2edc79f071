"""DP-FedAvg against a NumPy loop written from the paper, its noise, and rounds in which nobody takes part."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.engine.clients import engine_for
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.faults import dropout
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import poisson_sampling, uniform_sampling
from fedtangent._src.federated.wire.channel import qsgd
from fedtangent._src.streams import keys
from fedtangent._src.types import Algorithm, PyTree, Schedule

from ..nightly import nightly
from . import reference
from . import reference_channel as loops
from .toys import (
    NUM_CLIENTS,
    arguments_of,
    cohorts,
    distance,
    fixed,
    go,
    leaves,
    models_of,
    owned_rows,
    two_layer,
    uneven_data,
)

SEED, RATE, STEPS, ROUNDS = 3, 0.2, 4, 2
CLIP, NOISE, SERVER_RATE = 0.3, 0.4, 0.8
TOLERANCE, VISIBLE = 1e-10, 1e-4
SCHEDULES = {
    "fixed": (uniform_sampling(6, 4), None, 4.0),
    "poisson": (poisson_sampling(6, 0.5), 3.0, 3.0),
    "dropout": (dropout(uniform_sampling(6, 5), 0.4), None, 5.0),
}


def private(schedule: Schedule, **changed: Any) -> Algorithm:
    options = {
        "client_learning_rate": RATE,
        "work": Work(steps=STEPS, batch_size=None),
        "clip_norm": CLIP,
        "noise_multiplier": NOISE,
    }
    return algorithms.dp_fed_avg(two_layer(), schedule, **arguments_of(algorithms.dp_fed_avg, options | changed))


@functools.cache
def simulated(name: str, mapping: str = "scan") -> tuple[reference.Params, reference.Params]:
    schedule, expected, _ = SCHEDULES[name]
    algorithm = private(schedule, expected_clients=expected, server_learning_rate=SERVER_RATE)
    (start,) = models_of(algorithm, algorithm.init(SEED, NUM_CLIENTS))
    state, _ = go(algorithm, uneven_data(), mapping, ROUNDS, algorithm.init(SEED, NUM_CLIENTS))
    return start, models_of(algorithm, state)[0]


def noise(t: int) -> reference.Params:
    """The standard normal numbers of round t, leaf by leaf."""
    stream = jax.random.fold_in(jax.random.fold_in(keys(SEED).train, t), jnp.uint32(2**31))
    key = jax.random.split(stream, 1)[0]
    shapes = {"V": (4, 2), "W": (3, 4), "b": (1, 4)}
    return {
        name: np.asarray(jax.random.normal(jax.random.fold_in(key, j), shapes[name], jnp.float64))
        for j, name in enumerate(loops.NAMES)
    }


def replayed(name: str, fault: str = "none") -> reference.Params:
    data = uneven_data()
    x, y = np.asarray(data.x), np.asarray(data.y)
    schedule, _, m = SCHEDULES[name]

    def train(t: int, i: int, params: reference.Params) -> reference.Params:
        return reference.sgd(params, x, y, [owned_rows(data)[i]] * STEPS, RATE, "squared_error")

    cohort = cohorts(schedule, SEED, ROUNDS)
    taking_part = [row[weight > 0].tolist() for row, weight in zip(cohort.client, cohort.weight, strict=True)]
    deviation = NOISE * CLIP / (1.0 if fault == "noise of the sum" else m)
    return loops.dp_fed_avg(
        simulated(name)[0],
        taking_part,
        train,
        100.0 if fault == "unclipped" else CLIP,
        len(taking_part[0]) if fault == "those who came" else m,
        0.0 if fault == "no noise" else deviation,
        noise,
        SERVER_RATE,
        fault == "each leaf",
    )


@pytest.mark.parametrize("name", nightly(SCHEDULES, ["poisson"]))
def test_equals_the_loop(name: str) -> None:
    start, end = simulated(name)
    assert distance(start, end) > 1e-2
    assert distance(end, replayed(name)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "fault"),
    nightly(
        [(n, f) for n in SCHEDULES for f in ("unclipped", "no noise", "noise of the sum", "each leaf")]
        + [("dropout", "those who came")],
        ["poisson"],
    ),
)
def test_a_loop_with_one_thing_wrong_differs(name: str, fault: str) -> None:
    """By day of the schedule whose run is also compared to the right loop by day."""
    assert distance(simulated(name)[1], replayed(name, fault)) > VISIBLE


@pytest.mark.slow
def test_a_mapping_to_devices_is_the_same_run() -> None:
    """The others are those of the laws."""
    assert distance(simulated("poisson"), simulated("poisson", "sharded:chunked:2")) < TOLERANCE


def test_the_noise_has_its_deviation_and_is_new_in_every_round_and_model() -> None:
    """Clients that do not move (a learning rate of 1e-300): the model is a random walk of known steps."""
    schedule = fixed(6, 2, [(i, i % 2, 1.0) for i in range(6)])
    algorithm = private(schedule, client_learning_rate=1e-300, clip_norm=2.0, noise_multiplier=0.5)
    data, engine = uneven_data(), engine_for(uneven_data(), "scan")

    @jax.jit
    def walk(state: PyTree) -> PyTree:
        return jax.lax.scan(lambda s, _: (algorithm.step(s, data, engine)[0], s.server.params), state, None, 401)[1]

    seen = [leaf.reshape(401, 2, -1) for leaf in leaves(walk(algorithm.init(SEED, NUM_CLIENTS)))]
    steps = np.diff(np.concatenate(seen, axis=2), axis=0).reshape(-1)  # 400 rounds, 2 models, 24 numbers
    expected = 0.5 * 2.0 / 3  # three of six slots a model
    error = 1 / math.sqrt(2 * steps.size)
    assert abs(steps.std() / expected - 1) < 5 * error
    assert abs(steps.mean()) < 5 * expected / math.sqrt(steps.size)
    assert len(np.unique(steps)) > 0.99 * steps.size
    assert abs(expected * 3 / 2 / steps.std() - 1) > 20 * error  # noise over two clients would show


def test_a_model_that_no_client_trains_gets_its_noise() -> None:
    """Under Poisson sampling a round may be empty; a model that stood still would tell so."""
    algorithm = private(poisson_sampling(6, 1e-6), expected_clients=3.0, clip_norm=1.0, noise_multiplier=0.6)
    plain = algorithms.fed_avg(
        two_layer(), poisson_sampling(6, 1e-6), client_learning_rate=RATE, work=Work(steps=1, batch_size=None)
    )
    moved = []
    for one in (algorithm, plain):
        begun = one.init(SEED, 6)
        start = np.concatenate([leaf.ravel() for leaf in leaves(begun.server.params)])
        half, infos = go(one, uneven_data(), "scan", 100, begun)
        end, more = go(one, uneven_data(), "scan", 100, half)
        assert not infos["cohort"].weight.any() and not more["cohort"].weight.any()
        moved.append(np.concatenate([leaf.ravel() for leaf in leaves(end.server.params)]) - start)
    assert not moved[1].any()
    # 24 numbers, each the sum of 200 normal ones
    assert abs(np.mean((moved[0] / (0.2 * math.sqrt(200))) ** 2) - 1) < 5 * math.sqrt(2 / 24)
    assert np.abs(moved[0]).min() > 0


@pytest.mark.slow
def test_without_noise_and_with_a_large_bound_it_is_fed_avg() -> None:
    """By day the loop has both the noise and the clipped mean, and the loops without either are told apart."""
    schedule = uniform_sampling(6, 4)
    ours = private(schedule, noise_multiplier=0, clip_norm=1e6)
    plain = algorithms.fed_avg(
        two_layer(),
        schedule,
        client_learning_rate=RATE,
        work=Work(steps=STEPS, batch_size=None),
        averaging=Averaging(weighting="uniform"),
    )
    ends = [go(one, uneven_data(), "scan", 3, plain.init(SEED, 6))[0].server.params for one in (ours, plain)]
    assert distance(*ends) < TOLERANCE


@pytest.mark.parametrize("through", nightly(["nothing", "qsgd"], ["qsgd"]))
def test_no_client_moves_the_sum_by_more_than_the_bound_also_through_a_channel(through: str) -> None:
    """QSGD makes messages longer; the server clips what it receives, and the ledger counts what was sent.

    By day with the channel; without one the loop clips.
    """
    data, schedule = uneven_data(), fixed(6, 1, [(1, 0, 1.0), (2, 0, 1.0)])
    channel, bytes_ = {"nothing": (None, 24 * 8), "qsgd": (qsgd(2), 24 * 2 // 8 + 8)}[through]
    algorithm = private(schedule, noise_multiplier=0, clip_norm=1e-3, channel=channel)
    start = algorithm.init(SEED, 6)
    params = np.concatenate([leaf.ravel() for leaf in leaves(start.server.params)])
    state, _ = go(algorithm, data, "scan", 1, start)
    moved = np.concatenate([leaf.ravel() for leaf in leaves(state.server.params)]) - params
    assert 1e-4 < np.linalg.norm(moved) <= 1e-3 * (1 + 1e-9)  # two clients, each 1e-3 / 2
    assert algorithm.cost(data, engine_for(data, "scan")).uplink == bytes_


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"clip_norm": 0.0}, "clip_norm: got 0.0, must be above 0"),
        ({"clip_norm": math.inf}, "clip_norm: got inf"),
        ({"noise_multiplier": -1.0}, "noise_multiplier: got -1.0, must be at least 0 and finite"),
        ({"noise_multiplier": math.nan}, "noise_multiplier: got nan"),
        ({"expected_clients": 0}, "expected_clients: got 0, must be above 0 and finite"),
        ({"weighting": "examples"}, "weighting: got 'examples', must be 'uniform'"),
        ({"client_learning_rate": 0.0}, "client_learning_rate"),
        ({"server_learning_rate": -1.0}, "server_learning_rate"),
        ({"loss": "hinge"}, "loss"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        private(uniform_sampling(6, 4), **changed)


# ---- Poisson sampling ---------------------------------------------------------------------------------------------


def test_poisson_sampling_takes_each_client_independently() -> None:
    """Counts of all 2^6 sets of clients over many rounds, against their probabilities (chi-squared)."""
    rate, rounds = 0.3, 40_000
    cohort = cohorts(poisson_sampling(6, rate), SEED, rounds)
    assert np.array_equal(cohort.client, np.tile(np.arange(6), (rounds, 1))) and not cohort.model.any()
    assert set(np.unique(cohort.weight)) == {0.0, 1.0}
    present = cohort.weight > 0
    counts = np.bincount(present @ (1 << np.arange(6)), minlength=64)
    size = np.array([bin(s).count("1") for s in range(64)])

    def excess(q: float) -> float:
        expected = rounds * q**size * (1 - q) ** (6 - size)
        return float((np.sum((counts - expected) ** 2 / expected) - 63) / math.sqrt(2 * 63))

    assert abs(excess(rate)) < 5
    assert excess(rate + 0.02) > 10
    # and independently from round to round
    together = np.mean(present[1:] & present[:-1], axis=0)
    assert np.abs(together - rate**2).max() < 5 * math.sqrt(rate**2 / rounds)
    assert present.all(axis=1).any() and not present.any(axis=1).all()


@pytest.mark.parametrize("rate", [0.0, 1.1, -0.5, math.nan])
def test_poisson_sampling_checks_its_rate(rate: float) -> None:
    with pytest.raises(ValueError, match=r"rate: got .*, must be above 0 and at most 1"):
        poisson_sampling(6, rate)
    with pytest.raises(ValueError, match="num_clients: got 0"):
        poisson_sampling(0, 0.5)
