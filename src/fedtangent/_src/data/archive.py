"""``.npz`` archives in the user's data folder."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int32, Shaped

from fedtangent._src import checks
from fedtangent._src.data import files


def find(directory: Path, stem: str) -> Path | None:
    """Finds the first archive ``stem*.npz`` in the data folder or a subfolder ``stem*``; returns None without one.

    Args:
        directory: Data folder.
        stem: Beginning of the name of the archive.
    """
    patterns = f"{stem}.npz", f"{stem}[!0-9]*.npz"  # not cifar100 for cifar10
    folders = files.places(directory, stem)
    return next((path for folder in folders for name in patterns for path in sorted(folder.glob(name))), None)


def read(name: str, path: Path, needed: Sequence[str]) -> dict[str, np.ndarray]:
    """Reads the arrays of an archive.

    Args:
        name: Name of the data set in error messages.
        path: Path of the archive.
        needed: Names of the arrays that must be in it.

    Raises:
        ValueError: The archive cannot be read, or one of these arrays is missing.
    """
    arrays = files.arrays(name, path)
    require(name, path, arrays, needed)
    return arrays


def require(name: str, path: Path, present: Collection[str], needed: Sequence[str]) -> None:
    """Raises ``ValueError`` unless all names of ``needed`` are among ``present``, the names in the archive.

    Args:
        name: Name of the archive, for the error message.
        path: Path of the archive.
        present: Names in the archive.
        needed: Names that must be among them.
    """
    missing = [key for key in needed if key not in present]
    if missing:
        raise ValueError(f"{name}: {path} has no {', '.join(missing)}; it has {', '.join(present) or 'nothing'}")


def owners(name: str, offsets: Int[np.ndarray, "offsets"], count: int, least: int = 1) -> Int32[np.ndarray, "count"]:
    """Computes the user of each of ``count`` examples, [count] int32, from offsets of examples sorted by user.

    Args:
        name: Name of the offsets in error messages.
        offsets: Whole numbers [N + 1] from 0 to ``count``.
        count: Number of examples.
        least: Smallest number of examples of a user.

    Raises:
        ValueError: The offsets are not of this form, or rise by less than ``least``.
    """
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or len(offsets) < 2:
        raise ValueError(f"{name}: got {offsets.dtype} {offsets.shape}, must be whole numbers [N + 1], N >= 1")
    sizes: np.ndarray = np.diff(offsets.astype(np.int64))  # unsigned numbers would wrap around where they fall
    if offsets[0] != 0 or offsets[-1] != count:
        raise ValueError(f"{name}: got {offsets[0]} to {offsets[-1]}, must be from 0 to {count}, the examples")
    if (sizes < least).any():
        at = int(np.argmax(sizes < least))
        raise ValueError(f"{name}: got {offsets[at : at + 2].tolist()} for user {at}, must rise by at least {least}")
    return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)


def images(
    name: str, path: Path, arrays: dict[str, np.ndarray], split: str, size: tuple[int, ...]
) -> tuple[Shaped[np.ndarray, "n ..."], Shaped[np.ndarray, "n"]]:
    """Returns images uint8 [n, *size] and labels [n] of the split "train" or "test".

    Args:
        name: Name of the data set in error messages.
        path: Path of the archive, for error messages.
        arrays: Arrays of the archive.
        split: "train" or "test".
        size: Shape of an image.

    Raises:
        ValueError: Images or labels have another shape or type, or the split is empty.
    """
    x, y = arrays[f"{split}_images"], arrays.get(f"{split}_labels", np.zeros(0, int))
    if x.dtype != np.uint8 or x.shape[1:] != size or y.shape != x.shape[:1] or len(y) == 0:
        raise ValueError(
            f"{name}: got {x.dtype} {x.shape} and {y.shape} in {path}, {split} images and labels must be "
            f"uint8 [n, {', '.join(map(str, size))}] and [n]"
        )
    return x, checks.class_labels(f"{name}: labels", y)
