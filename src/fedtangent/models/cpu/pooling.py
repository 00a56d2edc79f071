"""Max pooling over windows that do not overlap, with a gradient that XLA's CPU backend runs fast."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp

from fedtangent.types import Array

_LARGEST_WINDOW = 127  # positions: they are kept as int8


def _windows(x: Array, window: tuple[int, int]) -> Array:
    """``x`` [B, H, W, C] as [B, H // h, h, W // w, w, C]; rows and columns that fill no window are left out."""
    (h, w), (rows, columns) = window, (x.shape[1] // window[0], x.shape[2] // window[1])
    kept = x[:, : rows * h, : columns * w]
    return kept.reshape((x.shape[0], rows, h, columns, w, x.shape[3]))


def _largest(x: Array, window: tuple[int, int]) -> tuple[Array, Array]:
    """The largest entry of each window and its position, the first one if several are equal; [B, H', W', C] each."""
    parts = _windows(x, window)
    positions = itertools.product(range(window[0]), range(window[1]))
    best = parts[:, :, 0, :, 0]
    where = jnp.zeros(best.shape, jnp.int8)
    for place, (i, j) in list(enumerate(positions))[1:]:
        other = parts[:, :, i, :, j]
        where = jnp.where(other > best, jnp.int8(place), where)
        best = jnp.maximum(best, other)
    return best, where


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _pool(x: Array, window: tuple[int, int]) -> Array:
    return _largest(x, window)[0]


@_pool.defjvp
def _pool_jvp(window: tuple[int, int], primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    best, where = _largest(primals[0], window)
    places = jnp.arange(window[0] * window[1], dtype=jnp.int8).reshape((1, 1, window[0], 1, window[1], 1))
    chosen = where[:, :, None, :, None, :] == places
    moved = _windows(tangents[0], window)
    return best, jnp.sum(jnp.where(chosen, moved, jnp.zeros((), moved.dtype)), axis=(2, 4))


def max_pool(x: Array, window: tuple[int, int] = (2, 2)) -> Array:
    """``flax.linen.max_pool(x, window, strides=window, padding="VALID")`` for ``x`` [B, H, W, C].

    The same values, and the same gradient: of equal entries the first in the window takes it. Derivatives of both
    modes and any order. Raises ``ValueError`` for other shapes and for windows of more than 127 entries.
    """
    if x.ndim != 4:
        raise ValueError(f"x: got shape {x.shape}, must have the axes [B, H, W, C]")
    if min(window) < 1 or window[0] * window[1] > _LARGEST_WINDOW:
        raise ValueError(f"window: got {window}, must have from 1 to {_LARGEST_WINDOW} entries")
    return _pool(x, tuple(window))
