"""Networks of images in the NTK parameterization, with the analytic kernels of their infinite width.

The output of every layer is ``(w_std / sqrt(fan_in)) W * h + b_std b``, where h is its input, ``*`` a convolution or a
product, and the entries of W and b are N(0, 1). It is a layer of neural-tangents' ``stax``, which also derives the
kernels. Convolutions pad with zeros to keep the size. Pooling is averaging, because no infinite-width kernel of max
pooling is known.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from fedtangent._src.checks import choice, flag, whole
from fedtangent._src.models.dense import ACTIVATIONS, Sized, outputs_of
from fedtangent._src.models.entry import CROSS_ENTROPY, MOST_LAYERS, SQUARED_ERROR, network
from fedtangent._src.models.images import check_blocks, image_shape
from fedtangent._src.models.kernels import StaxNetwork, stax
from fedtangent._src.models.stax_networks import stax_model
from fedtangent._src.types import Kernel, Model

READOUTS = ("flatten", "average", "global")
W_STD, B_STD = 2.0**0.5, 0.1  # of all layers, as in ``mlp``
STAGES = 4
P = ParamSpec("P")
T = TypeVar("T")
Sizes = tuple[tuple[int, int, int], int]  # (height, width, channels), number of outputs


def _sizes_of(input_shape: Sequence[int] | Sized, output_size: int | None) -> Sizes:
    """Returns the shape of an image and the number of outputs; ``input_shape`` may be a data set, which has both."""
    outputs = whole("output_size", outputs_of(input_shape, output_size, "input_shape"))
    return image_shape(input_shape.input_shape if isinstance(input_shape, Sized) else input_shape), outputs


def _as_image(input_shape: tuple[int, ...], output_size: int) -> dict[str, int | tuple[int, ...]]:
    return {"input_shape": input_shape, "output_size": output_size}


def _conv(channels: int, window: int, stride: int = 1) -> StaxNetwork:
    layer: StaxNetwork = stax().Conv(channels, (window, window), (stride, stride), "SAME", W_std=W_STD, b_std=B_STD)
    return layer


def _dense(units: int) -> StaxNetwork:
    layer: StaxNetwork = stax().Dense(units, W_STD, B_STD)
    return layer


def _activation(activation: str, layer_norm: bool) -> list[StaxNetwork]:
    """Returns the stax layers of an activation; with ``layer_norm``, a normalisation over channels precedes it."""
    chosen = ACTIVATIONS[activation]
    layer: StaxNetwork = getattr(stax(), chosen.stax_name)(**chosen.stax_arguments)
    return [stax().LayerNorm(), layer] if layer_norm else [layer]


def _readout(readout: str, output_size: int) -> list[StaxNetwork]:
    """Returns the stax layers that compute the outputs from the features at all positions of an image.

    ``readout`` is "flatten", "average" or "global", as ``ntk_cnn`` explains.
    """
    layers = stax()
    pooled = {
        "flatten": [layers.Flatten()],
        "average": [layers.AvgPool((2, 2), (2, 2)), layers.Flatten()],
        "global": [layers.GlobalAvgPool()],
    }
    return [*pooled[readout], _dense(output_size)]


def _sum(branch: Sequence[StaxNetwork], shortcut: StaxNetwork | None = None) -> StaxNetwork:
    """Builds a residual block of stax, which adds the outputs of ``branch`` and ``shortcut`` for the same input.

    Without a ``shortcut`` the input itself is added.
    """
    layers = stax()
    both = layers.parallel(layers.Identity() if shortcut is None else shortcut, layers.serial(*branch))
    block: StaxNetwork = layers.serial(layers.FanOut(2), both, layers.FanInSum())
    return block


def _quiet(function: Callable[P, T]) -> Callable[P, T]:
    """Wraps a function of stax so that three of its warnings, which do not matter here, are silent."""

    @functools.wraps(function)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> T:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`FanIn` layers|Got potentially mismatching|Linear scaling", UserWarning)
            return function(*args, **kwargs)

    return quiet


def _model(build: Callable[[int], Sequence[StaxNetwork]], shape: Sequence[int], width: int, name: str) -> Model:
    """Builds a model that can be rebuilt at other widths; models of all widths share one infinite-width kernel.

    ``build`` maps a width to the network's stax layers. ``name`` is the model's name up to the width, with an open
    bracket, such as ``"ntk_cnn(8x8x1"``.
    """

    def at_width(width: int, kernel: Kernel | None = None) -> Model:
        whole("width", width)
        init_fn, apply_fn, kernel_fn = stax().serial(*_quiet(build)(width))
        network = _quiet(init_fn), apply_fn, _quiet(kernel_fn)
        return stax_model(network, tuple(shape), f"{name}, width {width})", kernel)

    first = at_width(width)

    def other(width: int) -> Model:
        return at_width(width, first.kernel)._replace(at_width=other)

    return first._replace(at_width=other)


def _check(shape: Sequence[int], sides: Mapping[str, int], readout: str, activation: str) -> None:
    """Raises ``ValueError`` for a size below 1, an unknown readout or activation, or images too small for the readout.

    ``shape`` is the shape of an image; ``sides`` has the sizes to check, by name of the argument.
    """
    for name, size in sides.items():
        whole(name, size)
    choice("readout", readout, READOUTS)
    choice("activation", activation, ACTIVATIONS)
    if readout == "average" and min(shape[:2]) < 2:
        raise ValueError(
            f"readout: got 'average' of {shape[0]} x {shape[1]} places, allowed are flatten, global below 2 x 2"
        )


def _named(kind: str, shape: Sequence[int], *parts: str) -> str:
    """Returns the beginning of a model's name, before its width: kind of network, shape of an image, and ``parts``."""
    return f"{kind}({', '.join(('x'.join(map(str, shape)), *parts))}"


