"""An ``.npz`` archive of images in the user's data folder."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtangent import checks
from fedtangent.data import cache


class Archive(NamedTuple):
    """An archive that was found and read."""

    name: str  # of the data set
    path: Path
    held: dict[str, np.ndarray]
    size: tuple[int, ...]  # of an image

    def pair(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Images [n, *size] uint8 and labels [n] of ``"train"`` or ``"test"``; raises ``ValueError`` for others."""
        x, y = self.held[f"{split}_images"], self.held.get(f"{split}_labels", np.zeros(0, int))
        if x.dtype != np.uint8 or x.shape[1:] != self.size or y.shape != x.shape[:1] or len(y) == 0:
            raise ValueError(
                f"{self.name}: got {x.dtype} {x.shape} and {y.shape} in {self.path}, {split} images and labels must be "
                f"uint8 [n, {', '.join(map(str, self.size))}] and [n]"
            )
        return x, checks.class_labels("labels", y)

    def owners(self, split: str) -> np.ndarray:
        """Who made each example [n] int32, from the offsets [W + 1] of the users; raises ``ValueError``."""
        sizes = np.diff(self.held[f"{split}_offsets"])
        if sizes.sum() != len(self.held[f"{split}_labels"]) or (sizes < 0).any():
            raise ValueError(f"{self.name}: {split}_offsets of {self.path} do not divide the {split}ing images")
        return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)


def read(
    name: str, prefix: str, size: tuple[int, ...], needed: tuple[str, ...], data_dir: Path | None, instead: str = ""
) -> Archive:
    """The archive ``prefix*.npz`` in the data folder or a subfolder ``prefix*``.

    Raises ``ValueError`` for none; the error says that there might have been ``instead``, such as ``"files or "``.
    """
    directory = cache.given_directory(data_dir)
    if directory is None:
        raise ValueError(
            f"{name}: needs {instead}its archive {prefix}*.npz: name its folder by data_dir or FEDTANGENT_DATA"
        )
    places = (directory / name, directory, *sorted(p for p in directory.glob(f"{prefix}*") if p.is_dir()))
    found = [path for place in places for path in sorted(place.glob(f"{prefix}*.npz"))]
    if not found:
        raise ValueError(
            f"{name}: data directory {directory} has no {instead}{prefix}*.npz "
            f"(looked in it and in its folders {prefix}*)"
        )
    path = found[0]
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            held = {key: archive[key] for key in archive.files if key.startswith(("train_", "test_"))}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{name}: {path} cannot be read: {error}") from error
    missing = [key for key in needed if key not in held]
    if missing:
        raise ValueError(f"{name}: {path} has no {', '.join(missing)}; it has {', '.join(held)}")
    return Archive(name, path, held, size)
