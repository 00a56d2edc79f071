"""The result of gradient descent on a linearised network, for many numbers of steps at once.

With kernel ``K`` over examples, outputs ``f``, targets ``y`` and step s, gradient descent on the linearised network
moves ``f_{t+1} = f_t - s K (f_t - y)`` and reaches the weights ``w_0 + J' R_t``, where J is the Jacobian of the outputs
and

    R_t = s sum_{u < t} (I - s K)^u (y - f_0) = K^-1 [I - (I - s K)^t] (y - f_0)

(NTK-FL, Yue et al., ICML 2022, eq. 9b and 10, in discrete time). ``R_t`` is called the dual here. It is computed by one
eigendecomposition (``spectral_dual``), by a Chebyshev series in products with the kernel (``chebyshev_dual``), or by
taking the steps (``descend_dual``). For a loss whose derivative is not linear, there is no such sum: the steps
are taken, either one by one or with fewer products (``multirate``). ``dynamics_of`` chooses the method.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.fft import dct
from jaxtyping import Float, Num

from fedtangent._src import pytrees
from fedtangent._src.federated.ntk_fl.multirate import (
    TYPICAL_PRODUCTS,
    Product,
    leading_factor,
    multirate_dual,
    rank_of,
)
from fedtangent._src.federated.ntk_fl.options import OUTPUT_LOSSES, Evolution
from fedtangent._src.federated.ntk_fl.tangent import Pool, Tangent, averaged_product, signs
from fedtangent._src.types import Array, ArrayLike, PyTree

LANCZOS_STEPS = 24
CUT = 1e-13  # largest sum of the omitted terms of a series, relative to the largest value t of the polynomial
GROWTH = 1 + 1e-6  # of |T_k r|: more than rounding, so an eigenvalue lies outside of the interval
MARGIN = 1.1  # of the Chebyshev interval over Lanczos' largest eigenvalue, which comes from below
LARGEST_FULL_KERNEL = 4096  # n C up to which "auto" holds the whole kernel

# Measured in float64 on 2 cores: seconds per m^3 of an eigendecomposition, per matrix entry of a product with a few
# columns (memory bound), and per multiplication of a pass through the network.
EIGH_SECONDS, PRODUCT_SECONDS, PASS_SECONDS = 1e-9, 4e-10, 2e-11

Dual = Callable[[Array, Array], tuple[Array, Array]]  # (step, whether to) -> (R [Psi, n, C], products [] int32)


# ---- by the spectrum ----------------------------------------------------------------------------------------------


def spectral_dual(
    eigenvalues: Array, vectors: Array, residual: Array, step: Array | float, times: tuple[int, ...]
) -> Array:
    """Computes the dual R_t [Psi, m, C] for each of Psi numbers of steps t, from the kernel's eigendecomposition.

    The weights after t steps of gradient descent are ``w_0 + J' R_t``, with the Jacobian J. Eigenvalues below zero are
    rounding errors and count as zero. A step size beyond 2 over the largest eigenvalue diverges, as the descent does.

    Args:
        eigenvalues: Eigenvalues of the kernel, [m]; m is its number of rows.
        vectors: Its eigenvectors, [m, m].
        residual: Targets minus outputs before the first step, [m, C]; every column evolves under the same kernel.
        step: Step size in function space: ``learning_rate / (N C)`` for the loss ``1/(2 N C) sum |f - y|^2`` of N
            examples with C outputs f and targets y.
        times: The Psi numbers of steps.
    """
    coefficients = vectors.T @ residual
    responses = step * geometric_sum(step * jnp.maximum(eigenvalues, 0)[:, None], np.array(times)[None])
    scaled = responses[:, :, None] * coefficients[:, None, :]  # [m, Psi, C]
    dual = vectors @ scaled.reshape((scaled.shape[0], -1))
    return dual.reshape(scaled.shape).transpose(1, 0, 2)


def geometric_sum(z: Float[Array, "*z"], t: Num[ArrayLike, "*t"]) -> Float[Array, "*sums"]:
    """Computes ``sum_{u < t} (1 - z)^u`` elementwise, to full relative precision even for tiny z.

    Args:
        z: Numbers of at least 0.
        t: Numbers of terms; the shapes of ``t`` and ``z`` are broadcast.
    """
    t = jnp.asarray(t, z.dtype)
    near_zero = z < 1e-200
    small = z < 0.5
    inside = jnp.where(small & ~near_zero, z, 0.25)
    close = -jnp.expm1(t * jnp.log1p(-inside)) / inside
    outside = jnp.where(small, 1.0, z)
    power = jnp.exp(t * jnp.log(jnp.abs(1 - outside)))
    power = jnp.where((outside > 1) & (t % 2 == 1), -power, power)
    return jnp.where(near_zero, t, jnp.where(small, close, (1 - power) / outside))


# ---- by the steps -------------------------------------------------------------------------------------------------


def descend_dual(
    product: Product,
    force: Callable[[Array], Array],
    like: Array,
    step: Array | float,
    times: tuple[int, ...],
    active: Array | bool = True,
) -> Array:
    """Computes the dual R_t [Psi, n, C] for each of Psi numbers of steps t, by taking the steps.

    The weights after t steps of gradient descent are ``w_0 + J' R_t``, with the Jacobian J and ``R_{t+1} = R_t + step
    force(K R_t)`` from R_0 = 0, where K is the kernel.

    Args:
        product: ``g -> K g`` for g [n, C].
        force: Function from the change of the outputs [n, C] to minus the derivative of the loss there, up to the
            constant in ``step``; for the squared error ``moved -> residual - moved``.
        like: An array with the shape and dtype of the dual.
        step: Step size in function space: the learning rate over the number of terms in the loss's mean.
        times: The Psi numbers of steps, increasing.
        active: If False, no step is taken, and the result is zero.
    """
    gaps = jnp.asarray([b - a for a, b in zip((0, *times[:-1]), times, strict=True)], jnp.int32)
    gaps = jnp.where(active, gaps, 0)

    def advance(dual: Array, gap: Array) -> tuple[Array, Array]:
        dual = jax.lax.fori_loop(0, gap, lambda _, now: now + step * force(product(now)), dual)
        return dual, dual

    return jax.lax.scan(advance, jnp.zeros_like(like), gaps)[1]


# ---- by a Chebyshev series ----------------------------------------------------------------------------------------

# The dual after t steps is a polynomial of degree t - 1 in the kernel, R_t = s p_t(s K) (y - f_0) with
# p_t(z) = sum_{u < t} (1 - z)^u. Where no step overshoots twice, z in [0, 2], it is within 2 t exp(-d^2 / (2 t)) of a
# polynomial of degree d (Newman and Rivlin, 1976: so many terms of the Chebyshev series of z^t are enough), that is
# within rounding of one of degree sqrt(2 t ln(2 / eps)). Every t of a grid is a sum of the same vectors T_k r.


def chebyshev_degree(time: int) -> int:
    """Returns a degree that is enough for the Chebyshev series of ``sum_{u < t} (1 - z)^u`` with t = ``time`` steps.

    The omitted terms add up to less than ``CUT`` times t, which is 1e-13 t.
    """
    return min(time - 1, math.ceil(math.sqrt(2 * time * math.log(20 / CUT))))


def chebyshev_series(top: Array | float, times: tuple[int, ...]) -> tuple[Array, Array]:
    """Computes Chebyshev coefficients [Psi, D + 1] of ``p_t(z) = sum_{u < t} (1 - z)^u`` on [0, top], and a degree [].

    The Chebyshev polynomials have the argument 1 - 2 z / top, and D = ``chebyshev_degree(max(times))``. The series
    interpolates p_t at Chebyshev nodes. The coefficients beyond the returned degree can be left out: they add up to at
    most ``CUT`` (1e-13) times t for every t.

    Args:
        top: End of the interval, 0 < top <= 2; may be traced.
        times: The Psi numbers of steps t.
    """
    size = chebyshev_degree(max(times)) + 1
    nodes = jnp.asarray(top, float) * jnp.sin((jnp.arange(size) + 0.5) * (math.pi / (2 * size))) ** 2
    values = geometric_sum(nodes[None], np.array(times)[:, None])
    coefficients = dct(values, type=2, axis=1) / size
    coefficients = coefficients.at[:, 0].multiply(0.5)
    relative = jnp.max(jnp.abs(coefficients) / jnp.asarray(times, float)[:, None], axis=0)
    beyond = jnp.cumsum(relative[::-1])[::-1]  # of term k and all after it
    return coefficients, jnp.sum(beyond > CUT, dtype=jnp.int32) - 1


def chebyshev_dual(
    product: Product,
    residual: Array,
    step: Array | float,
    times: tuple[int, ...],
    largest: Array | float,
    active: Array | bool = True,
    degree: Array | int | None = None,
) -> tuple[Array, Array, Array]:
    """Computes the dual R_t [Psi, n, C] for each of Psi numbers of steps t, by a Chebyshev series in the kernel K.

    The weights after t steps of gradient descent are ``w_0 + J' R_t``, with the Jacobian J.

    Args:
        product: ``g -> K g`` for g [n, C].
        residual: Targets minus outputs before the first step, [n, C] float64.
        step: Step size in function space: ``learning_rate / (N C)`` for N examples with C outputs; may be traced.
        times: The Psi numbers of steps.
        largest: Upper bound of the eigenvalues of K that matter to the residual; ``step * largest`` is at most 2.
        active: If False, nothing is computed, and the result is zero.
        degree: Degree of the series; by default so large that the omitted terms add up to at most 1e-13 t.

    Returns:
        The dual; the number of products [] taken; and ``inside`` [] bool, whether no term of the series outgrew the
        residual. If ``inside`` is False, ``largest`` was too small or the residual is not finite. The dual is then
        useless, and ``descend_dual`` must take the steps.
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


