"""What the server sees of a client's examples: gradients, Jacobians, whole or sparsified."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedtangent.losses import Loss, get_loss
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

    ``x`` is [B, ...]; ``y`` are integer classes [B] or, of ``loss`` ``"squared_error"``, targets [B, C]. Raises
    ``ValueError`` if there are not as many.
    """
    if len(x) != len(y):
        raise ValueError(f"y: got {len(y)} of {len(x)} examples")
    values = _gradient(model, get_loss(loss), params, jnp.asarray(x), jnp.asarray(y))
    return Observed(values, jnp.ones(values.shape, bool))


@partial(jax.jit, static_argnums=(0, 1))
def _gradient(model: Model, loss: Loss, params: PyTree, x: Array, y: Array) -> Array:
    flat, unravel = ravel_pytree(params)
    mask = jnp.ones(len(x), bool)
    return jax.grad(lambda w: loss(model.apply(unravel(w), x), y, mask))(flat)[None]


def sparsify(seen: Observed, sparsity: float) -> Observed:
    """The share ``1 - sparsity`` of each message's entries of largest magnitude, the others zero.

    A message is ``values[i]``: an example's whole Jacobian, or one gradient. Entries that are equal in magnitude to
    the smallest one kept are kept in the order in which they stand. Raises ``ValueError`` for a sparsity outside
    [0, 1).
    """
    if not (math.isfinite(sparsity) and 0 <= sparsity < 1):
        raise ValueError(f"sparsity: got {sparsity}, must be at least 0 and below 1")
    size = math.prod(seen.values.shape[1:])
    return _largest(max(size - round(sparsity * size), 1), seen)


@partial(jax.jit, static_argnums=0)
def _largest(keep: int, seen: Observed) -> Observed:
    flat = seen.values.reshape(len(seen.values), -1)
    _, places = jax.lax.top_k(jnp.abs(flat), keep)
    rows = jnp.arange(len(flat))[:, None]
    kept = jnp.zeros(flat.shape, bool).at[rows, places].set(True).reshape(seen.values.shape) & seen.kept
    return Observed(jnp.where(kept, seen.values, 0), kept)
