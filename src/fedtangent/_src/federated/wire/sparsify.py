"""Sparsified Jacobians: the threshold above which entries are kept, found by counting and not by sorting.

Of the C P numbers of an example's Jacobian the k of largest magnitude are kept (top-k sparsification, Yue et al., ICML
2022, section 4.2 and appendix B). A threshold that keeps exactly these is found by bisection, with a function that
counts the entries above a threshold. The bisection is over the bit patterns of floating numbers, which have the same
order as the numbers. The Jacobian by a dense layer's weights is an outer product, so its entries are counted by binary
searches in the sorted inputs of the layer.

Entries that equal the k-th magnitude are all kept, even if that makes more than k. So the choice depends neither on the
order of parameters nor on the order of outputs. Zeros are never sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedtangent._src.checks import number
from fedtangent._src.types import Array

Count = Callable[[Array], Array]  # thresholds [b] -> entries of each example of at least that magnitude, [b]


def num_kept(sparsity: float, total: int) -> int:
    """Returns how many of ``total`` numbers are kept: the share ``1 - sparsity``, rounded half up, at least 1.

    Args:
        sparsity: Share of the numbers that is set to zero.
        total: Number of all numbers.
    """
    return max(1, math.floor((1 - sparsity) * total + 0.5))


def check_sparsity(sparsity: float) -> None:
    """Raises ``ValueError`` unless ``sparsity`` is a number in [0, 1)."""
    number("sparsity", sparsity, at_least=0, below=1)


def rounded(values: Array, bits: int | None) -> Array:
    """Rounds numbers to the nearest floating numbers of ``bits`` bits, 8 for the exponent and 1 for the sign.

    Args:
        values: The numbers.
        bits: Bits of the result; None to return the numbers unchanged.
    """
    return values if bits is None else jax.lax.reduce_precision(values, 8, bits - 9)


def threshold_of(count: Count, largest: Array, k: int) -> Array:
    """Computes for each of b examples a threshold that keeps its k entries of largest magnitude, [b].

    Entries of at least this magnitude are kept, also ties with the k-th. The threshold is 0 if fewer than k entries are
    nonzero.

    Args:
        count: Function from thresholds [b] to the number of entries of each example of at least that magnitude.
        largest: Upper bounds of the magnitudes, [b], float32 or float64, finite.
        k: Number of entries to keep.
    """
    bits = jnp.int32 if largest.dtype == jnp.float32 else jnp.int64

    def as_number(pattern: Array) -> Array:
        return jax.lax.bitcast_convert_type(pattern, largest.dtype)

    def narrow(ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends  # at least k entries reach low, fewer than k reach high
        middle = low + (high - low) // 2
        reached = count(as_number(middle))
        low, high = jnp.where(reached >= k, middle, low), jnp.where(reached >= k, high, middle)
        return low, jnp.where(reached == k, middle + 1, high)  # exactly k: any number of this gap will do

    low = jnp.zeros(largest.shape, bits)
    high = jax.lax.bitcast_convert_type(jnp.abs(largest), bits) + 1
    low = jax.lax.while_loop(lambda ends: jnp.any(ends[1] - ends[0] > 1), narrow, (low, high))[0]
    # Subnormal numbers are taken for 0 by some processors: below the least normal one there is nothing to keep.
    least = jax.lax.bitcast_convert_type(jnp.asarray(jnp.finfo(largest.dtype).tiny, largest.dtype), bits)
    return as_number(jnp.where(low <= least, 0, low))


def thresholds(numbers: Array, sparsity: float) -> Array:
    """Computes for each row a threshold, [b]: when the row is sparsified, numbers of at least this magnitude are kept.

    Args:
        numbers: The rows [b, ...], such as the Jacobians of b examples.
        sparsity: Share of the numbers of a row that is set to zero.
    """
    flat = jnp.abs(numbers).reshape((numbers.shape[0], -1))
    return threshold_of(count_numbers(flat), jnp.max(flat, axis=1), num_kept(sparsity, flat.shape[1]))


def count_products(first: Array, second: Array) -> Count:
    """Returns a function from thresholds [b] to how many products ``|first_u second_q|`` reach them, for each row, [b].

    Each product is rounded to the dtype of its factors. A threshold costs Q binary searches among U sorted numbers.

    Args:
        first: First factors [b, U].
        second: Second factors [b, Q].
    """
    size = first.shape[1]
    width = 1 << size.bit_length()
    padding = jnp.full((first.shape[0], width - size), jnp.inf, first.dtype)
    ordered = jnp.concatenate([jnp.sort(jnp.abs(first), axis=1), padding], axis=1)
    factors = jnp.abs(second)

    def count(threshold: Array) -> Array:
        below = jnp.zeros(factors.shape, jnp.int32)  # how many products of this factor are below the threshold
        step = width // 2
        while step:
            value = jnp.take_along_axis(ordered, below + (step - 1), axis=1, mode="promise_in_bounds")
            # the product itself is compared: divided thresholds would round otherwise; padding is never below
            below = jnp.where(value * factors < threshold[:, None], below + step, below)
            step //= 2
        return jnp.sum(size - below, axis=1, dtype=jnp.int32)

    return count


def count_numbers(numbers: Array, times: int = 1) -> Count:
    """Returns a function from thresholds [b] to how many entries of each row have at least that magnitude, [b].

    Args:
        numbers: The numbers [b, Q].
        times: How often each number counts.
    """
    magnitudes = jnp.abs(numbers)
    return lambda threshold: times * jnp.sum(magnitudes >= threshold[:, None], axis=1, dtype=jnp.int32)
