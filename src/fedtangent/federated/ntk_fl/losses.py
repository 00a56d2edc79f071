"""The losses that NTK-FL's evolution descends, each as all that the evolution asks of one, and their targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.types import Array


class OutputLoss(NamedTuple):
    """A loss of outputs f [n, C] and targets y [n, C], whose derivative is ``predict(f) - y`` over a constant."""

    predict: Callable[[Array], Array]  # f -> what is compared with y, [n, C]
    examples: Callable[[Array, Array], Array]  # (f, y) -> of every example, before the mean over what counts, [n]
    averages_outputs: bool  # whether the mean is over n C and not over n
    curvature: float  # the largest of an example's loss by its outputs
    stable: str  # the largest stable learning rate, times lambda_max of the kernel
    labels: str  # what to do with class labels

    def divisor(self, num_examples: Array | float, num_outputs: int) -> Array | float:
        """What the loss is divided by, and the learning rate with it."""
        return num_examples * (num_outputs if self.averages_outputs else 1)


def _cross_entropy(outputs: Array, y: Array) -> Array:
    # A probability that came out 0 where the target is 0 counts 0, not NaN.
    return -jnp.sum(jnp.where(y > 0, y * jax.nn.log_softmax(outputs, axis=1), 0), axis=1)


OUTPUT_LOSSES = {
    "squared_error": OutputLoss(
        predict=lambda outputs: outputs,
        examples=lambda outputs, y: jnp.sum((outputs - y) ** 2, axis=1) / 2,
        averages_outputs=True,
        curvature=1.0,
        stable="2 N C",
        labels="class labels: one-hot, as data.classification_targets makes them, or loss cross_entropy",
    ),
    "cross_entropy": OutputLoss(
        predict=lambda outputs: jax.nn.softmax(outputs, axis=1),
        examples=_cross_entropy,
        averages_outputs=False,
        curvature=0.5,
        stable="4 N",
        labels="class labels: whole numbers [n]",
    ),
}
LOSSES = tuple(OUTPUT_LOSSES)


def probabilities(name: str, y: Array, num_classes: int, mask: Array | None = None) -> Array:
    """Targets of the cross entropy as probabilities [n, C], from those or from class labels [n].

    Raises ``ValueError`` for fewer than two classes and, where values are known, for rows that are not probabilities
    and labels that are not classes. Other shapes come back as they are.
    """
    if num_classes < 2:
        raise ValueError(f"loss: got 'cross_entropy', needs at least two outputs, but the model has {num_classes}")
    known = not any(isinstance(value, jax.core.Tracer) for value in (y, mask))
    fits = np.ndim(y) > 0 and (mask is None or np.shape(mask) == np.shape(y)[:1])
    rows = np.asarray(y)[slice(None) if mask is None else np.asarray(mask) != 0] if known and fits else np.empty(0)
    if np.ndim(y) == 1 and jnp.issubdtype(y.dtype, jnp.integer):
        if np.any((rows < 0) | (rows >= num_classes)):
            raise ValueError(f"{name}: class labels must be from 0 to {num_classes - 1}")
        return jax.nn.one_hot(y, num_classes, dtype=jnp.float64)
    if rows.ndim == 2 and not (np.all(rows >= 0) and np.allclose(rows.sum(axis=1), 1, atol=1e-6)):
        raise ValueError(
            f"{name}: loss is cross_entropy, so rows must be probabilities (one-hot targets without their mean), "
            "or class labels [n]"
        )
    return y
