"""Bias and variance of an ensemble: the closed form against weight-space loops and Monte Carlo in plain NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedtangent._src.theory.fed_ensemble.bias_variance import (
    EnsembleLaw,
    corollary_1,
    decompose_laws,
    decompose_runs,
    ensemble_law,
    ensemble_laws,
)
from fedtangent._src.theory.fed_ensemble.limit import gp_limit
from fedtangent._src.theory.flow import federated_flow
from fedtangent._src.types import Cohort

pytestmark = pytest.mark.theory
SIZES = [3, 1, 5, 2, 7, 6]
ROUNDS, K = 7, 3


@pytest.fixture
def runs(maker):
    """The same problem under five schedules of three models, as weight-space loops."""
    first = maker.run(SIZES, maker.permutations(SIZES, ROUNDS, K), K)
    others = [maker.permutations(SIZES, ROUNDS, K) for _ in range(4)]
    return [first] + [
        type(first)(**{**vars(first), "client": c, "model": m, "weight": w}) for c, m, w in others
    ]  # fmt: skip


def brute_force(run, r: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of the average of K models after r rounds, from the weights themselves."""
    zero = np.zeros((run.train.shape[1], run.y.shape[1]))
    mean = np.mean([run.test @ run.weights(k, zero)[r] for k in range(K)], axis=0)
    return mean, sum(np.diag(run.covariance(k, r)) for k in range(K)) / K**2


@pytest.mark.parametrize("r", [0, 1, 4, ROUNDS])
def test_the_law_of_the_ensemble_is_that_of_the_weights(runs, r):
    for run in runs[:2]:
        mean, variance = brute_force(run, r)
        law = ensemble_law(run.flow(), r)
        np.testing.assert_allclose(law.mean, mean, atol=1e-11)
        np.testing.assert_allclose(law.variance, variance, rtol=1e-10)


def test_all_schedules_and_rounds_in_one_pass_are_each_by_itself(runs, monkeypatch):
    wanted = (ROUNDS, 0, 3)

    def laws():
        return ensemble_laws(*runs[0].problem[:3], [run.cohorts for run in runs], runs[0].rule(), wanted, K)

    found = laws()
    for run, of_run in zip(runs, found, strict=True):
        for r, law in zip(wanted, of_run, strict=True):
            mean, variance = brute_force(run, r)
            np.testing.assert_allclose(law.mean, mean, atol=1e-11)
            np.testing.assert_allclose(law.variance, variance, rtol=1e-9)
    assert np.abs(found[0][0].mean - found[1][0].mean).max() > 1e-3  # the schedule matters
    monkeypatch.setattr("fedtangent._src.theory.fed_ensemble.bias_variance.MODELS_AT_ONCE", 2 * K)
    for one, other in zip(found, laws(), strict=True):
        np.testing.assert_allclose(one[0].variance, other[0].variance, rtol=1e-12)


def test_a_kernel_that_couples_outputs_has_a_variance_for_each(runs):
    run = runs[0]
    both = [None if b is None else np.kron(b, np.diag([1.0, 2.0])) for b in run.blocks]
    flow = federated_flow(type(run.blocks)(*both), *run.problem[1:], run.rule(), num_models=K, outputs="full")
    law = ensemble_law(flow, ROUNDS)
    assert law.variance.shape == law.mean.shape
    np.testing.assert_allclose(law.variance[:, 0], brute_force(run, ROUNDS)[1], rtol=1e-10)


def sampler(runs, shrink: float = 1.0):
    """A function of (draws, rng): trained ensembles [S, J, m, C] from weights drawn with ``shrink`` times the prior."""
    zero = np.zeros((runs[0].train.shape[1], runs[0].y.shape[1]))
    trained = [
        [(run.test @ run.weights(k, zero)[-1], run.test @ run.weight_maps(k)[-1]) for k in range(K)] for run in runs
    ]
    scale = np.sqrt(shrink * runs[0].prior)[:, None]

    def draw(draws: int, rng: np.random.Generator) -> np.ndarray:
        return np.stack([
            np.mean([mean + moved @ (scale * rng.standard_normal((draws, *zero.shape))) for mean, moved in of], axis=0)
            for of in trained
        ])  # fmt: skip

    return draw


@pytest.mark.parametrize("shrink", [1.0, 0.01])
def test_monte_carlo_agrees_within_three_standard_errors_and_wrong_theories_do_not(runs, shrink):
    rng = np.random.default_rng(5)
    expected, draw = rng.standard_normal((5, 2)), sampler(runs, shrink)
    laws = [EnsembleLaw(mean, shrink * variance) for mean, variance in (brute_force(run, ROUNDS) for run in runs)]
    exact = decompose_laws(laws, expected, 0.3)
    repeated = [decompose_runs(draw(60, rng), expected, 0.3) for _ in range(60)]  # under these five schedules
    away = {}
    for name in ("bias", "initialisation", "schedules", "variance", "total"):
        values = np.array([getattr(d, name).value for d in repeated])
        away[name] = lambda of, values=values: abs(values.mean() - of) / (values.std(ddof=1) / np.sqrt(len(values)))
        assert away[name](getattr(exact, name).value) < 3, name
    assert away["initialisation"](K * exact.initialisation.value) > 30  # not divided by K
    if shrink < 1:  # what schedules add shows beside what initial functions leave
        assert away["variance"](exact.initialisation.value) > 10
        assert away["schedules"](0.0) > 10


