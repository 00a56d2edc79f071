"""Measures of uncertainty: against scikit-learn and SciPy, plain NumPy loops, identities, and wrong formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats
from sklearn import metrics

from fedtangent._src.losses import mean_prediction
from fedtangent._src.measures import uncertainty as u
from fedtangent._src.types import Prediction

from ..nightly import nightly

K, N, C = 4, 300, 5
nll, brier, accuracy, entropy, information_of, variance = map(
    jax.jit,
    (
        u.negative_log_likelihood,
        u.brier_score,
        u.accuracy,
        u.predictive_entropy,
        u.mutual_information,
        u.knowledge_variance,
    ),
)
reliability, ece = (jax.jit(f, static_argnums=2) for f in (u.reliability, u.expected_calibration_error))
DTYPES = {"float32": 3e-6, "float64": 1e-13}


def ensemble(scale: float = 2.0, members: int = K, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits [K, n, C] that agree in part, and labels that they predict better than chance."""
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal((1, N, C))
    logits = scale * (shared + 0.7 * rng.standard_normal((members, N, C)))
    return logits, np.argmax(shared[0] + 0.8 * rng.gumbel(size=(N, C)), axis=-1)


def probabilities(logits: np.ndarray) -> np.ndarray:
    return special.softmax(logits.astype(np.float64), axis=-1)


def plain_ece(logits: np.ndarray, labels: np.ndarray, bins: int) -> float:
    """Expected calibration error by loops over examples and bins."""
    p = probabilities(logits).mean(axis=0)
    confidence, correct = p.max(axis=-1), p.argmax(axis=-1) == labels
    groups = [np.flatnonzero((confidence > b / bins) & (confidence <= (b + 1) / bins)) for b in range(bins)]
    total = 0.0
    for rows in groups:
        if len(rows):
            total += len(rows) / len(labels) * abs(correct[rows].mean() - confidence[rows].mean())
    return total


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_are_those_of_scikit_learn(dtype: str) -> None:
    logits, labels = ensemble()
    given, p = jnp.asarray(logits, dtype), probabilities(logits).mean(axis=0)
    wanted = {
        nll: metrics.log_loss(labels, p, labels=range(C)),
        brier: sum(metrics.brier_score_loss(labels == c, p[:, c]) for c in range(C)),
        accuracy: metrics.accuracy_score(labels, p.argmax(axis=-1)),
    }
    for score, value in wanted.items():
        found = score(given, labels)
        assert found.dtype == dtype and found.shape == ()
        np.testing.assert_allclose(found, value, rtol=DTYPES[dtype])
    # the mean of the members' scores, or the score of the mean logit, is another number
    wrong = np.mean([metrics.log_loss(labels, q, labels=range(C)) for q in probabilities(logits)])
    mean_logit = metrics.log_loss(labels, probabilities(logits.mean(axis=0)), labels=range(C))
    assert min(abs(v - wanted[nll]) for v in (wrong, mean_logit)) > 0.01


@pytest.mark.parametrize("dtype", nightly(DTYPES, ["float64"]))
def test_entropies_against_loops(dtype: str) -> None:
    """By day of the sharper one; the next test has float32."""
    logits, _ = ensemble()
    p = probabilities(logits)
    total = np.array([stats.entropy(row) for row in p.mean(axis=0)])
    own = np.array([np.mean([stats.entropy(p[k, j]) for k in range(K)]) for j in range(N)])
    given, tolerance = jnp.asarray(logits, dtype), {"rtol": DTYPES[dtype], "atol": DTYPES[dtype]}
    np.testing.assert_allclose(entropy(given), total, **tolerance)
    information = information_of(given)
    np.testing.assert_allclose(information, total - own, **tolerance)
    assert information.dtype == dtype
    assert np.all(information >= 0) and np.all(information <= np.log(K))
    assert np.mean(information) > 0.05  # bits would be off by a factor, and no member alike
    wrong = total - np.array([stats.entropy(p[0, j]) for j in range(N)])
    assert np.max(np.abs(wrong - information)) > 0.1


