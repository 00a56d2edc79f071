"""Losses of a minibatch: the mean, or the sum, over its real examples; rows that only pad the batch do not count.

A loss called ``<name>_sum`` is the sum over examples of which ``<name>`` is the mean. ``targets_of`` returns whether a
loss takes numbers, classes or signs (-1 and 1) as targets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Bool, Float, Int, Num

from fedtangent._src.checks import choice, has_hash
from fedtangent._src.pytrees import wide
from fedtangent._src.types import AnyArray, Array, ArrayLike, Loss

LEAST_MARGIN = -60.0
"""Margin below which ``exponential`` continues as a straight line.

At this margin the loss is e^60 = 1.1e26. That leaves twelve decades of float32 (up to 3.4e38) for sums over examples
and for the factors that multiply a gradient.
"""
SUM = "_sum"
FAR = 100.0  # a run has diverged if its training loss is over this many times the first one
NOT_FINITE = "numbers are not finite"


def masked_mean(per_example: Float[AnyArray, "B"], mask: Bool[AnyArray, "B"]) -> Float[Array, ""]:
    """Computes the mean over the examples that a mask selects, a scalar in float32 at least; 0 if it selects none.

    Args:
        per_example: A number for each example, [B].
        mask: Whether a row is a real example, [B] bool.
    """
    total = jnp.sum(jnp.where(mask, wide(per_example), 0))
    return total / jnp.maximum(jnp.sum(mask), 1).astype(total.dtype)


def squared_error(
    outputs: Float[AnyArray, "B C"], targets: Num[AnyArray, "B C"], mask: Bool[AnyArray, "B"]
) -> Float[Array, ""]:
    """Computes ``1 / (2 n) sum_j |f(x_j) - y_j|^2`` over the n real examples, a scalar (paper FE-2024, eq. (9)).

    Args:
        outputs: Outputs f of the network [B, C].
        targets: Numbers y [B, C].
        mask: Whether a row is a real example, [B] bool.

    Raises:
        ValueError: The shapes of outputs and targets differ.
    """
    _check_shape(targets, outputs)
    return masked_mean(0.5 * jnp.sum((wide(outputs) - targets) ** 2, axis=-1), mask)


def cross_entropy(
    outputs: Float[AnyArray, "B C"], targets: Num[AnyArray, "B *C"], mask: Bool[AnyArray, "B"]
) -> Float[Array, ""]:
    """Computes the mean softmax cross entropy over the real examples, a scalar.

    Args:
        outputs: Logits [B, C].
        targets: Integer labels [B], or probabilities of the classes [B, C], floating. Runs take integer labels.
        mask: Whether a row is a real example, [B] bool.

    Raises:
        ValueError: Floating targets of another shape than the outputs.
    """
    log_probability = jax.nn.log_softmax(wide(outputs), axis=-1)
    if jnp.issubdtype(targets.dtype, jnp.floating):
        _check_shape(targets, outputs)
        return masked_mean(-jnp.sum(targets * log_probability, axis=-1), mask)
    return masked_mean(-jnp.take_along_axis(log_probability, targets[:, None], axis=-1)[:, 0], mask)


def exponential(
    outputs: Float[AnyArray, "B C"], targets: Num[AnyArray, "B C"], mask: Bool[AnyArray, "B"]
) -> Float[Array, ""]:
    """Computes ``1 / n sum_j sum_c exp(-y_jc f_jc)`` over the n real examples, a scalar.

    This is eq. (12) of Local-GD as a mean. The paper's binary case has C = 1; with more outputs, each output tells one
    class from the rest. Where ``y f`` is below -60 (``LEAST_MARGIN``), the exponential is replaced by its tangent at
    that point. So in float32 the gradient is finite for every finite output, and the value is finite for outputs up to
    1e12.

    Args:
        outputs: Outputs f of the network [B, C].
        targets: -1 and 1, y [B, C], in a floating dtype.
        mask: Whether a row is a real example, [B] bool.

    Raises:
        ValueError: The shapes of outputs and targets differ.
    """
    _check_shape(targets, outputs)
    margin = targets * wide(outputs)
    curve = jnp.exp(-jnp.maximum(margin, LEAST_MARGIN))
    line = math.exp(-LEAST_MARGIN) * jnp.maximum(LEAST_MARGIN - margin, 0)
    return masked_mean(jnp.sum(curve + line, axis=-1), mask)


def logistic(
    outputs: Float[AnyArray, "B C"], targets: Num[AnyArray, "B C"], mask: Bool[AnyArray, "B"]
) -> Float[Array, ""]:
    """Computes ``1 / n sum_j sum_c log(1 + exp(-y_jc f_jc))`` over the n real examples, a scalar, without overflow.

    Args:
        outputs: Outputs f of the network [B, C].
        targets: -1 and 1, y [B, C], in a floating dtype.
        mask: Whether a row is a real example, [B] bool.

    Raises:
        ValueError: The shapes of outputs and targets differ.
    """
    _check_shape(targets, outputs)
    return masked_mean(jnp.sum(jax.nn.softplus(-targets * wide(outputs)), axis=-1), mask)


def summed(loss: Loss) -> Loss:
    """Returns the loss that is the sum over the real examples, for a ``loss`` that is their mean."""

    def total(outputs: Float[Array, "B C"], targets: Num[Array, "B *C"], mask: Bool[Array, "B"]) -> Float[Array, ""]:
        value = wide(loss(wide(outputs), targets, mask))
        return jnp.sum(mask).astype(value.dtype) * value

    return total


def _check_shape(targets: Num[AnyArray, "..."], outputs: Float[AnyArray, "..."]) -> None:
    if outputs.shape != targets.shape:
        raise ValueError(f"targets: got shape {targets.shape}, must be {outputs.shape}, the shape of the outputs")


_MEANS: dict[str, tuple[Loss, str]] = {  # name -> loss, and the kind of its targets
    "squared_error": (squared_error, "numbers"),
    "cross_entropy": (cross_entropy, "classes"),
    "exponential": (exponential, "signs"),
    "logistic": (logistic, "signs"),
}
LOSSES: dict[str, Loss] = {name: loss for name, (loss, _) in _MEANS.items()}
LOSSES |= {name + SUM: summed(loss) for name, loss in LOSSES.items()}


def get_loss(name: str | Loss) -> Loss:
    """Returns the loss function called ``name``; a user's own loss function is returned unchanged.

    Raises:
        ValueError: The name is unknown, and the message lists the allowed names; or the function has no hash.
    """
    if callable(name):
        has_hash("loss", name)
        return name
    choice("loss", name, LOSSES)
    return LOSSES[name]


def mean_form(name: str | Loss) -> str | Loss:
    """Returns the name of a loss without "_sum": "logistic" for "logistic_sum". A function is returned unchanged.

    Raises:
        ValueError: An unknown name.
    """
    if callable(name):
        return name
    get_loss(name)
    return name.removesuffix(SUM)


def targets_of(name: str | Loss) -> str:
    """Returns the kind of targets that a loss takes: "numbers", "classes", "signs", or "own" for a user's function.

    Numbers are [n, C]; classes are labels [n] or probabilities [n, C]; signs are -1 and 1 [n, C].

    Raises:
        ValueError: An unknown name.
    """
    mean = mean_form(name)
    return "own" if callable(mean) else _MEANS[mean][1]


def mean_prediction(
    loss: str | Loss, members: Float[AnyArray, "K *rows C"], weights: Float[Array, "K"] | None = None
) -> Float[Array, "*rows C"]:
    """Returns the prediction of an ensemble of K models that were trained by ``loss``, [.., C] in float32 at least.

    If the loss takes class labels, this is the logarithm of the mean of the models' softmax probabilities; a single
    model gives its logits, which have the same softmax. For any other loss it is the mean of the outputs.

    Args:
        loss: Name of a loss, or a function.
        members: Outputs of the K models, [K, .., C].
        weights: Weights of the models, which sum to 1; None for 1/K each.
    """
    outputs = jnp.asarray(wide(members))
    if len(outputs) == 1:
        return outputs[0]
    if targets_of(loss) == "classes":
        shares = jnp.full(len(outputs), 1 / len(outputs), outputs.dtype) if weights is None else weights
        log_shares = jnp.log(shares.astype(outputs.dtype)).reshape((-1,) + (1,) * (outputs.ndim - 1))
        return logsumexp(jax.nn.log_softmax(outputs, axis=-1) + log_shares, axis=0)
    if weights is None:
        return jnp.mean(outputs, axis=0)
    return jnp.tensordot(weights.astype(outputs.dtype), outputs, axes=1, precision="highest")


@jax.jit
def is_right(outputs: Float[AnyArray, "*rows C"], labels: Int[AnyArray, "*rows"]) -> Float[Array, "*rows"]:
    """Returns 1 where the largest output is at the label, else 0; NaN where the largest output is not finite.

    Args:
        outputs: Outputs or probabilities of the classes, [.., C].
        labels: Class labels [..].
    """
    largest = jnp.max(outputs, axis=-1)
    return jnp.where(jnp.isfinite(largest), (jnp.argmax(outputs, axis=-1) == labels).astype(largest.dtype), jnp.nan)


def words(name: str | Loss) -> str:
    """Returns the name of a loss as words: "squared error" for "squared_error"; for a function, the function's name."""
    return str(getattr(name, "__name__", "the user's own loss") if callable(name) else name).replace("_", " ")


