"""Seconds and peak memory of one NTK-FL round, beside the version that holds the Jacobian [N, C, P].

Both run in float64 on the same examples and end at the same weights, which is checked. At ``--examples`` both fit in
memory and are timed in turn. At ``--paper-examples`` (20 clients x 200) the whole Jacobian fits nowhere, and the
structured round stands beside the kernel built from Jacobians of blocks of examples, pair of blocks by pair of blocks.
``--block-pairs`` of them are timed, spread evenly, and their mean is multiplied by the number of all pairs (0: all of
them, nothing extrapolated); that version is not charged for its evolution. Every peak is that of a process of its own.

Under the cross entropy the round at ``--paper-examples`` by its steps stands beside the round by few products with the
kernel: seconds, products, and how far apart the weights are, relative to how far they went.

    python benchmarks/ntk_round.py --output results/bench
    FEDTANGENT_DATA=data/fashion_mnist python benchmarks/ntk_round.py --loss cross_entropy
"""

from __future__ import annotations

import argparse
import functools
import json
import os
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

from fedtangent._src.data import load
from fedtangent._src.federated.ntk_fl import Evolution, Examples, ntk_evolve
from fedtangent._src.federated.ntk_fl.dual import chebyshev_dual, largest_eigenvalue, spectral_dual
from fedtangent._src.federated.ntk_fl.evolution import choose_time
from fedtangent._src.federated.ntk_fl.options import LOSSES
from fedtangent._src.federated.ntk_fl.tangent import linearise_network, pool_examples
from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.models import mlp
from fedtangent._src.types import Array, Model, PyTree

INPUTS, WIDTH, OUTPUTS = 784, 100, 10
LEARNING_RATE = 1e6  # clipped to 0.9 of the largest stable one: the step that takes the most products
KERNELS = ("averaged", "exact")


def problem(num_examples: int) -> tuple[Model, PyTree, Array, Array]:
    """The paper's network in float64: Fashion-MNIST where $FEDTANGENT_DATA names its files, else random inputs."""
    model = mlp(INPUTS, OUTPUTS, (WIDTH,), dtype=jnp.float64)
    x, labels = jax.random.normal(jax.random.key(1), (num_examples, INPUTS), jnp.float64), jnp.arange(num_examples)
    if "FEDTANGENT_DATA" in os.environ:
        loaded = load("fashion_mnist", num_train=num_examples, flatten=True)
        x, labels = jnp.asarray(loaded.x_train, jnp.float64), jnp.asarray(loaded.y_train)
    return model, model.init(jax.random.key(0)), x, jax.nn.one_hot(labels % OUTPUTS, OUTPUTS, dtype=jnp.float64)


@functools.partial(jax.jit, static_argnames=("model", "times", "kernel"))
def naive_round(
    model: Model, params: PyTree, x: Array, y: Array, rate: Array, times: tuple[int, ...], kernel: str
) -> Array:
    """The flat weights after a round whose kernel and update come from the whole Jacobian."""
    flat, unflatten = jax.flatten_util.ravel_pytree(params)

    def outputs(weights: Array) -> Array:
        return model.apply(unflatten(weights), x)

    jacobian = jax.jacrev(outputs)(flat)  # [N, C, P]
    residual = y - outputs(flat)
    if kernel == "averaged":
        wide = jacobian.reshape((y.shape[0], -1))
        values, vectors = jnp.linalg.eigh(wide @ wide.T / OUTPUTS)
        dual = spectral_dual(values, vectors, residual, rate / y.size, times)
    else:
        rows = jacobian.reshape((y.size, -1))
        values, vectors = jnp.linalg.eigh(rows @ rows.T)
        dual = spectral_dual(values, vectors, residual.reshape((-1, 1)), rate / y.size, times)
    tall = jacobian.reshape((y.size, -1))
    candidates = [flat + tall.T @ at_t.ravel() for at_t in dual]
    losses = jnp.stack([jnp.mean((y - outputs(weights)) ** 2) for weights in candidates])
    return jnp.stack(candidates)[jnp.argmin(losses)]


