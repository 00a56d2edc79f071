"""Partitions in which a client holds few classes, or one of them above all."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int

from fedtangent._src import checks
from fedtangent._src.data.partition.drawn import ClientsOptions, assemble, checked_clients, generator, labels_of
from fedtangent._src.entries import Entry
from fedtangent._src.types import ArrayLike, Partition


def shards(labels: ArrayLike, num_clients: int, shards_per_client: int, seed: int) -> Partition:
    """Sorts by label, cuts into equal shards and deals them at random (McMahan et al., 2017, section 3).

    The ``num_clients * shards_per_client`` shards have equal sizes to within one. If classes differ in size, a shard
    can straddle a boundary, so that a client has one class more than it has shards; with ``classes`` this cannot
    happen.

    Args:
        labels: Class labels [n].
        num_clients: Number of clients.
        shards_per_client: Number of shards of a client.
        seed: Seed of the deal.

    Raises:
        ValueError: There are more shards than examples.
    """
    labels = checks.class_labels("labels", labels)
    num_clients, rng = checked_clients(num_clients, len(labels)), generator(seed)
    per_client = checks.whole("shards_per_client", shards_per_client)
    num_shards = num_clients * per_client
    if num_shards > len(labels):
        raise ValueError(
            f"num_clients * shards_per_client: got {num_shards} shards, must be at most the {len(labels)} examples"
        )
    pieces = np.array_split(np.argsort(labels, kind="stable"), num_shards)
    deal = rng.permutation(num_shards).reshape(num_clients, per_client)
    return assemble([np.concatenate([pieces[shard] for shard in row]) for row in deal])


def classes(labels: ArrayLike, num_clients: int, classes_per_client: int, seed: int) -> Partition:
    """Gives each client exactly ``classes_per_client`` classes (the Fed-ensemble papers' "exactly two labels", N.o.C.).

    The ``num_clients * classes_per_client`` slots are divided equally among the classes present (to within one); a
    class's examples are divided equally, at random, among the clients that drew it.

    Args:
        labels: Class labels [n].
        num_clients: Number of clients.
        classes_per_client: Number of classes of a client.
        seed: Seed of the draw.

    Raises:
        ValueError: A client would need more classes than there are, there are fewer slots than classes (a class would
            go to nobody), or a class has fewer examples than clients that drew it.
    """
    labels = checks.class_labels("labels", labels)
    num_clients, rng = checked_clients(num_clients, len(labels)), generator(seed)
    _, kind = np.unique(labels, return_inverse=True)
    pool = np.bincount(kind)
    per_client = checks.whole("classes_per_client", classes_per_client, 1, len(pool))
    base, extra = divmod(num_clients * per_client, len(pool))
    slots = np.full(len(pool), base) + (rng.permutation(len(pool)) < extra)
    if base == 0:
        raise ValueError(
            f"num_clients * classes_per_client: got {num_clients * per_client}, must be at least {len(pool)} (classes)"
        )
    if (slots > pool).any():
        at = int(np.argmax(slots > pool))
        raise ValueError(
            f"num_clients: got {num_clients}, must be fewer: {slots[at]} would share a class of {pool[at]} examples"
        )
    holders = _deal_classes(rng, slots, num_clients, per_client)
    parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for c, members in enumerate(holders):
        examples = rng.permutation(np.flatnonzero(kind == c))
        for client, piece in zip(rng.permutation(members), np.array_split(examples, len(members)), strict=True):
            parts[client].append(piece)
    return assemble([np.concatenate(p) for p in parts])


def _deal_classes(
    rng: np.random.Generator, slots: Int[np.ndarray, "C"], num_clients: int, per_client: int
) -> list[list[int]]:
    """Deals classes to clients: ``slots[c]`` clients for class c, and ``per_client`` different classes for each client.

    Always possible: no class has more slots left than clients remain, since the next client takes every class that has
    as many.
    """
    slots = slots.copy()
    holders: list[list[int]] = [[] for _ in slots]
    for turn, client in enumerate(rng.permutation(num_clients)):
        forced = np.flatnonzero(slots == num_clients - turn)
        weights = np.where(slots == num_clients - turn, 0, slots)
        free = per_client - len(forced)
        others = rng.choice(len(slots), free, replace=False, p=weights / weights.sum()) if free else forced[:0]
        for c in np.concatenate([forced, others]):
            slots[c] -= 1
            holders[c].append(int(client))
    return holders


def majority(labels: ArrayLike, num_clients: int, share: float = 0.5, seed: int = 0) -> Partition:
    """Gives each client a main class with ``share`` of its data (Local-GD paper, section 5, fine-tuning: a half).

    With C classes in ascending order, the main class of client i is number ``i mod C``. All clients hold equally many
    examples m: ``share * m`` of the main class, rounded to the nearest whole number, and the rest evenly from all other
    classes, to within one (the classes after the main one come first). m is the largest number for which each class has
    enough examples. The other examples belong to no client; they are few if classes are equally large and N is a
    multiple of C.

    Args:
        labels: Class labels [n].
        num_clients: Number N of clients.
        share: Share of the main class, in (0, 1].
        seed: Seed of the draw.

    Raises:
        ValueError: The share is out of range, there are fewer than two classes, or classes are too small for one
            example.
    """
    labels = checks.class_labels("labels", labels)
    checks.number("share", share, above=0, at_most=1)
    num_clients, rng = checked_clients(num_clients, len(labels)), generator(seed)
    _, kind = np.unique(labels, return_inverse=True)
    counts = _majority_counts(np.bincount(kind), num_clients, share)
    pools = [rng.permutation(np.flatnonzero(kind == c)) for c in range(counts.shape[1])]
    pieces = [np.split(pool, np.cumsum(sizes)) for pool, sizes in zip(pools, counts.T, strict=True)]
    return assemble([np.concatenate([piece[i] for piece in pieces]) for i in range(num_clients)])


def _majority_counts(pool: Int[np.ndarray, "C"], num_clients: int, share: float) -> Int[np.ndarray, "N C"]:
    """Computes how many examples of each class every client of ``majority`` gets, for the largest possible clients."""
    others = len(pool) - 1
    if others == 0:
        raise ValueError("labels: got one class, must be of two or more")
    after = (np.arange(len(pool)) - np.arange(num_clients)[:, None] - 1) % len(pool)  # C - 1 at the client's own class
    load = np.where(after == others, share, (1 - share) / others).sum(axis=0)  # for each example of a client
    most = np.divide(pool + num_clients, load, out=np.full(len(pool), np.inf), where=load > 0).min()  # rounded: N more
    for size in range(int(min(most, pool.sum() // num_clients)), 0, -1):
        first = int(share * size + 0.5)
        base, extra = divmod(size - first, others)
        counts = np.where(after == others, first, base + (after < extra))
        if (counts.sum(axis=0) <= pool).all():
            return counts
    raise ValueError(
        f"num_clients: got {num_clients}, must be fewer: classes of {pool.min()} to {pool.max()} examples are too small"
    )


@dataclasses.dataclass(frozen=True)
class ShardsOptions(ClientsOptions):
    """Options of shards."""

    shards_per_client: int = 2
    """Shards of a client."""


@dataclasses.dataclass(frozen=True)
class ClassesOptions(ClientsOptions):
    """Options of classes."""

    classes_per_client: int = 2
    """Classes of a client."""


@dataclasses.dataclass(frozen=True)
class MajorityOptions(ClientsOptions):
    """Options of majority."""

    share: float = 0.5
    """Share of a client's own class in its data."""


ENTRIES = (
    Entry(
        "shards",
        "sorted by label, --shards-per-client shards each",
        lambda options, dataset, seed: shards(labels_of(dataset), seed=seed, **vars(options)),
        ShardsOptions,
        ("mcmahan2017",),
    ),
    Entry(
        "classes",
        "exactly --classes-per-client classes a client",
        lambda options, dataset, seed: classes(labels_of(dataset), seed=seed, **vars(options)),
        ClassesOptions,
    ),
    Entry(
        "majority",
        "a client has --share of its data from one class",
        lambda options, dataset, seed: majority(labels_of(dataset), seed=seed, **vars(options)),
        MajorityOptions,
        ("localgd",),
    ),
)
