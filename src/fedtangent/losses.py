"""Losses over a masked batch: the mean, or the sum, over the real examples only, so that padding never counts.

A loss called ``<name>_sum`` is the sum over examples where ``<name>`` is their mean. ``targets_of`` says what kind of
targets each loss takes: numbers, classes or signs.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from fedtangent.checks import choice
from fedtangent.types import Array, Loss

LEAST_MARGIN = -60.0
"""Where ``exponential`` goes on as a line: e^60 = 1.1e26 leaves float32 (to 3.4e38) twelve decades for sums over
examples and for what a gradient is multiplied with."""
SUM = "_sum"


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


def exponential(outputs: Array, targets: Array, mask: Array) -> Array:
    """``1 / n sum_j sum_c exp(-y_jc f_jc)`` over the real examples (Local-GD paper, the loss of eq. 12, as a mean).

    ``outputs`` [B, C] are floating; ``targets`` [B, C] are -1 and 1 in a floating dtype: C = 1 is the paper's binary
    case, with more outputs each tells one class from the rest. Where a margin y f is below ``LEAST_MARGIN`` the loss
    goes on as the line that touches it there, so that in float32 the gradient is finite for every finite output, and
    the value for outputs up to 1e12. Raises ``ValueError`` if the shapes of outputs and targets differ.
    """
    _check_shape(targets, outputs)
    margin = targets * outputs
    curve = jnp.exp(-jnp.maximum(margin, LEAST_MARGIN))
    line = math.exp(-LEAST_MARGIN) * jnp.maximum(LEAST_MARGIN - margin, 0)
    return masked_mean(jnp.sum(curve + line, axis=-1), mask)


def logistic(outputs: Array, targets: Array, mask: Array) -> Array:
    """``1 / n sum_j sum_c log(1 + exp(-y_jc f_jc))`` over the real examples, without overflow.

    Arguments and errors are those of ``exponential``.
    """
    _check_shape(targets, outputs)
    return masked_mean(jnp.sum(jax.nn.softplus(-targets * outputs), axis=-1), mask)


def summed(loss: Loss) -> Loss:
    """The loss as a sum over the real examples where ``loss`` is their mean: that times their number."""

    def total(outputs: Array, targets: Array, mask: Array) -> Array:
        value = loss(outputs, targets, mask)
        return jnp.sum(mask.astype(value.dtype)) * value

    return total


def _check_shape(targets: Array, outputs: Array) -> None:
    if outputs.shape != targets.shape:
        raise ValueError(f"targets: got {targets.shape}, must be {outputs.shape}, the shape of the outputs")


_MEANS: dict[str, tuple[Loss, str]] = {  # name -> loss, and what it compares outputs with
    "squared_error": (squared_error, "numbers"),
    "cross_entropy": (cross_entropy, "classes"),
    "exponential": (exponential, "signs"),
    "logistic": (logistic, "signs"),
}
LOSSES: dict[str, Loss] = {name: loss for name, (loss, _) in _MEANS.items()}
LOSSES |= {name + SUM: summed(loss) for name, loss in LOSSES.items()}


def get_loss(name: str | Loss) -> Loss:
    """The loss called ``name``, or the user's own function, which is given back.

    It takes ``outputs`` [B, C], ``targets`` [B, ...] and ``mask`` [B], and returns a scalar, as those here. Raises
    ``ValueError`` with the allowed names.
    """
    if callable(name):
        return name
    choice("loss", name, LOSSES)
    return LOSSES[name]


def mean_form(name: str | Loss) -> str | Loss:
    """Returns the name of a loss as a mean over examples, "logistic" for "logistic_sum"; a function unchanged.

    Raises ``ValueError`` for an unknown name.
    """
    if callable(name):
        return name
    get_loss(name)
    return name.removesuffix(SUM)


def targets_of(name: str | Loss) -> str:
    """Returns the kind of a loss's targets: "numbers", "classes", "signs", or "own" for a user's function.

    "numbers" are [n, C]; "classes" labels [n] or probabilities [n, C]; "signs" numbers -1 and 1 [n, C]. Raises
    ``ValueError`` for an unknown name.
    """
    mean = mean_form(name)
    return "own" if callable(mean) else _MEANS[mean][1]


def words(name: str | Loss) -> str:
    """Returns the name of a loss for a text: "squared error" for "squared_error"; of a function its own name."""
    return str(getattr(name, "__name__", "the user's own loss") if callable(name) else name).replace("_", " ")


def check_targets(name: str | Loss, values: Any, what: str = "targets") -> None:
    """Raise ``ValueError`` for targets ``values`` that are bools, or not -1 and 1 for a loss that takes signs.

    ``what`` is their name in the error. Traced values pass, and so do targets of a user's own loss.
    """
    if callable(name):
        return
    if getattr(values, "dtype", None) == jnp.bool_:
        raise ValueError(f"{what}: got True and False, must be numbers")
    if targets_of(name) != "signs" or isinstance(values, jax.core.Tracer) or jnp.size(values) == 0:
        return
    flat = jnp.ravel(jnp.asarray(values))
    wrong = jnp.abs(flat) != 1
    if bool(jnp.any(wrong)):
        raise ValueError(f"{what}: got {flat[jnp.argmax(wrong)]:g}, must be -1 or 1 for the loss {name!r}")
