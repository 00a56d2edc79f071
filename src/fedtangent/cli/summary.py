"""What each algorithm is made of, keeps and sends, measured on one federation: the table of the documentation.

The federation is NTK-FL's: an MLP 784-100-10 in float32, 100 clients of 200 examples, 20 of them a round (all of them
for algorithms whose schedule has no cohort).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.cli.algorithms import ALGORITHMS, Given
from fedtangent.cli.catalogue import SCHEDULES
from fedtangent.cli.options import TrainOptions
from fedtangent.data.federated import federated_data
from fedtangent.data.sharing import with_shared
from fedtangent.engine.clients import engine_for
from fedtangent.models import mlp
from fedtangent.pytrees import num_bytes
from fedtangent.types import FederatedData, Partition

CLIENTS, EXAMPLES, COHORT = 100, 200, 20
INPUTS, HIDDEN, OUTPUTS = 784, 100, 10
SHARED = 2000  # data sharing: a tenth of all examples


class Row(NamedTuple):
    """One algorithm; state in models' sizes, bytes in MiB."""

    name: str
    parts: str
    server: float  # kept at the server for each model, besides the model
    client: float  # kept at each client for each model
    uplink: float  # a round
    downlink: float  # a round
    once: float  # before the first round, both ways


def rows() -> list[Row]:
    """A row for each algorithm that ``train`` knows."""
    return [row(name) for name in ALGORITHMS]


def row(name: str) -> Row:
    """The row of one algorithm. Nothing is trained: shapes are traced."""
    entry = ALGORITHMS[name]
    o = dataclasses.replace(TrainOptions(), algorithm=name, local_epochs=1, clients_per_round=COHORT)
    model = mlp(INPUTS, OUTPUTS, (HIDDEN,), parameterization="standard")
    plan = SCHEDULES[entry.schedule].build(o, CLIENTS)
    shared = np.arange(SHARED, dtype=np.int32)
    algorithm = entry.build(o, Given(model, plan, jnp.zeros((o.server_examples, INPUTS), jnp.float32), shared))
    data = _data(shared if name == "data_sharing" else None)
    state = jax.eval_shape(lambda: algorithm.init(0, CLIENTS))
    size = num_bytes(jax.eval_shape(model.init, jax.random.key(0)))
    cost, models, slots = algorithm.cost(data, engine_for(data, "scan")), plan.num_models, plan.num_slots
    return Row(
        name,
        entry.parts,
        num_bytes(state.server) / models / size - 1,
        num_bytes((state.client, state.channel)) / models / CLIENTS / size,
        slots * (cost.uplink + cost.uplink_per_example * EXAMPLES) / 2**20,
        slots * cost.downlink / 2**20,
        (cost.uplink_once + cost.downlink_once) / 2**20,
    )


def _data(shared: np.ndarray | None) -> FederatedData:
    ends = np.arange(0, CLIENTS * EXAMPLES + 1, EXAMPLES, dtype=np.int32)
    clients = Partition(np.arange(CLIENTS * EXAMPLES, dtype=np.int32), ends)
    if shared is not None:
        clients = with_shared(clients, shared)
    x, y = np.zeros((CLIENTS * EXAMPLES, INPUTS), np.float32), np.zeros((CLIENTS * EXAMPLES, OUTPUTS), np.float32)
    return federated_data(x, y, clients, dtype=jnp.float32)


def markdown() -> str:
    """The table as it stands in the README."""
    head = "| algorithm | composed of | server keeps | client keeps | up | down | once |\n"
    lines = [
        f"| `{r.name}` | {r.parts} | {_times(r.server)} | {_times(r.client)} | {r.uplink:.2f} | {r.downlink:.2f} | "
        f"{_number(r.once)} |\n"
        for r in rows()
    ]
    return head + "| --- | --- | --- | --- | --- | --- | --- |\n" + "".join(lines)


def _times(models: float) -> str:
    return "" if abs(models) < 5e-3 else f"{models:.3g}"


def _number(value: float) -> str:
    return "" if value == 0 else f"{value:.2f}"
