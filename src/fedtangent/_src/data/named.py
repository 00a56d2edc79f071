"""Finds and loads a data set by its name, or by the path of a user's own file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedtangent._src.data import own
from fedtangent._src.data.dataset import Dataset, DatasetEntry
from fedtangent._src.entries import choose, given_options


def chosen(name: str, input_kind: str | None = None, target_kind: str | None = None) -> DatasetEntry:
    """Returns the entry of a data set with a given name, or of a user's own file.

    Args:
        name: Name of a data set, or path of an ``.npz`` file.
        input_kind: Option of a user's file: "image", "tokens" or "vector"; None to find out from its arrays.
        target_kind: Option of a user's file: "classes" or "numbers"; None to find out from its arrays.

    Raises:
        ValueError: There is no such data set (the message lists the names), or the file cannot be read or its arrays
            cannot be of the chosen kinds.
    """
    is_own = str(name).endswith(own.SUFFIX)
    entry: DatasetEntry = own.entry(name, input_kind, target_kind) if is_own else choose("datasets", name)
    return entry


def load(name: str, data_dir: str | os.PathLike[str] | None = None, seed: int = 0, **options: Any) -> Dataset:
    """Loads a data set by name (``fedtangent list datasets``), or a user's own ``.npz`` file.

    A user's file holds ``x`` and ``y`` and optionally ``users``, ``x_test``, ``y_test`` and ``users_test``, in the
    forms that ``data.own`` lists. A line on standard error says, once, how the file is read.

    Args:
        name: Name of a data set, or path of an ``.npz`` file.
        data_dir: Folder with original files, for data sets that consist of files; by default $FEDTANGENT_DATA.
        seed: Seed of generated data, and of the split of ``digits`` and of a file without a test set. Other data sets
            have their published split.
        **options: Options of the data set's entry, such as ``num_train`` and ``flatten`` of images.

    Raises:
        ValueError: The name or an option is unknown or out of range, or files are missing, altered or corrupted.

    Example, handwritten digits, which come with the package:

        >>> import fedtangent as ft
        >>> digits = ft.data.load("digits", num_train=200)
        >>> digits.x_train.shape, digits.y_train.shape
        ((200, 8, 8, 1), (200,))
    """
    entry = chosen(name, options.get("input_kind"), options.get("target_kind"))
    folder = None if data_dir is None else Path(data_dir)
    dataset: Dataset = entry.build(given_options(entry, options), folder, seed)
    return dataset
