"""K trained models against the Gaussian law of each: mean, variance, covariances and coverage, entry by entry.

An entry (a point and an output, or two points and an output) is within three standard errors, or not. With hundreds of
correlated entries some are not, even if the law is exactly right. How many, and how far out the farthest lies, is
found by drawing K models from the law itself again and again (a parametric bootstrap over models): points keep their
correlation, models and outputs are independent. A share of entries beyond, or a farthest entry, that those draws
reach in fewer than ``SIGNIFICANCE / 2`` of the cases disagrees.

Plain float64 NumPy. Samples are [K, m, C]: K models, m points, C outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.stats import binom, norm

from fedtangent.compare.predicted import ModelLaw
from fedtangent.compare.statistics import NUM_STANDARD_ERRORS, SIGNIFICANCE

LEVEL = 0.95
NUM_DRAWS = 4000
PARTS = ("mean", "variance", "covariance")


class Entries(NamedTuple):
    """One statistic at all its entries E: measured over K models, expected, and its standard error under the law."""

    measured: np.ndarray  # [E]
    predicted: np.ndarray  # [E]
    standard_error: np.ndarray  # [E]

    @property
    def deviation(self) -> np.ndarray:
        """Measured minus predicted in standard errors, [E]."""
        return (self.measured - self.predicted) / self.standard_error

    @property
    def share_beyond(self) -> float:
        """Share of entries farther than three standard errors."""
        return float(np.mean(np.abs(self.deviation) > NUM_STANDARD_ERRORS))

    @property
    def farthest(self) -> float:
        """Largest distance of any entry, in standard errors."""
        return float(np.max(np.abs(self.deviation)))


def entries(samples: np.ndarray, law: ModelLaw) -> dict[str, Entries]:
    """Mean [m C], variance [m C] and off-diagonal covariance [m (m - 1) / 2 C] of K models beside their law.

    Variances and covariances are those of ``f_k - mean_k`` about its own average, over K - 1. Standard errors are the
    law's: ``sqrt(S_ii / K)`` for a mean, ``sqrt((S_ii S_jj + S_ij^2) / (K - 1))`` for a covariance (a Wishart
    entry), S the average covariance of the models.
    """
    _check(samples, law)
    count, points, outputs = samples.shape
    residual, cov = samples - law.mean, law.average_cov
    variance = np.diag(cov)
    above = np.triu_indices(points, 1)
    found = _moments(residual)
    error = np.sqrt((np.outer(variance, variance) + cov**2) / (count - 1))

    def spread(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, outputs)

    average = law.mean.mean(axis=0)
    return {
        "mean": Entries((average + found[0]).ravel(), average.ravel(), spread(np.sqrt(variance / count))),
        "variance": Entries(np.diagonal(found[1]).T.ravel(), spread(variance), spread(np.diag(error))),
        "covariance": Entries(found[1][above].ravel(), spread(cov[above]), spread(error[above])),
    }


def _moments(residual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Average [m, C] and sample covariance [m, m, C] of [K, m, C]."""
    mean = residual.mean(axis=0)
    centred = (residual - mean).transpose(2, 1, 0)  # [C, m, K]
    return mean, (centred @ centred.swapaxes(1, 2)).transpose(1, 2, 0) / (len(residual) - 1)


def _check(samples: np.ndarray, law: ModelLaw) -> None:
    if samples.ndim != 3 or samples.shape[0] < 2 or samples.shape[1] < 2:
        raise ValueError(f"samples: got shape {samples.shape}, must be [K, m, C] with K and m of at least 2")
    count, points, _ = samples.shape
    if (got := (law.mean.shape, law.cov.shape)) != (must := (samples.shape, (count, points, points))):
        raise ValueError(f"law: got mean and cov of shapes {got}, must be {must}")


class Coverage(NamedTuple):
    """How many values lie in the law's own central intervals."""

    inside: int  # of the independent ones: every model and output at one point of its own
    trials: int
    share: float  # of all values, correlated over points


