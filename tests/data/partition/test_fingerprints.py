"""A seed stands for its partition: against plain Python that makes the same draws, and pinned."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest

from fedtangent._src.data import partition
from fedtangent._src.types import Partition

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


def sha256(p: Partition) -> str:
    """Fingerprint: N as 8 bytes, then offsets and indices as 4 bytes each, all little-endian."""
    parts = np.array(p.num_clients, "<i8"), p.offsets.astype("<i4"), p.indices.astype("<i4")
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def lists(p: Partition) -> list[list[int]]:
    return [p.client(i).tolist() for i in range(p.num_clients)]


@pytest.mark.parametrize("name", MAKERS)
def test_same_seed_same_partition_other_seed_other_partition(name):
    prints = [sha256(MAKERS[name](seed)) for seed in (0, 0, 1, 2)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


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

# Made by PLAIN and pinned: a partition must not change silently, because a seed stands for it in a configuration.
PINNED = {
    "iid": "f1126b85dad911b06c257a2b31c797f6bc108374bc5bd56b28c4b469f957a1a6",
    "shards": "34423c68f4622ff79cc4cab1e2af5187d846010d42fcc48d9d8ba8358dea0de8",
    "classes": "25db7017962bf2c379e295d65dfbc563e2c8f25f7187e13fc931d9f6cc51bf89",
    "per_client": "ded3768cc6fbc5b56b544d211e0c10c9e28a756adcad944ff93a92e9bc43799d",
    "hsu": "062598cf5235ebb72c457430b8e24201f5815cb1b362bfa4bfa62e5a7794cc25",
    "per_class": "72fafb9d7a61b01d64f781085a30f8d42deb62f15c7794da58bc52e5c73042fc",
    "quantity_skew": "ca7e4f13a6a776986cc6116b305c67ed3cc480c3918588a75a65d27e114e228f",
    "majority": "c13c0d6345a2fa3096fadef1ee22a8af43c26f1408f52a6967763b6c1b931a76",
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("seed", [0, 11])
def test_fingerprint_against_plain_python(name, seed):
    rng = np.random.Generator(np.random.PCG64(seed))
    clients = [sorted(own) for own in PLAIN[name](rng, BALANCED.tolist(), 30)]
    assert lists(MAKERS[name](seed)) == clients


@pytest.mark.parametrize("name", MAKERS)
def test_fingerprint_has_not_changed(name):
    assert sha256(MAKERS[name](0)) == PINNED[name]
