"""Residual networks for small images (He et al., 2016), with group normalisation (see ``models.images``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

from fedtangent._src.checks import whole
from fedtangent._src.entries import option
from fedtangent._src.models.convolutional import convolution_called
from fedtangent._src.models.entry import MOST_LAYERS
from fedtangent._src.models.images import check_blocks, check_groups, image_entry, image_shape, of_images, strides
from fedtangent._src.types import Array, Model

STAGES = 4


def _network(stages: list[tuple[int, int, int]], groups: int, output_size: int, convolution: Any) -> Any:
    """Builds the network; a stage is (channels, blocks, stride of the first block)."""
    import flax.linen as nn  # here: it takes longer to import than the rest of the package

    def conv(channels: int, window: int, stride: int = 1) -> Any:
        return nn.Conv(
            channels, (window, window), stride, window // 2, use_bias=False, conv_general_dilated=convolution,
            kernel_init=nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
        )  # fmt: skip

    norm = partial(nn.GroupNorm, groups, epsilon=1e-5)

    class Block(nn.Module):
        channels: int
        stride: int

        @nn.compact
        def __call__(self, x: Array) -> Array:
            y = nn.relu(norm()(conv(self.channels, 3, self.stride)(x)))
            y = norm()(conv(self.channels, 3)(y))
            if x.shape != y.shape:
                x = norm()(conv(self.channels, 1, self.stride)(x))
            return nn.relu(x + y)

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            x = nn.relu(norm()(conv(stages[0][0], 3)(x)))
            for channels, blocks, stride in stages:
                for block in range(blocks):
                    x = Block(channels, 1 if block else stride)(x)
            return nn.Dense(output_size)(x.mean((1, 2)))

    return Network()


def resnet18(
    input_shape: Sequence[int] = (32, 32, 3),
    output_size: int = 10,
    width: int = 64,
    blocks: Sequence[int] = (2, 2, 2, 2),
    groups: int = 2,
    convolution: str = "auto",
) -> Model:
    """ResNet-18 as it is used for CIFAR: a 3x3 convolution, four stages of basic blocks, mean, linear output.

    He et al. (2016), table 1, for ImageNet begins with a 7x7 convolution and a max pooling instead, both of stride 2.
    By default it has 11,173,962 parameters for 32x32x3 images and 10 classes. The stages halve the image, on small
    images only the last ones (``models.images.strides``). GroupNorm replaces batch normalisation, whose statistics are
    not shared (see the module ``models.images``); the federated ResNet-18 of Reddi et al. (2021) has two groups.
    Weights start as in He et al. (2015). ``apply`` takes ``x`` [n, ...] of any shape that holds an example's numbers.

    Args:
        input_shape: (height, width, channels).
        output_size: Number of outputs.
        width: Channels of the first stage, which double from stage to stage.
        blocks: Number of blocks of each stage; fewer numbers, fewer stages.
        groups: Groups of GroupNorm.
        convolution: As for ``cnn``.

    Raises:
        ValueError: Images are below 4x4, a size is below 1, ``groups`` does not divide the channels, or a name is
            unknown.
    """
    return _resnet("resnet18", input_shape, output_size, width, blocks, groups, convolution)


def resnet34(
    input_shape: Sequence[int] = (32, 32, 3),
    output_size: int = 10,
    width: int = 64,
    blocks: Sequence[int] = (3, 4, 6, 3),
    groups: int = 2,
    convolution: str = "auto",
) -> Model:
    """ResNet-34 as it is used for CIFAR: ``resnet18`` of more blocks; by default 21,282,122 parameters."""
    return _resnet("resnet34", input_shape, output_size, width, blocks, groups, convolution)


def _resnet(
    name: str,
    input_shape: Sequence[int],
    output_size: int,
    width: int,
    blocks: Sequence[int],
    groups: int,
    convolution: str,
) -> Model:
    shape = image_shape(input_shape)
    whole("output_size", output_size)
    numbers = check_blocks(blocks, STAGES)
    channels = [whole("width", width) * 2**stage for stage in range(len(numbers))]
    check_groups(groups, channels)
    halved = [1, *strides(shape, STAGES - 1)[STAGES - len(numbers) :]]
    chosen = convolution_called(convolution, (*shape[:2], width), width, 3)  # the first stage sees the largest images
    stages = list(zip(channels, numbers, halved, strict=True))
    return of_images(_network(stages, groups, output_size, chosen), shape, output_size, name)


@dataclasses.dataclass(frozen=True)
class ResNet18Options:
    """Options of resnet18."""

    width: int = option(64, most=4096)
    """Channels of the first stage, which double from stage to stage."""
    blocks: tuple[int, ...] = option((2, 2, 2, 2), most=MOST_LAYERS)
    """Blocks of each stage; fewer numbers, fewer stages."""
    groups: int = 2
    """Groups of channels that are normalised together."""
    convolution: str = "auto"
    """lax, gemm, or auto: the faster one of them on this machine, measured once."""


@dataclasses.dataclass(frozen=True)
class ResNet34Options(ResNet18Options):
    """Options of resnet34."""

    blocks: tuple[int, ...] = option((3, 4, 6, 3), most=MOST_LAYERS)
    """Blocks of each stage; fewer numbers, fewer stages."""


ENTRIES = (
    image_entry(
        resnet18,
        ResNet18Options,
        "a residual network of 18 layers as for CIFAR, with group normalisation (He et al., 2016)",
        "he2016",
        "wu_he2018",
    ),
    image_entry(
        resnet34,
        ResNet34Options,
        "a residual network of 34 layers as for CIFAR, with group normalisation (He et al., 2016)",
        "he2016",
        "wu_he2018",
    ),
)
