"""Tolerance models on synthetic samples whose law is known: averages, scatter, power, errors."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chi2, ncx2, norm
from scipy.stats import t as student

from fedtangent._src.comparison import statistics as st

from ..nightly import nightly

K, E, M, C = 3, 20, 5, 2
REPEATS = 4000
WIDTHS = np.array([64, 128, 256, 512, 1024])


@pytest.fixture(scope="module")
def law() -> tuple[np.ndarray, np.ndarray]:
    """Mean [K, M, C] and a covariance [K, M, M] of each model, points correlated."""
    rng = np.random.default_rng(0)
    root = rng.standard_normal((K, M, M)) + np.eye(M)
    return rng.standard_normal((K, M, C)), root @ root.transpose(0, 2, 1)


def draw(rng: np.random.Generator, mean: np.ndarray, cov: np.ndarray, draws: int = E) -> np.ndarray:
    """Samples [K, draws, M, C] with the given moments, outputs independent."""
    root = np.linalg.cholesky(cov)
    noise = rng.standard_normal((len(cov), draws, cov.shape[1], mean.shape[-1]))
    return mean[:, None] + np.einsum("kij,kejc->keic", root, noise)


def paired(rng: np.random.Generator, law, bias: float = 0.0, shift: float = 0.0, wider: float = 1.0) -> list[st.Pair]:
    """Networks of every width beside predictions of that law: ``bias / width`` and ``shift`` off, scattering as
    width^-1/2 about them, and ``wider`` in their spread."""
    pairs = []
    for width in WIDTHS:
        predicted = draw(rng, *law)
        noise = rng.standard_normal(predicted.shape) * 3 / np.sqrt(width)
        seen = law[0][:, None] + wider * (predicted - law[0][:, None]) + noise + bias / width + shift
        pairs.append(st.Pair(int(width), seen, predicted))
    return pairs


def within_monte_carlo(values: np.ndarray, expected: float) -> bool:
    return abs(values.mean() - expected) <= 4 * values.std(ddof=1) / np.sqrt(len(values))


def traces(law) -> np.ndarray:
    return np.trace(law[1], axis1=1, axis2=2)


def test_what_falls_as_one_over_the_width_is_gone_at_infinite_width() -> None:
    for precisions in ([1.0] * 5, WIDTHS.tolist()):
        weights = st.at_infinite_width(WIDTHS.tolist(), precisions)
        assert weights @ (3 + 70 / WIDTHS) == pytest.approx(3, rel=1e-12)
        assert abs(weights @ (3 + 70 / np.sqrt(WIDTHS)) - 3) > 0.1
    assert st.at_infinite_width([64], [5.0]).tolist() == [1.0]


def test_the_mean_is_judged_at_infinite_width(law) -> None:
    plain, biased, off = (
        st.mean_error(paired(np.random.default_rng(1), law, bias, shift), 2.0)
        for bias, shift in ((0.0, 0.0), (40.0, 0.0), (0.0, 0.5))
    )
    assert biased.value == pytest.approx(plain.value, rel=1e-9)
    assert biased.high == pytest.approx(plain.high, rel=1e-9)
    assert plain.low == 0 and off.low < 0.5 * np.sqrt(M * C) / 2 < off.high
    assert plain.high < off.low


@pytest.mark.parametrize("level", nightly([0.3, 0.05], [0.05]))
def test_intervals_miss_the_truth_as_often_as_they_say(law, monkeypatch: pytest.MonkeyPatch, level: float) -> None:
    monkeypatch.setattr(st, "LEVEL", level)
    rng, repeats = np.random.default_rng(2), 200
    missed = np.zeros(2)
    for _ in range(repeats):
        pairs = paired(rng, law, bias=20.0)
        mean = st.mean_error(pairs, 1.0)
        variance = st.variance_ratio(pairs, traces(law), traces(law))
        missed += [mean.low > 0, not variance.low <= 1 <= variance.high]
    expected = level * np.array([0.5, 1.0])  # a norm of 0 cannot be missed from below
    assert (np.abs(missed / repeats - expected) < 4 * np.sqrt(expected * (1 - expected) / repeats)).all()


def test_a_variance_is_known_better_beside_predictions_and_a_wrong_one_is_seen(law) -> None:
    rng = np.random.default_rng(3)
    right, wider = (paired(rng, law, wider=by) for by in (1.0, 1.1))
    found = st.variance_ratio(right, traces(law), traces(law))
    alone = [st.Pair(p.width, p.simulated, draw(rng, *law)) for p in right]  # predictions of other networks
    assert found.length < 0.5 * st.variance_ratio(alone, traces(law), traces(law)).length
    assert found.low < 1 < found.high
    other = st.variance_ratio(wider, traces(law), traces(law))
    assert abs(other.value - 1.21) < found.length < 0.21


def test_a_variance_of_few_draws_is_not_too_small(law) -> None:
    rng, exact = np.random.default_rng(9), traces(law)
    seen = [st.Pair(64, draw(rng, *law, draws=3), np.zeros((K, 3, M, C))) for _ in range(400)]
    values = np.array([st.variance_ratio([pair], 0 * exact, exact).value for pair in seen])
    assert within_monte_carlo(values, 1.0) and not within_monte_carlo(values * 2 / 3, 1.0)


@pytest.mark.parametrize("mean", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("level", [0.9999, 0.99, 0.01, 1e-4])
def test_the_saddlepoint_has_both_tails_of_a_square_norm(mean: float, count: int, level: float) -> None:
    exact = ncx2.isf(level, count, mean**2) if mean else chi2.isf(level, count)
    share = st.share_beyond(4 * exact, np.full(count, 4.0), 2 * mean)
    assert min(share, 1 - share) == pytest.approx(min(level, 1 - level), rel=0.16 if count == 1 else 0.05)


def test_unequal_axes_too() -> None:
    variances, rng = 0.5 ** np.arange(6), np.random.default_rng(4)
    drawn = np.sqrt(variances) * rng.standard_normal((400_000, 6)) + 3.0 * (np.arange(6) == 0)
    for at in (1.0, 4.0, 20.0, 40.0):
        seen = np.mean(np.sum(drawn**2, axis=1) > at)
        assert abs(st.share_beyond(at, variances, 3.0) - seen) < 0.01 + 4 * np.sqrt(seen / 400_000)


@pytest.mark.parametrize("size", nightly([0.0, 0.5, 2.0, 8.0], [2.0]))
@pytest.mark.parametrize("axis", nightly([0, 5], [0]))
def test_a_norm_is_in_its_interval_as_often_as_it_says(size: float, axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(st, "LEVEL", 0.1)
    variances, rng = 0.5 ** np.arange(6), np.random.default_rng(5)
    drawn = np.sqrt(variances) * rng.standard_normal((150, 6)) + size * (np.arange(6) == axis)
    bounds = np.array([st.norm_interval(float(v @ v), variances) for v in drawn])
    missed = np.mean((bounds[:, 0] > size) | (bounds[:, 1] < size))
    assert missed < 0.1 + 4 * np.sqrt(0.09 / 150)
    if axis == 0 and size > 1:  # along the widest axis the level is used up
        assert missed > 0.1 - 4 * np.sqrt(0.09 / 150)


@pytest.mark.parametrize(
    ("value", "radius", "answer"),
    [(0.5, 0.4, True), (0.5, 0.6, None), (1.5, 0.4, False), (1.5, 0.6, None), (float("nan"), 0.1, False)],
)
def test_an_interval_is_inside_outside_or_undecided(value: float, radius: float, answer: bool | None) -> None:
    found = st.Interval.about(value, radius)
    assert found.within(0.0, 1.0) is answer
    assert found.outside(0.0, 1.0) is (None if answer is None or np.isnan(value) else not answer)


def test_the_worst_is_outside_or_else_reaches_farthest() -> None:
    near, wide = st.Interval.about(1.2, 0.1), st.Interval.about(0.9, 0.3)
    assert st.worst([near, wide], 1.0, 0.5) == wide
    assert st.worst([near, wide], 1.0, 0.05) == near


@pytest.mark.parametrize("level", nightly([0.3, 0.02], [0.02]))
def test_a_variance_of_five_draws_misses_as_often_as_it_says(level: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(st, "LEVEL", level)
    rng, missed, repeats = np.random.default_rng(3), 0, 2000
    for _ in range(repeats):
        pair = st.Pair(8, rng.standard_normal((5, 5, 6, 1)), np.zeros((5, 5, 6, 1)))
        missed += st.variance_ratio([pair], np.zeros(5), np.full(5, 6.0)).within(1.0, 1.0) is False
    assert missed / repeats == pytest.approx(level, abs=4 * np.sqrt(level / repeats) + 0.3 * level)


def test_a_law_that_is_not_a_number_is_far() -> None:
    assert np.isnan(st.law_distance((np.ones(2), np.full((2, 2), np.nan)), (np.ones(2), np.eye(2))))


def test_networks_without_scatter_have_an_exact_mean() -> None:
    pair = st.Pair(8, np.ones((2, 5, 4, 1)), np.zeros((2, 5, 4, 1)))
    assert st.mean_error([pair], 1.0) == (2.0, 2.0, 2.0)


def test_networks_that_diverged_are_no_mean() -> None:
    pair = st.Pair(8, np.full((2, 3, 4, 1), np.nan), np.zeros((2, 3, 4, 1)))
    assert st.mean_error([pair], 1.0).within(-1, 1) is False
    assert st.variance_ratio([pair], np.ones(2), np.ones(2)).within(-1, 1) is False


def test_mean_difference_in_errors_is_the_mean_of_a_half_normal(law) -> None:
    mean, cov = law[0][0], law[1][0]
    rng = np.random.default_rng(4)
    values = np.array(
        [st.mean_difference_in_errors(draw(rng, mean[None], cov[None])[0], mean, np.diag(cov)) for _ in range(REPEATS)]
    )
    assert within_monte_carlo(values, np.sqrt(2 / np.pi))


def lines(slope: float, scatter: np.ndarray) -> list[np.ndarray]:
    """Errors ``3 width^slope`` times ``exp(scatter)``, [widths, networks]."""
    return [3.0 * w**slope * np.exp(row) for w, row in zip(WIDTHS, scatter, strict=True)]


def test_a_slope_is_recovered_exactly_where_the_scatter_is_even(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(st, "LEVEL", 0.1)
    sigma = np.array([0.1, 0.3, 0.2, 0.05, 0.4])
    found, intercept = st.fitted_slope(WIDTHS, lines(-0.5, np.outer(sigma, [-1.0, 1.0, -1.0, 1.0])))
    assert found.value == pytest.approx(-0.5, abs=1e-12)
    assert intercept == pytest.approx(np.log(3.0), abs=1e-11)
    # least squares, of means with variances sigma^2 4/3 / 4, and Welch and Satterthwaite's degrees of freedom
    design = np.column_stack([np.ones(5), np.log(WIDTHS)])
    parts = np.linalg.pinv(design)[1] ** 2 * sigma**2 / 3
    freedom = parts.sum() ** 2 / np.sum(parts**2 / 3)
    assert found.length == pytest.approx(2 * student.ppf(0.95, freedom) * np.sqrt(parts.sum()), rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("networks", "level"), [(3, 0.05), (8, 0.01), (40, 0.3)])
def test_a_slopes_interval_misses_as_often_as_it_says(
    networks: int, level: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By day the test above and ``test_standard_errors_of_few_values_..`` have the interval's exact length."""
    monkeypatch.setattr(st, "LEVEL", level)
    rng, sigma, repeats = np.random.default_rng(5), np.array([0.1, 0.3, 0.2, 0.05, 0.4])[:, None], 4000
    fits = [st.width_slope(WIDTHS, lines(-0.5, sigma * rng.standard_normal((5, networks)))) for _ in range(repeats)]
    missed = np.mean([f.within(-0.5, -0.5) is False for f in fits])
    assert missed == pytest.approx(level, abs=4 * np.sqrt(level / repeats) + 0.1 * level)


