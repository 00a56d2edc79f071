"""Servers that do more than move to the mean: FedDyn, SCAFFOLD, FedNova and the anchored mean of Modified Local-GD.

Messages are ``server - client``, so the mean message d is how far the server is from the clients' mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedtangent import pytrees
from fedtangent.federated.rates import Rate, rate_at
from fedtangent.types import Array, PyTree, RoundInfo, Server


class Dynamic(NamedTuple):
    """FedDyn's server: the model and the mean over all clients of their corrections."""

    params: PyTree
    correction: PyTree  # h


class Controlled(NamedTuple):
    """A model and a control variate: SCAFFOLD's state, what it broadcasts, and (as differences) what clients send."""

    params: PyTree
    control: PyTree


class Normalised(NamedTuple):
    """A FedNova message: the client's update divided by its normaliser, and the normaliser."""

    direction: PyTree
    normaliser: Array  # []


class Anchored(NamedTuple):
    """The model and where it started."""

    params: PyTree
    anchor: PyTree


def _fraction(info: RoundInfo, num_clients: int) -> Array:
    """Share of all clients whose messages count, |S| / N; of an int32 JAX would divide in float32."""
    return jnp.asarray(info.num_clients, float) / num_clients


def dynamic_server(mu: float | Array, num_clients: int, rate: Rate) -> Server:
    """FedDyn (Acar et al., 2021, algorithm 1): ``h += mu |P| / N d``, then ``w -= rate (d + h / mu)``.

    With ``rate`` 1 the model is the clients' mean minus ``h / mu``, as published.
    """

    def update(state: Dynamic, d: PyTree, info: RoundInfo) -> tuple[Dynamic, dict[str, Array]]:
        h = pytrees.add(state.correction, pytrees.scale(mu * _fraction(info, num_clients), d))
        step = pytrees.add(d, pytrees.scale(1 / mu, h))
        return Dynamic(pytrees.subtract(state.params, pytrees.scale(rate_at(rate, info.round), step)), h), {}

    return Server(
        init=lambda params: Dynamic(params, pytrees.zeros_like(params)),
        broadcast=lambda state: state.params,
        params=lambda state: state.params,
        update=update,
    )


def controlled_server(num_clients: int, rate: Rate) -> Server:
    """SCAFFOLD (Karimireddy et al., 2020, algorithm 1, lines 16 and 17): ``x -= rate d``, ``c += |S| / N mean(dc)``."""

    def update(state: Controlled, mean: Controlled, info: RoundInfo) -> tuple[Controlled, dict[str, Array]]:
        step = pytrees.scale(rate_at(rate, info.round), mean.params)
        change = pytrees.scale(_fraction(info, num_clients), mean.control)
        return Controlled(pytrees.subtract(state.params, step), pytrees.add(state.control, change)), {}

    return Server(
        init=lambda params: Controlled(params, pytrees.zeros_like(params)),
        broadcast=lambda state: state,
        params=lambda state: state.params,
        update=update,
    )


class Plain(NamedTuple):
    """A server that remembers its model only."""

    params: PyTree


def normalised_server(tau_eff: Rate | None, rate: Rate) -> Server:
    """FedNova (Wang et al., 2020, eq. 6): ``x -= rate tau_eff sum_i p_i d_i``; ``info["tau_eff"]`` says what it was.

    ``tau_eff=None`` is the mean normaliser ``sum_i p_i a_i`` (section 4 of the paper).
    """

    def update(state: Plain, mean: Normalised, info: RoundInfo) -> tuple[Plain, dict[str, Array]]:
        steps = mean.normaliser if tau_eff is None else jnp.asarray(rate_at(tau_eff, info.round), mean.normaliser.dtype)
        step = pytrees.scale(rate_at(rate, info.round) * steps, mean.direction)
        return Plain(pytrees.subtract(state.params, step)), {"tau_eff": steps}

    return Server(init=Plain, broadcast=lambda state: state.params, params=lambda state: state.params, update=update)


def anchored_server(alpha: Callable[[Array], Array], first_index: int, rate: Rate) -> Server:
    """Modified Local-GD (Local-GD paper, algorithm 3): ``(1 - alpha) w_start + alpha (w - rate d)``.

    In round k (from 0) ``alpha`` is ``alpha(k + first_index)``.
    """

    def update(state: Anchored, d: PyTree, info: RoundInfo) -> tuple[Anchored, dict[str, Array]]:
        share = alpha(info.round + first_index)
        mean = pytrees.subtract(state.params, pytrees.scale(rate_at(rate, info.round), d))
        params = pytrees.add(pytrees.scale(1 - share, state.anchor), pytrees.scale(share, mean))
        return Anchored(params, state.anchor), {}

    return Server(
        init=lambda params: Anchored(
            params, jax.tree.map(jnp.copy, params)
        ),  # a run donates its state: no shared buffer
        broadcast=lambda state: state.params,
        params=lambda state: state.params,
        update=update,
    )
