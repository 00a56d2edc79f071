"""Partitions: which client has which example, and how different the clients are."""

from fedtangent._src.data.partition import (
    by_user,
    classes,
    dirichlet,
    heterogeneity,
    iid,
    majority,
    of,
    quantity_skew,
    shards,
    validate,
)
from fedtangent._src.data.sharing import class_balanced, with_shared, without

__all__ = [
    "by_user",
    "class_balanced",
    "classes",
    "dirichlet",
    "heterogeneity",
    "iid",
    "majority",
    "of",
    "quantity_skew",
    "shards",
    "validate",
    "with_shared",
    "without",
]
