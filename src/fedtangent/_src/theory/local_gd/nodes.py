"""The examples of all nodes as padded arrays, in the form that the theory of Local-GD reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int

from fedtangent._src.checks import finite, instance, number, real_array, whole
from fedtangent._src.theory import checks
from fedtangent._src.types import ArrayLike, Partition


class Nodes(NamedTuple):
    """Examples of N nodes, float64; rows beyond a node's examples are 0."""

    x: Float64[np.ndarray, "N n d"]
    y: Float64[np.ndarray, "N n *C"]  # or [N, n, C]
    sizes: Int[np.ndarray, "N"]  # number of examples of a node

    @property
    def held(self) -> Bool[np.ndarray, "N n"]:
        """Mask of the rows that are examples, [N, n] bool."""
        return np.arange(self.y.shape[1]) < self.sizes[:, None]


def nodes_of(x: ArrayLike, y: ArrayLike, partition: Partition) -> Nodes:
    """Divides inputs and targets among nodes.

    Args:
        x: Inputs [n, d].
        y: Targets [n] or [n, C].
        partition: Examples of each node, at least one.
    """
    inputs, targets = checks.check_rows("x", x, "n, d"), real_array("y", y)
    if targets.ndim not in (1, 2) or len(targets) != len(inputs) or 0 in targets.shape:
        raise ValueError(f"y: got shape {targets.shape}, must be ({len(inputs)},) or ({len(inputs)}, C)")
    finite("y", targets)
    instance("partition", partition, Partition)
    partition = checks.check_partition(partition, len(inputs), occupied=True)
    sizes = np.asarray(partition.sizes, np.int64)
    padded = len(sizes), int(sizes.max())
    nodes = Nodes(np.zeros((*padded, inputs.shape[1])), np.zeros((*padded, *targets.shape[1:])), sizes)
    for i, size in enumerate(sizes):
        rows = partition.client(i)
        nodes.x[i, :size], nodes.y[i, :size] = inputs[rows], targets[rows]
    return nodes


def check_start(start: ArrayLike | None, shape: tuple[int, ...]) -> Float64[np.ndarray, "..."]:
    """Checks the initial model of a run and returns it as float64; zeros for None.

    Args:
        start: Initial model, or None.
        shape: Required shape, (d,) or (d, C).
    """
    if start is None:
        return np.zeros(shape)
    values = real_array("start", start)
    checks.check_shape("start", values, shape)
    finite("start", values)
    return values


def local_descent(learning_rate: float | None, local_steps: int | None) -> tuple[float, int] | None:
    """Checks and returns step size and number of a node's local steps; None if neither is set.

    Args:
        learning_rate: Step size; it and ``local_steps`` must be set both or neither.
        local_steps: Number of steps.
    """
    if (learning_rate is None) != (local_steps is None):
        raise ValueError(f"local_steps: got {local_steps} with learning_rate={learning_rate}, must be both or neither")
    if learning_rate is None or local_steps is None:
        return None
    return number("learning_rate", learning_rate, above=0), whole("local_steps", local_steps)


def check_weights(weights: ArrayLike, sizes: Int[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
    """Returns the weight of each node in the mean, [N] with sum 1.

    Args:
        weights: "uniform" (as in the paper), "examples", or N numbers.
        sizes: Number of examples of each node [N].
    """
    if isinstance(weights, str):
        if weights not in ("uniform", "examples"):
            raise ValueError(f"weights: got {weights!r}, allowed are uniform, examples, or one number per node")
        weights = sizes if weights == "examples" else np.ones(len(sizes))
    values = real_array("weights", weights)
    checks.check_shape("weights", values, (len(sizes),))
    finite("weights", values)
    if not np.all(values >= 0) or not np.any(values > 0):
        raise ValueError(f"weights: got {values.min():g} as the least, must be at least 0, and above 0 for one node")
    values = values / values.max()  # so that their sum is finite
    return np.asarray(values / values.sum())
