"""Differences between the configurations of a sweep and a baseline, with confidence intervals over seeds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float64

from fedtangent._src.checks import choice, number, whole
from fedtangent._src.intervals import half_width

if TYPE_CHECKING:  # a run measures its metrics, so that the engine stands above this package
    from fedtangent._src.engine.sweeps import Config, Sweep


class Difference(NamedTuple):
    """Metric of a configuration minus the metric of the baseline, averaged over seeds.

    Attributes:
        config: Options of the configuration.
        mean: Mean difference over seeds.
        low, high: Ends of its confidence interval.
        standard_error: Standard error of the mean.
        num_seeds: Number of seeds.
    """

    config: Config
    mean: float
    low: float
    high: float
    standard_error: float
    num_seeds: int

    @property
    def significant(self) -> bool:
        """Whether the confidence interval excludes zero."""
        return self.low > 0 or self.high < 0


def differences(
    sweep: Sweep, metric: str, baseline: Config, evaluation: int = -1, confidence: float = 0.95
) -> list[Difference]:
    """Computes the difference of every configuration of a sweep from a baseline, with a confidence interval.

    Differences are paired: both runs have the same seed. The confidence intervals are Student's t over seeds.

    Args:
        sweep: Runs of all configurations with the same seeds.
        metric: Name of a metric with one number for each run and evaluation.
        baseline: Values of some options, by name, that only one configuration of the sweep has.
        evaluation: Index into ``sweep.rounds``, by default the last.
        confidence: Level of the intervals.

    Returns:
        The differences in the order of the sweep, without the baseline.

    Raises:
        ValueError: There are fewer than two seeds, the metric is unknown or not one number for each run, ``evaluation``
            is out of range, ``baseline`` does not identify exactly one configuration, or ``confidence`` is outside
            (0, 1).
    """
    values = _values(sweep, metric, evaluation)
    number("confidence", confidence, above=0, below=1)
    matching = [i for i, c in enumerate(sweep.configs) if all(k in c and c[k] == v for k, v in baseline.items())]
    if len(matching) != 1:
        raise ValueError(f"baseline: got {baseline}, which names {len(matching)} configurations, must name exactly one")
    base = values[:, matching[0]]
    others = [(config, values[:, i]) for i, config in enumerate(sweep.configs) if i != matching[0]]
    return [_difference(config, mine - base, confidence) for config, mine in others]


def _values(sweep: Sweep, metric: str, evaluation: int) -> Float64[np.ndarray, "seeds configs"]:
    """Checks arguments of ``differences``; returns the metric of every run at one evaluation, [seeds, configs]."""
    choice("metric", metric, sweep.metrics)
    if sweep.metrics[metric].ndim != 3:
        shape = sweep.metrics[metric].shape[3:]
        raise ValueError(
            f"metric: got {metric!r}, an array of shape {shape} for each run, must be one number for each run"
        )
    if len(sweep.seeds) < 2:
        raise ValueError("sweep: got runs of one seed, must have at least 2 seeds, for intervals")
    whole("evaluation", evaluation, -len(sweep.rounds), len(sweep.rounds) - 1)
    return sweep.metrics[metric][:, :, evaluation].astype(np.float64)


def _difference(config: Config, apart: Float64[np.ndarray, "seeds"], confidence: float) -> Difference:
    mean, half = float(np.mean(apart)), float(half_width(apart, confidence))
    error = float(np.std(apart, ddof=1)) / math.sqrt(len(apart))
    return Difference(config, mean, mean - half, mean + half, error, len(apart))
