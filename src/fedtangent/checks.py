"""Checks of arguments, for the whole package: each raises ``ValueError`` in one line before any work starts.

One wording: ``name: got X, must be ..``, or ``name: got X, allowed are a, b`` for a choice among names.
"""

from __future__ import annotations

import difflib
import numbers
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MAX_INDEX = int(np.iinfo(np.int32).max)  # the largest whole number: compiled programs hold them in 32 bits
MAX_SEED = 2**32 - 1
MAX_NUMBER = 1e19  # the largest magnitude of other numbers: float32 still holds their squares
_ROWS = 256  # rows of a matrix that ``symmetric`` compares at a time


def number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> Any:
    """``value`` as a ``float``: one finite real number within the bounds. An array of shape [] counts as a number.

    A traced value (in a sweep or a hypergradient) has no number to compare: one of shape [] is returned as it is.
    """
    array = value if isinstance(value, jax.core.Tracer) else np.asarray(value)
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise ValueError(f"{name}: got {shown(value)}, must be a number")
    if array.ndim != 0:
        raise ValueError(f"{name}: got an array of shape {array.shape}, must be one number")
    if isinstance(value, jax.core.Tracer):
        return value
    bounds = {"above": above, "at least": at_least, "below": below, "at most": at_most}
    words = [f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None]
    if below is None and at_most is None:
        words.append("finite")
    found = float(value)
    within = (
        (above is None or found > above)
        and (at_least is None or found >= at_least)
        and (below is None or found < below)
        and (at_most is None or found <= at_most)
    )
    if not (np.isfinite(found) and within):
        raise ValueError(f"{name}: got {value}, must be {' and '.join(words)}")
    return found


def whole(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """``value`` as an ``int``, a whole number in ``[least, most]`` (no bool); by default at most ``MAX_INDEX``."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool | np.bool_)
    bound = MAX_INDEX if most is None else most
    if not is_whole or not least <= value <= bound:
        is_large = is_whole and value > bound
        allowed = f"from {least} to {bound}" if most is not None or is_large else f"of at least {least}"
        raise ValueError(f"{name}: got {shown(value)}, must be a whole number {allowed}")
    return int(value)


def seed(value: Any, name: str = "seed") -> int:
    """``value`` as an ``int``, the seed of random numbers: a whole number from 0 to 2^32 - 1."""
    return whole(name, value, 0, MAX_SEED)


def instance(name: str, value: Any, of: type) -> None:
    """Refuse a value of another type."""
    if not isinstance(value, of):
        raise ValueError(f"{name}: got {shown(value)}, must be a {of.__name__}")


def flag(name: str, value: Any) -> bool:
    """``value`` as a ``bool``, which it must be."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}: got {value!r}, must be True or False")
    return bool(value)


def folder(name: str, path: Path | None) -> None:
    """Refuse a path that is named and is no folder."""
    if path is not None and not path.is_dir():
        raise ValueError(f"{name}: got {path}, must be a folder")


def writable(name: str, path: Path, what: str) -> Path:
    """``path``, a folder for ``what``; raises ``ValueError`` unless it can be written to, or created."""
    above = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"{name}: got {path} for {what}, must be a folder that can be written to")
    return path


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """``value``, one of the allowed names."""
    names = tuple(allowed)
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{name}: got {value!r}, allowed are {', '.join(names)}{nearest(value, names)}")
    return value


def nearest(value: Any, names: Iterable[str]) -> str:
    """Returns "; did you mean NAME?" for the name that is spelt most like ``value``, or nothing if none is."""
    close = difflib.get_close_matches(value, list(names), 1) if isinstance(value, str) else []
    return f"; did you mean {close[0]}?" if close else ""


def dtype(value: Any, *allowed: str) -> np.dtype[Any]:
    """``value`` as a dtype, one of those that are allowed."""
    try:
        found = np.dtype(value).name
    except TypeError:
        found = value
    return np.dtype(choice("dtype", found, allowed))


def real_array(name: str, value: Any) -> np.ndarray:
    """Real numbers as float64, of any shape: no text, None, bool or complex numbers."""
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name}: got {shown(value)}, must be real numbers in one array") from error
    if not (np.issubdtype(array.dtype, np.integer) or jnp.issubdtype(array.dtype, jnp.floating)):
        raise ValueError(f"{name}: got {shown(value)}, must be a real number or an array of them")
    return array.astype(np.float64, copy=False)


def finite(name: str, array: np.ndarray) -> None:
    """Refuse NaN and infinity, naming the first such entry."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.sum(array)
    if not np.isfinite(total):  # one pass; a sum that overflows is looked at entry by entry too
        bad = ~np.isfinite(array)
        if not bad.any():
            return
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"{name}: got {array[where]} at entry {where} of shape {array.shape}, must be finite")


def square(name: str, matrix: Any) -> np.ndarray:
    """``matrix`` as float64 [n, n]: square and not empty; it may hold NaN and infinity."""
    array = real_array(name, matrix)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.shape[0] == 0:
        raise ValueError(f"{name}: got shape {array.shape}, must be a square matrix [n, n] with n >= 1")
    return array


def symmetric(name: str, matrix: Any) -> np.ndarray:
    """``matrix`` as float64 [n, n]: square, not empty, finite, and symmetric up to rounding."""
    array = square(name, matrix)
    finite(name, array)
    bands = (slice(start, start + _ROWS) for start in range(0, len(array), _ROWS))
    asymmetry = max(float(np.max(np.abs(array[b] - array[:, b].T))) for b in bands)
    # A kernel assembled from products in another order differs from its transpose by a few roundings per entry.
    if asymmetry > 1e3 * np.finfo(np.float64).eps * max(float(np.max(array)), -float(np.min(array))):
        raise ValueError(f"{name}: got a matrix up to {asymmetry:.3g} off its transpose, must be symmetric")
    return array


def class_labels(name: str, labels: Any, num_classes: int | None = None) -> np.ndarray:
    """Class labels as an array [n] of their own integer dtype, not empty.

    They are in ``[0, num_classes)``, or not negative and in the range of int32 without ``num_classes``.
    """
    array = np.asarray(labels)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or array.size == 0:
        raise ValueError(f"{name}: got shape {array.shape}, dtype {array.dtype}, must be whole numbers [n], n >= 1")
    most = MAX_INDEX if num_classes is None else num_classes - 1
    wrong = (array < 0) | (array > most)
    if wrong.any():
        at = int(np.argmax(wrong))
        allowed = "at least 0" if num_classes is None and array[at] < 0 else f"from 0 to {most}"
        raise ValueError(f"{name}: got {array[at]} at position {at} ({int(wrong.sum())} such), must be {allowed}")
    return array


def shown(value: Any) -> str:
    """The ``repr`` of ``value`` in one line of at most 80 characters."""
    return f"{' '.join(repr(value).split()):.80}"