ntk_network = functools.partial(
    network, sizes=_as_image, kinds=("image",), loss=SQUARED_ERROR
)  # marks a function of an image's shape and the number of outputs


@ntk_network(
    {"width": 4096, "depth": MOST_LAYERS, "window": 1000, "readout": None, "activation": None, "layer_norm": None},
    ("arora2019", "novak2020"),
    learning_rates={SQUARED_ERROR: 1.0, CROSS_ENTROPY: 1.0},
)
def ntk_cnn(
    input_shape: Sequence[int] | Sized,
    output_size: int | None = None,
    width: int = 64,
    depth: int = 2,
    window: int = 3,
    readout: str = "global",
    activation: str = "relu",
    layer_norm: bool = False,
) -> Model:
    """Builds a convolutional network in the NTK parameterization, with the kernels of its infinite width.

    It has ``depth`` convolutions, each followed by an activation, and a linear readout. Its tangent kernel is the CNTK
    of Arora et al. (2019). The work for a pair of images grows with the square of the number of pixels; with the
    readout "flatten" it is proportional to the number of pixels.

    Args:
        input_shape: (height, width, channels), or a ``Dataset``.
        output_size: Number of outputs; None with a ``Dataset``.
        width: Channels of the convolutions.
        depth: Number of convolutions.
        window: Side of a convolution's window.
        readout: How the last layer reads the image: "flatten" has weights for every position, "average" for means over
            2 x 2 positions, "global" for the mean over all positions.
        activation: relu, leaky_relu, abs, erf, gelu, sin or cos.
        layer_norm: Whether each activation follows a normalisation over channels.

    Raises:
        ValueError: A size is below 1 or missing, a name is unknown, ``layer_norm`` is no bool, or the image is too
            small for the readout.
        ImportError: neural-tangents is not installed, or has another version.

    Example, a network of 16 channels, and the kernels of infinite width:

        >>> import jax, fedtangent as ft
        >>> model = ft.models.ntk_cnn(input_shape=(4, 4, 1), output_size=3, width=16)
        >>> x = jax.numpy.ones((2, 4, 4, 1))
        >>> model.apply(model.init(jax.random.key(0)), x).shape, model.kernel(x).ntk.shape
        ((2, 3), (2, 2))
    """
    shape, outputs = _sizes_of(input_shape, output_size)
    _check(shape, {"depth": depth, "window": window}, readout, activation)
    flag("layer_norm", layer_norm)

    def build(width: int) -> list[StaxNetwork]:
        layers = [layer for _ in range(depth) for layer in (_conv(width, window), *_activation(activation, layer_norm))]
        return [*layers, *_readout(readout, outputs)]

    name = _named("ntk_cnn", shape, f"depth {depth}", readout, activation, *(["layer norm"] if layer_norm else []))
    return _model(build, shape, width, name)


