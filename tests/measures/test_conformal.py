"""Federated conformal prediction against brute force in plain Python, its guarantee by enumeration, and its errors."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import fedtangent as ft
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.types import Gaussian, Prediction

from ..documents import run

MEASURES = ft.measures
SIZES = [3, 0, 8, 5]


def plain_quantile(scores: list[list[float]], alpha: float, weights: list[float] | None) -> float:
    """The smallest score q with ``sum_k w_k m_k(q) / (n_k + 1) >= 1 - alpha``, by trying every score."""
    mixture = weights or [len(own) + 1.0 for own in scores]
    for q in sorted(itertools.chain(*scores)):
        shares = [
            w / sum(mixture) * sum(s <= q for s in own) / (len(own) + 1) for w, own in zip(mixture, scores, strict=True)
        ]
        if math.fsum(shares) >= 1 - alpha - 1e-12:
            return q
    return math.inf


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("weights", [None, [1.0, 0.0, 3.0, 0.5], [0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
def test_the_quantile_is_that_of_a_plain_loop(alpha: float, weights: list[float] | None) -> None:
    rng = np.random.default_rng(0)
    clients = ft.partition.iid(sum(SIZES), num_clients=1, seed=3).indices  # rows in another order
    parts = np.split(clients, np.cumsum(SIZES)[:-1])
    for scores in (rng.normal(size=16), rng.integers(0, 4, 16).astype(float)):  # without ties, and with many
        found = MEASURES.federated_quantile(scores, parts, alpha, weights)
        assert found.value == plain_quantile([scores[p].tolist() for p in parts], alpha, weights)
        assert found.uplink_bytes == 8 * (16 + 4) and found.weights.sum() == pytest.approx(1)


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.3])
def test_with_the_papers_weights_it_is_one_order_statistic(alpha: float) -> None:
    """0.1 of ten numbers is one of them: rounding must not choose the next one."""
    rng = np.random.default_rng(0)
    for sizes in ([9], [19, 9], [4, 6, 17], [30, 30, 36]):
        scores, total = rng.normal(size=sum(sizes)), sum(sizes) + len(sizes)
        rank = math.ceil(round((1 - alpha) * total, 9))
        found = MEASURES.federated_quantile(scores, consecutive(sizes), alpha).value
        assert found == (np.sort(scores)[rank - 1] if rank <= len(scores) else math.inf)


def averaged_coverage(values: list[np.ndarray], others: list[np.ndarray], alpha: float, weights: np.ndarray) -> float:
    """The exact coverage over the mixture if each client's points are in random order: every point tests once."""
    total = 0.0
    for k, points in enumerate(values):
        for j in range(len(points)):
            held = [*others[:k], np.delete(points, j), *others[k + 1 :]]
            sizes = [len(h) for h in held]
            q = MEASURES.federated_quantile(np.concatenate(held), consecutive(sizes), alpha, weights).value
            total += weights[k] / weights.sum() * float(points[j] <= q) / len(points)
    return total


@pytest.mark.parametrize("paper", [True, False])
def test_the_coverage_is_within_its_bounds_for_any_clients(paper: bool) -> None:
    """By enumeration: the mean over other clients' draws, each client's n_k + 1 points, and which of them tests."""
    sizes, alpha, draws = np.array([6, 3, 11]), 0.3, 60
    weights = sizes + 1.0 if paper else np.array([1.0, 5.0, 2.0])
    low, high = ft.theory.conformal_coverage(sizes, alpha, weights)
    rng, found = np.random.default_rng(1), []
    for _ in range(draws):
        bags = [rng.normal(3 * k, 1 + k, n + 1) for k, n in enumerate(sizes)]
        others = [bag[:-1] for bag in bags]
        found.append(averaged_coverage(bags, others, alpha, weights))
    error = np.std(found, ddof=1) / math.sqrt(draws)
    assert low - 4 * error <= np.mean(found) <= high + 4 * error
    assert high - low == pytest.approx(3 / 23 if paper else (1 / 7 + 5 / 4 + 2 / 12) / 8)
    if paper:  # one client: the band is exact, ceil((1 - alpha)(n + 1)) / (n + 1)
        bag = rng.normal(size=10)
        exact = averaged_coverage([bag], [bag[:-1]], alpha, np.array([1.0]))
        assert exact == pytest.approx(math.ceil(0.7 * 10 - 1e-9) / 10)


def test_a_summary_never_lowers_the_threshold_and_misses_few_ranks() -> None:
    sizes, alpha = [50, 7, 200], 0.1
    scores, clients = np.random.default_rng(2).normal(size=257), consecutive(sizes)
    exact = MEASURES.federated_quantile(scores, clients, alpha)
    for size in (1, 2, 5, 20, 200):
        found = MEASURES.federated_quantile(scores, clients, alpha, summary_size=size)
        blocks = [math.ceil(n / min(n, size)) for n in sizes]
        assert exact.value <= found.value
        assert found.uplink_bytes == 8 * (sum(min(n, size) for n in sizes) + 3)
        if math.isfinite(found.value):
            excess = np.sum(scores <= found.value) - np.sum(scores <= exact.value)
            assert excess < sum(b - 1 for b in blocks) + max(blocks)
    assert found.value == exact.value  # all are sent
    assert exact.value < MEASURES.federated_quantile(scores, clients, alpha, summary_size=5).value  # it is a summary


