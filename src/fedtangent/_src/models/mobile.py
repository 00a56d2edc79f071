"""Networks for small devices, MobileNetV2 and ShuffleNetV2, with group normalisation (see ``models.images``).

All convolutions are computed by ``models.gemm_convolution``: inside a loop over clients on a CPU, the depthwise
convolutions of XLA take a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp

from fedtangent._src.checks import number, whole
from fedtangent._src.models.entry import MOST_LAYERS
from fedtangent._src.models.gemm import gemm_convolution
from fedtangent._src.models.images import (
    Layers,
    check_blocks,
    check_groups,
    image_network,
    image_shape,
    of_images,
    strides,
)
from fedtangent._src.types import Array, Model

if TYPE_CHECKING:
    import flax.linen as nn

# Sandler et al. (2018), table 2: of each stage the factor t, the channels c, whether its first block halves the image
INVERTED = (
    (1, 16, False),
    (6, 24, True),
    (6, 32, True),
    (6, 64, True),
    (6, 96, False),
    (6, 160, True),
    (6, 320, False),
)
STEM, HEAD = 32, 1280  # channels of the first and of the last convolution
SHUFFLED = {  # Ma et al. (2018), table 5: width -> channels of the stages, and of the last convolution
    0.5: (48, 96, 192, 1024),
    1.0: (116, 232, 464, 1024),
    1.5: (176, 352, 704, 1024),
    2.0: (244, 488, 976, 2048),
}
SHUFFLED_STEM = 24


def _layers(groups: int) -> Layers:
    from flax.linen.initializers import he_normal  # here: it takes longer to import than the rest of the package

    # scaled by the inputs: scaled by the outputs, a depthwise kernel would start smaller than one step on it
    return Layers(gemm_convolution, he_normal(), groups)


# ---- MobileNetV2 ----------------------------------------------------------------------------------------------------


def _eighths(channels: float) -> int:
    """Rounds channels to the nearest multiple of 8, 8 at least, and up if rounding would lose more than a tenth.

    This is the rule of the authors' code of MobileNetV2.
    """
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * channels else nearest


def _inverted_network(
    stem: tuple[int, int], stages: list[tuple[int, int, int, int]], head: int, groups: int, output_size: int
) -> nn.Module:
    """Builds the flax module of MobileNetV2.

    ``stem`` has the channels and the stride of the first convolution. ``stages`` has for each stage the factor of the
    hidden channels, the channels, the number of blocks, and the stride of the first block. ``head`` is the number of
    channels of the last convolution, ``groups`` the number of groups of each GroupNorm.
    """
    import flax.linen as nn

    layers = _layers(groups)
    conv, norm = layers.conv, layers.norm

    class Block(nn.Module):
        factor: int
        channels: int
        stride: int

        @nn.compact
        def __call__(self, x: Array) -> Array:
            hidden = self.factor * x.shape[-1]
            y = nn.relu6(norm()(conv(hidden)(x))) if self.factor > 1 else x
            y = nn.relu6(norm()(conv(hidden, 3, self.stride, hidden)(y)))
            y = norm()(conv(self.channels)(y))
            return x + y if x.shape[-1] == self.channels and self.stride == 1 else y

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            x = nn.relu6(norm()(conv(stem[0], 3, stem[1])(x)))
            for factor, channels, blocks, stride in stages:
                for block in range(blocks):
                    x = Block(factor, channels, 1 if block else stride)(x)
            x = nn.relu6(norm()(conv(head)(x)))
            return nn.Dense(output_size)(x.mean((1, 2)))

    return Network()


@image_network({"width": 100, "blocks": MOST_LAYERS, "groups": None}, "sandler2018", "wu_he2018")
def mobilenet_v2(
    input_shape: Sequence[int] = (32, 32, 3),
    output_size: int = 10,
    width: float = 1.0,
    blocks: Sequence[int] = (1, 2, 3, 4, 3, 3, 1),
    groups: int = 2,
) -> Model:
    """Builds MobileNetV2, of inverted residual blocks, with group normalisation (Sandler et al., 2018, table 2).

    By default it has 2,236,682 parameters for 32x32x3 images and 10 classes, 3,504,872 for 1000. With all seven stages,
    large images are halved five times: at the first convolution and in four stages. Small images are not halved at the
    first of these places (``models.images.strides``), 32x32 images only at the last three. There is no dropout before
    the output, since a model has no random numbers. Stage s has ``blocks[s]`` blocks. GroupNorm with ``groups`` groups
    replaces batch normalisation (see the module ``models.images``). ``apply`` takes ``x`` [n, ...] of any shape that
    holds an example's numbers.

    Args:
        width: Factor of the numbers of channels, which are rounded to multiples of 8; below 1 the last convolution
            keeps its 1,280 channels.

    Raises:
        ValueError: Images are smaller than 4x4, a size is below 1, ``width`` is not positive, ``blocks`` has no number
            or more than seven, or ``groups`` does not divide the channels of every layer.
    """
    shape, size = image_shape(input_shape), whole("output_size", output_size)
    factor_of_all = number("width", width, above=0)
    numbers = check_blocks(blocks, len(INVERTED))
    halved = iter(strides(shape, 1 + sum(halves for _, _, halves in INVERTED)))
    stem = _eighths(STEM * factor_of_all), next(halved)
    stages = [
        (factor, _eighths(channels * factor_of_all), repeated, next(halved) if halves else 1)
        for (factor, channels, halves), repeated in zip(INVERTED, numbers, strict=False)
    ]
    head = _eighths(HEAD * max(1.0, factor_of_all))
    check_groups(groups, (stem[0], head, *(channels for _, channels, _, _ in stages)))
    return of_images(_inverted_network(stem, stages, head, groups, size), shape, size, "mobilenet_v2")


# ---- ShuffleNetV2 ---------------------------------------------------------------------------------------------------


def _shuffled_network(
    strides: Sequence[int], stages: list[tuple[int, int, int]], head: int, groups: int, output_size: int
) -> nn.Module:
    """Builds the flax module of ShuffleNetV2.

    The first convolution has the stride ``strides[0]``; a max pooling of stride 2 follows it if ``strides[1]`` is above
    1. ``stages`` has for each stage the channels, the number of units, and the stride of the first unit. ``head`` is
    the number of channels of the last convolution, ``groups`` the number of groups of each GroupNorm.
    """
    import flax.linen as nn

    layers = _layers(groups)
    conv, norm = layers.conv, layers.norm

    def branch(x: Array, channels: int, stride: int) -> Array:
        y = nn.relu(norm()(conv(channels)(x)))
        y = norm()(conv(channels, 3, stride, channels)(y))
        return nn.relu(norm()(conv(channels)(y)))

    class Reducing(nn.Module):
        channels: int
        stride: int

        @nn.compact
        def __call__(self, x: Array) -> Array:
            half = self.channels // 2
            reduced = norm()(conv(x.shape[-1], 3, self.stride, x.shape[-1])(x))
            return _in_turn(nn.relu(norm()(conv(half)(reduced))), branch(x, half, self.stride))

    class Unit(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            passing, changed = jnp.split(x, 2, axis=-1)
            return _in_turn(passing, branch(changed, changed.shape[-1], 1))

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            x = nn.relu(norm()(conv(SHUFFLED_STEM, 3, strides[0])(x)))
            if strides[1] > 1:  # where the image is not halved there is nothing to pool
                x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
            for channels, units, stride in stages:
                x = Reducing(channels, stride)(x)
                for _ in range(units - 1):
                    x = Unit()(x)
            x = nn.relu(norm()(conv(head)(x)))
            return nn.Dense(output_size)(x.mean((1, 2)))

    return Network()


def _in_turn(a: Array, b: Array) -> Array:
    """Interleaves the channels of ``a`` and ``b``, so that each half of the next unit's input has channels of both."""
    return jnp.stack([a, b], axis=-1).reshape((*a.shape[:-1], -1))