def test_members_that_agree_know_all_there_is_to_know() -> None:
    logits, labels = ensemble(members=1)
    same = jnp.asarray(np.repeat(logits, 3, axis=0), jnp.float32)
    assert np.max(np.abs(information_of(same))) < 1e-6
    # a difference of 1e-4 is far below what a difference of entropies resolves in float32
    other = same.at[0, :, 0].add(1e-4)
    exact = information_of(jnp.asarray(other, jnp.float64))
    np.testing.assert_allclose(information_of(other), exact, atol=2e-7)
    assert np.max(variance(same)) < 1e-12
    one = jnp.asarray(logits)
    np.testing.assert_allclose(nll(one, labels), metrics.log_loss(labels, probabilities(logits)[0], labels=range(C)))


@pytest.mark.parametrize("dtype", nightly(DTYPES, ["float32"]))
def test_logits_of_any_size_do_not_overflow(dtype: str) -> None:
    members = jnp.asarray([[[1e4, 0.0, -1e4]], [[-1e4, 0.0, 1e4]]], dtype)
    labels = jnp.asarray([1])
    assert nll(members, labels) == pytest.approx(1e4, rel=1e-6)
    np.testing.assert_allclose(entropy(members), [np.log(2)], rtol=1e-6)
    np.testing.assert_allclose(information_of(members), [np.log(2)], rtol=1e-6)
    excluded = members.at[:, :, 1].set(-jnp.inf)  # a class that no member allows
    np.testing.assert_allclose(information_of(excluded), [np.log(2)], rtol=1e-6)
    assert np.isinf(nll(excluded, labels))
    assert np.isfinite(brier(excluded, labels))
    with np.errstate(all="ignore"):
        naive = np.exp(np.asarray(members)) / np.exp(np.asarray(members)).sum(axis=-1, keepdims=True)
    assert not np.all(np.isfinite(naive))


def test_knowledge_variance_is_the_papers() -> None:
    members, _ = ensemble()
    loop = sum((f - sum(members) / K) ** 2 for f in members) / K
    np.testing.assert_allclose(variance(jnp.asarray(members)), loop, rtol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "bins"), nightly([("float32", 15), ("float64", 7), ("float64", 1)], [("float64", 7)])
)
def test_calibration_error_against_loops(dtype: str, bins: int) -> None:
    logits, labels = ensemble(scale=4.0)
    given = jnp.asarray(logits, dtype)
    wanted = plain_ece(np.asarray(given), labels, bins)
    np.testing.assert_allclose(ece(given, labels, bins), wanted, rtol=100 * DTYPES[dtype])
    found = reliability(given, jnp.asarray(labels), bins)
    assert found.examples.sum() == N and found.edges.shape == (bins + 1,)
    share = np.sum(np.asarray(found.examples) * np.asarray(found.accuracy)) / N
    assert share == pytest.approx(float(accuracy(given, jnp.asarray(labels))), rel=1e-6)
    assert np.all((found.confidence >= found.edges[:-1]) | (found.examples == 0))
    assert np.all((found.confidence <= found.edges[1:] + 1e-6) | (found.examples == 0))
    one = plain_ece(np.asarray(given)[:1], labels, bins)  # a member by itself is more confident
    assert one > wanted + 0.05


def test_equal_confidences_share_a_bin_whatever_the_order() -> None:
    logits = jnp.log(jnp.asarray([[[0.9, 0.1]] * 30 + [[0.6, 0.4]] * 10]))
    labels = jnp.asarray([0] * 20 + [1] * 10 + [0] * 5 + [1] * 5)
    order = np.random.default_rng(0).permutation(40)
    a = reliability(logits, labels, 8)
    b = reliability(logits[:, order], labels[order], 8)
    np.testing.assert_allclose(np.stack(a[1:]), np.stack(b[1:]), rtol=1e-12)
    assert sorted(np.asarray(a.examples))[-2:] == [10, 30]
    assert u.calibration_error(a) == pytest.approx(0.75 * abs(2 / 3 - 0.9) + 0.25 * 0.1)
    # a confidence at an edge belongs to the bin below it
    at = reliability(jnp.log(jnp.asarray([[[0.75, 0.25]]])), jnp.asarray([0]), 4)
    assert list(at.examples) == [0, 0, 1, 0]


