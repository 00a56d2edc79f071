"""Checks of arguments shared by ``data`` and ``partition``: each raises ``ValueError`` in one line, before any work."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.types import Array, Partition

MAX_INDEX = np.iinfo(np.int32).max


def is_whole(value: Any) -> bool:
    """Whether ``value`` is an integer (a bool is none)."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool | np.bool_)


def integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """``value`` as an ``int``; raises ``ValueError`` unless it is an integer in ``[minimum, maximum]``."""
    allowed = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    if not is_whole(value):
        raise ValueError(f"{name} must be an integer, {allowed}; got {value!r}")
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        raise ValueError(f"{name} must be {allowed}; got {number}")
    return number


def positive(name: str, value: Any) -> float:
    """``value`` as a ``float``; raises ``ValueError`` unless it is a finite number above 0."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number above 0; got {value!r}")
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be finite and above 0; got {number}")
    return number


def boolean(name: str, value: Any) -> bool:
    """``value`` as a ``bool``; raises ``ValueError`` unless it is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False; got {value!r}")
    return bool(value)


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """``value``; raises ``ValueError`` naming the allowed values unless it is one of them."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
    return str(value)


def class_labels(labels: Any, num_classes: int | None = None, name: str = "labels") -> np.ndarray:
    """Class labels as an array [n] of their own integer dtype.

    Raises ``ValueError`` unless they are a non-empty 1-D array of integers in ``[0, num_classes)`` (or just not
    negative, without ``num_classes``).
    """
    array = np.asarray(labels)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must be a 1-D array of integers; got shape {array.shape}, dtype {array.dtype}")
    if array.size == 0:
        raise ValueError(f"{name} must not be empty")
    wrong = array < 0 if num_classes is None else (array < 0) | (array >= num_classes)
    if wrong.any():
        at = int(np.argmax(wrong))
        allowed = "at least 0" if num_classes is None else f"from 0 to {num_classes - 1}"
        raise ValueError(f"{name} must be {allowed}; got {array[at]} at position {at} ({int(wrong.sum())} such)")
    return array


def partition_structure(partition: Partition, num_examples: int) -> None:
    """Raise ``ValueError`` unless ``partition`` is a well-formed map of clients into ``num_examples`` examples.

    Well-formed: both arrays 1-D and integer; ``offsets`` starts at 0, never falls and ends at ``len(indices)``; at
    least one client; every index in ``[0, num_examples)``. Clients may be empty and may share examples.
    """
    indices, offsets = (np.asarray(a) for a in (partition.indices, partition.offsets))
    for name, array in (("indices", indices), ("offsets", offsets)):
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"partition.{name} must be a 1-D array of integers; got shape {array.shape}, dtype {array.dtype}"
            )
    if len(offsets) < 2:
        raise ValueError(f"partition.offsets must hold num_clients + 1 >= 2 entries; got {len(offsets)}")
    if offsets[0] != 0 or offsets[-1] != len(indices):
        raise ValueError(
            f"partition.offsets must run from 0 to len(indices) = {len(indices)}; got {offsets[0]} to {offsets[-1]}"
        )
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if falls.size:
        i = int(falls[0])
        raise ValueError(f"partition.offsets must never fall; offsets[{i}:{i + 2}] are {offsets[i : i + 2].tolist()}")
    wrong = (indices < 0) | (indices >= num_examples)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"partition.indices must be from 0 to {num_examples - 1} ({num_examples} examples); "
            f"got {indices[at]} at position {at}"
        )


def check_within(name: str, value: float | Array, low: float, high: float = math.inf) -> None:
    """Raise ``ValueError`` unless ``low <= value < high``, one number.

    A traced value (of a sweep or a hypergradient) has nothing to look at and is passed.
    """
    if isinstance(value, jax.core.Tracer):
        return
    check_number(name, value)
    if not low <= float(value) < high:
        above = "finite" if high == math.inf else f"below {high:g}"
        raise ValueError(f"{name}: got {float(value):g}, must be at least {low:g} and {above}")


def check_positive(name: str, value: Any) -> None:
    """Raise ``ValueError`` unless ``value`` is positive and finite; one that is traced has no value to look at."""
    if isinstance(value, jax.core.Tracer):
        return
    check_number(name, value)
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{name}: got {value}, must be positive and finite")


def is_zero(value: float | Array) -> bool:
    """Whether a constant is known to be 0, so that its term can be left out."""
    return not isinstance(value, jax.core.Tracer) and float(value) == 0


def check_number(name: str, value: Any) -> None:
    """Raise ``ValueError`` unless ``value`` is one real number (an array of shape [] will do)."""
    kind = np.asarray(value).dtype
    if not (jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)):
        raise ValueError(f"{name}: got {value!r}, must be a number")
    if jnp.ndim(value) != 0:
        raise ValueError(f"{name}: got an array of shape {jnp.shape(value)}, must be one number")
