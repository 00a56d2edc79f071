"""The cohorts of a run as the theory is told of them, with weights that are derived here and not by the simulator.

Who trains what is drawn by the schedule: a choice, of which theory predicts nothing. How much it counts is part of the
algorithm, and so of what a comparison checks: a simulator that weighs clients wrongly must disagree with theory.
"""

from __future__ import annotations

import numpy as np

from fedtangent import streams
from fedtangent.checks import choice
from fedtangent.federated.compose import WEIGHTINGS
from fedtangent.federated.schedule import unroll
from fedtangent.types import Cohort, Key, Partition, Schedule


def weighed_cohorts(
    schedule: Schedule, partition: Partition, num_rounds: int, seed: int | Key = 0, weighting: str = "examples"
) -> Cohort:
    """The clients and models that ``schedule`` draws from the run's ``seed``, NumPy arrays [R, S], weighed anew.

    Among the clients that train a model in a round, client i has the share ``p_i = n_i / sum_j n_j`` of the average
    (FedAvg; the weighting factor of FE-2021, eq. 1), or an equal one. What is returned is the numerator: n_i, counted
    here example by example, or 1 for whoever holds any ("uniform"); 0 for an empty slot.

    Raises ``ValueError`` for another weighting, or a partition with another number of clients than the schedule's.
    """
    choice("weighting", weighting, WEIGHTINGS)
    num_clients = partition.num_clients
    if num_clients != schedule.num_clients:
        raise ValueError(f"partition: got {num_clients} clients, but the schedule is of {schedule.num_clients}")
    held = np.array([sum(1 for _ in partition.client(i)) for i in range(num_clients)], float)
    counts = held if weighting == "examples" else np.where(held > 0, 1.0, 0.0)
    drawn = unroll(schedule, streams.keys(seed).schedule, num_rounds)
    client, model, filled = (np.asarray(part) for part in drawn)
    return Cohort(client, model, np.where(filled > 0, filled * counts[client], 0.0))  # type: ignore[arg-type]
