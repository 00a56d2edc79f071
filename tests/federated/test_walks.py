"""Schedules of models that walk over a graph, that stay, and that follow the published code's permutations."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from scipy import stats

from fedtangent._src.engine import Devices, simulate
from fedtangent._src.federated import algorithms, graph
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import mixed_permutations, own_models, random_models, random_walk
from fedtangent._src.streams import keys

from ..nightly import nightly
from . import reference, reference_decentralised
from .toys import NUM_CLIENTS, cohorts, distance, models_of, owned_rows, two_layer, uneven_data

SEED, RATE, STEPS = 3, 0.2, 3
LOPSIDED = graph.from_adjacency(np.array([[0, 1, 1, 1], [1, 0, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]), "lopsided")


def paths(schedule: object, rounds: int, seed: int = 0) -> np.ndarray:
    """Where each model stands, [R, K]."""
    cohort = cohorts(schedule, seed, rounds)
    assert (cohort.model == np.arange(schedule.num_models)).all() and (cohort.weight == 1).all()
    return cohort.client


def standard_errors_off(visits: np.ndarray, batch: int) -> float:
    """The largest distance of visiting frequencies from 1/N, in standard errors measured between batches and models.

    ``visits`` is [R, K]; batches of rounds are far longer than the walk remembers.
    """
    nodes = int(visits.max()) + 1
    one_hot = visits[..., None] == np.arange(nodes)
    blocks = one_hot.reshape(len(visits) // batch, batch, *one_hot.shape[1:]).mean(axis=1).reshape(-1, nodes)
    error = blocks.std(axis=0, ddof=1) / math.sqrt(len(blocks))
    return float(np.max(np.abs(blocks.mean(axis=0) - 1 / nodes) / error))


@pytest.mark.parametrize("g", [graph.ring(5), graph.torus(3, 3), LOPSIDED], ids=lambda g: g.name)
def test_every_client_is_visited_alike_and_only_along_edges(g: graph.Graph) -> None:
    visits = paths(random_walk(g, 8), 6000)
    moved = visits[1:] != visits[:-1]
    assert g.adjacency[visits[:-1][moved], visits[1:][moved]].all()
    assert standard_errors_off(visits, 200) < 4.5
    # moves have the probabilities of the transition matrix, measured from each node
    seen = np.zeros((g.num_nodes, g.num_nodes))
    np.add.at(seen, (visits[:-1].reshape(-1), visits[1:].reshape(-1)), 1)
    expected = graph.metropolis_hastings(g) * seen.sum(axis=1, keepdims=True)
    assert stats.chisquare(seen[expected > 0], expected[expected > 0], ddof=g.num_nodes - 1).pvalue > 1e-3
    assert seen[expected == 0].sum() == 0


def test_a_walk_without_acceptance_is_not_uniform() -> None:
    """Negative control: neighbours chosen uniformly favour those with many."""
    plain = LOPSIDED.adjacency / LOPSIDED.degrees[:, None]
    assert standard_errors_off(paths(random_walk(LOPSIDED, 8, plain), 6000), 200) > 20


def test_models_start_anywhere_and_independently() -> None:
    schedule = random_walk(graph.ring(4), 5)
    at = np.stack([np.asarray(schedule.init(key)) for key in jax.random.split(jax.random.key(0), 500)])
    assert stats.chisquare(np.bincount(at.reshape(-1), minlength=4)).pvalue > 1e-3
    together = np.mean(at[:, 0] == at[:, 1])
    assert abs(together - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 500)
    walked = paths(schedule, 12)
    assert len({tuple(column) for column in walked.T}) == 5  # each its own path, though K > N


def test_of_one_client_and_of_certain_moves() -> None:
    assert (paths(random_walk(graph.complete(1), 2), 5) == 0).all()
    turn = np.roll(np.eye(4), 1, axis=1)  # always one further around the ring
    visits = paths(random_walk(graph.ring(4), 3, turn), 9)
    assert np.array_equal(visits[1:], (visits[:-1] + 1) % 4)


def test_own_models() -> None:
    cohort = cohorts(own_models(4), 0, 2)
    assert cohort.client.tolist() == cohort.model.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((graph.ring(4), 0), "num_models: got 0, must be a whole number of at least 1"),
        ((graph.ring(4), 2, np.eye(3)), r"transition: got shape \(3, 3\), must be \[4, 4\]"),
        (
            (graph.ring(4), 2, np.full((4, 4), 0.25)),
            r"transition: moves from node 0 to node 2, between which ring\(4\) has no edge",
        ),
        ((graph.ring(4), 2, 0.9 * np.eye(4)), "transition: row 0 sums to 0.9"),
    ],
)
def test_bad_arguments(arguments: tuple[object, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        random_walk(*arguments)


def test_models_that_meet_after_the_first_round_cannot_walk() -> None:
    """Two clients that draw two of 50 models: the first round's differ."""
    schedule = random_models(2, 50)
    first, *later = cohorts(schedule, 0, 100).model
    assert first[0] != first[1] and any(a == b for a, b in later)
    with pytest.raises(ValueError, match="schedule: got"):
        algorithms.random_walk(two_layer(), schedule, client_learning_rate=RATE)


