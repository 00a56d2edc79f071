"""Tests that users run on their algorithms: agreement with theory, and properties that every run relies on."""

from fedtangent._src.comparison.claims import UndecidedWarning, assert_follows_theory
from fedtangent._src.testing import Law, check_laws

__all__ = [
    "Law",
    "UndecidedWarning",
    "assert_follows_theory",
    "check_laws",
]
