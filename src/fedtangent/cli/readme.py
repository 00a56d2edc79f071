"""The README's tables, generated from the entries: ``python -m fedtangent.cli.readme README.md`` writes them anew.

That of the algorithms says what each keeps and sends, measured on one federation. The federation is NTK-FL's: an MLP
784-100-10 in float32, 100 clients of 200 examples, 20 of them a round (all of them for algorithms whose schedule has no
cohort).
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

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
KINDS = ("algorithms", "datasets", "partitions", "models", "schedules", "theorems")


def cells(name: str) -> list[str]:
    """The row of one algorithm: state in models' sizes, bytes in MiB. Nothing is trained: shapes are traced."""
    entry, work, cohort = catalogue("algorithms")[name], {"local_epochs": 1}, {"clients_per_round": COHORT}
    model = mlp(INPUTS, OUTPUTS, (HIDDEN,), parameterization="standard")
    of_schedule = catalogue("schedules")[entry.schedule]
    schedule = of_schedule.build(_options(of_schedule, cohort), CLIENTS, 0)
    shared = np.arange(SHARED, dtype=np.int32)
    at_server = jnp.zeros((SERVER_EXAMPLES, INPUTS), jnp.float32)
    algorithm = entry.build(_options(entry, work), Given(model, schedule, server_data=at_server, shared=shared))
    data = _data(shared if "shared" in entry.needs else None)
    state = jax.eval_shape(lambda: algorithm.init(0, CLIENTS))
    size = schedule.num_models * num_bytes(jax.eval_shape(model.init, jax.random.key(0)))
    cost, slots = algorithm.cost(data, engine_for(data, "scan")), schedule.num_slots
    kept = num_bytes(state.server) / size - 1, num_bytes((state.client, state.channel)) / CLIENTS / size
    once = (cost.uplink_once + cost.downlink_once) / 2**20
    return [
        f"`{name}`",
        entry.parts,
        *("" if abs(models) < 5e-3 else f"{models:.3g}" for models in kept),
        f"{slots * (cost.uplink + cost.uplink_per_example * EXAMPLES) / 2**20:.2f}",
        f"{slots * cost.downlink / 2**20:.2f}",
        "" if once == 0 else f"{once:.2f}",
    ]


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


@functools.cache
def table(kind: str) -> str:
    """The table of a kind; of most: names, what they are, their own options."""
    if kind == "algorithms":
        columns: tuple[str, ...] = ("algorithm", "composed of", "server keeps", "client keeps", "up", "down", "once")
        rows = [cells(name) for name in catalogue(kind)]
    elif kind == "theorems":
        columns = ("check", "where it stands", "what is checked")
        rows = [[f"`{entry.name}`", entry.statement, entry.summary] for entry in catalogue(kind).values()]
    else:
        columns = (kind.removesuffix("s").replace("dataset", "data set"), "what it is", "options")
        rows = []
        for entry in catalogue(kind).values():
            options = ", ".join(f"`--{name.replace('_', '-')}`" for name in option_names(entry))
            rows.append([f"`{entry.name}`", entry.summary, options])
    lines = (columns, ("---",) * len(columns), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rewritten(text: str) -> str:
    """``text`` with every table between ``<!-- KIND -->`` and ``<!-- end -->`` generated anew."""
    for kind in KINDS:
        between = re.compile(rf"(<!-- {kind} -->\n).*?(<!-- end -->\n)", re.DOTALL)
        text = between.sub(rf"\g<1>{table(kind)}\g<2>", text)
    return text


if __name__ == "__main__":
    readme = Path(sys.argv[1])
    readme.write_text(rewritten(readme.read_text(encoding="utf-8")), encoding="utf-8")