@pytest.mark.parametrize("base", nightly(["fed_avg", "fed_ensemble"], ["fed_avg"]))
def test_two_rounds_of_the_recipe_equal_the_loop(base: str) -> None:
    """Two rounds of three walks over six uneven clients; each model walks alone."""
    data, model, schedule = uneven_data(), two_layer(), random_walk(graph.ring(NUM_CLIENTS), 3)
    options = {"client_learning_rate": RATE, "work": Work(steps=STEPS, batch_size=None)}
    algorithm = algorithms.random_walk(model, schedule, base=getattr(algorithms, base), **options)
    start = models_of(algorithm, algorithm.init(SEED, NUM_CLIENTS))
    run = simulate(algorithm, data, num_rounds=2, seed=SEED, devices=Devices("scan"))
    end, walked, rows = models_of(algorithm, run.state), paths(schedule, 2, SEED), owned_rows(data)
    x, y = np.asarray(data.x), np.asarray(data.y)

    def loop(fault: str = "none") -> list[reference.Params]:
        def train(t: int, i: int, params: reference.Params) -> reference.Params:
            return reference.sgd(params, x, y, [rows[i]] * STEPS, RATE, "squared_error")

        where = walked.copy()
        if fault == "stay":
            where[1] = where[0]
        return reference_decentralised.random_walk(start, where[:1] if fault == "a round less" else where, train)

    assert distance(end, loop()) < 1e-10
    assert min(distance(end, loop(fault)) for fault in ("stay", "a round less")) > 1e-4
    parameters = sum(leaf.size for leaf in start[0].values())
    assert run.history.evaluations[-1].uplink_bytes == 2 * 3 * 8 * parameters
    assert run.history.evaluations[-1].downlink_bytes == 0
    assert algorithm.name == ("random_walk" if base == "fed_avg" else "fed_ensemble_random_walk")


N, K = 7, 3


def test_mixed_permutations_are_those_of_the_published_code() -> None:
    """The cohorts equal that code's loop over the orders and draws of the same keys."""
    rounds, schedule = 3 * K + 2, mixed_permutations(N, K)
    cohort = cohorts(schedule, SEED, rounds)
    assert (cohort.client == np.arange(N)).all() and (cohort.weight == 1).all() and schedule.num_slots == N
    _, sample_key = jax.random.split(keys(SEED).schedule)
    order_key, draw_key = jax.random.split(sample_key)
    fold = jax.random.fold_in
    matrices = [
        np.argsort(np.asarray(jax.random.uniform(fold(order_key, a), (K, K), np.float32)), axis=1) for a in range(5)
    ]
    draws = [np.asarray(jax.random.randint(fold(draw_key, t), (N - K,), 0, K, np.int32)) for t in range(rounds)]
    loop = reference_decentralised.published_permutations(matrices, draws, N, K)
    assert cohort.model.tolist() == loop
    later = reference_decentralised.published_permutations(matrices[1:], draws, N, K)
    assert cohort.model.tolist() != later  # negative control: the first order not used


def test_mixed_permutations_mix_orders_and_draws() -> None:
    """Of the first K clients each trains every model once in the rounds 1 .. K, K + 1 .. 2K; the others do not."""
    rounds = 1 + 400 * K
    model = cohorts(mixed_permutations(N, K), 0, rounds).model[1:].reshape(-1, K, N)
    each_once = (np.sort(model, axis=1) == np.arange(K)[None, :, None]).all(axis=1)  # [ages, N]
    assert each_once[:, :K].all()
    chance = math.factorial(K) / K**K  # that free draws happen to be a permutation
    share = each_once[:, K:].mean()
    assert abs(share - chance) < 4 * math.sqrt(chance * (1 - chance) / each_once[:, K:].size)
    for i in range(N):
        assert stats.chisquare(np.bincount(model[:, 0, i], minlength=K)).pvalue > 1e-4


def test_mixed_permutations_need_a_client_for_each_model() -> None:
    with pytest.raises(ValueError, match="num_models: got K = 5, must be at most num_clients = 4"):
        mixed_permutations(4, 5)
    assert sorted(cohorts(mixed_permutations(4, 4), 0, 5).model[1:, 0].tolist()) == [0, 1, 2, 3]
