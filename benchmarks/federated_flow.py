"""Seconds and memory of the exact federated flow: means of every round, and the covariance of test points at the last.

Fed-ensemble's per-client permutations of K models over 100 clients. Memory is the peak above that of the same process
after a small flow (JAX and its compiler), in units of one n x n matrix of doubles; the covariance needs two of them as
its input (Theta and K), the means one. Each size runs in a process of its own.

Then runs of the zero function from a kernel in float32 (``--large``), of a ReLU network on Fashion-MNIST or on random
inputs: ``--large-cohort`` of 100 Dirichlet(0.1) clients a round, an epoch of minibatches of 16, learning curves every
tenth round. Under the squared error this run is the flow's mean. Up to 10,000 examples the same in float64 beside it,
and how far apart they end, relative to how far the functions moved.

The table of such a run gives the seconds of each part beside its floor on this machine, measured in the same process:
the kernel's entries once (products of the inputs and arc-cosines of half of them, and one write of all), one product of
the cohort's kernel rows a round (bytes by the rate of reading, or operations by the rate of products, whichever takes
longer), the clients' blocks read once a round, and the entries at test points once with their products.

    python benchmarks/federated_flow.py --output results/bench
    python benchmarks/federated_flow.py --examples --means-only --large 10000 60000 --data-dir data/fashion_mnist
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from fedtangent._src import models
from fedtangent._src.comparison.followed import drawn_rows, steps_of
from fedtangent._src.data import load, partition
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import drawn_cohorts, uniform_sampling
from fedtangent._src.kernels.gram import KernelBlocks, aligned, kernel_blocks, product, read_only
from fedtangent._src.kernels.large import TILE, large_kernel
from fedtangent._src.theory.flow import Rule, federated_flow, functions, recursion
from fedtangent._src.theory.flow.flow import Flow
from fedtangent._src.types import Cohort

MOST_DOUBLE = 10_000  # examples of which a kernel in float64 is built beside that in float32
COHORT, BATCH, RATE = 10, 16, 0.1
CLIENTS, OUTPUTS, FEATURES, LOCAL_STEPS = 100, 10, 30, 10
BLOCK = 1000


def peak_bytes() -> int:
    """Peak resident memory of this process, Linux only."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


def kernel(x1: np.ndarray, x2: np.ndarray, exponential: bool) -> np.ndarray:
    """A positive definite kernel, [n1, n2], made in blocks of rows so that it is held once."""
    out = read_only(np.broadcast_to(0.0, (len(x1), len(x2))))
    out.flags.writeable = True
    for start in range(0, len(x1), BLOCK):
        rows = slice(start, start + BLOCK)
        np.dot(x1[rows], x2.T, out=out[rows])
        out[rows] /= x1.shape[1]
        if exponential:
            np.exp(out[rows], out=out[rows])
        else:
            out[rows] += 1.0
    out.flags.writeable = False
    return out


def measure(num_train: int, num_test: int, num_rounds: int, num_models: int, cov: bool) -> dict[str, Any]:
    """One size, in this process, after a small one."""
    jax.config.update("jax_enable_x64", True)
    once(CLIENTS * 2, num_test, num_rounds, num_models, cov)
    return once(num_train, num_test, num_rounds, num_models, cov)


