"""Kernels of images with pooling beside their floor: the recursion over pairs of pixels at this machine's own rates.

A pair of images of P pixels has P^2 pairs of pixels. For each pair and each layer, the recursion of ``ntk_cnn`` needs
``2 window`` multiply-adds for the prior covariance and as many for the tangent kernel (a window of k x k is a sum of k
along each axis), and one activation: a square root, an arc tangent and some products. Both rates are measured here, on
arrays that stay in the caches. The kernel is timed as users compute it, for several work sizes of a tile.

    python benchmarks/pooled_kernel.py --output results/bench
"""

from __future__ import annotations

import argparse
import json
import timeit
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fedtangent as ft
from fedtangent._src.models import kernels
from fedtangent._src.types import Array

IN_CACHE = 2**14  # numbers of an array on which rates are measured
TURNS = 200


def best(run: Callable[[], object], repeats: int) -> float:
    """Least seconds of a call, after one that compiles."""
    jax.block_until_ready(run())
    seconds = timeit.repeat(lambda: jax.block_until_ready(run()), number=1, repeat=repeats)
    return min(seconds)


def multiply_add(x: Array) -> Array:
    """One multiply-add of each number."""
    return 0.999 * x + 1e-3


def activation(x: Array) -> Array:
    """The ReLU's share of the recursion, for one pair of pixels of unit variances."""
    sine = jnp.sqrt(jnp.maximum(1 - x * x, 0))
    angle = jnp.arctan2(sine, x)
    return 0.5 * (sine + (jnp.pi - angle) * x) / jnp.pi + 1e-9 * angle


def rate(function: Callable[[Array], Array], repeats: int) -> float:
    """Nanoseconds of a function for each number, inside a loop of one program."""
    x = jnp.linspace(-0.9, 0.9, IN_CACHE)
    loop = jax.jit(lambda x: lax.fori_loop(0, TURNS, lambda _, y: function(y), x))
    return 1e9 * best(lambda: loop(x), repeats) / (TURNS * IN_CACHE)


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for pooled_kernel.json")
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--side", type=int, default=8, help="pixels on a side of an image")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tile-mib", type=int, nargs="+", default=[4, 16, 32, 128, 512])
    options = parser.parse_args()
    ft.enable_x64()
    shape, depth, window = (options.side, options.side, 1), options.depth, 3
    x = np.random.default_rng(0).standard_normal((options.images, *shape))
    pairs = options.images * (options.images + 1) // 2 * options.side**4  # of pixels
    add, active = rate(multiply_add, options.repeats), rate(activation, options.repeats)
    floor = 1e-9 * pairs * depth * (2 * 2 * window * add + active)
    print(f"multiply-add {add:.3f} ns, activation {active:.2f} ns: floor {floor:.3f} s of {options.images} images")
    rows = []
    for mib in options.tile_mib:
        kernels.TILE_BYTES = mib * 2**20
        kernel = ft.models.ntk_cnn(shape, 10, depth=depth, window=window).kernel
        assert isinstance(kernel, kernels.AnalyticKernel)
        seconds, side = best(lambda kernel=kernel: kernel(x), options.repeats), kernel.side(x)  # type: ignore[misc]
        rows.append({"tile_mib": mib, "side": side, "seconds": seconds, "over_floor": seconds / floor})
        print(f"tiles of {mib:4} MiB, {side:3} images on a side: {seconds:7.3f} s, {seconds / floor:5.1f} x its floor")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        result = {"multiply_add_ns": add, "activation_ns": active, "floor_seconds": floor, "rows": rows}
        (options.output / "pooled_kernel.json").write_text(
            json.dumps(vars(options) | result, indent=2, default=str) + "\n"
        )


if __name__ == "__main__":
    main()
