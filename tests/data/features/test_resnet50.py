"""ResNet-50 against loops in plain NumPy, from He et al. (2016) and torchvision's conventions, with narrow weights."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedtangent._src.data.features import resnet50, resnet50_features

WIDTH, SIZE = 4, 45
RNG = np.random.default_rng(3)
IMAGES = RNG.integers(0, 256, (3, 32, 32, 3), np.uint8)


def names_and_shapes(width: int) -> dict[str, tuple[int, ...]]:
    """Counted out from the paper's table 1: four stages of 3, 4, 6 and 3 bottlenecks, four times as wide outside."""
    convolutions = {"conv1": ("bn1", (width, 3, 7, 7))}
    outside = width
    for stage, (blocks, inner) in enumerate(zip((3, 4, 6, 3), (width, 2 * width, 4 * width, 8 * width), strict=True)):
        for i in range(blocks):
            at = f"layer{stage + 1}.{i}."
            convolutions[at + "conv1"] = (at + "bn1", (inner, outside, 1, 1))
            convolutions[at + "conv2"] = (at + "bn2", (inner, inner, 3, 3))
            convolutions[at + "conv3"] = (at + "bn3", (4 * inner, inner, 1, 1))
            if i == 0:
                convolutions[at + "downsample.0"] = (at + "downsample.1", (4 * inner, outside, 1, 1))
            outside = 4 * inner
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (norm, shape) in convolutions.items():
        shapes[name + ".weight"] = shape
        shapes |= {f"{norm}.{k}": shape[:1] for k in ("weight", "bias", "running_mean", "running_var")}
    return shapes


def random_weights(width: int = WIDTH) -> dict[str, np.ndarray]:
    """Numbers with which the signal neither dies nor explodes; variances are as small as epsilon, so that it tells."""
    made: dict[str, Any] = {}
    for name, shape in names_and_shapes(width).items():
        if len(shape) == 4:
            made[name] = RNG.normal(size=shape) * np.sqrt(2 / np.prod(shape[1:])) * 5e-3
        elif name.endswith("running_var"):
            made[name] = RNG.uniform(0.5, 1.5, shape) * 1e-5
        elif name.endswith("running_mean"):
            made[name] = RNG.normal(size=shape) * 1e-3
        else:
            made[name] = RNG.normal(size=shape) * 0.3 + (name.endswith(".weight"))
    made |= {"fc.weight": RNG.normal(size=(5, 32 * width)), "fc.bias": RNG.normal(size=5)}
    return {k: v.astype(np.float32) for k, v in made.items()} | {"bn1.num_batches_tracked": np.array(7)}


