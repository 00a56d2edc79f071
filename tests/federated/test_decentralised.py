"""Gossip averaging against NumPy loops written from the papers, with and without clients that are away."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from fedtangent.engine.history import Run
from fedtangent.engine.run import predict, simulate
from fedtangent.federated import algorithms, graph
from fedtangent.federated.algorithms.decentralised import ORDERS, consensus_distance
from fedtangent.federated.faults import dropout, finite
from fedtangent.federated.local import Work
from fedtangent.federated.schedule import own_models
from fedtangent.types import Algorithm, Key, PyTree, Schedule

from . import reference, reference_decentralised
from .toys import NUM_CLIENTS, cohorts, distance, fixed, models_of, owned_rows, two_layer, uneven_data

SEED, RATE, STEPS, ROUNDS = 3, 0.2, 3, 2
MODEL, RING = two_layer(), graph.ring(NUM_CLIENTS)
TOLERANCE, VISIBLE = 1e-10, 1e-4
WORK = Work(steps=STEPS)


def schedule_of(away: bool) -> Schedule:
    return dropout(own_models(NUM_CLIENTS), 0.35) if away else own_models(NUM_CLIENTS)


def build(order: str, away: bool, steps: int = STEPS, **options: Any) -> Algorithm:
    return algorithms.gossip(
        MODEL,
        schedule_of(away),
        client_learning_rate=RATE,
        work=Work(steps=steps),
        mixing=options.pop("mixing", RING),
        order=order,
        **options,
    )


@functools.cache
def simulated(order: str, away: bool, common: bool) -> tuple[list[reference.Params], Run, list[reference.Params]]:
    algorithm = build(order, away, common_start=common)
    start = models_of(algorithm, algorithm.init(SEED, NUM_CLIENTS))
    run = simulate(algorithm, uneven_data(), ROUNDS, SEED, "scan")
    return start, run, models_of(algorithm, run.state)


def replayed(order: str, away: bool, common: bool, fault: str = "none") -> list[reference.Params]:
    data = uneven_data()
    x, y, rows = np.asarray(data.x), np.asarray(data.y), owned_rows(data)
    mixing = graph.metropolis_weights(RING)
    if fault == "mixing":
        mixing = graph.metropolis_weights(graph.complete(NUM_CLIENTS))
    present = cohorts(schedule_of(away), SEED, ROUNDS).weight > 0
    if fault == "away":
        present = ~present
    other = {"train_then_mix": "mix_then_train", "mix_then_train": "train_then_mix"}

    def train(t: int, i: int, params: reference.Params) -> reference.Params:
        return reference.sgd(params, x, y, [rows[i]] * (STEPS - (fault == "steps")), RATE, "squared_error")

    start = simulated(order, away, common)[0]
    return reference_decentralised.gossip(start, mixing, present, train, other[order] if fault == "order" else order)


CASES = [("train_then_mix", False, True), ("train_then_mix", True, False), ("mix_then_train", True, True)]


@pytest.mark.parametrize(("order", "away", "common"), CASES)
def test_two_rounds_equal_the_loop(order: str, away: bool, common: bool) -> None:
    start, run, end = simulated(order, away, common)
    assert distance(end, replayed(order, away, common)) < TOLERANCE
    for fault in ("mixing", "steps", "order", *(("away",) if away else ())):
        assert distance(end, replayed(order, away, common, fault)) > VISIBLE, fault
    reported = run.history.rounds["consensus_distance"]
    assert reported.shape == (ROUNDS,)
    assert reported[-1] == pytest.approx(reference_decentralised.consensus_distance(end), rel=1e-12)
    assert (distance(start[0], start[1]) == 0) == common
    present = cohorts(schedule_of(away), SEED, ROUNDS).weight > 0
    assert present.all() != away and present.any(axis=1).all()


def test_one_local_step_is_d_psgd() -> None:
    """Lian et al. 2017, algorithm 1, in matrices: ``X <- W X - rate G(X)``, gradients taken before mixing."""
    data = uneven_data()
    x, y, rows = np.asarray(data.x), np.asarray(data.y), owned_rows(data)
    algorithm = build("mix_then_train", False, steps=1)
    models = models_of(algorithm, algorithm.init(SEED, NUM_CLIENTS))
    end = models_of(algorithm, simulate(algorithm, data, 3, SEED, "scan").state)
    W = graph.metropolis_weights(RING)
    for _ in range(3):
        gradients = [reference.gradient(m, x[r], y[r], "squared_error") for m, r in zip(models, rows, strict=True)]
        models = [
            {name: sum(W[k, j] * models[j][name] for j in range(len(models))) - RATE * gradients[k][name] for name in m}
            for k, m in enumerate(models)
        ]
    assert distance(end, models) < TOLERANCE


def still(algorithm: Algorithm, rounds: int) -> tuple[PyTree, PyTree, Run]:
    """A run of clients that hardly learn, from models that start apart."""
    before = algorithm.init(SEED, NUM_CLIENTS).server.params
    run = simulate(algorithm, uneven_data(), rounds, SEED, "scan")
    return before, run.state.server.params, run


@pytest.mark.parametrize("away", [False, True])
def test_mixing_keeps_the_mean_and_brings_models_together_as_fast_as_the_gap_says(away: bool) -> None:
    options = {"client_learning_rate": 1e-14, "work": Work(steps=1), "mixing": RING, "common_start": False}
    before, after, run = still(algorithms.gossip(MODEL, schedule_of(away), **options), 12)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(a.mean(axis=0), b.mean(axis=0), rtol=0, atol=1e-12)
    apart = np.array([float(consensus_distance(before)), *run.history.rounds["consensus_distance"]])
    assert (np.diff(apart) < 1e-9).all()
    if away:
        return
    kept = 1 - graph.spectral_gap(graph.metropolis_weights(RING))
    assert (apart[1:] <= kept * apart[:-1] * (1 + 1e-9)).all()
    assert apart[-1] / apart[-2] == pytest.approx(kept, rel=1e-3)  # and no faster: the slowest mode is left


def test_a_client_whose_message_is_rejected_stays_out() -> None:
    """Client 3's data are NaN: with a guard its model stays as it was, and nobody hears of it."""
    data = uneven_data()
    broken = owned_rows(data)[3]
    poisoned = data._replace(x=data.x.at[broken].set(np.nan))
    ends = {}
    for accept in (None, finite()):
        algorithm = build("train_then_mix", False, common_start=False, accept=accept)
        start = models_of(algorithm, algorithm.init(SEED, NUM_CLIENTS))
        ends[accept is None] = models_of(algorithm, simulate(algorithm, poisoned, ROUNDS, SEED, "vmap").state)
    assert distance(ends[False][3], start[3]) == 0
    assert all(np.isfinite(leaf).all() for m in ends[False] for leaf in m.values())
    assert not all(np.isfinite(leaf).all() for m in ends[True] for leaf in m.values())
    assert min(distance(ends[False][k], start[k]) for k in (0, 1, 2, 4, 5)) > VISIBLE


