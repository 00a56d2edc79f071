"""Convolutions inside loops over clients: ``lax.conv_general_dilated`` beside ``models.gemm_convolution``.

For each layer: forward pass, and output with both gradients, for one client and for ``--clients`` clients with kernels
of their own, one after another (scan) and at once (vmap). Beside them the matrix products of the same shapes, timed in
turn with them: their ratio is the fraction of the machine's own matmul rate that a convolution reaches. Then one SGD
step of FedAvg's CNN (dense layer of 128) against the products it cannot do without. Times are the best of
``--repeats``: other load only adds.

    python benchmarks/convolution.py --output results/bench
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedtangent._src.losses import cross_entropy
from fedtangent._src.models import CONVOLUTIONS, cnn
from fedtangent._src.types import Array, PyTree

BATCH = 10
LAYOUT = ("NHWC", "HWIO", "NHWC")


class Layer(NamedTuple):
    name: str
    size: int  # images are [size, size, inputs]
    inputs: int
    outputs: int
    window: int
    stride: int

    def products(self, gradients: bool) -> list[tuple[int, int, int]]:
        """Shapes (m, k, n) of the matrix products that the layer amounts to."""
        rows, patch = BATCH * math.ceil(self.size / self.stride) ** 2, self.window**2 * self.inputs
        by_kernel, by_input = (patch, rows, self.outputs), (rows, self.outputs, patch)
        return [(rows, patch, self.outputs), *([by_kernel, by_input] if gradients else [])]


LAYERS = (
    Layer("5x5, 1 to 32", 28, 1, 32, 5, 1),
    Layer("5x5, 32 to 64", 14, 32, 64, 5, 1),
    Layer("3x3, 32 to 64, stride 2", 28, 32, 64, 3, 2),
)


def touched(out: PyTree) -> Array:
    """A small number that depends on every output, so that nothing is left out and no two turns are the same."""
    kept = lax.optimization_barrier(out)
    return 1e-9 * sum(leaf.ravel()[0] for leaf in jax.tree.leaves(kept))


def loop(step: Callable[..., PyTree]) -> Callable[..., Array]:
    """``(turns, *operands)``: ``step`` again and again inside one compiled program."""

    def run(turns: Array, *operands: Array) -> Array:
        def turn(_: Array, carry: tuple[Array, tuple[Array, ...]]) -> tuple[Array, tuple[Array, ...]]:
            small = touched(step(*carry[1]))
            return carry[0] + small, tuple(a.at[(0,) * a.ndim].add(small) for a in carry[1])

        return lax.fori_loop(0, turns, turn, (jnp.zeros(()), operands))[0]

    return jax.jit(run)


def product_step(shapes: list[tuple[int, int, int]]) -> tuple[Callable[..., PyTree], list[Array]]:
    """One product of each shape, and its operands."""
    operands = [jnp.ones(shape) for m, k, n in shapes for shape in ((m, k), (k, n))]
    return lambda *pairs: [a @ b for a, b in zip(pairs[::2], pairs[1::2], strict=True)], operands


def flops(shapes: list[tuple[int, int, int]]) -> float:
    return sum(2.0 * m * k * n for m, k, n in shapes)


def layer_step(layer: Layer, name: str, gradients: bool, mapping: str) -> Callable[..., PyTree]:
    """One step of one layer for each client, from x [N, B, H, W, I] and w [N, h, w, I, O]."""

    def forward(x: Array, w: Array) -> Array:
        return CONVOLUTIONS[name](x, w, (layer.stride,) * 2, "SAME", dimension_numbers=LAYOUT)

    def one(x: Array, w: Array) -> PyTree:
        if not gradients:
            return forward(x, w)
        y, pull = jax.vjp(forward, x, w)
        return y, pull(y)

    if mapping == "vmap":
        return jax.vmap(one)
    return lambda x, w: lax.map(lambda pair: touched(one(*pair)), (x, w))


def best(
    programs: dict[str, tuple[Callable[..., Array], list[Array]]], repeats: int, seconds: float
) -> dict[str, float]:
    """Least seconds a turn of each program, all timed in turn; each call lasts about ``seconds``."""
    turns, least = {}, {}
    for name, (run, operands) in programs.items():
        jax.block_until_ready(run(jnp.int32(1), *operands))  # compiles
        start = time.perf_counter()
        jax.block_until_ready(run(jnp.int32(1), *operands))
        turns[name] = max(1, round(seconds / (time.perf_counter() - start)))
        least[name] = math.inf
    for _ in range(repeats):
        for name, (run, operands) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(jnp.int32(turns[name]), *operands))
            least[name] = min(least[name], (time.perf_counter() - start) / turns[name])
    return least


def measure_layer(layer: Layer, clients: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one layer."""
    keys = jax.random.split(jax.random.key(0), 2)
    rows = []
    kinds = ((1, "scan", False), (1, "scan", True), (clients, "scan", True), (clients, "vmap", True))
    for count, mapping, gradients in kinds:
        x = jax.random.normal(keys[0], (count, BATCH, layer.size, layer.size, layer.inputs))
        w = jax.random.normal(keys[1], (count, layer.window, layer.window, layer.inputs, layer.outputs))
        shapes = layer.products(gradients)
        product, operands = product_step(shapes)
        programs = {n: (loop(layer_step(layer, n, gradients, mapping)), [x, w]) for n in CONVOLUTIONS}
        taken = best({**programs, "matmul": (loop(product), operands)}, options.repeats, options.seconds)
        row: dict[str, Any] = {"layer": layer.name, "clients": count, "mapping": mapping, "gradients": gradients}
        row |= {f"{n}_ms": 1e3 * taken[n] / count for n in CONVOLUTIONS} | {"matmul_ms": 1e3 * taken["matmul"]}
        row["matmul_gflops"] = flops(shapes) / taken["matmul"] / 1e9
        row |= {f"{n}_gflops": count * flops(shapes) / taken[n] / 1e9 for n in CONVOLUTIONS}
        row["gemm_over_matmul"] = row["gemm_gflops"] / row["matmul_gflops"]
        row["lax_over_gemm_time"] = row["lax_ms"] / row["gemm_ms"]
        rows.append(row)
        print(
            f"{layer.name:24} {count:3} {mapping:5} {'all' if gradients else 'forward':8}"
            f" lax {row['lax_ms']:8.2f} ms  gemm {row['gemm_ms']:7.2f} ms ({row['lax_over_gemm_time']:5.1f} x)"
            f"  {row['gemm_gflops']:5.0f} of {row['matmul_gflops']:5.0f} GFLOP/s, {row['gemm_over_matmul']:.2f}",
            flush=True,
        )
    return rows


