from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtangent._src.data import load, partition
from fedtangent._src.data.partition.drawn import METHODS, DirichletOptions
from fedtangent._src.entries import NoOptions, catalogue, choose
from fedtangent._src.types import Partition

from ..clients import lists

labels_of_any_kind = st.lists(st.integers(0, 6), min_size=1, max_size=120)
seeds = st.integers(0, 2**32 - 1)


def assert_partition(p: Partition, num_examples: int, num_clients: int) -> None:
    """Well-formed, int32, every index exactly once (by sorting, not by the code's own check), clients in order."""
    assert p.indices.dtype == p.offsets.dtype == np.int32
    assert p.num_clients == num_clients and p.offsets[0] == 0 and p.offsets[-1] == num_examples
    assert sorted(p.indices.tolist()) == list(range(num_examples))
    assert all(own == sorted(own) for own in lists(p))
    partition.validate(p, num_examples, exact=True)


def even(p: Partition) -> bool:
    return p.sizes.max() - p.sizes.min() <= 1


@given(st.data(), st.integers(1, 300), seeds)
def test_iid(data, n, seed):
    clients = data.draw(st.integers(1, n))
    p = partition.iid(n, clients, seed)
    assert_partition(p, n, clients)
    assert even(p)


@given(st.data(), labels_of_any_kind, seeds)
def test_shards(data, labels, seed):
    n = len(labels)
    per_client = data.draw(st.integers(1, n))
    clients = data.draw(st.integers(1, n // per_client))
    p = partition.shards(np.array(labels), clients, per_client, seed)
    assert_partition(p, n, clients)
    shortest = n // (clients * per_client)
    assert p.sizes.min() >= per_client * shortest and p.sizes.max() <= per_client * (shortest + 1)
    # a shard meets a further class only where it crosses a boundary of the sorted labels
    crossed = sum(len({labels[i] for i in own}) for own in lists(p)) - clients * per_client
    assert crossed <= len(set(labels)) - 1


@given(st.data(), labels_of_any_kind, seeds)
def test_classes(data, labels, seed):
    kinds = len(set(labels))
    per_client = data.draw(st.integers(1, kinds))
    clients = data.draw(st.integers(1, len(labels)))
    try:
        p = partition.classes(np.array(labels), clients, per_client, seed)
    except ValueError as error:
        smallest = min(labels.count(c) for c in set(labels))
        if "must be at least" in str(error):
            assert clients * per_client < kinds
        else:
            assert "would share a class" in str(error) and -(-clients * per_client // kinds) > smallest
        return
    assert_partition(p, len(labels), clients)
    assert {len({labels[i] for i in own}) for own in lists(p)} == {per_client}
    holders = [sum(any(labels[i] == c for i in own) for own in lists(p)) for c in set(labels)]
    assert max(holders) - min(holders) <= 1


@settings(max_examples=150)
@given(st.data(), labels_of_any_kind, seeds, st.sampled_from(METHODS), st.floats(-4, 4))
def test_dirichlet(data, labels, seed, method, exponent):
    n = len(labels)
    clients = data.draw(st.integers(1, n))
    least = data.draw(st.integers(0, n // clients))
    p = partition.dirichlet(
        np.array(labels), clients, 10.0**exponent, seed, min_client_size=least, dirichlet_method=method
    )
    assert_partition(p, n, clients)
    assert p.sizes.min() >= least
    assert method == "per_class" or even(p)


@given(st.data(), st.integers(1, 300), seeds, st.floats(-4, 4))
def test_quantity_skew(data, n, seed, exponent):
    clients = data.draw(st.integers(1, n))
    least = data.draw(st.integers(0, n // clients))
    p = partition.quantity_skew(n, clients, 10.0**exponent, seed, min_client_size=least)
    assert_partition(p, n, clients)
    assert p.sizes.min() >= least


@settings(max_examples=150)
@given(st.data(), labels_of_any_kind, seeds, st.floats(0.05, 1))
def test_majority(data, labels, seed, share):
    kinds = sorted(set(labels))
    clients = data.draw(st.integers(1, len(labels)))

    def wanted(size: int) -> list[list[int]]:
        """How many of each class each client has, counted out one by one."""
        table = []
        for i in range(clients):
            mine = i % len(kinds)
            row = [0] * len(kinds)
            row[mine] = int(np.floor(share * size + 0.5))
            for k in range(size - row[mine]):
                row[(mine + 1 + k % (len(kinds) - 1)) % len(kinds)] += 1
            table.append(row)
        return table

    def fits(size: int) -> bool:
        return all(sum(column) <= labels.count(c) for column, c in zip(np.transpose(wanted(size)), kinds, strict=True))

    if len(kinds) == 1:
        with pytest.raises(ValueError, match="labels: got one class, must be of two or more"):
            partition.majority(np.array(labels), clients, share, seed)
        return
    best = next((size for size in range(len(labels) // clients, 0, -1) if fits(size)), 0)
    if best == 0:
        with pytest.raises(ValueError, match=f"num_clients: got {clients}, must be fewer"):
            partition.majority(np.array(labels), clients, share, seed)
        return
    p = partition.majority(np.array(labels), clients, share, seed)
    held = p.indices.tolist()
    assert len(held) == len(set(held)) == clients * best and all(own == sorted(own) for own in lists(p))
    assert [[sum(labels[e] == c for e in own) for c in kinds] for own in lists(p)] == wanted(best)


def test_majority_of_equal_classes_leaves_nothing_and_does_as_the_paper():
    """Ten nodes, 5000 examples a class, as CIFAR-10: half of 5000 is one class, 277 or 278 are each of the others."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))
    p = partition.majority(labels, 10)
    assert_partition(p, 50000, 10)
    counts = np.array([np.bincount(labels[own], minlength=10) for own in lists(p)])
    assert (np.diag(counts) == 2500).all()
    assert set(counts[~np.eye(10, dtype=bool)]) == {277, 278}
    assert lists(partition.majority(labels, 10, 0.5, 1)) != lists(p)
    alike = lists(partition.iid(50000, 10, 0))
    assert all(np.mean(labels[own] == i) < 0.15 for i, own in enumerate(alike))


@given(st.lists(st.sampled_from(["f01", "f02", "g7", "", "zz"]) | st.integers(-3, 3).map(str), min_size=1, max_size=60))
def test_by_user(users):
    p = partition.by_user(users)
    assert_partition(p, len(users), len(set(users)))
    assert lists(p) == [[i for i, u in enumerate(users) if u == user] for user in sorted(set(users))]


def test_by_user_of_integers():
    assert lists(partition.by_user(jnp.array([7, -1, 7, 3]))) == [[1], [3], [0, 2]]


def test_heterogeneity_by_hand():
    p = Partition(np.array([0, 1, 2, 3, 0]), np.array([0, 3, 3, 5]))  # an empty client; example 0 twice
    h = partition.heterogeneity(p, np.array([0, 0, 1, 2], np.uint8))
    np.testing.assert_allclose(h.label_distribution, [[2 / 3, 1 / 3, 0], [0, 0, 0], [1 / 2, 0, 1 / 2]])
    overall = [3 / 5, 1 / 5, 1 / 5]
    first = (abs(2 / 3 - overall[0]) + abs(1 / 3 - overall[1]) + overall[2]) / 2
    last = (abs(1 / 2 - overall[0]) + overall[1] + abs(1 / 2 - overall[2])) / 2
    assert h.total_variation == pytest.approx((first + last) / 2, rel=1e-14)
    assert h.commonest_share == pytest.approx((2 / 3 + 1 / 2) / 2, rel=1e-14)


def test_a_given_partition_keeps_order_and_overlap():
    p = partition.of(Partition([3, 1, 1, 0], [0, 2, 4]))  # type: ignore[arg-type]
    assert p.indices.dtype == p.offsets.dtype == np.int32
    assert lists(p) == [[3, 1], [1, 0]]
    partition.validate(p, 4)
    with pytest.raises(
        ValueError,
        match=r"partition: got example 1 2 times \(2 such\), must give each of 4 examples to exactly one client",
    ):
        partition.validate(p, 4, exact=True)
    with pytest.raises(ValueError, match="got example 2 0 times"):
        partition.validate(Partition(np.array([0, 1]), np.array([0, 2])), 3, exact=True)


# ---- mistakes ----

L = np.array([0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition.iid(6, 0, 0), "num_clients: got 0, must be a whole number from 1 to 6"),
        (lambda: partition.iid(6, 7, 0), "num_clients: got 7, must be a whole number from 1 to 6"),
        (lambda: partition.iid(0, 1, 0), "num_examples: got 0, must be a whole number of at least 1"),
        (
            lambda: partition.iid(2**31, 1, 0),
            "num_examples: got 2147483648, must be a whole number from 1 to 2147483647",
        ),
        (lambda: partition.iid(6, 2.0, 0), "num_clients: got .*, must be a whole number from 1 to 6"),
        (lambda: partition.iid(6, True, 0), "num_clients: got .*, must be a whole number from 1 to 6"),
        (lambda: partition.iid(6, 2, -1), "seed: got -1, must be a whole number from 0 to 4294967295"),
        (lambda: partition.iid(6, 2, None), "seed: got None, must be a whole number from 0 to 4294967295"),
        (
            lambda: partition.shards(L, 2, 4, 0),
            r"num_clients \* shards_per_client: got 8 shards, must be at most the 6 examples",
        ),
        (lambda: partition.shards(L, 2, 0, 0), "shards_per_client: got 0, must be a whole number of at least 1"),
        (lambda: partition.shards(L, 7, 1, 0), "num_clients: got 7, must be a whole number from 1 to 6"),
        (lambda: partition.shards(L * 1.0, 2, 1, 0), r"labels: got shape \(6,\), dtype float64, must be whole numbers"),
        (
            lambda: partition.shards(L[:, None], 2, 1, 0),
            r"labels: got shape \(6,.*t64, must be whole numbers \[n\], n >= 1",
        ),
        (
            lambda: partition.shards(L[:0], 2, 1, 0),
            r"labels: got shape \(0,\), dtype int64, must be whole numbers \[n\], n >= 1",
        ),
        (lambda: partition.shards(L - 1, 2, 1, 0), r"labels: got -1 at position 0 \(2 such\), must be at least 0"),
        (lambda: partition.classes(L, 3, 4, 0), "classes_per_client: got 4, must be a whole number from 1 to 3"),
        (
            lambda: partition.classes(L, 1, 2, 0),
            r"num_clients \* classes_per_client: got 2, must be at least 3 \(classes",
        ),
        (
            lambda: partition.classes(L, 6, 2, 0),
            "num_clients: got 6, must be fewer: 4 would share a class of 2 examples",
        ),
        (lambda: partition.majority(L, 2, 0.0), r"share: got 0\.0, must be above 0 and at most 1"),
        (lambda: partition.majority(L, 2, 1.1), r"share: got 1\.1, must be above 0 and at most 1"),
        (lambda: partition.majority(L[:2], 1), "labels: got one class, must be of two or more"),
        (
            lambda: partition.majority(np.array([0, 1, 1, 1]), 3, 1.0),
            "num_clients: got 3, must be fewer: classes of 1 to 3 examples are too small",
        ),
        (lambda: partition.majority(L, 7), "num_clients: got 7, must be a whole number from 1 to 6"),
        (lambda: partition.dirichlet(L, 2, 0.0, 0), r"alpha: got 0\.0, must be at least 1e-09 and at most 1e\+09"),
        (lambda: partition.dirichlet(L, 2, -1, 0), r"alpha: got .*, must be at least 1e-09 and at most 1e\+09"),
        (lambda: partition.dirichlet(L, 2, np.nan, 0), r"alpha: got .*, must be at least 1e-09 and at most 1e\+09"),
        (lambda: partition.dirichlet(L, 2, np.inf, 0), r"alpha: got .*, must be at least 1e-09 and at most 1e\+09"),
        (lambda: partition.dirichlet(L, 2, 1e-10, 0), r"alpha: got 1.*0, must be at least 1e-09 and at most 1e\+09"),
        (lambda: partition.dirichlet(L, 2, 1e10, 0), r"alpha: got 1.*0, must be at least 1e-09 and at most 1e\+09"),
        (lambda: partition.dirichlet(L, 2, "1", 0), "alpha: got '1', must be a number"),
        (lambda: partition.dirichlet(L, 7, 1.0, 0), "num_clients: got 7, must be a whole number from 1 to 6"),
        (
            lambda: partition.dirichlet(L, 2, 1.0, 0, 4),
            "min_client_size: got 4, must be a whole number from 0 to 3",
        ),
        (
            lambda: partition.dirichlet(L, 2, 1.0, 0, -1),
            "min_client_size: got -1, must be a whole number from 0 to 3",
        ),
        (
            lambda: partition.dirichlet(L, 2, 1.0, 0, dirichlet_method="x"),
            "dirichlet_method: got 'x', allowed are per_client, hsu, per_class",
        ),
        (
            lambda: partition.dirichlet(L * 1.0, 2, 1.0, 0),
            r"labels: got shape \(6,.*t64, must be whole numbers \[n\], n >= 1",
        ),
        (lambda: partition.quantity_skew(6, 2, 0, 0), r"alpha: got .*, must be at least 1e-09 and at most 1e\+09"),
        (
            lambda: partition.quantity_skew(6, 2, 1.0, 0, 4),
            "min_client_size: got 4, must be a whole number from 0 to 3",
        ),
        (lambda: partition.quantity_skew(6, 7, 1.0, 0), "num_clients: got 7, must be a whole number from 1 to 6"),
        (
            lambda: partition.by_user([0.5, 1.0]),
            r"user_ids: got shape \(2,\), dtype float64, must be whole numbers or strings",
        ),
        (lambda: partition.by_user(np.array([1, "1"], dtype=object)), "user_ids: got whole numbers and strings"),
        (lambda: partition.by_user([["a"], ["b", "c"]]), r"user_ids: got shape \(\), dtype object, must be whole"),
        (lambda: partition.by_user([]), r"user_ids: got shape \(.*t64, must be whole numbers or strings \[n\], n >= 1"),
        (
            lambda: partition.by_user([[1, 2]]),
            r"user_ids: got shape \(.*t64, must be whole numbers or strings \[n\], n >= 1",
        ),
        (
            lambda: partition.of(Partition(np.array([0, 1]), np.array([0, 1]))),
            r"partition\.offsets: got 0 to 1, must be from 0 to len\(indices\) = 2",
        ),
        (lambda: partition.of(Partition(np.array([0, -1]), np.array([0, 2]))), "got -1 for client 0"),
        (lambda: partition.of(Partition(np.array([0, 6]), np.array([0, 2])), 6), "got 6 for client 0"),
        (lambda: partition.of(Partition(np.array([0, 1]), np.array([0, 2, 1, 2]))), "must never fall"),
        (
            lambda: partition.of(Partition(np.broadcast_to(np.int32(0), 2**31), np.array([0, 2**31]))),
            r"partition\.indices: got 2147483648 entries, must be at most 2147483647",
        ),
        (lambda: partition.heterogeneity(Partition(np.array([6]), np.array([0, 1])), L), "must be from 0 to 5"),
        (
            lambda: partition.heterogeneity(Partition(L[:0], np.array([0, 0])), L),
            "partition: got empty clients only, must hold at least one example",
        ),
        (
            lambda: partition.heterogeneity(Partition(L[:2], np.array([0, 2])), L.astype(np.int64) + 10**9),
            "labels: got 1000000002 as the largest, must number the classes without gaps from 0",
        ),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_users_as_a_column_of_strings():
    """What pandas gives: an array of dtype object, of strings or of whole numbers."""
    names = np.array(["eve", "ada", "eve", "bob"], dtype=object)
    for ids, order in ((names, [[1], [3], [0, 2]]), (np.array([7, 2, 7, 5], dtype=object), [[1], [3], [0, 2]])):
        found = partition.by_user(ids)
        assert [found.client(i).tolist() for i in range(3)] == order


@pytest.mark.parametrize("nobody", [None, float("nan"), 1.5, ["eve"]])
def test_an_example_without_a_user_is_refused(nobody):
    ids = np.empty(3, dtype=object)
    ids[:] = ["eve", nobody, "bob"]
    with pytest.raises(ValueError, match=r"user_ids: got .* at position 1 \(1 such\), must be a whole"):
        partition.by_user(ids)


@pytest.mark.parametrize("nobody", [None, float("nan"), 1.5])
def test_an_example_without_a_user_in_a_list(nobody):
    with pytest.raises(ValueError, match=r"user_ids: got .* at position 1 \(1 such\), must be a whole"):
        partition.by_user(["eve", nobody, "bob"])
    with pytest.raises(ValueError, match="user_ids: got whole numbers and strings"):
        partition.by_user(["1", 1])


def test_lists_and_mappings_are_partitions():
    lists = [[0, 2], [], np.array([1, 2])]
    for clients in (lists, {"ada": lists[0], "bob": lists[1], "eve": lists[2]}, tuple(lists)):
        found = partition.of(clients, 3)
        assert found.indices.tolist() == [0, 2, 1, 2] and found.offsets.tolist() == [0, 2, 2, 4]
        assert found.indices.dtype == np.int32
    again = partition.of(found)
    assert again.indices.tolist() == found.indices.tolist() and again.offsets.tolist() == found.offsets.tolist()


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ({}, r"partition: got \{\}, must be a Partition or lists of indices"),
        (3, "partition: got 3, must be a Partition or lists"),
        ("iid", "partition: got 'iid', must be a Partition or lists"),
        ([[0.5]], r"partition: got \[0.5\] for client 0, must be a list of whole numbers"),
        ({"ada": 1}, "partition: got 1 for client 'ada', must be a list"),
        ([[[0], [1, 2]]], r"partition: got \[\[0\], \[1, 2\]\] for client 0, must be a list"),
        ([np.zeros((2, 2), int)], r"partition: got array\(\[\[0, 0\], \[0, 0\]\]\) for client 0, must be a list"),
        ([[3]], "partition: got 3 for client 0, must be from 0 to 2"),
    ],
)
def test_what_is_no_partition(clients, message):
    with pytest.raises(ValueError, match=message):
        partition.of(clients, 3)


def test_entries_divide_a_data_set():
    digits, sine = load("digits", num_train=200, num_test=1), load("sine")
    for name, entry in catalogue("partitions").items():
        found = entry.build(entry.options(), sine if name == "by_user" else digits, 0)
        partition.validate(found, 100 if name == "by_user" else 200, exact=name != "majority")
        assert found.num_clients == (50 if name == "by_user" else 20)
        assert hasattr(partition, name)
    with pytest.raises(ValueError, match="must be another: the data set sine has no class labels"):
        choose("partitions", "dirichlet").build(DirichletOptions(), sine, 0)
    with pytest.raises(ValueError, match="got 'by_user', must be another: the data set digits has no users"):
        choose("partitions", "by_user").build(NoOptions(), digits, 0)
