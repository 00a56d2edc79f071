"""What a loaded data set is, and what its loaders share."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedtangent import checks


class SourceInfo(NamedTuple):
    """Where a data set comes from."""

    source: str  # who made it, or its home page
    licence: str
    read_from: str  # the folder that was read, or "embedded" or "generated"


class Dataset(NamedTuple):
    """A data set on the host, as NumPy arrays, in a fixed order."""

    name: str
    x_train: np.ndarray  # [n, ...] floating
    y_train: np.ndarray  # [n] int32 class labels, or [n, C] floating for regression
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int  # 0 for regression
    user_train: np.ndarray | None  # [n] int32 id of the client that an example belongs to by nature, if there is one
    info: SourceInfo


def as_float(dtype: Any) -> np.dtype[Any]:
    """``dtype`` as float32 or float64; raises ``ValueError`` for anything else."""
    try:
        wanted = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"dtype: got {dtype!r}, allowed are float32, float64") from error
    if wanted not in (np.float32, np.float64):
        raise ValueError(f"dtype: got {wanted}, allowed are float32, float64")
    return wanted


def first(name: str, count: int | None, *arrays: np.ndarray) -> list[np.ndarray]:
    """The first ``count`` rows of each array (all if None); raises ``ValueError`` unless there are so many."""
    if count is not None:
        count = checks.whole(name, count, 1, len(arrays[0]))
    return [a[:count] for a in arrays]


def classification_targets(labels: Any, num_classes: int, centred: bool = False) -> np.ndarray:
    """One-hot targets [n, C] float64 for training a classifier under squared loss.

    Args:
        labels: [n] integers in ``[0, num_classes)``.
        num_classes: C, at least 1.
        centred: subtract ``1 / C``, so that each row sums to zero, as a network of mean zero expects.

    Raises:
        ValueError: labels that are not a 1-D integer array, or out of range.
    """
    num_classes = checks.whole("num_classes", num_classes, 1)
    array = checks.class_labels("labels", labels, num_classes)
    targets = np.zeros((len(array), num_classes))
    targets[np.arange(len(array)), array] = 1.0
    return targets - 1.0 / num_classes if centred else targets