def test_the_terms_sum_to_the_mean_squared_error(runs):
    rng = np.random.default_rng(6)
    found = decompose_runs(sampler(runs)(3, rng), np.ones((5, 2)), 0.3)
    total = found.noise + found.bias.value + found.initialisation.value + found.schedules.value
    assert found.total.value == pytest.approx(total, rel=1e-12)
    independent = rng.standard_normal((9, 5, 2))
    parts = decompose_runs(independent, np.ones((5, 2)), 0.3)
    variance = independent.var(axis=0, ddof=1).mean()
    bias = np.mean((independent.mean(axis=0) - 1) ** 2) - variance / 9
    assert parts.variance.value == pytest.approx(variance) and parts.bias.value == pytest.approx(bias)
    assert parts.total.value == pytest.approx(0.3 + np.mean((independent - 1) ** 2))
    assert np.isnan(parts.schedules.value)


def test_standard_errors_are_those_of_repetition():
    rng = np.random.default_rng(7)

    def draw():
        return 0.5 + rng.standard_normal((12, 1, 4, 1)) + 2 * rng.standard_normal((12, 6, 4, 1))

    found = [decompose_runs(draw(), np.zeros((4, 1))) for _ in range(300)]
    for name, truth in (("bias", 0.25), ("initialisation", 4.0), ("schedules", 1.0), ("variance", 5.0)):
        values = np.array([getattr(d, name).value for d in found])
        assert abs(values.mean() - truth) < 3 * values.std() / np.sqrt(300)
        claimed = np.sqrt(np.mean([getattr(d, name).standard_error ** 2 for d in found]))
        assert claimed == pytest.approx(values.std(), rel=0.2)


def test_a_given_schedule_is_exact(runs):
    law = EnsembleLaw(*brute_force(runs[0], ROUNDS))
    found = decompose_laws([law], np.zeros((5, 2)))
    assert found.schedules == (0.0, 0.0) and found.variance.standard_error == 0
    assert found.variance.value == pytest.approx(law.variance.mean())


def test_corollary_1(maker):
    run = maker.run(SIZES, maker.permutations(SIZES, 3000, K), K)
    flow = run.flow()
    found = corollary_1(run.blocks, run.y, K, flow)
    b = run.test @ run.train.T @ np.linalg.inv(run.train @ run.train.T)
    left = (np.eye(run.train.shape[1]) * np.sqrt(run.prior)).T
    spread = (run.test - b @ run.train) @ left
    np.testing.assert_allclose(found.limit, np.sum(spread**2, axis=1) / K, rtol=1e-9)
    np.testing.assert_allclose(found.mean, b @ run.y, atol=1e-9)
    assert all(a.holds for a in found.assumptions)
    early = corollary_1(run.blocks, run.y, K, flow, 20)
    for r, of in ((20, early), (3000, found)):
        law = ensemble_law(flow, r)
        np.testing.assert_allclose(of.at_round, law.variance[:, None] + (law.mean - found.mean) ** 2, rtol=1e-9)
    distance = [np.max(np.abs(of.at_round - found.limit[:, None])) for of in (early, found)]
    assert distance[1] < 1e-3 * distance[0]  # the left side of eq. (11) tends to the right one, with no remainder
    assert np.min(K * found.limit / np.diag(gp_limit(run.blocks, run.y).cov)) == pytest.approx(1)


def test_corollary_1_reports_a_singular_kernel_and_an_unstable_step(maker):
    run = maker.run(SIZES, maker.permutations(SIZES, ROUNDS, K), K, rates=np.full(ROUNDS, 100.0))
    twice = [None if b is None else np.array(b) for b in run.blocks]
    blocks = type(run.blocks)(*twice)
    blocks.ntk_train[1], blocks.ntk_train[:, 1] = blocks.ntk_train[0], blocks.ntk_train[:, 0]
    blocks.ntk_train[1, 1] = blocks.ntk_train[0, 0]
    flow = federated_flow(blocks, *run.problem[1:], run.rule(), num_models=K)
    found = corollary_1(blocks, run.y, K, flow, max_relative_jitter=0.0)
    assert found.limit is None and found.at_round is None and found.variance is not None
    assert [a.holds for a in found.assumptions] == [False, False]


def test_bad_input(runs):
    run, ones = runs[0], np.ones((4, 5, 2))
    (blocks, y, partition, _), rule = run.problem, run.rule()
    cases = {
        "runs: got": lambda: decompose_runs(ones[:1], ones[0]),
        "runs: got .* S, J >= 2": lambda: decompose_runs(ones[:, None], ones[0]),
        "expected: got shape": lambda: decompose_runs(ones, ones[0, :4]),
        "runs: got nan": lambda: decompose_runs(ones * np.nan, ones[0]),
        "noise_variance: got -1.0": lambda: decompose_runs(ones, ones[0], -1.0),
        "laws: got": lambda: decompose_laws([], ones[0]),
        r"expected: got shape \(4, 2\)": lambda: decompose_laws([EnsembleLaw(ones[0], ones[0, :, 0])], ones[0, :4]),
        "num_models: got 0": lambda: corollary_1(blocks, y, 0),
        "num_models: got 4, must be that of the flow": lambda: corollary_1(blocks, y, 4, run.flow()),
        r"cohorts: got shapes \[\], must be": lambda: ensemble_laws(blocks, y, partition, [], rule, (1,), K),
        "rule: got .*'cross_entropy'": lambda: ensemble_laws(
            blocks, y, partition, [run.cohorts], replace(rule, loss="cross_entropy"), (1,), K
        ),
        "kernels: got None as nngp_train": lambda: ensemble_laws(
            blocks._replace(nngp_test=None), y, partition, [run.cohorts], rule, (1,), K
        ),
        "cohorts: got .*, must be one or more of one shape": lambda: ensemble_laws(
            blocks, y, partition, [run.cohorts, Cohort(*(leaf[:2] for leaf in run.cohorts))], rule, (1,), K
        ),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()
