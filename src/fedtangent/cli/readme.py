"""The README's tables, generated from the entries: ``python -m fedtangent.cli.readme README.md`` writes them anew.

That of the algorithms says what each keeps and sends, measured on one federation. The federation is NTK-FL's: an MLP
784-100-10 in float32, 100 clients of 200 examples, 20 of them a round (all of them for algorithms whose schedule has no
cohort).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.data.federated import federated_data
from fedtangent.data.sharing import with_shared
from fedtangent.engine.clients import engine_for
from fedtangent.entries import Entry, catalogue, option_names
from fedtangent.federated.algorithms.entry import Given
from fedtangent.models import mlp
from fedtangent.pytrees import num_bytes
from fedtangent.types import FederatedData, Partition

CLIENTS, EXAMPLES, COHORT = 100, 200, 20
INPUTS, HIDDEN, OUTPUTS = 784, 100, 10
SERVER_EXAMPLES = 100
SHARED = 2000  # data sharing: a tenth of all examples
PLAIN = ("datasets", "partitions", "models", "schedules")  # kinds whose table has names, summaries and options


class Row(NamedTuple):
    """One algorithm; state in models' sizes, bytes in MiB."""

    name: str
    parts: str
    server: float  # kept at the server for each model, besides the model
    client: float  # kept at each client for each model
    uplink: float  # a round
    downlink: float  # a round
    once: float  # before the first round, both ways


def row(name: str) -> Row:
    """The row of one algorithm. Nothing is trained: shapes are traced."""
    entry, work, cohort = catalogue("algorithms")[name], {"local_epochs": 1}, {"clients_per_round": COHORT}
    model = mlp(INPUTS, OUTPUTS, (HIDDEN,), parameterization="standard")
    of_schedule = catalogue("schedules")[entry.schedule]
    schedule = of_schedule.build(_options(of_schedule, cohort), CLIENTS, 0)
    shared = np.arange(SHARED, dtype=np.int32)
    at_server = jnp.zeros((SERVER_EXAMPLES, INPUTS), jnp.float32)
    algorithm = entry.build(_options(entry, work), Given(model, schedule, server_data=at_server, shared=shared))
    data = _data(shared if "shared" in entry.needs else None)
    state = jax.eval_shape(lambda: algorithm.init(0, CLIENTS))
    size = num_bytes(jax.eval_shape(model.init, jax.random.key(0)))
    cost, models, slots = algorithm.cost(data, engine_for(data, "scan")), schedule.num_models, schedule.num_slots
    return Row(
        name,
        entry.parts,
        num_bytes(state.server) / models / size - 1,
        num_bytes((state.client, state.channel)) / models / CLIENTS / size,
        slots * (cost.uplink + cost.uplink_per_example * EXAMPLES) / 2**20,
        slots * cost.downlink / 2**20,
        (cost.uplink_once + cost.downlink_once) / 2**20,
    )


def _options(entry: Entry, given: dict[str, Any]) -> Any:
    """An entry's options with those of the given values that it has."""
    return entry.options(**{name: value for name, value in given.items() if name in option_names(entry)})


def _data(shared: np.ndarray | None) -> FederatedData:
    ends = np.arange(0, CLIENTS * EXAMPLES + 1, EXAMPLES, dtype=np.int32)
    clients = Partition(np.arange(CLIENTS * EXAMPLES, dtype=np.int32), ends)
    if shared is not None:
        clients = with_shared(clients, shared)
    x, y = np.zeros((CLIENTS * EXAMPLES, INPUTS), np.float32), np.zeros((CLIENTS * EXAMPLES, OUTPUTS), np.float32)
    return federated_data(x, y, clients, dtype=jnp.float32)


def algorithms() -> str:
    """The table of the algorithms."""
    head = "| algorithm | composed of | server keeps | client keeps | up | down | once |\n"
    lines = [
        f"| `{r.name}` | {r.parts} | {_times(r.server)} | {_times(r.client)} | {r.uplink:.2f} | {r.downlink:.2f} | "
        f"{_number(r.once)} |\n"
        for r in map(row, catalogue("algorithms"))
    ]
    return head + "| --- | --- | --- | --- | --- | --- | --- |\n" + "".join(lines)


def plain(kind: str) -> str:
    """The table of another kind: names, what they are, their own options."""
    lines = [
        f"| {kind.removesuffix('s').replace('dataset', 'data set')} | what it is | options |\n| --- | --- | --- |\n"
    ]
    for entry in catalogue(kind).values():
        options = ", ".join(f"`--{name.replace('_', '-')}`" for name in option_names(entry))
        lines.append(f"| `{entry.name}` | {entry.summary} | {options} |\n")
    return "".join(lines)


def rewritten(text: str) -> str:
    """``text`` with every table between ``<!-- KIND -->`` and ``<!-- end -->`` generated anew."""
    for kind in ("algorithms", *PLAIN):
        table = algorithms() if kind == "algorithms" else plain(kind)
        between = re.compile(rf"(<!-- {kind} -->\n).*?(<!-- end -->\n)", re.DOTALL)
        text = between.sub(rf"\g<1>{table}\g<2>", text)
    return text


def _times(models: float) -> str:
    return "" if abs(models) < 5e-3 else f"{models:.3g}"


def _number(value: float) -> str:
    return "" if value == 0 else f"{value:.2f}"


if __name__ == "__main__":
    readme = Path(sys.argv[1])
    readme.write_text(rewritten(readme.read_text(encoding="utf-8")), encoding="utf-8")
