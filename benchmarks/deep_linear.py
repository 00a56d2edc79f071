"""Rounds a second of FedAvg on DeepLin's network at the paper's size, and the share of the machine's matrix products.

60,000 x 784, N = 160, K = 10, depth 3, width 500, full batch: MNIST where ``--data-dir`` or $FEDTANGENT_DATA names its
files, else random inputs of that shape. Every core is a device and trains clients of its own. The peak is that of
square float32 products on all devices at once, measured in the same run.

What counts are the products that a step of all clients needs, with the network's matrices multiplied from the output's
side (C rows): the chain down, ``d m C + (L - 2) m^2 C`` multiplications a client; the outputs, ``n_c d C``, and X_c'
times the residuals, as many; the chain up, as much as down, whose end is the last layer's gradient; the outer products
that are the other layers' gradients, as much again. Nothing else is counted, as the update of the weights: an entry of
a weight is read and written for C multiplications of each kind, so memory bounds such steps before arithmetic does.

    python benchmarks/deep_linear.py --output results/bench
    python benchmarks/deep_linear.py --data-dir data/mnist --rounds 100 --mappings sharded:scan scan
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src import data, models
from fedtangent._src.data import partition
from fedtangent._src.engine import Devices
from fedtangent._src.engine.processes import use_cores
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.local import Work

RATE = 5e-4  # the paper's
OUTPUTS = 10
SQUARE = 4096  # rows of the products that measure the peak


def operations(x: np.ndarray, given: argparse.Namespace) -> float:
    """Of a round: two for each multiplication that is counted above."""
    chain = (x.shape[1] * given.width + (given.depth - 2) * given.width**2) * OUTPUTS if given.depth > 1 else 0
    return 2.0 * given.steps * (2 * x.size * OUTPUTS + 3 * given.clients * chain)


def seconds(run: Callable[[], Any], times: int = 3) -> float:
    """Of the fastest of some runs."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - began)
    return min(found)


def peak(size: int) -> float:
    """Operations a second of square float32 products, one on each device at once."""
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("devices",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))
    given = jax.device_put(jnp.ones((count, size, size), jnp.float32), place)
    product = jax.jit(lambda a: jnp.matmul(a, a, precision="highest"), out_shardings=place)
    jax.block_until_ready(product(given))
    return 2.0 * count * size**3 / seconds(lambda: product(given), 5)


def problem(given: argparse.Namespace) -> tuple[np.ndarray, np.ndarray, str]:
    """Inputs of length 1, one-hot targets, and where they are from."""
    folder = given.data_dir or os.environ.get("FEDTANGENT_DATA")
    if folder:
        loaded = data.load("mnist", folder, num_train=given.examples, flatten=True)
        x, labels, name = loaded.x_train, loaded.y_train, "MNIST"
    else:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((given.examples, given.features), np.float32)
        labels, name = rng.integers(0, OUTPUTS, given.examples), "random inputs"
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    return x, data.classification_targets(labels, OUTPUTS).astype(np.float32), name


def measure(given: argparse.Namespace, mapping: str, x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """One mapping."""
    held = data.federated_data(x, y, partition.iid(len(y), given.clients, 0), jnp.float32)
    algorithm = algorithms.fed_avg(
        models.deep_linear(x.shape[1], OUTPUTS, given.width, given.depth),
        schedule.all_clients(given.clients),
        client_learning_rate=RATE,
        loss="squared_error_sum",
        work=Work(steps=given.steps, batch_size=None),
        averaging=Averaging(weighting="uniform"),
    )

    def run(rounds: int) -> Any:
        return ft.simulate(algorithm, held, num_rounds=rounds, devices=Devices(mapping))

    first = seconds(lambda: run(1).state, 1)
    again = seconds(lambda: run(1).state, 1)
    began = time.perf_counter()
    done = run(given.rounds)
    jax.block_until_ready(done.state)
    taken = time.perf_counter() - began
    losses = np.asarray(done.history.rounds["loss"])
    done_a_second = operations(x, given) * given.rounds / taken
    return {
        "mapping": mapping, "rounds/s": given.rounds / taken, "GFLOP/s": done_a_second / 1e9,
        "compile s": first - again, "loss of the first round": float(losses[0].mean()),
        "of the last": float(losses[-1].mean()),
    }  # fmt: skip


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for deep_linear.json")
    parser.add_argument("--data-dir", type=Path, help="folder of MNIST's files")
    parser.add_argument("--mappings", nargs="+", default=["sharded:scan"])
    for name, value in (("examples", 60_000), ("features", 784), ("clients", 160), ("steps", 10), ("rounds", 100),
                        ("width", 500), ("depth", 3), ("devices", 0)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    use_cores(given.devices)
    x, y, name = problem(given)
    of_a_round = operations(x, given)
    print(f"{name} {x.shape}, N = {given.clients}, K = {given.steps}, depth {given.depth}, width {given.width}: "
          f"{of_a_round / 1e9:.1f} GFLOP a round")  # fmt: skip
    rates, rows = [peak(SQUARE)], []
    for mapping in given.mappings:
        rows.append(measure(given, mapping, x, y))
        rates.append(peak(SQUARE))
    for row in rows:  # beside the best of what the machine was at before and after
        row["share of peak"] = row["GFLOP/s"] * 1e9 / max(rates)
        print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    print(
        f"peak of {jax.device_count()} devices ({jax.devices()[0].device_kind}): {max(rates) / 1e9:.0f} GFLOP/s, "
        f"at worst {min(rates) / 1e9:.0f}"
    )
    if given.output:
        given.output.mkdir(parents=True, exist_ok=True)
        found = {"sizes": vars(given), "data": name, "peak GFLOP/s": [rate / 1e9 for rate in rates], "rows": rows}
        (given.output / "deep_linear.json").write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    main()
