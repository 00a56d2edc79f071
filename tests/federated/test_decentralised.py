"""Gossip averaging against NumPy loops written from the papers, with and without clients that are away."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from fedtangent._src.engine.clients import engine_for
from fedtangent._src.engine.history import charge
from fedtangent._src.federated import algorithms, graph
from fedtangent._src.federated.algorithms.decentralised import ORDERS, Mixing, consensus_distance
from fedtangent._src.federated.faults import dropout, finite
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import own_models
from fedtangent._src.types import Algorithm, PyTree, Schedule

from ..nightly import nightly
from . import reference, reference_decentralised
from .toys import NUM_CLIENTS, arguments_of, cohorts, distance, fixed, go, models_of, owned_rows, two_layer, uneven_data

SEED, RATE, STEPS, ROUNDS = 3, 0.2, 3, 2
MODEL, DATA, RING = two_layer(), uneven_data(), graph.ring(NUM_CLIENTS)
TOLERANCE, VISIBLE = 1e-10, 1e-4
WORK = Work(steps=STEPS, batch_size=None)
EVERYBODY = fixed(NUM_CLIENTS, NUM_CLIENTS, [(i, i, 1.0) for i in range(NUM_CLIENTS)])  # own models, cohorts as state


@functools.cache
def schedule_of(away: bool) -> Schedule:
    return dropout(EVERYBODY, 0.35) if away else EVERYBODY


def build(order: str, away: bool, steps: int = STEPS, **options: Any) -> Algorithm:
    given = {
        "client_learning_rate": RATE,
        "work": Work(steps=steps, batch_size=None),
        "graph": RING,
        "order": order,
    } | options
    return algorithms.gossip(MODEL, schedule_of(away), **arguments_of(algorithms.gossip, given))


built = functools.cache(build)


@functools.cache
def begun(away: bool, common: bool) -> PyTree:
    """The state before the first round, of any order."""
    return build("train_then_mix", away, common_start=common).init(SEED, NUM_CLIENTS)


@functools.cache
def ran(order: str, away: bool, common: bool, mapping: str = "scan") -> tuple[list[reference.Params], PyTree, PyTree]:
    """The models before a run, its state and its infos; how models start is not the program's concern."""
    algorithm, state = built(order, away), begun(away, common)
    return models_of(algorithm, state), *go(algorithm, DATA, mapping, ROUNDS, state)


def replayed(order: str, away: bool, common: bool, fault: str = "none") -> list[reference.Params]:
    x, y, rows = np.asarray(DATA.x), np.asarray(DATA.y), owned_rows(DATA)
    mixing = graph.metropolis_weights(RING)
    if fault == "mixing":
        mixing = graph.metropolis_weights(graph.complete(NUM_CLIENTS))
    present = cohorts(schedule_of(away), SEED, ROUNDS).weight > 0
    if fault == "away":
        present = ~present
    other = {"train_then_mix": "mix_then_train", "mix_then_train": "train_then_mix"}

    def train(t: int, i: int, params: reference.Params) -> reference.Params:
        return reference.sgd(params, x, y, [rows[i]] * (STEPS - (fault == "steps")), RATE, "squared_error")

    start = ran(order, away, common)[0]
    return reference_decentralised.gossip(start, mixing, present, train, other[order] if fault == "order" else order)


CASES = [("train_then_mix", False, True), ("train_then_mix", True, False), ("mix_then_train", True, True)]


@pytest.mark.parametrize(("order", "away", "common"), nightly(CASES, [("train_then_mix", True, False)]))
def test_two_rounds_equal_the_loop(order: str, away: bool, common: bool) -> None:
    start, state, infos = ran(order, away, common)
    end = models_of(built(order, away), state)
    assert distance(end, replayed(order, away, common)) < TOLERANCE
    for fault in ("mixing", "steps", "order", *(("away",) if away else ())):
        assert distance(end, replayed(order, away, common, fault)) > VISIBLE, fault
    reported = infos["consensus_distance"]
    assert reported.shape == (ROUNDS,)
    assert reported[-1] == pytest.approx(reference_decentralised.consensus_distance(end), rel=1e-12)
    assert (distance(start[0], start[1]) == 0) == common
    present = cohorts(schedule_of(away), SEED, ROUNDS).weight > 0
    assert present.all() != away and present.any(axis=1).all()


def test_one_local_step_is_d_psgd() -> None:
    """Lian et al. 2017, algorithm 1, in matrices: ``X <- W X - rate G(X)``, gradients taken before mixing."""
    x, y, rows = np.asarray(DATA.x), np.asarray(DATA.y), owned_rows(DATA)
    algorithm = build("mix_then_train", False, steps=1)
    models = models_of(algorithm, begun(False, True))
    end = models_of(algorithm, go(algorithm, DATA, "scan", 3, begun(False, True))[0])
    W = graph.metropolis_weights(RING)
    for _ in range(3):
        gradients = [reference.gradient(m, x[r], y[r], "squared_error") for m, r in zip(models, rows, strict=True)]
        models = [
            {name: sum(W[k, j] * models[j][name] for j in range(len(models))) - RATE * gradients[k][name] for name in m}
            for k, m in enumerate(models)
        ]
    assert distance(end, models) < TOLERANCE