@ntk_network(
    {"width": 4096, "blocks": MOST_LAYERS, "window": 1000, "readout": None, "activation": None, "layer_norm": None},
    ("he2016", "novak2020"),
    learning_rates={SQUARED_ERROR: 0.2, CROSS_ENTROPY: 0.2},
)
def ntk_resnet(
    input_shape: Sequence[int] | Sized,
    output_size: int | None = None,
    width: int = 64,
    blocks: Sequence[int] = (1, 1),
    window: int = 3,
    readout: str = "global",
    activation: str = "relu",
    layer_norm: bool = False,
) -> Model:
    """Builds a residual network in the NTK parameterization, with the kernels of its infinite width.

    It is a convolution, stages of residual blocks ``h + conv(activation(conv(activation(h))))``, an activation and a
    linear readout. The first block of each stage but the first halves the image, with a 1x1 convolution as its
    shortcut. All convolutions have ``width`` channels, and there is no normalisation unless ``layer_norm``.

    Args:
        input_shape: (height, width, channels), or a ``Dataset``.
        output_size: Number of outputs; None with a ``Dataset``.
        width: Channels of the convolutions.
        blocks: Blocks of each stage; at most four stages.
        window: Side of a convolution's window.
        readout: How the last layer reads the image: flatten (every position), average (means of 2 x 2 positions) or
            global (the mean over all positions).
        activation: relu, leaky_relu, abs, erf, gelu, sin or cos.
        layer_norm: Whether each activation follows a normalisation over channels.

    Raises:
        ValueError: A size is below 1 or missing, a name is unknown, ``layer_norm`` is no bool, there are no stages or
            too many, or the image is too small for the readout.
        ImportError: neural-tangents is not installed, or has another version.
    """
    shape, outputs = _sizes_of(input_shape, output_size)
    stages = check_blocks(blocks, STAGES)
    small = [-(-side // 2 ** (len(stages) - 1)) for side in shape[:2]]
    _check(small, {"window": window}, readout, activation)
    flag("layer_norm", layer_norm)

    def block(width: int, stride: int) -> StaxNetwork:
        before = [_activation(activation, layer_norm) for _ in range(2)]
        branch = [*before[0], _conv(width, window, stride), *before[1], _conv(width, window)]
        return _sum(branch, None if stride == 1 else _conv(width, 1, stride))

    def build(width: int) -> list[StaxNetwork]:
        strides = [2 if stage and not i else 1 for stage, count in enumerate(stages) for i in range(count)]
        inside = [_conv(width, window), *(block(width, stride) for stride in strides)]
        return [*inside, *_activation(activation, layer_norm), *_readout(readout, outputs)]

    counts = "-".join(map(str, stages))
    name = _named("ntk_resnet", shape, f"blocks {counts}", readout, activation, *(["layer norm"] if layer_norm else []))
    return _model(build, shape, width, name)


@ntk_network(
    {"width": 4096, "depth": MOST_LAYERS, "patch": 1000, "readout": None, "activation": None},
    ("hron2020", "novak2020"),
    learning_rates={SQUARED_ERROR: 0.1, CROSS_ENTROPY: 0.1},
)
def ntk_transformer(
    input_shape: Sequence[int] | Sized,
    output_size: int | None = None,
    width: int = 64,
    depth: int = 1,
    patch: int = 2,
    readout: str = "global",
    activation: str = "relu",
) -> Model:
    """Builds a transformer of image patches in the NTK parameterization, with the kernels of its infinite width.

    A block is ``h + attention(norm(h))``, then ``h + dense(activation(dense(norm(h))))``, with layer normalisation and
    one head of self-attention whose keys are its queries, scaled by 1 / width (Hron et al., 2020): attention with
    separate keys, scaled by the root of the width, has no known kernel. There are no positional encodings; patches are
    embedded linearly, and a layer normalisation precedes the linear readout.

    Args:
        input_shape: (height, width, channels), or a ``Dataset``.
        output_size: Number of outputs; None with a ``Dataset``.
        width: Size of the embedding of a patch.
        depth: Number of blocks.
        patch: Side of a patch, which divides height and width of an image.
        readout: How the last layer reads the patches: flatten, average or global, as for ``ntk_cnn``.
        activation: relu, leaky_relu, abs, erf, gelu, sin or cos.

    Raises:
        ValueError: A size is below 1 or missing, a name is unknown, or patches do not divide the image or are too few
            for the readout.
        ImportError: neural-tangents is not installed, or has another version.
    """
    shape, outputs = _sizes_of(input_shape, output_size)
    whole("patch", patch)
    if shape[0] % patch or shape[1] % patch:
        raise ValueError(f"patch: got {patch}, must divide height and width of the image, {shape[0]} and {shape[1]}")
    _check([side // patch for side in shape[:2]], {"depth": depth}, readout, activation)

    def block(width: int) -> list[StaxNetwork]:
        layers = stax()
        attention = layers.GlobalSelfAttention(width, width, width, 1, True, W_STD, 1.0, W_STD, 1.0, B_STD)
        dense = [_dense(width), *_activation(activation, False), _dense(width)]
        return [_sum([layers.LayerNorm(), attention]), _sum([layers.LayerNorm(), *dense])]

    def build(width: int) -> list[StaxNetwork]:
        patches = stax().Conv(width, (patch, patch), (patch, patch), "VALID", W_std=W_STD, b_std=B_STD)
        inside = [patches, *(layer for _ in range(depth) for layer in block(width))]
        return [*inside, stax().LayerNorm(), *_readout(readout, outputs)]

    name = _named("ntk_transformer", shape, f"depth {depth}", f"patch {patch}", readout, activation)
    return _model(build, shape, width, name)
