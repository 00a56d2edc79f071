"""The laws that the partitioners draw from, and their limits."""

from __future__ import annotations

import numpy as np

from fedtangent._src.data import partition
from fedtangent._src.data.partition import drawn

from ..clients import lists

BALANCED = np.arange(1000) % 10


def test_shards_of_sorted_labels_meet_their_classes():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))  # 60 shards of 10, none crosses
    counts = [len(set(labels[own].tolist())) for own in lists(partition.shards(labels, 30, 2, 0))]
    assert set(counts) <= {1, 2}
    # two of the sixty shards at random: the same class with probability 5/59
    repeats = [
        sum(len(set(labels[own].tolist())) == 1 for own in lists(partition.shards(labels, 30, 2, seed)))
        for seed in range(200)
    ]
    error = np.std(repeats) / np.sqrt(len(repeats))
    assert abs(np.mean(repeats) - 30 * 5 / 59) < 4 * error < 30 * 5 / 59 / 2


def test_classes_are_exactly_two_where_shards_are_not():
    labels = np.repeat(np.arange(10), np.arange(40, 140, 10))  # classes of unequal size, so shards cross
    exact = [len(set(labels[own].tolist())) for own in lists(partition.classes(labels, 50, 2, 0))]
    sharded = [len(set(labels[own].tolist())) for own in lists(partition.shards(labels, 50, 2, 0))]
    assert set(exact) == {2} and max(sharded) > 2


def test_classes_pair_at_random():
    """Every pair of ten classes occurs about equally often: 45 pairs, within 5 standard errors of their mean."""
    seen = np.zeros((10, 10))
    for seed in range(200):
        for own in lists(partition.classes(BALANCED, 50, 2, seed)):
            first, second = sorted({int(BALANCED[i]) for i in own})
            seen[first, second] += 1
    counts = seen[np.triu_indices(10, 1)]
    assert counts.sum() == 200 * 50
    mean = counts.mean()
    assert np.abs(counts - mean).max() < 5 * np.sqrt(mean)


def test_per_class_dirichlet_has_the_second_moment_of_its_law():
    """For shares of each class over N clients E sum_i s_i^2 = (alpha + 1) / (N alpha + 1)."""
    num_classes, size, clients = 400, 500, 8
    labels = np.arange(num_classes * size) % num_classes
    for alpha in (0.1, 1.0, 10.0):
        p = partition.dirichlet(labels, clients, alpha, 3, min_client_size=0, dirichlet_method="per_class")
        owner = np.repeat(np.arange(clients), p.sizes)
        counts = np.zeros((num_classes, clients))
        np.add.at(counts, (labels[p.indices], owner), 1)
        squares = ((counts / size) ** 2).sum(axis=1)
        error = squares.std() / np.sqrt(num_classes)
        law = [(a + 1) / (clients * a + 1) for a in (alpha, 2 * alpha)]
        assert abs(squares.mean() - law[0]) < 4 * error
        assert abs(squares.mean() - law[1]) > 4 * error


def test_a_clients_draw_has_the_dirichlet_multinomial_law():
    """With plenty in the pool: mean p, and variance of a share p (1 - p) / n (n + A) / (1 + A), A the sum of alphas."""
    rng = np.random.Generator(np.random.PCG64(1))
    concentration, n, repeats = np.array([0.05, 0.3, 0.15]), 40, 4000
    pool = np.full(3, 10**6)
    shares = np.array([drawn._draw_counts(rng, n, pool, rng.dirichlet(concentration)) for _ in range(repeats)]) / n
    total = concentration.sum()
    p = concentration / total
    for sample, law, wrong in (
        (shares, p, 1 / 3),
        ((shares - p) ** 2, p * (1 - p) / n * (n + total) / (1 + total), p * (1 - p) / (1 + 3 * total)),
    ):
        error = sample.std(axis=0) / np.sqrt(repeats)
        assert (np.abs(sample.mean(axis=0) - law) < 4 * error).all()
        assert (np.abs(sample.mean(axis=0) - wrong) > 4 * error).any()


