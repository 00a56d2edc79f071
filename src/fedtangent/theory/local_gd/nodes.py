"""The examples of every node side by side, as the theory of Local-GD reads them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedtangent.checks import finite, instance, real_array
from fedtangent.theory import checks
from fedtangent.types import Partition


class Nodes(NamedTuple):
    """N nodes' examples, float64; rows behind a node's own are 0."""

    x: np.ndarray  # [N, n, d]
    y: np.ndarray  # [N, n], or [N, n, C]
    sizes: np.ndarray  # [N] int64, examples of a node

    @property
    def held(self) -> np.ndarray:
        """Which rows are examples, [N, n] bool."""
        return np.arange(self.y.shape[1]) < self.sizes[:, None]


def nodes_of(x: Any, y: Any, partition: Partition) -> Nodes:
    """Inputs x [n, d] and targets y [n] or [n, C] as ``partition`` divides them among nodes.

    Raises ``ValueError`` for shapes that do not fit, numbers that are not finite, and a node without an example.
    """
    inputs, targets = real_array("x", x), real_array("y", y)
    if inputs.ndim != 2 or 0 in inputs.shape:
        raise ValueError(f"x: got shape {inputs.shape}, must be [n, d] with n, d >= 1")
    if targets.ndim not in (1, 2) or len(targets) != len(inputs) or 0 in targets.shape:
        raise ValueError(f"y: got shape {targets.shape}, must be ({len(inputs)},) or ({len(inputs)}, C)")
    finite("x", inputs)
    finite("y", targets)
    instance("partition", partition, Partition)
    partition = checks.check_partition(partition, len(inputs))
    sizes = np.asarray(partition.sizes, np.int64)
    if not sizes.all():
        raise ValueError(f"partition: got node {int(np.argmin(sizes))} without an example, must be one or more each")
    largest = int(sizes.max())
    padded = len(sizes), largest
    found = Nodes(np.zeros((*padded, inputs.shape[1])), np.zeros((*padded, *targets.shape[1:])), sizes)
    for i, size in enumerate(sizes):
        rows = partition.client(i)
        found.x[i, :size], found.y[i, :size] = inputs[rows], targets[rows]
    return found


def check_start(start: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The model that a run starts from, [d] (or [d, C]) float64; zeros for None."""
    if start is None:
        return np.zeros(shape)
    values = real_array("start", start)
    checks.check_shape("start", values, shape)
    finite("start", values)
    return values


def check_weights(weights: Any, sizes: np.ndarray) -> np.ndarray:
    """What each node counts in the mean, [N] with sum 1: "uniform" (the paper's), "examples", or N numbers."""
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
