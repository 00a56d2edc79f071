"""Connected graphs of clients, and the matrices by which models walk over them or are mixed along them.

Matrices are NumPy arrays in float64: they are made once, before anything is compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.sparse.csgraph import connected_components

from fedtangent import checks
from fedtangent.checks import real_array, whole
from fedtangent.entries import WrittenEntry, build_written

TOLERANCE = 1e-9  # how far a row's sum may be from 1, and two entries of a symmetric matrix from each other


class Graph(NamedTuple):
    """Clients (nodes) and the pairs of them that can talk to each other (edges): undirected, connected, no loops."""

    name: str
    adjacency: np.ndarray  # [N, N] bool, symmetric, diagonal False

    @property
    def num_nodes(self) -> int:
        """Number of nodes N."""
        return len(self.adjacency)

    @property
    def degrees(self) -> np.ndarray:
        """Number of neighbours of each node, [N] int64."""
        return self.adjacency.sum(axis=1)


def from_adjacency(matrix: np.ndarray, name: str = "graph") -> Graph:
    """The graph with an edge where ``matrix`` [N, N] is not 0.

    Raises ``ValueError`` for a matrix that is not square, not symmetric or not finite, has a node that neighbours
    itself, or is a graph that is not connected: a model could not reach every client.
    """
    given = np.asarray(matrix)
    if given.ndim != 2 or given.shape[0] != given.shape[1] or given.shape[0] < 1:
        raise ValueError(f"adjacency: got shape {given.shape}, must be square with at least one node")
    if not np.all(np.isfinite(given)):
        raise ValueError("adjacency: got entries that are not finite")
    adjacency = given != 0
    if not np.array_equal(adjacency, adjacency.T):
        i, j = np.argwhere(adjacency != adjacency.T)[0]
        raise ValueError(
            f"adjacency: must be symmetric, but the nodes {i} and {j} are neighbours in one direction only"
        )
    if adjacency.diagonal().any():
        node = int(np.flatnonzero(adjacency.diagonal())[0])
        raise ValueError(f"adjacency: the node {node} is its own neighbour, the diagonal must be 0")
    parts, _ = connected_components(adjacency, directed=False)
    if parts > 1:
        raise ValueError(f"{name}: is not connected, its {len(adjacency)} nodes fall into {parts} components")
    return Graph(name, adjacency)


def ring(num_nodes: int) -> Graph:
    """Node i beside the nodes i - 1 and i + 1, in a circle (FE-2024, figure 5)."""
    return torus(1, whole("num_nodes", num_nodes))._replace(name=f"ring({num_nodes})")


def torus(rows: int, cols: int) -> Graph:
    """A grid of ``rows`` x ``cols`` nodes, node ``r * cols + c`` beside the four around it; the edges wrap around."""
    rows, cols = whole("rows", rows), whole("cols", cols)
    node = np.arange(rows * cols).reshape(rows, cols)
    adjacency = np.zeros((rows * cols, rows * cols), bool)
    for axis in (0, 1):
        adjacency[node, np.roll(node, 1, axis)] = True
    adjacency |= adjacency.T
    np.fill_diagonal(adjacency, False)  # a single row is beside itself
    return from_adjacency(adjacency, f"torus({rows}, {cols})")


def complete(num_nodes: int) -> Graph:
    """Every node beside every other."""
    number = whole("num_nodes", num_nodes)
    return from_adjacency(~np.eye(number, dtype=bool), f"complete({number})")


def erdos_renyi(num_nodes: int, probability: float, seed: int) -> Graph:
    """Each pair of nodes is an edge with a probability, independently (Erdos and Renyi's G(n, p)).

    Raises ``ValueError`` for a probability outside [0, 1], or if the graph that ``seed`` draws is not connected: the
    draw is not repeated, since that would be another distribution.
    """
    number = whole("num_nodes", num_nodes)
    if not 0 <= probability <= 1:
        raise ValueError(f"probability: got {probability}, must be from 0 to 1")
    upper = np.triu(np.random.default_rng(checks.seed(seed)).random((number, number)) < probability, 1)
    parts, _ = connected_components(upper | upper.T, directed=False)
    if parts > 1:
        raise ValueError(
            f"erdos_renyi({number}, {probability}): seed {seed} draws a graph that is not connected, of {parts} "
            f"components; take another seed or a larger probability"
        )
    return from_adjacency(upper | upper.T, f"erdos_renyi({number}, {probability}, seed {seed})")


def metropolis_hastings(graph: Graph) -> np.ndarray:
    """Transition matrix [N, N] of the random walk whose stationary law is uniform (Metropolis-Hastings).

    A neighbour is proposed uniformly and accepted with probability ``min(1, d_i / d_j)``: ``P_ij = 1 / max(d_i, d_j)``
    along edges, and the rest is the probability to stay. Rows sum to 1 and P is symmetric.
    """
    return _from_edges(graph, _largest_degree(graph))


def metropolis_weights(graph: Graph) -> np.ndarray:
    """Mixing matrix [N, N] for gossip: ``W_ij = 1 / (1 + max(d_i, d_j))`` along edges (Xiao, Boyd and Kim, 2007).

    Symmetric, rows sum to 1. Unlike ``metropolis_hastings`` every node keeps a share of its own, so that all
    eigenvalues but one lie inside (-1, 1) and models agree also on a graph of two colours, such as an even ring.
    """
    return _from_edges(graph, 1 + _largest_degree(graph))


def spectral_gap(matrix: np.ndarray) -> float:
    """``1 - max(|lambda_2|, |lambda_N|)`` of a symmetric stochastic matrix: how fast walks or models mix, in [0, 1].

    0 where they never do (graphs of two colours without a share of staying), 1 for a single node. Raises
    ``ValueError`` for a matrix that is not symmetric and doubly stochastic.
    """
    check_doubly_stochastic("matrix", matrix)
    moduli = np.sort(np.abs(np.linalg.eigvalsh(np.asarray(matrix, np.float64))))
    return float(1 - moduli[-2]) if len(moduli) > 1 else 1.0


def check_stochastic(name: str, matrix: np.ndarray) -> None:
    """Raise ``ValueError`` unless a matrix is square, its entries are at least 0 and its rows sum to 1."""
    given = real_array(name, matrix)
    if given.ndim != 2 or given.shape[0] != given.shape[1] or given.shape[0] < 1:
        raise ValueError(f"{name}: got shape {given.shape}, must be square")
    if not np.all(given >= 0):  # also what is not a number
        raise ValueError(f"{name}: has the entry {given[~(given >= 0)][0]}, must be at least 0")
    sums = given.sum(axis=1)
    if not np.all(np.abs(sums - 1) <= TOLERANCE):
        row = int(np.argmax(np.abs(sums - 1)))
        raise ValueError(f"{name}: row {row} sums to {sums[row]}, must sum to 1")


def check_doubly_stochastic(name: str, matrix: np.ndarray) -> None:
    """Raise ``ValueError`` unless a matrix is stochastic and symmetric (and so doubly stochastic)."""
    check_stochastic(name, matrix)
    given = np.asarray(matrix, np.float64)
    if not np.all(np.abs(given - given.T) <= TOLERANCE):
        i, j = np.unravel_index(int(np.argmax(np.abs(given - given.T))), given.shape)
        raise ValueError(f"{name}: must be symmetric, but [{i}, {j}] is {given[i, j]} and [{j}, {i}] is {given[j, i]}")


def _largest_degree(graph: Graph) -> np.ndarray:
    """The larger degree of each pair of nodes, at least 1, [N, N]."""
    return np.maximum(np.maximum.outer(graph.degrees, graph.degrees), 1)


def _from_edges(graph: Graph, denominator: np.ndarray) -> np.ndarray:
    """``1 / denominator`` along edges; the diagonal takes what is left of each row."""
    matrix = np.where(graph.adjacency, 1 / denominator, 0.0)
    np.fill_diagonal(matrix, np.maximum(1 - matrix.sum(axis=1), 0.0))
    return matrix


def named_graph(text: str, num_nodes: int, seed: int) -> Graph:
    """The graph that is written ``text``, such as ``erdos_renyi:0.3``; raises ``ValueError`` where it names none."""
    found: Graph = build_written("graphs", text, num_nodes, seed)
    return found


def _square(num_nodes: int, seed: int) -> Graph:
    """The torus of ``num_nodes`` nodes whose two sides are nearest to equal."""
    rows = max(r for r in range(1, int(num_nodes**0.5) + 1) if num_nodes % r == 0)
    return torus(rows, num_nodes // rows)


ENTRIES = (
    WrittenEntry("ring", "each client beside two others, in a circle", lambda num_nodes, seed: ring(num_nodes)),
    WrittenEntry("torus", "a grid whose edges wrap around, as square as can be", _square),
    WrittenEntry("complete", "each client beside every other", lambda num_nodes, seed: complete(num_nodes)),
    WrittenEntry(
        "erdos_renyi",
        "each pair of clients with a probability",
        lambda probability, num_nodes, seed: erdos_renyi(num_nodes, probability, seed),
        number="probability",
    ),
)
