"""Partitions that are drawn at random: with equal or random sizes, few classes a client, or random label shares."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from fedtangent._src import checks
from fedtangent._src.data.dataset import Dataset
from fedtangent._src.entries import Entry
from fedtangent._src.types import ArrayLike, Partition

ALPHA = {"at_least": 1e-9, "at_most": 1e9}  # of a Dirichlet distribution: outside, gamma variates underflow or overflow
METHODS = ("per_client", "hsu", "per_class")


@dataclasses.dataclass(frozen=True)
class ClientsOptions:
    """Options of a partition: the number of clients."""

    num_clients: int = 20
    """Clients N."""


@dataclasses.dataclass(frozen=True)
class SkewOptions(ClientsOptions):
    """Options of partitions by Dirichlet shares: the concentration and the smallest size of a client."""

    alpha: float = 0.5
    """Dirichlet concentration: smaller is more heterogeneous."""
    min_client_size: int = 1
    """Fewest examples of a client."""


@dataclasses.dataclass(frozen=True)
class DirichletOptions(SkewOptions):
    """Options of the partition ``dirichlet``: which of its methods draws the shares."""

    dirichlet_method: str = "per_client"
    """per_client (clients draw label shares), hsu (the same, Dir(alpha p)), or per_class (each class is divided)."""


@dataclasses.dataclass(frozen=True)
class ShardsOptions(ClientsOptions):
    """Options of the partition ``shards``: the number of shards of a client."""

    shards_per_client: int = 2
    """Shards of a client."""


@dataclasses.dataclass(frozen=True)
class ClassesOptions(ClientsOptions):
    """Options of the partition ``classes``: the number of classes of a client."""

    classes_per_client: int = 2
    """Classes of a client."""


@dataclasses.dataclass(frozen=True)
class MajorityOptions(ClientsOptions):
    """Options of the partition ``majority``: the share of a client's main class."""

    share: float = 0.5
    """Share of a client's main class in its examples."""


def generator(seed: int) -> np.random.Generator:
    """Creates the random generator of ``seed``, from 0 to 2^32 - 1; raises ``ValueError`` for other seeds."""
    return np.random.Generator(np.random.PCG64(checks.seed(seed)))


def _checked_clients(num_clients: int, num_examples: int) -> int:
    """Returns ``num_clients``; raises ``ValueError`` unless it is from 1 to the number of examples."""
    checks.whole("num_examples", num_examples)
    return checks.whole("num_clients", num_clients, 1, num_examples)


def assemble(parts: Sequence[Int[np.ndarray, "_"]]) -> Partition:
    """Builds a ``Partition`` from the indices of each client's examples, which it sorts."""
    sizes = [len(p) for p in parts]
    indices = np.concatenate([np.sort(p) for p in parts]).astype(np.int32)
    return Partition(indices, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))


def _apportion(total: int, shares: Float[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """Divides ``total`` into whole numbers in proportion to ``shares`` (which sum to 1), by largest remainder."""
    exact = total * shares
    whole = np.floor(exact).astype(np.int64)
    rest = total - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:rest]] += 1
    return whole


# ---- without regard to labels ----


def iid(num_examples: int, num_clients: int, seed: int) -> Partition:
    """Divides the examples among clients at random; sizes are equal to within one (the first clients are larger).

    Args:
        num_examples: Number of examples n.
        num_clients: Number of clients N.
        seed: Seed of the random order.

    Raises:
        ValueError: There are more clients than examples, or a number or the seed is out of range.
    """
    num_clients, rng = _checked_clients(num_clients, num_examples), generator(seed)
    return assemble(np.array_split(rng.permutation(num_examples), num_clients))