def rounds(num_examples: int, times: tuple[int, ...], kernel: str) -> dict[str, Callable[[], Array]]:
    """The two versions as functions that return the flat new weights."""
    model, params, x, y = problem(num_examples)
    given = Examples(x, y, jnp.ones(num_examples, bool))

    def evolve() -> tuple[PyTree, dict[str, Array]]:
        return ntk_evolve(model, params, given, LEARNING_RATE, Evolution(times, kernel, unstable="clip"))

    @functools.cache
    def rate() -> Array:
        return evolve()[1]["learning_rate"]

    return {
        "structured": lambda: jax.flatten_util.ravel_pytree(evolve()[0])[0],
        "naive": lambda: naive_round(model, params, x, y, rate(), times, kernel),
    }


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


@functools.partial(jax.jit, static_argnames=("model",))
def jacobian_rows(model: Model, params: PyTree, x: Array) -> Array:
    """The materialised Jacobians of a block of examples, [b, C P]."""
    flat, unflatten = jax.flatten_util.ravel_pytree(params)
    of_one = jax.jacrev(lambda weights, one: model.apply(unflatten(weights), one[None])[0])
    return jax.vmap(of_one, (None, 0))(flat, x).reshape((x.shape[0], -1))


@functools.partial(jax.jit, static_argnames=("model",))
def block_pair(model: Model, params: PyTree, held: Array, x: Array) -> Array:
    """H between a block whose Jacobians are held, and another one's, materialised here."""
    return held @ jacobian_rows(model, params, x).T / OUTPUTS


