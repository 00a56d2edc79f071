"""Which convolution is the faster one on this machine: measured once, kept."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedtangent.data import calibration
from fedtangent.models.cpu.convolution import Convolution, gemm_convolution
from fedtangent.types import Array

CONVOLUTIONS: dict[str, Convolution] = {"lax": lax.conv_general_dilated, "gemm": gemm_convolution}
_LAYOUT = ("NHWC", "HWIO", "NHWC")


def convolution_step(name: str, strides: tuple[int, int], mapping: str) -> Callable[[Array, Array], Array]:
    """The step that is timed: output and both gradients of one convolution for each client, compiled.

    ``(x [N, B, H, W, I], w [N, h, w, I, O]) -> []``; ``mapping`` is ``"scan"`` (one client after another) or
    ``"vmap"``.
    """
    convolve = CONVOLUTIONS[name]

    def loss(x: Array, w: Array) -> Array:
        y = convolve(x, w, strides, "SAME", dimension_numbers=_LAYOUT)
        return 0.5 * jnp.vdot(y, y)

    def one(x: Array, w: Array) -> Array:
        value, (by_x, by_w) = jax.value_and_grad(loss, (0, 1))(x, w)
        return value + jnp.sum(by_x) + jnp.sum(by_w)

    def step(x: Array, w: Array) -> Array:
        if mapping == "vmap":
            return jnp.sum(jax.vmap(one)(x, w))
        return lax.scan(lambda total, pair: (total + one(*pair), None), jnp.zeros((), x.dtype), (x, w))[0]

    return jax.jit(step)


def _measure(
    shape: tuple[int, ...], filters: int, window: int, strides: tuple[int, int], batch: int, clients: int, mapping: str
) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (clients, batch, *shape), jnp.float32)
    w = jax.random.normal(keys[1], (clients, window, window, shape[-1], filters), jnp.float32)
    steps = {name: convolution_step(name, strides, mapping) for name in CONVOLUTIONS}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        jax.block_until_ready(step(x, w))  # compiles
    for _ in range(3):  # in turn, so that both meet the same load
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(x, w))
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def choose_convolution(
    input_shape: Sequence[int],
    filters: int,
    window: int,
    strides: tuple[int, int] = (1, 1),
    batch: int = 10,
    clients: int = 2,
    mapping: str | None = None,
    cached: Callable[[dict[str, Any], Callable[[], dict[str, Any]]], dict[str, Any]] = calibration.cached,
) -> str:
    """``"lax"`` or ``"gemm"``: whichever takes less time for a convolution and its gradients on this device.

    Measured for ``clients`` clients with kernels [window, window, I, filters] of their own and batches of ``batch``
    images ``input_shape`` = (H, W, I), under ``mapping``: by default ``"scan"`` on a CPU and ``"vmap"`` elsewhere, as
    the engine has it. ``cached(question, measure)`` keeps the answer.
    """
    used = mapping or ("scan" if jax.default_backend() == "cpu" else "vmap")
    settings = (tuple(input_shape), filters, window, strides, batch, clients, used)
    question = {"convolution": list(map(str, settings))}
    seconds = cached(question, functools.partial(_measure, *settings))
    return min(CONVOLUTIONS, key=lambda name: seconds[name])


def resolve_convolution(name: str, input_shape: Sequence[int], filters: int, window: int) -> Convolution:
    """The convolution called ``name``, the faster one for ``"auto"``; raises ``ValueError`` for an unknown name."""
    if name not in (*CONVOLUTIONS, "auto"):
        raise ValueError(f"convolution: got {name!r}, allowed are auto, {', '.join(CONVOLUTIONS)}")
    return CONVOLUTIONS[choose_convolution(input_shape, filters, window) if name == "auto" else name]
