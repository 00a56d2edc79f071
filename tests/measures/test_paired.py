"""Paired differences: against scipy's t tests, and how often their intervals cover the truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedtangent._src.engine.sweeps import Sweep
from fedtangent._src.measures.paired import differences

CONFIGS = ({"rate": 0.1, "mu": 0.0}, {"rate": 0.1, "mu": 1.0}, {"rate": 0.2, "mu": 0.0})


def made(values: np.ndarray) -> Sweep:
    """A sweep of one metric [seeds, configs]; it is 0 at the evaluation before."""
    metric = np.stack([np.zeros_like(values), values], axis=2)
    metrics = {"mse": metric, "outputs": metric[..., None]}
    return Sweep(CONFIGS, tuple(range(len(values))), np.array([0, 4]), metrics)


def sample(seeds: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(seeds, 1)) + np.array([[0.0, 0.1, 0.2]]) + 0.1 * rng.normal(size=(seeds, 3))


@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_intervals_are_those_of_the_paired_t_test(confidence: float) -> None:
    values = sample(7)
    found = differences(made(values), "mse", {"mu": 0.0, "rate": 0.1}, confidence=confidence)
    assert [d.config for d in found] == [CONFIGS[1], CONFIGS[2]]
    for d, i in zip(found, (1, 2), strict=True):
        test = stats.ttest_rel(values[:, i], values[:, 0])
        interval = test.confidence_interval(confidence)
        np.testing.assert_allclose([d.low, d.high], [interval.low, interval.high], rtol=1e-10)
        np.testing.assert_allclose(d.mean, np.mean(values[:, i] - values[:, 0]), rtol=1e-12)
        assert d.num_seeds == 7
        if confidence == 0.95:
            assert d.significant == (test.pvalue < 0.05)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    hits = independent = 0
    for seed in range(400):
        values = sample(5, seed)
        d = differences(made(values), "mse", {"rate": 0.2}, confidence=0.8)[0]
        hits += d.low < -0.2 < d.high
        apart = stats.ttest_ind(values[:, 0], values[:, 2], equal_var=False).confidence_interval(0.8)
        independent += apart.low < -0.2 < apart.high
    error = np.sqrt(0.8 * 0.2 / 400)
    assert abs(hits / 400 - 0.8) < 4 * error
    assert independent / 400 - 0.8 > 4 * error  # taken as independent they are far too wide


def test_equal_samples_have_no_width() -> None:
    values = np.ones((4, 3))
    for d in differences(made(values), "mse", {"rate": 0.2}):
        assert (d.mean, d.low, d.high, d.significant) == (0.0, 0.0, 0.0, False)
    assert differences(made(sample(4)), "mse", {"rate": 0.2}, evaluation=0)[0].mean == 0.0


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"metric": "loss"}, "metric: got 'loss', allowed are mse, outputs"),
        ({"metric": "outputs"}, r"metric: got 'outputs', an array of shape \(1,\) for each run"),
        ({"baseline": {"rate": 0.1}}, "names 2 configurations"),
        ({"baseline": {"rate": 0.3}}, "names 0 configurations"),
        ({"baseline": {"alpha": 0.3}}, "names 0 configurations"),
        ({"evaluation": 2}, "evaluation: got 2, must be a whole number from -2 to 1"),
        ({"confidence": 1.0}, "confidence: got 1.0"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], named: str) -> None:
    arguments = {"metric": "mse", "baseline": {"rate": 0.2}} | changed
    with pytest.raises(ValueError, match=named):
        differences(made(sample(3)), **arguments)


def test_one_seed_has_no_interval() -> None:
    with pytest.raises(ValueError, match="sweep: got runs of one seed, must have at least 2"):
        differences(made(sample(1)), "mse", {"rate": 0.2})
