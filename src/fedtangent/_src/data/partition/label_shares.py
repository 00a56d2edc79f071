"""Partitions in which the clients' shares of the labels are drawn from a Dirichlet distribution."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from fedtangent._src import checks
from fedtangent._src.data.partition import drawn
from fedtangent._src.entries import Entry
from fedtangent._src.types import ArrayLike, Partition

METHODS = ("per_client", "hsu", "per_class")


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
      ``Dir(alpha)`` of the NTK-FL paper (section 6, "symmetric Dirichlet distribution"), whose authors' client maps
      have the label statistics of one ``alpha`` per class.
    - ``"hsu"``: the same with ``q_i ~ Dir(alpha p)``, as Hsu et al. print it: C times the heterogeneity parameter.
    - ``"per_class"``: each class is divided among the clients by ``Dir(alpha, .., alpha)`` over clients (Yurochkin et
      al., 2019), so sizes differ too. Clients below ``min_client_size`` take random examples from the largest ones.

    The examples left for a client depend on the clients before it, so clients draw in random order.

    Args:
        labels: Class labels [n].
        num_clients: Number of clients.
        alpha: Concentration, within [1e-9, 1e9].
        seed: Seed of the draw.
        min_client_size: Fewest examples of a client.
        dirichlet_method: One of the methods above.

    Raises:
        ValueError: ``alpha`` is out of range, or ``min_client_size`` exceeds the examples of an average client.

    Example:

        >>> import fedtangent as ft
        >>> labels = ft.data.load("digits", num_train=200).y_train
        >>> clients = ft.partition.dirichlet(labels, num_clients=8, alpha=0.1, seed=0)
        >>> clients.num_clients, clients.sizes.tolist()
        (8, [25, 25, 25, 25, 25, 25, 25, 25])
    """
    labels = checks.class_labels("labels", labels)
    checks.number("alpha", alpha, **drawn.ALPHA)
    checks.choice("dirichlet_method", dirichlet_method, METHODS)
    num_clients, rng = drawn.checked_clients(num_clients, len(labels)), drawn.generator(seed)
    min_client_size = checks.whole("min_client_size", min_client_size, 0, len(labels) // num_clients)
    _, kind = np.unique(labels, return_inverse=True)
    pools = [rng.permutation(np.flatnonzero(kind == c)) for c in range(kind.max() + 1)]
    if dirichlet_method == "per_class":
        return drawn.assemble(_fill_up(rng, _split_classes(rng, pools, num_clients, alpha), min_client_size))
    shares = np.bincount(kind) / len(labels)
    concentration = alpha * shares * (len(pools) if dirichlet_method == "per_client" else 1)
    return drawn.assemble(_split_clients(rng, pools, num_clients, concentration))


def _split_clients(
    rng: np.random.Generator, pools: list[Int[np.ndarray, "_"]], num_clients: int, concentration: Float[np.ndarray, "C"]
) -> list[Int[np.ndarray, "_"]]:
    """Fills clients of equal size in random order: each draws its label shares and then its examples."""
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
    """Draws the number of a client's examples of each class, [C]: ``size`` draws from ``shares``, without replacement.

    The law is the same as when labels are drawn one at a time and ``shares`` is renormalised when a class is used up:
    draws beyond the pool are repeated among the other classes. If no remaining class has a share, the rest is drawn
    from the pool.
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
    """Divides each class among all clients in its own Dirichlet shares."""
    pieces = []
    for pool in pools:
        sizes = drawn.apportion(len(pool), rng.dirichlet(np.full(num_clients, alpha)))
        pieces.append(np.split(pool, np.cumsum(sizes)[:-1]))
    return [np.concatenate(parts) for parts in zip(*pieces, strict=True)]


def _fill_up(
    rng: np.random.Generator, parts: list[Int[np.ndarray, "_"]], min_client_size: int
) -> list[Int[np.ndarray, "_"]]:
    """Moves random examples, one at a time, from the largest client to the smallest until all have enough."""
    clients, sizes = [p.tolist() for p in parts], np.array([len(p) for p in parts])
    while sizes.min() < min_client_size:
        poor, rich = int(sizes.argmin()), int(sizes.argmax())
        clients[poor].append(clients[rich].pop(int(rng.integers(sizes[rich]))))
        sizes[poor] += 1
        sizes[rich] -= 1
    return [np.array(c, np.int64) for c in clients]


@dataclasses.dataclass(frozen=True)
class DirichletOptions(drawn.SkewOptions):
    """Options of dirichlet."""

    dirichlet_method: str = "per_client"
    """per_client or hsu (each client draws its label shares), or per_class (each class is divided among clients)."""


ENTRIES = (
    Entry(
        "dirichlet",
        "label shares from Dirichlet(--alpha)",
        lambda options, dataset, seed: dirichlet(drawn.labels_of(dataset), seed=seed, **vars(options)),
        DirichletOptions,
    ),
)
