"""The laws of the engine, checked for an algorithm of the user."""

from fedtangent._src.testing import Law, check_laws

__all__ = [
    "Law",
    "check_laws",
]