def once(num_train: int, num_test: int, num_rounds: int, num_models: int, cov: bool) -> dict[str, Any]:
    """Times and memory of one size."""
    rng, before = np.random.default_rng(0), peak_bytes()
    train, test = (rng.standard_normal((n, FEATURES)) for n in (num_train, num_test))
    pairs = {"train": (train, train), "test_train": (test, train), "test": (test, test)}
    nngp = {f"nngp_{name}": kernel(*pair, False) for name, pair in pairs.items()} if cov else {}
    blocks = KernelBlocks(ntk_train=kernel(train, train, True), ntk_test_train=kernel(test, train, True), **nngp)
    held = partition.iid(num_train, CLIENTS, seed=0)
    orders = rng.permuted(np.tile(np.arange(num_models), (-(-num_rounds // num_models), CLIENTS, 1)), axis=2)
    model = orders.transpose(0, 2, 1).reshape(-1, CLIENTS)[:num_rounds]
    shape = (num_rounds, CLIENTS)
    client, weight = (np.broadcast_to(row, shape) for row in (np.arange(CLIENTS), np.asarray(held.sizes, float)))
    rate = 0.5 * num_train / CLIENTS / float(np.trace(blocks.ntk_train)) * CLIENTS
    y = rng.standard_normal((num_train, OUTPUTS))
    start = time.perf_counter()
    plan = Cohort(client, model, weight)  # type: ignore[arg-type]
    flow = federated_flow(blocks, y, held, plan, Rule(LOCAL_STEPS, rate), num_models=num_models)
    built = time.perf_counter()
    means = np.asarray(flow.mean(range(num_rounds + 1)))
    half = time.perf_counter()
    found = {"build_seconds": built - start, "means_seconds": half - built}
    if cov:
        covariance = np.asarray(flow.cov(num_rounds))
        found["cov_seconds"] = time.perf_counter() - half
        assert np.all(np.isfinite(covariance))
    assert np.all(np.isfinite(means))
    memory = (peak_bytes() - before) / (8 * num_train**2)
    return {
        "examples": num_train, "test_points": num_test, "rounds": num_rounds, "models": num_models, "clients": CLIENTS,
        **found, "seconds": time.perf_counter() - start, "peak_over_n_squared_doubles": memory,
    }  # fmt: skip


class Job(NamedTuple):
    """Arguments of a run from a kernel in float32."""

    examples: int
    test_points: int
    rounds: int
    cohort: int
    loss: str
    data_dir: str | None


class Rates(NamedTuple):
    """What the machine does a second, for the floor."""

    flops: float  # operations of products of inputs
    reading: float  # bytes of a matrix in memory
    writing: float  # bytes of memory that the process has not used before
    arc_cosines: float  # numbers, each an arc-cosine and a square root


def measure_large(job: Job) -> dict[str, Any]:
    """Measures runs from a kernel in float32, in this process."""
    jax.config.update("jax_enable_x64", True)
    x, labels, x_test = inputs(job.examples, job.test_points, None if job.data_dir is None else Path(job.data_dir))
    n, m = len(x), len(x_test)
    kernel_fn: Any = models.mlp(x.shape[1], OUTPUTS, (1024,)).kernel
    held = partition.dirichlet(labels, CLIENTS, 0.1, seed=0)
    cohorts = drawn_cohorts(uniform_sampling(CLIENTS, job.cohort), held, job.rounds)
    work = Work(batch_size=BATCH, epochs=1)
    rule = Rule(steps_of(work, held), RATE, loss=job.loss, batches=drawn_rows(work, held, cohorts))
    y, rounds = np.eye(OUTPUTS)[labels], np.arange(0, job.rounds + 1, max(1, job.rounds // 10))
    rates = measured_rates(x)
    seconds: dict[str, float] = {}
    few = x[: min(n, TILE + n % TILE)]  # its tiles have the shapes of all tiles
    first, again = (timed(lambda: large_kernel(kernel_fn, few, x_test).ntk_train)[0] for _ in range(2))
    seconds["compilation"] = max(first - again, 0.0)
    seconds["kernel"], kernels = timed(lambda: large_kernel(kernel_fn, x, x_test), "ntk_train")
    seconds["clients' blocks"], flow = timed(lambda: federated_flow(kernels, y, held, cohorts, rule), "rounds")
    points = np.arange(min(n, 10_000))
    found = followed(flow, rounds, points, seconds)
    cohort_rows = np.asarray(held.sizes)[flow.slots.client].sum()
    squares = (np.asarray(held.sizes, float) ** 2)[flow.slots.client].sum()
    columns = OUTPUTS * len(rounds)
    entries = rates_of_entries(x.shape[1], rates)
    floor = {
        "kernel": 0.5 * n**2 * entries + 4 * n**2 / rates.writing,
        "products": rows_floor(cohort_rows, n, OUTPUTS, rates),
        "local steps": 4 * squares / rates.reading,
        "training points": rows_floor(len(points), n, columns, rates),
        "test points": m * n * (entries + 2 * columns / rates.flops),
    }
    assert np.all(np.isfinite(found))
    row = {
        **job._asdict(), "clients": CLIENTS, "device": jax.devices()[0].device_kind, "seconds": seconds, "floor": floor,
        "rates": rates._asdict(), "peak_bytes": peak_bytes(),
    }  # fmt: skip
    if n <= MOST_DOUBLE:
        start, starts = time.perf_counter(), (np.zeros((1, 1, n, OUTPUTS)), np.zeros((1, 1, m, OUTPUTS)))
        exact = federated_flow(kernel_blocks(kernel_fn, x, x_test), y, held, cohorts, rule)
        right = np.asarray(exact.runs(*starts, rounds.tolist()).test)
        row["float64_seconds"] = time.perf_counter() - start
        row["float32_error"] = float(np.linalg.norm(found[-1] - right[-1]) / np.linalg.norm(right[-1]))
    return row


def timed(call: Callable[[], Any], waited: str | None = None) -> tuple[float, Any]:
    """Returns the seconds of a call, until its result (or its field ``waited``) is computed, and the result."""
    start = time.perf_counter()
    result = call()
    jax.block_until_ready(result if waited is None else getattr(result, waited))  # other values are ready
    return time.perf_counter() - start, result


def fastest(call: Callable[[], Any], repeats: int = 5) -> float:
    """Returns the least seconds of a call, after a first one that compiles."""
    return min(timed(call)[0] for _ in range(repeats + 1))


def measured_rates(x: np.ndarray) -> Rates:
    """Measures the machine's rates at the shapes of a kernel of ``x``."""
    with jax.enable_x64(False):
        rows, number = jnp.asarray(x[:TILE], jnp.float32), 2**28
        multiply: Any = jax.jit(lambda a: product(a, a.T))
        angle: Any = jax.jit(lambda z: jnp.arctan2(jnp.sqrt(1 - z * z), z))
        numbers = jnp.linspace(-1, 1, TILE**2).reshape(TILE, TILE)
        products, angles = fastest(lambda: multiply(rows)), fastest(lambda: angle(numbers))
        writing = timed(lambda: aligned((number,), np.dtype(np.float32)).fill(1.0))[0]
        matrix = jnp.ones((2**14, 2**14), jnp.float32)
        add: Any = jax.jit(jnp.sum)
        reading = fastest(lambda: add(matrix))
    flops = 2 * len(rows) ** 2 * rows.shape[1] / products
    return Rates(flops, 4 * matrix.size / reading, 4 * number / writing, numbers.size / angles)


def rates_of_entries(features: int, rates: Rates) -> float:
    """Returns the least seconds of an entry of the kernel of one hidden layer: a product, and one arc-cosine."""
    return 2 * features / rates.flops + 1 / rates.arc_cosines


def rows_floor(rows: float, n: int, columns: int, rates: Rates) -> float:
    """Returns the least seconds of the products of kernel rows with ``columns`` columns."""
    return max(4 * rows * n / rates.reading, 2 * rows * n * columns / rates.flops)


def followed(flow: Flow, rounds: np.ndarray, points: np.ndarray, seconds: dict[str, float]) -> np.ndarray:
    """Follows the zero function, adds the parts' seconds to ``seconds``, and returns the functions at test points.

    The parts of a round are timed by programs of their own: all rounds' products with the kernel without the clients,
    and all rounds' clients at functions that no product changes.
    """
    n, m, num_rounds = len(flow.theta), flow.num_test, flow.num_rounds
    train, test = (recursion.Input(jnp.zeros((1, rows, 1, OUTPUTS)), None) for rows in (n, m))
    program = flow.program(None, OUTPUTS)
    targets = flow.targets if flow.kind.is_linear else None
    request = functions._Request(targets, flow.shares(None), rounds, np.arange(len(rounds)), points)

    def run(program: recursion.Program, *arguments: Any, of: Any) -> tuple[float, Any]:
        compiling, compiled = timed(lambda: of.lower(program, *arguments).compile())
        seconds["compilation"] += compiling if of is functions._paths or of is functions._at_train else 0.0
        return timed(lambda: compiled(program, *arguments))

    def products(program: recursion.Program, a: jax.Array) -> jax.Array:
        def one(a: jax.Array, j: jax.Array) -> tuple[jax.Array, None]:
            return a + 1e-9 * recursion._products(program, a, j), None

        return jax.lax.scan(one, a, jnp.arange(num_rounds))[0]

    def local_steps(program: recursion.Program, state: recursion.FlowState) -> jax.Array:
        def one(state: recursion.FlowState, j: jax.Array) -> tuple[recursion.FlowState, None]:
            sums = recursion._trained(program, recursion.Drive(1e-9 * state.a, None, program.targets), state, j)
            return recursion._server(program, j, state, sums.change, sums), None

        return jax.lax.scan(one, state, jnp.arange(num_rounds))[0].a

    whole, a = run(program, train, request, of=functions._paths)
    seconds["products"] = run(program, jnp.ones((n, 1, OUTPUTS)), of=jax.jit(products))[0]
    seconds["local steps"] = run(program, recursion.zero_state(program, OUTPUTS), of=jax.jit(local_steps))[0]
    seconds["rest of the rounds"] = max(whole - seconds["products"] - seconds["local steps"], 0.0)
    seconds["training points"] = run(program, train, a, request, of=functions._at_train)[0]
    kernels: Any = flow.kernels
    kernels.at_test(a[:, :, :1])  # compiles all but the last product
    seconds["test points"], at_test = timed(lambda: kernels.at_test(a))
    return np.asarray(functions._functions(program, test, jnp.asarray(at_test), request))


def inputs(num_train: int, num_test: int, data_dir: Path | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Training inputs and labels, and test inputs."""
    if data_dir is None:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((num_train + num_test, 784)).astype(np.float32)
        return x[:num_train], rng.integers(0, OUTPUTS, num_train), x[num_train:]
    found = load("fashion_mnist", data_dir=data_dir)
    x, x_test = (part.reshape(len(part), -1) for part in (found.x_train, found.x_test))
    return x[:num_train], np.asarray(found.y_train[:num_train]), x_test[:num_test]


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for federated_flow.json")
    parser.add_argument("--examples", type=int, nargs="*", default=[1250, 2500, 5000], help="sizes with covariance")
    parser.add_argument("--means-only", type=int, nargs="*", default=[10000], help="sizes of means alone")
    parser.add_argument("--large", type=int, nargs="*", default=[10000], help="sizes of runs in float32")
    parser.add_argument("--large-rounds", type=int, default=100)
    parser.add_argument("--large-cohort", type=int, default=COHORT, help="clients of a round, of 100")
    parser.add_argument("--large-loss", choices=("squared_error", "cross_entropy"), default="cross_entropy")
    parser.add_argument("--large-test-points", type=int, default=1000)
    parser.add_argument("--data-dir", type=Path, help="folder with Fashion-MNIST's files, for --large")
    parser.add_argument("--models", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--test-points", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--child", choices=("cov", "means", "large"), help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run, print and write."""
    options = parse()
    if options.child == "large":
        print(json.dumps(measure_large(Job(**json.loads(options.job)))))
        return
    if options.child:
        size = options.examples[0], options.test_points, options.rounds, options.models[0]
        print(json.dumps(measure(*size, options.child == "cov")))
        return
    rows = []
    print("examples models  build s  means s   cov s  total s  peak / n^2 doubles")
    work = [("cov", n, k) for n in options.examples for k in options.models]
    work += [("means", n, options.models[0]) for n in options.means_only]
    for kind, n, k in work:
        command = [sys.executable, __file__, "--child", kind, "--examples", str(n), "--models", str(k)]
        command += ["--test-points", str(options.test_points), "--rounds", str(options.rounds)]
        row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        cov = f"{row['cov_seconds']:7.1f}" if "cov_seconds" in row else "      -"
        print(
            f"{n:8} {k:6} {row['build_seconds']:8.1f} {row['means_seconds']:8.1f} {cov} {row['seconds']:8.1f} "
            f"{row['peak_over_n_squared_doubles']:8.2f}", flush=True,
        )  # fmt: skip
        rows.append(row)
    rows += [large_row(options, n) for n in options.large]
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "federated_flow.json").write_text(json.dumps({"rows": rows}, indent=2) + "\n")


def large_row(options: argparse.Namespace, n: int) -> dict[str, Any]:
    """Measures and prints one size of runs in float32, in a process of its own."""
    folder = None if options.data_dir is None else str(options.data_dir)
    job = Job(n, options.large_test_points, options.large_rounds, options.large_cohort, options.large_loss, folder)
    command = [sys.executable, __file__, "--child", "large", "--job", json.dumps(job._asdict())]
    row: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
    )
    Console(width=80 if not sys.stdout.isatty() else None).print(table_of_parts(row))
    rates = row["rates"]
    print(
        f"products {rates['flops'] / 1e9:.0f} GFLOP/s, reading {rates['reading'] / 1e9:.1f} GB/s, writing fresh memory "
        f"{rates['writing'] / 1e9:.2f} GB/s, arc-cosines {rates['arc_cosines'] / 1e6:.0f} million/s; peak "
        f"{row['peak_bytes'] / 1e9:.1f} GB on {row['device']}"
    )
    if "float32_error" in row:
        print(f"float64 {row['float64_seconds']:.1f} s, apart by {row['float32_error']:.1e}")
    sys.stdout.flush()
    return row


def table_of_parts(row: dict[str, Any]) -> Table:
    """Returns the table of a run's parts, each beside its floor."""
    title = f"{row['examples']} examples, {row['rounds']} rounds of {row['cohort']} of {row['clients']} clients"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("part")
    for column in ("seconds", "floor", "ratio"):
        table.add_column(column, justify="right")
    lines = [(part, value, row["floor"].get(part)) for part, value in row["seconds"].items()]
    lines.append(("all", sum(row["seconds"].values()), sum(row["floor"].values())))
    for part, value, floor in lines:
        figures = ("", "") if floor is None else (f"{floor:.2f}", f"{value / floor:.1f}")
        table.add_row(part, f"{value:.2f}", *figures)
    return table


if __name__ == "__main__":
    main()
