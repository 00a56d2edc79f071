"""How verdicts judge sampled quantities: estimates at infinite width, their intervals, and three possible answers.

The question. Theory speaks of infinitely wide networks. At width w a network is off by a random O(w^-1/2), and the mean
and the variance of many networks by O(1/w). So theory itself says that equality at a finite width is false, and with
enough draws a test of equality would reject the right theory. Every sampled quantity is therefore taken to infinite
width first: it is fitted as ``a + b / w`` over the widths, and ``a`` is compared with theory. Because terms of 1/w^2
remain, ``a`` counts as right within a stated margin, far above those terms and below the error of a wrong theory.

The answer. Each estimate has an interval that contains the truth except in a share ``LEVEL`` (1e-4) of the cases.
Theory *holds* if the whole interval is within the margin, and *disagrees* if none of it is; otherwise the answer is
*undecided*: there are too few draws. So more noise can only make an answer undecided, never right. For each estimate a
right theory is rejected, and a theory that is off by more than the margin is accepted, in at most a share ``LEVEL`` of
the cases; a table of ten sampled verdicts, at ten rounds each, errs in at most one of a hundred.

The power. A theory that is off by more than the margin plus the length of the interval is rejected, except in a share
``LEVEL`` of the cases; every verdict states this number. Its control is the nearest of several wrong theories that are
off by as much: how far they are off is computed from the theories alone, before networks are looked at. Where none is
far enough the verdict has no control, and is undecided. Lengths fall as the inverse root of the number of draws.

Control variates. A network and the prediction from its initial function share nearly all of their scatter. So the
networks' mean is estimated by the mean of the differences plus the predictions' exact expectation, and their variance
by the difference of the two sample variances plus the predictions' exact variance. Separate verdicts check the sampling
itself: that initial functions have the predicted variance, along the prior's widest axes and summed over points, and
are independent. A prior that is wrong only along a narrow axis is not noticed.

Norms. A mean is judged by its norm over all points and outputs, in which noise adds up; the noise's expected square is
known and subtracted.

Plain float64 NumPy. Samples are [K, E, m, C]: K models (schedules), E independent initialisations, m points, C outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Float, Num

from fedtangent._src.intervals import Interval
from fedtangent._src.types import AnyArray, ArrayLike

LEVEL = 1e-4  # share of the cases in which an interval may miss the truth


class Pair(NamedTuple):
    """Outputs of networks of one width, K models in each of E draws, and predictions from their initial functions."""

    width: int
    simulated: Float[np.ndarray, "K E m C"]
    predicted: Float[np.ndarray, "K E m C"]


def at_infinite_width(widths: Sequence[int], precisions: Sequence[float]) -> Float[np.ndarray, "W"]:
    """Computes weights c with which values y_w, measured at widths w, give their limit at infinite width.

    The limit is ``a = sum_w c_w y_w`` of the least-squares fit ``y_w = a + b / w``. If all widths are equal the fit has
    no ``b``: theory must then be exact at this width.

    Args:
        widths: Widths w, [W].
        precisions: Inverse variances of ``y_w``, [W], up to a common factor.

    Returns:
        Weights c [W], which add up to 1.
    """
    w, weight = np.asarray(widths, float), np.asarray(precisions, float)
    if len(set(widths)) < 2:
        return weight / weight.sum()
    basis = np.stack([np.ones_like(w), w.max() / w], axis=1)
    return np.asarray(np.linalg.solve((basis.T * weight) @ basis, basis.T * weight)[0])


def mean_error(pairs: Sequence[Pair], scale: float, away: Float[np.ndarray, "m C"] | float = 0.0) -> Interval:
    """Estimates the norm of the mean difference between networks and predictions at infinite width.

    The norm is divided by ``scale``; it is 0 if theory is right, and NaN if networks have diverged. The mean is over
    all K E networks of a width. The noise is a Gaussian vector with the sample covariance of the differences; its
    expected squared norm is subtracted from the squared norm of the mean.

    Args:
        pairs: Networks and predictions for each width, two networks or more.
        scale: Unit of the norm, for instance how far training changes the functions.
        away: Difference [m, C] between the mean that is tested and the mean of the predictions.
    """
    flat = [(p.simulated - p.predicted).reshape(p.simulated.shape[0] * p.simulated.shape[1], -1) for p in pairs]
    # A network scatters about its flow by O(width^-1/2).
    weights = at_infinite_width([p.width for p in pairs], [p.width * len(d) for p, d in zip(pairs, flat, strict=True)])
    mean, rows = -np.broadcast_to(away, pairs[0].simulated.shape[2:]).ravel(), []
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
    parts = np.array([np.sum(of_width**2) for of_width in rows])
    wider = (
        _quantile(parts, np.array([len(of_width) - 1 for of_width in rows])) / scipy.stats.norm.ppf(1 - LEVEL / 2)
    ) ** 2
    bounds = norm_interval(square + (wider - 1) * variances.sum(), wider * variances)
    return Interval(float(np.sqrt(max(square - variances.sum(), 0.0))), *bounds)


def norm_interval(square: float, variances: Float[np.ndarray, "n"]) -> tuple[float, float]:
    """Computes bounds of ``|a|`` from the squared norm of one draw of a Gaussian vector with mean ``a``.

    Each bound is wrong with probability 5e-5 at most. The computation assumes that ``a`` lies along the widest axis,
    which is the worst case.

    Args:
        square: Squared norm of the draw.
        variances: Variances of the vector along its principal axes.

    Returns:
        Lower and upper bound.
    """
    farthest = np.sqrt(square) + 10 * np.sqrt(variances.sum())

    def bound(level: float) -> float:
        if share_beyond(square, variances, 0.0) >= level:
            return 0.0
        return float(scipy.optimize.brentq(lambda a: share_beyond(square, variances, a) - level, 0.0, farthest))

    return bound(LEVEL / 2), bound(1 - LEVEL / 2)


def share_beyond(square: float, variances: Float[np.ndarray, "n"], mean: float) -> float:
    """Computes the probability that the squared norm of a Gaussian vector is above ``square``.

    It uses the saddlepoint approximation (Lugannani and Rice, 1980) of a weighted sum of chi squares, good to some
    percent of either tail.

    Args:
        square: The threshold.
        variances: Variances of the vector along its principal axes.
        mean: Norm of the vector's mean, which lies along the widest axis.
    """
    most = variances.max()
    scaled, noncentral = variances / most, mean**2 / most

    def slope(log_factor: float) -> float:
        factor = np.exp(log_factor)
        return float(np.sum(scaled / (1 - scaled + factor * scaled)) + noncentral / factor**2 - square / most)

    factor = np.exp(scipy.optimize.brentq(slope, -40.0, 80.0))  # 1 - 2 x the saddlepoint, in units of the widest axis
    saddle, shares = (1 - factor) / 2, scaled / (1 - scaled + factor * scaled)
    curvature = 2 * np.sum(shares**2) + 4 * noncentral / factor**3
    exponent = saddle * square / most + np.sum(np.log1p(-2 * saddle * scaled)) / 2 - noncentral * saddle / factor
    w, u = np.sign(saddle) * np.sqrt(2 * max(exponent, 0.0)), saddle * np.sqrt(curvature)
    return float(scipy.stats.norm.sf(w) + (scipy.stats.norm.pdf(w) * (1 / u - 1 / w) if abs(w) > 1e-6 else 0.0))


def variance_ratio(pairs: Sequence[Pair], exact: Float[np.ndarray, "K"], law: Float[np.ndarray, "K"]) -> Interval:
    """Estimates the variance of networks at infinite width, divided by the variance that theory predicts.

    It is one ratio, the average over the K models, and is 1 if theory is right. Variances are of one output, summed
    over points. Only the difference of the sample variances of networks and predictions is estimated; ``exact`` is
    added to it.

    Args:
        pairs: Networks and the predictions from their initial functions, for each width; five draws or more.
        exact: Variance of each model's predictions, known by construction, [K].
        law: Variance of each model that is tested, [K].
    """
    values = []
    for p in pairs:
        draws = p.simulated.shape[1]
        change = _scatter(p.simulated) - _scatter(p.predicted)  # [K, E]
        values.append(((draws / (draws - 1) * change + exact[:, None]) / law[:, None]).ravel())
    return combined([p.width for p in pairs], values, by_width=True, means=len(exact))


def _scatter(samples: Float[np.ndarray, "K E m C"]) -> Float[np.ndarray, "K E"]:
    """Returns each sample's squared distance from its model's mean: summed over points, averaged over outputs."""
    return np.asarray(np.mean(np.sum((samples - samples.mean(axis=1, keepdims=True)) ** 2, axis=2), axis=-1))


def combined(
    widths: Sequence[int], values: Sequence[Float[np.ndarray, "_"]], by_width: bool = False, means: int = 0
) -> Interval:
    """Estimates the mean of ``values`` at infinite width, with its interval.

    Args:
        widths: Widths of the networks.
        values: One array of independent values for each width.
        by_width: Whether the variance of a value falls as 1 / width; else it is the same at every width.
        means: Number of sample means subtracted from the values of a width; each costs one degree of freedom.
    """
    precisions = [len(v) * (w if by_width else 1) for w, v in zip(widths, values, strict=True)]
    weights = at_infinite_width(widths, precisions)
    value = sum(c * v.mean() for c, v in zip(weights, values, strict=True))
    parts = [c**2 * v.var(ddof=1) / (len(v) - means) for c, v in zip(weights, values, strict=True)]
    return _interval(float(value), np.array(parts), np.array([len(v) - max(means, 1) for v in values]))


def _interval(value: float, parts: Float[np.ndarray, "W"], freedoms: Num[np.ndarray, "W"]) -> Interval:
    """Builds the interval about ``value``, whose variance is the sum of the estimated variances ``parts``.

    ``freedoms`` are the degrees of freedom of each of these estimates.
    """
    return Interval.about(value, float(_quantile(parts, freedoms) * np.sqrt(parts.sum())))


def _quantile(parts: Float[np.ndarray, "W"], freedoms: Num[np.ndarray, "W"]) -> float:
    """Returns the quantile 1 - ``LEVEL`` / 2 of Student's t for an estimate whose variance is the sum of ``parts``.

    ``parts`` are estimated variances, and ``freedoms`` their degrees of freedom (Welch, 1947; Satterthwaite, 1946).
    """
    shares = parts / parts.sum() if parts.any() else np.full(len(parts), 1 / len(parts))
    return float(scipy.stats.t.ppf(1 - LEVEL / 2, 1 / np.sum(shares**2 / freedoms)))


def worst(estimates: Sequence[Interval], target: float, margin: float) -> Interval:
    """Returns the estimate that decides whether all are within ``margin`` of ``target``.

    It is an estimate outside the margin, if there is one; else the estimate whose interval reaches farthest.

    Args:
        estimates: Estimates of one quantity, such as one for each round.
        target: The predicted value.
        margin: Allowed deviation from it.
    """
    outside = [e for e in estimates if e.within(target - margin, target + margin) is False]
    return max(outside or estimates, key=lambda e: max(e.high - target, target - e.low))


def mean_difference_in_errors(
    samples: Float[np.ndarray, "draws m C"], mean: Float[np.ndarray, "m C"], variance: Float[np.ndarray, "m"]
) -> float:
    """Computes the mean of ``|sample mean - mean|`` over points, in Monte Carlo standard errors.

    It is about 0.80, the mean of a standard normal's absolute value, if the samples have this mean and variance.

    Args:
        samples: Draws, [draws, m, C].
        mean: Predicted mean, [m, C].
        variance: Predicted variance of one draw, [m], above 0.
    """
    error = np.sqrt(np.maximum(variance, 0) / samples.shape[0])[:, None]
    return float(np.mean(np.abs(samples.mean(axis=0) - mean) / error))


class Slope(NamedTuple):
    """A weighted least-squares line: slope, its standard error, and intercept."""

    slope: float
    standard_error: float
    intercept: float


def fitted_slope(widths: Num[np.ndarray, "W"], errors: list[Float[np.ndarray, "..."]]) -> tuple[Interval, float]:
    """Fits the slope of the mean of log(error) against log(width), and the intercept.

    Errors scatter over networks by a factor that is much the same at every width, so their logarithms are averaged and
    each network counts alike; the interval comes from that scatter.

    Args:
        widths: Widths, [W]; three or more.
        errors: Errors of the networks at each width; two networks or more.

    Returns:
        The slope with its interval, and the intercept.

    Raises:
        ValueError: There are fewer than three widths, or fewer than two networks at one of them.
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