@image_network({"width": 100, "blocks": MOST_LAYERS, "groups": None}, "ma2018", "wu_he2018")
def shufflenet_v2(
    input_shape: Sequence[int] = (32, 32, 3),
    output_size: int = 10,
    width: float = 1.0,
    blocks: Sequence[int] = (4, 8, 4),
    groups: int = 2,
) -> Model:
    """Builds ShuffleNetV2, of units that shuffle channels, with group normalisation (Ma et al., 2018, table 5).

    Half of a unit's channels pass unchanged, then all channels are shuffled; the first unit of a stage changes both
    halves. By default it has 1,263,854 parameters for 32x32x3 images and 10 classes, 2,278,604 for 1000. With three
    stages, large images are halved five times: at the first two layers and at the start of each stage. Small images are
    not halved at the first of these places (``models.images.strides``), 32x32 images only by the three stages.
    GroupNorm with ``groups`` groups replaces batch normalisation (see the module ``models.images``). ``apply`` takes
    ``x`` [n, ...] of any shape that holds an example's numbers.

    Args:
        width: Factor of the channels: 0.5, 1, 1.5 or 2, as published.
        blocks: Units of each stage, for one to three stages.

    Raises:
        ValueError: Images are smaller than 4x4, ``width`` is not one of the four numbers, ``blocks`` has no number or
            more than three, a size is below 1, or ``groups`` does not divide the channels of every layer.
    """
    shape, size = image_shape(input_shape), whole("output_size", output_size)
    if number("width", width, above=0) not in SHUFFLED:
        raise ValueError(f"width: got {width}, allowed are {', '.join(map(str, SHUFFLED))}")
    *channels, head = SHUFFLED[width]
    numbers = check_blocks(blocks, len(channels))
    first, second, *halved = strides(shape, 2 + len(channels))
    stages = list(zip(channels, numbers, halved, strict=False))
    check_groups(groups, (SHUFFLED_STEM, head, *(wide // 2 for wide, _, _ in stages)))
    return of_images(_shuffled_network((first, second), stages, head, groups, size), shape, size, "shufflenet_v2")
