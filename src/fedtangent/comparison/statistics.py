"""How sampled quantities are judged: estimates at infinite width, their intervals, and three possible answers.

The question. Theory speaks of infinitely wide networks. At width w a network is off by a random O(w^-1/2), and the
mean and the variance of many networks by O(1/w). So equality at a finite width is false by theory itself, and a test of
it would reject the right theory once there are enough draws. Every sampled quantity is therefore taken to infinite
width first: it is fitted as ``a + b / w`` over the widths, and ``a`` is compared with theory. Because terms of 1/w^2
remain, ``a`` counts as right within a stated margin, far above those terms and below what a wrong theory does.

The answer. Each estimate has an interval that contains the truth except in a share ``LEVEL`` of the cases. Theory
*holds* if the whole interval is within the margin, and *disagrees* if none of it is; otherwise the answer is
*undecided*: there are too few draws. So more noise can only make an answer undecided, never right. For each estimate a
right theory is rejected, and a theory that is off by more than the margin is accepted, in at most a share ``LEVEL`` of
the cases; a table of ten sampled verdicts, at ten rounds each, errs in at most one of a hundred.

The power. A theory that is off by more than the margin plus the length of the interval is rejected, except in a share
``LEVEL`` of the cases; every verdict states this number. Its control is the nearest of several wrong theories that are
off by as much: how far they are off is computed from the theories alone, before networks are looked at. Where none is
far enough the verdict has no control, and is undecided. Lengths fall as the inverse root of the number of draws.

Control variates. A network and the prediction from its own initial function share nearly all of their scatter. So the
networks' mean is estimated by the mean of the differences plus the predictions' exact expectation, and their variance
by the difference of the two sample variances plus the predictions' exact variance. It remains to check the sampling
itself: that initial functions have the law that theory says, and are independent. These are verdicts too, along the
prior's widest axes and summed over points; a prior that is wrong along a narrow axis alone is not noticed.

Norms. A mean is judged by its norm over all points and outputs, in which noise adds up; the noise's expected square is
known and subtracted, and what is left scatters by a fraction of it.

Plain float64 NumPy. Samples are [K, E, m, C]: K models (schedules), E independent initialisations, m points, C outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm
from scipy.stats import t as student

LEVEL = 1e-4


class Interval(NamedTuple):
    """An estimate; the truth is in [low, high] except in a share ``LEVEL`` of the cases."""

    value: float
    low: float
    high: float

    @classmethod
    def about(cls, value: float, radius: float) -> Interval:
        """One whose interval reaches equally far to both sides."""
        return cls(value, value - radius, value + radius)

    @property
    def length(self) -> float:
        """Of the interval."""
        return self.high - self.low

    def within(self, low: float, high: float) -> bool | None:
        """Whether the truth is in [low, high]: yes, no, or None where the interval is partly in.

        What is not a number, as after divergence, is not in it.
        """
        if np.isnan(self).any():
            return False
        if low <= self.low and self.high <= high:
            return True
        if self.high < low or self.low > high:
            return False
        return None

    def outside(self, low: float, high: float) -> bool | None:
        """The opposite of ``within``, undecided where that is: what a wrong theory must be.

        What is not a number proves nothing: undecided too.
        """
        inside = self.within(low, high)
        return None if inside is None or np.isnan(self).any() else not inside

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


class Pair(NamedTuple):
    """Networks of one width beside the predictions from their own initial functions."""

    width: int
    seen: np.ndarray  # [K, E, m, C]
    predicted: np.ndarray  # [K, E, m, C]


def at_infinite_width(widths: Sequence[int], precisions: Sequence[float]) -> np.ndarray:
    """Weights c, [W], with which ``sum c_w y_w`` is ``a`` of the least-squares fit ``y_w = a + b / w``; they add to 1.

    ``precisions`` [W] are inverse variances up to a factor. Of a single width the value itself is taken: the model is
    then one for which theory is exact at every width.
    """
    w, weight = np.asarray(widths, float), np.asarray(precisions, float)
    if len(set(widths)) < 2:
        return weight / weight.sum()
    basis = np.stack([np.ones_like(w), w.max() / w], axis=1)
    return np.asarray(np.linalg.solve((basis.T * weight) @ basis, basis.T * weight)[0])


def mean_error(pairs: Sequence[Pair], scale: float, away: np.ndarray | float = 0.0) -> Interval:
    """Norm of the mean of networks minus predictions at infinite width, over all K E of a width, divided by ``scale``.

    0 if theory is right. ``away`` [m, C] is how far the mean in question is from that of the predictions. The noise is
    a Gaussian vector with the sample covariance of the differences, whose expected square is taken off the mean's.
    """
    flat = [(p.seen - p.predicted).reshape(p.seen.shape[0] * p.seen.shape[1], -1) for p in pairs]
    # A network scatters about its flow by O(width^-1/2).
    weights = at_infinite_width([p.width for p in pairs], [p.width * len(d) for p, d in zip(pairs, flat, strict=True)])
    mean, rows = -np.broadcast_to(away, pairs[0].seen.shape[2:]).ravel(), []
    for c, d in zip(weights, flat, strict=True):
        centre = d.mean(axis=0)
        mean = mean + c * centre
        rows.append((d - centre) * (c / np.sqrt(len(d) * (len(d) - 1))))
    noise = np.concatenate(rows) / scale
    products = noise @ noise.T
    if not np.isfinite(products).all():  # networks have diverged
        return Interval.about(float("nan"), 0.0)
    square, variances = float(mean @ mean) / scale**2, np.maximum(np.linalg.eigvalsh(products), 0)
    if not variances.any():
        return Interval.about(float(np.sqrt(square)), 0.0)
    # Few networks: their scatter may be underestimated, which widens the interval but does not move it.
    parts = np.array([np.sum(own**2) for own in rows])
    wider = (_quantile(parts, np.array([len(own) - 1 for own in rows])) / norm.ppf(1 - LEVEL / 2)) ** 2
    found = norm_interval(square + (wider - 1) * variances.sum(), wider * variances)
    return Interval(float(np.sqrt(max(square - variances.sum(), 0.0))), *found)


def norm_interval(square: float, variances: np.ndarray) -> tuple[float, float]:
    """Bounds of ``|a|`` from the square of the norm of a Gaussian vector of mean ``a``, given its axes' ``variances``.

    Each is off in at most ``LEVEL / 2`` of the cases, whatever the direction of ``a``: it is taken along the widest
    axis, where the square scatters most.
    """
    farthest = np.sqrt(square) + 10 * np.sqrt(variances.sum())

    def bound(level: float) -> float:
        if share_beyond(square, variances, 0.0) >= level:
            return 0.0
        return float(brentq(lambda a: share_beyond(square, variances, a) - level, 0.0, farthest))

    return bound(LEVEL / 2), bound(1 - LEVEL / 2)


def share_beyond(square: float, variances: np.ndarray, mean: float) -> float:
    """The chance that the square of a Gaussian vector's norm is above ``square``.

    The vector's mean has the norm ``mean`` and lies along the widest of its axes. From the saddlepoint approximation
    (Lugannani and Rice, 1980) of a weighted sum of chi squares, good to some percent of either tail.
    """
    most = variances.max()
    scaled, noncentral = variances / most, mean**2 / most

    def slope(log_left: float) -> float:
        left = np.exp(log_left)
        return float(np.sum(scaled / (1 - scaled + left * scaled)) + noncentral / left**2 - square / most)

    left = np.exp(brentq(slope, -40.0, 80.0))
    s, each = (1 - left) / 2, scaled / (1 - scaled + left * scaled)
    curvature = 2 * np.sum(each**2) + 4 * noncentral / left**3
    exponent = s * square / most + np.sum(np.log1p(-2 * s * scaled)) / 2 - noncentral * s / left
    w, u = np.sign(s) * np.sqrt(2 * max(exponent, 0.0)), s * np.sqrt(curvature)
    return float(norm.sf(w) + (norm.pdf(w) * (1 / u - 1 / w) if abs(w) > 1e-6 else 0.0))


def variance_ratio(pairs: Sequence[Pair], exact: np.ndarray, law: np.ndarray) -> Interval:
    """Estimates the variance of networks, extrapolated to infinite width, divided by the variance that a law predicts.

    The ratio is 1 if the law is right. Variances are of one output, summed over points.

    Args:
        pairs: Networks and the predictions from their initial functions, for each width.
        exact: Variance of the predictions, known by construction, [K].
        law: Variance under the law that is tested, [K].

    Returns:
        A confidence interval of the ratio, for five draws or more. Networks and predictions are centred at their sample
        means, and only the difference of their sample variances is estimated: ``exact`` is added to it.
    """
    values = []
    for p in pairs:
        draws = p.seen.shape[1]
        change = _scatter(p.seen) - _scatter(p.predicted)  # [K, E]
        values.append(((draws / (draws - 1) * change + exact[:, None]) / law[:, None]).ravel())
    return combined([p.width for p in pairs], values, by_width=True, means=len(exact))


def _scatter(samples: np.ndarray) -> np.ndarray:
    """Squared distance of each network from its model's mean, summed over points, averaged over outputs, [K, E]."""
    return np.asarray(np.mean(np.sum((samples - samples.mean(axis=1, keepdims=True)) ** 2, axis=2), axis=-1))


