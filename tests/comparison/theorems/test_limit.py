"""The check of Theorem 2: a right law holds at every seed, and near misses are noticed."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from fedtangent._src.comparison.predicted import ModelLaw
from fedtangent._src.comparison.theorems.fed_ensemble import limit
from fedtangent._src.comparison.theorems.fed_ensemble.limit import (
    NAMES,
    Ensembles,
    Sampled,
    covered,
    entries,
    expected_cover,
    expected_ratios,
)

from ...nightly import nightly
from ..drawn import drawn

K, M, C = 50, 6, 3


@functools.cache
def law(seed: int = 0) -> ModelLaw:
    """Models whose means and covariances differ from one to the next, points strongly correlated."""
    rng = np.random.default_rng(seed)
    factor = rng.standard_normal((M, 3)) + 0.1 * rng.standard_normal((K, M, 3))
    cov = factor @ factor.swapaxes(1, 2) + 0.05 * np.eye(M)
    return ModelLaw(rng.standard_normal((K, M, C)), cov)


def draw(from_law: ModelLaw, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return from_law.mean + np.linalg.cholesky(from_law.cov) @ rng.standard_normal(from_law.mean.shape)


def test_standard_errors_are_those_of_repeated_draws() -> None:
    right = law()
    repeated = [entries(draw(right, seed), right) for seed in range(1, 1001)]
    for part in NAMES:
        measured = np.stack([found[part].measured for found in repeated])
        scatter, error = measured.std(axis=0, ddof=1), repeated[0][part].standard_error
        # a standard deviation over 1,000 draws is known to about 2.2 %; covariances of unequal models are the mean's
        np.testing.assert_allclose(scatter, error, rtol=0.13)
        bias = (measured.mean(axis=0) - repeated[0][part].predicted) / (scatter / np.sqrt(1000))
        assert np.max(np.abs(bias)) < 4.5


def test_entries_are_plain_means_and_covariances() -> None:
    right, samples = law(), draw(law(), 5)
    found = entries(samples, right)
    np.testing.assert_allclose(found["mean"].measured.reshape(M, C), samples.mean(axis=0), rtol=1e-12)
    for c in range(C):
        plain = np.cov((samples - right.mean)[:, :, c].T)
        np.testing.assert_allclose(found["variance"].measured.reshape(M, C)[:, c], np.diag(plain), rtol=1e-12)
        above = plain[np.triu_indices(M, 1)]
        np.testing.assert_allclose(found["covariance"].measured.reshape(-1, C)[:, c], above, rtol=1e-12)


@functools.cache
def sampled(seed: int, off: float = 3.0, by: float = 1.0) -> Ensembles:
    """Networks of two widths that scatter about their own draws by O(width^-1/2), with a variance ``by`` too large.

    At a finite width the variance is off by some percent more, as 1 / width.
    """
    right, rng = law(), np.random.default_rng(seed + 1000)
    found = []
    for width in (128, 512):
        own = draw(right, 10 * seed + width)
        away = np.sqrt(by * (1 - 20 / width)) * (own - right.mean)
        noise = off / np.sqrt(width) * rng.standard_normal(own.shape)
        found.append(Sampled(width, right.mean + away + noise - noise.mean(axis=0), own))
    return Ensembles(tuple(found), right)


@pytest.mark.parametrize("ratio", [Ensembles.variance_ratio, Ensembles.covariance_ratio])
def test_intervals_hold_the_ratio_at_infinite_width_and_not_that_of_a_width(ratio) -> None:
    """The noise adds off^2 / width to the variance: the covariance's part of that is nothing, and all of it is 0."""
    right = law()
    found = [ratio(sampled(seed, 1.0), right) for seed in range(100)]
    values, lengths = [each.value for each in found], [each.length / 2 for each in found]
    np.testing.assert_allclose(values, 1, rtol=0, atol=0.1)
    assert sum(not each.low <= 1 <= each.high for each in found) <= 1
    # half an interval is 3.9 standard deviations at LEVEL, a little more at 98 degrees of freedom
    assert np.mean(lengths) / np.std(values, ddof=1) == pytest.approx(4.07, rel=0.25)
    narrow = sampled(0, 1.0)
    assert ratio(narrow._replace(sampled=narrow.sampled[:1]), right).value < 0.9


def test_ratios_to_wrong_laws_are_as_expected() -> None:
    right = law()
    wide = right._replace(cov=1.5 * right.cov)
    assert expected_ratios(right, wide) == pytest.approx((1 / 1.5, 1 / 1.5))
    assert expected_ratios(right, right) == pytest.approx((1, 1))
    nugget = right._replace(cov=right.cov + np.eye(M))  # variances alone
    assert expected_ratios(right, nugget)[1] == pytest.approx(1) and expected_ratios(right, nugget)[0] < 0.9
    assert sampled(0).variance_ratio(wide).value == pytest.approx(1 / 1.5, abs=0.05)
    assert sampled(0).covariance_ratio(wide).value == pytest.approx(1 / 1.5, abs=0.05)
    assert sampled(0, by=1.3).variance_ratio(right).within(0.9, 1.1) is False
    assert sampled(0, by=1.3).covariance_ratio(right).within(0.9, 1.1) is False


