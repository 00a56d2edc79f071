"""How fast a client step could be here: its matrix products at this machine's rate for their shapes, its bytes at its
bandwidth, whichever takes longer.

Counted, per client step of batch B:

- every product of the forward pass, of the weights' gradients and of the inputs' gradients (none for the first layer,
  whose input is data). A convolution is the product over its patches ([B H W, k k in] x [k k in, out]; building the
  patches costs nothing here). An LSTM layer multiplies its inputs for all time steps at once, and so are both weight
  gradients computed; the recurrent product and its input gradient are one small product a time step, in turn.
- bytes: the parameters read by the forward and by the backward pass and written once, and the batch read once, at the
  bandwidth of ``w - rate * g`` on an array of as many numbers, which therefore lies in the same cache.

Not counted: activations, losses, pooling, sampling, averaging. Run by itself, the script prints its measurements, of a
process with as many threads as the environment allows, as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from workloads import CLASSES, EMBEDDING, HIDDEN, LOGISTIC_INPUTS, SEQUENCE, SIDE, VOCABULARY, WORKLOADS, Workload
from workloads import initial_parameters as parameters_of

PEAK_SIZE = 1024
KINDS = ("forward", "weight gradient", "input gradient")
MEASURE_SECONDS = 0.05


class Gemm(NamedTuple):
    """``times`` products of a layer [m, k] x [k, n]: itself, [k, m] x [m, n], or [m, n] x [n, k], by ``kind``."""

    kind: str
    m: int
    k: int
    n: int
    times: int = 1

    @property
    def shape(self) -> str:
        """The product without its number."""
        return f"{self.kind} {self.m}x{self.k}x{self.n}"

    @property
    def flops(self) -> int:
        """Operations of one product."""
        return 2 * self.m * self.k * self.n


def layer(m: int, k: int, n: int, kinds: tuple[str, ...] = KINDS, times: int = 1) -> list[Gemm]:
    """The products of a layer [m, k] x [k, n] in one step."""
    return [Gemm(kind, m, k, n, times) for kind in kinds]


def products(workload: Workload) -> list[Gemm]:
    """Every product of one client step."""
    batch, first = workload.batch_size, KINDS[:2]
    if workload.name == "logistic":
        return layer(batch, LOGISTIC_INPUTS, CLASSES, first)
    if workload.name == "mlp":
        return layer(batch, SIDE * SIDE, 100, first) + layer(batch, 100, CLASSES)
    if workload.name == "cnn":
        large, small = SIDE**2, (SIDE // 2) ** 2
        found = layer(batch * large, 25, 32, first) + layer(batch * small, 25 * 32, 64)
        return found + layer(batch, (SIDE // 4) ** 2 * 64, 128) + layer(batch, 128, CLASSES)
    found = layer(batch, HIDDEN, VOCABULARY)
    for inputs in (EMBEDDING, HIDDEN):
        found += layer(batch * SEQUENCE, inputs, 4 * HIDDEN)
        found += layer(batch, HIDDEN, 4 * HIDDEN, ("forward", "input gradient"), SEQUENCE)
        found += layer(batch * SEQUENCE, HIDDEN, 4 * HIDDEN, ("weight gradient",))
    return found


def flops(workload: Workload) -> int:
    """Operations of one client step."""
    return sum(gemm.flops * gemm.times for gemm in products(workload))


def num_parameters(workload: Workload) -> int:
    """Numbers that the workload's network holds."""
    return sum(array.size for array in parameters_of(workload.name, 0).values())


def num_bytes(workload: Workload) -> int:
    """Bytes that one client step must move."""
    inputs = {"logistic": LOGISTIC_INPUTS, "lstm": SEQUENCE}.get(workload.name, SIDE * SIDE)
    return 12 * num_parameters(workload) + 4 * workload.batch_size * (inputs + 1)


# ---- measuring ----