# ---- the choice of the method -------------------------------------------------------------------------------------


def largest_eigenvalue(product: Product, start: Array) -> Array:
    """Estimates the largest eigenvalue of a symmetric positive semi-definite operator, a scalar, from below.

    Lanczos' iteration takes 24 products, or ``start.size`` if that is less; the result is 0 if ``start`` is 0.

    Args:
        product: Function from an array of ``start``'s shape to its image.
        start: First vector of the iteration.
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


def method_seconds(evolution: Evolution, params: int, examples: int, outputs: int) -> dict[str, float]:
    """Estimates how many seconds each method of gradient descent would take, by its name, from measured costs.

    The methods are those allowed by ``evolution.loss``, such as "eigh", "chebyshev" and "iterate".
    The time to compute a kernel [n, n] or [n C, n C] in memory is not counted. "eigh" is left out if its kernel is too
    large to be in memory.

    Args:
        evolution: Options of the evolution.
        params: Number of parameters P.
        examples: Number of pooled examples n, padding included.
        outputs: Number of outputs C.
    """
    passes = 4 * examples * params * PASS_SECONDS  # of one derivative forward and one backward
    in_memory = 8 * examples**2 <= evolution.kernel_bytes
    if evolution.kernel == "averaged":
        size, product = examples, PRODUCT_SECONDS * examples**2 if in_memory else outputs**2 * passes
    else:
        size, product = examples * outputs, passes
        in_memory = _holds_whole(size, evolution)
    steps = {"chebyshev": chebyshev_degree(max(evolution.times)), "iterate": max(evolution.times)}
    seconds = {name: (LANCZOS_STEPS + count) * product for name, count in steps.items()}
    rank, columns = rank_of(size), examples * outputs // size
    whole = LANCZOS_STEPS + 2 * -(-rank // columns) + min(TYPICAL_PRODUCTS, steps["iterate"])
    seconds["multirate"] = whole * product + steps["iterate"] * PRODUCT_SECONDS * 2 * size * rank
    if in_memory:
        seconds["eigh"] = EIGH_SECONDS * size**3
    return {name: seconds[name] for name in OUTPUT_LOSSES[evolution.loss].methods if name in seconds}


def method_of(evolution: Evolution, params: PyTree, shape: tuple[int, ...]) -> str:
    """Returns the name of the method that computes gradient descent: for "auto", the cheapest that the loss allows.

    Args:
        evolution: Options of the evolution.
        params: Parameters of the network.
        shape: The shape (n, C) of the targets.
    """
    if evolution.method != "auto":
        return evolution.method
    seconds = method_seconds(evolution, pytrees.size(params), shape[0], shape[1])
    return min(seconds, key=lambda name: seconds[name])


class Dynamics(NamedTuple):
    """Gradient descent on the linearised network of NTK-FL: products with its kernel K, and the result after t steps.

    After t steps the weights are ``w_0 + J' R_t``, with the Jacobian J of the n examples' C outputs. R_t [n, C] is
    called the dual. It is computed for all Psi numbers of steps t among which the server chooses (``Evolution.times``).

    Attributes:
        product: ``g -> K g`` for g [n, C].
        lambda_max: Largest eigenvalue of K, [].
        dual: ``(step, active) -> (R [Psi, n, C], number of products with K)``. ``step`` is the step size in function
            space; if ``active`` is False, R is zero.
        matrix: The kernel averaged over outputs, [n, n]; None if it is not in memory, or K is the exact kernel.
    """

    product: Product
    lambda_max: Array
    dual: Dual
    matrix: Array | None


def dynamics_of(pool: Pool, tangent: Tangent, evolution: Evolution, method: str) -> Dynamics:
    """Builds the functions that compute gradient descent on the linearised network: kernel products and the dual.

    Args:
        pool: The pooled examples.
        tangent: The linearised network.
        evolution: Options of the evolution; its ``method`` is not used.
        method: "eigh", "chebyshev", "iterate" or "multirate", as ``method_of`` returns it. It must fit the loss;
            "eigh" also needs a kernel of at most ``evolution.kernel_bytes``.
    """
    residual = pool.y - tangent.outputs
    n = residual.shape[0]
    matrix = tangent.gram() if evolution.kernel == "averaged" and 8 * n * n <= evolution.kernel_bytes else None
    if evolution.kernel == "exact":
        product, start = lambda g: tangent.push(tangent.pull(g)), pool.mask * signs(residual.shape)
    elif matrix is None:
        product, start = averaged_product(tangent, residual.shape), jnp.broadcast_to(pool.mask, residual.shape)
    else:
        product, start = lambda g: matrix @ g, pool.mask
    dual: Dual
    if evolution.loss == "cross_entropy":
        if evolution.kernel == "exact" and tangent.remade and _holds_whole(residual.size, evolution):
            product = _flat_product(tangent.whole())  # else every step makes all entries twice
        lambda_max = largest_eigenvalue(product, start)
        dual = functools.partial(_by_descent, product, lambda_max, pool, tangent.outputs, evolution, method)
    elif method == "eigh":
        kernel = tangent.whole() if evolution.kernel == "exact" else matrix
        lambda_max, dual = _by_eigh(kernel, residual, evolution.times)
    else:
        lambda_max = largest_eigenvalue(product, start)
        dual = functools.partial(by_products, product, residual, lambda_max, evolution.times, method)

    def masked(step: Array, active: Array) -> tuple[Array, Array]:
        duals, products = dual(step, active)
        return duals * pool.mask[None, :, :], products

    return Dynamics(product, lambda_max, masked, matrix)


def _holds_whole(size: int, evolution: Evolution) -> bool:
    return size <= LARGEST_FULL_KERNEL and 8 * size**2 <= evolution.kernel_bytes


def _flat_product(kernel: Array) -> Product:
    """Returns ``g -> K g`` for g [n, C] and the whole kernel K [n C, n C]."""
    return lambda g: (kernel @ g.ravel()).reshape(g.shape)


def _by_eigh(kernel: Array | None, residual: Array, times: tuple[int, ...]) -> tuple[Array, Dual]:
    """Returns a kernel's largest eigenvalue, and the function that computes the dual by an eigendecomposition.

    The function is ``(step, active) -> (R_t [Psi, n, C], 0 products)``, as ``Dynamics.dual``. The kernel is [n, n], or
    [n C, n C] for all outputs; ``residual`` [n, C] is the targets minus the outputs; ``times`` are the Psi numbers t.
    """
    assert kernel is not None
    eigenvalues, vectors = jnp.linalg.eigh(kernel)

    def dual(step: Array, active: Array) -> tuple[Array, Array]:
        duals = spectral_dual(eigenvalues, vectors, residual.reshape((kernel.shape[0], -1)), step, times)
        return jnp.where(active, duals, 0).reshape((len(times), *residual.shape)), jnp.int32(0)

    return eigenvalues[-1], dual


def by_products(
    product: Product,
    residual: Array,
    lambda_max: Array,
    times: tuple[int, ...],
    method: str,
    step: Array,
    active: Array,
) -> tuple[Array, Array]:
    """Computes the dual R_t [Psi, n, C] after Psi numbers of steps t, and the number of products with the kernel K, [].

    It is computed by a Chebyshev series (``chebyshev_dual``). If the step is unstable, or the series breaks down, the
    steps are taken one by one.

    Args:
        product: ``g -> K g`` for g [n, C].
        residual: Targets minus outputs before the first step, [n, C].
        lambda_max: Largest eigenvalue of K, [].
        times: The Psi numbers of steps.
        method: "chebyshev", or "iterate" to take the steps in any case.
        step: Step size in function space, [], as for ``chebyshev_dual``.
        active: If False, the result is zero, [] bool.
    """

    def steps(needed: Array) -> tuple[Array, Array]:
        duals = descend_dual(product, lambda moved: residual - moved, residual, step, times, needed)
        return duals, jnp.where(needed, times[-1], 0).astype(jnp.int32)

    if method == "iterate":
        return steps(active)
    is_stable = step * lambda_max <= 2
    largest = jnp.minimum(MARGIN * lambda_max, 2 / step)
    series, products, inside = chebyshev_dual(product, residual, step, times, largest, active & is_stable)
    otherwise = active & ~(inside & is_stable)
    stepwise, more = steps(otherwise)
    return jnp.where(otherwise, stepwise, series), products + more


def _by_descent(
    product: Product,
    lambda_max: Array,
    pool: Pool,
    outputs: Array,
    evolution: Evolution,
    method: str,
    step: Array,
    active: Array,
) -> tuple[Array, Array]:
    """Computes the dual R_t [Psi, n, C] for a loss whose derivative is not linear, and how many products it took, [].

    ``method`` is "iterate" (``descend_dual``) or "multirate" (``multirate_dual``). If the step is unstable, both take
    the steps one by one. ``outputs`` [n, C] are the network's before the first step; ``product``, ``lambda_max``,
    ``step`` and ``active`` are as for ``by_products``.
    """
    loss = OUTPUT_LOSSES[evolution.loss]

    def force(moved: Array) -> Array:
        return pool.mask * (pool.y - loss.predict(outputs + moved))

    multirate = active & (method == "multirate") & (step * lambda_max * loss.curvature <= 2)
    stepwise = descend_dual(product, force, outputs, step, evolution.times, active & ~multirate)
    products = jnp.where(active & ~multirate, evolution.times[-1], 0).astype(jnp.int32)
    if method == "iterate":
        return stepwise, products
    rows = outputs.shape[0] if evolution.kernel == "averaged" else outputs.size
    factor, more = leading_factor(product, outputs.shape, rows)
    faster, faster_products = multirate_dual(product, force, outputs, step, evolution.times, factor, multirate)
    return jnp.where(multirate, faster, stepwise), products + jnp.where(multirate, more + faster_products, 0)
