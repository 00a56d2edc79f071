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
from fedtangent._src.checks import number
from fedtangent._src.federated.aggregate import Stacked, stack
from fedtangent._src.federated.wire import ledger
from fedtangent._src.federated.wire.channel import as_is
from fedtangent._src.types import Aggregate, Array, Channel, Key, PyTree, RoundInfo, Server

BITS = (32, 64)


def secured(server: Server, slots_per_model: int, *, bits: int = 32, limit: float = 16.0) -> tuple[Aggregate, Server]:
    """Returns the aggregate of secure aggregation, and ``server`` behind it, which receives only the weighted mean.

    Client i sends ``u_i m_i`` and ``u_i``, where m_i is its message and u_i its weight over the largest weight of the
    round, each rounded to a multiple of ``2^-fraction_bits(slots_per_model, bits, limit)`` and masked. The mean is the
    quotient of the two sums.

    Args:
        server: The server's part of an algorithm.
        slots_per_model: The most messages of a model in a round.
        bits: Bits of a number on the wire, 32, or 64 (in JAX's 64-bit mode).
        limit: Largest magnitude of a number of a message. Larger numbers are cut to it and NaN to 0, because the sum
            must not wrap around; ``info["saturated"]`` counts them.

    Raises:
        ValueError: Other bits, 64 without 64-bit mode, a limit that is not positive or leaves no bit for the fraction,
            and messages with parts that are not floating.
    """
    fraction_bits(slots_per_model, bits, limit)

    def update(state: PyTree, received: Stacked, info: RoundInfo) -> tuple[PyTree, dict[str, Array]]:
        numbers, saturated = encode(received.messages, received.weight, bits, limit)
        key = streams.apart(info.key, streams.MASKS)
        masked = mask_messages(key, numbers, received.weight > 0, received.client)
        total = jnp.sum(masked, axis=0, dtype=masked.dtype)  # all that the server looks at
        mean = decode_mean(total, received.messages, bits)
        after, report = server.update(state, mean, info)
        return after, {**report, "saturated": saturated}

    return stack(slots_per_model), server._replace(update=update)


def masked_numbers(bits: int = 32) -> Channel:
    """Returns the channel of secure aggregation; raises ``ValueError`` for bits other than 32 and 64."""
    _check_bits(bits)
    return as_is(lambda message, broadcast: (ledger.masked_bytes(message, bits), 0))


def fraction_bits(num_messages: int, bits: int, limit: float) -> int:
    """Returns how many bits after the binary point keep the sum of ``num_messages`` numbers below 2^bits.

    Args:
        num_messages: The most numbers in a sum.
        bits: Bits of a whole number, 32 or 64.
        limit: Largest magnitude of a number.

    Raises:
        ValueError: Other bits, or a limit that leaves no bit for the fraction.
    """
    _check_bits(bits)
    number("limit", limit, above=0)
    whole = math.ceil(math.log2(num_messages * max(limit, 1.0))) + 1  # and a sign
    # one bit is left over, for sums of numbers that were rounded up
    if bits - 1 - whole < 1:
        raise ValueError(
            f"limit: got {limit:g}, must be smaller: sums of {num_messages} messages leave no bit of {bits} "
            "for fractions"
        )
    return bits - 1 - whole


def _check_bits(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits: got {bits!r}, allowed are 32 and 64")
    if bits == 64 and jax.dtypes.canonicalize_dtype(np.uint64) != np.uint64:
        raise ValueError("bits: 64 needs JAX's 64-bit mode, call fedtangent.enable_x64() first")


def encode(messages: PyTree, weight: Array, bits: int, limit: float) -> tuple[Array, Array]:
    """Returns messages as whole numbers modulo 2^bits, [M, P + 1], weight last, and how many numbers were cut.

    Args:
        messages: Messages [M, ...], floating.
        weight: Weights [M]; 0 marks a place without a message.
        bits: Bits of a whole number, 32 or 64.
        limit: Largest magnitude of a number; larger ones are cut.

    Raises:
        ValueError: Messages with parts that are not floating.
    """
    leaves = jax.tree.leaves(messages)
    if any(pytrees.is_key(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
        raise ValueError("secure_aggregation: sums floating numbers, but the algorithm's messages hold other dtypes")
    dtype = jnp.result_type(*leaves, jnp.float32)
    values = jnp.concatenate([leaf.reshape((leaf.shape[0], -1)).astype(dtype) for leaf in leaves], axis=1)
    share = (weight / jnp.where(jnp.any(weight > 0), jnp.max(weight), 1)).astype(dtype)[:, None]
    cut = jnp.where(jnp.isfinite(values), jnp.clip(values, -limit, limit), 0)
    saturated = jnp.sum((cut != values) & (share > 0), dtype=jnp.int32)
    scale = 2.0 ** fraction_bits(weight.shape[0], bits, limit)
    scaled = jnp.concatenate([share * cut, share], axis=1) * scale
    signed, unsigned = (jnp.int32, jnp.uint32) if bits == 32 else (jnp.int64, jnp.uint64)
    return jax.lax.bitcast_convert_type(jnp.round(jnp.where(share > 0, scaled, 0)).astype(signed), unsigned), saturated


def mask_messages(key: Key, numbers: Array, active: Array, client: Array) -> Array:
    """Returns each client's masked message, [M, P]: its whole numbers plus the masks of its pairs, modulo 2^bits.

    Args:
        key: Key of the masks.
        numbers: Whole numbers [M, P], uint32 or uint64.
        active: Whether a client's message arrives, [M]; other rows are 0 and share no masks.
        client: Ids [M]; a pair's mask depends only on the two ids and the key, and the client with the smaller id adds
            it.
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


def decode_mean(total: Array, like: PyTree, bits: int) -> PyTree:
    """Returns the weighted mean of encoded messages, from their sum.

    Args:
        total: Sum of the encoded messages, [P + 1].
        like: Messages [M, ...], whose shapes the mean has; its dtypes too, but float32 for half precision.
        bits: Bits of a whole number, 32 or 64.
    """
    dtype = pytrees.precision(like)
    signed = jax.lax.bitcast_convert_type(total, jnp.int32 if bits == 32 else jnp.int64).astype(dtype)
    parts = ravel_pytree(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], dtype), like))[1]
    mean = parts(signed[:-1] / jnp.where(signed[-1] > 0, signed[-1], 1))
    return jax.tree.map(lambda leaf, values: values.astype(pytrees.widest(leaf.dtype)), like, mean)
