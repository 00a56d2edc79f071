"""Cost of the ladder of theory: the network, its linearisation, the kernel's features and the flow of one FedAvg run.

The same FedAvg is trained on the network (rung 0, in float32), on the network linearised at its start (rung 1) and on
the features of its infinite width's kernel (rung 2); the flow (rung 3) has no training. Each is called twice: the first
call compiles, the second is timed. Multiply-adds are those of an example's forward pass.

    python benchmarks/ladder.py --output results/bench
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src.output.tables import TextTable, console
from fedtangent.types import Model

CLIENTS, STEPS, BATCH = 10, 10, 16
MODELS: dict[str, Callable[[], Model]] = {
    "dense, 1 x 256": lambda: ft.models.mlp(64, 10, widths=(256,)),
    "dense, 2 x 1024": lambda: ft.models.mlp(64, 10, widths=(1024, 1024)),
    "convolution, 64 channels": lambda: ft.models.ntk_cnn((8, 8, 1), 10, width=64),
    "attention, 64 channels": lambda: ft.models.ntk_transformer((8, 8, 1), 10, width=64),
}


class Row(NamedTuple):
    """A rung of one model; of a kernel only the first seconds."""

    model: str
    rung: str
    first_s: float
    again_s: float | None = None
    steps_per_s: float | None = None
    beside_network: float | None = None
    multiply_adds: float | None = None


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a first and of a second call."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return times[0], times[1]


def multiply_adds(model: Model, x: np.ndarray) -> float:
    """Multiply-adds of an example's forward pass, from the compiler's count of operations."""
    compiled = jax.jit(model.apply).lower(model.init(jax.random.key(0)), jnp.asarray(x, jnp.float32)).compile()
    cost: Any = compiled.cost_analysis()
    return float((cost[0] if isinstance(cost, list) else cost)["flops"]) / 2 / len(x)  # a list in older JAX


def rows_of(name: str, examples: int, rounds: int) -> list[Row]:
    """The rungs of one model."""
    data = ft.data.load("digits", num_train=examples, num_test=100)
    x, x_test, y = data.x_train.reshape(-1, 8, 8, 1), data.x_test.reshape(-1, 8, 8, 1), np.eye(10)[data.y_train] - 0.1
    clients, model = ft.partition.iid(examples, CLIENTS, seed=0), MODELS[name]()
    schedule, work = ft.schedules.all_clients(CLIENTS), ft.Work(steps=STEPS, batch_size=BATCH)
    network = ft.fed_avg(model, schedule, 0.1, work=work)
    at = model.init(jax.random.key(0))
    stacked = jax.tree.map(lambda leaf: leaf[None], at)

    def run(algorithm: ft.types.Algorithm, inputs: np.ndarray, start: object) -> Callable[[], object]:
        return lambda: ft.simulate(algorithm, (inputs, y), clients, num_rounds=rounds, start=start).state

    times = {"0 network": seconds(run(network, x.astype(np.float32), stacked))}
    linear = network.on(ft.models.linearised(model, at))
    times["1 linearised"] = seconds(run(linear, x.astype(np.float32), stacked))
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        assert model.kernel is not None
        began = time.perf_counter()
        kernels = ft.kernels.kernel_blocks(model.kernel, x, x_test)
        of_kernel = time.perf_counter() - began
        features = ft.models.kernel_features(kernels, 10)
        f0 = ft.theory.prior_functions(kernels, 10, seed=0)
        begin = features.start(f0)[None]
        times["2 features, float64"] = seconds(run(network.on(features.model), features.train, begin))
    work_of = {"0 network": multiply_adds(model, x[:16])}
    work_of["1 linearised"] = multiply_adds(ft.models.linearised(model, at), x[:16])
    work_of["2 features, float64"] = 10.0 * features.train.shape[1]
    rows = [
        Row(
            name,
            rung,
            *of_rung,
            rounds * CLIENTS * STEPS / of_rung[1],
            of_rung[1] / times["0 network"][1],
            work_of[rung],
        )
        for rung, of_rung in times.items()
    ]
    return [*rows, Row(name, "kernel of infinite width", of_kernel)]


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for ladder.json")
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    rows = [row for name in options.only for row in rows_of(name, options.examples, options.rounds)]
    cells = [["" if cell is None else cell if isinstance(cell, str) else f"{cell:.3g}" for cell in row] for row in rows]
    console().print(TextTable("FedAvg on the rungs of the ladder", Row._fields, cells))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "ladder.json").write_text(json.dumps([row._asdict() for row in rows], indent=2))


if __name__ == "__main__":
    main()
