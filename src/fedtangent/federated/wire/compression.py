"""Compressed messages: a channel as a row of stages, the bytes of what they leave, and error feedback.

A compressed message is coded as one vector: its P floating numbers, leaf after leaf, whatever their dtypes. A channel
here is a row of stages. Each stage narrows down, or rounds, the numbers that are still to be sent, and says what that
leaves to be written down. Bytes are those of a packed code, rounded up to whole bytes a message:

- numbers: as many bits each as the last quantiser gave them, or those of the widest leaf (of each its own leaf, where
  all P are sent as they are);
- places of k of P numbers: k times ceil(log2 P) bits, or a bitmap of P bits, whichever is smaller; none if k = P, or
  if the receiver can draw them itself;
- norms or ranges of quantisers, 32 bits each (64 for a message in float64);
- leaves that are not floating: as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedtangent import pytrees
from fedtangent.types import Array, Channel, Key, PyTree


class Sending(NamedTuple):
    """What of a vector of P numbers is still to be sent."""

    values: Array  # [k]
    at: Array | None  # [k] int32, their places among the P; None: all of them, in order


class Code(NamedTuple):
    """What writing that down takes; ``bits`` None are those of the leaves' own dtypes."""

    numbers: int  # k
    places: int  # among how many the receiver has to be told which
    bits: int | None  # of a number
    header: int  # bits of norms and ranges
    scale_bits: int  # of one norm


class Stage(NamedTuple):
    """A step of coding."""

    apply: Callable[[Key, Sending], Sending]
    code: Callable[[Code], Code]


def _is_floating(leaf: Any) -> bool:
    return not pytrees.is_key(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _dtypes(message: PyTree) -> tuple[Any, Any]:
    """The widest dtype of the floating leaves, and the one to compute in, at least float32."""
    floating = [leaf.dtype for leaf in jax.tree.leaves(message) if _is_floating(leaf)]
    widest = jnp.result_type(*floating) if floating else jnp.dtype(jnp.float32)
    return widest, jnp.promote_types(widest, jnp.float32)


def _send(stages: tuple[Stage, ...], key: Key, message: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
    """The message after all stages; stage j draws from ``fold_in(key, j)``."""
    leaves, structure = jax.tree.flatten(message)
    floating = [_is_floating(leaf) for leaf in leaves]
    if not stages or not any(floating):
        return message, memory
    dtype = _dtypes(message)[1]
    vector = jnp.concatenate([leaf.reshape(-1).astype(dtype) for leaf, f in zip(leaves, floating, strict=True) if f])
    sending = Sending(vector, None)
    for j, stage in enumerate(stages):
        sending = stage.apply(jax.random.fold_in(key, j), sending)
    received = sending.values if sending.at is None else jnp.zeros_like(vector).at[sending.at].set(sending.values)
    start = 0
    for j, leaf in enumerate(leaves):
        if floating[j]:
            leaves[j] = received[start : start + leaf.size].reshape(leaf.shape).astype(leaf.dtype)
            start += leaf.size
    return jax.tree.unflatten(structure, leaves), memory


def _uplink(stages: tuple[Stage, ...], message: PyTree, broadcast: PyTree) -> tuple[int, int]:
    """Bytes of a message of these shapes."""
    floating = [leaf for leaf in jax.tree.leaves(message) if _is_floating(leaf)]
    plain, total = pytrees.num_bytes(floating), pytrees.size(floating)
    widest, dtype = _dtypes(message)
    code = Code(total, total, None, 0, 8 * dtype.itemsize)
    for stage in stages if total else ():
        code = stage.code(code)
    if code.bits is None and code.numbers == total:
        numbers = 8 * plain
    else:
        numbers = code.numbers * (8 * widest.itemsize if code.bits is None else code.bits)
    bits = numbers + place_bits(code.numbers, code.places) + code.header
    return pytrees.num_bytes(message) - plain + -(-bits // 8), 0


def place_bits(numbers: int, places: int) -> int:
    """Bits that tell which ``numbers`` of ``places`` are sent: indices or a bitmap, whichever is smaller."""
    return 0 if numbers == places else min(numbers * math.ceil(math.log2(places)), places)


def stages_channel(*stages: Stage) -> Channel:
    """The channel that codes the whole message with these stages, one after another."""
    return Channel(send=functools.partial(_send, stages), uplink=functools.partial(_uplink, stages))


def lossless() -> Channel:
    """The message as it is, each number in its own dtype."""
    return stages_channel()


def chain(*channels: Channel) -> Channel:
    """One channel after another, each on what the one before leaves to be sent.

    ``chain(top_k(100), qsgd(4))`` sends 100 places and quantises the 100 numbers; ``chain(clip(1.0), qsgd(8))`` clips
    first. Raises ``ValueError`` for a channel that is not made of this module's parts, or has a memory: error feedback
    goes around the chain.
    """
    stages: list[Stage] = []
    for i, channel in enumerate(channels):
        if not (isinstance(channel.uplink, functools.partial) and channel.uplink.func is _uplink):
            raise ValueError(
                f"chain: channel {i} cannot be chained, allowed are lossless, clip, top_k, random_k, qsgd, "
                "uniform_quantiser and chains of them; error feedback goes around the chain"
            )
        stages += channel.uplink.args[0]
    return stages_channel(*stages)


def with_error_feedback(channel: Channel) -> Channel:
    """What ``channel`` leaves out of a client's message is added to that client's next one.

    Of ``p = message + memory`` is sent ``C(p)`` and kept ``p - C(p)`` (Stich et al., 2018, algorithm 1; Karimireddy et
    al., 2019, algorithm 1), so that what was sent plus the memory is the sum of the messages. The memory is kept per
    model and client; a client that is absent or rejected keeps it. It costs no bytes. It is meant for
    compressors whose error is shorter than the message (``top_k``, ``random_k`` without rescaling, quantisers with many
    levels): with others the memory grows without bound. Leaves that are not floating pass as they are.
    """

    def init(message: PyTree) -> PyTree:
        return pytrees.zeros_like(message), channel.init(message)

    def send(key: Key, message: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        owed, inner = memory
        whole = jax.tree.map(lambda m, e: m + e if _is_floating(m) else m, message, owed)
        sent, inner = channel.send(key, whole, inner)
        owed = jax.tree.map(lambda w, s, e: w - s if _is_floating(w) else e, whole, sent, owed)
        return sent, (owed, inner)

    return Channel(send=send, uplink=lambda message, broadcast: channel.uplink(message, broadcast), init=init)
