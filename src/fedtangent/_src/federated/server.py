"""The server's step of one model along the aggregated messages."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax

from fedtangent._src.optimizers import Optimizer, at_round
from fedtangent._src.types import Array, OfParameters, PyTree, RoundInfo, Server, ServerUpdate


class OptaxState(NamedTuple):
    """The parameters of a model and the state of their optimiser."""

    params: PyTree
    optimizer: PyTree


def _params(state: PyTree) -> PyTree:
    return state.params


def with_params(init: OfParameters, update: ServerUpdate) -> Server:
    """Builds a server whose state has the model's parameters as its field ``params``, and which broadcasts them.

    Args:
        init: Makes the state from parameters.
        update: Updates the state with the aggregate of the messages.
    """
    return Server(init, _params, _params, update)


def optax_server(optimizer: Optimizer) -> Server:
    """Builds the server that gives the aggregated pseudo-gradient ``server - client`` to an optax optimiser.

    ``optax.sgd(1.0)`` is FedAvg: the new parameters are the weighted mean of the clients' parameters.

    Args:
        optimizer: An optax optimiser, or a function from the round to one (``optimizers.sgd`` of a schedule).
    """

    def update(state: OptaxState, aggregated: PyTree, info: RoundInfo) -> tuple[OptaxState, dict[str, Array]]:
        updates, opt_state = at_round(optimizer, info.round).update(aggregated, state.optimizer, state.params)
        return OptaxState(optax.apply_updates(state.params, updates), opt_state), {}

    def init(params: PyTree) -> OptaxState:
        return OptaxState(params, at_round(optimizer, jnp.int32(0)).init(params))

    return with_params(init, update)
