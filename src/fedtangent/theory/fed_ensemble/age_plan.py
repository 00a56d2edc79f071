"""What the cohorts of a run mean for the ages of each model: examples a round, visits of clients, steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedtangent.theory import checks
from fedtangent.types import Cohort, Partition


class AgePlan(NamedTuple):
    """A run divided into ages of ``rounds_per_age`` rounds; rounds after the last whole age belong to none."""

    rounds_per_age: int
    num_rounds: int
    num_models: int
    examples: np.ndarray  # [R, K] float64, examples of the clients that train a model in a round
    visits: np.ndarray  # [A, K, N] int64, how often a client trains a model in an age
    weight_error: np.ndarray  # [R, K] largest |p_i - n_i / sum n_i| over the clients of a model in a round
    steps: np.ndarray  # [N] local steps
    rates: np.ndarray  # [R] step sizes
    trains: np.ndarray  # [N] bool, clients that ever train

    @property
    def num_ages(self) -> int:
        """Number of whole ages A."""
        return len(self.visits)

    @property
    def least_progress(self) -> np.ndarray:
        """The least ``eta tau`` of any client and round in each age, [A]."""
        ages = self.rates[: self.num_ages * self.rounds_per_age].reshape(self.num_ages, -1)
        return ages.min(axis=1) * self.steps[self.trains].min()

    @property
    def most_progress(self) -> float:
        """The largest ``eta tau`` of any client and round."""
        return float(self.rates.max() * self.steps[self.trains].max())


def age_plan(
    partition: Partition,
    cohorts: Cohort,
    local_steps: Any,
    learning_rate: Any,
    num_models: int | None,
    rounds_per_age: int | None,
) -> AgePlan:
    """The plan of checked cohorts [R, S]; ages of K rounds unless told otherwise. ``ValueError`` for what is wrong."""
    sizes = np.asarray(partition.sizes)
    client, model, num_models = checks.check_cohorts(cohorts, sizes, num_models)
    num_rounds = len(client)
    length = num_models if rounds_per_age is None else rounds_per_age
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or not 1 <= length <= num_rounds:
        raise ValueError(f"rounds_per_age must be an integer in 1..{num_rounds} (the rounds), got {length!r}")
    steps = checks.check_steps(local_steps, partition.num_clients)
    checks.check_rate("learning_rate", learning_rate, [(), (num_rounds,)])
    rates = np.broadcast_to(np.asarray(learning_rate, np.float64), (num_rounds,))
    weight = np.where(checks.present_slots(cohorts), np.asarray(cohorts.weight, np.float64), 0.0)
    count = np.where(weight > 0, sizes[client], 0).astype(float)
    rounds = np.broadcast_to(np.arange(num_rounds)[:, None], client.shape)

    def totals(values: np.ndarray) -> np.ndarray:
        table = np.zeros((num_rounds, num_models))
        np.add.at(table, (rounds, model), values)
        return table

    examples, weights = totals(count), totals(weight)
    share = weight / np.maximum(weights[rounds, model], np.finfo(float).tiny)
    by_size = count / np.maximum(examples[rounds, model], 1.0)
    error = np.zeros((num_rounds, num_models))
    np.maximum.at(error, (rounds, model), np.abs(share - by_size))
    ages = num_rounds // int(length)
    visits = np.zeros((ages, num_models, partition.num_clients), np.int64)
    inside = (weight > 0) & (rounds < ages * length)
    np.add.at(visits, (rounds[inside] // length, model[inside], client[inside]), 1)
    trains = np.zeros(partition.num_clients, bool)
    trains[client[weight > 0]] = True
    if not trains.any():
        raise ValueError("cohorts must have a filled slot (weight above 0), got none")
    return AgePlan(int(length), num_rounds, num_models, examples, visits, error, steps, rates, trains)
