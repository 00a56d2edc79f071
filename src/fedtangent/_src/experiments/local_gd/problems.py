"""The data of the Local-GD paper (sections 5 and B.1), and runs of its algorithms by the engine.

Training that starts at 0 stays in the span of the n examples in d dimensions. ``Problem.in_span`` expresses a problem
in an orthonormal basis of that span, with ``min(n, d)`` coordinates instead of d. Inner products are the same, and so
are training and distances.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src.comparison.theorems import local_gd

TRUTH, NOISE = 2.0, 0.2  # standard deviations of the truths' entries, and of the noise


class Problem(NamedTuple):
    """Examples of N nodes, float64, in r coordinates: all d dimensions, or the coordinates in ``basis``.

    Attributes:
        x: Inputs, [n, r].
        y: Targets, [n].
        partition: Examples of each node.
        truths: The linear model w_i* that labels the examples of each node, [N, d].
        basis: Orthonormal basis of the coordinates, [d, r]; None if they are all d dimensions.
    """

    x: np.ndarray
    y: np.ndarray
    partition: ft.types.Partition
    truths: np.ndarray
    basis: np.ndarray | None = None

    @property
    def dimension(self) -> int:
        """The dimension d of the inputs."""
        return self.truths.shape[1]

    @property
    def pooled(self) -> Problem:
        """The same examples, all at one node."""
        return self._replace(partition=ft.partition.of([self.partition.indices], len(self.y)))

    def federated(self) -> ft.types.FederatedData:
        """Returns the data on the device, float64."""
        return ft.data.federated_data(self.x, self.y[:, None], self.partition, jnp.float64)

    def in_span(self) -> Problem:
        """Returns the problem in an orthonormal basis of its examples' span; itself if it has d examples or more."""
        if len(self.x) >= self.x.shape[1]:
            return self
        basis, triangle = np.linalg.qr(self.x.T)
        return self._replace(x=np.ascontiguousarray(triangle.T), basis=basis)

    def lifted(self, w: np.ndarray) -> np.ndarray:
        """Converts models ``w`` [.., r] from coordinates in the basis to all dimensions, [.., d]."""
        return w if self.basis is None else np.asarray(w @ self.basis.T)


def regression(
    seed: int, num_nodes: int, examples_per_node: int, dimension: int, spread: float = TRUTH, common: bool = False
) -> Problem:
    """Draws the regression data of the Local-GD paper, ``y_ij = x_ij' w_i* + z_ij`` (eq. (2)).

    The entries of x are N(0, 1), the noise z is N(0, .04), and the entries of each node's truth w_i* are N(0,
    spread^2).

    Args:
        seed: Seed of the draw.
        num_nodes: Number N of nodes.
        examples_per_node: Examples of a node.
        dimension: Dimension d of the inputs.
        spread: Standard deviation of the entries of w_i*.
        common: Whether to add one vector ~ N(0, 4), the same for all nodes, to each w_i*; the paper does not.
    """
    rng = np.random.default_rng([seed, dimension])
    x = rng.standard_normal((num_nodes, examples_per_node, dimension))
    truths = spread * rng.standard_normal((num_nodes, dimension))
    if common:
        truths = truths + TRUTH * rng.standard_normal(dimension)
    return _of(x, np.einsum("nhd,nd->nh", x, truths) + NOISE * rng.standard_normal(x.shape[:2]), truths)


def classification(seed: int, num_nodes: int, examples_per_node: int, dimension: int, spread: float) -> Problem:
    """Draws the classification data of the Local-GD paper, ``y_ij = sign(x_ij' (w* + z_i))`` at node i.

    The entries of x and w* are N(0, 1), the entries of z_i are N(0, spread^2).

    Args:
        seed: Seed of the draw.
        num_nodes: Number N of nodes.
        examples_per_node: Examples of a node.
        dimension: Dimension d of the inputs.
        spread: Standard deviation of the entries of z_i, which the paper does not give.
    """
    rng = np.random.default_rng([seed, dimension])
    x = rng.standard_normal((num_nodes, examples_per_node, dimension))
    truths = rng.standard_normal(dimension) + spread * rng.standard_normal((num_nodes, dimension))
    return _of(x, np.where(np.einsum("nhd,nd->nh", x, truths) >= 0, 1.0, -1.0), truths)


def _of(x: np.ndarray, y: np.ndarray, truths: np.ndarray) -> Problem:
    """Builds a ``Problem`` from inputs [N, h, d], targets [N, h] and truths [N, d] of N nodes with h examples each."""
    nodes, size, dimension = x.shape
    clients = ft.types.Partition(np.arange(nodes * size, dtype=np.int32), size * np.arange(nodes + 1, dtype=np.int32))
    return Problem(x.reshape(-1, dimension), y.reshape(-1), clients, truths)


def dirichlet_halfspaces(seed: int, num_nodes: int, num_examples: int, dimension: int, alpha: float) -> Problem:
    """Draws ``y = sign(x' w*)`` with one w*, and divides each class among nodes by Dir(alpha) (Local-GD, B.1).

    The entries of x and w* are N(0, 1), and every node gets at least one example.

    Args:
        seed: Seed of the draw.
        num_nodes: Number N of nodes.
        num_examples: Examples of all nodes.
        dimension: Dimension d of the inputs.
        alpha: Concentration of the Dirichlet distribution.
    """
    rng = np.random.default_rng([seed, dimension])
    x, truth = rng.standard_normal((num_examples, dimension)), rng.standard_normal(dimension)
    y = np.where(x @ truth >= 0, 1.0, -1.0)
    labels = (y > 0).astype(np.int32)
    nodes = ft.partition.dirichlet(labels, num_nodes, alpha, seed, dirichlet_method="per_class")
    return Problem(x, y, nodes, np.tile(truth, (num_nodes, 1)))


_everybody = functools.cache(ft.schedules.all_clients)  # one object for each N, so that all seeds share a program


def simulated(
    problem: Problem, recipe: str, num_rounds: int, *, learning_rate: float, local_steps: int, **options: float | str
) -> np.ndarray:
    """Trains a linear model of r weights from 0 by ``ft.simulate``, in float64; returns it by round, [R + 1, r].

    All nodes take part in every round with equal weights. Needs 64-bit types.

    Args:
        problem: The nodes' examples.
        recipe: Name of the algorithm's recipe, such as "fed_avg".
        num_rounds: Number R of rounds.
        learning_rate: Step size of local steps.
        local_steps: Local steps in a round.
        **options: Further arguments of the recipe.
    """
    schedule = _everybody(problem.partition.num_clients)
    descent = local_gd.Descent(schedule, local_steps, learning_rate, num_rounds, mapping="scan")
    return local_gd.simulated(getattr(ft, recipe), problem[:3], descent, 1, weighting="uniform", **options)


def off(path: np.ndarray, expected: np.ndarray) -> float:
    """Computes the largest distance of two sequences of models in any round, over the largest norm of an expected one.

    Args:
        path: Models after every round, [R + 1, d].
        expected: Models to compare with, [R + 1, d].
    """
    return float(np.linalg.norm(path - expected, axis=-1).max() / np.linalg.norm(expected, axis=-1).max())