def test_a_calibrated_ensemble_is_calibrated_and_an_overconfident_one_is_not() -> None:
    rng = np.random.default_rng(1)
    n, bins = 40_000, 15
    logits = rng.standard_normal((1, n, C)) * 2
    p = probabilities(logits)[0]
    labels = np.array([(row.cumsum() < r).sum() for row, r in zip(p, rng.uniform(size=n), strict=True)])
    labels = np.minimum(labels, C - 1)
    found = reliability(jnp.asarray(logits), jnp.asarray(labels), bins)
    count, acc = np.asarray(found.examples), np.asarray(found.accuracy)
    error = np.sqrt(
        np.maximum(np.asarray(found.confidence) * (1 - np.asarray(found.confidence)), 0) / np.maximum(count, 1)
    )
    assert np.all(np.abs(acc - np.asarray(found.confidence)) <= 4 * error + 1e-12)
    # |Z| of a bin has mean sqrt(2 / pi) and standard deviation sqrt(1 - 2 / pi) of its standard error
    expected = np.sum(count * error) / n * np.sqrt(2 / np.pi)
    scatter = np.sqrt(np.sum((count * error) ** 2)) / n * np.sqrt(1 - 2 / np.pi)
    assert abs(float(u.calibration_error(found)) - expected) < 4 * scatter
    confident = ece(jnp.asarray(3 * logits), jnp.asarray(labels), bins)
    assert confident > expected + 40 * scatter


def test_intervals_and_their_coverage() -> None:
    rng = np.random.default_rng(2)
    members = rng.standard_normal((6, 50, 3))
    for noise in (0.0, 0.5, rng.uniform(size=(50, 3))):
        found = u.predictive_interval(jnp.asarray(members), 0.9, jnp.asarray(noise))
        sd = np.sqrt(members.var(axis=0) + noise)
        np.testing.assert_allclose(found.low, stats.norm.interval(0.9, members.mean(axis=0), sd)[0], rtol=1e-12)
        np.testing.assert_allclose(found.high, stats.norm.interval(0.9, members.mean(axis=0), sd)[1], rtol=1e-12)
    targets = jnp.asarray([[0.0], [1.0], [2.0], [jnp.nan]])
    ends = u.Interval(jnp.full((4, 1), 0.5), jnp.zeros((4, 1)), jnp.ones((4, 1)))
    assert u.coverage(ends, targets) == 0.5


def test_an_ensemble_with_the_right_noise_covers_what_it_says() -> None:
    rng = np.random.default_rng(3)
    n = 12_000
    targets = rng.standard_normal((n, 1)) + 0.3 * rng.standard_normal((n, 1))
    members = rng.standard_normal((200, n, 1))
    right = u.coverage(u.predictive_interval(jnp.asarray(members), 0.8, 0.09), jnp.asarray(targets))
    _, low, high = u.coverage_interval(right, n, 0.9999)
    assert abs(float(right) - 0.8) < 0.01 and float(high) - float(low) < 0.03
    none = u.coverage(u.predictive_interval(jnp.asarray(members), 0.5, 0.0), jnp.asarray(targets))
    assert not float(u.coverage_interval(none, n).low) <= 0.5 <= float(u.coverage_interval(none, n).high)


@pytest.mark.parametrize(("hits", "total"), [(0, 10), (3, 10), (10, 10), (940, 1000)])
def test_the_interval_of_a_coverage_is_wilsons(hits: int, total: int) -> None:
    wanted = stats.binomtest(hits, total).proportion_ci(0.95, method="wilson")
    np.testing.assert_allclose(u.coverage_interval(hits / total, total)[1:], [wanted.low, wanted.high], atol=1e-12)
    wald = hits / total - 1.96 * np.sqrt(hits / total * (1 - hits / total) / total)
    assert abs(wald - wanted.low) > 1e-4 or hits == 0


