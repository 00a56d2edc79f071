"""Partitions: who holds which example, and how unlike the clients are.

Every partitioner, such as ``dirichlet(labels, num_clients=10, alpha=0.5, seed=0)``, returns a ``Partition`` of int32
arrays; a client's indices are in ascending order. Randomness comes from ``numpy.random.Generator(PCG64(seed))`` alone,
so that a seed gives the same partition on every platform. Every example goes to exactly one client, but ``majority``
leaves some to nobody.

Partitioners raise ``ValueError`` for more clients than examples, labels that are not [n] integers >= 0, and a negative
seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedtangent import checks
from fedtangent.data.dataset import Dataset
from fedtangent.entries import Entry
from fedtangent.types import Partition

METHODS = ("per_client", "hsu", "per_class")
ALPHA = {"at_least": 1e-9, "at_most": 1e9}  # outside, gamma variates underflow or overflow
MAX_CELLS = 2**26  # of heterogeneity's table [N, C]: half a gigabyte


class Heterogeneity(NamedTuple):
    """How unlike the clients of a partition are. The means are over clients that hold anything."""

    label_distribution: np.ndarray  # [N, C] float64, share of each class among a client's examples (0 if it has none)
    total_variation: float  # mean over clients of 1/2 sum_c |share - share in all clients' examples together|
    commonest_share: float  # mean over clients of the share of the client's commonest label


def iid(num_examples: int, num_clients: int, seed: int) -> Partition:
    """Examples dealt at random, sizes equal to within one (the first clients hold the one more)."""
    num_clients, rng = _clients(num_clients, num_examples), generator(seed)
    return assemble(np.array_split(rng.permutation(num_examples), num_clients))


def shards(labels: Any, num_clients: int, shards_per_client: int, seed: int) -> Partition:
    """Sort by label, cut into equal shards, deal them at random (McMahan et al., 2017, section 3).

    The ``num_clients * shards_per_client`` shards have equal sizes to within one, so that where classes differ in size
    a shard can straddle a boundary and its client meet one class more than it has shards. ``classes`` never does that.
    Raises ``ValueError`` for more shards than examples.
    """
    labels = checks.class_labels("labels", labels)
    num_clients, rng = _clients(num_clients, len(labels)), generator(seed)
    per_client = checks.whole("shards_per_client", shards_per_client)
    num_shards = num_clients * per_client
    if num_shards > len(labels):
        raise ValueError(
            f"num_clients * shards_per_client: got {num_shards} shards, must be at most the {len(labels)} examples"
        )
    pieces = np.array_split(np.argsort(labels, kind="stable"), num_shards)
    deal = rng.permutation(num_shards).reshape(num_clients, per_client)
    return assemble([np.concatenate([pieces[s] for s in row]) for row in deal])


def classes(labels: Any, num_clients: int, classes_per_client: int, seed: int) -> Partition:
    """Each client holds exactly ``classes_per_client`` classes (the Fed-ensemble papers' "exactly two labels", N.o.C.).

    The ``num_clients * classes_per_client`` slots are divided equally among the classes present (to within one); a
    class's examples are divided equally, at random, among the clients that drew it.

    Raises ``ValueError`` for more classes a client than there are, fewer slots than classes (some class would go to
    nobody), or a class with fewer examples than clients that drew it.
    """
    labels = checks.class_labels("labels", labels)
    num_clients, rng = _clients(num_clients, len(labels)), generator(seed)
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


def dirichlet(
    labels: Any,
    num_clients: int,
    alpha: float,
    seed: int,
    min_client_size: int = 1,
    dirichlet_method: str = "per_client",
) -> Partition:
    """Label proportions drawn from a Dirichlet distribution; a smaller ``alpha`` makes clients less alike.

    With C classes in shares p (``alpha C p`` is ``(alpha, .., alpha)`` when classes are equally common):

    - ``"per_client"``: client i draws ``q_i ~ Dir(alpha C p)`` and its labels from ``q_i`` without replacement, ``q_i``
      being renormalised whenever a class is used up (Hsu et al., 2019). Sizes are equal to within one. This is the
      ``Dir(alpha)`` of the NTK-FL paper (section 6, "symmetric Dirichlet distribution"), whose authors' client maps
      have the label statistics of one ``alpha`` per class.
    - ``"hsu"``: the same with ``q_i ~ Dir(alpha p)``, as Hsu et al. print it: C times the heterogeneity parameter.
    - ``"per_class"``: each class is divided among the clients by ``Dir(alpha, .., alpha)`` over clients (Yurochkin et
      al., 2019), so sizes differ too. Clients below ``min_client_size`` take random examples from the largest ones.

    What is left for a client depends on those before it, so clients draw in random order.

    Raises ``ValueError`` for ``alpha`` outside [1e-9, 1e9] and ``min_client_size`` beyond what the examples allow.

    Example:

        >>> import fedtangent as ft
        >>> labels = ft.data.load("digits", num_train=200).y_train
        >>> clients = ft.partition.dirichlet(labels, num_clients=8, alpha=0.1, seed=0)
        >>> clients.num_clients, clients.sizes.tolist()
        (8, [25, 25, 25, 25, 25, 25, 25, 25])
    """
    labels = checks.class_labels("labels", labels)
    checks.number("alpha", alpha, **ALPHA)
    checks.choice("dirichlet_method", dirichlet_method, METHODS)
    num_clients, rng = _clients(num_clients, len(labels)), generator(seed)
    min_client_size = checks.whole("min_client_size", min_client_size, 0, len(labels) // num_clients)
    _, kind = np.unique(labels, return_inverse=True)
    pools = [rng.permutation(np.flatnonzero(kind == c)) for c in range(kind.max() + 1)]
    if dirichlet_method == "per_class":
        return assemble(_fill_up(rng, _split_classes(rng, pools, num_clients, alpha), min_client_size))
    shares = np.bincount(kind) / len(labels)
    concentration = alpha * shares * (len(pools) if dirichlet_method == "per_client" else 1)
    return assemble(_split_clients(rng, pools, num_clients, concentration))


def majority(labels: Any, num_clients: int, share: float = 0.5, seed: int = 0) -> Partition:
    """Each client has a main class, with ``share`` of its data (Local-GD paper, section 5, fine-tuning: a half).

    With C classes in ascending order, the main class of client i is number ``i mod C``. All clients hold equally many
    examples m: ``share * m`` of the main class, rounded to the nearest whole number, and the rest evenly of all other
    classes, to within one (the classes that follow the main one get the one more). m is the largest number for which
    each class has enough examples. What is left belongs to no client: next to nothing where classes are equally large
    and N is a multiple of C, otherwise more.

    Raises ``ValueError`` for a share outside (0, 1], fewer than two classes, and classes too small for one example.
    """
    labels = checks.class_labels("labels", labels)
    checks.number("share", share, above=0, at_most=1)
    num_clients, rng = _clients(num_clients, len(labels)), generator(seed)
    _, kind = np.unique(labels, return_inverse=True)
    counts = _majority_counts(np.bincount(kind), num_clients, share)
    pools = [rng.permutation(np.flatnonzero(kind == c)) for c in range(counts.shape[1])]
    pieces = [np.split(pool, np.cumsum(own)) for pool, own in zip(pools, counts.T, strict=True)]
    return assemble([np.concatenate([piece[i] for piece in pieces]) for i in range(num_clients)])


def by_user(user_ids: Any) -> Partition:
    """One client for each distinct user (writer, speaker, device), in ascending order of their ids.

    ``user_ids`` [n] are all whole numbers or all strings, such as a column of a pandas table. Raises ``ValueError`` for
    other things, among them None and NaN: an example without a user.

    Example:

        >>> import fedtangent as ft
        >>> ft.partition.by_user(["eve", "ann", "eve"]).sizes.tolist()
        [1, 2]
    """
    ids = np.asarray(user_ids)
    if ids.dtype.kind == "O" and ids.ndim == 1:
        strange = [i for i, name in enumerate(ids) if not isinstance(name, str | int | np.integer)]
        if strange:
            raise ValueError(
                f"user_ids: got {ids[strange[0]]!r} at position {strange[0]} ({len(strange)} such), must be a whole "
                "number or a string for every example"
            )
        if len({isinstance(name, str) for name in ids}) > 1:
            raise ValueError("user_ids: got whole numbers and strings, must be of one kind: is 1 the same user as '1'?")
        ids = np.asarray(ids.tolist())
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iuUS":
        raise ValueError(
            f"user_ids: got shape {ids.shape}, dtype {ids.dtype}, must be whole numbers or strings [n], n >= 1"
        )
    _, user, counts = np.unique(ids, return_inverse=True, return_counts=True)
    return assemble(np.split(np.argsort(user, kind="stable"), np.cumsum(counts)[:-1]))


def quantity_skew(num_examples: int, num_clients: int, alpha: float, seed: int, min_client_size: int = 1) -> Partition:
    """Clients of unequal sizes, drawn from a Dirichlet distribution, with random examples: labels are alike.

    Each client gets ``min_client_size`` examples; the rest is divided by ``q ~ Dir(alpha, .., alpha)`` over clients,
    rounded to whole examples by largest remainder. Raises ``ValueError`` as ``dirichlet``.
    """
    checks.number("alpha", alpha, **ALPHA)
    num_clients, rng = _clients(num_clients, num_examples), generator(seed)
    min_client_size = checks.whole("min_client_size", min_client_size, 0, num_examples // num_clients)
    q = rng.dirichlet(np.full(num_clients, alpha))
    sizes = min_client_size + _apportion(num_examples - num_clients * min_client_size, q)
    return assemble(np.split(rng.permutation(num_examples), np.cumsum(sizes)[:-1]))


def of(clients: Any, num_examples: int = checks.MAX_INDEX) -> Partition:
    """The partition in which each client holds the examples that ``clients`` lists for it, in that order.

    ``clients`` is a ``Partition``, a sequence of index arrays, or a mapping from each client's name to them, whose
    order is that of the clients. Clients may overlap, and may be empty. Raises ``ValueError`` for anything else, and
    for indices that are not among ``num_examples``.
    """
    if not isinstance(clients, Partition):
        clients = _of_lists(clients)
    validate(clients, num_examples)
    return Partition(np.asarray(clients.indices, np.int32), np.asarray(clients.offsets, np.int32))


def _of_lists(clients: Any) -> Partition:
    is_list = isinstance(clients, Sequence | np.ndarray) and not isinstance(clients, str | bytes)
    named = clients if isinstance(clients, Mapping) else dict(enumerate(clients)) if is_list else None
    if not named:
        raise ValueError(f"partition: got {clients!r:.60}, must be a Partition or lists of indices, one or more")
    parts = {}
    for name, rows in named.items():
        parts[name] = np.asarray(rows) if np.size(rows) else np.zeros(0, np.int32)
        if parts[name].ndim != 1 or not np.issubdtype(parts[name].dtype, np.integer):
            raise ValueError(f"partition: got {rows!r:.60} for client {name!r}, must be a list of whole numbers")
    return Partition(np.concatenate(list(parts.values())), np.cumsum([0, *map(len, parts.values())]))


def validate(partition: Partition, num_examples: int, exact: bool = False) -> None:
    """Raise ``ValueError`` unless ``partition`` is a well-formed map of clients into ``num_examples`` examples.

    There is at least one client; offsets start at 0, never fall and end at ``len(indices)``; indices are in range.
    Clients may be empty and may share examples, but for ``exact``: every example belongs to exactly one client.
    """
    num_examples = checks.whole("num_examples", num_examples)
    if not (hasattr(partition, "indices") and hasattr(partition, "offsets")):
        raise ValueError(f"partition: got a {type(partition).__name__}, must be a Partition (partition.of makes one)")
    indices, offsets = (np.asarray(a) for a in (partition.indices, partition.offsets))
    for name, array in (("indices", indices), ("offsets", offsets)):
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"partition.{name}: got shape {array.shape}, dtype {array.dtype}, must be a 1-D array of whole numbers"
            )
    if len(offsets) < 2:
        raise ValueError(f"partition.offsets: got {len(offsets)} entries, must be num_clients + 1, at least 2")
    if offsets[0] != 0 or offsets[-1] != len(indices):
        raise ValueError(
            f"partition.offsets: got {offsets[0]} to {offsets[-1]}, must be from 0 to len(indices) = {len(indices)}"
        )
    if (falls := np.flatnonzero(offsets[1:] < offsets[:-1])).size:
        i = int(falls[0])
        raise ValueError(f"partition.offsets: got {offsets[i : i + 2].tolist()} at {i}, must never fall")
    wrong = (indices < 0) | (indices >= num_examples)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"partition.indices: got {indices[at]} at position {at}, must be from 0 to {num_examples - 1}, "
            f"one of {num_examples} examples"
        )
    if exact and ((held := np.bincount(indices, minlength=num_examples)) != 1).any():
        at = int(np.argmax(held != 1))
        raise ValueError(
            f"partition: got example {at} {held[at]} times ({int((held != 1).sum())} such), must give each of "
            f"{num_examples} examples to exactly one client"
        )


def heterogeneity(partition: Partition, labels: Any) -> Heterogeneity:
    """Statistics of ``partition`` for ``labels`` [n], integers from 0 to C - 1; see ``Heterogeneity``.

    Raises ``ValueError`` for a malformed partition, one without any example, labels out of range, or so large that
    the table [N, C] would exceed 2**26 entries.
    """
    labels = checks.class_labels("labels", labels)
    validate(partition, len(labels))
    if len(partition.indices) == 0:
        raise ValueError("partition: got empty clients only, must hold at least one example")
    sizes, num_classes = partition.sizes, int(labels.max()) + 1
    if partition.num_clients * num_classes > MAX_CELLS:
        raise ValueError(
            f"labels: got {num_classes - 1} as the largest, must number the classes from 0: a table of "
            f"{partition.num_clients * num_classes} shares would be needed, at most {MAX_CELLS} are allowed"
        )
    owner = np.repeat(np.arange(partition.num_clients), sizes)
    cell = owner * num_classes + labels[partition.indices].astype(np.int64)
    counts = np.bincount(cell, minlength=partition.num_clients * num_classes).reshape(-1, num_classes)
    share = counts / np.maximum(sizes, 1)[:, None]
    held = share[sizes > 0]
    overall = counts.sum(axis=0) / counts.sum()
    variation = float(np.abs(held - overall).sum(axis=1).mean() / 2)
    return Heterogeneity(share, variation, float(held.max(axis=1).mean()))


def generator(seed: int) -> np.random.Generator:
    """The generator of ``seed``, from 0 to 2^32 - 1; raises ``ValueError``."""
    return np.random.Generator(np.random.PCG64(checks.seed(seed)))


def _clients(num_clients: int, num_examples: int) -> int:
    checks.whole("num_examples", num_examples)
    return checks.whole("num_clients", num_clients, 1, num_examples)


def assemble(parts: Sequence[np.ndarray]) -> Partition:
    """The partition of the given clients, each client's indices in ascending order."""
    sizes = [len(p) for p in parts]
    indices = np.concatenate([np.sort(p) for p in parts]).astype(np.int32)
    return Partition(indices, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))


