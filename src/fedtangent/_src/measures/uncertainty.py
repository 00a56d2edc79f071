"""Uncertainty of ensembles and its calibration: entropies, intervals, and the metrics of a prediction.

Pure functions, which may be jitted and run in float32 or float64. ``members`` are the outputs of the K models of an
ensemble, [K, n, C]: logits for classification (the logarithms of probabilities are logits too), values for regression.
A single model is an ensemble of K = 1. Logarithms are natural: entropies and likelihoods are in nats. The ensemble
predicts with the mean of its members' softmax probabilities,

    p(c | x) = 1/K sum_k softmax(f_k(x))_c,

where f_k(x) are the logits of model k. It is computed in logarithms, so that no logit overflows and no likely class
underflows. Numbers in half precision are converted to float32. ``labels`` are integers [n]. Every function raises
``ValueError`` for members or labels of another shape or kind, and, unless they are traced, for labels that are not
among the C classes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Float, Int, Num

from fedtangent._src.checks import class_labels, number, real_array, whole
from fedtangent._src.intervals import Interval
from fedtangent._src.losses import Loss, get_loss, is_right, mean_form, mean_prediction, targets_of
from fedtangent._src.pytrees import wide, widest
from fedtangent._src.types import AnyArray, Array, ArrayLike, Gaussian, Prediction

METRICS = (  # in the order of a table
    *("nll", "mse", "loss", "accuracy", "accuracy_of_members", "ece", "brier"),
    *("predictive_entropy", "mutual_information", "knowledge_variance"),
)
Predicted: TypeAlias = Prediction | Gaussian | Float[AnyArray, "K n C"]
"""A prediction at n inputs: of an ensemble, of a Gaussian process, or the outputs of the K models of an ensemble."""


class Reliability(NamedTuple):
    """Confidence and accuracy of predictions in B bins of confidence, for a reliability diagram.

    Attributes:
        edges: Bin b holds the confidences in (edges[b], edges[b + 1]].
        examples: Number of examples in each bin.
        confidence: Mean confidence in each bin; 0 if it is empty.
        accuracy: Share of correct predictions in each bin; 0 if it is empty.
    """

    edges: Float[Array, "B+1"]
    examples: Int[Array, "B"]  # how many
    confidence: Float[Array, "B"]
    accuracy: Float[Array, "B"]


def log_probability(members: Float[AnyArray, "K n C"]) -> Float[Array, "n C"]:
    """Computes the logarithm of the ensemble's mean probability of each class, [n, C].

    It is ``log(1/K sum_k softmax(f_k(x)))`` with the logits f_k(x) in ``members`` [K, n, C].

    Raises:
        ValueError: ``members`` are not a floating array [K, n, C].
    """
    return _log_mean(_checked_members(members))


@jax.jit  # one program, where each operation would be compiled alone
def _log_mean(members: Float[Array, "K n C"]) -> Float[Array, "n C"]:
    return mean_prediction("cross_entropy", members if len(members) > 1 else jax.nn.log_softmax(members, axis=-1))


def knowledge_variance(members: Float[AnyArray, "K n C"]) -> Float[Array, "n C"]:
    """Computes the variance of the ensemble's outputs over its models, ``1/K sum_k (f_k - mean_k f_k)^2``, [n, C].

    It measures knowledge uncertainty (FE-2024, section V-B). ``members`` are the outputs f_k, [K, n, C].

    Raises:
        ValueError: ``members`` are not a floating array [K, n, C].
    """
    return jnp.var(_checked_members(members), axis=0)


def predictive_entropy(members: Float[AnyArray, "K n C"]) -> Float[Array, "n"]:
    """Computes the entropy ``-sum_c p_c log p_c`` of the ensemble's class probabilities p in nats, [n].

    It is the total uncertainty of Depeweg et al. (2018), section 3. ``members`` are logits [K, n, C].

    Raises:
        ValueError: ``members`` are not a floating array [K, n, C].
    """
    log_p = log_probability(members)
    return -jnp.sum(_weighed(log_p, log_p), axis=-1)


def mutual_information(members: Float[AnyArray, "K n C"]) -> Float[Array, "n"]:
    """Computes the knowledge uncertainty of an ensemble in nats, [n], from logits [K, n, C].

    It is the entropy of the mean prediction p minus the mean entropy of the models' predictions, between 0 and log K.
    It is computed as the mean Kullback-Leibler divergence ``1/K sum_k KL(softmax(f_k) | p)``, which loses no digits if
    the models agree. Houlsby et al. (2011), equation 2; Depeweg et al. (2018).

    Raises:
        ValueError: ``members`` are not a floating array [K, n, C].
    """
    log_p = jax.nn.log_softmax(_checked_members(members), axis=-1)
    mean = log_probability(members)
    divergence = jnp.sum(_weighed(log_p, log_p) - _weighed(log_p, mean[None]), axis=-1)
    return jnp.maximum(jnp.mean(divergence, axis=0), 0)


def negative_log_likelihood(members: Float[AnyArray, "K n C"], labels: Int[AnyArray, "n"]) -> Float[Array, ""]:
    """Computes the mean negative log-likelihood of the labels, ``-1/n sum_j log p(y_j | x_j)``, in nats, [].

    The probability p is the mean of the K models' softmax probabilities.

    Args:
        members: Logits [K, n, C].
        labels: Labels y [n].

    Raises:
        ValueError: An array has another shape or dtype, or a label is not among the C classes.
    """
    _check_labels(members, labels)
    return -jnp.mean(jnp.take_along_axis(log_probability(members), labels[:, None], axis=-1))


def brier_score(members: Float[AnyArray, "K n C"], labels: Int[AnyArray, "n"]) -> Float[Array, ""]:
    """Computes the Brier score ``1/n sum_j sum_c (p(c | x_j) - [c = y_j])^2``, [], from 0 to 2 (Brier, 1950).

    The probability p is the mean of the K models' softmax probabilities.

    Args:
        members: Logits [K, n, C].
        labels: Labels y [n].

    Raises:
        ValueError: An array has another shape or dtype, or a label is not among the C classes.
    """
    _check_labels(members, labels)
    probability = jnp.exp(log_probability(members))
    truth = jax.nn.one_hot(labels, probability.shape[-1], dtype=probability.dtype)
    return jnp.mean(jnp.sum((probability - truth) ** 2, axis=-1))


def accuracy(
    members: Float[AnyArray, "K n C"], labels: Int[AnyArray, "n"], loss: str | Loss = "cross_entropy"
) -> Float[Array, ""]:
    """Computes the share of examples whose label the ensemble predicts, []; NaN if a largest output is not finite.

    Args:
        members: Outputs [K, n, C]; logits for the cross entropy.
        labels: Labels [n].
        loss: Loss by which the models were trained: a name, or a function. For a loss of classes the ensemble averages
            probabilities, for any other loss it averages outputs (``losses.mean_prediction``).

    Raises:
        ValueError: An array has another shape or dtype, a label is not among the C classes, or the loss is unknown.
    """
    _check_labels(members, labels)
    return jnp.mean(is_right(mean_prediction(loss, _checked_members(members)), labels))


def reliability(members: Float[AnyArray, "K n C"], labels: Int[AnyArray, "n"], num_bins: int = 15) -> Reliability:
    """Computes accuracy and mean confidence of the ensemble's predictions in bins of confidence.

    The confidence is the probability of the predicted class. Bin b of B holds the confidences in ``((b - 1) / B, b /
    B]``. Source: Guo et al., 2017, section 2.

    Args:
        members: Logits [K, n, C].
        labels: Labels [n].
        num_bins: Number of bins B.

    Raises:
        ValueError: ``num_bins`` is below 1, an array has another shape or dtype, or a label is not among the C classes.
    """
    confidence, correct = _confidence(members, labels)
    whole("num_bins", num_bins)
    upper = jnp.arange(1, num_bins + 1, dtype=confidence.dtype) / num_bins
    at = jnp.minimum(jnp.searchsorted(upper, confidence, side="left"), num_bins - 1)

    def of_bin(b: Int[Array, ""]) -> tuple[Array, Array, Array]:  # a scatter would add one by one, and lose digits
        count = jnp.sum(at == b)
        confidences, rights = (jnp.sum(jnp.where(at == b, values, 0)) for values in (confidence, correct))
        return count, confidences / jnp.maximum(count, 1), rights / jnp.maximum(count, 1)

    edges = jnp.concatenate([jnp.zeros((1,), upper.dtype), upper])
    return Reliability(edges, *jax.lax.map(of_bin, jnp.arange(num_bins)))


def calibration_error(bins: Reliability) -> Float[Array, ""]:
    """Computes the expected calibration error ``sum_b n_b / n |accuracy_b - confidence_b|`` of bins b, [].

    n_b of the n examples are in bin b. Source: Guo et al., 2017, eq. (3).
    """
    return jnp.sum(bins.examples * jnp.abs(bins.accuracy - bins.confidence)) / jnp.sum(bins.examples)


def expected_calibration_error(
    members: Float[AnyArray, "K n C"], labels: Int[AnyArray, "n"], num_bins: int = 15
) -> Float[Array, ""]:
    """Computes an ensemble's expected calibration error (ECE), [], from 0 to 1 (Guo et al., 2017, equation 3).

    It is the error of the mean of the K models' class probabilities. With n examples a perfectly calibrated ensemble
    has a positive ECE, of the order of ``sqrt(B / n)``: compare ECEs at equal n and B.

    Args:
        members: Logits [K, n, C].
        labels: Labels [n].
        num_bins: Number of bins B.

    Raises:
        ValueError: ``num_bins`` is below 1, an array has another shape or dtype, or a label is not among the C classes.
    """
    return calibration_error(reliability(members, labels, num_bins))


def moments(prediction: Predicted) -> tuple[Float[AnyArray, "n C"], Float[AnyArray, "n #C"]]:
    """Returns the mean and the variance of every output; the variance is NaN for a Gaussian without covariance.

    Args:
        prediction: Prediction at n inputs. The variance of an ensemble is taken over its K models.
    """
    if isinstance(prediction, Gaussian):
        mean, cov = prediction.mean, prediction.cov
        variance = mean[:, :1] * np.nan if cov is None else cov.diagonal().reshape(len(mean), -1)
        return mean, variance
    members = _checked_members(prediction.members if isinstance(prediction, Prediction) else prediction)
    mean = prediction.mean if isinstance(prediction, Prediction) else members.mean(axis=0)
    return mean, knowledge_variance(members)


def predictive_interval(members: Predicted, level: float = 0.95, noise_variance: ArrayLike = 0.0) -> Interval:
    """Computes Gaussian intervals ``mean +- z sqrt(variance + noise_variance)`` at every point and output, each [n, C].

    Args:
        members: Outputs [K, n, C] or a ``Prediction``, whose mean and variance over models are used (FE-2024, section
            V-B); or a ``Gaussian``, such as ``theory.gp_limit`` returns. Without a covariance the ends are NaN.
        level: Probability of the interval; z is the normal quantile of ``(1 + level) / 2``.
        noise_variance: Variance of an observation about its expectation, a number or [n, C]; 0 for an interval of the
            expectation itself.

    Raises:
        ValueError: The level is outside (0, 1), an array has another shape, or the noise variance is negative.
    """
    mean, variance = map(jnp.asarray, moments(members))
    variance = variance + _noise(noise_variance, mean.shape, mean.dtype)
    half = _normal_quantile(level, variance.dtype) * jnp.sqrt(variance)
    return Interval(mean, mean - half, mean + half)


def coverage(interval: Interval, targets: Float[AnyArray, "..."]) -> Float[Array, ""]:
    """Computes the share of targets in their intervals, ends included, [].

    Args:
        interval: An interval for each target.
        targets: Numbers of any shape.

    Raises:
        ValueError: The shapes differ.
    """
    if not interval.low.shape == interval.high.shape == targets.shape:
        shapes = f"low {interval.low.shape}, high {interval.high.shape}, targets {targets.shape}"
        raise ValueError(f"interval: got the shapes {shapes}, must be equal")
    inside = (interval.low <= targets) & (targets <= interval.high)
    return jnp.mean(inside.astype(widest(interval.low.dtype)))


def coverage_interval(share: ArrayLike, num_points: int, level: float = 0.95) -> Interval:
    """Computes Wilson's (1927) confidence interval of a coverage that was measured at independent points.

    Args:
        share: Measured coverage, of any shape.
        num_points: Number of points.
        level: Probability of the interval.

    Raises:
        ValueError: There is less than one point, or the level is outside (0, 1).
    """
    whole("num_points", num_points)
    ratio = wide(jnp.asarray(share))
    ratio = ratio if jnp.issubdtype(ratio.dtype, jnp.floating) else ratio.astype(jnp.zeros(()).dtype)
    z = _normal_quantile(level, ratio.dtype)
    centre = ratio + z**2 / (2 * num_points)
    half = z * jnp.sqrt(ratio * (1 - ratio) / num_points + (z / (2 * num_points)) ** 2)
    scale = 1 + z**2 / num_points
    return Interval(ratio, (centre - half) / scale, (centre + half) / scale)


def measure(
    predicted: Prediction, targets: Num[AnyArray, "n *C"], labels: Int[AnyArray, "n"] | None, loss: str | Loss
) -> dict[str, float]:
    """Computes the metrics of a prediction: mean loss, accuracy, calibration and uncertainties, by name.

    The mean loss is called "nll", "mse" or "loss" (``metric_of(loss)``). Only a loss of classes has calibration, Brier
    score and entropies. Only K > 1 models have a variance over models and mutual information. Accuracies are NaN if an
    output is not finite.

    Args:
        predicted: Outputs of the K models, [K, n, C], and the ensemble's prediction. For a loss of classes, the latter
            is not used: the K models count equally.
        targets: Targets [n, C]: numbers for the squared error, -1 and 1 for a loss of signs such as the logistic one.
        labels: Class labels [n]; None for regression.
        loss: Name of a loss, or a function, which is called with the labels, or in regression with the targets.

    Raises:
        ValueError: The loss is unknown, or a label is not among the C classes.
    """
    members, mean = np.asarray(predicted.members, np.float64), np.asarray(predicted.mean, np.float64)
    checked = None if labels is None else class_labels("labels", labels, members.shape[-1])
    takes_labels = callable(loss) and labels is not None
    scores, classes = _scores(members, mean, np.asarray(labels if takes_labels else targets), checked, loss)
    metrics = {name: float(value) for name, value in scores.items()}
    if checked is not None:  # on the host, where a share is divided exactly
        right = {"accuracy": np.asarray(classes) == checked, "accuracy_of_members": members.argmax(axis=-1) == checked}
        finite = bool(np.isfinite(members).all())
        metrics |= {name: float(np.mean(share)) if finite else np.nan for name, share in right.items()}
    return {name: metrics[name] for name in METRICS if name in metrics}


def metric_of(loss: str | Loss) -> str:
    """Returns the name of the metric that shows the progress of training by a loss: "nll", "mse" or "loss".

    It is "nll" for a loss of classes and "mse" for a loss of numbers. For a loss of signs (-1 and 1), such as the
    logistic one, and for a user's function it is "loss", the loss of the mean prediction.

    Raises:
        ValueError: The loss is unknown.
    """
    return {"classes": "nll", "numbers": "mse"}.get(targets_of(loss), "loss")


@functools.partial(jax.jit, static_argnames="loss")
def _scores(
    members: Float[Array, "K n C"],
    mean: Float[Array, "n C"],
    targets: Num[Array, "n *C"],
    labels: Int[Array, "n"] | None,
    loss: str | Loss,
) -> tuple[dict[str, Float[Array, ""]], Int[Array, "n"]]:
    """Computes the metrics of ``measure``, except accuracies, by name; returns them and the predicted classes [n].

    ``mean`` is the ensemble's prediction, which is not used for a loss of classes. The other arguments are as for
    ``measure``.
    """
    several, scores = members.shape[0] > 1, dict[str, Array]()
    metric = metric_of(loss)
    if metric == "nll" and labels is not None:
        mean = log_probability(members)
        scores["nll"] = negative_log_likelihood(members, labels)
        scores["ece"] = expected_calibration_error(members, labels)
        scores["brier"] = brier_score(members, labels)
        scores["predictive_entropy"] = jnp.mean(predictive_entropy(members))
        if several:
            scores["mutual_information"] = jnp.mean(mutual_information(members))
    elif metric == "loss":
        scores["loss"] = get_loss(mean_form(loss))(mean, targets, jnp.ones(len(mean), bool))
    else:
        scores["mse"] = jnp.mean((mean - targets) ** 2)
    if several:
        scores["knowledge_variance"] = jnp.mean(knowledge_variance(members))
    return scores, mean.argmax(axis=-1)


def _weighed(log_p: Float[Array, "*shape"], log_q: Float[Array, "*other"]) -> Float[Array, "*shape"]:
    """Computes ``p log q`` elementwise from log p and log q, and 0 where p is 0."""
    p = jnp.exp(log_p)
    return p * jnp.where(p > 0, log_q, 0)


def _confidence(
    members: Float[AnyArray, "K n C"], labels: Int[AnyArray, "n"]
) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """Returns the ensemble's probability of the predicted class [n], and 1 where that class is right, else 0, [n]."""
    _check_labels(members, labels)
    log_p = log_probability(members)
    best = jnp.max(log_p, axis=-1)
    return jnp.exp(best), is_right(log_p, labels)


