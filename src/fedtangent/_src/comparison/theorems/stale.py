"""Rounds with late answers (FedAsync, FedBuff): the flow of the drawn delays, and the largest stable rate against delay.

"stale.rounds" trains linearised networks, which must equal the flow of their delays in every round. "stale.stability"
runs a linear model on both sides of each predicted edge of stability; the rate at which a run would neither grow nor
shrink is interpolated between its growth on the two sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float64

import fedtangent as ft
from fedtangent._src.comparison.followed import setting_of
from fedtangent._src.comparison.linear_models import linearised_verdict
from fedtangent._src.comparison.settings import Scale
from fedtangent._src.comparison.simulated import cohorts
from fedtangent._src.comparison.statistics import width_slope
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.engine.run import examples_of
from fedtangent._src.intervals import Interval
from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.theory.flow.build import federated_flow
from fedtangent._src.types import Algorithm, PyTree, Recipe, Schedule

SUBJECT = "late answers (FedAsync, FedBuff)"
NUM_CLIENTS, SIZES = 5, (4, 2, 7, 3, 5)  # examples of each client
LATE: dict[str, tuple[Recipe, Schedule, ft.Staleness]] = {
    "FedBuff, 3 of 5 clients, always 2 rounds late": (
        ft.fed_buff,
        ft.schedules.uniform_sampling(NUM_CLIENTS, 3),
        ft.Staleness(2, discount="hinge", discount_rate=2.0, grace=1),
    ),
    "FedBuff, every client as late as it is slow, K = 2": (
        ft.fed_buff,
        ft.schedules.per_client_permutations(NUM_CLIENTS, 2),
        ft.Staleness((0, 3, 1, 2, 0)),
    ),
    "FedAsync, 1 of 5 clients, 0 to 3 rounds late": (
        ft.fed_async,
        ft.schedules.uniform_sampling(NUM_CLIENTS, 1),
        ft.Staleness(probabilities=ft.faults.delay_probabilities(1.5, 3), mu=0.2),
    ),
}
