"""Theorem 1 of FE-2024 (4.1 and 9.1 of FE-2021), Lemmas 9.2 and 9.3, and section 9.4."""

from __future__ import annotations

from fedtangent.compare.theorems import SCALES, TheoremCheck
from fedtangent.compare.theorems._decay import decay_checks
from fedtangent.compare.theorems._second_order import second_order_checks
from fedtangent.compare.theorems._width import width_checks


def checks(scale: str, seed: int) -> list[TheoremCheck]:
    """One row for each statement on convergence. Needs JAX's 64-bit types.

    Raises:
        ValueError: an unknown ``scale``.
    """
    if scale not in SCALES:
        raise ValueError(f"scale: got {scale!r}, allowed are {', '.join(SCALES)}")
    return [*second_order_checks(scale, seed), *decay_checks(scale, seed), *width_checks(scale, seed)]
