"""The check of Theorem 2: a right law holds, wrong ones are noticed, and chance is allowed for."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent.compare.predicted import ModelLaw
from fedtangent.compare.theorems.fed_ensemble import ensemble_law, limit
from fedtangent.compare.theorems.fed_ensemble.ensemble_law import (
    PARTS,
    Null,
    coverage,
    entries,
    judge,
    judge_coverage,
)
from fedtangent.compare.verdicts import Verdict

from ..drawn import drawn

K, M, C = 50, 6, 3


def law(seed: int = 0) -> ModelLaw:
    """Models whose means and covariances differ from one to the next, points strongly correlated."""
    rng = np.random.default_rng(seed)
    factor = rng.standard_normal((M, 3)) + 0.1 * rng.standard_normal((K, M, 3))
    cov = factor @ factor.swapaxes(1, 2) + 0.05 * np.eye(M)
    return ModelLaw(rng.standard_normal((K, M, C)), cov)


def draw(from_law: ModelLaw, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack(
        [
            m + np.linalg.cholesky(c) @ rng.standard_normal(m.shape)
            for m, c in zip(from_law.mean, from_law.cov, strict=True)
        ]
    )


@pytest.fixture(scope="module")
def null() -> Null:
    return ensemble_law.null(law(), 2000)


def test_standard_errors_are_those_of_repeated_draws() -> None:
    right = law()
    repeated = [entries(draw(right, seed), right) for seed in range(1, 1001)]
    for part in PARTS:
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


def test_a_right_law_is_rarely_rejected_and_a_wrong_one_always(null: Null) -> None:
    right = law()
    rejected = dict.fromkeys((*PARTS, "coverage"), 0)
    for seed in range(200):
        samples = draw(right, 10_000 + seed)
        found = entries(samples, right)
        for part in PARTS:
            rejected[part] += not judge(found[part], part, null).holds
        rejected["coverage"] += not judge_coverage(coverage(samples, right), null).holds
    # at most .27 % each, .54 % for the coverage's two; five of 200 would have a chance below 1e-3
    assert max(rejected.values()) <= 4, rejected
    samples = draw(right, 3)
    sd = np.sqrt(np.diag(right.average_cov))[None, :, None]
    moved = right._replace(mean=right.mean + sd)
    wide = right._replace(cov=3 * right.cov)
    alone = right._replace(cov=np.stack([np.diag(np.diag(c)) for c in right.cov]))
    assert not judge(entries(samples, moved)["mean"], "mean", null).holds
    assert not judge(entries(samples, wide)["variance"], "variance", null).holds
    assert not judge(entries(samples, alone)["covariance"], "covariance", null).holds
    for wrong in (wide, right._replace(cov=right.cov / 3), moved):
        assert not judge_coverage(coverage(samples, wrong), null).holds


def test_independent_trials_look_at_one_value_of_each_function() -> None:
    right = law()
    samples = np.array(right.mean)
    for i in range(K * C):
        samples[i // C, i % M, i % C] += 1e6  # out at exactly the looked-at point of every function
    found = coverage(samples, right)
    assert (found.inside, found.trials) == (0, K * C)
    assert found.share == pytest.approx(1 - 1 / M)
    assert ensemble_law.binomial_interval(500) == (459, 488)


def test_a_known_change_of_the_variance_is_allowed_for(null: Null) -> None:
    right = law()
    bias = -0.5
    samples = draw(right._replace(cov=(1 + bias) * right.cov), 8)
    assert coverage(samples, right).share > 0.97
    shares = [coverage(draw(right._replace(cov=(1 + bias) * right.cov), s), right).share for s in range(50)]
    allowed = judge_coverage(coverage(samples, right), null, bias).expected.split(", ")[1]
    low, high = (float(part.strip("%")) / 100 for part in allowed.split(" to "))
    assert low < np.mean(shares) <= high


def test_networks_drawn_from_the_limit_pass_every_check_and_the_wrong_theories_none() -> None:
    result = drawn()
    found = limit.rows(result)
    assert [row.statement.split(" ")[0] for row in found] == ["the", *["mean", "variance", "off-diagonal", "95"] * 2]
    assert all(row.passed for row in found), [row for row in found if not row.passed]
    shifted = tuple(t._replace(samples=t.samples + 1.0) for t in result.trained)
    assert [row.holds for row in limit.rows(result._replace(trained=shifted))[1::4]] == [False, False]
    narrow = tuple(t._replace(samples=0.3 * (t.samples - result.law.mean) + result.law.mean) for t in result.trained)
    failed = limit.rows(result._replace(trained=narrow))
    assert not any(row.holds for row in failed[2::4])
    early = result._replace(gap=result.early)
    assert not limit.rows(early)[0].holds


def test_the_bias_is_what_the_networks_have_beyond_their_own_flow() -> None:
    result = drawn()
    law, trained = result.law, result.trained[0]
    perfect = trained._replace(own_flow=trained.samples)
    bias = limit.variance_bias(perfect, law)
    assert bias.value == 0 and bias.standard_error == 0 and limit.mean_bias(perfect, law) == 0
    wider = perfect._replace(samples=law.mean + 1.1 * (perfect.own_flow - law.mean))
    scale = np.mean((perfect.own_flow - law.mean) ** 2 / np.diag(law.average_cov)[None, :, None])
    found = limit.variance_bias(wider, law)
    assert found.value == pytest.approx(0.21 * scale)
    # of a mean, the jackknife's error is the usual one
    each = (0.21 * (perfect.own_flow - law.mean) ** 2 / np.diag(law.average_cov)[None, :, None]).mean(axis=(1, 2))
    assert found.standard_error == pytest.approx(each.std(ddof=1) / np.sqrt(len(each)))


def test_a_bias_that_falls_with_the_width_is_told_from_one_that_does_not() -> None:
    result = drawn(outputs=8)
    law = result.law

    def biased(by: tuple[float, float]) -> Verdict:
        trained = tuple(
            t._replace(samples=law.mean + np.sqrt(1 + b) * (t.own_flow - law.mean))
            for t, b in zip(result.trained, by, strict=True)
        )
        return limit.rows(result._replace(trained=trained))[-1]

    assert biased((-0.16, -0.04)).passed
    assert not biased((-0.16, -0.16)).holds
    assert not biased((-0.16, -0.16)).control_fails


@pytest.mark.slow
@pytest.mark.theory
def test_networks_of_a_short_run_follow_the_flow_and_not_the_limit() -> None:
    result = limit.compare(limit.sine(0, 12, (64, 256), 60))
    assert result.of == "the flow's law at round 60" and not result.gap.reached
    found = limit.rows(result)
    assert not found[0].holds and found[0].control_fails  # 60 rounds are too few, and it says so
    assert all(row.holds for row in found[1:]), found
    small, large = (limit.mean_bias(t, result.law) for t in result.trained)
    assert small > large > 0
