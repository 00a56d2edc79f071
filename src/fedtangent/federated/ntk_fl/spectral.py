"""Gradient descent on a quadratic through its kernel: where t steps lead, for many t at once.

With kernel ``K`` over examples, outputs ``f`` and targets ``y``, gradient descent on the linearised network moves
``f_{t+1} = f_t - s K (f_t - y)`` and leaves the weights at ``w_0 + J' R_t``, where

    R_t = s sum_{u < t} (I - s K)^u (y - f_0) = K^-1 [I - (I - s K)^t] (y - f_0)

(NTK-FL, Yue et al., ICML 2022, eq. 9b and 10, in discrete time). ``R_t`` is called the dual here.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedtangent.types import Array

LANCZOS_STEPS = 24


def evolve_dual(kernel: Array, residual: Array, step: Array | float, times: tuple[int, ...]) -> tuple[Array, Array]:
    """The dual after each number of steps, by one eigendecomposition of ``kernel``.

    Args:
        kernel: [m, m] symmetric positive semi-definite.
        residual: ``y - f_0`` [m, C]; every column evolves under the same kernel.
        step: s, the step in function space (``learning_rate / (N C)`` for the loss ``1/(2 N C) sum |f - y|^2``).
        times: numbers of steps, Psi of them.

    Returns ``R`` [Psi, m, C] and the eigenvalues [m] in ascending order, in ``kernel``'s dtype. The evolved function is
    ``f_t(x) = f_0(x) + K(x, X) R_t``. Eigenvalues below zero are rounding and count as zero. Steps beyond
    ``2 / lambda_max`` diverge and may overflow to non-finite values, as the descent would.
    """
    eigenvalues, vectors = jnp.linalg.eigh(kernel)
    return spectral_dual(eigenvalues, vectors, residual, step, times), eigenvalues


def spectral_dual(
    eigenvalues: Array, vectors: Array, residual: Array, step: Array | float, times: tuple[int, ...]
) -> Array:
    """``evolve_dual`` from the eigenvalues [m] and eigenvectors [m, m] of the kernel: R [Psi, m, C]."""
    coefficients = vectors.T @ residual
    responses = jnp.stack([step * geometric_sum(step * jnp.maximum(eigenvalues, 0), t) for t in times], axis=1)
    scaled = responses[:, :, None] * coefficients[:, None, :]  # [m, Psi, C]
    dual = vectors @ scaled.reshape((scaled.shape[0], -1))
    return dual.reshape(scaled.shape).transpose(1, 0, 2)


def geometric_sum(z: Array, t: int) -> Array:
    """``sum_{u < t} (1 - z)^u`` elementwise for ``z >= 0``, to full relative precision also where z is tiny."""
    near_zero = z < 1e-200
    small = z < 0.5
    inside = jnp.where(small & ~near_zero, z, 0.25)
    close = -jnp.expm1(t * jnp.log1p(-inside)) / inside
    outside = jnp.where(small, 1.0, z)
    power = jnp.exp(t * jnp.log(jnp.abs(1 - outside)))
    power = jnp.where(outside > 1, (-1.0) ** t * power, power)
    return jnp.where(near_zero, float(t), jnp.where(small, close, (1 - power) / outside))


def iterate_dual(
    product: Callable[[Array], Array],
    residual: Array,
    step: Array | float,
    times: tuple[int, ...],
    active: Array | bool = True,
) -> Array:
    """The dual [Psi, n, C] after each number of steps, by taking the steps: ``product(g)`` is ``K g`` for g [n, C].

    Costs ``max(times)`` products and holds no matrix that ``product`` does not hold. ``times`` must increase. Where
    ``active`` is False no step is taken, and the result is zero.
    """
    return descend_dual(product, lambda moved: residual - moved, residual, step, times, active)


def descend_dual(
    product: Callable[[Array], Array],
    force: Callable[[Array], Array],
    like: Array,
    step: Array | float,
    times: tuple[int, ...],
    active: Array | bool = True,
) -> Array:
    """``iterate_dual`` for any loss of the outputs: ``R_{t+1} = R_t + step force(K R_t)``, from zero.

    ``force`` maps what the outputs have moved [n, C] to minus the derivative of the loss there (times what ``step``
    leaves out); ``like`` is an array of the dual's shape and dtype. Returns R [Psi, n, C].
    """
    gaps = jnp.asarray([b - a for a, b in zip((0, *times[:-1]), times, strict=True)], jnp.int32)
    gaps = jnp.where(active, gaps, 0)

    def advance(dual: Array, gap: Array) -> tuple[Array, Array]:
        dual = jax.lax.fori_loop(0, gap, lambda _, now: now + step * force(product(now)), dual)
        return dual, dual

    return jax.lax.scan(advance, jnp.zeros_like(like), gaps)[1]


def largest_eigenvalue(product: Callable[[Array], Array], start: Array) -> Array:
    """The largest eigenvalue of a symmetric positive semi-definite operator, from below, by Lanczos' iteration.

    ``product`` maps an array of ``start``'s shape to its image; 24 products. A scalar; 0 where ``start`` is 0.
    """
    steps = min(LANCZOS_STEPS, start.size)
    tiny = jnp.finfo(start.dtype).tiny

    def one(carry: tuple[Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array], tuple[Array, Array]]:
        previous, current, beta = carry
        image = product(current) - beta * previous
        alpha = jnp.vdot(image, current)
        image = image - alpha * current
        beta = jnp.linalg.norm(image.ravel())
        return (current, image / jnp.maximum(beta, tiny), beta), (alpha, beta)

    first = start / jnp.maximum(jnp.linalg.norm(start.ravel()), tiny)
    zero = jnp.zeros((), start.dtype)
    _, (alphas, betas) = jax.lax.scan(one, (jnp.zeros_like(start), first, zero), None, length=steps)
    off_diagonal = betas[:-1]
    tridiagonal = jnp.diag(alphas) + jnp.diag(off_diagonal, 1) + jnp.diag(off_diagonal, -1)
    return jnp.linalg.eigvalsh(tridiagonal)[-1]
