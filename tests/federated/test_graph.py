"""Graphs of clients and the matrices over them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from fedtangent._src.federated import graph
from fedtangent._src.federated.graph import Graph

STAR = graph.from_adjacency(np.array([[0, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]), "star")
GRAPHS = {
    g.name: g
    for g in (
        graph.ring(10),
        graph.ring(5),
        graph.torus(3, 4),
        graph.torus(2, 2),
        graph.complete(6),
        graph.complete(1),
        graph.erdos_renyi(12, 0.4, 1),
        STAR,
    )
}
everywhere = pytest.mark.parametrize("name", GRAPHS)


def test_neighbours_by_hand() -> None:
    def of(g: Graph, node: int) -> list[int]:
        return np.flatnonzero(g.adjacency[node]).tolist()

    assert of(graph.ring(10), 0) == [1, 9]
    assert of(graph.ring(2), 0) == [1]
    assert of(graph.ring(1), 0) == []
    assert of(graph.torus(3, 4), 5) == [1, 4, 6, 9]  # row 1, column 1
    assert of(graph.torus(3, 4), 3) == [0, 2, 7, 11]  # wraps around in both directions
    assert of(graph.complete(4), 2) == [0, 1, 3]
    assert STAR.degrees.tolist() == [3, 1, 1, 1]


def test_erdos_renyi_has_its_share_of_edges_and_depends_on_the_seed() -> None:
    n, p = 80, 0.3
    pairs = n * (n - 1) // 2
    counts = [int(graph.erdos_renyi(n, p, seed).degrees.sum()) // 2 for seed in range(20)]
    error = abs(np.mean(counts) - p * pairs) / math.sqrt(p * (1 - p) * pairs / len(counts))
    assert error < 4
    assert abs(np.mean(counts) - 0.5 * pairs) / math.sqrt(0.25 * pairs / len(counts)) > 50  # negative control: p = 1/2
    assert np.array_equal(graph.erdos_renyi(n, p, 3).adjacency, graph.erdos_renyi(n, p, 3).adjacency)
    assert not np.array_equal(graph.erdos_renyi(n, p, 3).adjacency, graph.erdos_renyi(n, p, 4).adjacency)


@everywhere
@pytest.mark.parametrize("make", [graph.metropolis_hastings, graph.metropolis_weights])
def test_matrices_are_doubly_stochastic_and_live_on_the_edges(name: str, make: Callable[[Graph], np.ndarray]) -> None:
    g = GRAPHS[name]
    matrix = make(g)
    np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=0, atol=1e-15)
    assert np.array_equal(matrix, matrix.T) and (matrix >= 0).all()
    assert np.array_equal((matrix > 0) & ~np.eye(g.num_nodes, dtype=bool), g.adjacency)


@everywhere
def test_metropolis_hastings_is_a_proposal_and_an_acceptance(name: str) -> None:
    """The chain from its definition, node by node, and its stationary law; a walk without acceptance has another."""
    g = GRAPHS[name]
    n, d = g.num_nodes, g.degrees
    chain = np.zeros((n, n))
    for i in range(n):
        for j in np.flatnonzero(g.adjacency[i]):
            chain[i, j] = 1 / d[i] * min(1, (1 / d[j]) / (1 / d[i]))  # uniform target: the ratio of the proposals
        chain[i, i] = 1 - chain[i].sum()
    np.testing.assert_allclose(graph.metropolis_hastings(g), chain, rtol=0, atol=1e-15)
    np.testing.assert_allclose(np.full(n, 1 / n) @ chain, np.full(n, 1 / n), rtol=0, atol=1e-15)
    if name == "star":
        plain = g.adjacency / d[:, None]
        assert np.abs(np.full(n, 1 / n) @ plain - 1 / n).max() > 0.1


def test_spectral_gaps_are_those_of_circulant_matrices() -> None:
    n = 10
    angles = 2 * np.pi * np.arange(n) / n
    gossip = 1 / 3 + 2 / 3 * np.cos(angles)  # eigenvalues of metropolis_weights of a ring
    expected = 1 - np.sort(np.abs(gossip))[-2]
    assert graph.spectral_gap(graph.metropolis_weights(graph.ring(n))) == pytest.approx(expected, abs=1e-12)
    assert graph.spectral_gap(graph.metropolis_hastings(graph.ring(n))) == pytest.approx(0, abs=1e-12)  # two colours
    walk = 1 - np.sort(np.abs(np.cos(2 * np.pi * np.arange(5) / 5)))[-2]
    assert graph.spectral_gap(graph.metropolis_hastings(graph.ring(5))) == pytest.approx(walk, abs=1e-12)
    assert graph.spectral_gap(graph.metropolis_weights(graph.complete(6))) == pytest.approx(1, abs=1e-12)
    assert graph.spectral_gap(np.ones((1, 1))) == 1


TWO_PAIRS = np.kron(np.eye(2), 1 - np.eye(2))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: graph.from_adjacency(TWO_PAIRS), "graph: is not connected, its 4 nodes fall into 2 components"),
        (
            lambda: graph.erdos_renyi(20, 0.02, 5),
            r"erdos_renyi\(20, 0.02\): seed 5 .* not connected, of \d+ components",
        ),
        (lambda: graph.from_adjacency(np.ones((2, 3))), r"matrix: got shape \(2, 3\)"),
        (lambda: graph.from_adjacency(np.ones((2, 2))), "matrix: the node 0 is its own neighbour"),
        (lambda: graph.from_adjacency(np.triu(np.ones((3, 3)), 1)), "matrix: .* symmetric, .* nodes 0 and 1"),
        (lambda: graph.from_adjacency(np.full((2, 2), np.nan)), "matrix: .* not finite"),
        (lambda: graph.erdos_renyi(5, 1.5, 0), "probability: got 1.5"),
        (lambda: graph.ring(0), "num_nodes: got 0, must be a whole number of at least 1"),
        (lambda: graph.torus(2, 1.5), r"cols: got 1\.5, must be a whole number of at least 1"),
        (lambda: graph.spectral_gap(np.array([[0.5, 0.5], [0.4, 0.6]])), "matrix: must be symmetric"),
        (lambda: graph.spectral_gap(np.array([[0.5, 0.6], [0.6, 0.5]])), "matrix: row 0 sums to 1.1"),
        (lambda: graph.spectral_gap(np.array([[1.5, -0.5], [-0.5, 1.5]])), "matrix: has the entry -0.5"),
    ],
)
def test_bad_arguments(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()
