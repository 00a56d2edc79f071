"""Scores of Gaussian predictions against SciPy, and against what a calibrated prediction must give."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from fedtangent._src.comparison.table import scores


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
