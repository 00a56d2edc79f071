"""What an ensemble knows and how well it says so: entropies, calibration, intervals, out-of-distribution scores.

Pure functions, which may be jitted and run in float32 or float64. ``members`` are the outputs of the K models of an
ensemble, [K, n, C]: logits for classification (the logarithms of probabilities are logits too), values for regression.
A single model is an ensemble of K = 1. Logarithms are natural: entropies and likelihoods are in nats. The ensemble
predicts with the mean of its members' softmax probabilities,

    p(c | x) = 1/K sum_k softmax(f_k(x))_c,

which is formed in logarithms, so that no logit overflows and no likely class underflows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp, ndtri

from fedtangent.checks import choice, number, whole
from fedtangent.types import Array

BINNINGS = ("width", "mass")


class Reliability(NamedTuple):
    """Confidence against accuracy in B bins: what a reliability diagram shows. Empty bins hold zeros."""

    edges: Array  # [B + 1], bin b holds the confidences in (edges[b], edges[b + 1]]
    examples: Array  # [B] how many, floating
    confidence: Array  # [B] mean confidence
    accuracy: Array  # [B] share of correct predictions


class Interval(NamedTuple):
    """Lower and upper ends, of equal shape."""

    low: Array
    high: Array


def log_probability(members: Array) -> Array:
    """``log(1/K sum_k softmax(f_k(x)))``, [n, C], from logits [K, n, C]; raises ``ValueError`` for other shapes."""
    members = _checked_members(members)
    return logsumexp(jax.nn.log_softmax(members, axis=-1), axis=0) - math.log(members.shape[0])


def knowledge_variance(members: Array, unbiased: bool = False) -> Array:
    """Knowledge uncertainty: the variance over members at every point and output, [n, C].

    ``1/K sum_k (f_k - mean_k f_k)^2`` (FE-2024, section V-B); ``unbiased`` divides by K - 1. Raises ``ValueError`` for
    members that are not [K, n, C], and for one member where an unbiased estimate is asked.
    """
    members = _checked_members(members)
    if unbiased and members.shape[0] < 2:
        raise ValueError("members: got 1, must be at least 2 for an unbiased variance")
    return jnp.var(members, axis=0, ddof=1 if unbiased else 0)


def predictive_entropy(members: Array) -> Array:
    """Total uncertainty ``H[p] = -sum_c p_c log p_c`` of the ensemble's prediction in nats, [n], from logits [K, n, C].

    Depeweg et al. (2018), section 3. Raises ``ValueError`` for members that are not [K, n, C].
    """
    return _entropy(log_probability(members))


def expected_entropy(members: Array) -> Array:
    """Data uncertainty ``1/K sum_k H[softmax(f_k)]`` in nats, [n], from logits [K, n, C].

    Depeweg et al. (2018), section 3. Raises ``ValueError`` for members that are not [K, n, C].
    """
    return jnp.mean(_entropy(jax.nn.log_softmax(_checked_members(members), axis=-1)), axis=0)


def mutual_information(members: Array) -> Array:
    """Knowledge uncertainty in nats: predictive minus expected entropy, [n], from logits [K, n, C].

    Computed as the mean Kullback-Leibler divergence ``1/K sum_k KL(softmax(f_k) | p)``, which is the same number and
    loses no digits where members agree; from 0 to log K. Houlsby et al. (2011), equation 2; Depeweg et al. (2018).
    Raises ``ValueError`` for members that are not [K, n, C].
    """
    each = jax.nn.log_softmax(_checked_members(members), axis=-1)
    mean = log_probability(members)
    divergence = jnp.sum(_weighed(each, each) - _weighed(each, mean[None]), axis=-1)
    return jnp.maximum(jnp.mean(divergence, axis=0), 0)


def negative_log_likelihood(members: Array, labels: Array) -> Array:
    """``-1/n sum_j log p(y_j | x_j)`` in nats, [], p the mean of the members' softmax; logits [K, n, C], labels [n].

    Raises ``ValueError`` for other shapes or labels that are not integers.
    """
    _check_labels(members, labels)
    return -jnp.mean(jnp.take_along_axis(log_probability(members), labels[:, None], axis=-1))


def brier_score(members: Array, labels: Array) -> Array:
    """``1/n sum_j sum_c (p(c | x_j) - [c = y_j])^2``, [], from 0 to 2; logits [K, n, C], labels [n].

    Brier (1950), the sum over all classes. Raises ``ValueError`` for other shapes or labels that are not integers.
    """
    _check_labels(members, labels)
    probability = jnp.exp(log_probability(members))
    truth = jax.nn.one_hot(labels, probability.shape[-1], dtype=probability.dtype)
    return jnp.mean(jnp.sum((probability - truth) ** 2, axis=-1))


def accuracy(members: Array, labels: Array) -> Array:
    """Share of examples whose most probable class under the ensemble is theirs, []; logits [K, n, C], labels [n].

    Raises ``ValueError`` for other shapes or labels that are not integers.
    """
    return jnp.mean(_confidence(members, labels)[1])


def reliability(members: Array, labels: Array, num_bins: int = 15, binning: str = "width") -> Reliability:
    """Confidence against accuracy in bins of confidence, the probability of the class that the ensemble predicts.

    Args:
        members: logits [K, n, C].
        labels: [n] integers.
        num_bins: B.
        binning: ``"width"``: bins ``((b - 1) / B, b / B]`` (Guo et al., 2017, section 2). ``"mass"``: upper ends at
            the quantiles b / B of the confidences, so that each bin holds n / B examples to within one; equal
            confidences share a bin, whatever the order of the examples (Nixon et al., 2019, call it adaptive).

    Raises ``ValueError`` for other shapes, an unknown binning, or a number of bins that is not from 1 to n (mass) or
    at least 1 (width).
    """
    confidence, correct = _confidence(members, labels)
    n = confidence.shape[0]
    whole("num_bins", num_bins)
    choice("binning", binning, BINNINGS)
    if binning == "mass" and num_bins > n:
        raise ValueError(f"num_bins: got {num_bins}, must be at most the {n} examples for bins of equal mass")
    upper = jnp.arange(1, num_bins + 1, dtype=confidence.dtype) / num_bins
    if binning == "mass":
        last = jnp.asarray([-(-b * n // num_bins) - 1 for b in range(1, num_bins + 1)])
        upper = jnp.sort(confidence)[last]
    at = jnp.minimum(jnp.searchsorted(upper, confidence, side="left"), num_bins - 1)
    empty = jnp.zeros((num_bins,), confidence.dtype)
    count = empty.at[at].add(1)
    sums = empty.at[at].add(confidence), empty.at[at].add(correct)
    edges = jnp.concatenate([jnp.zeros((1,), upper.dtype), upper])
    return Reliability(edges, count, *(total / jnp.maximum(count, 1) for total in sums))


def calibration_error(bins: Reliability) -> Array:
    """``sum_b n_b / n |accuracy_b - confidence_b|``, []: ECE of ``bins`` (Guo et al., 2017, equation 3)."""
    return jnp.sum(bins.examples * jnp.abs(bins.accuracy - bins.confidence)) / jnp.sum(bins.examples)


def expected_calibration_error(members: Array, labels: Array, num_bins: int = 15, binning: str = "width") -> Array:
    """Expected calibration error (ECE), [], from 0 to 1; arguments and errors as in ``reliability``.

    Guo et al. (2017), equation 3. With n examples a perfectly calibrated ensemble has a positive ECE, of the order of
    ``sqrt(B / n)``: compare it at equal n and B.
    """
    return calibration_error(reliability(members, labels, num_bins, binning))


def predictive_interval(
    members: Array, level: float = 0.95, noise_variance: float | Array = 0.0, unbiased: bool = False
) -> Interval:
    """Gaussian intervals ``mean +- z sqrt(variance + noise_variance)`` at every point and output, each [n, C].

    Args:
        members: values [K, n, C]; their mean and ``knowledge_variance`` are used (FE-2024, section V-B).
        level: probability of the interval; z is the normal quantile of ``(1 + level) / 2``.
        noise_variance: variance of an observation about its expectation, a number or [n, C]: 0 for an interval of the
            expectation itself.
        unbiased: divide the variance by K - 1.

    Raises ``ValueError`` for other shapes, a level outside (0, 1), a negative noise variance, or one member where an
    unbiased estimate is asked.
    """
    variance = knowledge_variance(members, unbiased) + _noise(noise_variance, members.shape[1:], members.dtype)
    mean, half = jnp.mean(members, axis=0), _normal_quantile(level, variance.dtype) * jnp.sqrt(variance)
    return Interval(mean - half, mean + half)


def coverage(interval: Interval, targets: Array) -> Array:
    """Share of the targets that lie in their intervals, ends included, []; all of one shape.

    Raises ``ValueError`` for unequal shapes.
    """
    if not interval.low.shape == interval.high.shape == targets.shape:
        shapes = f"{interval.low.shape} and {interval.high.shape}, targets {targets.shape}"
        raise ValueError(f"interval: got shapes {shapes}, must be equal")
    inside = (interval.low <= targets) & (targets <= interval.high)
    return jnp.mean(inside.astype(interval.low.dtype))


def coverage_interval(share: float | Array, num_points: int, level: float = 0.95) -> Interval:
    """Confidence interval of a coverage that was measured as ``share`` of ``num_points`` independent points.

    Wilson (1927): with ``z`` the normal quantile of ``(1 + level) / 2`` and m points, the ends are
    ``(s + z^2 / 2m +- z sqrt(s (1 - s) / m + z^2 / 4m^2)) / (1 + z^2 / m)``. ``share`` may have any shape.

    Raises ``ValueError`` for fewer than one point or a level outside (0, 1).
    """
    whole("num_points", num_points)
    s = jnp.asarray(share)
    s = s if jnp.issubdtype(s.dtype, jnp.floating) else s.astype(jnp.zeros(()).dtype)
    z = _normal_quantile(level, s.dtype)
    centre = s + z**2 / (2 * num_points)
    half = z * jnp.sqrt(s * (1 - s) / num_points + (z / (2 * num_points)) ** 2)
    scale = 1 + z**2 / num_points
    return Interval((centre - half) / scale, (centre + half) / scale)


def ood_auroc(inside: Array, outside: Array) -> float:
    """Area under the ROC curve of a score that should be larger out of distribution, by scikit-learn.

    The probability that an example from ``outside`` [m] scores above one from ``inside`` [n], a tie counting one half
    (the Mann-Whitney statistic; Hanley and McNeil, 1982). 0.5 is chance. Any score does: an entropy, the mutual
    information, a variance.

    Raises ``ValueError`` for scores that are not 1-D, of which there are none, or that are not finite.
    """
    from sklearn.metrics import roc_auc_score  # a second to import, and nothing else here needs it

    for name, scores in (("inside", inside), ("outside", outside)):
        if scores.ndim != 1 or scores.shape[0] == 0:
            raise ValueError(f"{name}: got shape {scores.shape}, must be one or more scores [n]")
        if not bool(jnp.all(jnp.isfinite(scores))):
            raise ValueError(f"{name}: got scores that are not finite, must be finite")
    is_outside = np.repeat([0, 1], [len(inside), len(outside)])
    return float(roc_auc_score(is_outside, np.concatenate([np.asarray(inside), np.asarray(outside)])))


def _entropy(log_p: Array) -> Array:
    """``-sum p log p`` over the last axis."""
    return -jnp.sum(_weighed(log_p, log_p), axis=-1)


def _weighed(log_p: Array, log_q: Array) -> Array:
    """``p log q``, zero where p is."""
    p = jnp.exp(log_p)
    return p * jnp.where(p > 0, log_q, 0)


def _confidence(members: Array, labels: Array) -> tuple[Array, Array]:
    """Probability of the predicted class [n], and 1 where that is right."""
    _check_labels(members, labels)
    log_p = log_probability(members)
    best = jnp.max(log_p, axis=-1)
    return jnp.exp(best), (jnp.argmax(log_p, axis=-1) == labels).astype(log_p.dtype)


def _normal_quantile(level: float, dtype: jnp.dtype) -> Array:
    """The two-sided normal quantile of ``level``."""
    number("level", level, above=0, below=1)
    return ndtri(jnp.asarray(0.5 + level / 2, dtype))


def _noise(variance: float | Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """A noise variance as an array of ``shape``; raises ``ValueError`` for another shape, or one known to be < 0."""
    value = jnp.asarray(variance, dtype)
    if value.shape not in ((), shape):
        raise ValueError(f"noise_variance: got shape {value.shape}, must be a number or {shape}")
    if not isinstance(value, jax.core.Tracer) and not bool(jnp.all(value >= 0)):
        raise ValueError(f"noise_variance: got {float(jnp.min(value)):g}, must be at least 0 everywhere")
    return jnp.broadcast_to(value, shape)


def _checked_members(members: Array) -> Array:
    """``members`` as they are; raises ``ValueError`` unless they are [K, n, C] and floating, none of them 0."""
    if members.ndim != 3 or 0 in members.shape:
        raise ValueError(f"members: got shape {members.shape}, must be [K, n, C] with K, n and C at least 1")
    if not jnp.issubdtype(members.dtype, jnp.floating):
        raise ValueError(f"members: got dtype {members.dtype}, must be floating")
    return members


def _check_labels(members: Array, labels: Array) -> None:
    _checked_members(members)
    if labels.shape != (members.shape[1],) or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"labels: got {labels.dtype} {labels.shape}, must be integers [n] for members {members.shape}, "
            f"that is ({members.shape[1]},)"
        )