def _normal_quantile(level: float, dtype: jnp.dtype) -> Float[Array, ""]:
    """Returns z such that a standard normal variable is in [-z, z] with probability ``level``."""
    number("level", level, above=0, below=1)
    return jnp.asarray(scipy.special.ndtri(0.5 + level / 2), dtype)


def _noise(variance: ArrayLike, shape: tuple[int, ...], dtype: jnp.dtype) -> Float[Array, "n C"]:
    """Broadcasts a noise variance to ``shape``; raises ``ValueError`` for another shape or a negative variance."""
    is_traced = isinstance(variance, jax.core.Tracer)
    value = jnp.asarray(variance if is_traced else real_array("noise_variance", variance), dtype)
    if value.shape not in ((), shape):
        raise ValueError(f"noise_variance: got shape {value.shape}, must be a number or {shape}")
    if not is_traced and not bool(jnp.all(value >= 0)):
        raise ValueError(f"noise_variance: got {float(jnp.min(value)):g}, must be at least 0 everywhere")
    return jnp.broadcast_to(value, shape)


def _checked_members(members: Float[AnyArray, "K n C"]) -> Float[AnyArray, "K n C"]:
    """Converts half precision to float32; raises ``ValueError`` unless ``members`` are floating and [K, n, C]."""
    _check_array("members", members)
    if members.ndim != 3 or 0 in members.shape:
        raise ValueError(f"members: got shape {members.shape}, must be [K, n, C] with K, n and C at least 1")
    if not jnp.issubdtype(members.dtype, jnp.floating):
        raise ValueError(f"members: got dtype {members.dtype}, must be floating")
    return wide(members)


def _check_array(name: str, value: object) -> None:
    if not isinstance(value, jax.Array | np.ndarray):
        raise ValueError(f"{name}: got {value!r:.60}, must be an array")


def _check_labels(members: Float[AnyArray, "K n C"], labels: Int[AnyArray, "n"]) -> None:
    _checked_members(members)
    _check_array("labels", labels)
    if labels.shape != (members.shape[1],) or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"labels: got {labels.dtype} {labels.shape}, must be integers [n] for members {members.shape}, "
            f"that is ({members.shape[1]},)"
        )
    if not isinstance(labels, jax.core.Tracer):
        class_labels("labels", labels, members.shape[-1])
