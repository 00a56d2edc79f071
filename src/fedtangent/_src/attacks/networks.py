"""The LeNet of the deep-leakage paper (Zhu et al., 2019), and the structural similarity (SSIM) of images."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float, Float64, Num, Shaped

from fedtangent._src.checks import choice, number, real_array, whole
from fedtangent._src.types import AnyArray, Array, Key, Model, PyTree

ACTIVATIONS = {"sigmoid": jax.nn.sigmoid, "relu": jax.nn.relu}
FILTERS, WINDOW, STRIDES = 12, 5, (2, 2, 1)
WEIGHT_RANGE = 0.5


def lenet(
    input_shape: Sequence[int] = (28, 28, 1),
    output_size: int = 10,
    activation: str = "sigmoid",
    dtype: DTypeLike = jnp.float32,
) -> Model:
    """Builds the LeNet of deep leakage (Zhu et al., 2019): three 5 x 5 convolutions of 12 channels and a dense layer.

    Strides are 2, 2 and 1 and edges are padded by 2. There is no pooling, and the activation is the sigmoid, because
    the attack needs second derivatives, which are 0 for "relu". Weights and biases start uniform in [-0.5, 0.5].
    The model has no analytic tangent kernel.

    Args:
        input_shape: (H, W, channels).
        output_size: Number of outputs.
        activation: "sigmoid" or "relu".
        dtype: Type of the parameters.

    Raises:
        ValueError: A size is below 1, ``input_shape`` does not have three numbers, or the activation is unknown.
    """
    shape = tuple(int(n) for n in input_shape)
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"input_shape: got {shape}, must be (H, W, channels), each at least 1")
    whole("output_size", output_size)
    choice("activation", activation, tuple(ACTIVATIONS))
    act, sizes = ACTIVATIONS[activation], [(shape[0], shape[1])]
    for stride in STRIDES:
        sizes.append(((sizes[-1][0] - 1) // stride + 1, (sizes[-1][1] - 1) // stride + 1))
    fan_in = sizes[-1][0] * sizes[-1][1] * FILTERS
    channels = (shape[2], *[FILTERS] * len(STRIDES))
    kernels = [(WINDOW, WINDOW, *pair) for pair in itertools.pairwise(channels)]
    shapes: list[tuple[int, ...]] = [*kernels, (fan_in, int(output_size))]

    def init(key: Key) -> PyTree:
        def draw(key: Key, shape: tuple[int, ...]) -> Array:
            return jax.random.uniform(key, shape, dtype, -WEIGHT_RANGE, WEIGHT_RANGE)

        keys = jax.random.split(key, 2 * len(shapes))
        return [(draw(keys[2 * i], shape), draw(keys[2 * i + 1], shape[-1:])) for i, shape in enumerate(shapes)]

    def apply(params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n C"]:
        h = jnp.asarray(x.reshape((len(x), *shape)).astype(params[0][0].dtype))
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


def ssim(
    images: Num[np.ndarray, "n H W *channels"],
    originals: Num[np.ndarray, "n H W *channels"],
    data_range: float = 1.0,
    window: int | None = None,
) -> Float64[np.ndarray, "n"]:
    """Computes the structural similarity of each image to its original, [n] float64; 1 for equal images.

    Source: Wang, Bovik, Sheikh and Simoncelli, 2004.

    Args:
        images: [n, H, W] or [n, H, W, channels]. Clip values outside the range of the originals before the call.
        originals: The images to compare with, shaped like ``images``.
        data_range: Value of white minus value of black.
        window: Side of the sliding window in pixels, an odd number from 3 to the side of the image. None for 7, as in
            scikit-image; for images of a side below 14, for the largest odd number up to half the side, at least 3.

    Raises:
        ValueError: The shapes differ, a side is below 3 pixels, ``data_range`` is not positive, or the window is even,
            below 3, or too large.
    """
    from skimage.metrics import structural_similarity

    images, originals = real_array("images", images), real_array("originals", originals)
    if images.shape != originals.shape or images.ndim not in (3, 4):
        raise ValueError(
            f"images and originals: got shapes {images.shape} and {originals.shape}, must be equal, [n, H, W] or "
            "[n, H, W, channels]"
        )
    number("data_range", data_range, above=0)
    side = min(images.shape[1:3])
    if side < 3:
        raise ValueError(f"images: got shape {images.shape}, must be 3 x 3 pixels or larger")
    size = max(min(7, side // 2 - (side // 2 + 1) % 2), 3) if window is None else window
    if size < 3 or size % 2 == 0 or size > side:
        raise ValueError(f"window: got {size}, must be odd, from 3 to {side}, the shorter side of an image")
    channel = -1 if images.ndim == 4 else None
    return np.array(
        [
            structural_similarity(a, b, win_size=size, data_range=data_range, channel_axis=channel)
            for a, b in zip(images, originals, strict=True)
        ]
    )
