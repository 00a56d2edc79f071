"""A seed stands for its partition: against plain Python that makes the same draws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedtangent._src.data import partition

from ..clients import lists

BALANCED = np.arange(1000) % 10

MAKERS = {
    "iid": lambda seed: partition.iid(1000, 30, seed),
    "shards": lambda seed: partition.shards(BALANCED, 30, 2, seed),
    "classes": lambda seed: partition.classes(BALANCED, 30, 2, seed),
    "per_client": lambda seed: partition.dirichlet(BALANCED, 30, 0.3, seed),
    "hsu": lambda seed: partition.dirichlet(BALANCED, 30, 0.3, seed, dirichlet_method="hsu"),
    "per_class": lambda seed: partition.dirichlet(BALANCED, 30, 0.3, seed, dirichlet_method="per_class"),
    "quantity_skew": lambda seed: partition.quantity_skew(1000, 30, 0.5, seed),
    "majority": lambda seed: partition.majority(BALANCED, 30, 0.5, seed),
}


@pytest.mark.parametrize("name", MAKERS)
def test_same_seed_same_partition_other_seed_other_partition(name):
    first, again, *others = (lists(MAKERS[name](seed)) for seed in (0, 0, 1, 2))
    assert first == again and first not in others and others[0] != others[1]


def pieces(items: list, count: int) -> list[list]:
    """``count`` pieces, the first ones longer by one."""
    base, extra = divmod(len(items), count)
    cuts = [i * base + min(i, extra) for i in range(count + 1)]
    return [items[a:b] for a, b in itertools.pairwise(cuts)]


def largest_remainder(total: int, shares: list[float]) -> list[int]:
    sizes = [int(total * s) for s in shares]
    for i in sorted(range(len(shares)), key=lambda i: (sizes[i] - total * shares[i], i))[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes


def plain_iid(rng, labels, clients):
    return pieces(rng.permutation(len(labels)).tolist(), clients)


def plain_shards(rng, labels, clients):
    by_label = sorted(range(len(labels)), key=lambda i: (labels[i], i))
    cut, deal = pieces(by_label, 2 * clients), rng.permutation(2 * clients).tolist()
    return [cut[deal[2 * i]] + cut[deal[2 * i + 1]] for i in range(clients)]


def plain_pools(rng, labels):
    return [rng.permutation([i for i, k in enumerate(labels) if k == c]).tolist() for c in sorted(set(labels))]


def plain_per_client(rng, labels, clients, alpha=0.3):
    pools = plain_pools(rng, labels)
    sizes = [len(p) for p in pieces(list(labels), clients)]
    concentration = [alpha * len(p) / len(labels) * len(pools) for p in pools]
    result: list[list[int]] = [[] for _ in range(clients)]
    for client in rng.permutation(clients).tolist():
        q, counts = rng.dirichlet(concentration).tolist(), [0] * len(pools)
        while sum(counts) < sizes[client]:
            weights = [w if len(p) > k else 0.0 for w, p, k in zip(q, pools, counts, strict=True)]
            total = float(np.sum(weights))
            assert total > 0
            draw = rng.multinomial(sizes[client] - sum(counts), [w / total for w in weights]).tolist()
            counts = [min(k + d, len(p)) for k, d, p in zip(counts, draw, pools, strict=True)]
        for c, k in enumerate(counts):
            result[client] += pools[c][:k]
            pools[c] = pools[c][k:]
    return result


def plain_per_class(rng, labels, clients):
    result: list[list[int]] = [[] for _ in range(clients)]
    for pool in plain_pools(rng, labels):
        for own, k in zip(result, largest_remainder(len(pool), rng.dirichlet([0.3] * clients).tolist()), strict=True):
            own += pool[:k]
            pool = pool[k:]
    while min(map(len, result)) < 1:
        poor = min(range(clients), key=lambda i: (len(result[i]), i))
        rich = min(range(clients), key=lambda i: (-len(result[i]), i))
        result[poor].append(result[rich].pop(int(rng.integers(len(result[rich])))))
    return result


def plain_quantity_skew(rng, labels, clients):
    n = len(labels)
    sizes = [1 + k for k in largest_remainder(n - clients, rng.dirichlet([0.5] * clients).tolist())]
    order = rng.permutation(n).tolist()
    return [[order.pop(0) for _ in range(k)] for k in sizes]


def plain_hsu(rng, labels, clients):
    return plain_per_client(rng, labels, clients, alpha=0.3 / len(set(labels)))


def plain_classes(rng, labels, clients):
    base, extra = divmod(2 * clients, 10)
    slots = [base + (place < extra) for place in rng.permutation(10).tolist()]
    holders: list[list[int]] = [[] for _ in slots]
    for turn, client in enumerate(rng.permutation(clients).tolist()):
        chosen = [c for c in range(10) if slots[c] == clients - turn]
        weights = [0 if c in chosen else slots[c] for c in range(10)]
        if len(chosen) < 2:
            total = sum(weights)
            chosen += rng.choice(10, 2 - len(chosen), replace=False, p=[w / total for w in weights]).tolist()
        for c in chosen:
            slots[c] -= 1
            holders[c].append(client)
    result: list[list[int]] = [[] for _ in range(clients)]
    for c in range(10):
        examples = rng.permutation([i for i, k in enumerate(labels) if k == c]).tolist()
        for client, own in zip(rng.permutation(holders[c]).tolist(), pieces(examples, len(holders[c])), strict=True):
            result[client] += own
    return result


def plain_majority(rng, labels, clients):
    pools, size = plain_pools(rng, labels), len(labels) // clients
    result: list[list[int]] = [[] for _ in range(clients)]
    for c in range(10):
        for i in range(clients):  # 17 of the own class; 16 others, two of each of the seven that follow it
            step = (c - i - 1) % 10
            taken = 17 if step == 9 else 2 if step < 7 else 1
            result[i] += pools[c][:taken]
            pools[c] = pools[c][taken:]
    assert size == 33 and [len(p) for p in pools] == [1] * 10
    return result


PLAIN = {
    "iid": plain_iid,
    "shards": plain_shards,
    "classes": plain_classes,
    "per_client": plain_per_client,
    "hsu": plain_hsu,
    "per_class": plain_per_class,
    "quantity_skew": plain_quantity_skew,
    "majority": plain_majority,
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("seed", [0, 11])
def test_fingerprint_against_plain_python(name, seed):
    rng = np.random.Generator(np.random.PCG64(seed))
    clients = [sorted(own) for own in PLAIN[name](rng, BALANCED.tolist(), 30)]
    assert lists(MAKERS[name](seed)) == clients
