"""Bands of predictions on the sine functions of FE-2024, section V, and what they are worth with and without data."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedtangent.measures import uncertainty
from fedtangent.measures.paired import half_width
from fedtangent.types import Gaussian

NORMAL_95 = 1.959963984540054  # the normal quantile of 0.975
EDGE = 0.5  # data lie in [-1, -0.5] and [0.5, 1]
REGIONS = ("data", "gap")
SCORES = ("coverage", "width", "nll")


class Band(NamedTuple):
    """A prediction and its 95 % band at m points."""

    mean: np.ndarray  # [m]
    sd: np.ndarray  # [m]
    members: np.ndarray  # [K, m]; K = 0 for a process


def of_members(members: np.ndarray, noise_variance: float = 0.0) -> Band:
    """The mean of models [K, m, 1] with ``uncertainty.predictive_interval``: their variance plus ``noise_variance``.

    One model has no variance of its own: its band is that of the noise alone, constant over inputs.
    """
    interval = uncertainty.predictive_interval(jnp.asarray(members), noise_variance=noise_variance)
    half = 0.5 * np.asarray(interval.high - interval.low)[:, 0]
    return Band(members.mean(axis=0)[:, 0], half / NORMAL_95, members[:, :, 0])


def of_processes(means: np.ndarray, covariances: np.ndarray) -> Band:
    """A model drawn at random among K Gaussian processes of means [K, m, 1] and covariances [K, m, m]."""
    variance = np.diagonal(covariances, axis1=1, axis2=2).mean(axis=0) + means[:, :, 0].var(axis=0)
    return Band(means.mean(axis=0)[:, 0], np.sqrt(np.maximum(variance, 0)), np.zeros((0, means.shape[1])))


def of_limit(limit: Gaussian) -> Band:
    """The process of Theorem 2."""
    return of_processes(np.asarray(limit.mean)[None], np.asarray(limit.cov)[None])


def region(x: np.ndarray, name: str) -> np.ndarray:
    """Which inputs [m, 1] lie where there are data, or in the gap: [m] bool."""
    inside = np.abs(x[:, 0]) >= EDGE - 1e-9
    return inside if name == "data" else ~inside


def noise_variance(truth: np.ndarray) -> np.ndarray:
    """Variance of an observation at inputs where the true function is ``truth``: ``y = a sin(2 pi x) + eps``.

    ``a ~ N(1, 0.2^2)`` and ``eps ~ N(0, 0.2^2)`` (FE-2024, section V-A), so it is ``0.2^2 sin(2 pi x)^2 + 0.2^2``.
    """
    return 0.2**2 * truth**2 + 0.2**2


def scores(band: Band, x: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Coverage of the true function [m, 1], mean width and mean NLL of an observation, in each region.

    The NLL is the expectation of ``-log N(y; mean, sd^2)`` over an observation y of a new client, in nats, exactly. A
    band that has no width at some point of a region has an infinite one.
    """
    found = {}
    low, high = (band.mean + sign * NORMAL_95 * band.sd for sign in (-1, 1))
    for name in REGIONS:
        at = region(x, name)
        interval = uncertainty.Interval(jnp.asarray(low[at]), jnp.asarray(high[at]))
        found[f"coverage.{name}"] = float(uncertainty.coverage(interval, jnp.asarray(truth[at, 0])))
        found[f"width.{name}"] = float(np.mean(high[at] - low[at]))
        missed = (band.mean - truth[:, 0])[at] ** 2 + noise_variance(truth[at, 0])
        variance = band.sd[at] ** 2
        found[f"nll.{name}"] = np.inf
        if np.all(variance > 0):
            found[f"nll.{name}"] = float(np.mean(0.5 * np.log(2 * np.pi * variance) + missed / (2 * variance)))
    found["ratio"] = found["width.gap"] / found["width.data"] if found["width.data"] > 0 else np.inf
    return found


class Summary(NamedTuple):
    """A score over seeds: its mean and a 95 % interval."""

    mean: float
    low: float
    high: float


def summary(name: str, values: Any) -> Summary:
    """Student's interval over seeds; for a coverage Wilson's, of as many independent points as there are seeds.

    A ratio is averaged as its logarithm, in which it is symmetric: its mean is the geometric one.
    The points of one seed share its models, so the number of points says nothing about how sure a coverage is.
    """
    values = np.asarray(values, np.float64)
    mean = float(np.mean(values))
    if name.startswith("coverage"):
        ends = uncertainty.coverage_interval(mean, len(values))
        return Summary(mean, float(ends.low), float(ends.high))
    if not np.all(np.isfinite(values)):
        return Summary(mean, np.nan, np.nan)
    if name == "ratio":
        return Summary(*(float(np.exp(v)) for v in summary("logarithm", np.log(values))))
    half = float(half_width(values))
    return Summary(mean, mean - half, mean + half)