def test_drawing_in_bulk_is_drawing_one_at_a_time():
    """Until classes run out, and beyond: against one label at a time with renormalised shares, in plain Python."""
    pool, shares, size, repeats = [5, 5, 2], [0.7, 0.2, 0.1], 9, 4000
    rng, other = (np.random.Generator(np.random.PCG64(s)) for s in (2, 3))
    bulk = np.array([drawn._draw_counts(rng, size, np.array(pool), np.array(shares)) for _ in range(repeats)])

    def one_at_a_time(renormalise: bool) -> np.ndarray:
        left, taken = list(pool), [0, 0, 0]
        for _ in range(size):
            weights = [s if k else 0.0 for s, k in zip(shares if renormalise else left, left, strict=True)]
            u = other.random() * sum(weights)
            c = next(c for c in range(3) if u < sum(weights[: c + 1]))
            left[c] -= 1
            taken[c] += 1
        return np.array(taken)

    for renormalise in (True, False):
        single = np.array([one_at_a_time(renormalise) for _ in range(repeats)])
        for moment in (lambda a: a, lambda a: a**2, lambda a: a[:, :1] * a[:, 1:]):
            x, y = moment(bulk.astype(float)), moment(single.astype(float))
            difference = np.abs(x.mean(axis=0) - y.mean(axis=0)) / np.sqrt((x.var(axis=0) + y.var(axis=0)) / repeats)
            assert (difference < 4).all() if renormalise else (difference > 4).any()


def test_a_client_whose_shares_are_all_used_up_takes_from_what_is_left():
    rng = np.random.Generator(np.random.PCG64(0))
    counts = drawn._draw_counts(rng, 6, np.array([2, 3, 4]), np.array([1.0, 0.0, 0.0]))
    assert counts[0] == 2 and counts.sum() == 6 and (counts <= [2, 3, 4]).all()


def test_alpha_goes_from_one_class_to_iid():
    labels = np.random.default_rng(1).integers(0, 10, 6000)
    many = [partition.heterogeneity(partition.iid(6000, 30, seed), labels).total_variation for seed in range(40)]
    for method in drawn.METHODS:
        at = {
            a: partition.heterogeneity(partition.dirichlet(labels, 30, a, 0, dirichlet_method=method), labels)
            for a in (1e-4, 0.1, 1.0, 10.0, 1e7)
        }
        shares = [h.commonest_share for h in at.values()]
        assert shares[1:] == sorted(shares[1:], reverse=True)
        distances = [h.total_variation for h in at.values()]
        assert distances[1:] == sorted(distances[1:], reverse=True)
        if method == "per_class":  # every class is divided equally to within one: closer to even than chance
            assert distances[-1] < min(many)
        else:  # labels by chance, as in iid: within 5 standard deviations of its spread between seeds
            assert abs(distances[-1] - np.mean(many)) < 5 * np.std(many)
            single = [float((h.label_distribution.max(axis=1) == 1).mean()) for h in at.values()]
            assert single[0] > 0.5 and single[3:] == [0, 0]  # not all: the last to draw get what is left
        assert distances[-2] > np.mean(many) + 5 * np.std(many)


def test_hsu_prints_alpha_times_the_shares():
    """Dir(alpha p) is Dir(alpha / C, .., alpha / C) for C equally common classes: same draws for alpha times C."""
    ours = partition.dirichlet(BALANCED, 20, 0.25, 5)
    printed = partition.dirichlet(BALANCED, 20, 2.5, 5, dirichlet_method="hsu")
    other = partition.dirichlet(BALANCED, 20, 0.25, 5, dirichlet_method="hsu")
    assert np.array_equal(ours.indices, printed.indices) and not np.array_equal(ours.indices, other.indices)


def test_client_ids_say_nothing_about_the_order_of_drawing():
    """The last to draw get what is left; a client's id must not tell who that was (correlation within 4 errors)."""
    labels, slopes = np.arange(600) % 6, []
    ids = np.arange(30) - 14.5
    for seed in range(60):
        h = partition.heterogeneity(partition.dirichlet(labels, 30, 0.5, seed), labels)
        slopes.append(np.corrcoef(ids, h.label_distribution.max(axis=1))[0, 1])
    assert abs(np.mean(slopes)) < 4 * np.std(slopes) / np.sqrt(len(slopes))


def test_quantity_skew_has_the_second_moment_of_its_law():
    """What is beyond min_size is divided by Dir(alpha, .., alpha): E sum_i s_i^2 = (alpha + 1) / (N alpha + 1)."""
    n, clients, least, alpha = 20000, 10, 100, 0.7
    sizes = np.array([partition.quantity_skew(n, clients, alpha, s, least).sizes for s in range(400)])
    squares = (((sizes - least) / (n - clients * least)) ** 2).sum(axis=1)
    error = squares.std() / np.sqrt(len(squares))
    law = [(a + 1) / (clients * a + 1) for a in (alpha, 1.5 * alpha)]
    assert abs(squares.mean() - law[0]) < 4 * error < abs(squares.mean() - law[1])
    assert (np.abs(sizes.mean(axis=0) - n / clients) < 4 * sizes.std(axis=0) / np.sqrt(len(sizes))).all()
