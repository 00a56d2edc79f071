"""Server optimisers as published, written as optax transformations of the pseudo-gradient ``server - client``.

Reddi et al. (2021), algorithm 2, differ from ``optax.adam`` and its like: there is no bias correction, the second
moment starts at ``tau^2`` and not at 0, and Yogi's second moment moves by the sign of its error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedtangent import pytrees
from fedtangent.types import Array, PyTree

Number = float | Array
SecondMoment = Callable[[Array, Array], Array]  # (v, squared pseudo-gradient) -> v


class Moments(NamedTuple):
    """First and second moment, shaped as the parameters."""

    first: PyTree  # m
    second: PyTree  # v


def _adaptive(
    rate: Number, beta_1: Number, tau: Number, initial: Number | None, second: SecondMoment
) -> optax.GradientTransformation:
    """``m = beta_1 m + (1 - beta_1) g``; ``v = second(v, g^2)``; the update is ``-rate m / (sqrt(v) + tau)``."""
    start = tau**2 if initial is None else initial

    def init(params: PyTree) -> Moments:
        filled = jax.tree.map(lambda p: jnp.full(p.shape, start, p.dtype), params)
        return Moments(pytrees.zeros_like(params), filled)

    def update(gradient: PyTree, state: Moments, params: PyTree | None = None) -> tuple[PyTree, Moments]:
        m = pytrees.add(pytrees.scale(beta_1, state.first), pytrees.scale(1 - beta_1, gradient))
        v = jax.tree.map(lambda old, g: second(old, jnp.square(g)), state.second, gradient)

        def step(m: Array, v: Array) -> Array:
            return -jnp.asarray(rate, m.dtype) * m / (jnp.sqrt(v) + jnp.asarray(tau, v.dtype))

        return jax.tree.map(step, m, v), Moments(m, v)

    return optax.GradientTransformation(init, update)


def adam(
    rate: Number, beta_1: Number, beta_2: Number, tau: Number, initial: Number | None = None
) -> optax.GradientTransformation:
    """FedAdam's server (Reddi et al., 2021, algorithm 2): ``v = beta_2 v + (1 - beta_2) g^2``."""

    def second(v: Array, squared: Array) -> Array:
        return jnp.asarray(beta_2, v.dtype) * v + jnp.asarray(1 - beta_2, v.dtype) * squared

    return _adaptive(rate, beta_1, tau, initial, second)


def yogi(
    rate: Number, beta_1: Number, beta_2: Number, tau: Number, initial: Number | None = None
) -> optax.GradientTransformation:
    """FedYogi's server (Reddi et al., 2021, algorithm 2): ``v -= (1 - beta_2) g^2 sign(v - g^2)``."""

    def second(v: Array, squared: Array) -> Array:
        return v - jnp.asarray(1 - beta_2, v.dtype) * squared * jnp.sign(v - squared)

    return _adaptive(rate, beta_1, tau, initial, second)


def adagrad(rate: Number, beta_1: Number, tau: Number, initial: Number | None = None) -> optax.GradientTransformation:
    """FedAdagrad's server (Reddi et al., 2021, algorithm 2): ``v += g^2``."""
    return _adaptive(rate, beta_1, tau, initial, jnp.add)


def momentum(rate: Number, decay: Number, nesterov: bool = False) -> optax.GradientTransformation:
    """FedAvgM's server (Hsu et al., 2019, section 4.3): ``v = decay v + g``, the update is ``-rate v``.

    With ``nesterov`` the update is ``-rate (g + decay v)``.
    """

    def update(gradient: PyTree, v: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        v = pytrees.add(gradient, pytrees.scale(decay, v))
        ahead = pytrees.add(gradient, pytrees.scale(decay, v)) if nesterov else v
        return jax.tree.map(lambda leaf: jnp.asarray(-rate, leaf.dtype) * leaf, ahead), v

    return optax.GradientTransformation(pytrees.zeros_like, update)
