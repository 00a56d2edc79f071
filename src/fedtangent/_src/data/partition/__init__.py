"""Partitions: which client holds which example, and how unlike the clients are.

Every partitioner, such as ``dirichlet(labels, num_clients=10, alpha=0.5, seed=0)``, returns a ``Partition`` of int32
arrays; a client's indices are in ascending order. Randomness comes from ``numpy.random.Generator(PCG64(seed))`` only,
so that a seed gives the same partition on every platform. Every example goes to exactly one client, except that
``majority`` leaves some out. ``of`` keeps the order of the user's lists, which may overlap.

Partitioners raise ``ValueError`` for more clients than examples, labels that are not [n] integers >= 0, and a negative
seed.
"""

from fedtangent._src.data.partition.drawn import classes, dirichlet, iid, majority, quantity_skew, shards
from fedtangent._src.data.partition.given import Heterogeneity, by_user, heterogeneity, of, validate

__all__ = [
    "Heterogeneity",
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
