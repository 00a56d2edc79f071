"""The linearised network on the pooled examples of a cohort, as functions that NTK-FL's evolution calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedtangent._src import pytrees
from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.types import Array, Model, PyTree

BLOCK_SIZE = 1024  # examples by examples of the kernel built at once
CHANGES_BYTES = 2**28  # of changes of weights that are pulled or pushed at once


class Examples(NamedTuple):
    """The examples that a client sends; rows of padding have arbitrary values.

    Attributes:
        x: Inputs [n, ...].
        y: Targets [n, C], or class labels [n].
        mask: Whether a row is a real example, [n] bool.
    """

    x: Array
    y: Array
    mask: Array


class Pool(NamedTuple):
    """The cohort's examples, pooled at the server in float64; rows of padding are zero.

    Attributes:
        x: Inputs [n, ...]; integers keep their dtype.
        y: Targets [n, C].
        mask: 1 at a real example, 0 at padding, [n, 1].
        num_examples: Number of real examples, [] (at least 1).
    """

    x: Array
    y: Array
    mask: Array
    num_examples: Array


class Tangent(NamedTuple):
    """The linearised network on the pooled examples, as functions; rows of padding are zero.

    The Jacobian J [n, C, P], in float64, is the derivative of the outputs by the weights, or a sparsified one.

    Attributes:
        outputs: Outputs f_0 of the network, [n, C].
        gram: Returns the kernel averaged over outputs, [n, n], ``1/C sum_k <J_ik, J_jk>``.
        push: J: function from a change of the weights to the change of the outputs, [n, C].
        pull: The transposed J: function from [n, C] to a change of the weights.
        whole: Returns the kernel of all outputs, [n C, n C].
        remade: Whether each call of push and pull recomputes the Jacobian; a ``vmap`` of calls recomputes it only once.
    """

    outputs: Array
    gram: Callable[[], Array]
    push: Callable[[PyTree], Array]
    pull: Callable[[Array], PyTree]
    whole: Callable[[], Array]
    remade: bool = False


Linearise = Callable[[Model, PyTree, Pool], Tangent]  # (model, weights in float64, pool) -> Tangent


def pool_examples(x: Array, y: Array, mask: Array) -> Pool:
    """Converts examples to float64 and sets padding to zero, so that NaN in the padding has no effect.

    Args:
        x: Inputs [n, ...]; integers keep their dtype.
        y: Targets [n, C].
        mask: Whether a row is a real example, [n] bool.
    """
    real = mask.reshape((-1,) + (1,) * (x.ndim - 1))
    x = jnp.where(real, x, jnp.zeros((), x.dtype))
    x = x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    y = jnp.where(mask[:, None], y, jnp.zeros((), y.dtype)).astype(jnp.float64)
    return Pool(x, y, mask[:, None].astype(jnp.float64), jnp.maximum(jnp.sum(mask), 1).astype(jnp.float64))


def linearise_network(model: Model, weights: PyTree, pool: Pool) -> Tangent:
    """Returns the network linearised at ``weights``, on the pooled examples, without its Jacobian in memory.

    Args:
        model: The network.
        weights: Its parameters, in float64.
        pool: The pooled examples.
    """
    outputs, push = jax.linearize(lambda p: pool.mask * model.apply(p, pool.x), weights)
    transpose = jax.linear_transpose(push, weights)

    def gram() -> Array:
        return empirical_ntk(model, weights, pool.x, block_size=BLOCK_SIZE) * (pool.mask * pool.mask.T)

    def whole() -> Array:
        size = pool.y.size
        flat_mask = jnp.broadcast_to(pool.mask, pool.y.shape).reshape((-1, 1))
        kernel = empirical_ntk(model, weights, pool.x, trace=False).reshape((size, size))
        return kernel * (flat_mask * flat_mask.T)

    return Tangent(outputs, gram, push, lambda v: transpose(v)[0], whole)


def averaged_product(tangent: Tangent, shape: tuple[int, ...]) -> Callable[[Array], Array]:
    """Returns the function ``g -> H g`` [n, C] with the kernel H averaged over outputs (``Evolution.kernel``).

    A product takes C^2 passes through the network and back, and H is never in memory.

    Args:
        tangent: The linearised network.
        shape: The shape (n, C) of the outputs.
    """
    n, outputs = shape

    def one(g: Array, c: Array, k: Array) -> Array:
        """Returns output k's kernel [n, n] times column c of g [n, C], a vector [n]."""
        at_k = jnp.zeros((n, outputs)).at[:, k].set(g[:, c])
        return tangent.push(tangent.pull(at_k))[:, k]

    def product(g: Array) -> Array:
        def column(c: Array) -> Array:
            def add(k: Array, total: Array) -> Array:
                return total + one(g, c, k)

            return jax.lax.fori_loop(0, outputs, add, jnp.zeros(n)) / outputs

        return jax.lax.map(column, jnp.arange(outputs)).T

    return product


def num_together(tangent: Tangent, params: PyTree, count: int, least: int = 1) -> int:
    """Returns for how many vectors to call ``tangent.push`` or ``pull`` at once, so that they fit into memory.

    Args:
        tangent: The linearised network.
        params: Shapes of the parameters.
        count: Number of all vectors, the largest result.
        least: The result if push and pull are cheap for a single vector (not ``tangent.remade``). Otherwise as many
            vectors are taken as fit into ``CHANGES_BYTES``, and at least ``least``.
    """
    num_bytes = 8 * pytrees.size(params)
    return min(count, max(least, CHANGES_BYTES // max(1, num_bytes)) if tangent.remade else least)


def signs(shape: tuple[int, ...], i: Array | int = 0) -> Array:
    """Draws random signs, +1 or -1 in float64, from a fixed seed, whatever the seed of the run.

    Args:
        shape: Shape of the result.
        i: Number of the draw; each number gives other signs.
    """
    return jax.random.rademacher(jax.random.fold_in(jax.random.key(0), i), shape, jnp.float64)
