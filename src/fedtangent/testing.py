"""The laws of the engine, as checks that users run on their algorithms."""

from fedtangent._src.testing import Law, check_laws

__all__ = [
    "Law",
    "check_laws",
]
