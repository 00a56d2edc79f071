"""The server's evolution of NTK-FL: from pooled examples to new weights without a Jacobian in memory.

Conventions, consistent between function and weights: the loss is ``1/(2 N C) sum |f - y|^2`` over the N real examples,
``Theta`` sums over parameters, so that gradient descent with learning rate eta moves the function of the linearised
network by ``s = eta / (N C)`` times ``Theta (y - f)`` a step. (Yue et al., ICML 2022, print eta / N with the kernel H
in (9a) and eta / (N C) in (10); only the latter in both makes weights and function agree.)
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.federated.ntk_spectral import evolve_dual, iterate_dual, largest_eigenvalue
from fedtangent.kernels.empirical import empirical_ntk
from fedtangent.types import Array, Model, PyTree

KERNELS = ("averaged", "exact")
METHODS = ("auto", "eigh", "iterate")

OK, DIVERGED, NO_EXAMPLES = 0, 1, 2  # info["status"]

BLOCK_SIZE = 1024  # examples by examples of the kernel built at once
LARGEST_FULL_KERNEL = 4096  # n C up to which "auto" holds the whole kernel
LARGEST_EXACT_ERROR = 1024  # n C up to which the averaged kernel's error is computed and not estimated
PROBES = 16

# Measured in float64 on 2 cores: seconds per m^3 of an eigendecomposition, per matrix entry of a product with a few
# columns (memory bound), and per multiplication of a pass through the network.
EIGH_SECONDS, PRODUCT_SECONDS, PASS_SECONDS = 9e-11, 3e-10, 2e-11


class _Tangent(NamedTuple):
    """The network linearised at its weights, on the pooled examples; rows of padding are zero."""

    outputs: Array  # f_0 [n, C]
    push: Callable[[PyTree], Array]  # J: change of weights -> change of outputs [n, C]
    pull: Callable[[Array], PyTree]  # J': [n, C] -> change of weights


class _Pool(NamedTuple):
    x: Array  # [n, ...]
    y: Array  # [n, C] float64
    mask: Array  # [n, 1] float64
    num_examples: Array  # [] float64, real ones (at least 1)


def ntk_evolve(
    model: Model,
    params: PyTree,
    x: Array,
    y: Array,
    mask: Array,
    learning_rate: Array | float,
    times: tuple[int, ...],
    kernel: str = "averaged",
    method: str = "auto",
) -> tuple[PyTree, dict[str, Array]]:
    """One round of NTK-FL at the server (Yue et al., ICML 2022, section 4.1, eq. 9-11).

    Evolves the network linearised at ``params`` by t steps of full-batch gradient descent on the pooled examples for
    every t in ``times``, and keeps the weights at which the real network has the smallest loss on them.

    Args:
        x, y, mask: pooled examples [n, ...], targets [n, C] and which rows are real, [n]; the others have no effect.
        learning_rate: eta of the descent, positive; may be traced.
        times: candidate numbers of steps, increasing (static).
        kernel: ``"averaged"`` evolves every output with the paper's ``H = 1/C sum_k Theta_kk`` [n, n];
            ``"exact"`` with the whole kernel, that is exactly the linearised network's gradient descent.
        method: ``"eigh"``, one eigendecomposition for all times (of H, or of the [n C, n C] kernel);
            ``"iterate"``, the steps themselves (with H, or with one forward and one backward derivative a step);
            ``"auto"``, the cheaper by measured cost. Both give the same up to rounding.

    Returns the new parameters in their own dtype, and ``info``: ``time`` [] int32 chosen (0 if none), ``losses`` [Psi]
    of the real network at every candidate (infinite where not finite), ``loss_before`` [], ``status`` (0 fine,
    1 every candidate diverged, 2 no examples; in both the parameters are kept), ``lambda_max`` [] of the kernel in use
    and ``stable_learning_rate`` [] = 2 N C / lambda_max, ``kernel_error`` [] = |Theta - H (x) I| / |Theta| in Frobenius
    norm (estimated by 16 fixed random probes when n C > 1024), and ``function_gap`` [], the relative difference on the
    pooled examples between the linearised network at the chosen weights and the function that the kernel in use
    predicts. The last two are 0 in exact mode.

    Evolution is in float64. Raises ``ValueError`` without 64-bit mode and for a bad argument, named.
    """
    _validate(model, x, y, mask, learning_rate, times, kernel, method)
    return _evolve(model, params, x, y, mask, learning_rate, tuple(int(t) for t in times), kernel, method)


def linearised_descent(model: Model, params: PyTree, x: Array, y: Array, steps: int, learning_rate: float) -> PyTree:
    """``params`` after ``steps`` of gradient descent on the linearised network, taken one by one in weight space.

    Loss ``1/(2 n C) sum |f - y|^2`` over ``x`` [n, ...], ``y`` [n, C]; computed in the parameters' dtype.
    """
    outputs, push = jax.linearize(lambda p: model.apply(p, x), params)
    pull = jax.linear_transpose(push, params)
    step = learning_rate / y.size

    def one(_: Array, change: PyTree) -> PyTree:
        (gradient,) = pull(outputs + push(change) - y.astype(outputs.dtype))
        return jax.tree.map(lambda c, g: c - step * g, change, gradient)

    change = jax.lax.fori_loop(0, steps, one, jax.tree.map(jnp.zeros_like, params))
    return jax.tree.map(jnp.add, params, change)


@functools.partial(jax.jit, static_argnames=("model", "times", "kernel", "method"))
def _evolve(
    model: Model, params: PyTree, x: Array, y: Array, mask: Array, learning_rate: Array | float,
    times: tuple[int, ...], kernel: str, method: str,
) -> tuple[PyTree, dict[str, Array]]:  # fmt: skip
    pool = _pool(x, y, mask)
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
    tangent = _linearise(model, weights, pool)
    step = learning_rate / (pool.num_examples * y.shape[1])
    method = _choose(kernel, params, y.shape, times) if method == "auto" else method
    evolution = _averaged if kernel == "averaged" else _exact
    dual, lambda_max, errors = evolution(model, weights, pool, tangent, step, times, method)
    chosen, best, losses = _pick(model, params, pool, tangent, dual)
    status = jnp.where(jnp.any(mask), jnp.where(best < 0, DIVERGED, OK), NO_EXAMPLES)
    info = {
        "time": jnp.where(status == OK, jnp.asarray(times, jnp.int32)[best], 0),
        "losses": losses,
        "loss_before": _loss(model, params, pool),
        "status": status.astype(jnp.int32),
        "lambda_max": lambda_max,
        "stable_learning_rate": 2 * pool.num_examples * y.shape[1] / lambda_max,
        **errors(dual[best]),
    }
    return chosen, info


def _pool(x: Array, y: Array, mask: Array) -> _Pool:
    """Float64 examples with padding set to zero, so that not even a NaN in it counts."""
    real = mask.reshape((-1,) + (1,) * (x.ndim - 1))
    x = jnp.where(real, x, jnp.zeros((), x.dtype))
    x = x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    y = jnp.where(mask[:, None], y, jnp.zeros((), y.dtype)).astype(jnp.float64)
    return _Pool(x, y, mask[:, None].astype(jnp.float64), jnp.maximum(jnp.sum(mask), 1).astype(jnp.float64))


def _linearise(model: Model, weights: PyTree, pool: _Pool) -> _Tangent:
    outputs, push = jax.linearize(lambda p: pool.mask * model.apply(p, pool.x), weights)
    transpose = jax.linear_transpose(push, weights)
    return _Tangent(outputs, push, lambda v: transpose(v)[0])


def _averaged(
    model: Model, weights: PyTree, pool: _Pool, tangent: _Tangent, step: Array, times: tuple[int, ...], method: str
) -> tuple[Array, Array, Callable[[Array], dict[str, Array]]]:
    """Dual [Psi, n, C], largest eigenvalue and errors under the averaged kernel H."""
    matrix = empirical_ntk(model, weights, pool.x, block_size=BLOCK_SIZE) * (pool.mask * pool.mask.T)
    residual = pool.y - tangent.outputs
    if method == "eigh":
        dual, eigenvalues = evolve_dual(matrix, residual, step, times)
        lambda_max = eigenvalues[-1]
    else:
        dual = iterate_dual(lambda g: matrix @ g, residual, step, times)
        lambda_max = largest_eigenvalue(lambda g: matrix @ g, pool.mask)
    dual = dual * pool.mask[None, :, :]

    def errors(chosen: Array) -> dict[str, Array]:
        predicted = matrix @ chosen
        scale = jnp.linalg.norm(predicted)
        gap = jnp.linalg.norm(tangent.push(tangent.pull(chosen)) - predicted) / jnp.where(scale == 0, 1, scale)
        return {"kernel_error": _kernel_error(model, weights, pool, tangent, matrix), "function_gap": gap}

    return dual, lambda_max, errors


def _exact(
    model: Model, weights: PyTree, pool: _Pool, tangent: _Tangent, step: Array, times: tuple[int, ...], method: str
) -> tuple[Array, Array, Callable[[Array], dict[str, Array]]]:
    """Dual [Psi, n, C] and largest eigenvalue under the whole kernel."""
    residual = pool.y - tangent.outputs
    if method == "eigh":
        matrix = _full_kernel(model, weights, pool)
        flat, eigenvalues = evolve_dual(matrix, residual.reshape((-1, 1)), step, times)
        dual, lambda_max = flat.reshape((len(times), *residual.shape)), eigenvalues[-1]
    else:

        def product(g: Array) -> Array:
            return tangent.push(tangent.pull(g))

        dual = iterate_dual(product, residual, step, times)
        lambda_max = largest_eigenvalue(product, pool.mask * _signs(residual.shape))
    zero = jnp.zeros(())
    return dual * pool.mask[None, :, :], lambda_max, lambda _: {"kernel_error": zero, "function_gap": zero}


def _full_kernel(model: Model, weights: PyTree, pool: _Pool) -> Array:
    """The whole kernel [n C, n C], zero in the rows and columns of padding."""
    size = pool.y.size
    flat_mask = jnp.broadcast_to(pool.mask, pool.y.shape).reshape((-1, 1))
    return empirical_ntk(model, weights, pool.x, trace=False).reshape((size, size)) * (flat_mask * flat_mask.T)


def _kernel_error(model: Model, weights: PyTree, pool: _Pool, tangent: _Tangent, matrix: Array) -> Array:
    """``|Theta - H (x) I| / |Theta|``; H is a projection of Theta, so ``|Theta|^2 = |Theta - H (x) I|^2 + C |H|^2``."""
    n, outputs = pool.y.shape
    if outputs == 1:
        return jnp.zeros(())
    if n * outputs <= LARGEST_EXACT_ERROR:
        whole = _full_kernel(model, weights, pool).reshape((n, outputs, n, outputs))
        difference = whole - matrix[:, None, :, None] * jnp.eye(outputs)[None, :, None, :]
        squared = jnp.sum(difference**2)
    else:

        def probe(i: Array) -> Array:
            z = pool.mask * _signs(pool.y.shape, i)
            return jnp.sum((tangent.push(tangent.pull(z)) - matrix @ z) ** 2)

        squared = jnp.mean(jax.lax.map(probe, jnp.arange(PROBES)))
    return jnp.sqrt(squared / (squared + outputs * jnp.sum(matrix**2)))


def _signs(shape: tuple[int, ...], i: Array | int = 0) -> Array:
    """Fixed random signs, float64: probes need no seed of the run's."""
    return jax.random.rademacher(jax.random.fold_in(jax.random.key(0), i), shape, jnp.float64)