def test_prediction_is_the_mean_of_the_models() -> None:
    _, run, end = simulated("train_then_mix", False, True)
    x = np.asarray(uneven_data().x)
    each = [reference.outputs(m, x) for m in end]
    got = predict(build("train_then_mix", False), run.state, uneven_data().x)
    np.testing.assert_allclose(got.mean, np.mean(each, axis=0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("g", "messages"), [(RING, 12), (graph.complete(6), 30)], ids=["ring", "complete"])
def test_the_ledger_is_charged_for_each_neighbour(g: graph.Graph, messages: int) -> None:
    run = simulate(build("train_then_mix", False, mixing=g), uneven_data(), ROUNDS, SEED, "scan")
    model = sum(leaf.nbytes for leaf in models_of(build("train_then_mix", False), run.state)[0].values())
    assert run.history.evaluations[-1].uplink_bytes == ROUNDS * messages * model
    assert run.history.evaluations[-1].downlink_bytes == 0


def test_uneven_numbers_of_neighbours_are_charged_at_their_mean() -> None:
    star = graph.from_adjacency(np.pad(np.ones((1, 5)), ((0, 5), (1, 0))) + np.pad(np.ones((5, 1)), ((1, 0), (0, 5))))
    run = simulate(build("train_then_mix", False, mixing=star), uneven_data(), ROUNDS, SEED, "scan")
    model = sum(leaf.nbytes for leaf in models_of(build("train_then_mix", False), run.state)[0].values())
    exact = ROUNDS * 10 * model  # five edges, both ways
    assert 0 <= run.history.evaluations[-1].uplink_bytes - exact < ROUNDS * NUM_CLIENTS


def test_it_is_the_same_under_every_mapping_and_in_float32() -> None:
    ends = [
        simulate(build("mix_then_train", True), uneven_data(), ROUNDS, SEED, mapping).state.server.params
        for mapping in ("scan", "vmap", "chunked:4")
    ]
    assert max(distance(ends[0], other) for other in ends[1:]) < 1e-12
    single = algorithms.gossip(two_layer(np.float32), own_models(6), client_learning_rate=RATE, work=WORK, mixing=RING)
    data = uneven_data()
    data = data._replace(x=data.x.astype(np.float32), y=data.y.astype(np.float32))
    params = simulate(single, data, ROUNDS, SEED, "scan").state.server.params
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}


