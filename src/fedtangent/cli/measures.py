"""What ``train`` measures: an ensemble's prediction, each client's own, the privacy of a private run."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.cli.job import Job, Split
from fedtangent.federated import predict as personal
from fedtangent.measures import uncertainty
from fedtangent.measures.privacy import epsilon
from fedtangent.types import Array, Prediction

METRICS = (  # in the order of the table
    *("nll", "mse", "accuracy", "accuracy_of_members", "ece", "brier"),
    *("predictive_entropy", "mutual_information", "knowledge_variance"),
)


def measure(predicted: Prediction, split: Split, loss: str) -> dict[str, float]:
    """Metrics of an ensemble's prediction: its error, its members' mean error, its calibration, its uncertainty."""
    members, mean = np.asarray(predicted.members, np.float64), np.asarray(predicted.mean, np.float64)
    labels = labels_of(split)
    scores, classes = _scores(members, mean, np.asarray(split.targets), labels, loss)
    found = {name: float(value) for name, value in scores.items()}
    if labels is not None:  # on the host, where a share is divided exactly
        found["accuracy"] = float(np.mean(np.asarray(classes) == labels))
        found["accuracy_of_members"] = float(np.mean(members.argmax(axis=-1) == labels))
    return {name: found[name] for name in METRICS if name in found}


def labels_of(split: Split) -> np.ndarray | None:
    """The class labels of a split, if it has any."""
    return None if split.labels is None else np.asarray(split.labels)


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


def _accuracy_of_targets(outputs: Array, targets: Array, mask: Array) -> Array:
    """Accuracy where classes are one-hot targets [m, C]."""
    return personal.accuracy(outputs, jnp.argmax(targets, axis=-1), mask)


def measure_clients(job: Job, state: Any) -> dict[str, float]:
    """Every client on its own test examples: the mean over clients, and over examples."""
    test = job.of_clients
    assert test is not None
    if job.splits["test"].labels is None:
        name, measure = "mse", personal.mse
    else:
        name = "accuracy"
        measure = personal.accuracy if job.options.loss == "cross_entropy" else _accuracy_of_targets
    found = personal.evaluate_clients(job.algorithm, state, job.data, test, measure)
    return {name: float(found.mean), f"{name}_over_examples": float(found.weighted_mean)}


def privacy(job: Job, num_rounds: int) -> str | None:
    """The guarantee of a private run, or why there is none; None for other runs."""
    o, plan = job.options, job.algorithm.schedule
    if o.algorithm != "dp_fed_avg":
        return None
    if job.schedule == "poisson" and o.keep_first is not None:
        return "epsilon is not known: with keep_first a client more pushes another one out of the round"
    if job.schedule not in ("uniform", "poisson", "all") or plan.num_models != 1:
        return f"epsilon is not known for the schedule {job.schedule} of {plan.num_models} models"
    number = plan.num_clients if o.clients_per_round is None else o.clients_per_round
    sampling = "poisson" if job.schedule == "poisson" else "without_replacement"
    found = epsilon(
        num_clients=plan.num_clients,
        clients_per_round=number,
        num_rounds=num_rounds,
        noise_multiplier=o.noise_multiplier,
        delta=o.delta,
        sampling=sampling,
    )
    neighbours = "a client more or less" if sampling == "poisson" else "the data of one client"
    return f"privacy: epsilon {found:.4g} at delta {o.delta:g}, for {neighbours}"