def test_scores_of_classes_are_those_of_a_loop() -> None:
    rng = np.random.default_rng(0)
    members = rng.normal(size=(3, 20, 4))
    labels = rng.integers(0, 4, 20)
    p = np.exp(members) / np.exp(members).sum(axis=2, keepdims=True)
    p = p.mean(axis=0)
    plain = {
        "probability": [1 - row[y] for row, y in zip(p, labels, strict=True)],
        "adaptive": [sum(v for v in row if v >= row[y]) for row, y in zip(p, labels, strict=True)],
    }
    for name, wanted in plain.items():
        for prediction in (members, Prediction(np.log(p), members)):
            found = MEASURES.conformal_scores(prediction, labels, name)
            np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_scores_of_regression_are_those_of_a_loop() -> None:
    rng = np.random.default_rng(0)
    members, targets = rng.normal(size=(5, 12, 2)), rng.normal(size=(12, 2))
    root = rng.normal(size=(12, 12))
    gaussian = Gaussian(rng.normal(size=(12, 2)), root @ root.T)
    deviation = np.sqrt(np.diag(gaussian.cov))[:, None]
    for prediction, centre, scale in (
        (members, members.mean(axis=0), members.std(axis=0)),
        (Prediction(members.mean(axis=0), members), members.mean(axis=0), members.std(axis=0)),
        (gaussian, gaussian.mean, deviation),
    ):
        gap = np.abs(targets - centre)
        np.testing.assert_allclose(MEASURES.conformal_scores(prediction, targets, "residual"), gap.max(axis=1))
        found = MEASURES.conformal_scores(prediction, targets, "normalised")
        np.testing.assert_allclose(found, (gap / scale).max(axis=1))


@pytest.mark.parametrize("score", ["probability", "adaptive", "residual", "normalised"])
def test_a_set_holds_the_targets_whose_score_is_at_most_the_threshold(score: str) -> None:
    rng = np.random.default_rng(0)
    members = rng.normal(size=(3, 40, 3))
    classes = score in ("probability", "adaptive")
    targets = rng.integers(0, 3, 40) if classes else rng.normal(size=(40, 3))
    clients = consecutive([15, 25])
    found = MEASURES.conformal_predictor(members, targets, clients, 0.2, score=score)
    covered, sets = found.covers(members, targets), found.sets(members)
    if classes:
        assert np.array_equal(sets[np.arange(40), targets], covered)
        every = [MEASURES.conformal_scores(members, np.full(40, c), score) <= found.threshold for c in range(3)]
        assert np.array_equal(sets, np.array(every).T)
    else:
        fresh = rng.normal(size=(40, 3))  # none at the very end of an interval
        inside = ((sets.low <= fresh) & (fresh <= sets.high)).all(axis=1)
        assert np.array_equal(inside, found.covers(members, fresh)) and 0 < inside.sum() < 40
    least = math.ceil(0.8 * 42)  # of the calibration's own 40; many adaptive scores are 1
    assert covered.sum() == least or (score == "adaptive" and covered.sum() > least and found.threshold == 1)


def test_too_few_examples_give_sets_of_everything() -> None:
    found = MEASURES.conformal_predictor(np.zeros((1, 3, 1)), np.ones((3, 1)), [[0, 1, 2]], 0.1, score="residual")
    assert found.threshold == math.inf and found.covers(np.zeros((1, 1, 1)), np.array([[9e9]])).all()


def test_coverage_is_by_client_and_over_the_mixture() -> None:
    covered = np.array([True] * 9 + [False] + [True, False] * 2)
    clients = [list(range(10)), [], [10, 11, 12, 13]]
    pooled = MEASURES.coverage_by_client(covered, clients)
    np.testing.assert_allclose(pooled.by_client.value, [0.9, np.nan, 0.5])
    assert pooled.overall.value == pytest.approx(11 / 14)
    from scipy.stats import binomtest

    wilson = binomtest(9, 10).proportion_ci(method="wilson")
    np.testing.assert_allclose([pooled.by_client.low[0], pooled.by_client.high[0]], wilson, rtol=1e-6)
    weighted = MEASURES.coverage_by_client(covered, clients, [1.0, 0.0, 3.0])
    assert weighted.overall.value == pytest.approx(0.9 / 4 + 0.5 * 3 / 4)
    alone = MEASURES.coverage_by_client(covered, clients, [1.0, 0.0, 0.0]).overall
    np.testing.assert_allclose(alone[1:], wilson, rtol=1e-6)


