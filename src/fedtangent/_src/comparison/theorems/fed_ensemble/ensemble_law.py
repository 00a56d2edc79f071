"""K trained models and the Gaussian law of each: entry by entry, and as sums at infinite width.

Entries (a point and an output, or two points and an output) are for tables and figures. Verdicts judge sums over
entries: a finite width shifts every entry a little, and hundreds of correlated entries say less than their sum. Each
sum is extrapolated to infinite width (``comparison/statistics.py``), with the same sum of the predictions from the
networks' initial functions, whose expectation is known, as a control variate.

Plain float64 NumPy. Samples are outputs of K models at m points, C outputs each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Float

from fedtangent._src.comparison.predicted import ModelLaw
from fedtangent._src.comparison.statistics import Interval, combined

COVERED = 0.95
Samples = Float[np.ndarray, "K m C"]


class Entries(NamedTuple):
    """One statistic at all its E entries: measured over K models, predicted, and its standard error under the law."""

    measured: Float[np.ndarray, "E"]
    predicted: Float[np.ndarray, "E"]
    standard_error: Float[np.ndarray, "E"]

    @property
    def farthest(self) -> float:
        """The largest distance of an entry from its prediction, in standard errors of that entry."""
        return float(np.max(np.abs(self.measured - self.predicted) / self.standard_error))


def entries(samples: Samples, law: ModelLaw) -> dict[str, Entries]:
    """Computes mean [m C], variance [m C] and off-diagonal covariance [m (m - 1) / 2 C] of K models and of their law.

    Variances and covariances are of ``f_k - mean_k`` about its average, over K - 1. Standard errors are the law's:
    ``sqrt(S_ii / K)`` for a mean, ``sqrt((S_ii S_jj + S_ij^2) / (K - 1))`` for a covariance (a Wishart entry), S the
    average covariance of the models.

    Args:
        samples: Outputs of K models.
        law: Their law.

    Returns:
        The entries of "mean", "variance" and "covariance".
    """
    _check(samples, law)
    count, points, outputs = samples.shape
    residual, cov = samples - law.mean, law.average_cov
    variance = np.diag(cov)
    above = np.triu_indices(points, 1)
    mean, covariance = _moments(residual)
    error = np.sqrt((np.outer(variance, variance) + cov**2) / (count - 1))

    def spread(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, outputs)

    average = law.mean.mean(axis=0)
    return {
        "mean": Entries((average + mean).ravel(), average.ravel(), spread(np.sqrt(variance / count))),
        "variance": Entries(np.diagonal(covariance).T.ravel(), spread(variance), spread(np.diag(error))),
        "covariance": Entries(covariance[above].ravel(), spread(cov[above]), spread(error[above])),
    }


def _moments(residual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns average [m, C] and sample covariance [m, m, C] of residuals [K, m, C]."""
    mean = residual.mean(axis=0)
    centred = (residual - mean).transpose(2, 1, 0)  # [C, m, K]
    return mean, (centred @ centred.swapaxes(1, 2)).transpose(1, 2, 0) / (len(residual) - 1)


def _check(samples: Samples, law: ModelLaw) -> None:
    if samples.ndim != 3 or samples.shape[0] < 2 or samples.shape[1] < 2:
        raise ValueError(f"samples: got shape {samples.shape}, must be [K, m, C] with K and m of at least 2")
    count, points, _ = samples.shape
    if (got := (law.mean.shape, law.cov.shape)) != (must := (samples.shape, (count, points, points))):
        raise ValueError(f"law: got mean and cov of shapes {got}, must be {must}")


def covered(samples: Samples, law: ModelLaw, level: float = COVERED) -> Float[np.ndarray, "K"]:
    """Computes the share of each model's values in the law's central intervals, ``mean_k +- z sd_k``.

    Args:
        samples: Outputs of K models.
        law: Their law.
        level: Probability of an interval.
    """
    _check(samples, law)
    variance = np.diagonal(law.cov, axis1=1, axis2=2)[:, :, None]
    within = np.abs(samples - law.mean) <= scipy.stats.norm.ppf((1 + level) / 2) * np.sqrt(variance)
    return np.asarray(within.mean(axis=(1, 2)))


def expected_cover(right: ModelLaw, law: ModelLaw) -> float:
    """Computes the share of draws from ``right`` in the intervals of ``law``: ``COVERED`` if both are the same.

    Args:
        right: Law of the draws.
        law: Law of the intervals.
    """
    true_sd, sd = (np.sqrt(np.diagonal(one.cov, axis1=1, axis2=2))[:, :, None] for one in (right, law))
    reach, off = scipy.stats.norm.ppf((1 + COVERED) / 2) * sd / true_sd, (law.mean - right.mean) / true_sd
    return float(np.mean(scipy.stats.norm.cdf(off + reach) - scipy.stats.norm.cdf(off - reach)))


class Sampled(NamedTuple):
    """Outputs of K trained networks of one width, and the infinite-width flow from the initial function of each.

    With one hidden layer, mean and covariance of the predictions are known at every width, so the predictions serve as
    control variates of the networks.
    """

    width: int
    networks: Samples
    predicted: Samples


class Ensembles(NamedTuple):
    """The networks of every width with their predictions, and the law of the predictions."""

    sampled: tuple[Sampled, ...]
    exact: ModelLaw

    def cover(self, law: ModelLaw) -> Interval:
        """Estimates the share of networks' values in the intervals of ``law`` at infinite width."""
        expected = expected_cover(self.exact, law)
        values = [covered(one.networks, law) - covered(one.predicted, law) + expected for one in self.sampled]
        return combined([one.width for one in self.sampled], values, by_width=True)

    def variance_ratio(self, law: ModelLaw) -> Interval:
        """Estimates variances of networks over variances of ``law``, summed over points, at infinite width."""
        return self._ratio(np.eye(len(law.average_cov)) / np.trace(law.average_cov))

    def covariance_ratio(self, law: ModelLaw) -> Interval:
        """Estimates off-diagonal covariances of networks over covariances of ``law`` at infinite width.

        It is a regression of the sample covariance S on the law's L, ``sum_i<j S_ij L_ij / sum_i<j L_ij^2``.
        """
        return self._ratio(_off_diagonal(law))

    def _ratio(self, weights: np.ndarray) -> Interval:
        """Estimates ``sum_ij weights_ij S_ij`` of the networks' covariance S at infinite width."""
        exact, values = self.exact, []
        expected = float(np.sum(weights * exact.average_cov))
        for _, networks, predicted in self.sampled:
            change = _products(networks - exact.mean, weights) - _products(predicted - exact.mean, weights)
            values.append(len(networks) / (len(networks) - 1) * change + expected)
        return combined([one.width for one in self.sampled], values, by_width=True)


def expected_ratios(right: ModelLaw, law: ModelLaw) -> tuple[float, float]:
    """Computes the expected ratios of variances and of covariances to the values of ``law``, if ``right`` is true.

    Args:
        right: Law of the networks.
        law: Law that is tested.
    """
    cov = right.average_cov
    return float(np.trace(cov) / np.trace(law.average_cov)), float(np.sum(_off_diagonal(law) * cov))


def _off_diagonal(law: ModelLaw) -> np.ndarray:
    away = law.average_cov - np.diag(np.diag(law.average_cov))
    return np.asarray(away / np.sum(away**2))


def _products(residual: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns ``sum_ij weights_ij r_i r_j`` of each model, averaged over outputs, [K]; r is centred over models."""
    centred = residual - residual.mean(axis=0)
    return np.asarray(np.mean(np.sum(centred * np.einsum("ij,kjc->kic", weights, centred), axis=1), axis=-1))
