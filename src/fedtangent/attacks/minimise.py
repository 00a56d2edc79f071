"""A compiled minimiser for attacks: L-BFGS or Adam from optax, that stops when there is nothing left to gain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedtangent.types import Array, PyTree

OPTIMIZERS = ("lbfgs", "adam")
MEMORY = 20
PATIENCE = 5  # steps of L-BFGS without a lower value before it stops


class Minimum(NamedTuple):
    """The best point that was met."""

    point: PyTree
    value: Array  # []
    history: Array  # [num_steps + 1] lowest value so far
    steps: Array  # [] int32, steps taken


def minimise(
    objective: Callable[[PyTree], Array],
    start: PyTree,
    optimizer: str,
    num_steps: int,
    learning_rate: float,
    tolerance: float,
) -> Minimum:
    """Lower ``objective`` from ``start`` until it is at most ``tolerance``, or L-BFGS finds nothing lower any more.

    L-BFGS chooses its steps by a line search and does not look at ``learning_rate``. A value that is not finite is
    never the best one.
    """
    method, advance_by_one = _method(objective, optimizer, learning_rate)
    value, slope = jax.value_and_grad(objective)(start)
    first = jnp.where(jnp.isfinite(value), value, jnp.inf)
    history = jnp.full((num_steps + 1,), first)
    patience = PATIENCE if optimizer == "lbfgs" else num_steps

    def goes_on(carry: Any) -> Array:
        _, _, (_, best), _, step, idle = carry
        return (step < num_steps) & (best > tolerance) & (idle < patience)

    def advance(carry: Any) -> Any:
        here, state, (kept, best), history, step, idle = carry
        here, state = advance_by_one(here, state)
        better = here.value < best  # false for what is not a number
        kept = jax.tree.map(lambda new, old: jnp.where(better, new, old), here.point, kept)
        best = jnp.where(better, here.value, best)
        return here, state, (kept, best), history.at[step + 1].set(best), step + 1, jnp.where(better, 0, idle + 1)

    zero = jnp.zeros((), jnp.int32)
    carry = _Here(start, value, slope), method.init(start), (start, first), history, zero, zero
    _, _, (kept, best), history, steps, _ = jax.lax.while_loop(goes_on, advance, carry)
    return Minimum(kept, best, jnp.where(jnp.arange(num_steps + 1) > steps, best, history), steps)


class _Here(NamedTuple):
    """Where the search is."""

    point: PyTree
    value: Array  # []
    slope: PyTree


def _method(
    objective: Callable[[PyTree], Array], optimizer: str, learning_rate: float
) -> tuple[Any, Callable[[_Here, Any], tuple[_Here, Any]]]:
    """The optimiser, and its step."""
    if optimizer == "lbfgs":
        method = optax.lbfgs(memory_size=MEMORY)

        def search(here: _Here, state: Any) -> tuple[_Here, Any]:
            point, value, slope = here
            change, state = method.update(slope, state, point, value=value, grad=slope, value_fn=objective)
            # the line search has evaluated the point that it chose
            found = optax.tree.get(state, "value"), optax.tree.get(state, "grad")
            return _Here(optax.apply_updates(point, change), *found), state

        return method, search
    method = optax.adam(learning_rate)

    def descend(here: _Here, state: Any) -> tuple[_Here, Any]:
        change, state = method.update(here.slope, state, here.point)
        point = optax.apply_updates(here.point, change)
        return _Here(point, *jax.value_and_grad(objective)(point)), state

    return method, descend
