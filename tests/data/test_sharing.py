"""Global sets, and partitions whose clients share one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedtangent._src.data import partition, sharing
from fedtangent._src.types import Partition

from .clients import lists

LABELS = np.repeat([0, 1, 4], [50, 20, 30])
CLIENTS = Partition(np.array([5, 3, 8, 1, 0, 7], np.int32), np.array([0, 2, 2, 5, 6], np.int32))  # client 1 is empty
SHARED = [3, 9, 1, 6]


def test_a_global_set_has_equally_many_of_each_class() -> None:
    drawn = sharing.class_balanced(LABELS, 20, 0)
    assert sorted(np.bincount(LABELS[drawn])[[0, 1, 4]].tolist()) == [6, 7, 7]
    assert len(np.unique(drawn)) == 20 and (np.diff(drawn) > 0).all() and drawn.dtype == np.int32
    assert np.array_equal(drawn, sharing.class_balanced(LABELS, 20, 0))
    assert not np.array_equal(drawn, sharing.class_balanced(LABELS, 20, 1))


def test_a_global_set_is_uniform_within_a_class() -> None:
    counts = np.zeros(100)
    for seed in range(400):
        counts[sharing.class_balanced(LABELS, 30, seed)] += 1
    for kind, size in ((0, 50), (1, 20), (4, 30)):
        chance = 10 / size
        error = np.sqrt(400 * chance * (1 - chance))
        assert np.abs(counts[np.flatnonzero(kind == LABELS)] - 400 * chance).max() < 4.5 * error


def test_everybody_who_has_examples_gets_all_of_the_set_once() -> None:
    assert lists(sharing.with_shared(CLIENTS, SHARED)) == [[1, 3, 5, 6, 9], [], [0, 1, 3, 6, 8, 9], [1, 3, 6, 7, 9]]
    assert lists(CLIENTS) == [[5, 3], [], [8, 1, 0], [7]]


def test_a_fraction_is_a_random_part_of_its_own_for_each_client() -> None:
    whole = partition.iid(100, 10, 0)
    given = np.arange(40, 60)
    held = sharing.with_shared(whole, given, 0.25, seed=3)
    extra = []
    for i in range(10):
        own, now = set(whole.client(i).tolist()), set(held.client(i).tolist())
        assert own <= now and now - own <= set(given.tolist()) and len(now & set(given.tolist())) >= 5
        extra.append(frozenset(now - own))
    assert len(set(extra)) == 10
    apart = sharing.with_shared(sharing.without(whole, given), given, 0.25, seed=3)
    assert [len(np.intersect1d(apart.client(i), given)) for i in range(10)] == [5] * 10
    assert np.array_equal(held.indices, sharing.with_shared(whole, given, 0.25, seed=3).indices)
    assert not np.array_equal(held.indices, sharing.with_shared(whole, given, 0.25, seed=4).indices)


def test_a_set_can_be_nobodys_own() -> None:
    assert lists(sharing.without(CLIENTS, [3, 1, 99])) == [[5], [], [0, 8], [7]]
    with pytest.raises(ValueError, match="examples: got 1 examples, among them all 1 of client 3, must leave it one"):
        sharing.without(CLIENTS, [7])


@pytest.mark.parametrize(("fraction", "number"), [(1.0, 4), (0.5, 2), (0.6, 2), (0.7, 3), (0.01, 1)])
def test_the_number_given_is_rounded_and_at_least_one(fraction: float, number: int) -> None:
    assert sharing.number_given(SHARED, fraction) == number


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (([[1, 2]],), r"shared: got shape \(.*t64, must be whole numbers \[n\], n >= 1"),
        (([],), r"shared: got shape \(.*t64, must be whole numbers \[n\], n >= 1"),
        (([2, 2],), "each once"),
        (([1], 0.0), r"fraction: got 0\.0, must be above 0 and at most 1"),
        (([1], 1.01), r"fraction: got 1\.01, must be above 0 and at most 1"),
        (([1], "all"), "fraction: got 'all', must be a number"),
        (([1], 0.5, -1), "seed: got -1, must be a whole number from 0 to 4294967295"),
        (([1], 0.5, 0.5), r"seed: got 0\.5, must be a whole number from 0 to 4294967295"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        sharing.with_shared(CLIENTS, *arguments)


@pytest.mark.parametrize(
    ("labels", "size", "named"),
    [
        (LABELS, 0, "size: got 0, must be a whole number from 1 to 100"),
        (LABELS, 101, "size: got 101, must be a whole number from 1 to 100"),
        (LABELS, 70, r"size: got 70 examples, must be fewer: a class of 20 would give 2[34]"),
        (LABELS / 2, 3, r"labels: got shape \(100,\), dtype float64, must be whole numbers \[n\], n >= 1"),
    ],
)
def test_bad_global_sets(labels: np.ndarray, size: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        sharing.class_balanced(labels, size, 0)
    with pytest.raises(ValueError, match=r"partition\.offsets"):
        sharing.with_shared(CLIENTS._replace(offsets=CLIENTS.offsets[:-1]), SHARED)


@pytest.mark.parametrize("sizes", [[2] * 20, [1] * 8, [0, 3, 0, 1, 7], [5, 5, 5, 5], [40, 1, 1]])
@pytest.mark.parametrize("fraction", [0.04, 0.2, 0.5, 0.97])
def test_held_out_examples_are_the_fraction_of_all_to_one_example(sizes: list[int], fraction: float) -> None:
    whole = partition.of(np.split(np.random.default_rng(0).permutation(sum(sizes)), np.cumsum(sizes)[:-1]))
    for seed in range(3):
        train, test = sharing.held_out(whole, fraction, seed)
        assert abs(test.sizes.sum() - fraction * sum(sizes)) <= 1 and min(train.sizes.sum(), test.sizes.sum()) > 0
        for i in range(len(sizes)):
            assert sorted([*train.client(i), *test.client(i)]) == sorted(whole.client(i))
        needed = sum(size > 0 for size in sizes)
        assert (train.sizes > 0).sum() == needed or train.sizes.sum() < needed
    if sizes == [2] * 20 and fraction == 0.2:  # who gives one is drawn
        given = [tuple(sharing.held_out(whole, fraction, seed)[1].sizes) for seed in range(5)]
        assert len(set(given)) == 5 and {sum(sizes) for sizes in given} == {8}


def test_one_example_cannot_train_and_test() -> None:
    with pytest.raises(ValueError, match="partition: got 1 examples, must be two or more"):
        sharing.held_out(partition.of([[0], []]), 0.5, 0)
