"""What ``train`` tells besides an ensemble's prediction: each client's own, and the privacy of a private run."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from fedtangent.commands.job import Job
from fedtangent.federated import personal
from fedtangent.privacy import epsilon
from fedtangent.types import Array


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
