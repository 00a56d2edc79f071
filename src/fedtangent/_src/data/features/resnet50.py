"""Features of images by ResNet-50 trained on ImageNet; the user provides the file of weights."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedtangent._src import checks, storage
from fedtangent._src.data import files
from fedtangent._src.data.features.convolution import Features, Tick, checked_images, in_blocks
from fedtangent._src.types import Array, ArrayLike

# torchvision's weights IMAGENET1K_V1 (BSD-3-Clause) as timm publishes them, 102,469,840 bytes.
URL = "https://huggingface.co/timm/resnet50.tv_in1k/resolve/main/model.safetensors"
SHA256 = "5d061a3c593d795bfe682d9b152bafbcf550579873492def3515b46db1189888"

DEPTHS = (3, 4, 6, 3)  # blocks of the four layers
EXPANSION = 4  # outputs of a block, for each of its inner channels
EPSILON = 1e-5  # of batch normalisation
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, as the weights were trained
LAYOUT, PRECISION = ("NHWC", "OIHW", "NHWC"), lax.Precision.HIGHEST
VERSION = 1  # of the computation: another one where its results change
CODES = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I64": "<i8"}  # NumPy's dtypes, little-endian
DTYPES = {name: np.dtype(code) for name, code in CODES.items()}


def resnet50_features(
    images: ArrayLike,
    weights: Path | str,
    sha256: str = SHA256,
    size: int = 224,
    folder: Path | str | None = None,
    tick: Tick = lambda done, total: None,
) -> Features:
    """Computes ResNet-50 features [n, 2048] float32 of images: the inputs of the network's last linear layer.

    The network is torchvision's ResNet-50 (He et al., 2016): a block has its stride in its 3 x 3 convolution; batch
    normalisation uses the stored mean and variance, epsilon 1e-5. Images are resized to ``size`` x ``size`` bilinearly,
    as by Pillow but without its rounding, and each colour is standardised by ImageNet's mean and standard deviation.
    The whole image is used, whereas torchvision evaluates these weights on the middle 224 of 256 pixels.

    Args:
        images: [n, height, width, 3], uint8 or floating within [0, 1].
        weights: A safetensors file with torchvision's names (``conv1.weight``, ``layer1.0.bn1.running_mean``, ..), such
            as the one at ``resnet50.URL``.
        sha256: Checksum of that file, by default of the one at ``resnet50.URL``; ``made_by`` of the result contains it.
        size: Width and height of the network's input, at least 32.
        folder: Folder in which features are stored and found again, 1000 images in each file; None stores nothing.
        tick: Called with the number of finished images and the number of all images.

    Raises:
        ValueError: Images have another form, the size is out of range, the folder cannot be written to, or the file of
            weights is missing, has another checksum, is cut short, or lacks a tensor or has it in another shape.
    """
    size = checks.whole("size", size, 32)
    x = checked_images(images)
    if x.shape[-1] != 3:
        raise ValueError(f"images: got {x.shape[-1]} channels, must be 3: red, green and blue")
    path = storage.expanded("weights", weights)
    if not path.is_file():
        raise ValueError(f"weights: got {path}, must be a file, such as the one at {URL}")
    network = {name: jnp.asarray(value) for name, value in _checked(path, read_weights(path, sha256)).items()}
    made_by = f"ResNet-50 features at {size} x {size}, version {VERSION}, weights of sha256 {sha256}"
    return in_blocks(x, made_by, functools.partial(_forward, network, size), folder, tick)


def shapes(width: int = 64) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of ResNet-50's weights by name, without the last layer; ``conv1`` has ``width`` channels."""
    by_name: dict[str, tuple[int, ...]] = {}

    def layer(convolution: str, normalisation: str, shape: tuple[int, ...]) -> None:
        by_name[f"{convolution}.weight"] = shape
        for kind in ("weight", "bias", "running_mean", "running_var"):
            by_name[f"{normalisation}.{kind}"] = shape[:1]

    layer("conv1", "bn1", (width, 3, 7, 7))
    before = width
    for stage, depth in enumerate(DEPTHS):
        inner = width * 2**stage
        for block in range(depth):
            name = f"layer{stage + 1}.{block}"
            layer(f"{name}.conv1", f"{name}.bn1", (inner, before, 1, 1))
            layer(f"{name}.conv2", f"{name}.bn2", (inner, inner, 3, 3))
            layer(f"{name}.conv3", f"{name}.bn3", (EXPANSION * inner, inner, 1, 1))
            if block == 0:
                layer(f"{name}.downsample.0", f"{name}.downsample.1", (EXPANSION * inner, before, 1, 1))
            before = EXPANSION * inner
    return by_name