def width_slope(
    widths: Sequence[float] | Num[np.ndarray, "widths"], errors: list[Float[np.ndarray, "..."]]
) -> Interval:
    """Returns the slope of log error against log width, with its interval: ``fitted_slope`` without the intercept.

    Args:
        widths, errors: As for ``fitted_slope``, whose ``ValueError`` this raises.
    """
    return fitted_slope(np.asarray(widths), errors)[0]


def weighted_line(x: Num[np.ndarray, "n"], y: Num[np.ndarray, "n"], weight: Num[np.ndarray, "n"]) -> Slope:
    """Fits the least-squares line of ``y`` over ``x``, [n] each.

    Args:
        x: Abscissas.
        y: Ordinates.
        weight: Inverse variances of ``y``.
    """
    centre = weight @ x / weight.sum()
    information = weight @ (x - centre) ** 2
    slope = float(weight @ ((x - centre) * y) / information)
    return Slope(slope, float(information**-0.5), float(weight @ y / weight.sum() - slope * centre))


def log_slope(x: ArrayLike, y: ArrayLike) -> float:
    """Fits the least-squares slope of ``ln y`` against ``ln x``.

    Args:
        x: Positive numbers, [n].
        y: Positive numbers, [n].
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def relative_distance(a: Num[AnyArray, "*shape"], b: Num[AnyArray, "*shape"]) -> float:
    """Computes ``|a - b| / |b|``, Euclidean over all entries.

    Args:
        a: An array.
        b: Reference of the same shape, not 0.
    """
    return float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(b))


def law_distance(law: Sequence[AnyArray], reference: Sequence[AnyArray]) -> float:
    """Computes the larger of two relative distances: between two means, and between two covariances.

    Args:
        law: Mean and covariance of a Gaussian process.
        reference: Mean and covariance to compare with; each distance is divided by the norm of the reference's array.
    """
    return float(np.max([relative_distance(a, b) for a, b in zip(law, reference, strict=True)]))


def relative_errors(
    predicted: Num[np.ndarray, "..."],
    measured: Num[np.ndarray, "..."],
    scale: Num[np.ndarray, "..."],
    axes: tuple[int, ...] = (-2, -1),
) -> Float[np.ndarray, "..."]:
    """Computes the root mean square of ``measured - predicted``, divided by the root mean square of ``scale``.

    It is 0 if both are equal, even if ``scale`` is 0; otherwise it is infinite if ``scale`` is 0.

    Args:
        predicted: Predictions.
        measured: Measured values, of the same shape.
        scale: Values whose root mean square is the unit.
        axes: Axes that are averaged over.
    """
    off, of = (np.asarray(np.mean(values**2, axis=axes)) for values in (measured - predicted, scale))
    with np.errstate(divide="ignore"):
        return np.sqrt(np.divide(off, of, out=np.zeros_like(off), where=off != 0))


def run_errors(
    predicted: Num[np.ndarray, "r ... m C"], measured: Num[np.ndarray, "r ... m C"], start: Num[np.ndarray, "... m C"]
) -> Float[np.ndarray, "..."]:
    """Computes the relative error of predictions over all r rounds together, for each network.

    It is the root mean square of the error over the root mean square of the predicted change from the start, infinite
    for a wrong prediction of no change.

    Args:
        predicted: Predicted outputs at r rounds.
        measured: Measured outputs.
        start: Initial outputs.
    """
    return relative_errors(predicted, measured, predicted - start, (0, -2, -1))