def file_bytes(tensors: dict[str, np.ndarray]) -> bytes:
    """The format by its description, without the code under test."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, a in tensors.items():
        raw = a.astype("<i8" if a.dtype.kind == "i" else "<f4").tobytes()
        kind = "I64" if a.dtype.kind == "i" else "F32"
        header[name] = {"dtype": kind, "shape": list(a.shape), "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


WEIGHTS = random_weights()
CONTENT = file_bytes(WEIGHTS)
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(CONTENT)
    return tmp_path / "model.safetensors"


def reference(images: np.ndarray, size: int, **wrong: Any) -> np.ndarray:
    """In float64, one image after another; ``wrong`` puts a mistake in, or takes Pillow to resize."""
    p = {k: v.astype(np.float64) for k, v in WEIGHTS.items()}

    def convolve(x: np.ndarray, name: str, stride: int) -> np.ndarray:
        w = p[name + ".weight"]
        k = w.shape[-1]
        if wrong.get("padding") == "same":  # TensorFlow's: the one more at the end
            out = -(-x.shape[1] // stride)
            total = max((out - 1) * stride + k - x.shape[1], 0)
            pads = (total // 2, total - total // 2)
        else:
            pads = (k // 2, k // 2)
        x = np.pad(x, ((0, 0), pads, pads))
        out = (x.shape[1] - k) // stride + 1
        y = np.zeros((w.shape[0], out, out))
        for i in range(out):
            for j in range(out):
                patch = x[:, i * stride : i * stride + k, j * stride : j * stride + k]
                y[:, i, j] = w.reshape(len(w), -1) @ patch.ravel()
        return y

    def normalise(x: np.ndarray, name: str) -> np.ndarray:
        kinds = ("weight", "bias", "running_mean", "running_var")
        gain, bias, mean, var = (p[f"{name}.{kind}"][:, None, None] for kind in kinds)
        return gain * (x - mean) / np.sqrt(var + wrong.get("epsilon", 1e-5)) + bias

    def bottleneck(x: np.ndarray, at: str, stride: int) -> np.ndarray:
        first, second = (stride, 1) if wrong.get("stride") == "first" else (1, stride)  # first: as published in 2015
        y = np.maximum(normalise(convolve(x, at + "conv1", first), at + "bn1"), 0)
        y = np.maximum(normalise(convolve(y, at + "conv2", second), at + "bn2"), 0)
        y = normalise(convolve(y, at + "conv3", 1), at + "bn3")
        if at + "downsample.0.weight" in p:
            x = normalise(convolve(x, at + "downsample.0", stride), at + "downsample.1")
        return np.maximum(x + y, 0)

    def resized(image: np.ndarray) -> np.ndarray:
        if wrong.get("resize") == "pillow":
            colours = [Image.fromarray(image[..., c].astype(np.float32)) for c in range(3)]
            enlarged = [np.asarray(c.resize((size, size), Image.Resampling.BILINEAR)) for c in colours]
            return np.stack(enlarged, axis=-1).astype(np.float64)
        out = np.zeros((size, size, 3))
        for i in range(size):
            for j in range(size):
                at = []
                for k, length in ((i, image.shape[0]), (j, image.shape[1])):
                    centre = (k + 0.5) * length / size - 0.5
                    if wrong.get("resize") == "corners":
                        centre = k * (length - 1) / (size - 1)
                    centre = min(max(centre, 0.0), length - 1.0)
                    low = min(int(centre), length - 2)
                    at.append((low, centre - low))
                (r, a), (c, b) = at
                out[i, j] = (1 - a) * ((1 - b) * image[r, c] + b * image[r, c + 1])
                out[i, j] += a * ((1 - b) * image[r + 1, c] + b * image[r + 1, c + 1])
        return out

    def pool(x: np.ndarray) -> np.ndarray:
        x = np.pad(x, ((0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
        out = (x.shape[1] - 3) // 2 + 1
        rows = [[x[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max((1, 2)) for j in range(out)] for i in range(out)]
        return np.array(rows).transpose(2, 0, 1)

    found = []
    for image in images:
        x = (resized(image / 255) - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
        if wrong.get("colours") == "reversed":
            x = x[..., ::-1]
        x = pool(np.maximum(normalise(convolve(x.transpose(2, 0, 1), "conv1", 2), "bn1"), 0))
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for i in range(blocks):
                x = bottleneck(x, f"layer{stage + 1}.{i}.", 2 if i == 0 and stage else 1)
        found.append(x.mean((1, 2)))
    return np.array(found)


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


TOLERANCE = 1e-5  # of float32 through 53 layers
WRONG: list[dict[str, Any]] = [
    {"stride": "first"},
    {"epsilon": 1.001e-5},
    {"epsilon": 0.0},
    {"padding": "same"},
    {"resize": "corners"},
    {"colours": "reversed"},
]


def test_the_network_is_that_of_the_paper(path: Path) -> None:
    found = resnet50_features(IMAGES, path, DIGEST, SIZE)
    assert found.values.shape == (3, 32 * WIDTH) and found.values.dtype == np.float32 and DIGEST in found.made_by
    expected = reference(IMAGES, SIZE)
    assert np.abs(expected).max() > 0.1 and np.std(expected, axis=0).max() > 0.1
    assert error(found.values, expected) < TOLERANCE
    for wrong in WRONG:
        assert error(found.values, reference(IMAGES, SIZE, **wrong)) > 100 * TOLERANCE, wrong
    floating = resnet50_features((IMAGES / 255).astype(np.float32), path, DIGEST, SIZE)
    assert error(floating.values, found.values) < 1e-6


def test_the_published_network_has_the_published_number_of_parameters() -> None:
    trained = [shape for name, shape in resnet50.shapes().items() if "running" not in name]
    last = 2048 * 1000 + 1000
    assert sum(int(np.prod(shape)) for shape in trained) + last == 25_557_032  # as torchvision and timm state
    assert resnet50.shapes() == names_and_shapes(64)
    numbers = sum(int(np.prod(shape)) for shape in resnet50.shapes().values()) + last
    assert 0 < 102_469_840 - 4 * numbers < 40_000  # the published file: the rest is its header


@pytest.mark.parametrize("shape", [(20, 31), pytest.param((32, 32), marks=pytest.mark.slow), (60, 41)])
def test_images_of_any_shape_are_resized_as_pillow_does(path: Path, shape: tuple[int, int]) -> None:
    """What the weights were trained with, but for its rounding: smooth where images become smaller.

    By day of images that all become larger, and of ones that become smaller.
    """
    images = RNG.random((2, *shape, 3)).astype(np.float32)
    found = resnet50_features(images, path, DIGEST, 40).values
    assert error(found, reference(images * 255.0, 40, resize="pillow")) < TOLERANCE
    plain = error(found, reference(images * 255.0, 40))
    assert plain > 100 * TOLERANCE if max(shape) > 40 else plain < TOLERANCE


def changed(tensors: dict[str, np.ndarray], path: Path) -> str:
    content = file_bytes(tensors)
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def test_files_that_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weights: got .*nowhere, must be a file, such as the one at https://hugg"):
        resnet50_features(IMAGES, tmp_path / "nowhere")
    with pytest.raises(ValueError, match=rf"weights: got .*model.* with sha256 {DIGEST}, must have sha256 5d061a3c"):
        resnet50_features(IMAGES, path)
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ValueError, match=rf"bytes\) with sha256 .*, must have sha256 {DIGEST}"):
        resnet50_features(IMAGES, path, DIGEST)
    name = "layer3.5.conv2.weight"
    digest = changed({k: v for k, v in WEIGHTS.items() if k != name}, path)
    with pytest.raises(ValueError, match=rf"weights: got none as {name} in .*, must be floating \(16, 16, 3, 3\)"):
        resnet50_features(IMAGES, path, digest)
    digest = changed(WEIGHTS | {name: WEIGHTS[name][:, 1:]}, path)
    with pytest.raises(ValueError, match=rf"got float32 \(16, 15, 3, 3\) as {name} in .*, must be floating \(16, 16,"):
        resnet50_features(IMAGES, path, digest)
    digest = changed({"fc.weight": WEIGHTS["fc.weight"]}, path)
    with pytest.raises(ValueError, match=r"got none as conv1.weight in .*, must be floating \(64, 3, 7, 7\)"):
        resnet50_features(IMAGES, path, digest)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it promises a header of 0 bytes, but has 0 bytes in all"),
        (struct.pack("<Q", 10**12) + b"{}", "it promises a header of 1000000000000 bytes, but has 10 bytes in all"),
        (struct.pack("<Q", 2) + b"[]", ""),
        (struct.pack("<Q", 2) + b"{,", ""),
        (file_bytes({"a": np.ones((2, 3))})[:-4], r"F32 tensor of shape \[2, 3\] at bytes 0 to 24 of the 20"),
        (file_bytes({"a": np.ones((2, 3))}) + b"....", "its header does not describe all of its"),
        (file_bytes({"a": np.ones(2)}).replace(b"[2]", b"[3]"), r"F32 tensor of shape \[3\] at bytes 0 to 8 of the 8"),
        (
            file_bytes({"a": np.ones(2)}).replace(b"F32", b"F31"),
            "a tensor of dtype F31, allowed are F32, F64, F16, I64",
        ),
        (file_bytes({"a": np.ones(2)}).replace(b"dtype", b"dtipe"), "unexpected keyword argument 'dtipe'"),
        (file_bytes({"a": np.ones(1)}).replace(b"[1]", b"1.5"), ""),
    ],
)
def test_files_that_are_no_safetensors(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=f"weights: .*file cannot be read: .*{message}"):
        resnet50.read_weights(tmp_path / "file", hashlib.sha256(content).hexdigest())


def test_tensors_are_read_in_their_own_dtype(tmp_path: Path) -> None:
    held = {"a": RNG.normal(size=(2, 3)).astype(np.float32), "b": np.array(-7), "c": np.zeros((0, 4), np.float32)}
    content = file_bytes(held)
    (tmp_path / "file").write_bytes(content)
    found = resnet50.read_weights(tmp_path / "file", hashlib.sha256(content).hexdigest())
    assert list(found) == ["a", "b", "c"]
    for name, array in held.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: resnet50_features(IMAGES, p, DIGEST, 31), "size: got 31, must be a whole number of at least 32"),
        (lambda p: resnet50_features(IMAGES[..., :1], p, DIGEST), "images: got 1 channels, must be 3: red, green and"),
        (lambda p: resnet50_features(IMAGES[0], p, DIGEST), r"images: got shape \(32, 32, 3\), dtype uint8, must be"),
        (
            lambda p: resnet50_features(IMAGES.astype(int), p, DIGEST),
            "images: got .* int64, must be .*, uint8 or float",
        ),
        (
            lambda p: resnet50_features(IMAGES * 1.0, p, DIGEST),
            "images: got values from 0 to 255, must be within 0 and 1",
        ),
    ],
)
def test_mistakes(path: Path, call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(path)
