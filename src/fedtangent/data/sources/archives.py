"""Image data sets read from one ``.npz`` archive in the user's data folder: digits by writer, and CIFAR-10."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fedtangent import checks
from fedtangent.data import cache
from fedtangent.data.dataset import Dataset, SourceInfo, as_float, first

Directory = str | os.PathLike[str]
SIZES = {"femnist_digits": (28, 28), "cifar10": (32, 32, 3)}
PREFIXES = {"femnist_digits": "femnist", "cifar10": "cifar10"}


def load_femnist_digits(
    data_dir: Directory | None = None,
    flatten: bool = True,
    num_train: int | None = None,
    num_test: int | None = None,
    dtype: Any = "float32",
) -> Dataset:
    """The digits of LEAF's FEMNIST, ink 1 on paper 0, with the writer of each training example in ``user_train``.

    Args:
        data_dir: folder that holds ``femnist*.npz``, itself or in a subfolder ``femnist*``; by default
            $FEDTANGENT_DATA. The archive has ``train_images`` [n, 28, 28] uint8 (255 is paper), ``train_labels`` [n]
            (those below 10 are digits), ``train_offsets`` [W + 1] (writer after writer), and the same for ``test``.
        flatten: x is [n, 784] rather than [n, 28, 28, 1].
        num_train, num_test: take the first so many digits only.
        dtype: of x, float32 or float64. Labels and writers are int32.

    Raises:
        ValueError: a missing or malformed archive, or an option out of range.
    """
    dtype, flatten = as_float(dtype), checks.flag("flatten", flatten)
    path = _find("femnist_digits", data_dir)
    held = _read(
        "femnist_digits", path, ("train_images", "train_labels", "train_offsets", "test_images", "test_labels")
    )
    parts: dict[str, np.ndarray] = {}
    writers = None
    for split, count in (("train", num_train), ("test", num_test)):
        x, y = _pair("femnist_digits", path, held, split)
        digits = y < 10
        owner = np.zeros(len(y), np.int32)
        if split == "train":
            sizes = np.diff(held["train_offsets"])
            if sizes.sum() != len(y) or (sizes < 0).any():
                raise ValueError(f"femnist_digits: train_offsets of {path} do not divide the {len(y)} training images")
            owner = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        x, y, owner = first(f"num_{split}", count, x[digits], y[digits], owner[digits])
        x = x.reshape(len(x), -1) if flatten else x[..., None]
        parts |= {f"x_{split}": (1 - x / 255).astype(dtype), f"y_{split}": y.astype(np.int32)}
        writers = owner if split == "train" else writers
    info = SourceInfo("LEAF FEMNIST (Caldas et al., 2018), from NIST SD 19", "BSD-2-Clause (LEAF)", str(path.parent))
    return Dataset(name="femnist_digits", num_classes=10, user_train=writers, info=info, **parts)


def load_cifar10(
    data_dir: Directory | None = None,
    flatten: bool = True,
    num_train: int | None = None,
    num_test: int | None = None,
    dtype: Any = "float32",
) -> Dataset:
    """CIFAR-10, or a part of it: colour images in [0, 1], flattened or [n, 32, 32, 3].

    Args:
        data_dir: folder that holds ``cifar10*.npz``, itself or in a subfolder ``cifar10*``; by default
            $FEDTANGENT_DATA. The archive has ``train_images`` [n, 32, 32, 3] uint8 and ``train_labels`` [n], and
            perhaps the same for ``test``; without, the last fifth of the training images is the test set.
        flatten: x is [n, 3072] rather than [n, 32, 32, 3].
        num_train, num_test: take the first so many examples only.
        dtype: of x, float32 or float64. Labels are int32.

    Raises:
        ValueError: a missing or malformed archive, or an option out of range.
    """
    dtype, flatten = as_float(dtype), checks.flag("flatten", flatten)
    path = _find("cifar10", data_dir)
    held = _read("cifar10", path, ("train_images", "train_labels"))
    train = _pair("cifar10", path, held, "train")
    if "test_images" in held:
        test = _pair("cifar10", path, held, "test")
    else:
        kept = len(train[1]) - len(train[1]) // 5
        train, test = (train[0][:kept], train[1][:kept]), (train[0][kept:], train[1][kept:])
    parts: dict[str, np.ndarray] = {}
    for split, (x, y), count in (("train", train, num_train), ("test", test, num_test)):
        x, y = first(f"num_{split}", count, x, checks.class_labels("labels", y, 10))
        x = x.reshape(len(x), -1) if flatten else x
        parts |= {f"x_{split}": (x / 255).astype(dtype), f"y_{split}": y.astype(np.int32)}
    info = SourceInfo("CIFAR-10 (Krizhevsky, 2009)", "none stated", str(path.parent))
    return Dataset(name="cifar10", num_classes=10, user_train=None, info=info, **parts)


def _find(name: str, data_dir: Directory | None) -> Path:
    directory = cache.given_directory(data_dir)
    if directory is None:
        raise ValueError(
            f"{name}: needs its archive {PREFIXES[name]}*.npz: name its folder by data_dir or FEDTANGENT_DATA"
        )
    own = PREFIXES[name]
    places = (directory / name, directory, *sorted(p for p in directory.glob(f"{own}*") if p.is_dir()))
    found = [path for place in places for path in sorted(place.glob(f"{own}*.npz"))]
    if not found:
        raise ValueError(
            f"{name}: data directory {directory} has no {own}*.npz (looked in it and in its folders {own}*)"
        )
    return found[0]


def _read(name: str, path: Path, needed: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The arrays of an archive; raises ``ValueError`` naming those that are missing."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            wanted = [k for k in archive.files if k.startswith(("train_", "test_"))]
            held = {k: archive[k] for k in wanted}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{name}: {path} cannot be read: {error}") from error
    missing = [key for key in needed if key not in held]
    if missing:
        raise ValueError(f"{name}: {path} has no {', '.join(missing)}; it has {', '.join(held)}")
    return held


def _pair(name: str, path: Path, held: dict[str, np.ndarray], split: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = held[f"{split}_images"], held.get(f"{split}_labels", np.zeros(0, int))
    if x.dtype != np.uint8 or x.shape[1:] != SIZES[name] or y.shape != x.shape[:1] or len(y) == 0:
        raise ValueError(
            f"{name}: {split} images and labels in {path} must be uint8 [n, {', '.join(map(str, SIZES[name]))}] and "
            f"[n]; got {x.dtype} {x.shape} and {y.shape}"
        )
    return x, checks.class_labels("labels", y)
