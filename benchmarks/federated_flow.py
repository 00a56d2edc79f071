"""Seconds and memory of the exact federated flow: means of every round, and the covariance of test points at the last.

Fed-ensemble's per-client permutations of K models over 100 clients. Memory is the peak above that of the same process
after a small flow (JAX and its compiler), in units of one n x n matrix of doubles; the covariance needs two of them as
its input (Theta and K), the means one. Each size runs in a process of its own.

Then runs of the zero function from a kernel in float32 (``--large``), of a ReLU network on Fashion-MNIST or on random
inputs: 10 of 100 Dirichlet(0.1) clients a round, an epoch of minibatches of 16, the cross entropy, learning curves at
every tenth round. Up to 10,000 examples the same in float64 beside it, and how far apart they end, relative to how far
the functions moved.

    python benchmarks/federated_flow.py --output results/bench
    python benchmarks/federated_flow.py --examples --means-only --large 10000 60000 --data-dir data/fashion_mnist
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedtangent._src import models
from fedtangent._src.comparison.followed import drawn_rows, steps_of
from fedtangent._src.data import load, partition
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import drawn_cohorts, uniform_sampling
from fedtangent._src.kernels.gram import KernelBlocks, kernel_blocks, read_only
from fedtangent._src.kernels.large import large_kernel
from fedtangent._src.theory.flow import Rule, federated_flow
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


def measure_large(num_train: int, num_test: int, num_rounds: int, data_dir: Path | None) -> dict[str, Any]:
    """One size of runs from a kernel in float32, in this process."""
    jax.config.update("jax_enable_x64", True)
    x, labels, x_test = inputs(num_train, num_test, data_dir)
    kernel_fn: Any = models.mlp(x.shape[1], OUTPUTS, (1024,)).kernel
    held = partition.dirichlet(labels, CLIENTS, 0.1, seed=0)
    cohorts = drawn_cohorts(uniform_sampling(CLIENTS, COHORT), held, num_rounds)
    work = Work(batch_size=BATCH, epochs=1)
    rule = Rule(steps_of(work, held), RATE, loss="cross_entropy", batches=drawn_rows(work, held, cohorts))
    y, rounds = np.eye(OUTPUTS)[labels], list(range(0, num_rounds + 1, max(1, num_rounds // 10)))
    starts = np.zeros((1, 1, num_train, OUTPUTS)), np.zeros((1, 1, len(x_test), OUTPUTS))
    start = time.perf_counter()
    kernels = large_kernel(kernel_fn, x, x_test)
    kernels.ntk_train.block_until_ready()
    built = time.perf_counter()
    flow = federated_flow(kernels, y, held, cohorts, rule)
    found = np.asarray(flow.runs(*starts, rounds, np.arange(min(num_train, 10_000))).test)
    end = time.perf_counter()
    row: dict[str, Any] = {
        "examples": num_train, "test_points": len(x_test), "rounds": num_rounds, "clients": CLIENTS,
        "device": jax.devices()[0].device_kind, "kernel_seconds": built - start, "runs_seconds": end - built,
        "peak_bytes": peak_bytes(),
    }  # fmt: skip
    if num_train <= MOST_DOUBLE:
        start = time.perf_counter()
        exact = federated_flow(kernel_blocks(kernel_fn, x, x_test), y, held, cohorts, rule)
        right = np.asarray(exact.runs(*starts, rounds).test)
        row["float64_seconds"] = time.perf_counter() - start
        row["float32_error"] = float(np.linalg.norm(found[-1] - right[-1]) / np.linalg.norm(right[-1]))
    return row


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
    parser.add_argument("--large-test-points", type=int, default=1000)
    parser.add_argument("--data-dir", type=Path, help="folder with Fashion-MNIST's files, for --large")
    parser.add_argument("--models", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--test-points", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--child", choices=("cov", "means", "large"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run, print and write."""
    options = parse()
    if options.child == "large":
        sizes = options.large[0], options.large_test_points, options.large_rounds
        print(json.dumps(measure_large(*sizes, options.data_dir)))
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
    """One size of runs in float32, in a process of its own."""
    command = [sys.executable, __file__, "--child", "large", "--large", str(n)]
    command += ["--large-rounds", str(options.large_rounds), "--large-test-points", str(options.large_test_points)]
    command += [] if options.data_dir is None else ["--data-dir", str(options.data_dir)]
    row: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
    )
    line = (
        f"{n:8} in float32: kernel {row['kernel_seconds']:.1f} s, {row['rounds']} rounds and {row['test_points']} test "
        f"points {row['runs_seconds']:.1f} s, peak {row['peak_bytes'] / 1e9:.1f} GB on {row['device']}"
    )
    if "float32_error" in row:
        line += f"; float64 {row['float64_seconds']:.1f} s, apart by {row['float32_error']:.1e}"
    print(line, flush=True)
    return row


if __name__ == "__main__":
    main()