W4 = np.full((6, 6), 1 / 6)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"mixing": graph.ring(5)}, r"mixing: got shape \(5, 5\), must be \[6, 6\], the schedule's models"),
        ({"mixing": W4 * 0.9}, "mixing: row 0 sums to 0.9"),
        ({"mixing": np.roll(np.eye(6), 1, axis=1)}, "mixing: must be symmetric"),
        ({"mixing": np.eye(6)}, "mixing: has no spectral gap"),
        ({"mixing": graph.metropolis_hastings(RING)}, "mixing: has no spectral gap"),  # an even ring has two colours
        ({"mixing": W4 * np.nan}, "mixing: has the entry nan"),
        ({"order": "both"}, "order: got 'both', allowed are " + ", ".join(ORDERS)),
        ({"client_learning_rate": 0.0}, "client_learning_rate"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], named: str) -> None:
    arguments = {"client_learning_rate": 0.1, "work": WORK, "mixing": RING} | changed
    with pytest.raises(ValueError, match=named):
        algorithms.gossip(MODEL, own_models(6), **arguments)


def test_one_model_has_nobody_to_mix_with() -> None:
    """K = 1 is FedAvg: mixing by [[1]]."""
    schedule, options = own_models(1), {"client_learning_rate": RATE, "work": WORK}
    gossip = algorithms.gossip(MODEL, schedule, mixing=np.ones((1, 1)), **options)
    plain = algorithms.fed_avg(MODEL, schedule, **options)
    ends = [simulate(a, uneven_data(sizes=(5,)), ROUNDS, SEED, "scan").state.server.params for a in (gossip, plain)]
    assert distance(*ends) < 1e-14


def test_mixing_does_not_read_what_is_absent() -> None:
    """A model that nobody trains this round may be anything, even NaN, and its neighbours do not see it."""

    schedule = fixed(6, 6, [(i, i, float(i != 2)) for i in range(6)])
    algorithm = algorithms.gossip(MODEL, schedule, client_learning_rate=RATE, work=WORK, mixing=RING)

    def spoilt(key: Key, num_clients: int, init_key: Key | None = None) -> PyTree:
        state = algorithm.init(key, num_clients, init_key)
        params = jax.tree.map(lambda leaf: leaf.at[2].set(np.nan), state.server.params)
        return state._replace(server=state.server._replace(params=params))

    ends = [
        simulate(a, uneven_data(), ROUNDS, SEED, "vmap").state.server.params
        for a in (algorithm, algorithm._replace(init=spoilt))
    ]
    others = np.array([0, 1, 3, 4, 5])
    for sound, other in zip(jax.tree.leaves(ends[0]), jax.tree.leaves(ends[1]), strict=True):
        np.testing.assert_array_equal(sound[others], other[others])
        assert np.isnan(other[2]).all() and np.isfinite(sound[2]).all()
