"""CIFAR-10 and CIFAR-100, as published, or images of CIFAR-10 in an archive of the user's.

The data folder has the published archive of the binary version, or the folder that it unpacks to. For CIFAR-10 it can
also have a file ``cifar10*.npz`` of ``train_images`` [n, 32, 32, 3] uint8 and ``train_labels`` [n], and optionally the
same for ``test``. If there are no test images, the last fifth of the images is the test set.
"""

from __future__ import annotations

import functools
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedtangent._src import checks
from fedtangent._src.data import files
from fedtangent._src.data.dataset import IMAGE, Dataset
from fedtangent._src.data.files import content, reading
from fedtangent._src.data.published import Arrays, Published, contents, files_of
from fedtangent._src.data.stored import Found, StoredImageOptions, dataset, entry_of, obtain

SIZE = (32, 32, 3)
PIXELS = 32 * 32 * 3  # bytes behind the labels of a record: all of red, then green, then blue, each row after row
FOLDERS = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}  # inside the published archive
FILES = {
    "cifar10": {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]},
    "cifar100": {"train": ["train.bin"], "test": ["test.bin"]},
}
RECORDS = {"cifar10": 10_000, "cifar100": 50_000}  # of a training file; any test file has 10,000
LABELS = {"cifar10": 1, "cifar100": 2}  # bytes before the pixels; the last one is the label (fine, of CIFAR-100)


def _load(published: Published, options: StoredImageOptions, data_dir: Path | None, seed: int) -> Dataset:
    """Loads colour images [n, 32, 32, 3] in [0, 1] in the order of the files; CIFAR-100 with its 100 fine labels.

    The options may flatten and standardise them. ``seed`` has no effect.
    """
    name = published.name
    instead = f"folder {FOLDERS[name]}" + (", nor cifar10*.npz" if name == "cifar10" else "")
    stored = obtain(published, options, data_dir, functools.partial(_otherwise, name), instead)
    return dataset(published, stored, options, SIZE)


def _otherwise(name: str, directory: Path) -> Found | None:
    for place in (directory / name, directory):
        folder = place / FOLDERS[name]
        if folder.is_dir():
            contents = {file: content(name, folder / file) for group in FILES[name].values() for file in group}
            return Found(_arrays(name, folder, contents), place)
    path = files.find(directory, name) if name == "cifar10" else None
    return None if path is None else Found(_part(name, path), path.parent)


def _part(name: str, path: Path) -> Arrays:
    """Reads both splits from the user's archive at ``path``; without test images, the last fifth is the test set."""
    arrays = files.read(name, path, ("train_images", "train_labels"))
    x, y = files.images(name, path, arrays, "train", SIZE)
    count = len(y) if "test_images" in arrays else len(y) - len(y) // 5
    test = files.images(name, path, arrays, "test", SIZE) if "test_images" in arrays else (x[count:], y[count:])
    return {"x_train": x[:count], "y_train": y[:count], "x_test": test[0], "y_test": test[1]}


def _read(published: Published, paths: Mapping[str, Path]) -> Arrays:
    """Reads the images and labels to train and to test from the published archive."""
    name, path = published.name, paths["archive"]
    raw = contents(published, "archive", path)
    with reading(name, path), tarfile.open(fileobj=io.BytesIO(raw), mode="r:gz") as packed:
        names = [file for files in FILES[name].values() for file in files]
        members = {file: packed.extractfile(f"{FOLDERS[name]}/{file}") for file in names}
        files = {file: member.read() for file, member in members.items() if member is not None}
    return _arrays(name, path, files)


def _arrays(name: str, path: Path, files: Mapping[str, bytes]) -> Arrays:
    """Decodes the contents of CIFAR's binary files into arrays of both splits.

    The arrays are images uint8 [n, 32, 32, 3] and labels uint8 [n]. ``files`` has the bytes of each file by its name;
    ``name``, "cifar10" or "cifar100", decides the format, and ``path`` is the archive or folder, for error messages.
    """
    arrays: Arrays = {}
    for split, names in FILES[name].items():
        parts = [_parsed(name, path / file, files[file], split) for file in names]
        arrays[f"x_{split}"], arrays[f"y_{split}"] = map(np.concatenate, zip(*parts, strict=True))
    return arrays


def _parsed(name: str, path: Path, content: bytes, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Decodes the images and labels in ``content``, the bytes of one binary file of CIFAR's split ``split``.

    ``name``, "cifar10" or "cifar100", decides the format; ``path`` names the file in error messages. Raises
    ``ValueError`` if the file has another size or a label is out of range.
    """
    record = LABELS[name] + PIXELS
    count = RECORDS[name] if split == "train" else RECORDS["cifar10"]
    if len(content) != count * record:
        raise ValueError(
            f"{name}: got {len(content)} bytes in {path}, must be {count * record}: {count} records of {record}"
        )
    records = np.frombuffer(content, np.uint8).reshape(count, record)
    labels = checks.class_labels(f"{name}: labels", records[:, LABELS[name] - 1], 10 if name == "cifar10" else 100)
    return records[:, LABELS[name] :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


def _published(name: str, num_classes: int, things: str) -> Published:
    return Published(
        name=name,
        url="https://www.cs.toronto.edu/~kriz/",
        files=files_of(name),
        read=_read,
        example=(("x", (SIZE, "uint8")), ("y", ((), "uint8"))),
        num_classes=num_classes,
        description=f"photographs of {things}, 32 x 32 in colour",
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        licence="none stated (Krizhevsky, 2009)",
        paper="krizhevsky2009",
    )


CIFAR10 = _published("cifar10", 10, "ten things")
CIFAR100 = _published("cifar100", 100, "a hundred things")

ENTRIES = tuple(
    entry_of(published, functools.partial(_load, published), StoredImageOptions, kind=IMAGE)
    for published in (CIFAR10, CIFAR100)
)
