"""Scores of Gaussian predictions against SciPy, and against what a calibrated prediction must give."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import norm

from fedtangent._src.comparison.predicted import ModelLaw, Predicted
from fedtangent._src.comparison.settings import Problem, Setting
from fedtangent._src.comparison.table import _scores, scores, theory_row
from fedtangent._src.data import partition

from ..stand_ins import stand_in


def test_scores_are_those_of_scipys_normal_on_the_odd_points() -> None:
    rng = np.random.default_rng(0)
    mean, variance = rng.standard_normal((40, 3)), rng.uniform(0.2, 2.0, (40, 3))
    y = mean + 2 * rng.standard_normal((40, 3))
    noise = np.mean((y[::2] - mean[::2]) ** 2) - np.mean(variance[::2])
    assert noise > 1e-3
    held = norm(mean[1::2], np.sqrt(variance[1::2] + noise))
    low, high = held.interval(0.95)
    nll, coverage = scores(mean, variance, y)
    assert nll == pytest.approx(-np.mean(held.logpdf(y[1::2])), rel=1e-12)
    assert coverage == pytest.approx(np.mean((low <= y[1::2]) & (y[1::2] <= high)), abs=1e-12)


@pytest.mark.parametrize(("scale", "calibrated"), [(1.0, True), (0.5, False)])
def test_coverage_of_a_calibrated_prediction_is_95_percent(scale: float, calibrated: bool) -> None:
    """``scale`` is the standard deviation that is claimed on the held-out points, relative to the true one."""
    rng = np.random.default_rng(1)
    points = 40_000
    variance = rng.uniform(0.5, 2.0, (points, 1))
    y = np.sqrt(variance + 0.3) * rng.standard_normal((points, 1))
    claimed = np.where(np.arange(points)[:, None] % 2, (scale**2) * (variance + 0.3) - 0.3, variance)
    _, coverage = scores(np.zeros((points, 1)), claimed, y)
    binomial = np.sqrt(0.95 * 0.05 / (points / 2))
    assert bool(abs(coverage - 0.95) <= 4 * binomial) is calibrated


def test_overstated_variance_leaves_a_floor_of_noise() -> None:
    nll, coverage = scores(np.zeros((10, 1)), np.full((10, 1), 4.0), np.zeros((10, 1)))
    assert coverage == 1.0
    assert nll == pytest.approx(0.5 * np.log(2 * np.pi * (4.0 + 1e-6)))


@pytest.mark.parametrize("unit", [1e-12, 1e-4, 1e12])
def test_scores_in_another_unit_are_the_same_law(unit: float) -> None:
    """The variance is overstated, so that the least noise counts."""
    y = np.random.default_rng(2).standard_normal((40, 1))
    mean, variance = y + 0.1, np.full((40, 1), 0.02)
    nll, coverage = scores(mean, variance, y)
    scaled, same = scores(unit * mean, unit**2 * variance, unit * y)
    assert same == coverage and scaled - np.log(unit) == pytest.approx(nll, rel=1e-9)


def classifiers(labels: list[int]) -> Problem:
    y, x = np.eye(2)[labels], np.ones((len(labels), 1))
    return Problem(x, y, x, y, partition.iid(len(labels), 1, seed=0), np.array(labels), loss="cross_entropy")


def test_logits_far_apart_have_a_finite_likelihood() -> None:
    """Of two networks, one says (5000, -5000) and one (5001, -5001); the label is the other class."""
    draws = np.array([[[5000.0, -5000.0]], [[5001.0, -5001.0]]])
    nll, _ = _scores(classifiers([1]), draws.mean(axis=0), draws, np.zeros((1, 2)))
    assert nll == pytest.approx(10000 + np.log(2) - np.log1p(np.exp(-2)), rel=1e-12)
    with np.errstate(divide="ignore"):
        assert np.isneginf(np.log(softmax(draws, axis=-1).mean(axis=0)[0, 1]))


def test_an_ensemble_of_classifiers_averages_probabilities_and_a_dead_one_has_no_accuracy() -> None:
    problem, outputs = classifiers([1]), np.array([[[9.0, 0.0]], [[-4.0, 0.0]], [[-4.0, 0.0]]])
    np.testing.assert_allclose(problem.ensemble(outputs), np.log(softmax(outputs, axis=-1).mean(axis=0)), rtol=1e-12)
    assert problem.accuracy(problem.ensemble(outputs)) == 1 and problem.accuracy(outputs.mean(axis=0)) == 0
    assert np.isnan(problem.accuracy(np.nan * outputs)).all()
    numbers = dataclasses.replace(problem, loss="squared_error")
    assert np.array_equal(numbers.ensemble(outputs), outputs.mean(axis=0))


def test_a_row_of_theory_is_of_the_mean_of_k_draws() -> None:
    """MSE and accuracy beside K independent draws of a Gaussian that are averaged; one draw is far off."""
    rng, points, models = np.random.default_rng(2), 40, 3
    mean, root = 0.3 * rng.standard_normal((points, 2)), rng.standard_normal((points, points)) / 12
    cov, y, labels = root @ root.T, rng.standard_normal((points, 2)), np.argmax(mean, axis=1)
    problem = Problem(np.zeros((2, 1)), np.zeros((2, 2)), np.zeros((points, 1)), y, partition.of([[0, 1]]), labels)
    setting = stand_in(Setting, name="case", problem=problem, num_models=models, is_standard=True)
    law = ModelLaw(mean[None], cov[None])
    row = theory_row(
        stand_in(Predicted, setting=setting, limit=None, sampled=None, moments=(law,)), "flow", mean, cov, 1
    )
    draws = mean + np.einsum("mq,dkqc->dkmc", root, rng.standard_normal((4000, models, points, 2)))
    for ensembles, agrees in ((draws.mean(axis=1), True), (draws[:, 0], False)):
        squares, right = (ensembles - y) ** 2, np.argmax(ensembles, axis=-1) == labels
        for value, each in ((row.test_mse, squares.mean(axis=(1, 2))), (row.accuracy, right.mean(axis=1))):
            # the accuracy of the row is itself of 200 draws
            error = each.std(ddof=1) * (4000**-0.5 + (200**-0.5 if value is row.accuracy else 0.0))
            assert (abs(value - each.mean()) < 4 * error) == agrees
