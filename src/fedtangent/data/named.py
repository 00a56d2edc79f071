"""Data sets by name, or by the name of a user's own file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedtangent.data import own
from fedtangent.data.dataset import Dataset, DatasetEntry
from fedtangent.entries import choose, given_options


def chosen(name: str) -> DatasetEntry:
    """The entry of the data set ``name``, or of a file of one's own; raises ``ValueError`` with the allowed names."""
    found: DatasetEntry = own.entry(name) if str(name).endswith(own.SUFFIX) else choose("datasets", name)
    return found


def load(name: str, data_dir: str | os.PathLike[str] | None = None, seed: int = 0, **options: Any) -> Dataset:
    """Load a data set by name (``fedtangent list datasets``), or a user's own ``.npz`` file.

    Such a file holds ``x`` and ``y`` and, where there are, ``users``, ``x_test``, ``y_test`` and ``users_test``:
    images, vectors or tokens with classes or numbers, as their shapes and dtypes say (``data.own``).

    Args:
        data_dir: folder with original files, for the data sets that are made of files; by default $FEDTANGENT_DATA.
        seed: for what is random: the generated data, the split of ``digits`` and of a file without a test set. Other
            data sets have their own split.
        options: those of the data set's entry, such as ``num_train`` and ``flatten`` of images.

    Raises ``ValueError`` for an unknown name or option, one out of range, and missing, altered or corrupted files.

    Example, handwritten digits, which come with the package:

        >>> import fedtangent as ft
        >>> digits = ft.data.load("digits", num_train=200)
        >>> digits.x_train.shape, digits.y_train.shape
        ((200, 8, 8, 1), (200,))
    """
    entry = chosen(name)
    folder = None if data_dir is None else Path(data_dir)
    dataset: Dataset = entry.build(given_options(entry, options), folder, seed)
    return dataset
