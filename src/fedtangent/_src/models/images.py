"""What networks of images share: an image's shape, how often it is halved, and why no statistics of batches are kept.

Batch normalisation is replaced by ``nn.GroupNorm`` (Wu and He, 2018) everywhere: it normalises groups of channels
within one example. Statistics of batches are of one client's data: averaged over clients whose data differ they are
those of no data at all, and kept at the clients the server could not predict with them. And the output of one example
would depend on others. What is learned, a scale and a shift for each channel, is as many numbers as before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Shaped

from fedtangent._src.checks import whole
from fedtangent._src.models.entry import CROSS_ENTROPY, SQUARED_ERROR, ModelEntry
from fedtangent._src.models.flax_networks import flax_structure, from_flax
from fedtangent._src.types import AnyArray, Array, Model, PyTree

SMALLEST = 4  # side of the image that is left at the end, at least


def image_shape(input_shape: Sequence[int]) -> tuple[int, int, int]:
    """Returns ``input_shape`` as (height, width, channels), (H, W) as (H, W, 1); raises ``ValueError`` for others."""
    shape = tuple(int(n) for n in input_shape)
    shape = (*shape, 1) if len(shape) == 2 else shape
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"input_shape: got {tuple(input_shape)}, must be (height, width, channels)")
    return shape[0], shape[1], shape[2]


def of_images(network: Any, shape: Sequence[int], output_size: int, name: str) -> Model:
    """Converts a flax network of images to a model.

    Its ``apply`` takes ``x`` [n, ...] of any shape with as many numbers for each example, and computes in the
    parameters' dtype; weights start as float32. There is no analytic kernel.

    Args:
        network: The flax module.
        shape: (height, width, channels) of an image.
        output_size: Number of outputs.
        name: Name of the model.
    """
    flat = from_flax(network, jax.ShapeDtypeStruct((1, *shape), jnp.float32), output_size, name)

    def apply(params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n C"]:
        if math.prod(x.shape[1:]) != math.prod(shape):
            raise ValueError(f"x: got {x.shape}, must be examples of {tuple(shape)}")
        dtype = jax.tree.leaves(params)[0].dtype
        return flat.apply(params, x.reshape((x.shape[0], *shape)).astype(dtype))

    return flat._replace(apply=apply, structure=flax_structure(apply), loss=CROSS_ENTROPY, reads_tokens=False)


def strides(shape: Sequence[int], places: int) -> list[int]:
    """Returns a stride, 1 or 2, for each of the ``places`` at which a published network halves its images, in order.

    Small images are not halved at the first places, so that at least 4 x 4 remain. For 32 x 32 this turns networks for
    ImageNet into the usual ones for CIFAR. Raises ``ValueError`` for images below 4 x 4.
    """
    side = min(shape[:2])
    if side < SMALLEST:
        raise ValueError(f"input_shape: got {tuple(shape)}, must be at least {SMALLEST} high and wide")
    halved = max(k for k in range(places + 1) if math.ceil(side / 2**k) >= SMALLEST)
    return [1] * (places - halved) + [2] * halved


def check_groups(groups: Any, channels: Iterable[int]) -> int:
    """Returns ``groups`` of a GroupNorm; raises ``ValueError`` unless they divide the ``channels`` of every layer."""
    found, sizes = whole("groups", groups), sorted(set(channels))
    if any(size % found for size in sizes):
        raise ValueError(f"groups: got {groups}, must divide the channels of every layer, {', '.join(map(str, sizes))}")
    return found


def check_blocks(blocks: Sequence[int], most: int) -> tuple[int, ...]:
    """Returns the number of blocks of each stage; raises ``ValueError`` for no stage or more than ``most`` stages."""
    if not 1 <= len(blocks) <= most:
        raise ValueError(f"blocks: got {tuple(blocks)}, must be of one to {most} stages")
    return tuple(whole("blocks", number) for number in blocks)


def image_entry(function: Callable[..., Model], options: type[Any], summary: str, *papers: str) -> ModelEntry:
    """Builds the entry of a network of images, ``function(input_shape, output_size, **options)``."""

    def build(o: Any, input_shape: tuple[int, ...], output_size: int) -> Model:
        return function(input_shape, output_size, **dataclasses.asdict(o))

    return ModelEntry(
        function.__name__,
        summary,
        build,
        options,
        papers,
        function=function,
        kinds=("image",),
        loss=CROSS_ENTROPY,
        learning_rates={SQUARED_ERROR: 0.01, CROSS_ENTROPY: 0.05},
    )
