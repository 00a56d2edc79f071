"""Gradient descent on a network and on its linearisation, step by step, from the same weights (Lemma 2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from fedtangent._src.checks import choice
from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.types import Array, Model, PyTree


class Descents(NamedTuple):
    """Two descents after 0, 1, .. T steps, [T + 1] each; squared residuals are sums over examples and outputs."""

    network: np.ndarray  # of the network under gradient descent
    tangent: np.ndarray  # of the network at the linearisation's weights, which are NTK-FL's
    linear: np.ndarray  # of the linearised network itself
    largest: np.ndarray  # largest |f - y| of the network under gradient descent: Lemma 2's gamma
    apart: np.ndarray  # sum over examples and outputs of |sum_{u<t} (f_u - linear f_u)|, for ``residual_part``
    gap: np.ndarray  # l1 distance of the two weights
    watched: dict[str, np.ndarray]  # values returned by ``watch``


def _nothing(start: PyTree, weights: PyTree) -> dict[str, Array]:
    return {}


def descents(
    model: Model,
    params: PyTree,
    x: Any,
    y: Any,
    learning_rate: float,
    steps: int,
    kernel: str = "exact",
    watch: Callable[[PyTree, PyTree], dict[str, Array]] = _nothing,
) -> Descents:
    """Runs both descents on ``1/(2 N C) sum |f - y|^2`` from the same weights, in the parameters' dtype.

    Args:
        model: The network.
        params: Initial weights.
        x: Inputs, [N, ...].
        y: Targets, [N, C].
        learning_rate: Step size.
        steps: Number of steps T.
        kernel: ``"exact"`` descends on the linearised network; ``"averaged"`` lets every output's residual follow the
            paper's ``H = 1/C sum_k Theta_kk`` (9b, 10).
        watch: ``(initial weights, weights of the network) -> numbers`` by name, called at the start and after every
            step.
    """
    choice("kernel", kernel, ("exact", "averaged"))
    found = jax.device_get(
        _descents(model, params, jnp.asarray(x), jnp.asarray(y), learning_rate, int(steps), kernel, watch)
    )
    return Descents(**{name: np.asarray(v) for name, v in found.items() if name != "watched"}, watched=found["watched"])


@partial(jax.jit, static_argnames=("model", "steps", "kernel", "watch"))
def _descents(
    model: Model,
    params: PyTree,
    x: Float[Array, "n d"],
    y: Float[Array, "n *C"],
    learning_rate: float | Float[Array, ""],
    steps: int,
    kernel: str,
    watch: Any,
) -> dict[str, Any]:
    outputs, push = jax.linearize(lambda p: model.apply(p, x), params)
    transpose = jax.linear_transpose(push, params)
    matrix = empirical_ntk(model, params, x) if kernel == "averaged" else None
    step = learning_rate / y.size

    def minus(weights: PyTree, gradient: PyTree) -> PyTree:
        return jax.tree.map(lambda w, g: w - step * g, weights, gradient)

    def look(state: tuple[PyTree, PyTree, Array, Array]) -> tuple[Array, Callable[[Array], Any], dict[str, Any]]:
        weights, change, residual, total = state
        out, pull = jax.vjp(lambda p: model.apply(p, x), weights)
        real = out - y
        at_tangent = model.apply(jax.tree.map(jnp.add, params, change), x) - y
        distances = jax.tree.map(lambda w, p, c: jnp.sum(jnp.abs(w - (p + c))), weights, params, change)
        return (
            real,
            pull,
            {
                "network": jnp.sum(real**2),
                "tangent": jnp.sum(at_tangent**2),
                "linear": jnp.sum(residual**2),
                "largest": jnp.max(jnp.abs(real)),
                "apart": jnp.sum(jnp.abs(total)),
                "gap": sum(jax.tree.leaves(distances)),
                "watched": watch(params, weights),
            },
        )

    def one(state: tuple[PyTree, PyTree, Array, Array], _: None) -> tuple[Any, dict[str, Any]]:
        real, pull, seen = look(state)
        weights, change, residual, total = state
        moved = minus(change, transpose(residual)[0])
        evolved = outputs - y + push(moved) if matrix is None else residual - step * (matrix @ residual)
        return (minus(weights, pull(real)[0]), moved, evolved, total + real - residual), seen

    start = (params, jax.tree.map(jnp.zeros_like, params), outputs - y, jnp.zeros_like(y))
    last, path = jax.lax.scan(one, start, None, length=steps)
    end = look(last)[2]
    return jax.tree.map(lambda a, b: jnp.concatenate([a, jnp.asarray(b)[None]]), path, end)
