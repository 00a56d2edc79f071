"""The messages from which a server could read examples: gradients and Jacobians, whole, sparsified or shuffled."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Bool, Float, Int, Shaped

from fedtangent._src.federated.wire.sparsify import check_sparsity, thresholds
from fedtangent._src.losses import Loss, check_targets, get_loss
from fedtangent._src.types import AnyArray, Array, Model, PyTree


class Observed(NamedTuple):
    """The messages that a server receives, about a network of C outputs and P parameters.

    Attributes:
        values: Jacobians [m, C, P] or gradients [m, P] of m messages; entries that were not sent are 0.
        kept: Whether each entry was sent, shaped like ``values``.
    """

    values: Float[Array, "m ..."]
    kept: Bool[Array, "m ..."]


def jacobians(model: Model, params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Observed:
    """Computes every example's Jacobian of the outputs by the parameters: ``values`` [n, C, P] for ``x`` [n, ...].

    A client of NTK-FL sends this message (Yue et al., 2022, section 4.1). The P parameters are in the order of
    ``jax.flatten_util.ravel_pytree``.

    Args:
        model: The clients' network.
        params: Its parameters.
        x: Inputs [n, ...].
    """
    values = _jacobians(model, params, jnp.asarray(x))
    return Observed(values, jnp.ones(values.shape, bool))


@partial(jax.jit, static_argnums=0)
def _jacobians(model: Model, params: PyTree, x: Shaped[Array, "n ..."]) -> Float[Array, "n C P"]:
    flat, unravel = ravel_pytree(params)

    def of_one(example: Array) -> Array:
        return jax.jacrev(lambda w: model.apply(unravel(w), example[None])[0])(flat)

    return jax.vmap(of_one)(x)


def gradient(
    model: Model,
    params: PyTree,
    x: Shaped[AnyArray, "B ..."],
    y: Shaped[AnyArray, "B ..."],
    loss: str = "cross_entropy",
) -> Observed:
    """Computes the gradient, by the P parameters, of the mean loss over one batch: ``values`` [1, P].

    Args:
        model: The clients' network.
        params: Its parameters.
        x: Inputs [B, ...].
        y: Targets of the kind that ``loss`` takes; for the default, integer classes [B].
        loss: Name of a loss.

    Raises:
        ValueError: ``x`` and ``y`` have different lengths, or the loss is unknown or does not take such targets.
    """
    if len(x) != len(y):
        raise ValueError(f"y: got {len(y)} targets, must be {len(x)}, one for each example")
    check_targets(loss, y, "y")
    values = _gradient(model, get_loss(loss), params, jnp.asarray(x), jnp.asarray(y))
    return Observed(values, jnp.ones(values.shape, bool))


@partial(jax.jit, static_argnums=(0, 1))
def _gradient(
    model: Model, loss: Loss, params: PyTree, x: Shaped[Array, "B ..."], y: Shaped[Array, "B ..."]
) -> Float[Array, "1 P"]:
    flat, unravel = ravel_pytree(params)
    mask = jnp.ones(len(x), bool)
    return jax.grad(lambda w: loss(model.apply(unravel(w), x), y, mask))(flat)[None]


def sparsify(messages: Observed, sparsity: float) -> Observed:
    """Sets a share of the entries of each message to zero, the smallest ones in magnitude.

    A message is ``values[i]``: an example's whole Jacobian, or one gradient. Entries are chosen as by the clients of
    CP-NTK-FL (``wire.sparsify``): the largest stay, and so do entries as large as the smallest of these. If fewer
    entries are nonzero than should stay, all count as kept, except those that were not sent before.

    Args:
        messages: Jacobians or gradients; entries may be zero already.
        sparsity: Share of the entries that become zero, in [0, 1).

    Raises:
        ValueError: The sparsity is outside [0, 1).
    """
    check_sparsity(sparsity)
    return _sparsified(float(sparsity), messages)


@partial(jax.jit, static_argnums=0)
def _sparsified(sparsity: float, messages: Observed) -> Observed:
    values, at = messages.values, thresholds(messages.values, sparsity)
    sent = (jnp.abs(values) >= at.reshape((-1,) + (1,) * (values.ndim - 1))) & messages.kept
    return Observed(jnp.where(sent, values, 0), sent)


def shuffle_rows(messages: Observed, order: Int[AnyArray, "m"]) -> Observed:
    """Permutes the examples of messages: row ``i`` of the result is row ``order[i]``.

    CP-NTK-FL permutes "rows and columns in synchronization" (Yue et al., 2022, section 4.2). Its update ``sum_j
    J_{:j:}' R_{:j}`` (eq. 9b), with the Jacobian J [m, C, P] and the server's coefficients R [m, C], does not change if
    the examples are permuted (rows of every ``J_{:j:}``, of the outputs f and the targets Y), or the outputs ``j``
    (with the columns of ``f`` and ``Y``). Neither permutation hides an image, only its owner: each row is reconstructed
    as before, and the derivatives by the last layer's biases reveal the order of the outputs.

    Args:
        messages: Messages of m examples.
        order: Permutation of the examples, [m].
    """
    return jax.tree.map(lambda leaf: leaf[order], messages)


def shuffle_weights(messages: Observed, order: Int[AnyArray, "P"]) -> Observed:
    """Permutes the weights alike for all examples and outputs: column ``p`` of the result is column ``order[p]``.

    The paper (Yue et al., 2022) claims that "considering the high dimensionality of the neural network weight" the
    attack becomes infeasible, which fits this permutation of the columns of the Jacobians. The kernel does not change,
    but someone who knows the order must undo the permutation of the update. The permutation hides to which weight, and
    so to which pixel, a column belongs, until a client reveals examples to the server: ``order_from_known``.

    Args:
        messages: Messages of P weights.
        order: Permutation of the weights, [P].
    """
    return jax.tree.map(lambda leaf: leaf[..., order], messages)