def network_step(name: str) -> tuple[Callable[..., PyTree], list[Array]]:
    """One SGD step of the CNN from flat parameters, and its operands."""
    model = cnn((28, 28, 1), 10, hidden=(128,), convolution=name)
    leaves, structure = jax.tree.flatten(model.init(jax.random.key(0)))
    x, labels = jax.random.normal(jax.random.key(1), (BATCH, 28, 28, 1)), jnp.arange(BATCH) % 10

    def step(x: Array, *leaves: Array) -> PyTree:
        params = jax.tree.unflatten(structure, leaves)
        mask = jnp.ones(BATCH, bool)
        gradient = jax.grad(lambda p: cross_entropy(model.apply(p, x), labels, mask))(params)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, gradient)

    return step, [x, *leaves]


def measure_network(options: argparse.Namespace) -> dict[str, Any]:
    """The CNN's client steps per second, and those of its matrix products alone."""
    first, second = LAYERS[:2]
    dense = [(BATCH, 3136, 128), (3136, BATCH, 128), (BATCH, 128, 3136)]
    shapes = [*first.products(True)[:2], *second.products(True), *dense]
    steps = {name: network_step(name) for name in CONVOLUTIONS} | {"matmul": product_step(shapes)}
    taken = best({n: (loop(s), operands) for n, (s, operands) in steps.items()}, options.repeats, options.seconds)
    row: dict[str, Any] = {f"{name}_steps_per_second": 1 / t for name, t in taken.items()}
    row |= {"matmul_gflops": flops(shapes) / taken["matmul"] / 1e9, "gemm_over_matmul": taken["matmul"] / taken["gemm"]}
    print(
        f"CNN 32-64-128, batch {BATCH}: lax {row['lax_steps_per_second']:.1f}, gemm {row['gemm_steps_per_second']:.1f} "
        f"client steps/s; its matrix products alone {row['matmul_steps_per_second']:.1f} "
        f"({row['matmul_gflops']:.0f} GFLOP/s): {row['gemm_over_matmul']:.2f} of the matmul rate"
    )
    return row


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for convolution.json")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.05, help="about this long a call")
    parser.add_argument("--network-only", action="store_true")
    options = parser.parse_args()
    layers = () if options.network_only else LAYERS
    rows = [row for layer in layers for row in measure_layer(layer, options.clients, options)]
    result = {"device": jax.devices()[0].device_kind, "rows": rows, "network": measure_network(options)}
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "convolution.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
