"""The reference of the evolution: gradient descent on the linearised network, taken one by one in weight space."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src.types import Array, Model, PyTree


@functools.partial(jax.jit, static_argnames=("model", "loss"))
def linearised_descent(
    model: Model, params: PyTree, x: Array, y: Array, steps: int, rate: float, loss: str = "squared_error"
) -> PyTree:
    """``params`` after ``steps`` on ``1/(2 n C) sum |f - y|^2``, or the cross entropy ``-1/n sum y log softmax(f)``."""
    outputs, push = jax.linearize(lambda p: model.apply(p, x), params)
    pull = jax.linear_transpose(push, params)
    squared = loss == "squared_error"

    def one(_: Array, change: PyTree) -> PyTree:
        moved = outputs + push(change)
        (gradient,) = pull((moved if squared else jax.nn.softmax(moved, axis=1)) - y)
        return jax.tree.map(lambda c, g: c - rate / (y.size if squared else len(y)) * g, change, gradient)

    change = jax.lax.fori_loop(0, steps, one, jax.tree.map(jnp.zeros_like, params))
    return jax.tree.map(jnp.add, params, change)


@functools.partial(jax.jit, static_argnums=0)
def _linearisation(model: Model, params: PyTree, x: Array) -> tuple[Array, PyTree]:
    return model.apply(params, x), jax.jacrev(lambda p: model.apply(p, x))(params)


def outputs_of(model: Model, params: PyTree, x: Any) -> np.ndarray:
    """[n, C], by the program that gives the Jacobian too."""
    return np.asarray(_linearisation(model, params, jnp.asarray(x))[0])


def jacobian_of(model: Model, params: PyTree, x: Any) -> np.ndarray:
    """[n C, P], leaf after leaf."""
    leaves = jax.tree.leaves(_linearisation(model, params, jnp.asarray(x))[1])
    return np.concatenate([np.asarray(leaf).reshape(len(x) * model.output_size, -1) for leaf in leaves], axis=1)