def _pick(model: Model, params: PyTree, pool: _Pool, tangent: _Tangent, dual: Array) -> tuple[PyTree, Array, Array]:
    """Weights of the candidate with the smallest finite loss (11a), its index (-1 if none) and all losses [Psi]."""

    def consider(best: tuple[PyTree, Array, Array], candidate: tuple[Array, Array]) -> tuple[Any, Array]:
        i, weights_of_examples = candidate
        change = tangent.pull(weights_of_examples)
        evolved = jax.tree.map(lambda leaf, c: (leaf + c).astype(leaf.dtype), params, change)
        loss = _loss(model, evolved, pool)
        loss = jnp.where(jnp.isfinite(loss), loss, jnp.inf)
        better = loss < best[2]
        kept = jax.tree.map(lambda new, old: jnp.where(better, new, old), evolved, best[0])
        return (kept, jnp.where(better, i, best[1]), jnp.minimum(loss, best[2])), loss

    start = (params, jnp.int32(-1), jnp.asarray(jnp.inf, jnp.float64))
    (chosen, best, _), losses = jax.lax.scan(consider, start, (jnp.arange(dual.shape[0], dtype=jnp.int32), dual))
    return chosen, best, losses


def _loss(model: Model, params: PyTree, pool: _Pool) -> Array:
    """``1/(2 N C) sum |f - y|^2`` of the real network, at the parameters as they will be sent (their own dtype)."""
    dtype = jax.tree.leaves(params)[0].dtype
    x = pool.x.astype(dtype) if jnp.issubdtype(pool.x.dtype, jnp.floating) else pool.x
    difference = pool.mask * (model.apply(params, x).astype(jnp.float64) - pool.y)
    return jnp.sum(difference**2) / (2 * pool.num_examples * pool.y.shape[1])


