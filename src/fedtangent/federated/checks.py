"""Checks of an algorithm's constants, before any work."""

from __future__ import annotations

import math
from typing import Any

import jax

from fedtangent.federated.rates import check_number
from fedtangent.types import Array


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