def combined(widths: Sequence[int], values: Sequence[np.ndarray], by_width: bool = False, means: int = 0) -> Interval:
    """The mean of ``values`` at infinite width, [n_w] independent ones at each width.

    ``by_width`` says that their variance falls as 1 / width, else it is the same at every width. ``means`` is how many
    sample means the values of a width are taken about, which leaves as many fewer that are independent.
    """
    precisions = [len(v) * (w if by_width else 1) for w, v in zip(widths, values, strict=True)]
    weights = at_infinite_width(widths, precisions)
    value = sum(c * v.mean() for c, v in zip(weights, values, strict=True))
    parts = [c**2 * v.var(ddof=1) / (len(v) - means) for c, v in zip(weights, values, strict=True)]
    return _interval(float(value), np.array(parts), np.array([len(v) - max(means, 1) for v in values]))


def _interval(value: float, parts: np.ndarray, freedoms: np.ndarray) -> Interval:
    """About a ``value`` whose variance is the sum of ``parts``, each estimated with as many degrees of freedom."""
    return Interval.about(value, float(_quantile(parts, freedoms) * np.sqrt(parts.sum())))


def _quantile(parts: np.ndarray, freedoms: np.ndarray) -> float:
    """Student's, with the degrees of freedom of a sum of estimated variances (Welch, 1947; Satterthwaite, 1946)."""
    shares = parts / parts.sum() if parts.any() else np.full(len(parts), 1 / len(parts))
    return float(student.ppf(1 - LEVEL / 2, 1 / np.sum(shares**2 / freedoms)))


