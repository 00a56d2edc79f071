"""The losses that NTK-FL's evolution descends, each as all that the evolution asks of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

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
