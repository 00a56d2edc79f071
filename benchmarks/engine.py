"""What the engine costs: client steps and rounds a second, share of the matrix-product peak, memory, compile time.

Tables: ``mappings`` (every model under every mapping, beside a Python loop over a jitted client), ``growth`` (cost
against clients, rounds, cohort and model size), ``million`` (a million clients of ten examples), ``devices`` (forced
host devices and two processes, on a CPU only). Every measurement is a process of its own.

    python benchmarks/engine.py --output results/bench
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

TABLES = ("mappings", "growth", "million", "devices")
SECONDS = 2.0  # a timed run lasts at least as long, and one round


class Case(NamedTuple):
    """One measurement."""

    table: str
    model: str = "mlp"
    mapping: str = "scan"
    clients: int = 100
    cohort: int = 20
    batch: int = 10
    steps: int = 10
    examples: int = 50  # of a client
    width: int = 100  # of the mlp
    features: int = 784  # of logistic and mlp
    rounds: int | None = None  # fixed number, or as many as SECONDS take
    devices: int = 1
    processes: int = 1


def cases(tables: list[str], models: list[str], most_clients: int) -> Iterator[Case]:
    """Everything that is measured."""
    mappings = ("python loop", "scan", "vmap", "chunked:4", "chunked:10")
    if "mappings" in tables:
        for model in models:
            for mapping in mappings:
                yield Case("mappings", model, mapping)
        if "mlp" in models:
            for mapping in mappings:
                yield Case("mappings", "mlp", mapping, cohort=8, batch=128, width=1024, examples=256, steps=4)
    if "growth" in tables:
        for clients in (n for n in (10, 100, 1000, 10_000) if n <= most_clients):
            yield Case("growth", "logistic", clients=clients, cohort=10)
        for cohort in (1, 10, 100, 1000):
            yield Case("growth", "logistic", clients=1000, cohort=cohort)
        for rounds in (10, 100, 1000):
            yield Case("growth", "logistic", clients=100, cohort=10, rounds=rounds)
        for width in (16, 64, 256, 1024):
            yield Case("growth", "mlp", cohort=10, width=width)
    if "million" in tables:
        # one epoch, where fetching a client's examples from memory shows, and the five of FedAvg's paper
        for steps in (1, 5):
            for clients in (10_000, 100_000, 1_000_000):
                yield Case("million", "logistic", clients=clients, cohort=1000, examples=10, steps=steps, features=20)
    if "devices" in tables:
        yield Case("devices", "mlp", "scan")
        for devices in (2, 4, 8):
            yield Case("devices", "mlp", "sharded:scan", devices=devices)
        # processes must agree on the number of rounds: it cannot come from their own clocks
        yield Case("devices", "mlp", "sharded:scan", devices=1, processes=2, rounds=200)


# ---- one measurement, in a process of its own ----


def build(case: Case) -> tuple[Any, Any, Any, Any]:
    """Model, loss, work, data."""
    import jax.numpy as jnp
    import numpy as np

    import fedtangent as ft
    from fedtangent._src.federated.local import Work

    rng, n = np.random.default_rng(0), case.clients * case.examples
    offsets = np.arange(0, n + 1, case.examples, dtype=np.int32)
    clients = ft.types.Partition(np.arange(n, dtype=np.int32), offsets)
    shape, outputs = {"cnn": ((28, 28, 1), 10), "lstm": ((80,), 80)}.get(case.model, ((case.features,), 10))
    if case.model == "lstm":
        x, dtype = rng.integers(0, 80, (n, *shape), dtype=np.int32), jnp.int32
        model = ft.models.lstm(vocabulary=80)
    else:
        x, dtype = rng.normal(size=(n, *shape)).astype(np.float32), jnp.float32
        if case.model == "cnn":
            model = ft.models.cnn(shape, outputs)
        else:
            widths = () if case.model == "logistic" else (case.width,)
            model = ft.models.mlp(case.features, outputs, widths, parameterization="standard")
    data = ft.data.federated_data(x, rng.integers(0, outputs, n), clients, dtype=dtype)
    return model, "cross_entropy", Work(steps=case.steps, batch_size=case.batch), data


def flops_of_a_step(model: Any, data: Any, batch: int) -> float:
    """Operations of one gradient on one batch, by the compiler's count; the loops of an LSTM are counted by hand."""
    import jax
    import jax.numpy as jnp

    from fedtangent._src.losses import cross_entropy

    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    x, y = data.x[:batch], data.y[:batch]

    def loss(p: Any) -> Any:
        return cross_entropy(model.apply(p, x), y, jnp.ones(batch, bool))

    if model.name.startswith("lstm"):
        gates = sum(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim == 2 and leaf.shape[-1] == 4 * 256)
        return 6.0 * batch * (gates * x.shape[1] + 256 * model.output_size)
    counted: Any = jax.jit(jax.grad(loss)).lower(params).compile().cost_analysis()
    return float(counted["flops"])


