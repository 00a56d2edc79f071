"""Metrics of an ensemble's prediction: its error, its members' mean error, its calibration, its uncertainty."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.measures import uncertainty
from fedtangent.types import Array, Prediction

METRICS = (  # in the order of a table
    *("nll", "mse", "accuracy", "accuracy_of_members", "ece", "brier"),
    *("predictive_entropy", "mutual_information", "knowledge_variance"),
)


def measure(predicted: Prediction, targets: Array, labels: Array | None, loss: str) -> dict[str, float]:
    """Metrics of a prediction under ``loss`` by name, those of ``METRICS`` that apply.

    Args:
        targets: [n, C], what the squared error compares with.
        labels: [n] class labels; None for regression.
    """
    members, mean = np.asarray(predicted.members, np.float64), np.asarray(predicted.mean, np.float64)
    known = None if labels is None else np.asarray(labels)
    scores, classes = _scores(members, mean, np.asarray(targets), known, loss)
    found = {name: float(value) for name, value in scores.items()}
    if known is not None:  # on the host, where a share is divided exactly
        found["accuracy"] = float(np.mean(np.asarray(classes) == known))
        found["accuracy_of_members"] = float(np.mean(members.argmax(axis=-1) == known))
    return {name: found[name] for name in METRICS if name in found}


@functools.partial(jax.jit, static_argnames="loss")
def _scores(
    members: Array, mean: Array, targets: Array, labels: Array | None, loss: str
) -> tuple[dict[str, Array], Array]:
    """The metrics of ``measure`` by name, but for accuracies, and the predicted classes [n]."""
    several, found = members.shape[0] > 1, dict[str, Array]()
    if loss == "cross_entropy" and labels is not None:
        mean = uncertainty.log_probability(members)
        found["nll"] = uncertainty.negative_log_likelihood(members, labels)
        found["ece"] = uncertainty.expected_calibration_error(members, labels)
        found["brier"] = uncertainty.brier_score(members, labels)
        found["predictive_entropy"] = jnp.mean(uncertainty.predictive_entropy(members))
        if several:
            found["mutual_information"] = jnp.mean(uncertainty.mutual_information(members))
    else:
        found["mse"] = jnp.mean((mean - targets) ** 2)
    if several:
        found["knowledge_variance"] = jnp.mean(uncertainty.knowledge_variance(members))
    return found, mean.argmax(axis=-1)