def _choose(kernel: str, params: PyTree, shape: tuple[int, ...], times: tuple[int, ...]) -> str:
    """The cheaper method, by the measured seconds above."""
    n, outputs = shape
    if kernel == "averaged":
        return "eigh" if EIGH_SECONDS * n <= PRODUCT_SECONDS * max(times) else "iterate"
    size = n * outputs
    num_params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    iterating = max(times) * 4 * n * num_params * PASS_SECONDS
    return "eigh" if size <= LARGEST_FULL_KERNEL and EIGH_SECONDS * size**3 <= iterating else "iterate"


def _validate(
    model: Model, x: Array, y: Array, mask: Array, learning_rate: Any, times: Any, kernel: str, method: str
) -> None:
    if jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise ValueError("ntk_evolve: needs JAX's 64-bit mode, call fedtangent.enable_x64() first")
    if kernel not in KERNELS:
        raise ValueError(f"kernel: got {kernel!r}, allowed are {', '.join(KERNELS)}")
    if method not in METHODS:
        raise ValueError(f"method: got {method!r}, allowed are {', '.join(METHODS)}")
    increasing = all(a < b for a, b in itertools.pairwise(times))
    if not times or any(int(t) != t or t < 1 for t in times) or not increasing:
        raise ValueError(f"times: got {times}, must be one or more increasing positive whole numbers of steps")
    if not isinstance(learning_rate, jax.core.Tracer) and not (math.isfinite(learning_rate) and learning_rate > 0):
        raise ValueError(f"learning_rate: got {learning_rate}, must be finite and positive")
    if y.shape != (x.shape[0], model.output_size) or mask.shape != (x.shape[0],):
        raise ValueError(
            f"y and mask: got {y.shape} and {mask.shape}, but x {x.shape} and a model of {model.output_size} outputs "
            f"need {(x.shape[0], model.output_size)} and {(x.shape[0],)}"
        )
