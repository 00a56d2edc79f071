"""Scores of conformal prediction: how badly a prediction fits a target."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Num

from fedtangent._src.checks import choice, class_labels, finite, real_array
from fedtangent._src.measures.uncertainty import Predicted, log_probability, moments
from fedtangent._src.types import AnyArray, Gaussian, Prediction

CLASSIFICATION, REGRESSION = ("probability", "adaptive"), ("residual", "normalised")


def conformal_scores(prediction: Predicted, targets: Num[AnyArray, "n *C"], score: str) -> Float64[np.ndarray, "n"]:
    """Computes the conformal score of every target, which is high if the prediction fits it badly, [n].

    - "probability": ``1 - p(y | x)`` (Sadinle et al., 2019).
    - "adaptive": the probability of all classes that are at least as likely as y, y included (Romano et al., 2020,
      without their randomisation). It is 1 for the least likely class: if more targets than the share ``alpha`` are
      that class, sets hold every class and cover too often. Of equally likely classes, one of smaller index counts as
      more likely.
    - "residual": the largest ``|y_c - mean_c|`` over the outputs c.
    - "normalised": as "residual", with each difference divided by the standard deviation of the ensemble's models, or
      of the Gaussian (Lei et al., 2018).

    Args:
        prediction: Prediction at n inputs: a ``Prediction``, a ``Gaussian``, or outputs [K, n, C].
        targets: Labels [n] for the first two scores, values [n, C] for the others.
        score: Name of the score.

    Raises:
        ValueError: The score is unknown or does not fit the prediction or the targets, a number is not finite, or a
            standard deviation is 0.
    """
    if choice("score", score, (*CLASSIFICATION, *REGRESSION)) in CLASSIFICATION:
        table = class_scores(prediction, score)
        labels = class_labels("targets", targets, table.shape[1])
        if len(labels) != len(table):
            raise ValueError(f"targets: got {len(labels)} labels, must be {len(table)}, one for each prediction")
        return table[np.arange(len(labels)), labels]
    centre, scale = centre_and_scale(prediction, score)
    values = real_array("targets", targets)
    finite("targets", values)
    if values.shape != centre.shape:
        raise ValueError(f"targets: got shape {values.shape}, must be {centre.shape}")
    return np.max(np.abs(values - centre) / scale, axis=1)


def class_scores(prediction: Predicted, score: str) -> Float64[np.ndarray, "n C"]:
    """Computes the conformal score of every class at every input, as ``conformal_scores`` defines it.

    Args:
        prediction: Prediction at n inputs, with logits.
        score: "probability" or "adaptive".

    Raises:
        ValueError: The prediction is a Gaussian, has one output, or gives probabilities that are not finite.
    """
    if isinstance(prediction, Gaussian):
        raise ValueError(f"score: got {score!r} for a Gaussian, allowed are {', '.join(REGRESSION)}")
    logits = prediction.mean[None] if isinstance(prediction, Prediction) else prediction
    p = np.exp(np.asarray(log_probability(logits), np.float64))
    if p.shape[1] < 2:
        raise ValueError(f"score: got {score!r} for a single output, allowed are {', '.join(REGRESSION)}")
    finite("prediction", p)
    if score == "probability":
        return 1 - p
    order = np.argsort(-p, axis=1, kind="stable")
    total = np.minimum(np.cumsum(np.take_along_axis(p, order, axis=1), axis=1), 1)
    total[:, -1] = 1  # exactly, so that a threshold of 1 keeps every class
    return np.take_along_axis(total, np.argsort(order, axis=1), axis=1)


def centre_and_scale(
    prediction: Predicted, score: str
) -> tuple[Float64[np.ndarray, "n C"], Float64[np.ndarray, "n C"]]:
    """Returns the centres of the prediction intervals, and the lengths by which their residuals are divided.

    The lengths are 1 for the score "residual", and standard deviations for "normalised".

    Args:
        prediction: Prediction at n inputs.
        score: "residual" or "normalised".

    Raises:
        ValueError: The mean is not finite, or a standard deviation that is needed is 0 or NaN.
    """
    centre, variance = (np.asarray(values, np.float64) for values in moments(prediction))
    finite("prediction", centre)
    if score == "residual":
        return centre, np.ones_like(centre)
    if not np.all(variance > 0):
        raise ValueError("prediction: got a standard deviation of 0 or NaN, must be above 0 for score 'normalised'")
    return centre, np.broadcast_to(np.sqrt(variance), centre.shape)
