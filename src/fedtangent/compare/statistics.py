"""Tolerance models: how far apart simulation and theory may be, from sampling error and fitted finite-width terms.

Nothing here is tuned by hand. A sample of networks from a Gaussian process scatters by a known amount, which the
process's own covariance gives; a finite width adds a term that falls as 1/width, which is fitted on the other widths.
All functions are plain float64 NumPy. Samples are [K, E, m, C]: K models (schedules), E independent initialisations,
m points, C outputs, which share a covariance and are independent in the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

NUM_STANDARD_ERRORS = 3.0


class Statistic(NamedTuple):
    """A measured ratio whose expectation under the theory is ``expected``, with its standard error."""

    value: float
    expected: float
    standard_error: float

    @property
    def excess(self) -> float:
        """Measured minus expected."""
        return self.value - self.expected


def _relative_spread(cov: np.ndarray) -> float:
    """``2 |cov|_F^2 / tr(cov)^2``: the relative variance of ``|z|^2`` for ``z ~ N(0, cov)``."""
    return float(2 * np.sum(cov**2) / np.trace(cov) ** 2)


def mean_statistic(samples: np.ndarray, mean: np.ndarray, cov: np.ndarray) -> Statistic:
    """Squared distance of the sample mean from ``mean`` over what the samples' own scatter gives: 1 if they agree.

    ``samples`` [K, E, m, C], E >= 2; ``mean`` [K, m, C]. The distance is summed over points; how strongly the points
    are correlated, and with it the statistic's standard error, is taken from ``cov`` [K, m, m].
    """
    num_models, draws, _, outputs = _checked(samples)
    distance = np.mean(np.sum((samples.mean(axis=1) - mean) ** 2, axis=1))
    scatter = np.mean(np.sum(samples.var(axis=1, ddof=1), axis=1)) / draws
    spread = np.mean([_relative_spread(c) for c in cov]) / (num_models * outputs)
    return Statistic(float(distance / scatter), 1.0, float(np.sqrt(spread * draws / (draws - 1))))


def _checked(samples: np.ndarray) -> tuple[int, ...]:
    if samples.ndim != 4 or samples.shape[1] < 2:
        raise ValueError(f"samples: got shape {samples.shape}, must be [K, E, m, C] with at least 2 draws E")
    return samples.shape


def variance_statistic(samples: np.ndarray, cov: np.ndarray) -> Statistic:
    """Sample variance summed over points, relative to the trace of ``cov``: 1 if they agree.

    ``samples`` [K, E, m, C], E >= 2; ``cov`` [K, m, m].
    """
    num_models, draws, _, outputs = _checked(samples)
    variance = np.sum(samples.var(axis=1, ddof=1), axis=1)  # [K, C]
    ratio = variance / np.trace(cov, axis1=1, axis2=2)[:, None]
    spread = np.mean([_relative_spread(c) for c in cov]) / (num_models * outputs * (draws - 1))
    return Statistic(float(np.mean(ratio)), 1.0, float(np.sqrt(spread)))


SIGNIFICANCE = 0.0027  # two-sided three standard errors
NUM_FLIPS = 20_000


def sign_flip_test(differences: np.ndarray, seed: int = 0) -> float:
    """P-value for paired differences [K, E, m, C] having mean zero, by flipping signs of whole networks at random.

    The statistic is the squared mean over all K E networks, summed over points and outputs. If a network is as likely
    to be above its prediction as below, every pattern of signs is equally likely: no covariance is assumed. With n
    networks no p-value is below 2^(1 - n), so at least 10 are needed to reach ``SIGNIFICANCE``.
    """
    flat = differences.reshape(differences.shape[0] * differences.shape[1], -1)
    gram = flat @ flat.T  # the statistic is s' G s for signs s
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (NUM_FLIPS, len(gram)))
    flipped = np.sum((signs @ gram) * signs, axis=1)
    measured = float(gram.sum())
    return float((1 + np.sum(flipped >= measured * (1 - 1e-12))) / (1 + NUM_FLIPS))


def mean_difference_in_errors(samples: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> float:
    """Mean over points of ``|sample mean - mean|`` in Monte Carlo standard errors; about 0.80 if they agree.

    ``samples`` [draws, m, C]; ``mean`` [m, C]; ``variance`` [m] of one draw.
    """
    error = np.sqrt(np.maximum(variance, 0) / samples.shape[0])[:, None]
    return float(np.mean(np.abs(samples.mean(axis=0) - mean) / error))


class Slope(NamedTuple):
    """A weighted least-squares line."""

    slope: float
    standard_error: float
    intercept: float


def fitted_slope(widths: np.ndarray, errors: list[np.ndarray]) -> Slope:
    """Slope of the mean of log(error) against log(width), for several networks' errors at each width.

    Errors scatter over networks by a factor, so their logarithms are averaged; the standard error of the slope comes
    from that scatter. Raises ``ValueError`` for fewer than 3 widths or fewer than 2 networks at a width.
    """
    if len(widths) < 3:
        raise ValueError(f"widths: got {len(widths)}, must be at least 3 for a slope")
    if (fewest := min(e.size for e in errors)) < 2:
        raise ValueError(f"errors: got {fewest} networks at a width, must be at least 2 for a scatter")
    x, logs = np.log(np.asarray(widths, float)), [np.log(e.ravel()) for e in errors]
    y = np.array([v.mean() for v in logs])
    weight = np.array([v.size / max(v.var(ddof=1), 1e-12) for v in logs])
    return weighted_line(x, y, weight)


def weighted_line(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> Slope:
    """The least-squares line of ``y`` over ``x``, [n] each, with weights that are inverse variances."""
    centre = weight @ x / weight.sum()
    information = weight @ (x - centre) ** 2
    slope = float(weight @ ((x - centre) * y) / information)
    return Slope(slope, float(information**-0.5), float(weight @ y / weight.sum() - slope * centre))


class Allowance(NamedTuple):
    """What a finite width may add at the largest width, extrapolated from the smaller ones."""

    value: float
    standard_error: float


def finite_width_allowance(widths: np.ndarray, statistics: list[Statistic], power: int) -> Allowance:
    """Fit ``excess = c / width^power + d / width^(power + 1)`` on all but the largest width; evaluate it there.

    Weighted least squares with the statistics' own standard errors; the second term only where three or more widths
    remain. ``power`` is 1 for a variance ratio (its leading correction is O(1/width)) and 2 for the squared bias of
    a mean. Returns 0 +- 0 for a single width.
    """
    w = np.asarray(widths, float)
    if len(w) < 2:
        return Allowance(0.0, 0.0)
    order = np.argsort(w)
    rest, largest = order[:-1], w[order[-1]]
    powers = -np.arange(power, power + (2 if len(rest) > 2 else 1), dtype=float)
    basis = (w[rest, None] / largest) ** powers  # 1 in every column at the largest width
    error = np.array([statistics[i].standard_error for i in rest])
    excess = np.array([statistics[i].excess for i in rest])
    covariance = np.linalg.inv((basis / error[:, None] ** 2).T @ basis)
    coefficients = covariance @ (basis.T @ (excess / error**2))
    return Allowance(float(np.sum(coefficients)), float(np.sqrt(np.sum(covariance))))


def agrees(statistic: Statistic, allowance: Allowance) -> bool:
    """Whether a statistic is within ``NUM_STANDARD_ERRORS`` of its expectation plus the finite-width term."""
    error = np.hypot(statistic.standard_error, allowance.standard_error)
    return bool(abs(statistic.excess - allowance.value) <= NUM_STANDARD_ERRORS * error)


def relative_distance(a: np.ndarray, b: np.ndarray) -> float:
    """``|a - b| / |b|``, Euclidean over all entries."""
    return float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(b))


def law_distance(law: Sequence[Any], reference: Sequence[Any]) -> float:
    """The larger of the relative distances of means and covariances."""
    return max(relative_distance(a, b) for a, b in zip(law, reference, strict=True))


def relative_errors(predicted: np.ndarray, seen: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Root mean square of ``seen - predicted`` over the last two axes, relative to that of ``scale``."""
    return np.sqrt(np.mean((seen - predicted) ** 2, axis=(-2, -1)) / np.mean(scale**2, axis=(-2, -1)))
