"""Recipes: functions that build the papers' algorithms from the shared parts, a few lines each.

Every recipe with an entry in a file here can be imported from the package: ``algorithms.fed_avg``.
"""

from __future__ import annotations

from fedtangent._src.entries import catalogue
from fedtangent._src.federated.algorithms import common as common  # a module, which ``__getattr__`` need not look for
from fedtangent._src.types import Recipe


def __getattr__(name: str) -> Recipe:
    entry = None if name.startswith("_") else catalogue("algorithms").get(name)
    if entry is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    recipe: Recipe = entry.recipe
    return recipe


def __dir__() -> list[str]:
    return [*catalogue("algorithms")]