def _apportion(total: int, shares: np.ndarray) -> np.ndarray:
    """``total`` divided into integers in proportion to ``shares`` (which sum to 1), by largest remainder."""
    exact = total * shares
    whole = np.floor(exact).astype(np.int64)
    rest = total - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:rest]] += 1
    return whole


def _deal_classes(rng: np.random.Generator, slots: np.ndarray, num_clients: int, per_client: int) -> list[list[int]]:
    """For each class its clients, ``slots[c]`` of them; every client gets ``per_client`` different classes.

    Always possible: no class has more slots left than clients remain, since one that has as many is taken at once.
    """
    slots = slots.copy()
    holders: list[list[int]] = [[] for _ in slots]
    for turn, client in enumerate(rng.permutation(num_clients)):
        forced = np.flatnonzero(slots == num_clients - turn)
        weights = np.where(slots == num_clients - turn, 0, slots)
        free = per_client - len(forced)
        drawn = rng.choice(len(slots), free, replace=False, p=weights / weights.sum()) if free else forced[:0]
        for c in np.concatenate([forced, drawn]):
            slots[c] -= 1
            holders[c].append(int(client))
    return holders


def _split_clients(
    rng: np.random.Generator, pools: list[np.ndarray], num_clients: int, concentration: np.ndarray
) -> list[np.ndarray]:
    """Equal clients, one after another in random order, each drawing its label shares and then its examples."""
    num_examples = sum(len(p) for p in pools)
    base, extra = divmod(num_examples, num_clients)
    used, parts = np.zeros(len(pools), np.int64), [np.empty(0, np.int64)] * num_clients
    available = np.array([len(p) for p in pools])
    for client in rng.permutation(num_clients):
        counts = _draw_counts(rng, base + (client < extra), available - used, rng.dirichlet(concentration))
        parts[client] = np.concatenate([p[u : u + k] for p, u, k in zip(pools, used, counts, strict=True)])
        used += counts
    return parts


