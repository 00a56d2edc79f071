"""CIFAR-10, or a part of it."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np

from fedtangent import checks
from fedtangent.data import archive, cache
from fedtangent.data.dataset import IMAGE, Dataset, DatasetEntry, ImageOptions, SourceInfo, first, images

SIZE = (32, 32, 3)
BINARY, PACKED = (
    "cifar-10-batches-bin",
    "cifar-10-binary.tar.gz",
)  # the original binary version: its folder, its archive
PACKED_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # as published at https://www.cs.toronto.edu/~kriz/cifar.html
FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
RECORDS = 10_000  # of each file
RECORD = 1 + 32 * 32 * 3  # bytes: a label, then 32 x 32 of red, of green, of blue, row after row


def _load(options: ImageOptions, data_dir: Path | None, seed: int) -> Dataset:
    """Colour images [n, 32, 32, 3] in [0, 1].

    They are read from the original binary version where it is in the data folder, in the order of its files: the
    folder ``cifar-10-batches-bin``, or ``cifar-10-binary.tar.gz``, whose published md5 is checked. Otherwise from an
    archive ``cifar10*.npz`` of ``train_images`` [n, 32, 32, 3] uint8 and ``train_labels`` [n], and perhaps the same
    for ``test``; without, the last fifth of the training images is the test set.
    """
    dtype = checks.dtype(options.dtype, "float32", "float64")
    found = _original(data_dir) or archive.read(
        "cifar10", "cifar10", SIZE, ("train_images", "train_labels"), data_dir, f"{BINARY}, {PACKED} or "
    )
    train = found.pair("train")
    if "test_images" in found.held:
        test = found.pair("test")
    else:
        kept = len(train[1]) - len(train[1]) // 5
        train, test = (train[0][:kept], train[1][:kept]), (train[0][kept:], train[1][kept:])
    parts: dict[str, np.ndarray] = {}
    for split, (x, y), count in (("train", train, options.num_train), ("test", test, options.num_test)):
        x, y = first(f"num_{split}", count, x, checks.class_labels("labels", y, 10))
        x, kind = images(x, options.flatten)
        parts |= {f"x_{split}": (x / 255).astype(dtype), f"y_{split}": y.astype(np.int32)}
    info = SourceInfo("CIFAR-10 (Krizhevsky, 2009)", "none stated", str(found.path.parent))
    return Dataset(name="cifar10", num_classes=10, user_train=None, info=info, kind=kind, **parts)


def _original(data_dir: Path | None) -> archive.Archive | None:
    """The six files of the binary version, unpacked or packed, in the data folder or its folder ``cifar10``."""
    directory = cache.given_directory(data_dir)
    places = [] if directory is None else [directory / "cifar10", directory]
    found = [place / name for name in (BINARY, PACKED) for place in places if (place / name).exists()]
    if not found:
        return None
    path = found[0]
    try:
        contents = (
            _unpacked(path)
            if path.name == PACKED
            else {name: (path / name).read_bytes() for names in FILES.values() for name in names}
        )
    except (OSError, EOFError, KeyError, tarfile.TarError) as error:
        raise ValueError(f"cifar10: {path} cannot be read: {error}") from error
    held = {}
    for split, names in FILES.items():
        pairs = [_parsed(path / name, contents[name]) for name in names]
        for kind, arrays in zip(("images", "labels"), zip(*pairs, strict=True), strict=True):
            held[f"{split}_{kind}"] = np.concatenate(arrays)
    return archive.Archive("cifar10", path, held, SIZE)


def _unpacked(path: Path) -> dict[str, bytes]:
    """The files of the published archive, by name."""
    raw = path.read_bytes()
    actual = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    if actual != PACKED_MD5:
        raise ValueError(f"cifar10: {path} is not the published file: its md5 is {actual}, expected {PACKED_MD5}")
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:gz") as packed:
        files = {name: packed.extractfile(f"{BINARY}/{name}") for names in FILES.values() for name in names}
        return {name: file.read() for name, file in files.items() if file is not None}


def _parsed(path: Path, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 32, 32, 3] uint8 and labels [n] of one file."""
    if len(content) != RECORDS * RECORD:
        raise ValueError(
            f"cifar10: got {len(content)} bytes in {path}, must be {RECORDS * RECORD}: {RECORDS} records of {RECORD}"
        )
    records = np.frombuffer(content, np.uint8).reshape(RECORDS, RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0]


ENTRIES = (DatasetEntry("cifar10", "photographs of ten things, 32 x 32 in colour", _load, ImageOptions, kind=IMAGE),)
