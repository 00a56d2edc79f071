"""Partitions without regard to labels: dealt at random, into clients of equal sizes or of unequal ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedtangent._src import checks
from fedtangent._src.data.dataset import Dataset
from fedtangent._src.data.partition.drawn import (
    ALPHA,
    ClientsOptions,
    SkewOptions,
    apportion,
    assemble,
    checked_clients,
    generator,
)
from fedtangent._src.entries import Entry
from fedtangent._src.types import Partition


def iid(num_examples: int, num_clients: int, seed: int) -> Partition:
    """Deals the examples at random; sizes are equal to within one (the first clients are the larger ones)."""
    num_clients, rng = checked_clients(num_clients, num_examples), generator(seed)
    return assemble(np.array_split(rng.permutation(num_examples), num_clients))


def quantity_skew(num_examples: int, num_clients: int, alpha: float, seed: int, min_client_size: int = 1) -> Partition:
    """Draws clients' sizes from a Dirichlet distribution and deals random examples: only sizes differ, not labels.

    Each client gets ``min_client_size`` examples; the rest is divided by ``q ~ Dir(alpha, .., alpha)`` over clients,
    rounded to whole examples by largest remainder. Arguments and errors are those of ``dirichlet``.
    """
    checks.number("alpha", alpha, **ALPHA)
    num_clients, rng = checked_clients(num_clients, num_examples), generator(seed)
    min_client_size = checks.whole("min_client_size", min_client_size, 0, num_examples // num_clients)
    q = rng.dirichlet(np.full(num_clients, alpha))
    sizes = min_client_size + apportion(num_examples - num_clients * min_client_size, q)
    return assemble(np.split(rng.permutation(num_examples), np.cumsum(sizes)[:-1]))


def _of_number(function: Callable[..., Partition]) -> Callable[[Any, Dataset, int], Partition]:
    return lambda options, dataset, seed: function(len(dataset.x_train), seed=seed, **vars(options))


ENTRIES = (
    Entry("iid", "examples dealt at random", _of_number(iid), ClientsOptions),
    Entry("quantity_skew", "random examples, sizes from Dirichlet(--alpha)", _of_number(quantity_skew), SkewOptions),
)
