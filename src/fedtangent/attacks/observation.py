"""What the server sees of a client's examples: gradients and Jacobians, whole, sparsified or shuffled."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedtangent.federated.wire.sparsify import check_sparsity, thresholds
from fedtangent.losses import Loss, check_targets, get_loss
from fedtangent.types import Array, Model, PyTree


class Observed(NamedTuple):
    """Messages as they arrive: entries that were not sent are zero, and the server knows which were."""

    values: Array  # [m, ...]
    kept: Array  # [m, ...] bool


def jacobians(model: Model, params: PyTree, x: Array) -> Observed:
    """Every example's Jacobian of the outputs by the parameters, materialised: ``values`` [n, C, P].

    ``x`` is [n, ...]; parameters are in the order of ``jax.flatten_util.ravel_pytree``. This is what a client of
    NTK-FL sends (Yue et al., 2022, section 4.1); for training there is no need to materialise it.
    """
    values = _jacobians(model, params, jnp.asarray(x))
    return Observed(values, jnp.ones(values.shape, bool))


@partial(jax.jit, static_argnums=0)
def _jacobians(model: Model, params: PyTree, x: Array) -> Array:
    flat, unravel = ravel_pytree(params)

    def of_one(example: Array) -> Array:
        return jax.jacrev(lambda w: model.apply(unravel(w), example[None])[0])(flat)

    return jax.vmap(of_one)(x)


def gradient(model: Model, params: PyTree, x: Array, y: Array, loss: str = "cross_entropy") -> Observed:
    """The gradient by the parameters of the mean loss over one batch: ``values`` [1, P].

    ``x`` is [B, ...]; ``y`` are what ``loss`` takes (``losses.targets_of``), by default integer classes [B].
    Raises ``ValueError`` if there are not as many.
    """
    if len(x) != len(y):
        raise ValueError(f"y: got {len(y)} targets, must be {len(x)}, one for each example")
    check_targets(loss, y, "y")
    values = _gradient(model, get_loss(loss), params, jnp.asarray(x), jnp.asarray(y))
    return Observed(values, jnp.ones(values.shape, bool))


@partial(jax.jit, static_argnums=(0, 1))
def _gradient(model: Model, loss: Loss, params: PyTree, x: Array, y: Array) -> Array:
    flat, unravel = ravel_pytree(params)
    mask = jnp.ones(len(x), bool)
    return jax.grad(lambda w: loss(model.apply(unravel(w), x), y, mask))(flat)[None]


def sparsify(seen: Observed, sparsity: float) -> Observed:
    """Messages in which the share ``sparsity`` of entries, those of smallest magnitude, is set to zero.

    A message is ``values[i]``: an example's whole Jacobian, or one gradient. Entries are kept exactly as CP-NTK-FL's
    clients keep them (``wire.sparsify``): ``num_kept`` of them and all that equal the least of these in magnitude;
    where fewer are above zero nothing is lost, and all count as kept. Raises ``ValueError`` for a sparsity outside
    [0, 1).
    """
    check_sparsity(sparsity)
    return _sparsified(float(sparsity), seen)


@partial(jax.jit, static_argnums=0)
def _sparsified(sparsity: float, seen: Observed) -> Observed:
    at = thresholds(seen.values, sparsity).reshape((-1,) + (1,) * (seen.values.ndim - 1))
    kept = (jnp.abs(seen.values) >= at) & seen.kept
    return Observed(jnp.where(kept, seen.values, 0), kept)


def shuffle_rows(seen: Observed, order: Array) -> Observed:
    """Examples in another order: row ``i`` of the result is row ``order[i]`` [m].

    CP-NTK-FL permutes "rows and columns in synchronization" (Yue et al., 2022, section 4.2). The update
    ``sum_j J_{:j:}' R_{:j}`` (9b) does not change if the examples are permuted (rows of every ``J_{:j:}``, of ``f`` and
    of ``Y``), nor if the outputs ``j`` are, with the columns of ``f`` and ``Y``. Neither hides an image: a row is
    reconstructed as before, only whose it is, is lost, and the order of the outputs stands in the derivatives by the
    last layer's biases.
    """
    return jax.tree.map(lambda leaf: leaf[order], seen)


def shuffle_weights(seen: Observed, order: Array) -> Observed:
    """Weights in another order, one for all examples and outputs: column ``p`` of the result is ``order[p]`` [P].

    That "considering the high dimensionality of the neural network weight" the attack becomes infeasible fits this
    permutation, of the columns of ``J_{:j:}``: the kernel does not change, but the update comes out permuted, and
    whoever knows the order must put it back. It hides the places of an image's pixels, until a client tells the server
    of examples of its own: ``order_from_known``.
    """
    return jax.tree.map(lambda leaf: leaf[..., order], seen)
