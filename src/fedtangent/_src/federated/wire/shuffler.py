"""A shuffling server between the clients and the aggregation server (Yue et al., ICML 2022, section 4.2, figure 2).

It forwards the messages in a random order and without names, so that the aggregation server cannot tell which client
sent which message. Averages, and the evolution of the tangent kernel, do not depend on the order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedtangent._src import pytrees, streams
from fedtangent._src.federated.aggregate import Stacked, stack
from fedtangent._src.types import Aggregate, Array, Key, PyTree, RoundInfo, Server, Slots


def permuted(key: Key, rows: PyTree) -> PyTree:
    """Permutes the leading axis of all arrays at random, by the same permutation.

    Args:
        key: Key of the permutation.
        rows: Arrays with leading axes of equal length.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    order = jax.random.permutation(streams.apart(key, streams.SHUFFLER), count)
    return pytrees.take(rows, order)


def shuffled(aggregate: Aggregate, server: Server, slots_per_model: int) -> tuple[Aggregate, Server]:
    """Returns ``aggregate`` and ``server`` changed so that messages arrive in a random order and without client ids.

    Messages keep their weights. The order is drawn with the round's key. All messages of a round are in memory.

    Args:
        aggregate: Reduction of a round's messages.
        server: The server's part of an algorithm.
        slots_per_model: The most messages of one model in a round; further ones are dropped, and no number in the
            history says so. The schedule's ``num_slots`` always suffices.
    """

    def update(state: PyTree, received: Stacked, info: RoundInfo) -> tuple[PyTree, dict[str, Array]]:
        messages, weight = permuted(info.key, (received.messages, received.weight))
        return server.update(state, folded(aggregate, messages, weight), info)

    return stack(slots_per_model), server._replace(update=update)


def folded(aggregate: Aggregate, messages: PyTree, weight: Array) -> PyTree:
    """Returns the aggregate of the messages of one model, which are stacked in an array with M rows.

    Args:
        aggregate: Reduction of a round's messages.
        messages: Messages [M, ...].
        weight: Weights [M]; 0 marks a row without a message.
    """
    filled = weight > 0
    place = jnp.cumsum(filled, dtype=jnp.int32) - 1
    count = weight.shape[0]
    slots = Slots(
        client=jnp.arange(count, dtype=jnp.int32),  # not a client's id: where its message stands
        model=jnp.zeros((count,), jnp.int32),
        weight=weight,
        place=place,
        size=filled.astype(jnp.int32),
    )
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), messages)
    total = aggregate.finish(aggregate.add(aggregate.init(one, 1), slots, messages))
    return pytrees.take(total, 0)
