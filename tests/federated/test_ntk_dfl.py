"""NTK-DFL against a NumPy loop written from the paper, its bytes, and its arguments."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.engine.clients import engine_for
from fedtangent._src.engine.history import charge
from fedtangent._src.federated import algorithms, graph
from fedtangent._src.federated.algorithms.tangent import Pooling
from fedtangent._src.federated.faults import dropout, stragglers
from fedtangent._src.federated.ntk_fl import Evolution
from fedtangent._src.federated.schedule import all_clients, neighbourhoods, own_models
from fedtangent._src.types import NO_EXAMPLES, OK, Algorithm, Array, Cohort, FederatedData, Key, PyTree, Schedule

from ..nightly import nightly
from .reference_decentralised import consensus_distance, ntk_dfl
from .toys import NUM_CLIENTS, cohorts, distance, go, models_of, owned_rows, two_layer, uneven_data

SEED, RATE, ROUNDS, TIMES = 3, 0.5, 3, (1, 4, 60)
TOLERANCE, VISIBLE = 1e-10, 1e-2  # measured: at most 4e-13, and at least 0.3 with a fault
DATA = uneven_data()
LOPSIDED = graph.from_adjacency(
    np.array([[j == i + 1 or i == j + 1 or {i, j} == {0, 2} for j in range(6)] for i in range(6)])
)
SCHEDULES: dict[str, Schedule] = {
    "ring": neighbourhoods(graph.ring(NUM_CLIENTS)),
    "lopsided": neighbourhoods(LOPSIDED),
    "dynamic": neighbourhoods(LOPSIDED, dynamic=True),
    "dropout": dropout(neighbourhoods(graph.ring(NUM_CLIENTS)), 0.35),
}


SLOTS = max(schedule.num_slots for schedule in SCHEDULES.values())


def table(name: str) -> Cohort:
    """The cohorts of a schedule, [R, S], with empty slots at the end so that all schedules have as many."""
    drawn = cohorts(SCHEDULES[name], SEED, ROUNDS)
    padded = [np.pad(leaf, ((0, 0), (0, SLOTS - leaf.shape[1]))) for leaf in drawn]
    return Cohort(*map(jnp.asarray, padded))


def replayed(key: Key, state: Cohort, round_: Array) -> tuple[Cohort, Cohort]:
    return jax.tree.map(lambda leaf: leaf[round_], state), state


ANY = Schedule(NUM_CLIENTS, NUM_CLIENTS, SLOTS, lambda key: table("lopsided"), replayed)  # cohorts are its state


def build(schedule: Schedule, **options: Any) -> Algorithm:
    return algorithms.ntk_dfl(two_layer(), schedule, RATE, evolution=Evolution(TIMES, kernel="exact"), **options)


def heard(schedule: Schedule) -> list[np.ndarray]:
    """Whether client i hears client j, for each round."""
    found = []
    for client, model, weight in zip(*cohorts(schedule, SEED, ROUNDS), strict=True):
        near = np.zeros((NUM_CLIENTS, NUM_CLIENTS), bool)
        near[model[weight > 0], client[weight > 0]] = True
        found.append(near)
    return found


def clients_of(data: FederatedData) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.asarray(data.x)[rows], np.asarray(data.y)[rows]) for rows in owned_rows(data)]


@functools.cache
def on_any_graph() -> tuple[Algorithm, PyTree]:
    algorithm = build(ANY)
    return algorithm, algorithm.init(SEED, NUM_CLIENTS)


@pytest.mark.parametrize("name", nightly(SCHEDULES, ["lopsided", "dynamic", "dropout"]))
def test_three_rounds_equal_the_loop(name: str) -> None:
    (algorithm, state), near = on_any_graph(), heard(SCHEDULES[name])
    start = models_of(algorithm, state)
    assert distance(start[0], start[1]) == 0
    state, infos = go(algorithm, DATA, "scan", ROUNDS, state, table(name))
    end = models_of(algorithm, state)
    assert distance(end, ntk_dfl(start, near, clients_of(DATA), RATE, TIMES)) < TOLERANCE
    for fault in ("not mixed", "slopes of the model before", "alone", "last time") if name == "lopsided" else ():
        assert distance(end, ntk_dfl(start, near, clients_of(DATA), RATE, TIMES, fault)) > VISIBLE, fault
    everybody = [np.ones_like(one) for one in near]
    assert distance(end, ntk_dfl(start, everybody, clients_of(DATA), RATE, TIMES)) > VISIBLE
    assert len(set(np.asarray(infos["time"]).ravel()) - {0}) > 1  # more than one time is best
    assert infos["consensus_distance"][-1] == pytest.approx(consensus_distance(end), rel=1e-12)
    away = [not one.diagonal().all() for one in near]
    statuses = np.stack([np.where(one.diagonal(), OK, NO_EXAMPLES) for one in near])
    assert np.array_equal(infos["status"], statuses)
    assert any(away) == (name == "dropout")


def test_a_pool_of_the_largest_neighbourhood_is_the_same() -> None:
    """The schedule says how many clients a model has at most; without it, there is room for all of them."""
    algorithm, (other, start) = build(SCHEDULES["lopsided"]), on_any_graph()
    states = [
        go(*run, 2, state)[0]
        for run, state in (
            ((algorithm, DATA, "vmap"), algorithm.init(SEED, NUM_CLIENTS)),
            ((other, DATA, "scan"), start),
        )
    ]
    assert distance(*(state.server for state in states)) < TOLERANCE


def test_the_schedule_has_the_graph_or_a_graph_with_other_places() -> None:
    fixed, moving = (heard(SCHEDULES[name]) for name in ("lopsided", "dynamic"))
    expected = LOPSIDED.adjacency | np.eye(6, dtype=bool)
    assert all(np.array_equal(near, expected) for near in fixed)
    assert not any(np.array_equal(a, b) for a, b in zip(moving, [*moving[1:], expected], strict=True))
    for near in moving:
        assert np.array_equal(near, near.T) and near.diagonal().all()
        assert sorted(near.sum(axis=1)) == sorted(expected.sum(axis=1))
    assert [s.largest_cohort for s in (*SCHEDULES.values(), own_models(4))] == [3, 4, 4, 3, 4]


@pytest.mark.parametrize("name", ["ring", "lopsided"])
def test_the_ledger_is_charged_for_two_models_and_the_jacobians_to_each_neighbour(name: str) -> None:
    algorithm, cohort = build(SCHEDULES[name]), cohorts(SCHEDULES[name], SEED, ROUNDS)
    sizes = np.diff(np.asarray(DATA.offsets))[cohort.client]
    infos = {"cohort": cohort, "contacted": np.full(ROUNDS, SLOTS), "examples": sizes}
    up, down = charge(algorithm.cost(DATA, engine_for(DATA, "scan")), infos)
    params, outputs, num = 3 * 4 + 4 + 4 * 2, 2, np.diff(np.asarray(DATA.offsets))
    degrees = heard(SCHEDULES[name])[0].sum(axis=1) - 1
    numbers = 2 * params * degrees.sum() + (degrees * num).sum() * (outputs * params + 2 * outputs)
    slots = degrees.sum() + len(degrees)
    assert 0 <= up - ROUNDS * 8 * numbers < ROUNDS * (slots + (degrees + 1) @ num) and down == 0


@pytest.mark.parametrize(
    ("schedule", "options", "named"),
    [
        (all_clients(6), {}, "schedule: must train model i on client i and others"),
        (all_clients(6, 3), {}, "schedule: must train model i on client i and others"),
        (stragglers(SCHEDULES["ring"], 4), {}, "schedule: must train model i on client i and others"),
        (
            SCHEDULES["ring"],
            {"pooling": Pooling((np.zeros((2, 3)), np.zeros((2, 2))))},
            "validation: got examples, but",
        ),
        (SCHEDULES["ring"], {"loss": "hinge"}, "loss: got 'hinge', allowed are"),
    ],
)
def test_bad_arguments(schedule: Schedule, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        build(schedule, **options)


def test_every_client_needs_examples() -> None:
    data = uneven_data(sizes=(3, 0, 2, 4, 6, 2))
    with pytest.raises(ValueError, match="data: client 1 holds no examples; ntk_dfl needs every client"):
        build(SCHEDULES["ring"]).cost(data, engine_for(data, "scan"))
    with pytest.raises(ValueError, match="graph: got 3, must be a Graph"):
        neighbourhoods(3)
