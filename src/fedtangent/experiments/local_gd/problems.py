"""What the figures of the Local-GD paper share: its data, runs of its algorithms, the row space they take place in.

From w_0 = 0 every step stays in the span of all examples. Problems are therefore stated in an orthonormal basis of it:
inner products, so runs and distances, are those of all d dimensions, in ``min(n, d)`` coordinates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedtangent import data
from fedtangent.data import partition as partitions
from fedtangent.engine.run import params_by_round
from fedtangent.experiments.local_gd import gaussian
from fedtangent.federated import algorithms, schedule
from fedtangent.federated.local import Work
from fedtangent.models.features import linear
from fedtangent.types import Algorithm, Partition


class Problem(NamedTuple):
    """Examples of N nodes, float64, in r coordinates."""

    x: np.ndarray  # [n, r]
    y: np.ndarray  # [n]
    partition: Partition
    basis: np.ndarray  # [d, r], orthonormal: inputs are x @ basis.T
    truths: np.ndarray  # [N, d], w_i*

    @property
    def dimension(self) -> int:
        """d."""
        return len(self.basis)

    @property
    def pooled(self) -> Partition:
        """All examples at one node."""
        return Partition(np.arange(len(self.y), dtype=np.int32), np.array([0, len(self.y)], np.int32))

    def lifted(self, w: np.ndarray) -> np.ndarray:
        """Models [.., r] in all dimensions, [.., d]."""
        return np.asarray(w @ self.basis.T)


def _in_span(x: np.ndarray, y: np.ndarray, partition: Partition, truths: np.ndarray) -> Problem:
    if len(x) >= x.shape[1]:
        return Problem(x, y, partition, np.eye(x.shape[1]), truths)
    basis, triangle = np.linalg.qr(x.T)
    return Problem(np.ascontiguousarray(triangle.T), y, partition, basis, truths)


def gaussian_regression(seed: int, num_nodes: int, examples_per_node: int, dimension: int) -> Problem:
    """``gaussian.regression``, the paper's (section 5, eq. 2)."""
    return _in_span(*gaussian.regression(seed, num_nodes, examples_per_node, dimension))


def halfspaces(seed: int, num_nodes: int, examples_per_node: int, dimension: int, spread: float) -> Problem:
    """``gaussian.classification`` (section 5)."""
    return _in_span(*gaussian.classification(seed, num_nodes, examples_per_node, dimension, spread))


def dirichlet_halfspaces(seed: int, num_nodes: int, num_examples: int, dimension: int, alpha: float) -> Problem:
    """``y = sign(x' w*)`` with one w*, each class divided among the nodes by Dir(alpha), one example or more (B.1)."""
    rng = np.random.default_rng([seed, dimension])
    x, truth = rng.standard_normal((num_examples, dimension)), rng.standard_normal(dimension)
    y = np.where(x @ truth >= 0, 1.0, -1.0)
    labels = (y > 0).astype(np.int32)
    dealt = partitions.dirichlet(labels, num_nodes, alpha, seed, dirichlet_method="per_class")
    return _in_span(x, y, dealt, np.tile(truth, (num_nodes, 1)))


@functools.lru_cache(maxsize=8)
def _algorithm(recipe: str, size: int, nodes: int, rate: float, steps: int, options: tuple[Any, ...]) -> Algorithm:
    """One object, and so one compiled program, for all seeds."""
    make: Callable[..., Algorithm] = getattr(algorithms, recipe)
    model, plan = linear(size, dtype=jnp.float64), schedule.all_clients(nodes)
    return make(
        model, plan, client_learning_rate=rate, work=Work(steps=steps), weighting="uniform", **dict(options)
    )  # fmt: skip


def simulated(
    problem: Problem,
    partition: Partition,
    recipe: str,
    num_rounds: int,
    *,
    learning_rate: float,
    local_steps: int,
    **options: Any,
) -> np.ndarray:
    """The global model after every round of ``recipe`` from 0, [R + 1, r], by the engine, in float64.

    All nodes of ``partition`` take part in every round and count alike. ``options`` are the recipe's. Needs 64-bit
    types.
    """
    named = tuple(sorted(options.items()))
    algorithm = _algorithm(
        recipe, problem.x.shape[1], partition.num_clients, learning_rate, local_steps, named
    )  # fmt: skip
    held = data.federated_data(problem.x, problem.y[:, None], partition, dtype=jnp.float64)
    return np.asarray(params_by_round(algorithm, held, num_rounds, mapping="scan")["weights"][:, 0, :, 0])


def off(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest distance of two paths [R + 1, d] in any round, relative to the longest model expected."""
    return float(np.linalg.norm(found - expected, axis=-1).max() / np.linalg.norm(expected, axis=-1).max())
