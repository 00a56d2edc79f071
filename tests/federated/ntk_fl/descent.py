"""The reference of the evolution: gradient descent on the linearised network, taken one by one in weight space."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedtangent.types import Array, Model, PyTree


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