def matmul_rate(dtype: str = "float32", precision: str = "highest", size: int = 2048) -> float:
    """Operations a second of a product of two square matrices."""
    import jax
    import jax.numpy as jnp

    a = jax.random.normal(jax.random.key(0), (size, size), jnp.float32).astype(dtype)
    product = jax.jit(lambda a: jnp.matmul(a, a, precision=precision))
    product(a).block_until_ready()
    best = min(timed(lambda: product(a).block_until_ready()) for _ in range(5))
    return 2.0 * size**3 / best


def timed(run: Callable[[], Any]) -> float:
    """Wall seconds of a call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def python_loop(case: Case) -> Callable[[int], None]:
    """Rounds of FedAvg as most people first write it: a Python loop over a jitted client, a mean at the end."""
    import jax
    import numpy as np
    import optax

    from fedtangent._src.federated.local import client_view, local_training
    from fedtangent._src.losses import get_loss

    model, loss, work, data = build(case)
    local = local_training(model, get_loss(loss), optax.sgd(0.05), work)

    @jax.jit
    def train(key: Any, params: Any, client: Any) -> Any:
        return local.update(key, params, (), client_view(data, client, jax.numpy.bool_(True), case.examples))[0]

    mean = jax.jit(lambda params, sent: jax.tree.map(lambda p, *m: p - sum(m) / len(m), params, *sent))
    rng = np.random.default_rng(0)

    def rounds(number: int) -> None:
        params = model.init(jax.random.key(0))
        for r in range(number):
            chosen = rng.permutation(case.clients)[: case.cohort]
            key = jax.random.key(r)
            sent = [train(jax.random.fold_in(key, int(c)), params, np.int32(c)) for c in chosen]
            params = mean(params, sent)
        jax.block_until_ready(params)

    return rounds


def simulated(case: Case) -> Callable[[int], None]:
    """The same rounds through ``simulate``."""
    import jax

    import fedtangent as ft
    from fedtangent._src.federated import algorithms, schedule

    model, loss, work, data = build(case)
    plan = schedule.uniform_sampling(case.clients, min(case.cohort, case.clients))
    algorithm = algorithms.fed_avg(model, plan, client_learning_rate=0.05, work=work, loss=loss)

    def rounds(number: int) -> None:
        jax.block_until_ready(ft.simulate(algorithm, data, num_rounds=number, devices=ft.Devices(case.mapping)).state)

    return rounds


def measure(case: Case) -> dict[str, Any]:
    """Rates, memory and compile time of one case."""
    import jax

    run = python_loop(case) if case.mapping == "python loop" else simulated(case)
    first = timed(lambda: run(1))
    second = timed(lambda: run(1))
    rounds = case.rounds or max(2, int(SECONDS / max(second, 1e-4)))
    seconds = timed(functools.partial(run, rounds))
    while case.rounds is None and seconds < SECONDS:  # a run's own start was most of the one round
        rounds = math.ceil(1.2 * SECONDS / seconds * rounds)
        seconds = timed(functools.partial(run, rounds))
    model, _, _, data = build(case)
    steps = rounds * min(case.cohort, case.clients) * case.steps / seconds
    peak = matmul_rate()
    found = {
        "rounds": rounds,
        "rounds/s": rounds / seconds,
        "steps/s": steps,
        "GFLOP/s": steps * flops_of_a_step(model, data, case.batch) / 1e9,
        "peak GFLOP/s": peak / 1e9,
        "share of peak": steps * flops_of_a_step(model, data, case.batch) / peak,
        "compile s": first - second,
        "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
    }
    if jax.default_backend() != "cpu":
        found["TF32 GFLOP/s"] = matmul_rate(precision="default") / 1e9
        found["bf16 GFLOP/s"] = matmul_rate("bfloat16", "default") / 1e9
        found["MiB"] = jax.local_devices()[0].memory_stats()["peak_bytes_in_use"] / 2**20
    return found


def one(text: str) -> None:
    """Measure the case given as JSON and print what was found."""
    options = json.loads(text)
    place = options.pop("process", None)
    case = Case(**options)
    if case.table == "devices":
        os.environ["JAX_PLATFORMS"] = "cpu"
    if case.devices > 1:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={case.devices}"
    if place is not None:
        from fedtangent._src.engine import processes as distributed

        distributed.start(place["coordinator"], case.processes, place["id"])
    found = measure(case)
    if place is None or place["id"] == 0:
        print(json.dumps(found))


# ---- all of them ----


def launched(case: Case) -> dict[str, Any]:
    """The figures of a case, from a process (or several) started for it; ``error`` if it failed."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = []
    for index in range(case.processes):
        place = {} if case.processes == 1 else {"process": {"coordinator": address, "id": index}}
        command = [sys.executable, __file__, "--one", json.dumps({**case._asdict(), **place})]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said = [process.communicate() for process in processes]
    for process, (_, error) in zip(processes, said, strict=True):
        if process.returncode:
            return {"error": error.strip().splitlines()[-1] if error.strip() else f"exit {process.returncode}"}
    return json.loads(said[0][0].splitlines()[-1])


