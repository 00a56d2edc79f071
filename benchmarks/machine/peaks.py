"""Peaks of a device: products a second, measured, and what the vendor's data sheet states.

A precision is one of

- ``float32``: products of float32 numbers with all their digits (``precision="highest"``);
- ``default``: products of float32 numbers as the device computes them by default, in TF32 on recent NVIDIA GPUs, in
  bfloat16 on a TPU, and like ``float32`` on a CPU;
- ``bfloat16``: products of bfloat16 numbers;
- ``float64``: products of float64 numbers.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import jax

PRECISIONS = ("float32", "default", "bfloat16", "float64")
SIZES = (512, 1024, 2048, 4096, 8192, 16384)  # of square matrices; a device that is slow stops early
BATCHES = 9  # timed batches of products of one size; the median counts, the rate that lasts
BATCH_SECONDS = 0.15  # a batch has as many products as fit, and at least one
LONGEST = 0.5  # seconds of one product; sizes that would take longer are not tried
METHOD = (
    "The median of {batches} batches of at least {seconds} s, at the best side of square matrices of {sizes} (those of "
    "which a product takes half a second or less); each product takes the one before as its left factor."
)


class DataSheet(NamedTuple):
    """Dense operations a second of one device in units of 10^12, without sparsity; None where none is stated here.

    Attributes:
        kinds: Beginnings of the names that JAX gives to the device (``device_kind``).
        float32: Products of float32 numbers.
        default: Products of float32 numbers as JAX computes them by default.
        bfloat16: Products of bfloat16 numbers, added up in float32.
    """

    kinds: tuple[str, ...]
    float32: float | None
    default: float | None
    bfloat16: float | None


# NVIDIA: data sheets of H100, H200, A100, V100, L4 and T4; white papers of the architectures Ada (RTX 4090) and Ampere
# GA102 (RTX 3090). A sheet that states a figure "with sparsity" has twice the dense figure. V100 and T4 have neither
# TF32 nor bfloat16: their default is float32. Google: pages of TPU v2 to v6e, per chip; v2 and v3 have two devices a
# chip, and a product of float32 numbers is by default one of bfloat16 numbers.
DATA_SHEETS = (
    DataSheet(("NVIDIA H100 PCIe",), 51.0, None, 756.5),
    DataSheet(("NVIDIA H100 80GB HBM3", "NVIDIA H200"), 66.9, 494.7, 989.4),
    DataSheet(("NVIDIA A100",), 19.5, 156.0, 312.0),
    DataSheet(("Tesla V100-SXM2",), 15.7, 15.7, None),
    DataSheet(("Tesla V100-PCIE",), 14.0, 14.0, None),
    DataSheet(("NVIDIA L4",), 30.3, None, 121.0),
    DataSheet(("Tesla T4", "NVIDIA T4"), 8.1, 8.1, None),
    DataSheet(("NVIDIA GeForce RTX 4090",), 82.6, None, 165.2),
    DataSheet(("NVIDIA GeForce RTX 3090",), 35.6, None, 71.2),
    DataSheet(("TPU v2",), None, 22.5, 22.5),
    DataSheet(("TPU v3",), None, 61.5, 61.5),
    DataSheet(("TPU v4",), None, 275.0, 275.0),
    DataSheet(("TPU v5 lite", "TPU v5e"), None, 197.0, 197.0),
    DataSheet(("TPU v5p", "TPU v5"), None, 459.0, 459.0),
    DataSheet(("TPU v6 lite", "TPU v6e"), None, 918.0, 918.0),
)
OTHERS = ("NVIDIA H200 NVL", "NVIDIA L40", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D", "TPU v4 lite")
# names that begin like one of the above, of slower or faster devices


def data_sheet(device_kind: str) -> dict[str, float]:
    """Returns the operations a second that the vendor states for a device, by precision; empty for other devices.

    Args:
        device_kind: Name that JAX gives to the device.
    """
    if device_kind.startswith(OTHERS):
        return {}
    found = (sheet for sheet in DATA_SHEETS if device_kind.startswith(sheet.kinds))
    sheet = next(found, None)
    if sheet is None:
        return {}
    stated = {name: value for name, value in sheet._asdict().items() if name != "kinds"}
    return {name: value * 1e12 for name, value in stated.items() if value is not None}


class Peak(NamedTuple):
    """The measured peak of one precision.

    Attributes:
        flops_per_second: Operations a second of the median batch, at the best size.
        size: Side of its matrices.
        by_size: For each side the operations a second of the median batch, and of the fastest batch.
    """

    flops_per_second: float
    size: int
    by_size: dict[int, tuple[float, float]]


def measured_peak(precision: str, sizes: tuple[int, ...] = SIZES, batch_seconds: float = BATCH_SECONDS) -> Peak:
    """Measures the operations a second of products of square matrices on the first device.

    Args:
        precision: One of ``PRECISIONS``.
        sizes: Sides of the matrices, in rising order.
        batch_seconds: Least seconds of a batch.
    """
    import jax

    by_size: dict[int, tuple[float, float]] = {}
    with jax.enable_x64(True) if precision == "float64" else contextlib.nullcontext():
        for size in sizes:
            run = chain(precision, size)
            run(1)  # compiles
            one = min(timed(run, 1) for _ in range(2))
            products = max(1, math.ceil(batch_seconds / one))
            rates = [2.0 * size**3 * products / timed(run, products) for _ in range(BATCHES)]
            by_size[size] = statistics.median(rates), max(rates)
            if 8 * one > LONGEST:
                break
    best = max(by_size, key=lambda size: by_size[size][0])
    return Peak(by_size[best][0], best, by_size)


def chain(precision: str, size: int) -> Callable[[int], None]:
    """Returns a function that computes that many products, each with the one before as its left factor.

    Args:
        precision: One of ``PRECISIONS``.
        size: Side of the matrices.
    """
    import jax
    import jax.numpy as jnp

    dtype = {"bfloat16": jnp.bfloat16, "float64": jnp.float64}.get(precision, jnp.float32)
    exactly = "default" if precision in ("default", "bfloat16") else "highest"
    keys = jax.random.split(jax.random.key(0))
    first = jax.random.normal(keys[0], (size, size), jnp.float32).astype(dtype)
    # scaled so that products keep the size of their numbers
    factor = (jax.random.normal(keys[1], (size, size), jnp.float32) / size**0.5).astype(dtype)

    @jax.jit
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.matmul(x, y, precision=exactly)

    def run(products: int) -> None:
        x = first
        for _ in range(products):
            x = product(x, factor)
        x.block_until_ready()

    return run


def timed(run: Callable[[int], None], products: int) -> float:
    """Measures the wall seconds of ``run(products)``."""
    began = time.perf_counter()
    run(products)
    return time.perf_counter() - began


def peak_of(flops_per_second: float, devices: int, platform: str) -> float:
    """Returns the peak of several devices; the devices of a CPU share its cores, and so have the peak of one.

    Args:
        flops_per_second: Peak of one device.
        devices: Number of devices.
        platform: Name of JAX's backend.
    """
    return flops_per_second * (1 if platform == "cpu" else devices)
