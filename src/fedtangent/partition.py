"""Partitions: which client holds which example, and how unlike the clients are."""

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
