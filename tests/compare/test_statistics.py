"""Tolerance models on synthetic samples whose law is known: averages, scatter, power, errors."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent.compare import statistics as st

K, E, M, C = 3, 6, 5, 2
REPEATS = 4000


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


def collected(statistic, law, repeats: int = REPEATS, draws: int = E) -> tuple[np.ndarray, np.ndarray]:
    """Values and standard errors of ``statistic`` on ``repeats`` independent samples of the law."""
    rng = np.random.default_rng(1)
    found = [statistic(draw(rng, *law, draws)) for _ in range(repeats)]
    return np.array([f.value for f in found]), np.array([f.standard_error for f in found])


def within_monte_carlo(values: np.ndarray, expected: float) -> bool:
    return abs(values.mean() - expected) <= 4 * values.std(ddof=1) / np.sqrt(len(values))


def test_the_variance_statistic_averages_one_and_scatters_as_it_says(law) -> None:
    values, errors = collected(lambda s: st.variance_statistic(s, law[1]), law)
    assert within_monte_carlo(values, 1.0)
    assert not within_monte_carlo(values, 1.1)
    # the relative error of a sample variance is sqrt((kurtosis - 1) / (4 n)); a chi-square-like kurtosis is below 9
    assert values.std(ddof=1) == pytest.approx(errors[0], rel=4 * np.sqrt(8 / (4 * REPEATS)))
    assert np.all(errors == errors[0])  # a property of the law, not of the sample


def test_the_mean_statistic_averages_one_and_scatters_as_it_says_with_many_draws(law) -> None:
    """Its numerator is a mean of squares and its denominator a sample variance: to O(1/E), so E is large here."""
    draws = 60
    values, errors = collected(lambda s: st.mean_statistic(s, *law), law, draws=draws)
    spread = values.std(ddof=1)
    # a ratio's expectation is 1 + relative variance of its denominator, to leading order
    denominator = np.mean([2 * np.sum(c**2) / np.trace(c) ** 2 for c in law[1]]) / (K * C * (draws - 1))
    assert abs(values.mean() - 1) <= 4 * spread / np.sqrt(REPEATS) + denominator
    assert spread == pytest.approx(errors[0], rel=4 * np.sqrt(8 / (4 * REPEATS)) + 1 / draws)


def test_the_mean_statistic_covers_as_three_standard_errors_should_with_few_draws(law) -> None:
    values, errors = collected(lambda s: st.mean_statistic(s, *law), law)
    beyond = np.mean(np.abs(values - 1) > st.NUM_STANDARD_ERRORS * errors)
    assert beyond <= 0.03, beyond  # a normal has 0.003; a sum of few squares has a longer right tail
    assert np.mean(np.abs(values - 1) > errors) > 0.1  # and the errors are not merely huge


@pytest.mark.parametrize("wrong", ["mean", "cov"])
def test_a_wrong_law_is_detected(law, wrong: str) -> None:
    mean, cov = law
    if wrong == "mean":
        shift = 3 * np.sqrt(np.diagonal(cov, axis1=1, axis2=2)[..., None] / E)
        values, errors = collected(lambda s: st.mean_statistic(s, mean + shift, cov), law, 200)
    else:
        many = 40
        values, errors = collected(lambda s: st.variance_statistic(s, 3 * cov), law, 200, many)
    found = np.abs(values - 1) > st.NUM_STANDARD_ERRORS * errors
    assert found.mean() > 0.99


def test_sign_flip_p_values_are_uniform_without_a_difference(law) -> None:
    mean, cov = np.zeros_like(law[0]), law[1]
    rng = np.random.default_rng(2)
    values = np.array([st.sign_flip_test(draw(rng, mean, cov, 12), seed) for seed in range(150)])
    assert within_monte_carlo(values, 0.5)
    assert np.mean(values < 0.1) <= 0.1 + 4 * np.sqrt(0.1 * 0.9 / len(values))


def test_a_sign_flip_test_detects_a_shift(law) -> None:
    mean, cov = np.zeros_like(law[0]), law[1]
    shift = 2 * np.sqrt(np.diagonal(cov, axis1=1, axis2=2)[..., None])
    rng = np.random.default_rng(3)
    found = np.array([st.sign_flip_test(draw(rng, mean + shift, cov, 12), seed) for seed in range(50)])
    assert np.mean(found < st.SIGNIFICANCE) > 0.95


def test_mean_difference_in_errors_is_the_mean_of_a_half_normal(law) -> None:
    mean, cov = law[0][0], law[1][0]
    rng = np.random.default_rng(4)
    values = np.array(
        [st.mean_difference_in_errors(draw(rng, mean[None], cov[None])[0], mean, np.diag(cov)) for _ in range(REPEATS)]
    )
    assert within_monte_carlo(values, np.sqrt(2 / np.pi))


@pytest.mark.parametrize("shape", [(3, 5, 2), (3, 1, 5, 2)])
def test_samples_of_the_wrong_shape_are_named(law, shape: tuple[int, ...]) -> None:
    for statistic in (lambda s: st.mean_statistic(s, *law), lambda s: st.variance_statistic(s, law[1])):
        with pytest.raises(ValueError, match=r"samples: got shape .*, must be \[K, E, m, C\]"):
            statistic(np.ones(shape))


def test_few_networks_cannot_reject() -> None:
    assert st.sign_flip_test(np.ones((1, 2, 3, 1))) == pytest.approx(0.5, abs=0.02)
    assert st.sign_flip_test(np.ones((2, 6, 3, 1))) < st.SIGNIFICANCE


WIDTHS = np.array([64, 128, 256, 512, 1024])


def lines(slope: float, scatter: np.ndarray) -> list[np.ndarray]:
    """Errors ``3 width^slope`` times ``exp(scatter)``, [widths, networks]."""
    return [3.0 * w**slope * np.exp(row) for w, row in zip(WIDTHS, scatter, strict=True)]


def test_a_slope_is_recovered_exactly_where_the_scatter_is_even() -> None:
    sigma = np.array([0.1, 0.3, 0.2, 0.05, 0.4])
    fit = st.fitted_slope(WIDTHS, lines(-0.5, np.outer(sigma, [-1.0, 1.0, -1.0, 1.0])))
    assert fit.slope == pytest.approx(-0.5, abs=1e-12)
    assert fit.intercept == pytest.approx(np.log(3.0), abs=1e-11)
    # weighted least squares with variances sigma^2 4/3 / 4 of each mean
    design = np.column_stack([np.ones(5), np.log(WIDTHS)])
    covariance = np.linalg.inv(design.T @ np.diag(3 / sigma**2) @ design)
    assert fit.standard_error == pytest.approx(np.sqrt(covariance[1, 1]), rel=1e-10)


def test_a_slope_scatters_by_its_standard_error() -> None:
    rng, networks = np.random.default_rng(5), 40
    sigma = np.array([0.1, 0.3, 0.2, 0.05, 0.4])[:, None]
    fits = [st.fitted_slope(WIDTHS, lines(-0.5, sigma * rng.standard_normal((5, networks)))) for _ in range(REPEATS)]
    slopes, errors = np.array([f.slope for f in fits]), np.array([f.standard_error for f in fits])
    assert within_monte_carlo(slopes, -0.5)
    assert not within_monte_carlo(slopes, -0.51)
    # the weights are themselves estimated, to a relative variance of 2 / (networks - 1)
    tolerance = 4 / np.sqrt(2 * REPEATS) + 2 / (networks - 1)
    assert slopes.std(ddof=1) == pytest.approx(errors.mean(), rel=tolerance)


def test_errors_that_do_not_scatter_have_a_slope_too() -> None:
    fit = st.fitted_slope(WIDTHS, lines(0.0, np.zeros((5, 3))))
    assert fit.slope == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("widths", "networks", "says"),
    [(2, 4, "widths: got 2, must be at least 3"), (3, 1, "errors: got 1 networks")],
)
def test_a_slope_needs_three_widths_and_two_networks(widths: int, networks: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        st.fitted_slope(WIDTHS[:widths], [np.ones(networks)] * widths)


def series(power: int, c: float, d: float, error: float, noise: np.ndarray | float = 0.0) -> list[st.Statistic]:
    excess = c / WIDTHS**power + d / WIDTHS ** (power + 1) + noise
    return [st.Statistic(1 + e, 1.0, error) for e in excess]


@pytest.mark.parametrize("power", [1, 2])
def test_the_finite_width_term_is_extrapolated_exactly_without_noise(power: int) -> None:
    c, d = 64.0**power, 3 * 64.0 ** (power + 1)
    found = st.finite_width_allowance(WIDTHS, series(power, c, d, 0.1), power)
    expected = c / 1024**power + d / 1024 ** (power + 1)
    assert found.value == pytest.approx(expected, rel=1e-9)
    other = st.finite_width_allowance(WIDTHS, series(power, c, d, 0.1), 3 - power)
    assert other.value != pytest.approx(expected, rel=1e-2)


def test_the_finite_width_term_does_not_look_at_the_largest_width() -> None:
    statistics = series(1, 64.0, 0.0, 0.1)
    changed = [*statistics[:-1], st.Statistic(77.0, 1.0, 0.1)]
    assert st.finite_width_allowance(WIDTHS, statistics, 1) == st.finite_width_allowance(WIDTHS, changed, 1)


def test_the_order_of_the_widths_does_not_matter() -> None:
    order, statistics = np.array([3, 0, 4, 1, 2]), series(1, 64.0, 100.0, 0.1)
    shuffled = st.finite_width_allowance(WIDTHS[order], [statistics[i] for i in order], 1)
    assert shuffled.value == pytest.approx(st.finite_width_allowance(WIDTHS, statistics, 1).value, rel=1e-12)


def test_the_finite_width_term_has_the_stated_error() -> None:
    rng = np.random.default_rng(6)
    c, d, error = 20.0, 500.0, 0.05
    found = [
        st.finite_width_allowance(WIDTHS, series(1, c, d, error, error * rng.standard_normal(5)), 1)
        for _ in range(REPEATS)
    ]
    values = np.array([f.value for f in found])
    assert within_monte_carlo(values, c / 1024 + d / 1024**2)
    # normal: the standard deviation's own relative error is 1 / sqrt(2 n)
    assert values.std(ddof=1) == pytest.approx(found[0].standard_error, rel=4 / np.sqrt(2 * REPEATS))


def test_one_width_allows_nothing_and_two_fit_one_term() -> None:
    assert st.finite_width_allowance(WIDTHS[:1], series(1, 64.0, 0.0, 0.1)[:1], 1) == (0.0, 0.0)
    found = st.finite_width_allowance(WIDTHS[:2], series(1, 64.0, 0.0, 0.1)[:2], 1)
    assert found.value == pytest.approx(0.5, rel=1e-12)
    assert found.standard_error == pytest.approx(0.05, rel=1e-12)


def test_agreement_is_three_combined_standard_errors_about_the_allowance() -> None:
    allowance = st.Allowance(0.5, 0.4)
    for value, expected in ((3.0, True), (3.02, False), (0.0, True), (-0.02, False)):
        assert st.agrees(st.Statistic(value, 1.0, 0.3), allowance) is expected
    assert not st.agrees(st.Statistic(float("nan"), 1.0, 0.3), allowance)


def test_relative_errors_are_root_mean_squares_over_points_and_outputs() -> None:
    rng = np.random.default_rng(7)
    predicted, seen, scale = rng.standard_normal((3, 2, 4, M, C))
    found = st.relative_errors(predicted, seen, scale)
    assert found.shape == (2, 4)
    one = np.linalg.norm(seen[1, 2] - predicted[1, 2]) / np.linalg.norm(scale[1, 2])
    assert found[1, 2] == pytest.approx(one, rel=1e-12)