def check_targets(name: str | Loss, values: AnyArray, argument: str = "targets") -> None:
    """Raises ``ValueError`` if targets are bools, or if they are not -1 and 1 for a loss that takes signs.

    The values of traced targets are not checked, nor are targets of a user's own loss.

    Args:
        name: Name of the loss, or the user's loss function.
        values: The targets.
        argument: Name of the targets in the error message.
    """
    if callable(name):
        return
    if getattr(values, "dtype", None) == jnp.bool_:
        raise ValueError(f"{argument}: got True and False, must be numbers")
    if targets_of(name) != "signs" or isinstance(values, jax.core.Tracer) or jnp.size(values) == 0:
        return
    flat = jnp.ravel(jnp.asarray(values))
    wrong = jnp.abs(flat) != 1
    if bool(jnp.any(wrong)):
        raise ValueError(f"{argument}: got {flat[jnp.argmax(wrong)]:g}, must be -1 or 1 for the loss {name!r}")


def divergence(numbers: Iterable[ArrayLike], losses: Sequence[float] | np.ndarray = ()) -> str:
    """Returns a phrase that says how a run has diverged, such as "numbers are not finite"; "" if it has not.

    Args:
        numbers: The last metrics or outputs of the run, which must be finite.
        losses: Training losses, first to last evaluation. A last loss over 100 times the first one (``FAR``) counts as
            divergence; () skips this test.
    """
    if not all(np.isfinite(number).all() for number in numbers):
        return NOT_FINITE
    if len(losses) and losses[-1] > FAR * losses[0]:
        return f"the training loss is over {FAR:.0f} times the first one"
    return ""
