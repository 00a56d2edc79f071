"""Residual networks for small images (He et al., 2016), with group normalisation (see ``models.images``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedtangent._src.checks import whole
from fedtangent._src.models import images
from fedtangent._src.models.convolutional import convolution_called
from fedtangent._src.models.entry import MOST_LAYERS
from fedtangent._src.models.gemm import Convolution
from fedtangent._src.types import Array, Model

if TYPE_CHECKING:
    import flax.linen as nn

STAGES = 4
MOST = {"width": 4096, "blocks": MOST_LAYERS, "groups": None, "convolution": None}  # options and largest numbers


def _network(stages: list[tuple[int, int, int]], groups: int, output_size: int, convolution: Convolution) -> nn.Module:
    """Builds the flax module of a residual network.

    ``stages`` has for each stage the channels, the number of blocks, and the stride of the first block. ``groups`` is
    the number of groups of each GroupNorm, and ``convolution`` computes the convolutions.
    """
    import flax.linen as nn  # here: it takes longer to import than the rest of the package

    layers = images.Layers(convolution, nn.initializers.variance_scaling(2.0, "fan_out", "normal"), groups)
    conv, norm = layers.conv, layers.norm

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


@images.image_network(MOST, "he2016", "wu_he2018")
def resnet18(
    input_shape: Sequence[int] = (32, 32, 3),
    output_size: int = 10,
    width: int = 64,
    blocks: Sequence[int] = (2, 2, 2, 2),
    groups: int = 2,
    convolution: str = "auto",
) -> Model:
    """Builds a residual network of 18 layers as for CIFAR, with group normalisation (He et al., 2016).

    It has a 3x3 convolution, stages of ``blocks`` basic blocks, a mean over all pixels, and a linear output. (For
    ImageNet, table 1 of He et al. begins with a 7x7 convolution and a max pooling, both of stride 2.) By default it has
    11,173,962 parameters for 32x32x3 images and 10 classes. Each stage after the first halves the image; small images
    are halved by the last stages only (``models.images.strides``). GroupNorm with ``groups`` groups replaces batch
    normalisation (see the module ``models.images``); the federated ResNet-18 of Reddi et al. (2021) has two groups.
    Convolutions are computed as ``convolution`` says, lax, gemm or auto. Their kernels start as in He et al. (2015),
    with variance 2 / fan-out. Weights of the output layer start with variance 1 / fan-in, flax's default, and its
    biases at 0. ``apply`` takes ``x`` [n, ...] of any shape that holds an example's numbers.

    Args:
        width: Channels of the first stage, which double from stage to stage.

    Raises:
        ValueError: Images are smaller than 4x4, a size is below 1, ``blocks`` has no number or more than four,
            ``groups`` does not divide ``width``, or the name of the convolution is unknown.
    """
    return _resnet("resnet18", input_shape, output_size, width, blocks, groups, convolution)


@images.image_network(MOST, "he2016", "wu_he2018")
def resnet34(
    input_shape: Sequence[int] = (32, 32, 3),
    output_size: int = 10,
    width: int = 64,
    blocks: Sequence[int] = (3, 4, 6, 3),
    groups: int = 2,
    convolution: str = "auto",
) -> Model:
    """Builds a residual network of 34 layers as for CIFAR, with group normalisation (He et al., 2016).

    It is ``resnet18`` with more blocks, and takes the same arguments; by default it has 21,282,122 parameters.

    Args:
        width: Channels of the first stage, which double from stage to stage.

    Raises:
        ValueError: An argument is out of range, as for ``resnet18``.
    """
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
    shape = images.image_shape(input_shape)
    whole("output_size", output_size)
    numbers = images.check_blocks(blocks, STAGES)
    channels = [whole("width", width) * 2**stage for stage in range(len(numbers))]
    images.check_groups(groups, channels)
    halved = [1, *images.strides(shape, STAGES - 1)[STAGES - len(numbers) :]]
    chosen = convolution_called(convolution, (*shape[:2], width), width, 3)  # the first stage sees the largest images
    stages = list(zip(channels, numbers, halved, strict=True))
    return images.of_images(_network(stages, groups, output_size, chosen), shape, output_size, name)
