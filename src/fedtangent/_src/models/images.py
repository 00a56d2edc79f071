"""Parts that networks of images share: checks of shapes, strides, convolutions and group normalisation.

``nn.GroupNorm`` (Wu and He, 2018) replaces batch normalisation in all of them. It normalises groups of channels within
one example, and has as many learned numbers as batch normalisation. Batch statistics would not suit federated learning:
averaged over clients whose data differ, they fit no client's data; kept at the clients, they are unknown to the server.
The output of one example would also depend on the other examples of its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jaxtyping import Float, Shaped

from fedtangent._src.checks import whole
from fedtangent._src.docstrings import completed
from fedtangent._src.models.entry import CROSS_ENTROPY, OF_IMAGES, Function, network
from fedtangent._src.models.flax_networks import flax_structure, from_flax
from fedtangent._src.models.gemm import Convolution
from fedtangent._src.types import AnyArray, Array, Model, PyTree

if TYPE_CHECKING:
    import flax.linen as nn

SMALLEST = 4  # side of the image that is left at the end, at least


def image_shape(input_shape: Sequence[int]) -> tuple[int, int, int]:
    """Returns ``input_shape`` as (height, width, channels); (H, W) becomes (H, W, 1).

    Raises ``ValueError`` if it has another number of entries, or an entry below 1.
    """
    if not isinstance(input_shape, Sequence):
        raise ValueError(f"input_shape: got {input_shape!r}, must be (height, width, channels)")
    shape = tuple(int(n) for n in input_shape)
    shape = (*shape, 1) if len(shape) == 2 else shape
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"input_shape: got {tuple(input_shape)}, must be (height, width, channels), at least 1 each")
    return shape[0], shape[1], shape[2]


def of_images(module: nn.Module, shape: Sequence[int], output_size: int, name: str) -> Model:
    """Converts a flax network of images to a model without an analytic kernel.

    Its ``apply`` takes ``x`` [n, ...] of any shape that holds an image's numbers, and computes in the parameters'
    dtype; weights start as float32. Its default loss is the cross entropy.

    Args:
        module: The flax network.
        shape: (height, width, channels) of an image.
        output_size: Number of outputs.
        name: Name of the model.
    """
    flat = from_flax(module, jax.ShapeDtypeStruct((1, *shape), jnp.float32), output_size, name)

    def apply(params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n C"]:
        if math.prod(x.shape[1:]) != math.prod(shape):
            raise ValueError(f"x: got {x.shape}, must be examples of {tuple(shape)}")
        dtype = jax.tree.leaves(params)[0].dtype
        return flat.apply(params, x.reshape((x.shape[0], *shape)).astype(dtype))

    return flat._replace(apply=apply, structure=flax_structure(apply), loss=CROSS_ENTROPY, vocabulary=0)


def strides(shape: Sequence[int], places: int) -> list[int]:
    """Chooses the strides, 1 or 2, of the layers at which a published network halves its images, in order.

    If images are too small for all of them, the first of these layers get stride 1, so that at least 4 x 4 pixels
    remain. For 32 x 32 images this turns networks for ImageNet into the usual ones for CIFAR.

    Args:
        shape: (height, width, ...) of an image.
        places: Number of layers at which the published network halves its images.

    Raises:
        ValueError: Images are smaller than 4 x 4.
    """
    side = min(shape[:2])
    if side < SMALLEST:
        raise ValueError(f"input_shape: got {tuple(shape)}, must be at least {SMALLEST} high and wide")
    halved = max(k for k in range(places + 1) if math.ceil(side / 2**k) >= SMALLEST)
    return [1] * (places - halved) + [2] * halved


def check_groups(groups: int, channels: Iterable[int]) -> None:
    """Raises ``ValueError`` unless the groups of a GroupNorm divide the channels of every layer.

    Args:
        groups: Number of groups.
        channels: Channels of each layer.
    """
    sizes = sorted(set(channels))
    if any(size % whole("groups", groups) for size in sizes):
        raise ValueError(f"groups: got {groups}, must divide the channels of every layer, {', '.join(map(str, sizes))}")


def check_blocks(blocks: Sequence[int], most: int) -> tuple[int, ...]:
    """Returns the numbers of blocks of the stages as a tuple.

    Args:
        blocks: Number of blocks of each stage.
        most: Largest number of stages.

    Raises:
        ValueError: There is no stage or more than ``most``, or a stage has no block.
    """
    if not isinstance(blocks, Sequence):
        raise ValueError(f"blocks: got {blocks!r}, must be a number for each stage, such as (1, 1)")
    if not 1 <= len(blocks) <= most:
        raise ValueError(f"blocks: got {tuple(blocks)}, must be of one to {most} stages, a number each")
    return tuple(whole("blocks", number) for number in blocks)


class Layers(NamedTuple):
    """Builder of the flax layers of image networks: convolutions without biases, and group normalisations."""

    convolution: Convolution
    initializer: Initializer  # of kernels
    groups: int  # of a normalisation

    def conv(self, channels: int, window: int = 1, stride: int = 1, feature_groups: int = 1) -> nn.Conv:
        """Builds a convolution; at stride 1 it keeps the size of the image.

        Args:
            channels: Output channels.
            window: Side of the window, an odd number.
            stride: Stride along both axes.
            feature_groups: Number of groups of channels that do not mix; 1 for an ordinary convolution.
        """
        import flax.linen as nn  # here: it takes longer to import than the rest of the package

        layer = partial(nn.Conv, use_bias=False, conv_general_dilated=self.convolution, kernel_init=self.initializer)
        return layer(channels, (window, window), stride, window // 2, feature_group_count=feature_groups)

    def norm(self) -> nn.GroupNorm:
        """Builds a GroupNorm layer of ``groups`` groups of channels."""
        import flax.linen as nn

        return nn.GroupNorm(self.groups, epsilon=1e-5)


ARGUMENTS = {  # of several networks of images
    "input_shape": "(height, width, channels).",
    "output_size": "Number of outputs.",
    "blocks": "Blocks of each stage; fewer numbers, fewer stages.",
    "groups": "Groups of channels that GroupNorm normalises together.",
    "convolution": "lax, gemm (``models.gemm_convolution``) or auto: the faster one of them on this machine, measured "
    "once.",
}
RAISES = "ValueError: Images below 4x4, a size below 1, ``groups`` that do not divide the channels, or an unknown name."


def _as_image(input_shape: tuple[int, ...], output_size: int) -> dict[str, int | tuple[int, ...]]:
    return {"input_shape": input_shape, "output_size": output_size}


def image_network(most: Mapping[str, int | None], *papers: str) -> Callable[[Function], Function]:
    """Returns a decorator that marks a function as a network of images and completes its docstring.

    The function takes ``(input_shape, output_size, **options)`` and can then be chosen by its name.

    Args:
        most: Names of the parameters that are options on the command line, with the largest number allowed or None.
        papers: Keys of the papers behind the network.
    """

    as_model = network(most, papers, _as_image, kinds=("image",), loss=CROSS_ENTROPY, learning_rates=OF_IMAGES)

    def mark(function: Function) -> Function:
        if function.__doc__:  # python -OO leaves it out
            function.__doc__ = completed(function, ARGUMENTS, errors=RAISES)
        return as_model(function)

    return mark
