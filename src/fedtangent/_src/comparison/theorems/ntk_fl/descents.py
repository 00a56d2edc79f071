"""A problem for the two-layer ReLU network of eq. (12), and gradient descent on a network and on its linearisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float64

from fedtangent._src.checks import choice
from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.models.two_layer import two_layer_relu
from fedtangent._src.theory.ntk_fl.lemmas import empirical_kernel
from fedtangent._src.types import AnyArray, Array, ArrayLike, Model, PyTree

DIMENSION = 10


class Sphere(NamedTuple):
    """Random inputs of norm 1 with random signs as targets, and a network before training."""

    x: Float64[np.ndarray, "n d"]
    y: Float64[np.ndarray, "n"]
    model: Model
    params: PyTree  # initial weights of a run from ``jax.random.key(seed)``
    step: float  # n / lambda_max of the empirical kernel, which is half of the largest stable step


def sphere(seed: int, width: int, size: int, extra: int = 0) -> Sphere:
    """Draws a problem on the sphere.

    Args:
        seed: Seed of data and network.
        width: Number of neurons.
        size: Number of examples, for which the step is half of the largest stable one.
        extra: Number of further points that follow the examples in ``x`` and ``y``.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size + extra, DIMENSION))
    model = two_layer_relu(DIMENSION, width, seed=seed, dtype=jnp.float64)
    params = model.init(jax.random.split(jax.random.key(seed), 1)[0])
    x, y = x / np.linalg.norm(x, axis=1, keepdims=True), rng.choice(np.array([-1.0, 1.0]), size + extra)
    step = size / float(np.linalg.eigvalsh(empirical_kernel(x[:size], params["v"]))[-1])
    return Sphere(x, y, model, params, step)


Watch = Callable[[PyTree, PyTree], dict[str, Array]]


class Descents(NamedTuple):
    """Gradient descent on a network and on its linearisation after 0, 1, .. T steps; residuals are sums of squares."""

    network: Float[AnyArray, "T"]  # squared residual of the network under gradient descent
    tangent: Float[AnyArray, "T"]  # that of the network at the linearisation's weights, which are NTK-FL's
    linear: Float[AnyArray, "T"]  # that of the linearised network itself
    largest: Float[AnyArray, "T"]  # largest |f - y| of the network under gradient descent: Lemma 2's gamma
    apart: Float[AnyArray, "T"]  # sum over outputs of |sum_{u<t} (f_u - linear f_u)|, for ``residual_part``
    gap: Float[AnyArray, "T"]  # l1 distance of the two weights
    watched: Mapping[str, AnyArray]  # values returned by ``watch``, [T, ..]


def _nothing(start: PyTree, weights: PyTree) -> dict[str, Array]:
    return {}


def descents(
    model: Model,
    params: PyTree,
    x: ArrayLike,
    y: ArrayLike,
    learning_rate: float,
    steps: int,
    kernel: str = "exact",
    watch: Watch = _nothing,
) -> Descents:
    """Computes both descents on ``1/(2 N C) sum |f - y|^2`` from the same weights, in the parameters' dtype.

    Args:
        model: The network.
        params: Initial weights.
        x: Inputs, [N, ...].
        y: Targets, [N, C].
        learning_rate: Step size.
        steps: Number of steps.
        kernel: ``"exact"`` descends on the linearised network; ``"averaged"`` lets every output's residual follow the
            paper's ``H = 1/C sum_k Theta_kk`` (9b, 10).
        watch: Function of the initial and the present weights that returns numbers by name, called after every step.
    """
    choice("kernel", kernel, ("exact", "averaged"))
    examples = jnp.asarray(x), jnp.asarray(y)
    paths: Descents = jax.device_get(_descents(model, params, *examples, learning_rate, int(steps), kernel, watch))
    return paths


@partial(jax.jit, static_argnames=("model", "steps", "kernel", "watch"))
def _descents(
    model: Model,
    params: PyTree,
    x: Float[Array, "n d"],
    y: Float[Array, "n *C"],
    learning_rate: float | Float[Array, ""],
    steps: int,
    kernel: str,
    watch: Watch,
) -> Descents:
    outputs, push = jax.linearize(lambda p: model.apply(p, x), params)
    transpose = jax.linear_transpose(push, params)
    matrix = empirical_ntk(model, params, x) if kernel == "averaged" else None
    step = learning_rate / y.size

    def minus(weights: PyTree, gradient: PyTree) -> PyTree:
        return jax.tree.map(lambda w, g: w - step * g, weights, gradient)

    def look(state: tuple[PyTree, PyTree, Array, Array]) -> tuple[Array, Callable[[Array], PyTree], Descents]:
        weights, change, residual, total = state
        out, pull = jax.vjp(lambda p: model.apply(p, x), weights)
        real = out - y
        at_tangent = model.apply(jax.tree.map(jnp.add, params, change), x) - y
        distances = jax.tree.map(lambda w, p, c: jnp.sum(jnp.abs(w - (p + c))), weights, params, change)
        measured = Descents(
            network=jnp.sum(real**2),
            tangent=jnp.sum(at_tangent**2),
            linear=jnp.sum(residual**2),
            largest=jnp.max(jnp.abs(real)),
            apart=jnp.sum(jnp.abs(total)),
            gap=jax.tree.reduce(jnp.add, distances),
            watched=watch(params, weights),
        )
        return real, pull, measured

    def one(state: tuple[PyTree, PyTree, Array, Array], _: None) -> tuple[PyTree, Descents]:
        real, pull, measured = look(state)
        weights, change, residual, total = state
        moved = minus(change, transpose(residual)[0])
        evolved = outputs - y + push(moved) if matrix is None else residual - step * (matrix @ residual)
        return (minus(weights, pull(real)[0]), moved, evolved, total + real - residual), measured

    start = (params, jax.tree.map(jnp.zeros_like, params), outputs - y, jnp.zeros_like(y))
    last, path = jax.lax.scan(one, start, None, length=steps)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, jnp.asarray(b)[None]]), path, look(last)[2])
