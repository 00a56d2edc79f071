"""The bytes of messages on the wire: every count that the wire ledger of a run uses.

A channel's ``uplink`` calls one of these functions; ``compose`` adds the broadcast, and ``engine`` multiplies both by
the number of messages of each round. A message is charged as a packed code, rounded up to whole bytes:

- numbers: as many bits each as the last quantiser gave them, or else as the widest leaf has (if all P numbers are sent
  unchanged, each has the bits of its leaf);
- positions of k of P numbers: k times ceil(log2 P) bits, or a bitmap of P bits, whichever is smaller; none if k = P, or
  if the receiver can draw them from a shared seed;
- norms or ranges of quantisers, 32 bits each (64 for a message in float64);
- leaves that are not floating: unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src import pytrees
from fedtangent._src.types import AnyArray, PyTree

KEY_BYTES = 32  # of a public key
Leaf = AnyArray | jax.ShapeDtypeStruct  # an array of a message, or its shape
SCALE_BYTES = 4  # of the largest magnitude in an array
SEALED_BYTES = 32 + 48  # a seed of 32 bytes with the one-time public key and the authenticator of a sealed box


class Code(NamedTuple):
    """The size of an encoded message.

    Attributes:
        numbers: How many numbers are sent.
        places: Number of positions from which these numbers were chosen: P, the size of the message, or ``numbers`` if
            the receiver knows the positions.
        bits: Bits of a number; None if numbers are sent in the dtypes of their leaves.
        header: Bits of all norms and ranges.
        scale_bits: Bits of one norm.
    """

    numbers: int
    places: int
    bits: int | None
    header: int
    scale_bits: int


def is_floating(leaf: Leaf) -> bool:
    """Returns whether a leaf of a message has a floating dtype; channels compress only such leaves."""
    return not pytrees.is_key(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def dtypes(message: PyTree) -> tuple[np.dtype, np.dtype]:
    """Returns the widest dtype of a message's floating leaves, and the dtype to compute in (at least float32).

    Without floating leaves both are float32.
    """
    floating = [leaf.dtype for leaf in jax.tree.leaves(message) if is_floating(leaf)]
    widest = jnp.result_type(*floating) if floating else jnp.dtype(jnp.float32)
    return widest, jnp.promote_types(widest, jnp.float32)


def _place_bits(numbers: int, places: int) -> int:
    """Returns how many bits say which k = ``numbers`` of P = ``places`` numbers are sent; 0 if all are sent.

    The positions are sent as indices or as a bitmap, whichever is smaller.
    """
    return 0 if numbers == places else min(numbers * math.ceil(math.log2(places)), places)


def message_bytes(message: PyTree, codes: Iterable[Callable[[Code], Code]] = ()) -> int:
    """Returns the bytes of a message after the stages of a channel, which leave out or round its numbers.

    Args:
        message: Shapes of the message.
        codes: For each stage, in order, the function from the ``Code`` before it to the ``Code`` after it.
    """
    floating = [leaf for leaf in jax.tree.leaves(message) if is_floating(leaf)]
    plain, total = pytrees.num_bytes(floating), pytrees.size(floating)
    widest, dtype = dtypes(message)
    code = Code(total, total, None, 0, 8 * dtype.itemsize)
    for narrow in codes if total else ():
        code = narrow(code)
    if code.bits is None and code.numbers == total:
        numbers = 8 * plain
    else:
        numbers = code.numbers * (8 * widest.itemsize if code.bits is None else code.bits)
    bits = numbers + _place_bits(code.numbers, code.places) + code.header
    return pytrees.num_bytes(message) - plain + -(-bits // 8)


def jacobian_bytes(params: PyTree, output_size: int, num_sent: int | None, value_bits: int | None) -> int:
    """Returns the bytes that a client of NTK-FL sends for one example: its Jacobian [C, P], C outputs and C targets.

    Args:
        params: Shapes of the parameters.
        output_size: Outputs C.
        num_sent: How many of the C P numbers are sent, with their positions; None for all.
        value_bits: Bits of a number; None for the bits of the widest parameter or, if ``num_sent`` is None too, for
            each number the bits of its parameter's dtype.
    """
    widest = jnp.result_type(*jax.tree.leaves(params)).itemsize
    rest = 2 * output_size * widest
    if num_sent is None and value_bits is None:
        return output_size * pytrees.num_bytes(params) + rest
    total = output_size * pytrees.size(params)
    num_sent = total if num_sent is None else num_sent
    return -(-(num_sent * (value_bits or 8 * widest) + _place_bits(num_sent, total)) // 8) + rest


def example_bytes(x: Leaf, y: Leaf) -> int:
    """Returns the bytes of a single example, its input and its target.

    Args:
        x: Inputs of n examples, [n, ...].
        y: Targets of n examples, [n, ...].
    """
    return sum(math.prod(leaf.shape[1:]) * pytrees.item_bytes(leaf.dtype) for leaf in (x, y))


def masked_bytes(message: PyTree, bits: int) -> int:
    """Returns the bytes of a message under secure aggregation: its numbers, its weight, a public key, and scales.

    Before it masks its numbers, a client sends the largest magnitude in each array, in 32 bits.

    Args:
        message: Shapes of the message.
        bits: Bits of each number and of the weight.
    """
    return (pytrees.size(message) + 1) * bits // 8 + KEY_BYTES + SCALE_BYTES * len(jax.tree.leaves(message))


def key_exchange_bytes(num_clients: int) -> tuple[int, int]:
    """Returns the bytes up (public keys) and down (sealed seeds) of all clients' exchange with the key server."""
    return num_clients * KEY_BYTES, num_clients * SEALED_BYTES