def _draw_counts(rng: np.random.Generator, size: int, pool: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """How many examples of each class a client draws, [C]: ``size`` draws from ``shares``, without replacement.

    The same law as drawing one label at a time and renormalising ``shares`` when a class is used up: what a
    multinomial draw takes beyond the pool is drawn again from the other classes. If no class that is left has any
    share, the rest comes from what the pool holds.
    """
    counts = np.zeros_like(pool)
    while (missing := size - int(counts.sum())) > 0:
        left = pool - counts
        weights = np.where(left > 0, shares, 0.0)
        if weights.sum() <= 0:
            weights = left.astype(np.float64)
        counts += np.minimum(rng.multinomial(missing, weights / weights.sum()), left)
    return counts


def _majority_counts(pool: np.ndarray, num_clients: int, share: float) -> np.ndarray:
    """How many examples of each class a client gets, [N, C]: the most that ``pool`` [C] has room for."""
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


def _split_classes(
    rng: np.random.Generator, pools: list[np.ndarray], num_clients: int, alpha: float
) -> list[np.ndarray]:
    """Each class divided among all clients in its own Dirichlet shares."""
    pieces = []
    for pool in pools:
        sizes = _apportion(len(pool), rng.dirichlet(np.full(num_clients, alpha)))
        pieces.append(np.split(pool, np.cumsum(sizes)[:-1]))
    return [np.concatenate(own) for own in zip(*pieces, strict=True)]


def _fill_up(rng: np.random.Generator, parts: list[np.ndarray], min_client_size: int) -> list[np.ndarray]:
    """Move random examples, one at a time, from the largest client to the smallest until all have enough."""
    clients, sizes = [p.tolist() for p in parts], np.array([len(p) for p in parts])
    while sizes.min() < min_client_size:
        poor, rich = int(sizes.argmin()), int(sizes.argmax())
        clients[poor].append(clients[rich].pop(int(rng.integers(sizes[rich]))))
        sizes[poor] += 1
        sizes[rich] -= 1
    return [np.array(c, np.int64) for c in clients]


@dataclasses.dataclass(frozen=True)
class ClientsOptions:
    """Options of partitions into any number of clients."""

    num_clients: int = 20
    """Clients N."""


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


@dataclasses.dataclass(frozen=True)
class SkewOptions(ClientsOptions):
    """Options of shares that are drawn from a Dirichlet distribution."""

    alpha: float = 0.5
    """Dirichlet concentration: smaller is more heterogeneous."""
    min_client_size: int = 1
    """Fewest examples of a client."""


@dataclasses.dataclass(frozen=True)
class DirichletOptions(SkewOptions):
    """Options of dirichlet."""

    dirichlet_method: str = "per_client"
    """per_client or hsu (each client draws its label shares), or per_class (each class is divided among clients)."""


def _labels(dataset: Dataset) -> Any:
    if dataset.num_classes == 0:
        raise ValueError(f"partition: got one by class labels, must be another: the data set {dataset.name} has none")
    return dataset.y_train


def _users(dataset: Dataset) -> Any:
    if dataset.user_train is None:
        raise ValueError(f"partition: got 'by_user', must be another: the data set {dataset.name} has no users")
    return dataset.user_train


def _of_labels(function: Callable[..., Partition]) -> Callable[[Any, Dataset, int], Partition]:
    """``build`` for an entry whose options are the arguments of a partitioner by labels."""
    return lambda options, dataset, seed: function(_labels(dataset), seed=seed, **vars(options))


def _of_number(function: Callable[..., Partition]) -> Callable[[Any, Dataset, int], Partition]:
    return lambda options, dataset, seed: function(len(dataset.x_train), seed=seed, **vars(options))


ENTRIES = (
    Entry("iid", "examples dealt at random", _of_number(iid), ClientsOptions),
    Entry(
        "shards",
        "sorted by label, --shards-per-client shards each",
        _of_labels(shards),
        ShardsOptions,
        ("mcmahan2017",),
    ),
    Entry("classes", "exactly --classes-per-client classes a client", _of_labels(classes), ClassesOptions),
    Entry("dirichlet", "label shares from Dirichlet(--alpha)", _of_labels(dirichlet), DirichletOptions),
    Entry("by_user", "one client for each natural user", lambda options, dataset, seed: by_user(_users(dataset))),
    Entry(
        "majority",
        "a client has --share of its data from one class",
        _of_labels(majority),
        MajorityOptions,
        ("localgd",),
    ),
    Entry("quantity_skew", "random examples, sizes from Dirichlet(--alpha)", _of_number(quantity_skew), SkewOptions),
)
