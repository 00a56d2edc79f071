"""The server's part of a round: it reduces the clients' messages to one value per model and updates the model."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, Int, Int32, Num

from fedtangent._src import pytrees
from fedtangent._src.optimizers import Optimizer, at_round
from fedtangent._src.types import Aggregate, Array, Cohort, OfParameters, PyTree, RoundInfo, Server, ServerUpdate, Slots


class _Sum(NamedTuple):
    total: PyTree  # [K, ...]
    weight: Float[Array, "K"]


def _add_weighted(
    total: Float[Array, "K *shape"], rows: Slots, messages: Num[Array, "B *shape"]
) -> Float[Array, "K *shape"]:
    """Adds each message, times its weight, to its model's row of ``total``; a message of weight 0 never counts.

    ``rows`` are the B slots (one client with one model each) from which the messages come.
    """
    weight = rows.weight.astype(total.dtype)
    shape = (-1,) + (1,) * (messages.ndim - 1)
    # A slot of weight 0 must not count even when its message is not finite.
    counted = jnp.where(weight.reshape(shape) > 0, messages.astype(total.dtype), 0) * weight.reshape(shape)
    if messages.shape[0] == 1:  # XLA's scatter is slow on a CPU: one row is a slice update
        model = rows.model[0]
        return jax.lax.dynamic_update_index_in_dim(total, total[model] + counted[0], model, 0)
    member = (rows.model[:, None] == jnp.arange(total.shape[0])[None]).astype(total.dtype)
    return total + jnp.tensordot(member, counted, axes=(0, 0), precision="highest")


def weighted_mean() -> Aggregate:
    """Builds the aggregate that is the weighted mean of each model's messages (remark 1 of the paper FE-2024).

    A model that no client trained in the round gets 0, which ``compose`` does not use. Messages in half precision are
    added up in float32, the dtype of their mean.
    """

    def init(message: PyTree, num_models: int) -> _Sum:
        total = jax.tree.map(lambda leaf: jnp.zeros((num_models, *leaf.shape), pytrees.widest(leaf.dtype)), message)
        return _Sum(total, jnp.zeros((num_models,), pytrees.precision(message)))

    def add(acc: _Sum, rows: Slots, messages: PyTree) -> _Sum:
        total = jax.tree.map(lambda t, m: _add_weighted(t, rows, m), acc.total, messages)
        return _Sum(total, acc.weight.at[rows.model].add(rows.weight.astype(acc.weight.dtype)))

    def finish(acc: _Sum) -> PyTree:
        inverse = 1 / jnp.where(acc.weight > 0, acc.weight, 1)
        return jax.tree.map(lambda t: t * inverse.reshape((-1,) + (1,) * (t.ndim - 1)).astype(t.dtype), acc.total)

    def merge(acc: _Sum, axis: str) -> _Sum:
        return jax.lax.psum(acc, axis)

    return Aggregate(init, add, finish, merge)


def slots_of(cohort: Cohort, num_models: int, offsets: Int[Array, "offsets"]) -> Slots:
    """Returns a cohort as ``Slots``: with each client's number of examples, and each slot's rank within its model.

    A slot is a place of the cohort, in which one client trains one model. The rank of a filled slot counts, from 0, the
    filled slots of the same model before it. An empty slot, of weight 0, has size 0 and no meaningful rank.

    Args:
        cohort: The cohort.
        num_models: Models K.
        offsets: Client i has the examples from ``offsets[i]`` up to ``offsets[i + 1]``, [N + 1] int32 for N clients.
    """
    mine = (cohort.model[:, None] == jnp.arange(num_models)[None]) & (cohort.weight > 0)[:, None]
    before = jnp.cumsum(mine, axis=0, dtype=jnp.int32) - 1
    size = jnp.where(cohort.weight > 0, offsets[cohort.client + 1] - offsets[cohort.client], 0)
    return Slots(*cohort, jnp.take_along_axis(before, cohort.model[:, None], axis=1)[:, 0], size)


class Stacked(NamedTuple):
    """All messages of each model's clients, stacked in an array with room for M messages.

    Attributes:
        messages: Messages [K, M, ...]; zeros in a row without a message.
        filled: Number of accepted messages of each model, including the dropped ones, [K].
        beyond: Number of accepted messages of each model that were dropped for lack of a row, [K].
        weight: Weight of each message, [K, M]; 0 in a row without a message.
        client: Id of the client that sent each message, [K, M]; 0 in a row without a message.
    """

    messages: PyTree
    filled: Int32[Array, "K"]
    beyond: Int32[Array, "K"]
    weight: Float[Array, "K M"]
    client: Int32[Array, "K M"]


def stack(slots_per_model: int) -> Aggregate:
    """Builds the aggregate that keeps every message, in cohort order, for servers that need the single messages.

    The result is a ``Stacked``, with room for ``slots_per_model`` (M) messages of each model. Further ones are counted
    and dropped. A message that the server rejects leaves a row of zeros.
    """

    def init(message: PyTree, num_models: int) -> Stacked:
        buffer = jax.tree.map(lambda m: jnp.zeros((num_models, slots_per_model, *m.shape), m.dtype), message)
        counts, places = jnp.zeros((2, num_models), jnp.int32), (num_models, slots_per_model)
        weight = jnp.zeros(places, pytrees.precision(message))
        return Stacked(buffer, counts[0], counts[1], weight, jnp.zeros(places, jnp.int32))

    def add(acc: Stacked, rows: Slots, messages: PyTree) -> Stacked:
        active = rows.weight > 0
        at = jnp.where(active, rows.place, slots_per_model)  # out of range: dropped
        buffer = jax.tree.map(lambda b, m: b.at[rows.model, at].set(m, mode="drop"), acc.messages, messages)
        without = active & (rows.place >= slots_per_model)
        filled = acc.filled.at[rows.model].add(active.astype(jnp.int32))
        beyond = acc.beyond.at[rows.model].add(without.astype(jnp.int32))
        weight = acc.weight.at[rows.model, at].set(rows.weight.astype(acc.weight.dtype), mode="drop")
        client = acc.client.at[rows.model, at].set(rows.client.astype(jnp.int32), mode="drop")
        return Stacked(buffer, filled, beyond, weight, client)

    def merge(acc: Stacked, axis: str) -> Stacked:
        def gather(leaf: Array) -> Array:  # every place is filled on one device at most, and zero on the others
            wide = leaf.astype(jnp.int32) if leaf.dtype == bool else leaf
            return jax.lax.psum(wide, axis).astype(leaf.dtype)

        return jax.tree.map(gather, acc)

    return Aggregate(init, add, lambda acc: acc, merge)


class OptaxState(NamedTuple):
    """The state of a server that steps with an optax optimiser: a model's parameters and the optimiser's state."""

    params: PyTree
    optimizer: PyTree


def _params(state: PyTree) -> PyTree:
    return state.params


def with_params(init: OfParameters, update: ServerUpdate) -> Server:
    """Builds a server whose state has the model's parameters as its field ``params``, and which broadcasts them.

    Args:
        init: Makes the state from parameters.
        update: Updates the state of one model with the aggregate of the messages.
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