def coverage(samples: np.ndarray, law: ModelLaw, level: float = LEVEL) -> Coverage:
    """Whether values lie in ``mean_k +- z sd_k``, of one point for each model and output, and of all points.

    Points of one function are correlated, so that only one value of each function (a model's output) counts as a
    trial of the binomial: function number i is looked at in point i mod m.
    """
    _check(samples, law)
    variance = np.diagonal(law.cov, axis1=1, axis2=2)[:, :, None]
    within = np.abs(samples - law.mean) <= norm.ppf((1 + level) / 2) * np.sqrt(variance)
    each = within.transpose(0, 2, 1).reshape(-1, samples.shape[1])  # a row for each function
    own = each[np.arange(len(each)), np.arange(len(each)) % samples.shape[1]]
    return Coverage(int(own.sum()), len(own), float(within.mean()))


def binomial_interval(trials: int, level: float = LEVEL) -> tuple[int, int]:
    """Successes that a binomial of ``trials`` and chance ``level`` has in all but ``SIGNIFICANCE`` of the cases."""
    low, high = binom.ppf([SIGNIFICANCE / 2, 1 - SIGNIFICANCE / 2], trials, level)
    return int(low), int(high)


class Null(NamedTuple):
    """What draws from the law itself give: [D] each."""

    share_beyond: dict[str, np.ndarray]
    farthest: dict[str, np.ndarray]
    coverage: np.ndarray


def null(law: ModelLaw, num_draws: int = NUM_DRAWS, seed: int = 0) -> Null:
    """Statistics of ``num_draws`` times K models drawn from ``law``: their exact distribution, but for sampling."""
    rng = np.random.default_rng(seed)
    eigenvalues, vectors = np.linalg.eigh(law.cov)
    factor = vectors * np.sqrt(np.maximum(eigenvalues, 0))[:, None, :]
    shares: dict[str, list[float]] = {part: [] for part in PARTS}
    farthest: dict[str, list[float]] = {part: [] for part in PARTS}
    covered = []
    for _ in range(num_draws):
        drawn = law.mean + factor @ rng.standard_normal(law.mean.shape)
        for part, found in entries(drawn, law).items():
            shares[part].append(found.share_beyond)
            farthest[part].append(found.farthest)
        covered.append(coverage(drawn, law).share)
    return Null(
        {part: np.array(values) for part, values in shares.items()},
        {part: np.array(values) for part, values in farthest.items()},
        np.array(covered),
    )


class Judged(NamedTuple):
    """A statistic beside its distribution under the law, as text, and whether it is within it."""

    measured: str
    expected: str
    holds: bool


def _p_value(value: float, drawn: np.ndarray) -> float:
    """Share of the draws that are at least ``value``, the measured one counted among them."""
    return float((1 + np.sum(drawn >= value * (1 - 1e-12))) / (1 + len(drawn)))


def judge(found: Entries, part: str, under: Null) -> Judged:
    """Are as few entries beyond three standard errors, and the farthest as near, as the law allows?

    Each of the two may be exceeded by ``SIGNIFICANCE / 2`` of the draws from the law, so that a right law disagrees in
    at most ``SIGNIFICANCE`` of the cases.
    """
    level = SIGNIFICANCE / 2
    shares, far = under.share_beyond[part], under.farthest[part]
    holds = _p_value(found.share_beyond, shares) >= level and _p_value(found.farthest, far) >= level
    return Judged(
        f"{found.share_beyond:.2%} beyond 3 SE, farthest {found.farthest:.1f} SE",
        f"<= {np.quantile(shares, 1 - level):.2%}, <= {np.quantile(far, 1 - level):.1f} SE",
        holds,
    )


def judge_coverage(found: Coverage, under: Null, variance_bias: float = 0.0, level: float = LEVEL) -> Judged:
    """Is the coverage within its binomial interval, and that of all points within what draws from the law have?

    All K m C values tell even a variance that is wrong by some percent, which a finite width makes it. With
    ``variance_bias`` b, measured apart, the values' variance is 1 + b times the law's, and the share expected inside
    ``2 Phi(z / sqrt(1 + b)) - 1``: the interval of the share is moved by the change.
    """
    low, high = binomial_interval(found.trials, level)
    moved = 2 * norm.cdf(norm.ppf((1 + level) / 2) / np.sqrt(1 + variance_bias)) - 1 - level
    lowest, highest = np.quantile(under.coverage, [SIGNIFICANCE / 2, 1 - SIGNIFICANCE / 2]) + moved
    return Judged(
        f"{found.inside} of {found.trials} independent, {found.share:.1%} of all",
        f"{low} to {high}, {lowest:.1%} to {min(highest, 1):.1%}",
        bool(low <= found.inside <= high and lowest <= found.share <= highest),
    )
