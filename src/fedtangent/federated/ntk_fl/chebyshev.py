"""Thousands of steps of gradient descent on a quadratic for a few hundred products with its kernel.

The dual after t steps is a polynomial of degree t - 1 in the kernel, ``R_t = s p_t(s K) (y - f_0)`` with
``p_t(z) = sum_{u < t} (1 - z)^u``. Where no step overshoots twice, z in [0, 2], it is within ``2 t exp(-d^2 / (2 t))``
of a polynomial of degree d (Newman and Rivlin, 1976: so many terms of the Chebyshev series of z^t are enough), that is
within rounding of one of degree ``sqrt(2 t ln(2 / eps))``. Every t of a grid is a sum of the same vectors ``T_k r``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.scipy.fft import dct

from fedtangent.federated.ntk_fl.spectral import geometric_sum
from fedtangent.types import Array

CUT = 1e-13  # what the terms left out may add up to, relative to the largest value t of the polynomial
GROWTH = 1 + 1e-6  # of |T_k r|: more than rounding, so an eigenvalue lies outside of the interval


def chebyshev_degree(time: int) -> int:
    """The degree that suffices for ``time`` steps of any stable size, to a tenth of ``CUT`` or better."""
    return min(time - 1, math.ceil(math.sqrt(2 * time * math.log(20 / CUT))))


def chebyshev_series(top: Array | float, times: tuple[int, ...]) -> tuple[Array, Array]:
    """Chebyshev coefficients [Psi, D + 1] of ``p_t`` on [0, top], for x = 1 - 2 z / top, and the degree [] to keep.

    D = ``chebyshev_degree(max(times))``, 0 < top <= 2 (may be traced). What the coefficients beyond the degree add up
    to is at most ``CUT`` of t for every t. Interpolation at Chebyshev nodes: terms beyond D fold into the others.
    """
    size = chebyshev_degree(max(times)) + 1
    nodes = jnp.asarray(top, float) * jnp.sin((jnp.arange(size) + 0.5) * (math.pi / (2 * size))) ** 2
    values = jnp.stack([geometric_sum(nodes, t) for t in times])
    coefficients = dct(values, type=2, axis=1) / size
    coefficients = coefficients.at[:, 0].multiply(0.5)
    relative = jnp.max(jnp.abs(coefficients) / jnp.asarray(times, float)[:, None], axis=0)
    beyond = jnp.cumsum(relative[::-1])[::-1]  # of term k and all after it
    return coefficients, jnp.sum(beyond > CUT, dtype=jnp.int32) - 1


def chebyshev_dual(
    product: Callable[[Array], Array],
    residual: Array,
    step: Array | float,
    times: tuple[int, ...],
    largest: Array | float,
    active: Array | bool = True,
    degree: Array | int | None = None,
) -> tuple[Array, Array, Array]:
    """The dual [Psi, n, C] after each number of steps, by a Chebyshev series in ``product(g) = K g``.

    Args:
        residual: ``y - f_0`` [n, C] float64.
        step: s, the step in function space; may be traced.
        largest: no eigenvalue of K that matters to the residual may be larger; ``step * largest`` at most 2.
        active: where it is False nothing is computed, and the result is zero.
        degree: how many terms of the series beyond the first to take (by default those that ``CUT`` needs).

    Returns the dual, the number of products [] taken, and ``inside`` [] bool: whether no ``T_k r`` has outgrown r,
    which happens exactly where the residual has a part at an eigenvalue beyond ``largest``. The dual is of no use if
    not: take the steps themselves.
    """
    largest = jnp.where(largest > 0, largest, 1.0)
    coefficients, enough = chebyshev_series(jnp.minimum(step * largest, 2.0), times)
    last = jnp.where(active, enough if degree is None else degree, -1)
    norm = jnp.linalg.norm(residual.ravel())

    def mapped(g: Array) -> Array:
        return g - (2 / largest) * product(g)

    def add(total: Array, k: Array, vector: Array) -> Array:
        return total + coefficients[:, k][:, None, None] * vector[None, :, :]

    def more(carry: tuple[Array, Array, Array, Array, Array]) -> Array:
        k, _, _, _, inside = carry
        return (k <= last) & inside

    def one(carry: tuple[Array, Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array, Array]:
        k, before, current, total, _ = carry
        following = jnp.where(k == 1, 1, 2) * mapped(current) - jnp.where(k == 1, 0, 1) * before
        inside = jnp.linalg.norm(following.ravel()) <= GROWTH * norm
        return k + 1, current, following, add(total, k, following), inside

    first = add(jnp.zeros((len(times), *residual.shape), residual.dtype), jnp.int32(0), residual)
    carry = (jnp.int32(1), jnp.zeros_like(residual), residual, first, jnp.isfinite(norm))
    k, _, _, total, inside = jax.lax.while_loop(more, one, carry)
    return jnp.where(active, step * total, 0.0), k - 1, inside
