"""Gradient descent for a loss whose derivative is not linear, with few products with the whole kernel.

A step of the descent (``dual.descend_dual``) is ``R_{t+1} = R_t + s force(K R_t)``, with the kernel K; it takes a
product with K. Nearly all of a step's change, and every fast change, comes from the few largest eigenvalues of K. So K
is split, as multirate integrators do (Gear and Wells, 1984):

    K = F F' + rest

with F of low rank (``leading_factor``). Every step is taken with F. ``rest R_t`` changes slowly: it is computed only at
a few steps, by one product with K each, and extrapolated by a polynomial in t between them (``multirate_dual``); the
error of the polynomial decides at which step it is computed next. The result is that of the descent, not of the
gradient flow, for steps of every size that the descent allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedtangent._src.federated.ntk_fl.tangent import signs
from fedtangent._src.types import Array

LARGEST_RANK = 32  # of F; on 4,000 images 64 and 128 saved less than they cost
ROWS_OF_RANK = 16  # of K, for each rank of F below the largest
NODES = 6  # that the polynomial goes through
SLOW_TOLERANCE = 1e-7  # largest error of the polynomial at the end of a stretch, in units of the outputs
GROWTH, SHRINKAGE, CAUTION = 2.0, 0.2, 0.9  # of a stretch, from one to the next
TYPICAL_PRODUCTS = 250  # measured over 2,000 steps on images, 215, and on random inputs, 322; fewer steps take fewer

Product = Callable[[Array], Array]  # g -> K g, [n, C]


def rank_of(rows: int) -> int:
    """Returns the rank, before it is rounded up, of the factor (``leading_factor``) of a kernel [rows, rows]."""
    return max(1, min(LARGEST_RANK, rows // ROWS_OF_RANK))


def leading_factor(product: Product, shape: tuple[int, ...], rows: int) -> tuple[Array, int]:
    """Returns F [rows, r], with ``F F'`` close to a kernel K at its largest eigenvalues, and how many products it took.

    F is Nystrom's approximation on the image of fixed random signs (Halko, Martinsson and Tropp, SIAM Review 2011,
    algorithm 5.5). r is ``rank_of(rows)``, rounded up to whole products, and at most ``rows``. F is zero if the kernel
    is zero or not finite: F decides how many products the descent takes, and not its result.

    Args:
        product: ``g -> K g`` for g of ``shape``.
        shape: The shape [n, C] of the outputs.
        rows: Rows of K: n if all columns have one kernel, n C if K is the kernel of all outputs.
    """
    columns = shape[0] * shape[1] // rows
    groups = -(-rank_of(rows) // columns)
    rank = min(groups * columns, rows)

    def image(vectors: Array) -> Array:
        whole = jnp.pad(vectors, ((0, 0), (0, groups * columns - rank)))
        parts = whole.reshape((rows, groups, columns)).transpose(1, 0, 2)
        images = jax.lax.map(lambda part: product(part.reshape(shape)).reshape((rows, columns)), parts)
        return images.transpose(1, 0, 2).reshape(whole.shape)[:, :rank]

    basis = jnp.linalg.qr(image(signs((rows, rank))))[0]
    images = image(basis)
    shift = jnp.finfo(images.dtype).eps * jnp.linalg.norm(images)  # so that a kernel of lower rank has a factor too
    images = images + shift * basis
    small = basis.T @ images
    lower = jnp.linalg.cholesky((small + small.T) / 2)
    factor = jax.scipy.linalg.solve_triangular(lower, images.T, lower=True).T
    return jnp.where(jnp.all(jnp.isfinite(factor)), factor, 0.0), 2 * groups


class Nodes(NamedTuple):
    """The nodes of the polynomial in t that extrapolates ``(K - F F') R_t``.

    K is the kernel, ``F F'`` its approximation of low rank, and R_t the dual after t gradient steps.

    Attributes:
        times: Numbers of steps t, [NODES], the latest first.
        values: ``(K - F F') R_t`` at these t, [NODES, columns, rows], for F [rows, r]; ``columns`` is C if all outputs
            have one kernel, else 1.
        number: Number of nodes in use, the first ones, [] int32; 1 at the start.
    """

    times: Array
    values: Array
    number: Array


def extrapolated(nodes: Nodes, time: Array) -> Array:
    """Extrapolates ``(K - F F') R_t`` to t = ``time`` by the polynomial in t through ``nodes``, [columns, rows].

    K is the kernel, ``F F'`` its approximation of low rank, and R_t the dual after t steps. Rows are the rows of F; the
    columns are C if all outputs have one kernel, else 1.

    Args:
        nodes: The nodes; the first ``nodes.number`` are used.
        time: Number of steps t.
    """
    counts = jnp.arange(NODES) < nodes.number
    others = counts[None, :] & ~jnp.eye(NODES, dtype=bool)
    gaps = nodes.times[:, None] - nodes.times[None, :]
    ratios = jnp.where(others, (time - nodes.times)[None, :] / jnp.where(gaps == 0, 1, gaps), 1)
    return jnp.tensordot(jnp.where(counts, jnp.prod(ratios, axis=1), 0), nodes.values, 1)


class _Descent(NamedTuple):
    """The state of ``multirate_dual`` between two stretches of gradient steps.

    The dual has the examples on its last axis, which is twice as fast.

    Attributes:
        time: Number of steps t taken, [] int32.
        dual: Transposed dual R_t after these steps, [columns, rows].
        moved: Transposed ``F' R_t``, [columns, r], with the low-rank factor F.
        nodes: Nodes of the extrapolation.
        length: Steps of the next stretch, [] int32.
        products: Number of products with the kernel so far, [] int32.
    """

    time: Array
    dual: Array
    moved: Array
    nodes: Nodes
    length: Array
    products: Array


def multirate_dual(
    product: Product,
    force: Callable[[Array], Array],
    like: Array,
    step: Array | float,
    times: tuple[int, ...],
    factor: Array,
    active: Array | bool = True,
) -> tuple[Array, Array]:
    """Computes the dual R_t [Psi, n, C] for Psi numbers of steps t, and the number of products with the kernel K taken.

    R_t follows gradient descent on the linearised network, ``R_{t+1} = R_t + step force(K R_t)`` from R_0 = 0. Steps
    are taken in stretches, in which ``(K - F F') R_t`` is extrapolated by a polynomial in t. If the polynomial's error
    at the end exceeds ``SLOW_TOLERANCE`` (1e-7), the stretch is repeated in shorter ones. A stretch of one step is
    exact, so a useless factor costs a product in every step, but no accuracy.

    Args:
        product: ``g -> K g`` for g [n, C].
        force: Function from the change of the outputs [n, C] to minus the derivative of the loss there, up to the
            constant in ``step``.
        like: An array with the shape and dtype of the dual.
        step: Step size in function space: the learning rate over the number of terms in the loss's mean.
        times: The Psi numbers of steps, increasing.
        factor: F (``leading_factor``), [n, r] if all outputs have one kernel, else [n C, r].
        active: If False, no step is taken, and the result is zero.
    """
    columns = like.size // factor.shape[0]

    def outputs(flat: Array) -> Array:
        return flat.T.reshape(like.shape)

    def flat(outputs: Array) -> Array:
        return outputs.reshape((-1, columns)).T

    def stretch(now: _Descent, last: Array) -> _Descent:
        """Takes up to ``now.length`` gradient steps, not beyond step ``last``, and then one product with the kernel.

        If the extrapolation was too inaccurate at the end, the result is the old state with a shorter next stretch.
        """
        end = jnp.minimum(now.time + now.length, last)
        length = end - now.time

        def one(t: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            dual, moved = state
            change = step * flat(force(outputs(extrapolated(now.nodes, t.astype(like.dtype)) + moved @ factor.T)))
            return dual + change, moved + change @ factor

        dual, moved = jax.lax.fori_loop(now.time, end, one, (now.dual, now.moved))
        at_end = end.astype(like.dtype)
        slow = flat(product(outputs(dual))) - moved @ factor.T
        off = jnp.max(jnp.abs(slow - extrapolated(now.nodes, at_end)))
        is_accurate = (off <= SLOW_TOLERANCE) | (length == 1)
        nodes = Nodes(
            jnp.roll(now.nodes.times, 1).at[0].set(at_end),
            jnp.roll(now.nodes.values, 1, axis=0).at[0].set(slow),
            jnp.minimum(now.nodes.number + 1, NODES),
        )
        following = _next_length(length, off, is_accurate, now)
        accepted = _Descent(end, dual, moved, nodes, following, now.products + 1)
        again = now._replace(length=following, products=now.products + 1)
        return jax.tree.map(lambda new, old: jnp.where(is_accurate, new, old), accepted, again)

    def advance(now: _Descent, last: Array) -> tuple[_Descent, Array]:
        now = jax.lax.while_loop(lambda now: now.time < last, lambda now: stretch(now, last), now)
        return now, outputs(now.dual)

    zero = jnp.int32(0)
    still = flat(jnp.zeros_like(like))
    nodes = Nodes(jnp.zeros(NODES, like.dtype), jnp.zeros((NODES, *still.shape), like.dtype), jnp.int32(1))
    moved = jnp.zeros((columns, factor.shape[1]), like.dtype)
    start = _Descent(zero, still, moved, nodes, jnp.int32(1), zero)
    lasts = jnp.where(active, jnp.asarray(times, jnp.int32), 0)
    end, duals = jax.lax.scan(advance, start, lasts)
    return duals, end.products


def _next_length(length: Array, off: Array, is_accurate: Array, now: _Descent) -> Array:
    """Returns the number of gradient steps until the next product with the kernel.

    The number is odd, because outputs that alternate from step to step look constant at even distances.

    Args:
        length: Number of gradient steps just taken, after which a product with the kernel was computed.
        off: Largest absolute error of the extrapolation at the last of these steps; NaN counts as infinite.
        is_accurate: Whether ``off`` is small enough; otherwise the steps are taken again.
        now: The state before these steps.
    """
    error = jnp.where(jnp.isnan(off), jnp.inf, off) / SLOW_TOLERANCE
    share = CAUTION * jnp.maximum(error, jnp.finfo(error.dtype).tiny) ** (-1 / now.nodes.number)
    following = (length * jnp.clip(share, SHRINKAGE, GROWTH)).astype(jnp.int32)
    cut_short = length < now.length  # by one of ``times``: no reason to continue in short stretches
    following = jnp.where(is_accurate & cut_short, jnp.maximum(following, now.length), following)
    following = jnp.where(is_accurate, following, jnp.minimum(following, length // 2))
    return jnp.maximum(following // 2 * 2 + 1, 1)
