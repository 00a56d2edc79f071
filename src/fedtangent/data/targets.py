"""Class labels as regression targets."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedtangent.data import checks


def classification_targets(labels: Any, num_classes: int, centred: bool = False) -> np.ndarray:
    """One-hot targets [n, C] float64 for training a classifier under squared loss.

    Args:
        labels: [n] integers in ``[0, num_classes)``.
        num_classes: C, at least 1.
        centred: subtract ``1 / C``, so that each row sums to zero, as a network of mean zero expects.

    Raises:
        ValueError: labels that are not a 1-D integer array, or out of range.
    """
    num_classes = checks.integer("num_classes", num_classes, 1)
    array = checks.class_labels(labels, num_classes)
    targets = np.zeros((len(array), num_classes))
    targets[np.arange(len(array)), array] = 1.0
    return targets - 1.0 / num_classes if centred else targets