def test_errors_that_do_not_scatter_have_a_slope_too() -> None:
    found, _ = st.fitted_slope(WIDTHS, lines(0.0, np.zeros((5, 3))))
    assert found.value == pytest.approx(0.0, abs=1e-9) and found.length < 1e-9


@pytest.mark.parametrize(
    ("widths", "networks", "says"),
    [(2, 4, "widths: got 2, must be at least 3"), (3, 1, "errors: got 1 networks")],
)
def test_a_slope_needs_three_widths_and_two_networks(widths: int, networks: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        st.fitted_slope(WIDTHS[:widths], [np.ones(networks)] * widths)


def test_relative_errors_are_root_mean_squares_over_points_and_outputs() -> None:
    rng = np.random.default_rng(7)
    predicted, seen, scale = rng.standard_normal((3, 2, 4, M, C))
    found = st.relative_errors(predicted, seen, scale)
    assert found.shape == (2, 4)
    one = np.linalg.norm(seen[1, 2] - predicted[1, 2]) / np.linalg.norm(scale[1, 2])
    assert found[1, 2] == pytest.approx(one, rel=1e-12)


def test_standard_errors_of_few_values_have_one_degree_of_freedom_less() -> None:
    """Two to four values, whose variances over n and over n - 1 differ by up to a factor of 2."""
    rng, level = np.random.default_rng(6), 1 - st.LEVEL / 2
    values = rng.standard_normal(3)
    half = student.ppf(level, 2) * values.std(ddof=1) / np.sqrt(3)
    found = st.combined([64], [values])
    np.testing.assert_allclose([found.low, found.high], [values.mean() - half, values.mean() + half], rtol=1e-12)

    pair = st.Pair(64, rng.standard_normal((1, 4, 1, 1)), rng.standard_normal((1, 4, 1, 1)))
    apart = (pair.simulated - pair.predicted).ravel()
    variance, wider = apart.var(ddof=1) / 4, (student.ppf(level, 3) / norm.ppf(level)) ** 2
    bounds = st.norm_interval(apart.mean() ** 2 + (wider - 1) * variance, np.array([wider * variance]))
    error = st.mean_error([pair], 1.0)
    np.testing.assert_allclose([error.low, error.high], bounds, rtol=1e-12)

    widths, errors = np.array([64, 256, 1024]), [np.exp(rng.standard_normal(n)) for n in (2, 3, 4)]
    x, counts = np.log(widths), np.array([2, 3, 4])
    centred = x - counts @ x / counts.sum()
    of_means = counts * centred / (counts @ centred**2)
    parts = of_means**2 * [np.log(e).var(ddof=1) / len(e) for e in errors]
    freedom = 1 / np.sum((parts / parts.sum()) ** 2 / (counts - 1))  # Welch and Satterthwaite
    slope = st.width_slope(widths, errors)
    assert slope.length / 2 == pytest.approx(student.ppf(level, freedom) * np.sqrt(parts.sum()), rel=1e-12)