def blocks(num_examples: int, block_size: int, chosen: int) -> dict[str, Any]:
    """Seconds of building H by pairs of blocks of examples (the upper triangle), and its largest error."""
    model, params, x, _ = problem(num_examples)
    number = num_examples // block_size
    pairs = [(i, j) for i in range(number) for j in range(i, number)]
    some = pairs if chosen == 0 or chosen >= len(pairs) else [pairs[(k * len(pairs)) // chosen] for k in range(chosen)]
    parts = x[: number * block_size].reshape((number, block_size, INPUTS))
    block_pair(model, params, jacobian_rows(model, params, parts[0]), parts[0]).block_until_ready()
    taken, spent, worst = list[float](), list[float](), 0.0
    for i, j in some:
        held = jacobian_rows(model, params, parts[i]).block_until_ready()  # once a row of blocks: not charged
        start, begun = time.perf_counter(), time.process_time()
        found = block_pair(model, params, held, parts[j]).block_until_ready()
        taken.append(time.perf_counter() - start)
        spent.append(time.process_time() - begun)
        expected = empirical_ntk(model, params, parts[i], parts[j])
        worst = max(worst, float(jnp.abs(found - expected).max() / jnp.abs(expected).max()))
    if not worst < 1e-10:
        raise RuntimeError(f"the kernel from Jacobians is another one: relative difference {worst}")
    return {
        "block_size": block_size, "pairs": len(pairs), "pairs_timed": len(some), "extrapolated": len(some) < len(pairs),
        "seconds": statistics.fmean(taken) * len(pairs), "processor_seconds": statistics.fmean(spent) * len(pairs),
        "largest_difference": worst,
    }  # fmt: skip


def phases(num_examples: int, times: tuple[int, ...]) -> dict[str, Any]:
    """Seconds of the parts of a structured round under the averaged kernel, each compiled first."""
    model, params, x, y = problem(num_examples)
    pool = pool_examples(x, y, jnp.ones(num_examples, bool))

    @jax.jit
    def kernel(weights: PyTree) -> Array:
        return linearise_network(model, weights, pool).gram()

    @jax.jit
    def evolve(matrix: Array, residual: Array) -> tuple[Array, Array, Array]:
        largest = largest_eigenvalue(lambda g: matrix @ g, pool.mask)
        return chebyshev_dual(lambda g: matrix @ g, residual, 1.8 / largest, times, 1.1 * largest)

    @jax.jit
    def search(weights: PyTree, dual: Array) -> Array:
        pull = linearise_network(model, weights, pool).pull
        return choose_time(model, weights, pull, dual, pool, Evolution(times)).losses

    def both(function: Callable[[], Any]) -> tuple[float, Any]:
        seconds(function)
        start = time.perf_counter()
        found = jax.block_until_ready(function())
        return time.perf_counter() - start, found

    taken = {}
    taken["kernel"], matrix = both(lambda: kernel(params))
    taken["evolution"], (dual, products, _) = both(lambda: evolve(matrix, y - model.apply(params, x)))
    taken["choice_of_time"], _ = both(lambda: search(params, dual))
    return {"seconds": taken, "products": int(products)}


def cross_entropy_rounds(num_examples: int, times: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Whole rounds under the cross entropy, by the steps and by few products, compiled first and then timed in turn."""
    model, params, x, y = problem(num_examples)
    given, start = Examples(x, y, jnp.ones(num_examples, bool)), jax.flatten_util.ravel_pytree(params)[0]
    taken: dict[str, list[float]] = {"iterate": [], "multirate": []}
    weights, products = {}, {}
    for repeat in range(repeats + 1):
        for method, all_seconds in taken.items():
            evolution = Evolution(times, method=method, unstable="clip", loss="cross_entropy")
            begun = time.perf_counter()
            new, info = jax.block_until_ready(ntk_evolve(model, params, given, LEARNING_RATE, evolution))
            if repeat > 0:
                all_seconds.append(time.perf_counter() - begun)
            weights[method], products[method] = jax.flatten_util.ravel_pytree(new)[0], int(info["products"])
    apart = jnp.linalg.norm(weights["multirate"] - weights["iterate"]) / jnp.linalg.norm(weights["iterate"] - start)
    if not apart < 1e-8:
        raise RuntimeError(f"the two methods end at different weights: relative distance {float(apart)}")
    medians = {method: statistics.median(values) for method, values in taken.items()}
    return {
        "examples": num_examples, "repeats": repeats, "relative_distance": float(apart), "products": products,
        "seconds": medians, "ratio": medians["iterate"] / medians["multirate"], "all_seconds": taken,
    }  # fmt: skip


def peak(version: str, num_examples: int, times: tuple[int, ...], kernel: str, *more: str) -> dict[str, Any]:
    """Seconds of the second call and peak resident bytes, in a fresh process."""
    command = [sys.executable, __file__, "--child", version, "--examples", str(num_examples), "--kernel", kernel]
    done = subprocess.run([*command, *more, "--times", *map(str, times)], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def child(
    version: str, num_examples: int, times: tuple[int, ...], kernel: str, block_size: int, block_pairs: int | None
) -> None:
    """What ``peak`` runs."""
    function = rounds(num_examples, times, kernel)[version]
    first, begun = seconds(function), time.process_time()
    second, spent = seconds(function), time.process_time() - begun
    result: dict[str, Any] = {"first_seconds": first, "seconds": second, "processor_seconds": spent}
    result["peak_bytes"] = peak_bytes()
    if block_pairs is not None:  # in the same process, one after the other: what else runs here slows both
        result |= {"phases": phases(num_examples, times), "blocks": blocks(num_examples, block_size, block_pairs)}
        result["seconds"] = min(second, seconds(function))
        result["ratio"] = result["blocks"]["seconds"] / result["seconds"]
        result["processor_ratio"] = result["blocks"]["processor_seconds"] / spent
    print(json.dumps(result))


def peak_bytes() -> int:
    """Peak resident memory of this process. Linux carries ``ru_maxrss`` over from the parent, so not that one there."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def paper_size(options: argparse.Namespace, times: tuple[int, ...], kernel: str) -> dict[str, Any]:
    """The round at the paper's size; under the averaged kernel also its phases, and the blocks of Jacobians."""
    more: list[str] = []
    if options.block_pairs is not None and kernel == "averaged":
        more = ["--block-size", str(options.block_size), "--block-pairs", str(options.block_pairs)]
    large = peak("structured", options.paper_examples, times, kernel, *more)
    size = f"{kernel:9} {options.paper_examples:5} examples:"
    print(
        f"{size} structured {large['seconds']:.1f} s ({large['processor_seconds']:.1f} s of processor time), "
        f"{large['peak_bytes'] / 1e9:.2f} GB", flush=True,
    )  # fmt: skip
    if "blocks" in large:
        found, parts = large["blocks"], large["phases"]["seconds"]
        each = ", ".join(f"{name.replace('_', ' ')} {taken:.1f} s" for name, taken in parts.items())
        how = f"mean of {found['pairs_timed']} pairs times {found['pairs']}" if found["extrapolated"] else "every pair"
        print(f"{size} {each}; {large['phases']['products']} products with the kernel")
        print(
            f"{size} kernel from Jacobians of {found['block_size']} examples {found['seconds']:.0f} s ({how}): "
            f"{large['ratio']:.0f} times the whole structured round ({large['processor_ratio']:.0f} times in processor "
            "time)", flush=True,
        )  # fmt: skip
    return {"examples": options.paper_examples, **large}


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for ntk_round.json")
    parser.add_argument("--examples", type=int, default=200, help="pooled examples where both versions fit")
    parser.add_argument("--paper-examples", type=int, default=4000, help="pooled examples of the structured version")
    parser.add_argument("--times", type=int, nargs="+", default=list(range(100, 2001, 100)), help="candidate steps")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kernel", choices=KERNELS, help="one mode only")
    parser.add_argument("--loss", choices=LOSSES, help="one loss only")
    parser.add_argument("--block-size", type=int, default=100, help="examples of a block's Jacobian")
    parser.add_argument("--block-pairs", type=int, help="pairs of blocks to time, 0 for all; not timed by default")
    parser.add_argument("--child", choices=("structured", "naive"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run, print and write."""
    options = parse()
    jax.config.update("jax_enable_x64", True)
    times = tuple(options.times)
    if options.child:
        child(options.child, options.examples, times, options.kernel, options.block_size, options.block_pairs)
        return
    results: list[dict[str, Any]] = []
    if options.loss != "squared_error":
        row = cross_entropy_rounds(options.paper_examples, times, options.repeats)
        seconds_of, products = row["seconds"], row["products"]
        print(
            f"cross entropy, {row['examples']} examples: {seconds_of['multirate']:.2f} s by {products['multirate']} "
            f"products, {seconds_of['iterate']:.2f} s by {products['iterate']} ({row['ratio']:.1f} times); weights "
            f"{row['relative_distance']:.1e} of their way apart", flush=True,
        )  # fmt: skip
        results.append({"loss": "cross_entropy", **row})
    kernels = (options.kernel,) if options.kernel else KERNELS
    for kernel in () if options.loss == "cross_entropy" else kernels:
        row = compare(options.examples, times, kernel, options.repeats)
        for version in ("structured", "naive"):
            row[f"{version}_peak_bytes"] = peak(version, options.examples, times, kernel)["peak_bytes"]
        print(
            f"{kernel:9} {options.examples:5} examples: structured {row['structured_seconds']:.3f} s, "
            f"{row['structured_peak_bytes'] / 1e9:.2f} GB; naive {row['naive_seconds']:.2f} s, "
            f"{row['naive_peak_bytes'] / 1e9:.2f} GB; {row['ratio']:.0f} times faster", flush=True,
        )  # fmt: skip
        row["paper_size"] = paper_size(options, times, kernel)
        results.append(row)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "ntk_round.json").write_text(json.dumps({"rows": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
