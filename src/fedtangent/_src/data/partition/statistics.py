"""How unlike the clients of a partition are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from fedtangent._src import checks
from fedtangent._src.data.partition.given import validate
from fedtangent._src.types import ArrayLike, Partition

MAX_CELLS = 2**26  # of heterogeneity's table [N, C]: half a gigabyte


class Heterogeneity(NamedTuple):
    """Heterogeneity of the clients of a partition; means are over clients that hold examples."""

    label_distribution: Float64[np.ndarray, "N C"]  # share of each class among a client's examples (0 if it has none)
    total_variation: float  # mean over clients of 1/2 sum_c |share - share in all clients' examples together|
    commonest_share: float  # mean over clients of the share of the client's commonest label


def heterogeneity(partition: Partition, labels: ArrayLike) -> Heterogeneity:
    """Computes how much the label distributions of the clients differ.

    Args:
        partition: Division of the examples among N clients.
        labels: Class labels [n], from 0 to C - 1.

    Raises:
        ValueError: The partition is malformed or has no example, or labels are out of range, or so large that the table
            [N, C] would exceed 2**26 entries.
    """
    labels = checks.class_labels("labels", labels)
    validate(partition, len(labels))
    if len(partition.indices) == 0:
        raise ValueError("partition: got empty clients only, must hold at least one example")
    sizes, num_classes = partition.sizes, int(labels.max()) + 1
    if partition.num_clients * num_classes > MAX_CELLS:
        raise ValueError(
            f"labels: got {num_classes - 1} as the largest, must number the classes from 0: a table of "
            f"{partition.num_clients * num_classes} shares would be needed, at most {MAX_CELLS} are allowed"
        )
    owner = np.repeat(np.arange(partition.num_clients), sizes)
    cell = owner * num_classes + labels[partition.indices].astype(np.int64)
    counts = np.bincount(cell, minlength=partition.num_clients * num_classes).reshape(-1, num_classes)
    share = counts / np.maximum(sizes, 1)[:, None]
    occupied = share[sizes > 0]  # clients that hold examples
    overall = counts.sum(axis=0) / counts.sum()
    variation = float(np.abs(occupied - overall).sum(axis=1).mean() / 2)
    return Heterogeneity(share, variation, float(occupied.max(axis=1).mean()))
