"""Secure aggregation: the server learns only the sum of the clients' messages (Bonawitz et al., 2017).

Clients write their numbers as whole numbers modulo 2^bits, and each pair of clients agrees on a random mask, which one
of them adds and the other subtracts. A masked message is uniformly distributed; in the sum all masks cancel exactly.

Clients are simulated as honest, and masks are drawn only among the clients whose messages arrive. (The protocol reaches
the same sum: each client's secrets are shared among the others, who reveal the secrets of clients that dropped out.)
Key agreements are replaced by draws from the round's key; their bytes are charged.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedtangent._src import pytrees, streams
from fedtangent._src.federated.aggregate import Stacked, stack
from fedtangent._src.federated.wire import ledger
from fedtangent._src.federated.wire.channel import as_is
from fedtangent._src.types import Aggregate, Array, Channel, Key, PyTree, RoundInfo, Server

BITS = (32, 64)
LEAST_BITS = 8  # of a number's precision beside the largest one of its array


def secured(server: Server, slots_per_model: int, *, bits: int = 32) -> tuple[Aggregate, Server]:
    """Returns the aggregate of secure aggregation, and ``server`` changed to receive only the messages' weighted mean.

    Client i sends ``u_i m_i`` and ``u_i`` as masked whole numbers, where m_i is its message and u_i its weight over the
    largest weight of the round. The mean is the sum of the first over the sum of the second. Before that each client
    sends the largest magnitude in each array of ``u_i m_i``, and the server returns the largest of all clients, the
    scale of that array. The whole numbers are multiples of the scale times ``2^-fraction_bits(slots_per_model, bits)``,
    so that no number is cut. If an array of a client has a number that is not finite, the whole mean of that array is
    NaN.

    ``info["rounded_away"]`` [M] counts for each message its nonzero numbers that became 0, because they are too small
    beside the largest one of their array.

    Args:
        server: The server's part of an algorithm.
        slots_per_model: The most messages of a model in a round, M; further ones are dropped, and no number in the
            history says so. The schedule's ``num_slots`` always suffices.
        bits: Bits of a number on the wire, 32, or 64 (in JAX's 64-bit mode).

    Raises:
        ValueError: Bits other than 32 and 64, 64 bits without 64-bit mode, or too many messages for the bits. In a
            round: messages with parts that are not floating.
    """
    fraction_bits(slots_per_model, bits)

    def update(state: PyTree, received: Stacked, info: RoundInfo) -> tuple[PyTree, dict[str, Array]]:
        numbers, scales, rounded_away = encode(received.messages, received.weight, bits)
        key = streams.apart(info.key, streams.MASKS)
        masked = mask_messages(key, numbers, received.weight > 0, received.client)
        total = jnp.sum(masked, axis=0, dtype=masked.dtype)  # all that the server looks at, beside the scales
        mean = decode_mean(total, scales, received.messages, bits)
        after, report = server.update(state, mean, info)
        return after, {**report, "rounded_away": rounded_away}

    return stack(slots_per_model), server._replace(update=update)


def masked_numbers(bits: int = 32) -> Channel:
    """Builds the channel that charges the bytes of masked messages; ``secured`` simulates the masking at the server.

    Raises ``ValueError`` for bits other than 32 and 64, or for 64 bits without JAX's 64-bit mode.
    """
    _check_bits(bits)
    return as_is(lambda message, broadcast: (ledger.masked_bytes(message, bits), 0))


def fraction_bits(num_messages: int, bits: int) -> int:
    """Returns the number of fractional bits of a fixed-point code in which ``num_messages`` numbers can be added.

    The numbers are in [-1, 1], and their sum must not overflow a whole number of ``bits`` bits.

    Args:
        num_messages: The most numbers in a sum.
        bits: Bits of a whole number, 32 or 64.

    Raises:
        ValueError: Other bits, 64 bits without JAX's 64-bit mode, or so many messages that fewer than 8 fractional bits
            are left.
    """
    _check_bits(bits)
    # without the sign, and a bit for numbers that are rounded up
    fraction = bits - 2 - math.ceil(math.log2(num_messages))
    if fraction < LEAST_BITS:
        raise ValueError(
            f"secure_aggregation: got {bits} bits, which leave sums of {num_messages} messages {fraction} bits of "
            f"precision, must leave at least {LEAST_BITS}: use 64 bits"
        )
    return fraction


def _check_bits(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"secure_aggregation: got {bits!r} bits, allowed are 32 and 64")
    if bits == 64 and jax.dtypes.canonicalize_dtype(np.uint64) != np.uint64:
        raise ValueError("secure_aggregation: 64 bits need JAX's 64-bit mode: call fedtangent.enable_x64() first")


def encode(messages: PyTree, weight: Array, bits: int) -> tuple[Array, Array, Array]:
    """Encodes M messages, multiplied by their weights, as whole numbers that secure aggregation can mask and add.

    Args:
        messages: Messages [M, ...], floating.
        weight: Weights [M]; 0 marks a row without a message.
        bits: Bits of a whole number, 32 or 64.

    Returns:
        Whole numbers modulo 2^bits, [M, P + 1], the weight last; the scale of each of the L arrays, [L], which is the
        largest magnitude of its weighted numbers (or NaN or infinite); and for each message how many nonzero numbers
        are rounded to 0, [M].

    Raises:
        ValueError: Messages with parts that are not floating.
    """
    leaves = jax.tree.leaves(messages)
    if any(pytrees.is_key(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
        raise ValueError("secure_aggregation: sums floating-point numbers only, but the algorithm sends other dtypes")
    dtype = jnp.result_type(*leaves, jnp.float32)
    share = (weight / jnp.where(jnp.any(weight > 0), jnp.max(weight), 1)).astype(dtype)[:, None]
    rows = [leaf.reshape((leaf.shape[0], -1)).astype(dtype) for leaf in leaves]
    rows = [jnp.where(share > 0, share * row, 0) for row in rows]  # nothing in an empty place counts
    scales = jnp.stack([jnp.max(jnp.abs(row), initial=0) for row in rows])
    usable = jnp.isfinite(scales) & (scales > 0)
    units = [jnp.where(usable[i], row / jnp.where(usable[i], scales[i], 1), 0) for i, row in enumerate(rows)]
    scaled = jnp.concatenate([*units, share], axis=1) * 2.0 ** fraction_bits(weight.shape[0], bits)
    signed, unsigned = (jnp.int32, jnp.uint32) if bits == 32 else (jnp.int64, jnp.uint64)
    whole = jnp.round(scaled).astype(signed)
    lost = (whole == 0) & jnp.concatenate([*[(row != 0) & usable[i] for i, row in enumerate(rows)], share > 0], axis=1)
    return jax.lax.bitcast_convert_type(whole, unsigned), scales, jnp.sum(lost, axis=1, dtype=jnp.int32)


def mask_messages(key: Key, numbers: Array, active: Array, client: Array) -> Array:
    """Masks each client's whole numbers, [M, P]: each pair of clients adds and subtracts a random mask, modulo 2^bits.

    Args:
        key: Key of the masks.
        numbers: P whole numbers of each of M clients, [M, P], uint32 or uint64 (32 or 64 bits).
        active: Whether a client's message arrives, [M]; other rows are 0 and share no masks.
        client: Ids [M]. The mask of a pair depends only on the two ids and the key; the client with the smaller id adds
            it, the other one subtracts it.
    """
    count = numbers.shape[0]

    def of_pair(i: Array, j: Array) -> Array:
        low, high = jnp.minimum(client[i], client[j]), jnp.maximum(client[i], client[j])
        shared = jax.random.fold_in(jax.random.fold_in(key, low), high)
        return jax.random.bits(shared, numbers.shape[1:], numbers.dtype)

    def add(i: Array, sent: Array) -> Array:
        def with_other(j: Array, sent: Array) -> Array:
            mask = jnp.where(client[i] < client[j], of_pair(i, j), jnp.zeros((), numbers.dtype) - of_pair(i, j))
            return sent.at[i].add(mask).at[j].add(jnp.zeros((), numbers.dtype) - mask)

        def both(j: Array, sent: Array) -> Array:
            return jax.lax.cond(active[i] & active[j], with_other, lambda j, sent: sent, j, sent)

        return jax.lax.fori_loop(i + 1, count, both, sent)

    plain = jnp.where(active[:, None], numbers, jnp.zeros((), numbers.dtype))
    return jax.lax.fori_loop(0, count, add, plain)


def decode_mean(total: Array, scales: Array, like: PyTree, bits: int) -> PyTree:
    """Computes the weighted mean of the messages from the sum of their codes (``encode``).

    Args:
        total: Sum of the encoded messages, [P + 1].
        scales: Scale of each array, [L].
        like: Messages [M, ...]. The mean has the shapes of one message and its dtypes (float32 for half precision).
        bits: Bits of a whole number, 32 or 64.
    """
    signed = jax.lax.bitcast_convert_type(total, jnp.int32 if bits == 32 else jnp.int64).astype(scales.dtype)
    parts = ravel_pytree(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], scales.dtype), like))[1]
    leaves, structure = jax.tree.flatten(parts(signed[:-1] / jnp.where(signed[-1] > 0, signed[-1], 1)))
    scaled = [mean * jnp.where(jnp.isfinite(scale), scale, jnp.nan) for mean, scale in zip(leaves, scales, strict=True)]
    return jax.tree.map(
        lambda leaf, mean: mean.astype(pytrees.widest(leaf.dtype)), like, jax.tree.unflatten(structure, scaled)
    )