def _seconds(run: Callable[[int], Any]) -> float:
    """Seconds of one turn of a loop: the best of four, each long enough to be timed."""
    import jax

    jax.block_until_ready(run(1))  # compiles
    turns = 8  # what a call costs once, copies of its arguments above all, is divided by them
    while True:
        began = time.perf_counter()
        jax.block_until_ready(run(turns))
        spent = time.perf_counter() - began
        if spent > MEASURE_SECONDS:
            break
        turns = max(turns + 1, min(turns * 10, int(turns * 1.5 * MEASURE_SECONDS / max(spent, 1e-9))))
    best = spent
    for _ in range(3):
        began = time.perf_counter()
        jax.block_until_ready(run(turns))
        best = min(best, time.perf_counter() - began)
    return best / turns


def gemm_seconds(gemm: Gemm) -> float:
    """Seconds of one product in float32, laid out as a network's gradients have it."""
    import jax
    import jax.numpy as jnp

    shapes = {
        "forward": ((gemm.m, gemm.k), (gemm.k, gemm.n), (1, 0)),
        "weight gradient": ((gemm.m, gemm.k), (gemm.m, gemm.n), (0, 0)),
        "input gradient": ((gemm.m, gemm.n), (gemm.k, gemm.n), (1, 1)),
    }
    left, right, (i, j) = shapes[gemm.kind]
    keys = jax.random.split(jax.random.key(0))
    a, b = jax.random.normal(keys[0], left, jnp.float32), jax.random.normal(keys[1], right, jnp.float32)

    @jax.jit
    def loop(turns: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        def one(_: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            a, b, total = carry
            # the barrier keeps the product whole, and in the loop though its factors never change
            product, a, b = jax.lax.optimization_barrier((jax.lax.dot_general(a, b, (((i,), (j,)), ((), ()))), a, b))
            return a, b, total + product[0, 0]

        return jax.lax.fori_loop(0, turns, one, (a, b, jnp.float32(0)))[2]

    return _seconds(lambda turns: loop(jnp.int32(turns), a, b))


def update_bandwidth(size: int) -> float:
    """Bytes per second of ``w - rate * g`` on ``size`` float32: two read, one written."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def loop(turns: jax.Array, w: jax.Array, g: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, turns, lambda _, w: w - jnp.float32(1e-3) * g, w)

    w, g = jnp.ones(size, jnp.float32), jnp.ones(size, jnp.float32)
    return 12 * size / _seconds(lambda turns: loop(jnp.int32(turns), w, g))


def measure(names: list[str]) -> dict[str, Any]:
    """What this process reaches: operations per second at each shape and at 1024^3, bytes per second at each size."""
    chosen = [WORKLOADS[name] for name in names]
    gemms = {gemm.shape: gemm for workload in chosen for gemm in products(workload)}
    peak = Gemm("forward", PEAK_SIZE, PEAK_SIZE, PEAK_SIZE)
    return {
        "peak_flops_per_second": peak.flops / gemm_seconds(peak),
        "flops_per_second": {shape: gemm.flops / gemm_seconds(gemm) for shape, gemm in gemms.items()},
        "bytes_per_second": {w.name: update_bandwidth(num_parameters(w)) for w in chosen},
        "memory_bytes_per_second": update_bandwidth(2**25),
    }


# ---- the floor ----


class Floor(NamedTuple):
    """Seconds that a client step takes at least."""

    compute_seconds: float
    bytes_seconds: float
    peak_flops_per_second: float

    @property
    def seconds(self) -> float:
        """The larger of the two."""
        return max(self.compute_seconds, self.bytes_seconds)


def floor(workload: Workload, measured: dict[str, Any], streams: int = 1) -> Floor:
    """The floor from ``measured``; ``streams`` processes that ran at once and reached that each do as many steps."""
    rates = measured["flops_per_second"]
    compute = sum(gemm.flops * gemm.times / rates[gemm.shape] for gemm in products(workload))
    moved = num_bytes(workload) / measured["bytes_per_second"][workload.name]
    return Floor(compute / streams, moved / streams, measured["peak_flops_per_second"] * streams)


def lowest(floors: list[Floor]) -> Floor:
    """The floor of the machine: the quickest way that was measured."""
    best = min(floors, key=lambda found: found.seconds)
    return best._replace(peak_flops_per_second=max(found.peak_flops_per_second for found in floors))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=list(WORKLOADS))
    print(json.dumps(measure(parser.parse_args().workloads)), flush=True)