def worst(estimates: Sequence[Interval], target: float, margin: float) -> Interval:
    """The one that decides whether all are within ``margin`` of ``target``.

    One that is outside, if any is; else the one that reaches farthest.
    """
    outside = [e for e in estimates if e.within(target - margin, target + margin) is False]
    return max(outside or estimates, key=lambda e: max(e.high - target, target - e.low))


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


def fitted_slope(widths: np.ndarray, errors: list[np.ndarray]) -> tuple[Interval, float]:
    """Slope of the mean of log(error) against log(width), for several networks' errors at each width, and intercept.

    Errors scatter over networks by a factor, much the same at every width, so their logarithms are averaged and each
    network counts alike; the interval comes from that scatter. Raises ``ValueError`` for fewer than 3 widths or fewer
    than 2 networks at a width.
    """
    if len(widths) < 3:
        raise ValueError(f"widths: got {len(widths)}, must be at least 3 for a slope")
    if (fewest := min(e.size for e in errors)) < 2:
        raise ValueError(f"errors: got {fewest} networks at a width, must be at least 2 for a scatter")
    x, logs = np.log(np.asarray(widths, float)), [np.log(e.ravel()) for e in errors]
    y, count = np.array([v.mean() for v in logs]), np.array([v.size for v in logs])
    centre = count @ x / count.sum()
    coefficients = count * (x - centre) / (count @ (x - centre) ** 2)
    slope = float(coefficients @ y)
    parts = coefficients**2 * np.array([v.var(ddof=1) for v in logs]) / count
    return _interval(slope, parts, count - 1), float(count @ y / count.sum() - slope * centre)


def width_slope(widths: Sequence[int], errors: list[np.ndarray]) -> Interval:
    """The slope of ``fitted_slope``."""
    return fitted_slope(np.asarray(widths), errors)[0]


def weighted_line(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> Slope:
    """The least-squares line of ``y`` over ``x``, [n] each, with weights that are inverse variances."""
    centre = weight @ x / weight.sum()
    information = weight @ (x - centre) ** 2
    slope = float(weight @ ((x - centre) * y) / information)
    return Slope(slope, float(information**-0.5), float(weight @ y / weight.sum() - slope * centre))


def relative_distance(a: np.ndarray, b: np.ndarray) -> float:
    """``|a - b| / |b|``, Euclidean over all entries."""
    return float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(b))


def law_distance(law: Sequence[Any], reference: Sequence[Any]) -> float:
    """The larger of the relative distances of means and covariances."""
    return float(np.max([relative_distance(a, b) for a, b in zip(law, reference, strict=True)]))


def relative_errors(
    predicted: np.ndarray, seen: np.ndarray, scale: np.ndarray, axes: tuple[int, ...] = (-2, -1)
) -> np.ndarray:
    """Root mean square of ``seen - predicted`` over ``axes``, relative to that of ``scale``; 0 where they are equal."""
    off, of = (np.asarray(np.mean(values**2, axis=axes)) for values in (seen - predicted, scale))
    with np.errstate(divide="ignore"):
        return np.sqrt(np.divide(off, of, out=np.zeros_like(off), where=off != 0))
