"""The recursion of the federated kernel flow, compiled once per problem shape.

    a_{j+1} = a_j + S_j (b - Theta a_j),   a_0 = 0,   S_j = sum_s c_s P_s' A_s P_s  over the slots of round j,

for K models at once. With ``b`` the initial residual this is the path of every prediction; run through the rounds
backwards with ``b = Theta(X, x)`` it gives ``(Theta(x, X) M_r)'``, because Theta and every S_j are symmetric:
``M_r = sum_j [prod_{l > j} (I - S_l Theta)] S_j``. A few columns are carried, never an n x n operator.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.theory._clients import Bucket, Clients, response
from fedtangent.types import Array


class BucketSlots(NamedTuple):
    """The slots of every round whose client lies in one bucket, packed to the left."""

    slot: Array  # [R, s] int32, which of the round's slots
    place: Array  # [R, s] int32, the client's place in the bucket
    present: Array  # [R, s] bool, False for padding


class Rounds(NamedTuple):
    """Who trains what, how strongly, with which step, in every round."""

    model: Array  # [R, S] int32
    coefficient: Array  # [R, S] float64, server step times normalised weight
    learning_rate: Array  # [R] float64
    slots: tuple[BucketSlots, ...]  # one per bucket


def build_rounds(
    clients: Clients,
    client: np.ndarray,
    model: np.ndarray,
    present: np.ndarray,
    coefficient: Array,
    learning_rate: Array,
) -> Rounds:
    """Sorts the slots [R, S] into the clients' buckets."""
    slots = []
    for index in range(len(clients.buckets)):
        mine = present & (clients.bucket_of[client] == index)
        width = max(1, int(mine.sum(axis=1).max(initial=0)))
        order = np.argsort(~mine, axis=1, kind="stable")[:, :width]
        held = np.take_along_axis(mine, order, axis=1)
        place = np.where(held, clients.place_in_bucket[np.take_along_axis(client, order, axis=1)], 0)
        slots.append(BucketSlots(jnp.asarray(order, jnp.int32), jnp.asarray(place, jnp.int32), jnp.asarray(held)))
    return Rounds(jnp.asarray(model, jnp.int32), coefficient, learning_rate, tuple(slots))


@functools.partial(jax.jit, static_argnames=("num_models",))
def normalised(model: np.ndarray, weight: Array, present: np.ndarray, num_models: int) -> Array:
    """Weights [R, S] divided by their model's total in the round; empty slots get 0."""
    weight = jnp.where(jnp.asarray(present), weight, 0.0)
    row = jnp.arange(model.shape[0])[:, None]
    totals = jnp.zeros((model.shape[0], num_models)).at[row, model].add(weight)[row, model]
    return jnp.where(totals > 0, weight / jnp.where(totals > 0, totals, 1.0), 0.0)


def only_model(rounds: Rounds, model: int) -> Rounds:
    """The same rounds with one model's slots kept, as model 0."""
    slots = tuple(
        part._replace(present=part.present & (jnp.take_along_axis(rounds.model, part.slot, axis=1) == model))
        for part in rounds.slots
    )
    return rounds._replace(model=jnp.zeros_like(rounds.model), slots=slots)


@functools.partial(jax.jit, static_argnames=("num_models", "num_records"))
def run_recursion(
    theta: Array,
    b: Array,
    buckets: tuple[Bucket, ...],
    rounds: Rounds,
    order: Array,
    record: Array,
    *,
    num_models: int,
    num_records: int,
) -> Array:
    """``a`` after chosen rounds.

    Args:
        theta: [q, q]; b: [q, K or 1, D], the right-hand side (1: the same for every model).
        order: [L] int32, the round of each step; negative steps do nothing (and cost nothing).
        record: [L] int32, where to keep ``a`` after each step; num_records or more: nowhere.

    Returns:
        [num_records, q, K, D] float64; zeros where nothing was recorded.
    """
    shape = (theta.shape[0], num_models, b.shape[2])

    def advance(a: Array, j: Array) -> Array:
        product = jnp.dot(theta, a.reshape(shape[0], -1), precision=jax.lax.Precision.HIGHEST)
        residual = b - product.reshape(shape)
        for bucket, slots in zip(buckets, rounds.slots, strict=True):
            rows, model, moves = _bucket_moves(bucket, slots, rounds, j, residual)
            a = a.at[rows, model].add(moves, mode="drop")
        return a

    def step(carry: tuple[Array, Array], now: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        a, kept = carry
        j, place = now
        a = jax.lax.cond(j >= 0, lambda: advance(a, j), lambda: a)
        kept = jax.lax.cond(
            place < num_records, lambda: jax.lax.dynamic_update_index_in_dim(kept, a, place, 0), lambda: kept
        )
        return (a, kept), None

    start = (jnp.zeros(shape, theta.dtype), jnp.zeros((num_records, *shape), theta.dtype))
    (_, kept), _ = jax.lax.scan(step, start, (order, record))
    return kept


def _bucket_moves(
    bucket: Bucket, slots: BucketSlots, rounds: Rounds, j: Array, residual: Array
) -> tuple[Array, Array, Array]:
    """Rows [s, w], models [s, 1] and moves [s, w, D] of one bucket's slots in round j."""
    coefficient, model = rounds.coefficient[j][slots.slot[j]], rounds.model[j][slots.slot[j]]
    place, learning_rate = slots.place[j], rounds.learning_rate[j]
    empty = jnp.zeros((bucket.rows.shape[1], residual.shape[2]), residual.dtype)

    def move(slot: tuple[Array, Array, Array, Array]) -> Array:
        i, k, weight, present = slot

        def trained() -> Array:
            own = residual.at[bucket.rows[i], k].get(mode="fill", fill_value=0.0)
            gain = response(bucket.eigenvalues[i], learning_rate, bucket.num_examples[i], bucket.local_steps[i])
            vectors = bucket.eigenvectors[i]
            return weight * (vectors @ (gain[:, None] * (vectors.T @ own)))

        return jax.lax.cond(present, trained, lambda: empty)

    moves = jax.lax.map(move, (place, model, coefficient, slots.present[j]))
    return bucket.rows[place], model[:, None], moves
