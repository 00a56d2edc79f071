"""Partitions without regard to labels: dealt at random, into clients of equal sizes or of unequal ones."""

from __future__ import annotations

import numpy as np

from fedtangent._src import checks
from fedtangent._src.data.partition import drawn
from fedtangent._src.entries import Entry
from fedtangent._src.types import Partition


def iid(num_examples: int, num_clients: int, seed: int) -> Partition:
    """Deals the examples at random; sizes are equal to within one (the first clients are the larger ones).

    Args:
        num_examples: Number of examples n.
        num_clients: Number of clients N.
        seed: Seed of the deal.
    """
    num_clients, rng = drawn.checked_clients(num_clients, num_examples), drawn.generator(seed)
    return drawn.assemble(np.array_split(rng.permutation(num_examples), num_clients))


def quantity_skew(num_examples: int, num_clients: int, alpha: float, seed: int, min_client_size: int = 1) -> Partition:
    """Draws clients' sizes from a Dirichlet distribution and deals random examples: only sizes differ, not labels.

    Each client gets ``min_client_size`` examples; the rest is divided by ``q ~ Dir(alpha, .., alpha)`` over clients,
    rounded to whole examples by largest remainder.

    Args:
        num_examples: Number of examples n.
        num_clients: Number of clients N.
        alpha: Concentration, within [1e-9, 1e9]; a smaller number makes sizes less alike.
        seed: Seed of the draw.
        min_client_size: Fewest examples of a client.

    Raises:
        ValueError: ``alpha`` is out of range, or ``min_client_size`` exceeds the examples of an average client.
    """
    checks.number("alpha", alpha, **drawn.ALPHA)
    num_clients, rng = drawn.checked_clients(num_clients, num_examples), drawn.generator(seed)
    min_client_size = checks.whole("min_client_size", min_client_size, 0, num_examples // num_clients)
    q = rng.dirichlet(np.full(num_clients, alpha))
    sizes = min_client_size + drawn.apportion(num_examples - num_clients * min_client_size, q)
    return drawn.assemble(np.split(rng.permutation(num_examples), np.cumsum(sizes)[:-1]))


ENTRIES = (
    Entry(
        "iid",
        "examples dealt at random",
        lambda options, dataset, seed: iid(len(dataset.x_train), seed=seed, **vars(options)),
        drawn.ClientsOptions,
    ),
    Entry(
        "quantity_skew",
        "random examples, sizes from Dirichlet(--alpha)",
        lambda options, dataset, seed: quantity_skew(len(dataset.x_train), seed=seed, **vars(options)),
        drawn.SkewOptions,
    ),
)