@pytest.mark.parametrize(("loss", "metric"), [("cross_entropy", "nll"), ("squared_error", "mse")])
def test_measures_against_plain_formulas(loss: str, metric: str) -> None:
    rng = np.random.default_rng(0)
    members, labels = rng.standard_normal((3, 20, 4)), rng.integers(0, 4, 20)
    targets = np.eye(4)[labels] - 0.25
    given = Prediction(members.mean(axis=0), members)  # type: ignore[arg-type]
    found = u.measure(given, targets, labels, loss)  # type: ignore[arg-type]
    probability = np.exp(members) / np.exp(members).sum(axis=-1, keepdims=True)
    mean = probability.mean(axis=0) if loss == "cross_entropy" else members.mean(axis=0)
    nll = -np.mean(np.log(mean[np.arange(20), labels])) if loss == "cross_entropy" else np.mean((mean - targets) ** 2)
    assert found[metric] == pytest.approx(nll, rel=1e-12)
    assert found["accuracy"] == np.mean(mean.argmax(axis=-1) == labels)
    assert found["accuracy_of_members"] == pytest.approx(np.mean(members.argmax(axis=-1) == labels), rel=1e-12)
    assert found["knowledge_variance"] == pytest.approx(np.mean(members.var(axis=0)), rel=1e-12)
    assert list(found) == [m for m in u.METRICS if m in found]
    if loss == "cross_entropy":
        entropy = -np.sum(mean * np.log(mean), axis=-1)
        own = -np.sum(probability * np.log(probability), axis=-1).mean(axis=0)
        assert found["predictive_entropy"] == pytest.approx(entropy.mean(), rel=1e-12)
        assert found["mutual_information"] == pytest.approx((entropy - own).mean(), rel=1e-10)
        assert found["brier"] == pytest.approx(np.mean(np.sum((mean - np.eye(4)[labels]) ** 2, axis=-1)), rel=1e-12)
        assert 0 < found["ece"] < 1


def test_a_single_model_has_nothing_to_disagree_about() -> None:
    members, labels = np.random.default_rng(0).standard_normal((1, 20, 4)), np.zeros(20, int)
    given = Prediction(members[0], members)  # type: ignore[arg-type]
    found = u.measure(given, np.eye(4)[labels], labels, "cross_entropy")  # type: ignore[arg-type]
    assert set(found) == set(u.METRICS) - {"mse", "loss", "mutual_information", "knowledge_variance"}


@pytest.mark.parametrize("loss", ["exponential", "exponential_sum"])
def test_a_loss_of_margins_is_measured_as_itself(loss: str) -> None:
    """As a mean over examples of the mean prediction's, whether it is trained as one or as a sum."""
    rng = np.random.default_rng(0)
    members, labels = rng.standard_normal((2, 20, 3)), rng.integers(0, 3, 20)
    signs = 2 * np.eye(3)[labels] - 1
    given = Prediction(members.mean(axis=0), members)  # type: ignore[arg-type]
    found = u.measure(given, signs, labels, loss)  # type: ignore[arg-type]
    assert list(found) == ["loss", "accuracy", "accuracy_of_members", "knowledge_variance"]
    by_hand = np.exp(-signs * members.mean(axis=0)).sum(axis=1).mean()
    assert found[u.metric_of(loss)] == pytest.approx(by_hand, rel=1e-12)
    assert found["loss"] != pytest.approx(np.exp(-signs * members).sum(axis=2).mean(), rel=1e-2)


