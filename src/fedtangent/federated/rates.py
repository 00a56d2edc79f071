"""Learning rates: a number, a traced array, or an optax schedule from the round to the rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax

from fedtangent.checks import number, whole
from fedtangent.types import Array, PyTree

Rate: TypeAlias = float | Array | Callable[[Array], Array]
Optimizer: TypeAlias = optax.GradientTransformation | Callable[[Array], optax.GradientTransformation]


def staircase_decay(initial: Rate, factor: float = 0.99, every: int = 10) -> Callable[[Array], Array]:
    """``initial * factor ** floor(round / every)``: the papers' decay by 0.99 every ten rounds.

    Raises ``ValueError`` for a rate that is not positive, a factor outside (0, 1] or ``every`` below 1.
    """
    check_rate("initial", initial)
    if callable(initial):
        raise ValueError("initial: got a schedule, must be a number")
    number("factor", factor, above=0, at_most=1)
    whole("every", every)
    if factor == 1:
        return optax.constant_schedule(initial)
    decay = optax.exponential_decay(initial, int(every), factor, staircase=True)
    # Of a whole number optax computes in float32, also where everything else is float64.
    return lambda round_: decay(jnp.asarray(round_, float))


def check_rate(name: str, rate: Rate) -> None:
    """Raise ``ValueError`` unless a rate is positive and finite; of a schedule, its rate in round 0.

    A traced rate (of a sweep or a hypergradient) has no value to check, and passes.
    """
    if callable(rate):
        number(f"{name} in round 0", rate(jnp.int32(0)), above=0)
    else:
        number(name, rate, above=0)


def rate_at(rate: Rate, round_: Array) -> float | Array:
    """The rate of round ``round_``."""
    return rate(round_) if callable(rate) else rate


class Sgd(optax.GradientTransformation):
    """Plain gradient descent that exposes its rate, so that ``Model.descend`` can take the steps instead."""

    rate: float | Array


def sgd(rate: Rate) -> Optimizer:
    """Gradient descent at ``rate``: an optax transformation, or a function from the round to one.

    A rate is rounded to each parameter's dtype first, so that a constant schedule gives the same bits as the number
    and float32 parameters stay in float32.
    """
    return (lambda round_: _descend(rate(round_))) if callable(rate) else _descend(rate)


def at_round(optimizer: Optimizer, round_: Array) -> optax.GradientTransformation:
    """The optimiser of round ``round_``. Its state must not depend on the round in shape or structure."""
    return optimizer if isinstance(optimizer, optax.GradientTransformation) else optimizer(round_)


def _descend(rate: float | Array) -> Sgd:
    def update(gradient: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        return jax.tree.map(lambda g: jnp.asarray(-rate, g.dtype) * g, gradient), state

    plain = Sgd(lambda params: optax.EmptyState(), update)
    plain.rate = rate
    return plain