@pytest.mark.parametrize("away", nightly([False, True], [True]))
def test_mixing_keeps_the_mean_and_brings_models_together_as_fast_as_the_gap_says(away: bool) -> None:
    """Of clients that hardly learn, from models that start apart."""
    still = build("train_then_mix", away, 1, client_learning_rate=1e-14)
    state, infos = go(still, DATA, "scan", 12, begun(away, False))
    before, after = begun(away, False).server.params, state.server.params
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(a.mean(axis=0), b.mean(axis=0), rtol=0, atol=1e-12)
    apart = np.array([float(consensus_distance(before)), *infos["consensus_distance"]])
    assert (np.diff(apart) < 1e-9).all()
    if away:
        return
    kept = 1 - graph.spectral_gap(graph.metropolis_weights(RING))
    assert (apart[1:] <= kept * apart[:-1] * (1 + 1e-9)).all()
    assert apart[-1] / apart[-2] == pytest.approx(kept, rel=1e-3)  # and no faster: the slowest mode is left


def test_a_client_whose_message_is_rejected_stays_out() -> None:
    """Client 3's data are NaN: with a guard its model stays as it was, and nobody hears of it."""
    poisoned = DATA._replace(x=DATA.x.at[owned_rows(DATA)[3]].set(np.nan))
    guarded, open_ = build("train_then_mix", False, accept=finite()), built("train_then_mix", False)
    start = models_of(guarded, begun(False, False))
    end, spoilt = (models_of(a, go(a, poisoned, "scan", ROUNDS, begun(False, False))[0]) for a in (guarded, open_))
    assert distance(end[3], start[3]) == 0
    assert all(np.isfinite(leaf).all() for m in end for leaf in m.values())
    assert not all(np.isfinite(leaf).all() for m in spoilt for leaf in m.values())
    assert min(distance(end[k], start[k]) for k in (0, 1, 2, 4, 5)) > VISIBLE


def test_prediction_is_the_mean_of_the_models() -> None:
    algorithm, (_, state, _) = built("train_then_mix", False), ran("train_then_mix", False, True)
    each = [reference.outputs(m, np.asarray(DATA.x)) for m in models_of(algorithm, state)]
    got = algorithm.predict(state, DATA.x)
    np.testing.assert_allclose(got.mean, np.mean(each, axis=0), rtol=0, atol=1e-12)


STAR = graph.from_adjacency(np.pad(np.ones((1, 5)), ((0, 5), (1, 0))) + np.pad(np.ones((5, 1)), ((1, 0), (0, 5))))


@pytest.mark.parametrize(
    ("g", "messages"), [(RING, 12), (graph.complete(6), 30), (STAR, 10)], ids=["ring", "complete", "star"]
)
def test_the_ledger_is_charged_for_each_neighbour(g: graph.Graph, messages: int) -> None:
    """Where clients differ in neighbours (a star: five edges, both ways) at their mean, rounded up to a byte."""
    engine = engine_for(DATA, "scan")
    cost = build("train_then_mix", False, graph=g).cost(DATA, engine)
    model = sum(leaf.nbytes for leaf in ran("train_then_mix", False, True)[0][0].values())
    infos = ran("train_then_mix", False, True)[2]
    up, down = charge(cost, infos)
    assert 0 <= up - ROUNDS * messages * model < (ROUNDS * NUM_CLIENTS if g is STAR else 1)
    assert down == 0


def test_it_is_the_same_in_chunks() -> None:
    states = [ran("train_then_mix", True, False, mapping)[1] for mapping in ("scan", "chunked:4")]
    assert distance(*(state.server.params for state in states)) < 1e-12


W4 = np.full((6, 6), 1 / 6)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"graph": graph.ring(5)}, r"mixing: got shape \(5, 5\), must be \[6, 6\], a row for each model"),
        ({"graph": W4 * 0.9}, "mixing: row 0 sums to 0.9"),
        ({"graph": np.roll(np.eye(6), 1, axis=1)}, "mixing: must be symmetric"),
        ({"graph": np.eye(6)}, "mixing: has no spectral gap"),
        ({"graph": graph.metropolis_hastings(RING)}, "mixing: has no spectral gap"),  # an even ring has two colours
        ({"graph": W4 * np.nan}, "mixing: has the entry nan"),
        ({"order": "both"}, "order: got 'both', allowed are " + ", ".join(ORDERS)),
        ({"client_learning_rate": 0.0}, "client_learning_rate"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], named: str) -> None:
    arguments = {"client_learning_rate": 0.1, "work": WORK, "graph": RING} | changed
    with pytest.raises(ValueError, match=named):
        algorithms.gossip(MODEL, own_models(6), **arguments_of(algorithms.gossip, arguments))


def test_one_model_has_nobody_to_mix_with() -> None:
    """K = 1 is FedAvg: mixing by [[1]]."""
    data, schedule, options = uneven_data(sizes=(5,)), own_models(1), {"client_learning_rate": RATE, "work": WORK}
    gossip = algorithms.gossip(MODEL, schedule, mixing=Mixing(np.ones((1, 1))), **options)
    plain = algorithms.fed_avg(MODEL, schedule, **options)
    ends = [go(a, data, "scan", ROUNDS, plain.init(SEED, 1))[0].server.params for a in (gossip, plain)]
    assert distance(*ends) < 1e-14


def test_mixing_does_not_read_what_is_absent() -> None:
    """A model that nobody trains this round may be anything, even NaN, and its neighbours do not see it."""
    algorithm, start = built("train_then_mix", False), begun(False, True)
    without = start.schedule._replace(weight=start.schedule.weight.at[2].set(0))
    params = jax.tree.map(lambda leaf: leaf.at[2].set(np.nan), start.server.params)
    spoilt = start._replace(server=start.server._replace(params=params))
    ends = [go(algorithm, DATA, "scan", ROUNDS, state, without)[0].server.params for state in (start, spoilt)]
    others = np.array([0, 1, 3, 4, 5])
    for sound, other in zip(jax.tree.leaves(ends[0]), jax.tree.leaves(ends[1]), strict=True):
        np.testing.assert_array_equal(sound[others], other[others])
        assert np.isnan(other[2]).all() and np.isfinite(sound[2]).all()
