"""How many bytes messages take on the wire: every count that the ledger of a run uses.

A channel's ``uplink`` calls one of these functions; ``compose`` adds the broadcast, and ``engine`` multiplies both with
the messages of each round. Bytes are those of a packed code, rounded up to whole bytes a message:

- numbers: as many bits each as the last quantiser gave them, or those of the widest leaf (of each its own leaf, where
  all P are sent as they are);
- places of k of P numbers: k times ceil(log2 P) bits, or a bitmap of P bits, whichever is smaller; none if k = P, or
  if the receiver can draw them itself;
- norms or ranges of quantisers, 32 bits each (64 for a message in float64);
- leaves that are not floating: as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedtangent import pytrees
from fedtangent.types import PyTree

KEY_BYTES = 32  # of a public key
SEALED_BYTES = 32 + 48  # a seed of 32 bytes with the one-time public key and the authenticator of a sealed box


class Code(NamedTuple):
    """The size of an encoded message; ``bits`` None means those of the leaves' own dtypes."""

    numbers: int  # k
    places: int  # P: the receiver must be told which k of these are sent
    bits: int | None  # of a number
    header: int  # bits of norms and ranges
    scale_bits: int  # of one norm


def is_floating(leaf: Any) -> bool:
    """Whether a leaf of a message holds numbers that a channel codes."""
    return not pytrees.is_key(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def dtypes(message: PyTree) -> tuple[Any, Any]:
    """The widest dtype of a message's floating leaves, and the one to compute in, at least float32."""
    floating = [leaf.dtype for leaf in jax.tree.leaves(message) if is_floating(leaf)]
    widest = jnp.result_type(*floating) if floating else jnp.dtype(jnp.float32)
    return widest, jnp.promote_types(widest, jnp.float32)


def place_bits(numbers: int, places: int) -> int:
    """Bits that tell which ``numbers`` of ``places`` are sent: indices or a bitmap, whichever is smaller."""
    return 0 if numbers == places else min(numbers * math.ceil(math.log2(places)), places)


def message_bytes(message: PyTree, codes: Iterable[Callable[[Code], Code]] = ()) -> int:
    """Bytes of a message of these shapes after coding; each of ``codes`` is one stage's effect on a ``Code``."""
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
    bits = numbers + place_bits(code.numbers, code.places) + code.header
    return pytrees.num_bytes(message) - plain + -(-bits // 8)


def jacobian_bytes(params: PyTree, output_size: int, kept: int | None, value_bits: int | None) -> int:
    """Bytes of an example's Jacobian [C, P], its C outputs and C targets, in the widest dtype of the parameters.

    ``kept`` of the C P numbers are sent with their places, ``value_bits`` each; None: all, or as many as they have.
    """
    widest = jnp.result_type(*jax.tree.leaves(params)).itemsize
    rest = 2 * output_size * widest
    if kept is None and value_bits is None:
        return output_size * pytrees.num_bytes(params) + rest
    total = output_size * pytrees.size(params)
    kept = total if kept is None else kept
    return -(-(kept * (value_bits or 8 * widest) + place_bits(kept, total)) // 8) + rest


def example_bytes(x: Any, y: Any) -> int:
    """Counts the bytes of a single example, its input and its target, where x and y hold n examples each."""
    return sum(math.prod(leaf.shape[1:]) * pytrees.item_bytes(leaf.dtype) for leaf in (x, y))


def masked_bytes(message: PyTree, bits: int) -> int:
    """Bytes of a message under secure aggregation: each number and the weight in ``bits`` bits, and a public key."""
    return (pytrees.size(message) + 1) * bits // 8 + KEY_BYTES


def key_exchange_bytes(num_clients: int) -> tuple[int, int]:
    """Bytes up and down before the first round, of the key server's exchange: public keys up, sealed seeds down."""
    return num_clients * KEY_BYTES, num_clients * SEALED_BYTES
