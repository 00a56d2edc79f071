"""Examples that all clients share, that only the server has, or that are kept to test each client's predictions.

Functions that change a partition return a new one. Randomness comes from ``numpy.random.Generator(PCG64(seed))`` only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from fedtangent._src import checks
from fedtangent._src.data.partition import validate
from fedtangent._src.data.partition.drawn import assemble, generator
from fedtangent._src.types import ArrayLike, Partition


def class_balanced(labels: ArrayLike, size: int, seed: int, name: str = "size") -> Int[np.ndarray, "_"]:
    """Draws the indices of ``size`` examples, with equal numbers from all classes (Zhao et al., 2018, section 4).

    The classes' numbers of examples differ by at most one, and it is random which classes give one more. The indices
    are int32, in ascending order, without repetition.

    Args:
        labels: Class labels [n].
        size: Number of examples.
        seed: Seed of the draw.
        name: Name of ``size`` in error messages.

    Raises:
        ValueError: The size is outside 1 .. n, or a class has too few examples.
    """
    labels = checks.class_labels("labels", labels)
    size = checks.whole(name, size, 1, len(labels))
    rng = generator(seed)
    _, kind = np.unique(labels, return_inverse=True)
    pool = np.bincount(kind)
    base, extra = divmod(size, len(pool))
    counts = np.full(len(pool), base) + (rng.permutation(len(pool)) < extra)
    if (counts > pool).any():
        at = int(np.argmax(counts > pool))
        raise ValueError(f"{name}: got {size} examples, must be fewer: a class of {pool[at]} would give {counts[at]}")
    rows = [rng.choice(np.flatnonzero(kind == c), count, replace=False) for c, count in enumerate(counts)]
    return np.sort(np.concatenate(rows)).astype(np.int32)


def number_given(shared: Sequence[int] | np.ndarray, fraction: float, name: str = "shared") -> int:
    """Computes how many of the shared examples each client gets: ``fraction`` of them, rounded, at least one.

    Args:
        shared: Indices of the shared examples.
        fraction: Share in (0, 1].
        name: Name of ``shared`` in error messages.

    Raises:
        ValueError: The fraction is out of range, or ``shared`` are not distinct whole numbers from 0.
    """
    chosen = np.asarray(shared)
    if chosen.ndim != 1 or chosen.size == 0 or not np.issubdtype(chosen.dtype, np.integer):
        raise ValueError(f"{name}: got shape {chosen.shape}, dtype {chosen.dtype}, must be whole numbers [n], n >= 1")
    if chosen.min() < 0 or len(np.unique(chosen)) < len(chosen):
        raise ValueError(f"{name}: got {chosen.tolist()!r:.60}, must be indices of at least 0, each once")
    checks.number("fraction", fraction, above=0, at_most=1)
    return max(1, round(float(fraction) * len(chosen)))


def with_shared(
    partition: Partition, shared: Sequence[int] | np.ndarray, fraction: float = 1.0, seed: int = 0
) -> Partition:
    """Adds examples of a globally shared set to every client that has examples (Zhao et al., 2018, section 4).

    A client that already has a shared example has it once, not twice. Zhao et al.'s global set belongs to no
    client: remove it from the clients first (``without``).

    Args:
        partition: The partition to extend.
        shared: Indices of the global set.
        fraction: Random share of the set for each client (the paper's alpha); 1 for all of it, as in section 6 of
            the NTK-FL paper.
        seed: Seed of the draw.

    Raises:
        ValueError: The fraction is outside (0, 1], ``shared`` are not distinct whole numbers from 0, or the partition
            is malformed.
    """
    count, rng = number_given(shared, fraction), generator(seed)
    validate(partition, checks.MAX_INDEX)
    global_set = np.asarray(shared)
    parts = []
    for i in range(partition.num_clients):
        share = global_set if count == len(global_set) else rng.choice(global_set, count, replace=False)
        private = partition.client(i)
        parts.append(np.concatenate([private, share[~np.isin(share, private)]]) if len(private) else private)
    return assemble(parts)


def without(partition: Partition, examples: Sequence[int] | np.ndarray, name: str = "examples") -> Partition:
    """Removes examples from all clients, for instance because the server keeps them; returns the new partition.

    Args:
        partition: The partition.
        examples: Indices to remove.
        name: Name of the examples in error messages.

    Raises:
        ValueError: The indices are not distinct whole numbers from 0, a client would lose all its examples, or the
            partition is malformed.
    """
    count = number_given(examples, 1.0, name)
    validate(partition, checks.MAX_INDEX)
    clients = [partition.client(i) for i in range(partition.num_clients)]
    parts = [rows[~np.isin(rows, np.asarray(examples))] for rows in clients]
    for i, (before, after) in enumerate(zip(clients, parts, strict=True)):
        if len(after) == 0 < len(before):
            raise ValueError(
                f"{name}: got {count} examples, among them all {len(before)} of client {i}, must leave it one"
            )
    return assemble(parts)


def held_out(partition: Partition, fraction: float, seed: int) -> tuple[Partition, Partition]:
    """Splits each client's examples at random into a part to train on and a part to test on, two partitions.

    The test set has ``fraction`` of all n examples, rounded to a whole number from 1 to n - 1. Each client gives that
    share of its examples to within one. No client gives its last training example as long as another client has two or
    more.

    Args:
        partition: The partition.
        fraction: Share of the examples, in (0, 1), that goes to the test set.
        seed: Seed of the draw.

    Returns:
        The partitions (train, test).

    Raises:
        ValueError: The fraction is out of range, there are fewer than two examples, or the partition is malformed.
    """
    checks.number("fraction", fraction, above=0, below=1)
    validate(partition, checks.MAX_INDEX)
    if len(partition.indices) < 2:
        raise ValueError(f"partition: got {len(partition.indices)} examples, must be two or more, to train and to test")
    rng = generator(seed)
    orders = [rng.permutation(partition.client(i)) for i in range(partition.num_clients)]
    counts = _test_sizes(partition.sizes, fraction, rng)
    train, test = zip(*((order[k:], order[:k]) for order, k in zip(orders, counts, strict=True)), strict=True)
    return assemble(train), assemble(test)


def _test_sizes(sizes: Int[np.ndarray, "N"], fraction: float, rng: np.random.Generator) -> Int[np.ndarray, "N"]:
    """Computes how many test examples each client gives: ``fraction`` of all examples, in proportion to ``sizes`` [N].

    Numbers are rounded by largest remainder, and ties between clients are broken at random.
    """
    num_examples, sizes = int(sizes.sum()), sizes.astype(np.int64)
    total = min(max(round(fraction * num_examples), 1), num_examples - 1)
    most = np.maximum(sizes - 1, 0)
    counts = np.minimum(total * sizes // num_examples, most)
    while rest := total - int(counts.sum()):
        if (counts == most).all():
            most = sizes  # every client has one example left, and some must give it away
        order = rng.permutation(np.flatnonzero(counts < most))
        surplus = counts[order] * num_examples - total * sizes[order]
        counts[order[np.argsort(surplus, kind="stable")[:rest]]] += 1
    return counts