def quantity_skew(num_examples: int, num_clients: int, alpha: float, seed: int, min_client_size: int = 1) -> Partition:
    """Gives clients random examples and sizes from a Dirichlet distribution, so that only sizes differ, not labels.

    Each client gets ``min_client_size`` examples; the rest is divided by ``q ~ Dir(alpha, .., alpha)`` over clients,
    rounded to whole examples by largest remainder.

    Args:
        num_examples: Number of examples n.
        num_clients: Number of clients N.
        alpha: Concentration, within [1e-9, 1e9]; a smaller number makes sizes less alike.
        seed: Seed of the draw.
        min_client_size: Fewest examples of a client.

    Raises:
        ValueError: There are more clients than examples, ``alpha`` or the seed is out of range, or ``min_client_size``
            exceeds the examples of an average client.
    """
    checks.number("alpha", alpha, **ALPHA)
    num_clients, rng = _checked_clients(num_clients, num_examples), generator(seed)
    min_client_size = checks.whole("min_client_size", min_client_size, 0, num_examples // num_clients)
    q = rng.dirichlet(np.full(num_clients, alpha))
    sizes = min_client_size + _apportion(num_examples - num_clients * min_client_size, q)
    return assemble(np.split(rng.permutation(num_examples), np.cumsum(sizes)[:-1]))


# ---- few classes, or one above all ----


def shards(labels: ArrayLike, num_clients: int, shards_per_client: int, seed: int) -> Partition:
    """Sorts examples by label, cuts them into equal shards and deals these at random (McMahan et al., 2017, section 3).

    The ``num_clients * shards_per_client`` shards have equal sizes to within one. A shard can hold two classes, so that
    a client has more classes than shards; with ``classes`` this cannot happen.

    Args:
        labels: Class labels [n].
        num_clients: Number of clients.
        shards_per_client: Number of shards of a client.
        seed: Seed of the deal.

    Raises:
        ValueError: There are more shards than examples, or labels, a number or the seed are invalid.
    """
    labels = checks.class_labels("labels", labels)
    num_clients, rng = _checked_clients(num_clients, len(labels)), generator(seed)
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
    """Gives each client exactly ``classes_per_client`` classes (the Fed-ensemble papers' "exactly two labels").

    Every class goes to the same number of clients (to within one), who divide its examples equally at random.

    Args:
        labels: Class labels [n].
        num_clients: Number of clients.
        classes_per_client: Number of classes of a client.
        seed: Seed of the draw.

    Raises:
        ValueError: A client would need more classes than there are, a class would go to no client, a class has fewer
            examples than clients that drew it, or labels, a number or the seed are invalid.
    """
    labels = checks.class_labels("labels", labels)
    num_clients, rng = _checked_clients(num_clients, len(labels)), generator(seed)
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
    """Draws which clients get each class: ``per_client`` different classes a client, ``slots[c]`` clients for class c.

    Returns a list of clients for each class.
    """
    slots = slots.copy()
    holders: list[list[int]] = [[] for _ in slots]
    for turn, client in enumerate(rng.permutation(num_clients)):
        forced = np.flatnonzero(slots == num_clients - turn)  # every further client must take them: a deal always ends
        weights = np.where(slots == num_clients - turn, 0, slots)
        free = per_client - len(forced)
        others = rng.choice(len(slots), free, replace=False, p=weights / weights.sum()) if free else forced[:0]
        for c in np.concatenate([forced, others]):
            slots[c] -= 1
            holders[c].append(int(client))
    return holders


def majority(labels: ArrayLike, num_clients: int, share: float = 0.5, seed: int = 0) -> Partition:
    """Gives each client a main class with ``share`` of its data (a half in section 5 of the Local-GD paper).

    The main class of client i is number ``i mod C`` of the C classes. All clients hold the same number m of examples:
    ``share * m`` (rounded) of the main class, and the rest evenly from all other classes, to within one (the classes
    after the main one come first). m is as large as the classes allow; the other examples belong to no client.

    Args:
        labels: Class labels [n].
        num_clients: Number N of clients.
        share: Share of the main class, in (0, 1].
        seed: Seed of the draw.

    Raises:
        ValueError: The share is out of range, there are fewer than two classes, classes are too small for one example
            of each client, or labels, a number or the seed are invalid.
    """
    labels = checks.class_labels("labels", labels)
    checks.number("share", share, above=0, at_most=1)
    num_clients, rng = _checked_clients(num_clients, len(labels)), generator(seed)
    _, kind = np.unique(labels, return_inverse=True)
    counts = _majority_counts(np.bincount(kind), num_clients, share)
    pools = [rng.permutation(np.flatnonzero(kind == c)) for c in range(counts.shape[1])]
    pieces = [np.split(pool, np.cumsum(sizes)) for pool, sizes in zip(pools, counts.T, strict=True)]
    return assemble([np.concatenate([piece[i] for piece in pieces]) for i in range(num_clients)])


def _majority_counts(pool: Int[np.ndarray, "C"], num_clients: int, share: float) -> Int[np.ndarray, "N C"]:
    """Computes the numbers of examples of each class that the clients of ``majority`` get, as many as possible.

    ``pool`` [C] has the number of examples of each class. Raises ``ValueError`` for a single class, and for classes too
    small for one example of each client.
    """
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


# ---- label shares from a Dirichlet distribution ----


def dirichlet(
    labels: ArrayLike,
    num_clients: int,
    alpha: float,
    seed: int,
    min_client_size: int = 1,
    dirichlet_method: str = "per_client",
) -> Partition:
    """Draws the clients' label proportions from a Dirichlet distribution; a smaller ``alpha`` makes clients less alike.

    The methods, with C classes in shares p (``alpha C p`` is ``(alpha, .., alpha)`` if classes are equally common):

    - ``"per_client"``: client i draws ``q_i ~ Dir(alpha C p)`` and its labels from ``q_i`` without replacement, ``q_i``
      being renormalised whenever a class is used up (Hsu et al., 2019). Sizes are equal to within one. This is the
      ``Dir(alpha)`` of the NTK-FL paper (section 6, "symmetric Dirichlet distribution"): the partitions that its
      authors published have the label statistics of this method.
    - ``"hsu"``: the same with ``q_i ~ Dir(alpha p)``, the formula of Hsu et al. C times the ``alpha`` of
      ``"per_client"`` gives the same distribution.
    - ``"per_class"``: each class is divided among the clients by ``Dir(alpha, .., alpha)`` over clients (Yurochkin et
      al., 2019), so sizes differ too. Clients below ``min_client_size`` take random examples from the largest ones.

    Clients draw in random order, because each draws from the examples that the clients before it left.

    Args:
        labels: Class labels [n].
        num_clients: Number of clients.
        alpha: Concentration, within [1e-9, 1e9].
        seed: Seed of the draw.
        min_client_size: Fewest examples of a client.
        dirichlet_method: One of the methods above.

    Raises:
        ValueError: There are more clients than examples, ``alpha`` is out of range, the method is unknown,
            ``min_client_size`` exceeds the examples of an average client, or labels or the seed are invalid.

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
    num_clients, rng = _checked_clients(num_clients, len(labels)), generator(seed)
    min_client_size = checks.whole("min_client_size", min_client_size, 0, len(labels) // num_clients)
    _, kind = np.unique(labels, return_inverse=True)
    pools = [rng.permutation(np.flatnonzero(kind == c)) for c in range(kind.max() + 1)]
    if dirichlet_method == "per_class":
        return assemble(_fill_up(rng, _split_classes(rng, pools, num_clients, alpha), min_client_size))
    shares = np.bincount(kind) / len(labels)
    concentration = alpha * shares * (len(pools) if dirichlet_method == "per_client" else 1)
    return assemble(_split_clients(rng, pools, num_clients, concentration))


def _split_clients(
    rng: np.random.Generator, pools: list[Int[np.ndarray, "_"]], num_clients: int, concentration: Float[np.ndarray, "C"]
) -> list[Int[np.ndarray, "_"]]:
    """Divides the examples among clients of equal size for ``dirichlet``; returns each client's indices.

    In random order, each client draws its label shares from a Dirichlet distribution, and then its examples from those
    that are still free. ``pools`` has the shuffled indices of each class; ``concentration`` [C] is the distribution's
    parameter.
    """
    num_examples = sum(len(p) for p in pools)
    base, extra = divmod(num_examples, num_clients)
    used, parts = np.zeros(len(pools), np.int64), [np.empty(0, np.int64)] * num_clients
    available = np.array([len(p) for p in pools])
    for client in rng.permutation(num_clients):
        counts = _draw_counts(rng, base + (client < extra), available - used, rng.dirichlet(concentration))
        parts[client] = np.concatenate([p[u : u + k] for p, u, k in zip(pools, used, counts, strict=True)])
        used += counts
    return parts


def _draw_counts(
    rng: np.random.Generator, size: int | np.integer, pool: Int[np.ndarray, "C"], shares: Float[np.ndarray, "C"]
) -> Int[np.ndarray, "C"]:
    """Draws the labels of one client's ``size`` examples without replacement; returns their number in each class [C].

    Labels have the probabilities ``shares`` [C], renormalised when a class is used up. ``pool`` [C] has the number of
    examples of each class that are still free. If only classes of share 0 are left, labels are drawn in proportion to
    these numbers.
    """
    counts = np.zeros_like(pool)
    while (missing := size - int(counts.sum())) > 0:
        available = pool - counts
        weights = np.where(available > 0, shares, 0.0)
        if weights.sum() <= 0:
            weights = available.astype(np.float64)
        counts += np.minimum(rng.multinomial(missing, weights / weights.sum()), available)
    return counts


def _split_classes(
    rng: np.random.Generator, pools: list[Int[np.ndarray, "_"]], num_clients: int, alpha: float
) -> list[Int[np.ndarray, "_"]]:
    """Divides each class's indices, ``pools``, by shares from Dir(alpha, .., alpha); returns each client's indices."""
    pieces = []
    for pool in pools:
        sizes = _apportion(len(pool), rng.dirichlet(np.full(num_clients, alpha)))
        pieces.append(np.split(pool, np.cumsum(sizes)[:-1]))
    return [np.concatenate(parts) for parts in zip(*pieces, strict=True)]


def _fill_up(
    rng: np.random.Generator, parts: list[Int[np.ndarray, "_"]], min_client_size: int
) -> list[Int[np.ndarray, "_"]]:
    """Moves random examples from the largest client to the smallest until all clients have ``min_client_size``.

    ``parts``, and the result, have the indices of each client's examples.
    """
    clients, sizes = [p.tolist() for p in parts], np.array([len(p) for p in parts])
    while sizes.min() < min_client_size:
        poor, rich = int(sizes.argmin()), int(sizes.argmax())
        clients[poor].append(clients[rich].pop(int(rng.integers(sizes[rich]))))
        sizes[poor] += 1
        sizes[rich] -= 1
    return [np.array(c, np.int64) for c in clients]


@runtime_checkable
class Partitioner(Protocol):
    """A function that divides examples among clients."""

    __name__: str

    def __call__(self, examples: Any, /, *arguments: Any, **options: Any) -> Partition:
        """Divides the examples among the clients.

        Args:
            examples: Class labels [n], or the number of examples n.
            arguments: Further positional arguments of the function; the catalogue passes none.
            options: ``seed``, ``num_clients`` and the further options of this partition, such as ``alpha``.
        """


def _entry(function: Partitioner, summary: str, options: type[ClientsOptions], *papers: str) -> Entry:
    """Builds the catalogue entry of a partitioner such as ``iid``.

    The entry's ``build`` raises ``ValueError`` if the partitioner takes labels and the data set has no classes.

    Args:
        function: The partitioner, whose first argument is ``labels`` or ``num_examples``.
        summary: Description in one line.
        options: Dataclass of its options.
        papers: Keys of its papers.
    """
    takes_labels = "labels" in inspect.signature(function).parameters

    def build(chosen: ClientsOptions, dataset: Dataset, seed: int) -> Partition:
        if takes_labels and dataset.num_classes == 0:
            raise ValueError(
                f"partition: got {function.__name__}, must be another: the data set {dataset.name} has no class labels"
            )
        return function(dataset.y_train if takes_labels else len(dataset.x_train), seed=seed, **vars(chosen))

    return Entry(function.__name__, summary, build, options, papers)


ENTRIES = (
    _entry(iid, "examples dealt at random", ClientsOptions),
    _entry(quantity_skew, "random examples, sizes from Dirichlet(--alpha)", SkewOptions),
    _entry(shards, "sorted by label, --shards-per-client shards each", ShardsOptions, "mcmahan2017"),
    _entry(classes, "exactly --classes-per-client classes a client", ClassesOptions),
    _entry(majority, "a client has --share of its data from one class", MajorityOptions, "localgd"),
    _entry(dirichlet, "label shares from Dirichlet(--alpha)", DirichletOptions),
)