VARYING = {
    "mappings": ("model", "mapping", "width", "batch"),
    "growth": ("model", "clients", "cohort", "width", "rounds"),
    "million": ("clients", "cohort", "steps"),
    "devices": ("mapping", "devices", "processes"),
}
FIGURES = ("steps/s", "rounds/s", "GFLOP/s", "share of peak", "MiB", "compile s")


def print_table(name: str, rows: list[dict[str, Any]]) -> None:
    """One table, with what varies in it and what was measured."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=name, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in VARYING[name]:
        table.add_column(column)
    for column in FIGURES:
        table.add_column(column, justify="right")
    for row in rows:
        figures = [f"{row[f]:.3g}" if f in row else "" for f in FIGURES]
        if "error" in row:
            figures = [row["error"][:60], *[""] * (len(FIGURES) - 1)]
        table.add_row(*(str(row[column]) for column in VARYING[name]), *figures)
    Console(width=140 if not sys.stdout.isatty() else None).print(table)


def main() -> None:
    """Measure every case, print tables, write ``engine.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/bench"))
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--models", nargs="+", default=["logistic", "mlp", "cnn", "lstm"])
    parser.add_argument("--most-clients", type=int, default=10_000)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.one)
        return
    from tqdm import tqdm

    planned = list(cases(arguments.tables, arguments.models, arguments.most_clients))
    rows: list[dict[str, Any]] = []
    for case in tqdm(planned, unit="case", disable=None):
        rows.append({**case._asdict(), **launched(case)})
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "engine.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    for name in arguments.tables:
        print_table(name, [row for row in rows if row["table"] == name])
    print(f"numbers in {arguments.output / 'engine.json'}")
    if any("error" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
