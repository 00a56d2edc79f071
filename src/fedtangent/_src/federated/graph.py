"""Connected graphs of clients, and matrices on them: transition matrices of walks and mixing matrices of models.

Matrices are NumPy arrays in float64, made once before anything is compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Bool, Float, Float64, Int, Num, Shaped

from fedtangent._src import checks
from fedtangent._src.checks import real_array, whole
from fedtangent._src.entries import WrittenEntry, build_written

TOLERANCE = 1e-9  # how far a row's sum may be from 1, and two entries of a symmetric matrix from each other


class Graph(NamedTuple):
    """An undirected connected graph without loops: its nodes are clients, its edges the pairs that can communicate."""

    name: str
    adjacency: Bool[np.ndarray, "N N"]  # symmetric, diagonal False

    @property
    def num_nodes(self) -> int:
        """Number of nodes N."""
        return len(self.adjacency)

    @property
    def degrees(self) -> Int[np.ndarray, "N"]:
        """Number of neighbours of each node, [N] int64."""
        return self.adjacency.sum(axis=1)


def from_adjacency(matrix: Shaped[np.ndarray, "N N"], name: str = "graph") -> Graph:
    """Builds the graph with an edge between i and j wherever ``matrix[i, j]`` is not 0.

    Args:
        matrix: Adjacency matrix [N, N]; its nonzero entries may have any values.
        name: Name of the graph.

    Raises:
        ValueError: The matrix is empty, not square or not finite, is nonzero at (i, j) but zero at (j, i), or has a
            nonzero diagonal entry; or the graph is not connected.
    """
    entries = np.asarray(matrix)
    if entries.ndim != 2 or entries.shape[0] != entries.shape[1] or entries.shape[0] < 1:
        raise ValueError(f"matrix: got shape {entries.shape}, must be square with at least one row")
    if not np.all(np.isfinite(entries)):
        raise ValueError("matrix: got entries that are not finite, must be finite")
    adjacency = entries != 0
    if not np.array_equal(adjacency, adjacency.T):
        i, j = np.argwhere(adjacency != adjacency.T)[0]
        raise ValueError(f"matrix: must be symmetric, but the nodes {i} and {j} are neighbours in one direction only")
    if adjacency.diagonal().any():
        node = int(np.flatnonzero(adjacency.diagonal())[0])
        raise ValueError(f"matrix: the node {node} is its own neighbour, the diagonal must be 0")
    parts, _ = scipy.sparse.csgraph.connected_components(adjacency, directed=False)
    if parts > 1:
        raise ValueError(f"{name}: is not connected, its {len(adjacency)} nodes fall into {parts} components")
    return Graph(name, adjacency)


def ring(num_nodes: int) -> Graph:
    """Returns a circle, in which node i neighbours the nodes i - 1 and i + 1 modulo N (paper FE-2024, figure 5).

    Args:
        num_nodes: Nodes N.

    Raises:
        ValueError: ``num_nodes`` is not a whole number of at least 1.
    """
    return torus(1, whole("num_nodes", num_nodes))._replace(name=f"ring({num_nodes})")


def torus(rows: int, cols: int) -> Graph:
    """Returns a grid of ``rows`` x ``cols`` nodes whose edges wrap around.

    Node ``r * cols + c`` neighbours the four nodes around it. With fewer than three rows or columns a node has fewer
    neighbours: some of the four coincide, or are the node itself.

    Args:
        rows: Number of rows.
        cols: Number of columns.

    Raises:
        ValueError: A number that is not a whole number of at least 1.
    """
    rows, cols = whole("rows", rows), whole("cols", cols)
    node = np.arange(rows * cols).reshape(rows, cols)
    adjacency = np.zeros((rows * cols, rows * cols), bool)
    for axis in (0, 1):
        adjacency[node, np.roll(node, 1, axis)] = True
    adjacency |= adjacency.T
    np.fill_diagonal(adjacency, False)  # a single row is beside itself
    return from_adjacency(adjacency, f"torus({rows}, {cols})")


def complete(num_nodes: int) -> Graph:
    """Returns the graph in which every node neighbours every other.

    Args:
        num_nodes: Nodes N.

    Raises:
        ValueError: ``num_nodes`` is not a whole number of at least 1.
    """
    number = whole("num_nodes", num_nodes)
    return from_adjacency(~np.eye(number, dtype=bool), f"complete({number})")


def erdos_renyi(num_nodes: int, probability: float, seed: int) -> Graph:
    """Draws a graph in which each pair of nodes is an edge with a given probability, independently (G(n, p)).

    Args:
        num_nodes: Nodes N.
        probability: Probability of an edge.
        seed: Seed of the draw.

    Raises:
        ValueError: A probability outside [0, 1], ``num_nodes`` below 1, an invalid seed, or a drawn graph that is not
            connected. (Drawing again until it is connected would change the distribution of the graph.)
    """
    number = whole("num_nodes", num_nodes)
    if not 0 <= probability <= 1:
        raise ValueError(f"probability: got {probability}, must be from 0 to 1")
    upper = np.triu(np.random.default_rng(checks.seed(seed)).random((number, number)) < probability, 1)
    parts, _ = scipy.sparse.csgraph.connected_components(upper | upper.T, directed=False)
    if parts > 1:
        raise ValueError(
            f"erdos_renyi({number}, {probability}): seed {seed} draws a graph that is not connected, of {parts} "
            f"components; take another seed or a larger probability"
        )
    return from_adjacency(upper | upper.T, f"erdos_renyi({number}, {probability}, seed {seed})")


def metropolis_hastings(graph: Graph) -> Float64[np.ndarray, "N N"]:
    """Returns the transition matrix P [N, N] of a random walk whose stationary distribution is uniform.

    It is Metropolis-Hastings: ``P_ij = 1 / max(d_i, d_j)`` along edges, with d_i the number of neighbours of node i.
    With the remaining probability the walk stays. P is symmetric, and its rows sum to 1.
    """
    return _from_edges(graph, _largest_degree(graph))


def metropolis_weights(graph: Graph) -> Float64[np.ndarray, "N N"]:
    """Returns the mixing matrix ``W_ij = 1 / (1 + max(d_i, d_j))`` along edges, [N, N] (Xiao, Boyd and Kim, 2007).

    d_i is the number of neighbours of node i. W is symmetric and its rows sum to 1. Unlike ``metropolis_hastings``, W
    has a positive diagonal, so that models come to agree even on a bipartite graph, such as an even ring.
    """
    return _from_edges(graph, 1 + _largest_degree(graph))


def spectral_gap(matrix: Float[np.ndarray, "N N"]) -> float:
    """Returns ``1 - max(|lambda_2|, |lambda_N|)`` of a symmetric stochastic matrix, a number in [0, 1].

    lambda_2 and lambda_N are the second largest and the smallest eigenvalue. The larger the gap, the faster a random
    walk forgets its start, and the faster neighbours' models come to agree. It is 0 if they never do (a graph that is
    not connected, or a bipartite one with a zero diagonal), and 1 for a single node.

    Raises:
        ValueError: The matrix is not symmetric and doubly stochastic.
    """
    check_doubly_stochastic("matrix", matrix)
    moduli = np.sort(np.abs(np.linalg.eigvalsh(np.asarray(matrix, np.float64))))
    return float(1 - moduli[-2]) if len(moduli) > 1 else 1.0


def check_stochastic(name: str, matrix: Num[np.ndarray, "N N"]) -> None:
    """Raises ``ValueError`` unless a matrix is square, its entries are at least 0 and its rows sum to 1.

    Args:
        name, matrix: Name of the matrix, for the error message, and the matrix [N, N].
    """
    entries = real_array(name, matrix)
    if entries.ndim != 2 or entries.shape[0] != entries.shape[1] or entries.shape[0] < 1:
        raise ValueError(f"{name}: got shape {entries.shape}, must be square")
    if not np.all(entries >= 0):  # also for NaN
        raise ValueError(f"{name}: has the entry {entries[~(entries >= 0)][0]}, must be at least 0")
    sums = entries.sum(axis=1)
    if not np.all(np.abs(sums - 1) <= TOLERANCE):
        row = int(np.argmax(np.abs(sums - 1)))
        raise ValueError(f"{name}: row {row} sums to {sums[row]}, must sum to 1")


def check_doubly_stochastic(name: str, matrix: Num[np.ndarray, "N N"]) -> None:
    """Raises ``ValueError`` unless a matrix is stochastic and symmetric (and so doubly stochastic).

    Args:
        name, matrix: Name of the matrix, for the error message, and the matrix [N, N].
    """
    check_stochastic(name, matrix)
    entries = np.asarray(matrix, np.float64)
    if not np.all(np.abs(entries - entries.T) <= TOLERANCE):
        i, j = np.unravel_index(int(np.argmax(np.abs(entries - entries.T))), entries.shape)
        raise ValueError(
            f"{name}: must be symmetric, but [{i}, {j}] is {entries[i, j]} and [{j}, {i}] is {entries[j, i]}"
        )


def _largest_degree(graph: Graph) -> Int[np.ndarray, "N N"]:
    """Returns for each pair of nodes the larger of their numbers of neighbours, at least 1, [N, N]."""
    return np.maximum(np.maximum.outer(graph.degrees, graph.degrees), 1)


def _from_edges(graph: Graph, denominator: Num[np.ndarray, "N N"]) -> Float[np.ndarray, "N N"]:
    """Returns the matrix with ``1 / denominator`` along edges and a diagonal that makes each row sum to 1, [N, N]."""
    matrix = np.where(graph.adjacency, 1 / denominator, 0.0)
    np.fill_diagonal(matrix, np.maximum(1 - matrix.sum(axis=1), 0.0))
    return matrix


def named_graph(text: str, num_nodes: int, seed: int) -> Graph:
    """Returns the graph that a text describes: "ring", "torus", "complete" or, say, "erdos_renyi:0.3".

    The torus is as square as N allows: a circle if N is prime.

    Args:
        text: Name of a graph, with a colon and the probability of an edge for ``erdos_renyi``.
        num_nodes: Nodes N.
        seed: Seed of a random graph.

    Raises:
        ValueError: ``text`` does not describe a graph, a number is out of range, or the drawn graph is not connected.
    """
    graph: Graph = build_written("graphs", text, num_nodes, seed)
    return graph


def _square(num_nodes: int, seed: int) -> Graph:
    """Returns the torus of ``num_nodes`` nodes whose sides are as equal as possible."""
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
