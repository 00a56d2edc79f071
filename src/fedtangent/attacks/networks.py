"""The network that deep leakage was shown on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedtangent.types import Array, Key, Model, PyTree

ACTIVATIONS = {"sigmoid": jax.nn.sigmoid, "relu": jax.nn.relu}
FILTERS, WINDOW, STRIDES = 12, 5, (2, 2, 1)
WEIGHT_RANGE = 0.5


def lenet(
    input_shape: Sequence[int] = (28, 28, 1),
    output_size: int = 10,
    activation: str = "sigmoid",
    weight_range: float = WEIGHT_RANGE,
    dtype: Any = jnp.float32,
) -> Model:
    """The LeNet of deep leakage (Zhu et al., 2019): three 5 x 5 convolutions of 12 channels and a dense layer.

    Strides are 2, 2 and 1 and edges are padded by 2; pooling is left out and the activation is the sigmoid, for the
    search needs second derivatives, which ``"relu"`` does not have. Weights and biases start uniform in
    [-weight_range, weight_range]. ``apply`` takes ``x`` [n, ...] of ``input_shape`` (H, W, channels) and returns
    [n, output_size]. There is no analytic kernel.

    Raises ``ValueError`` for impossible sizes and unknown names.
    """
    shape = tuple(int(n) for n in input_shape)
    if len(shape) != 3 or min(shape) < 1 or output_size < 1:
        raise ValueError(
            f"lenet: got input_shape={shape}, output_size={output_size}; input_shape must be (H, W, channels), all of "
            "them and output_size at least 1"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}, allowed are {', '.join(ACTIVATIONS)}")
    if not weight_range > 0:
        raise ValueError(f"weight_range: got {weight_range}, must be positive")
    act, sizes = ACTIVATIONS[activation], [(shape[0], shape[1])]
    for stride in STRIDES:
        sizes.append(((sizes[-1][0] - 1) // stride + 1, (sizes[-1][1] - 1) // stride + 1))
    fan_in = sizes[-1][0] * sizes[-1][1] * FILTERS
    channels = (shape[2], *[FILTERS] * len(STRIDES))
    kernels = [(WINDOW, WINDOW, i, o) for i, o in itertools.pairwise(channels)]
    shapes: list[tuple[int, ...]] = [*kernels, (fan_in, int(output_size))]

    def init(key: Key) -> PyTree:
        def draw(key: Key, shape: tuple[int, ...]) -> Array:
            return jax.random.uniform(key, shape, dtype, -weight_range, weight_range)

        keys = jax.random.split(key, 2 * len(shapes))
        return [(draw(keys[2 * i], s), draw(keys[2 * i + 1], s[-1:])) for i, s in enumerate(shapes)]

    def apply(params: PyTree, x: Array) -> Array:
        h = x.reshape((len(x), *shape)).astype(params[0][0].dtype)
        pad = (WINDOW // 2, WINDOW // 2)
        for (weight, bias), stride in zip(params[:-1], STRIDES, strict=True):
            h = jax.lax.conv_general_dilated(
                h, weight, (stride, stride), (pad, pad), dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            h = act(h + bias[None, None, None])
        weight, bias = params[-1]
        return h.reshape(len(x), -1) @ weight + bias[None]

    name = f"lenet({'x'.join(map(str, shape))}-{output_size}, {activation})"
    return Model(name, init, apply, None, int(output_size))
