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

__all__ = [
    "by_user",
    "classes",
    "dirichlet",
    "heterogeneity",
    "iid",
    "majority",
    "of",
    "quantity_skew",
    "shards",
    "validate",
]
