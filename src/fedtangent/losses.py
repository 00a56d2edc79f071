"""Losses over a masked batch: the mean over the real examples only, so that padding never counts."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedtangent.checks import choice
from fedtangent.types import Array

Loss = Callable[[Array, Array, Array], Array]


def masked_mean(per_example: Array, mask: Array) -> Array:
    """Mean of ``per_example`` [B] where ``mask`` [B] is True, a scalar; 0 where it nowhere is."""
    weight = mask.astype(per_example.dtype)
    kept = jnp.where(mask, per_example, jnp.zeros((), per_example.dtype))
    return jnp.sum(kept) / jnp.maximum(jnp.sum(weight), 1)


def squared_error(outputs: Array, targets: Array, mask: Array) -> Array:
    """``1 / (2 n) sum_j |f(x_j) - y_j|^2`` over the real examples, summed over outputs (FE-2024, eq. 9).

    ``outputs`` and ``targets`` are [B, C] floating, ``mask`` is [B] bool; returns a scalar. Raises
    ``ValueError`` if the shapes of outputs and targets differ.
    """
    _check_shape(targets, outputs)
    return masked_mean(0.5 * jnp.sum((outputs - targets) ** 2, axis=-1), mask)


def cross_entropy(outputs: Array, targets: Array, mask: Array) -> Array:
    """Mean softmax cross entropy over the real examples; ``outputs`` are [B, C] logits.

    ``targets`` are [B] integer labels, or [B, C] floating probabilities of the classes. Raises ``ValueError`` for
    floating targets of another shape.
    """
    log_probability = jax.nn.log_softmax(outputs, axis=-1)
    if jnp.issubdtype(targets.dtype, jnp.floating):
        _check_shape(targets, outputs)
        return masked_mean(-jnp.sum(targets * log_probability, axis=-1), mask)
    return masked_mean(-jnp.take_along_axis(log_probability, targets[:, None], axis=-1)[:, 0], mask)


def _check_shape(targets: Array, outputs: Array) -> None:
    if outputs.shape != targets.shape:
        raise ValueError(f"targets: got {targets.shape}, must be {outputs.shape}, the shape of the outputs")


LOSSES: dict[str, Loss] = {"squared_error": squared_error, "cross_entropy": cross_entropy}


def get_loss(name: str) -> Loss:
    """The loss called ``name``; raises ``ValueError`` with the allowed names."""
    choice("loss", name, LOSSES)
    return LOSSES[name]