def test_the_interval_over_a_mixture_holds_the_truth_as_often_as_it_says() -> None:
    rng, rates, sizes, weights = np.random.default_rng(4), np.array([0.95, 0.6, 0.8]), [20, 60, 30], [0.5, 0.2, 0.3]
    truth, draws = rates @ weights, 400
    hits = 0
    for _ in range(draws):
        covered = np.concatenate([rng.random(n) < rate for n, rate in zip(sizes, rates, strict=True)])
        _, low, high = MEASURES.coverage_by_client(covered, consecutive(sizes), weights).overall
        hits += low <= truth <= high
    assert abs(hits / draws - 0.95) < 4 * math.sqrt(0.95 * 0.05 / draws)


def test_an_interval_of_a_gaussian_is_its_mean_and_deviation() -> None:
    gaussian = Gaussian(np.array([[1.0, 2.0]]), np.array([[4.0]]))
    found = MEASURES.predictive_interval(gaussian, 0.95, noise_variance=5.0)
    np.testing.assert_allclose(np.squeeze(found.high - found.value), 1.959964 * 3, rtol=1e-5)
    np.testing.assert_allclose(found.value, gaussian.mean)


def test_the_guides_sets_keep_their_promise_and_the_ensembles_own_intervals_do_not() -> None:
    names = run("conformal_predictor(held_out")
    assert names["coverage"].overall.low <= 0.9 <= names["coverage"].overall.high
    own = [names["held_out"].mean.shape, MEASURES.coverage_by_client(names["covered"], names["test"]).overall.high]
    assert own[0] == (240, 1) and own[1] < 0.2  # of the Gaussian process, the last one
    single = names["coverage"].by_client
    assert single.value[2] < 0.9 < single.value[0]  # the noisiest client has less than the mixture
    assert names["conformal"].quantile.uplink_bytes == 8 * 243


@pytest.mark.slow
def test_the_guides_sets_of_digits_keep_their_promise() -> None:
    """By day the guide's other sets keep theirs, in the test above."""
    names = run("own sets")
    found = names["conformal"].coverage(names["prediction"], names["digits"].y_train, names["test"]).overall
    assert found.high > 0.9 and 1 < names["size"] < 5


REGRESSION: tuple[Any, ...] = (np.zeros((2, 4, 1)), np.ones((4, 1)), [[0, 1], [2, 3]])
TWO_CLASSES = np.zeros((2, 4, 2))
ERRORS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], str]] = {
    "alpha": (MEASURES.conformal_predictor, (*REGRESSION, 1.0), {"score": "residual"}, "alpha: got 1.0"),
    "score": (MEASURES.conformal_predictor, REGRESSION, {"score": "aps"}, "score: got 'aps', allowed are probability"),
    "targets": (MEASURES.conformal_scores, (REGRESSION[0], np.ones(4), "residual"), {}, r"targets: got shape \(4,\)"),
    "labels": (MEASURES.conformal_scores, (TWO_CLASSES, np.array([0, 0, 0, 2]), "adaptive"), {}, "targets: got 2"),
    "single output": (MEASURES.conformal_scores, (REGRESSION[0], np.zeros(4, int), "adaptive"), {}, "a single output"),
    "count": (MEASURES.conformal_scores, (TWO_CLASSES, np.array([0, 0]), "adaptive"), {}, "targets: got 2 labels"),
    "deviation": (MEASURES.conformal_scores, (*REGRESSION[:2], "normalised"), {}, "got a standard deviation of 0"),
    "gaussian": (
        MEASURES.conformal_scores,
        (Gaussian(np.zeros((2, 2)), np.eye(2)), np.array([0, 1]), "adaptive"),
        {},
        "score: got 'adaptive' for a Gaussian, allowed are residual, normalised",
    ),
    "finite": (MEASURES.federated_quantile, (np.array([1.0, np.nan]), [[0, 1]]), {}, "scores: got nan at entry"),
    "weights": (MEASURES.federated_quantile, (np.ones(2), [[0], [1]], 0.1, [1.0, -1.0]), {}, "weights: got "),
    "number of weights": (MEASURES.federated_quantile, (np.ones(2), [[0], [1]], 0.1, [1.0]), {}, "weights: got "),
    "clients": (MEASURES.federated_quantile, (np.ones(2), [[0], [2]]), {}, "clients: "),
    "summary": (MEASURES.federated_quantile, (np.ones(2), [[0], [1]], 0.1, None, 0), {}, "summary_size: got 0"),
    "nobody": (MEASURES.coverage_by_client, (np.ones(1, bool), [[0], []], [1.0, 1.0]), {}, "client 1 has no examples"),
    "level": (MEASURES.coverage_by_client, (np.ones(1, bool), [[0]], None, 1.0), {}, "level: got 1.0"),
    "sizes": (ft.theory.conformal_coverage, ([-1], 0.1), {}, "sizes: got "),
    "theory's weights": (ft.theory.conformal_coverage, ([3, 3], 0.1, [0.0, 0.0]), {}, "weights: got "),
}


@pytest.mark.parametrize("case", ERRORS)
def test_a_bad_argument_is_named(case: str) -> None:
    function, arguments, options, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        function(*arguments, **options)