LOGITS, LABELS = jnp.zeros((2, 4, 3)), jnp.zeros(4, jnp.int32)
BAD: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "members": (u.predictive_entropy, (LOGITS[0],), r"members: got shape \(4, 3\), must be \[K, n, C\]"),
    "no members": (u.mutual_information, (LOGITS[:0],), "members: got shape"),
    "integer members": (u.knowledge_variance, (LOGITS.astype(int),), "members: got dtype int64, must be floating"),
    "labels": (u.brier_score, (LOGITS, LABELS[:3]), r"labels: got int32 \(3,\), .* that is \(4,\)"),
    "one-hot labels": (u.accuracy, (LOGITS, LOGITS[0]), r"labels: got float64 \(4, 3\)"),
    "floating labels": (u.negative_log_likelihood, (LOGITS, LABELS * 1.0), "labels: got float64"),
    "no bins": (u.reliability, (LOGITS, LABELS, 0), "num_bins: got 0, must be a whole number of at least 1"),
    "half a bin": (u.reliability, (LOGITS, LABELS, 1.5), "num_bins: got 1.5"),
    "level": (u.predictive_interval, (LOGITS, 1.0), "level: got 1.0, must be above 0 and below 1"),
    "noise": (u.predictive_interval, (LOGITS, 0.9, -1.0), "noise_variance: got -1, must be at least 0"),
    "noise's shape": (u.predictive_interval, (LOGITS, 0.9, jnp.ones(3)), r"noise_variance: got shape \(3,\)"),
    "coverage": (u.coverage, (u.Interval(LABELS, LABELS, LABELS), LABELS[:2]), r"targets \(2,\), must be equal"),
    "level of a coverage": (u.coverage_interval, (0.5, 10, 0.0), "level: got 0.0"),
    "no points": (u.coverage_interval, (0.5, 0), "num_points: got 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    function, arguments, says = BAD[name]
    with pytest.raises(ValueError, match=says):
        function(*arguments)


def calibrated(share: float, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [1, n, 2] of confidence ``share``, of which that share is right, in random order."""
    right = np.random.default_rng(0).permutation(np.arange(n) < round(share * n))
    return np.broadcast_to(np.log([share, 1 - share]), (1, n, 2)), (~right).astype(int)


def test_a_calibration_error_of_a_million_predictions_has_no_error_of_its_own() -> None:
    logits, labels = calibrated(0.96, 1_000_000)
    assert float(ece(jnp.asarray(logits, jnp.float32), labels, 15)) < 1e-6
    one_by_one = np.add.accumulate(np.full(1_000_000, 0.96, np.float32))[-1] / 1e6
    assert abs(one_by_one - 0.96) > 1e-3  # the control: sums one after another in float32


@pytest.mark.parametrize("dtype", nightly([jnp.bfloat16, jnp.float16], [jnp.bfloat16]))
def test_half_precision_outputs_are_measured_in_float32(dtype: Any) -> None:
    """By day of the coarser one."""
    logits, labels = ensemble()
    logits, labels = np.tile(logits, (1, 20, 1)), np.tile(labels, 20)
    half = jnp.asarray(logits, dtype)
    same = jnp.asarray(half, jnp.float32)
    bins = reliability(half, labels, 15)
    assert jnp.issubdtype(bins.examples.dtype, jnp.integer) and int(bins.examples.sum()) == len(labels)
    for score in (nll, brier, accuracy):
        assert score(half, labels).dtype == jnp.float32 and float(score(half, labels)) == float(score(same, labels))
    assert float(ece(half, labels, 15)) == float(ece(same, labels, 15))
    for score in (entropy, information_of, variance):
        assert np.array_equal(score(half), score(same))
    interval, wide = u.predictive_interval(half), u.predictive_interval(same)
    assert np.array_equal(interval.low, wide.low) and np.array_equal(interval.high, wide.high)
    assert u.coverage(interval, jnp.zeros(interval.low.shape, dtype)).dtype == jnp.float32
    narrow = np.mean(np.asarray(same.argmax(axis=-1)[0] == labels, dtype), dtype=dtype)
    assert float(narrow) != float(jnp.mean(same.argmax(axis=-1)[0] == labels))  # the control: a mean in half precision


@pytest.mark.parametrize("bins", nightly([2, 4, 10], [10]))
@pytest.mark.parametrize("dtype", nightly(DTYPES, ["float32"]))
def test_a_confidence_at_the_edge_of_two_bins_is_in_the_lower_one(dtype: str, bins: int) -> None:
    """Bins are ((b - 1) / B, b / B] (Guo et al., 2017)."""
    logits = np.zeros((1, 3, 2))  # confidence 1/2, exactly
    counts = np.asarray(reliability(jnp.asarray(logits, dtype), np.zeros(3, int), bins).examples)
    assert counts[bins // 2 - 1] == 3 and counts.sum() == 3


def test_the_accuracy_of_outputs_that_are_not_numbers_is_not_a_number() -> None:
    labels = jnp.asarray([0, 0, 0, 1, 1])
    good = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 2)))
    for bad in (good * jnp.nan, good.at[1, 3, 0].set(jnp.nan), good.at[0, 4, 1].set(jnp.inf)):
        assert np.isnan(accuracy(bad, labels)) and np.isnan(ece(bad, labels, 15)) and np.isnan(brier(bad, labels))
    assert np.isfinite(accuracy(good, labels))


def test_an_ensemble_averages_probabilities_or_outputs_by_the_name_of_its_loss() -> None:
    """Mean logits (0.33, 0) say class 0; mean probabilities (0.35, 0.65) say class 1."""
    members, labels = jnp.asarray([[[9.0, 0.0]], [[-4.0, 0.0]], [[-4.0, 0.0]]]), jnp.asarray([1])
    assert probabilities(np.asarray(members)).mean(axis=0)[0].argmax() == 1
    assert np.asarray(members).mean(axis=0)[0].argmax() == 0
    for loss, share in {"cross_entropy": 1.0, "cross_entropy_sum": 1.0, "squared_error": 0.0, "logistic": 0.0}.items():
        assert u.accuracy(members, labels, loss) == share
        predicted = Prediction(mean_prediction(loss, members), members)
        assert u.measure(predicted, np.eye(2)[[1]] * 2 - 1, np.array([1]), loss)["accuracy"] == share
    assert u.accuracy(members, labels) == 1


METRICS_OF_EXAMPLES = {
    "nll": u.negative_log_likelihood,
    "brier": u.brier_score,
    "accuracy": u.accuracy,
    "ece": u.expected_calibration_error,
    "entropy": lambda members, labels: jnp.mean(u.predictive_entropy(members)),
    "information": lambda members, labels: jnp.mean(u.mutual_information(members)),
    "variance": lambda members, labels: jnp.mean(u.knowledge_variance(members)),
    **{
        name: lambda members, labels, name=name: jnp.asarray(
            u.measure(Prediction(members.mean(axis=0), members), np.eye(C)[labels], labels, "cross_entropy")[name]
        )
        for name in ("nll", "accuracy", "accuracy_of_members", "ece", "brier", "predictive_entropy")
    },
}


@pytest.mark.parametrize("name", nightly(METRICS_OF_EXAMPLES, ["ece", "information"]))
def test_a_metric_depends_neither_on_the_order_of_examples_nor_of_models(name: str) -> None:
    metric, (logits, labels) = METRICS_OF_EXAMPLES[name], ensemble()
    given, order = jnp.asarray(np.tile(logits, (1, 30, 1)), jnp.float32), np.random.default_rng(1).permutation(30 * N)
    labels = np.tile(labels, 30)
    value = float(metric(given, labels))
    by_class = np.argsort(labels, kind="stable")
    for rows in (order, by_class, order[::-1]):
        assert float(metric(given[:, rows], labels[rows])) == pytest.approx(value, rel=3e-6)
        assert float(metric(given[::-1, rows], labels[rows])) == pytest.approx(value, rel=3e-6)
    if name in ("nll", "brier", "accuracy", "ece"):  # the control: labels that stay where they were
        assert abs(float(metric(given[:, order], labels)) - value) > 0.01
