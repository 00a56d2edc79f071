"""Seconds and peak memory of one NTK-FL round, beside the version that holds the Jacobian [N, C, P].

Both run in float64 on the same examples and end at the same weights, which is checked. At ``--examples`` both fit in
memory and are timed in turn; at ``--paper-examples`` (20 clients x 200) only the structured one runs. Every peak is
that of a process of its own.

    python benchmarks/ntk_round.py --output results/bench
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp

from fedtangent.federated.ntk_evolution import ntk_evolve
from fedtangent.federated.ntk_spectral import evolve_dual
from fedtangent.models import mlp
from fedtangent.types import Array, Model, PyTree

INPUTS, WIDTH, OUTPUTS = 784, 100, 10
LEARNING_RATE = 1.0
KERNELS = ("averaged", "exact")


def problem(num_examples: int) -> tuple[Model, PyTree, Array, Array]:
    """The paper's network in float64, with random inputs and one-hot targets."""
    model = mlp(INPUTS, OUTPUTS, (WIDTH,), dtype=jnp.float64)
    x = jax.random.normal(jax.random.key(1), (num_examples, INPUTS), jnp.float64)
    return model, model.init(jax.random.key(0)), x, jax.nn.one_hot(jnp.arange(num_examples) % OUTPUTS, OUTPUTS)


@functools.partial(jax.jit, static_argnames=("model", "times", "kernel"))
def naive_round(model: Model, params: PyTree, x: Array, y: Array, times: tuple[int, ...], kernel: str) -> Array:
    """The flat weights after a round whose kernel and update come from the whole Jacobian."""
    flat, unflatten = jax.flatten_util.ravel_pytree(params)

    def outputs(weights: Array) -> Array:
        return model.apply(unflatten(weights), x)

    jacobian = jax.jacrev(outputs)(flat)  # [N, C, P]
    residual = y - outputs(flat)
    if kernel == "averaged":
        wide = jacobian.reshape((y.shape[0], -1))
        dual, _ = evolve_dual(wide @ wide.T / OUTPUTS, residual, LEARNING_RATE / y.size, times)
    else:
        rows = jacobian.reshape((y.size, -1))
        dual, _ = evolve_dual(rows @ rows.T, residual.reshape((-1, 1)), LEARNING_RATE / y.size, times)
    tall = jacobian.reshape((y.size, -1))
    candidates = [flat + tall.T @ at_t.ravel() for at_t in dual]
    losses = jnp.stack([jnp.mean((y - outputs(weights)) ** 2) for weights in candidates])
    return jnp.stack(candidates)[jnp.argmin(losses)]


def rounds(num_examples: int, times: tuple[int, ...], kernel: str) -> dict[str, Callable[[], Array]]:
    """The two versions as functions that return the flat new weights."""
    model, params, x, y = problem(num_examples)
    mask = jnp.ones(num_examples, bool)

    def structured() -> Array:
        new = ntk_evolve(model, params, x, y, mask, LEARNING_RATE, times, kernel)[0]
        return jax.flatten_util.ravel_pytree(new)[0]

    return {"structured": structured, "naive": lambda: naive_round(model, params, x, y, times, kernel)}


def seconds(function: Callable[[], Array]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def compare(num_examples: int, times: tuple[int, ...], kernel: str, repeats: int) -> dict[str, Any]:
    """Both versions, compiled first and then timed in turn."""
    versions = rounds(num_examples, times, kernel)
    weights = {name: version() for name, version in versions.items()}
    difference = float(jnp.abs(weights["structured"] - weights["naive"]).max())
    if not difference < 1e-8:
        raise RuntimeError(f"the two versions end at different weights: largest difference {difference}")
    taken: dict[str, list[float]] = {name: [] for name in versions}
    for _ in range(repeats):
        for name, version in versions.items():
            taken[name].append(seconds(version))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    return {
        "kernel": kernel, "examples": num_examples, "repeats": repeats, "largest_difference": difference,
        "structured_seconds": medians["structured"], "naive_seconds": medians["naive"],
        "ratio": medians["naive"] / medians["structured"], "all_seconds": taken,
    }  # fmt: skip


def peak(version: str, num_examples: int, times: tuple[int, ...], kernel: str) -> dict[str, float]:
    """Seconds of the second call and peak resident bytes, in a fresh process."""
    command = [sys.executable, __file__, "--child", version, "--examples", str(num_examples), "--kernel", kernel]
    done = subprocess.run([*command, "--times", *map(str, times)], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def child(version: str, num_examples: int, times: tuple[int, ...], kernel: str) -> None:
    """What ``peak`` runs."""
    function = rounds(num_examples, times, kernel)[version]
    first, second = seconds(function), seconds(function)
    print(json.dumps({"first_seconds": first, "seconds": second, "peak_bytes": peak_bytes()}))


def peak_bytes() -> int:
    """Peak resident memory of this process. Linux carries ``ru_maxrss`` over from the parent, so not that one there."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for ntk_round.json")
    parser.add_argument("--examples", type=int, default=200, help="pooled examples where both versions fit")
    parser.add_argument("--paper-examples", type=int, default=4000, help="pooled examples of the structured version")
    parser.add_argument("--times", type=int, nargs="+", default=list(range(100, 2001, 100)), help="candidate steps")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kernel", choices=KERNELS, help="one mode only")
    parser.add_argument("--child", choices=("structured", "naive"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run, print and write."""
    options = parse()
    jax.config.update("jax_enable_x64", True)
    times = tuple(options.times)
    if options.child:
        child(options.child, options.examples, times, options.kernel)
        return
    results: list[dict[str, Any]] = []
    for kernel in (options.kernel,) if options.kernel else KERNELS:
        row = compare(options.examples, times, kernel, options.repeats)
        for version in ("structured", "naive"):
            row[f"{version}_peak_bytes"] = peak(version, options.examples, times, kernel)["peak_bytes"]
        print(
            f"{kernel:9} {options.examples:5} examples: structured {row['structured_seconds']:.3f} s, "
            f"{row['structured_peak_bytes'] / 1e9:.2f} GB; naive {row['naive_seconds']:.2f} s, "
            f"{row['naive_peak_bytes'] / 1e9:.2f} GB; {row['ratio']:.0f} times faster", flush=True,
        )  # fmt: skip
        large = peak("structured", options.paper_examples, times, kernel)
        row["paper_size"] = {"examples": options.paper_examples, **large}
        print(
            f"{kernel:9} {options.paper_examples:5} examples: structured {large['seconds']:.1f} s, "
            f"{large['peak_bytes'] / 1e9:.2f} GB", flush=True,
        )  # fmt: skip
        results.append(row)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "ntk_round.json").write_text(json.dumps({"rows": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