def read_weights(path: Path | str, sha256: str) -> dict[str, np.ndarray]:
    """Reads the tensors of a safetensors file by name.

    The format (github.com/huggingface/safetensors): 8 bytes with the length of the header, little-endian; the header,
    JSON of ``{name: {"dtype", "shape", "data_offsets": [first, beyond]}}`` and perhaps ``"__metadata__"``; then the
    numbers, little-endian, row-major, without a gap.

    Args:
        path: The file.
        sha256: Checksum that the file must have.

    Raises:
        ValueError: The file cannot be read, has another checksum, is cut short or too long, or has another format.
    """
    path = storage.expanded("weights", path)
    raw = files.content("weights", path)
    actual = storage.sha256(raw)
    if actual != sha256:
        raise ValueError(f"weights: got {path} ({len(raw)} bytes) with sha256 {actual}, must have sha256 {sha256}")
    start = 8 + int.from_bytes(raw[:8], "little")
    with files.reading("weights", path):
        if not 8 < start <= len(raw):
            raise ValueError(f"it promises a header of {start - 8} bytes, but has {len(raw)} bytes in all")
        header = json.loads(raw[8:start])
        header.pop("__metadata__", None)
        tensors = {name: _tensor(raw, start, **fields) for name, fields in header.items()}
        if start + sum(a.nbytes for a in tensors.values()) != len(raw):
            raise ValueError(f"its header does not describe all of its {len(raw)} bytes")
    return tensors


def _tensor(raw: bytes, start: int, dtype: str, shape: list[int], data_offsets: list[int]) -> np.ndarray:
    """Returns a tensor of a safetensors file ``raw`` as a view of its bytes; ``start`` is the end of the file's header.

    The other arguments are the tensor's fields in the header. Raises ``ValueError`` if they do not fit together.
    """
    if dtype not in DTYPES:
        raise ValueError(f"it has a tensor of dtype {dtype}, allowed are {', '.join(DTYPES)}")
    first, beyond = data_offsets
    count = math.prod(shape)
    if min([first, *shape]) < 0 or beyond - first != count * DTYPES[dtype].itemsize or start + beyond > len(raw):
        place = f"bytes {first} to {beyond} of the {len(raw) - start} after the header"
        raise ValueError(f"its header puts a {dtype} tensor of shape {shape} at {place}, where it does not fit")
    return np.frombuffer(raw, DTYPES[dtype], count, start + first).reshape(shape)


def _checked(path: Path, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns ResNet-50's weights as float32; raises ``ValueError`` if a tensor is missing or has another shape.

    ``tensors`` are those of the file at ``path``, by name. The number of channels of ``conv1.weight`` sets the width of
    all layers.
    """
    width = next((len(a) for name, a in tensors.items() if name == "conv1.weight" and a.ndim == 4), 64)
    for name, shape in shapes(width).items():
        if name not in tensors or tensors[name].shape != shape or tensors[name].dtype.kind != "f":
            got = f"{tensors[name].dtype} {tensors[name].shape}" if name in tensors else "none"
            must = f"must be floating {shape}, as in torchvision's ResNet-50"
            raise ValueError(f"weights: got {got} as {name} in {path}, {must}")
    return {name: tensors[name].astype(np.float32) for name in shapes(width)}


@functools.partial(jax.jit, static_argnums=1)
def _forward(network: dict[str, Array], size: int, images: Array) -> Array:
    """Computes ResNet-50 features of images [b, h, w, 3] within [0, 1], which are resized to ``size`` x ``size``.

    ``network`` has the weights by name. The result is [b, 2048]: 32 times the 64 channels of ``conv1``.
    """

    def normalised(x: Array, name: str) -> Array:
        gain, bias, mean, variance = (network[f"{name}.{k}"] for k in ("weight", "bias", "running_mean", "running_var"))
        scale = gain * lax.rsqrt(variance + EPSILON)
        return x * scale[None, None, None] + (bias - mean * scale)[None, None, None]

    def convolved(x: Array, name: str, stride: int = 1) -> Array:
        kernel = network[f"{name}.weight"]
        around = (kernel.shape[-1] // 2,) * 2
        strides, padding = (stride, stride), (around, around)
        return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=LAYOUT, precision=PRECISION)

    def block(x: Array, name: str, stride: int) -> Array:
        y = jax.nn.relu(normalised(convolved(x, f"{name}.conv1"), f"{name}.bn1"))
        y = jax.nn.relu(normalised(convolved(y, f"{name}.conv2", stride), f"{name}.bn2"))
        y = normalised(convolved(y, f"{name}.conv3"), f"{name}.bn3")
        if f"{name}.downsample.0.weight" in network:
            x = normalised(convolved(x, f"{name}.downsample.0", stride), f"{name}.downsample.1")
        return jax.nn.relu(x + y)

    x = jax.image.resize(images, (len(images), size, size, 3), "bilinear", precision=PRECISION)
    mean, deviation = (jnp.asarray(colours, x.dtype)[None, None, None] for colours in (MEAN, DEVIATION))
    x = jax.nn.relu(normalised(convolved((x - mean) / deviation, "conv1", 2), "bn1"))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))
    for stage, depth in enumerate(DEPTHS):
        for i in range(depth):
            x = block(x, f"layer{stage + 1}.{i}", 2 if stage > 0 and i == 0 else 1)
    return x.mean(axis=(1, 2))
