"""How the outputs of a linearised network move: the kernel in use as a product, and the dual after many steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedtangent.federated.ntk_fl.chebyshev import chebyshev_dual
from fedtangent.federated.ntk_fl.losses import OUTPUT_LOSSES, OutputLoss
from fedtangent.federated.ntk_fl.options import LARGEST_FULL_KERNEL, Settings, evolution_plan
from fedtangent.federated.ntk_fl.spectral import descend_dual, iterate_dual, largest_eigenvalue, spectral_dual
from fedtangent.federated.ntk_fl.tangent import Pool, Tangent, averaged_product, whole_kernel
from fedtangent.types import Array, PyTree

MARGIN = 1.1  # of the Chebyshev interval over Lanczos' largest eigenvalue, which comes from below

Dual = Callable[[Array, Array], tuple[Array, Array]]  # (step, whether to) -> (R [Psi, n, C], products [] int32)


class Dynamics(NamedTuple):
    """The evolution of the linearised network, through its kernel."""

    product: Callable[[Array], Array]  # g -> K g, [n, C]
    lambda_max: Array  # []
    dual: Dual
    matrix: Array | None  # H [n, n] where it is held


def method_of(params: PyTree, shape: tuple[int, ...], s: Settings) -> str:
    """The method that is taken on targets of ``shape`` = (n, C): of those that the loss allows, the cheapest."""
    if s.method != "auto":
        return s.method
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    return evolution_plan(num_params, shape[0], shape[1], s.times, s.kernel, s.kernel_bytes, s.loss).method


def dynamics_of(pool: Pool, tangent: Tangent, s: Settings, method: str) -> Dynamics:
    """The kernel in use as a product, its largest eigenvalue, and the evolution under it."""
    residual = pool.y - tangent.outputs
    n = residual.shape[0]
    matrix = tangent.gram() if s.kernel == "averaged" and 8 * n * n <= s.kernel_bytes else None
    if s.kernel == "exact":
        product, start = lambda g: tangent.push(tangent.pull(g)), pool.mask * signs(residual.shape)
    elif matrix is None:
        product, start = averaged_product(tangent, residual.shape), jnp.broadcast_to(pool.mask, residual.shape)
    else:
        product, start = lambda g: matrix @ g, pool.mask
    dual: Dual
    if s.loss == "cross_entropy":
        if s.kernel == "exact" and tangent.remade and _holds_whole(residual.size, s):
            product = _flat_product(whole_kernel(tangent, residual.shape))  # else every step makes all entries twice
        lambda_max = largest_eigenvalue(product, start)
        dual = functools.partial(_by_descent, product, OUTPUT_LOSSES[s.loss], pool, tangent.outputs, s.times)
    elif method == "eigh":
        held = whole_kernel(tangent, residual.shape) if s.kernel == "exact" else matrix
        lambda_max, dual = _by_eigh(held, residual, s.times)
    else:
        lambda_max = largest_eigenvalue(product, start)
        dual = functools.partial(by_products, product, residual, lambda_max, s.times, method)

    def masked(step: Array, active: Array) -> tuple[Array, Array]:
        found, products = dual(step, active)
        return found * pool.mask[None, :, :], products

    return Dynamics(product, lambda_max, masked, matrix)


def _holds_whole(size: int, s: Settings) -> bool:
    return size <= LARGEST_FULL_KERNEL and 8 * size**2 <= s.kernel_bytes


def _flat_product(kernel: Array) -> Callable[[Array], Array]:
    """``g -> K g`` for g [n, C] and the whole kernel K [n C, n C]."""
    return lambda g: (kernel @ g.ravel()).reshape(g.shape)


def _by_eigh(kernel: Array | None, residual: Array, times: tuple[int, ...]) -> tuple[Array, Dual]:
    """The largest eigenvalue of H [n, n] or of the whole kernel [n C, n C], and the evolution under it."""
    assert kernel is not None
    eigenvalues, vectors = jnp.linalg.eigh(kernel)

    def dual(step: Array, active: Array) -> tuple[Array, Array]:
        found = spectral_dual(eigenvalues, vectors, residual.reshape((kernel.shape[0], -1)), step, times)
        return jnp.where(active, found, 0).reshape((len(times), *residual.shape)), jnp.int32(0)

    return eigenvalues[-1], dual


def by_products(
    product: Callable[[Array], Array], residual: Array, lambda_max: Array, times: tuple[int, ...], method: str,
    step: Array, active: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """By a Chebyshev series where the step is stable, and where it is not, or the series breaks, step by step."""
    if method == "iterate":
        return iterate_dual(product, residual, step, times, active), jnp.where(active, times[-1], 0).astype(jnp.int32)
    is_stable = step * lambda_max <= 2
    largest = jnp.minimum(MARGIN * lambda_max, 2 / step)
    series, products, inside = chebyshev_dual(product, residual, step, times, largest, active & is_stable)
    otherwise = active & ~(inside & is_stable)
    steps = iterate_dual(product, residual, step, times, otherwise)
    return jnp.where(otherwise, steps, series), products + jnp.where(otherwise, times[-1], 0).astype(jnp.int32)


def _by_descent(
    product: Callable[[Array], Array], loss: OutputLoss, pool: Pool, outputs: Array, times: tuple[int, ...],
    step: Array, active: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """The descent of a loss whose derivative is not linear, step by step."""

    def force(moved: Array) -> Array:
        return pool.mask * (pool.y - loss.predict(outputs + moved))

    found = descend_dual(product, force, outputs, step, times, active)
    return found, jnp.where(active, times[-1], 0).astype(jnp.int32)


def signs(shape: tuple[int, ...], i: Array | int = 0) -> Array:
    """Fixed random signs, float64: probes need no seed of the run's."""
    return jax.random.rademacher(jax.random.fold_in(jax.random.key(0), i), shape, jnp.float64)