def test_the_variance_of_few_models_is_not_short() -> None:
    """About their own average four models have 3/4 of the scatter: of perfect networks the answer is exact."""
    right = law()
    few = ModelLaw(right.mean[:4], right.cov[:4])
    values = []
    for seed in range(400):
        own = draw(few, seed)
        one = Sampled(100, few.mean + 1.2 * (own - few.mean), own)
        values.append(Ensembles((one,), few).variance_ratio(few).value)
    error = np.std(values) / np.sqrt(len(values))
    assert np.mean(values) == pytest.approx(1.44, abs=4 * error) and 4 * error < 0.06


def test_coverage_is_that_of_the_law_and_a_wrong_law_covers_what_is_expected() -> None:
    right = law()
    assert expected_cover(right, right) == pytest.approx(0.95)
    wide, moved = right._replace(cov=1.44 * right.cov), right._replace(mean=right.mean + 1.0)
    assert expected_cover(right, wide) == pytest.approx(0.981325, abs=1e-6)  # 2 Phi(1.2 z) - 1
    many = [draw(right, seed) for seed in range(200)]
    for wrong in (wide, moved):
        shares = [covered(s, wrong).mean() for s in many]
        error = np.std(shares) / np.sqrt(len(shares))
        assert np.mean(shares) == pytest.approx(expected_cover(right, wrong), abs=4 * error)
        found = sampled(1, 0.5).cover(wrong)
        assert found.low <= expected_cover(right, wrong) <= found.high
    assert sampled(1, 0.5).cover(right).within(0.93, 0.97)


@pytest.mark.parametrize("seed", nightly(range(4), [0]))
def test_networks_drawn_from_the_limit_pass_every_check_at_every_seed(seed: int) -> None:
    found = limit.rows(drawn(seed=seed))
    assert len(found) == 5 and all(row.passed for row in found), found
    assert all(row.notices for row in found)


def test_networks_off_by_what_is_noticed_are_rejected() -> None:
    result = drawn(seed=0)
    size = np.linalg.norm(result.law.mean[0])
    for off, holds in ((0.0, True), (0.3, False)):
        shift = off * result.movement / size * result.law.mean
        shifted = tuple(t._replace(samples=t.samples + shift) for t in result.trained)
        assert limit.rows(result._replace(trained=shifted))[1].holds is holds
    narrow = tuple(t._replace(samples=0.85 * (t.samples - result.law.mean) + result.law.mean) for t in result.trained)
    assert [row.holds for row in limit.rows(result._replace(trained=narrow))[2:4]] == [False, False]
    assert limit.rows(result._replace(gap=result.early))[0].holds is False


def test_networks_are_judged_by_the_limit_though_their_flow_is_not_quite_there() -> None:
    result = drawn(seed=0)
    off = 0.2 * result.movement / np.linalg.norm(result.law.mean[0]) * result.law.mean
    moments = (result.law._replace(mean=result.law.mean + off),)
    away = tuple(t._replace(own_flow=t.own_flow + off) for t in result.trained)
    found = result._replace(theory=dataclasses.replace(result.theory, moments=moments), trained=away)
    assert limit.rows(found)[1].holds is True  # the networks themselves are at the limit
    away = tuple(t._replace(samples=t.samples + off) for t in away)
    assert limit.rows(found._replace(trained=away))[1].holds is False


def test_noisier_networks_are_undecided_not_right() -> None:
    result, rng = drawn(seed=0), np.random.default_rng(0)
    noisy = tuple(t._replace(samples=t.samples + 3 * rng.standard_normal(t.samples.shape)) for t in result.trained)
    assert all(row.holds is not True for row in limit.rows(result._replace(trained=noisy))[1:])


def test_finite_width_is_what_the_networks_have_beyond_their_own_flow() -> None:
    result = drawn(seed=0)
    law, trained = result.law, result.trained[0]
    perfect = trained._replace(samples=trained.own_flow)
    assert limit.finite_width(perfect, law) == (0, 0)
    wider = perfect._replace(samples=law.mean + 1.1 * (perfect.own_flow - law.mean))
    each = 0.21 * ((perfect.own_flow - law.mean) ** 2 / np.diag(law.average_cov)[None, :, None]).mean(axis=(1, 2))
    assert limit.finite_width(wider, law) == pytest.approx((each.mean(), each.std(ddof=1) / np.sqrt(len(each))))


@pytest.mark.slow
@pytest.mark.theory
def test_networks_of_a_short_run_follow_the_flow_and_not_the_limit() -> None:
    result = limit.compare(limit._digits(0, 40, (128, 512), 100))
    assert result.of == "the flow's law at round 100" and not result.gap.reached
    found = limit.rows(result)
    assert not found[0].holds and found[0].control_fails  # so few rounds are too few, and it says so
    assert all(row.holds is not False for row in found[1:]), found


@pytest.mark.slow
@pytest.mark.theory
@pytest.mark.parametrize("seed", [0, 1])
def test_trained_networks_have_the_law(seed: int) -> None:
    found = limit._checks("default", seed)
    assert len(found) == 5 and all(row.passed for row in found), found
