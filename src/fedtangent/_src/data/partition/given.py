"""Partitions by the users of a data set or from lists of examples; checks of partitions, and statistics of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float64, Shaped

from fedtangent._src import checks
from fedtangent._src.data.dataset import Dataset
from fedtangent._src.data.partition.drawn import assemble
from fedtangent._src.entries import Entry
from fedtangent._src.types import ArrayLike, Partition

Clients: TypeAlias = Partition | Mapping[Hashable, ArrayLike] | ArrayLike
"""The examples of each client: a ``Partition``, a sequence of index arrays, or a mapping from names to such arrays."""


def by_user(user_ids: ArrayLike, name: str = "user_ids") -> Partition:
    """Builds the partition with one client for each user (writer, speaker, device), in ascending order of their ids.

    Args:
        user_ids: User of each example [n], all whole numbers or all strings, such as a column of a pandas table.
        name: Name of the ids in error messages.

    Raises:
        ValueError: There are no ids, or an id is anything else, such as None or NaN: an example without a user.

    Example:

        >>> import fedtangent as ft
        >>> ft.partition.by_user(["eve", "ann", "eve"]).sizes.tolist()
        [1, 2]
    """
    ids = _array(user_ids)
    if not hasattr(user_ids, "dtype") and ids.ndim == 1 and ids.size:  # NumPy makes one type of all that is in a list
        listed = np.asarray(user_ids, object)
        has_floats = ids.dtype.kind == "f" and any(isinstance(user, float) for user in listed)
        ids = listed if ids.dtype.kind in "Uf" and not has_floats else ids
    if ids.dtype.kind == "O" and ids.ndim == 1:
        strange = [i for i, user in enumerate(ids) if not isinstance(user, str | int | np.integer)]
        if strange:
            raise ValueError(
                f"{name}: got {ids[strange[0]]!r} at position {strange[0]} ({len(strange)} such), must be a whole "
                "number or a string for every example"
            )
        if len({isinstance(user, str) for user in ids}) > 1:
            raise ValueError(f"{name}: got whole numbers and strings, must be of one kind: is 1 the same user as '1'?")
        packed = np.asarray(ids.tolist())
        ids = ids if packed.dtype.kind == "f" else packed  # numbers beyond 64 bits stay whole
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iuUSO":
        raise ValueError(
            f"{name}: got shape {ids.shape}, dtype {ids.dtype}, must be whole numbers or strings [n], n >= 1"
        )
    _, user, counts = np.unique(ids, return_inverse=True, return_counts=True)
    return assemble(np.split(np.argsort(user, kind="stable"), np.cumsum(counts)[:-1]))


def numbered(train: Shaped[np.ndarray, "n"], test: Shaped[np.ndarray, "m"]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers users from 0: the training users in ascending order of their ids, then users with test examples only.

    Args:
        train: User of each training example, whole numbers or strings.
        test: User of each test example.

    Returns:
        The number of each training and each test example's user, [n] and [m] int32.

    Raises:
        ValueError: One of the arrays holds strings and the other one numbers.
    """
    if (train.dtype.kind == "U") != (test.dtype.kind == "U"):
        raise ValueError(
            f"users_test: got {test.dtype}, must be of the kind of users, {train.dtype}: both strings or both numbers"
        )
    is_exact = np.result_type(train, test).kind != "f"  # int64 and uint64 have float64 in common
    both = np.concatenate([ids if is_exact else ids.astype(object) for ids in (train, test)])
    names, user = np.unique(both, return_inverse=True)
    trains = np.bincount(user[: len(train)], minlength=len(names)) > 0
    number = np.empty(len(names), np.int32)
    number[np.argsort(~trains, kind="stable")] = np.arange(len(names), dtype=np.int32)
    return number[user[: len(train)]], number[user[len(train) :]]


def of(clients: Clients, num_examples: int = checks.MAX_INDEX, name: str = "partition") -> Partition:
    """Builds a partition from the list of each client's examples, whose order is kept.

    Args:
        clients: A ``Partition``, a sequence of index arrays, or a mapping from each client's name to one, in the order
            of the clients. Clients may overlap, and may be empty.
        num_examples: Number of examples, which indices must lie below.
        name: Name of the clients in error messages.

    Raises:
        ValueError: ``clients`` is anything else, or an index is out of range.
    """
    if not isinstance(clients, Partition):
        clients = _of_lists(clients, name)
    validate(clients, num_examples, name=name)
    return Partition(np.asarray(clients.indices, np.int32), np.asarray(clients.offsets, np.int32))


def _array(value: object) -> np.ndarray:
    """Converts a value to an array; to an object array of shape () if NumPy cannot, as for rows of unequal lengths."""
    try:
        return np.asarray(value)
    except ValueError:
        scalar = np.empty((), object)
        scalar[()] = value
        return scalar


def consecutive(sizes: Sequence[int]) -> Partition:
    """Builds the partition in which client i holds the next ``sizes[i]`` examples, in the order of the data."""
    return Partition(np.arange(sum(sizes), dtype=np.int32), np.cumsum((0, *sizes)).astype(np.int32))


def _of_lists(clients: Mapping[Hashable, ArrayLike] | ArrayLike, name: str) -> Partition:
    by_client: Mapping[Hashable, ArrayLike] = clients if isinstance(clients, Mapping) else {}
    if isinstance(clients, Sequence | np.ndarray) and not isinstance(clients, str | bytes):
        by_client = dict(enumerate(clients))
    if not by_client:
        raise ValueError(f"{name}: got {checks.shown(clients)}, must be a Partition or lists of indices, one or more")
    parts = []
    for client, rows in by_client.items():
        array = _array(rows)
        parts.append(array if array.size else np.zeros(0, np.int32))
        if parts[-1].ndim != 1 or not np.issubdtype(parts[-1].dtype, np.integer):
            raise ValueError(f"{name}: got {checks.shown(rows)} for client {client!r}, must be a list of whole numbers")
    return Partition(np.concatenate(parts), np.cumsum([0, *map(len, parts)]))


def validate(partition: Partition, num_examples: int, exact: bool = False, name: str = "partition") -> None:
    """Raises ``ValueError`` unless ``partition`` is well-formed and its indices are below ``num_examples``.

    There must be at least one client and at most 2^31 - 1 indices, and offsets must start at 0, never fall and end at
    ``len(indices)``. Clients may be empty and may share examples.

    Args:
        partition: The partition.
        num_examples: Number of examples.
        exact: Whether every example must belong to exactly one client.
        name: Name of the partition in error messages.
    """
    num_examples = checks.whole("num_examples", num_examples)
    if not (hasattr(partition, "indices") and hasattr(partition, "offsets")):
        raise ValueError(f"{name}: got a {type(partition).__name__}, must be a Partition (partition.of makes one)")
    indices, offsets = (np.asarray(a) for a in (partition.indices, partition.offsets))
    for part, array in (("indices", indices), ("offsets", offsets)):
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"{name}.{part}: got shape {array.shape}, dtype {array.dtype}, must be a 1-D array of whole numbers"
            )
    if len(indices) > checks.MAX_INDEX:  # offsets have 32 bits
        raise ValueError(f"{name}.indices: got {len(indices)} entries, must be at most {checks.MAX_INDEX}")
    if len(offsets) < 2:
        raise ValueError(f"{name}.offsets: got {len(offsets)} entries, must be num_clients + 1, at least 2")
    if offsets[0] != 0 or offsets[-1] != len(indices):
        raise ValueError(
            f"{name}.offsets: got {offsets[0]} to {offsets[-1]}, must be from 0 to len(indices) = {len(indices)}"
        )
    if (falls := np.flatnonzero(offsets[1:] < offsets[:-1])).size:
        i = int(falls[0])
        raise ValueError(f"{name}.offsets: got {offsets[i : i + 2].tolist()} at {i}, must never fall")
    wrong = (indices < 0) | (indices >= num_examples)
    if wrong.any():
        at = int(np.argmax(wrong))
        client = int(np.searchsorted(offsets, at, side="right")) - 1
        raise ValueError(f"{name}: got {indices[at]} for client {client}, must be from 0 to {num_examples - 1}")
    if exact and ((counts := np.bincount(indices, minlength=num_examples)) != 1).any():
        at = int(np.argmax(counts != 1))
        raise ValueError(
            f"{name}: got example {at} {counts[at]} times ({int((counts != 1).sum())} such), must give each of "
            f"{num_examples} examples to exactly one client"
        )


def _build(options: object, dataset: Dataset, seed: int) -> Partition:
    if dataset.user_train is None:
        raise ValueError(f"partition: got 'by_user', must be another: the data set {dataset.name} has no users")
    return by_user(dataset.user_train)


ENTRIES = (Entry("by_user", "one client for each natural user", _build),)


MAX_CELLS = 2**26  # of heterogeneity's table [N, C]: half a gigabyte


class Heterogeneity(NamedTuple):
    """Measures of how much the clients' label distributions differ; means are over clients with examples.

    Attributes:
        label_distribution: Share of each class among each client's examples [N, C]; 0 for a client without examples.
        total_variation: Mean total variation distance between a client's label distribution and the label distribution
            of all clients' examples together.
        commonest_share: Mean share of a client's commonest label among its examples.
    """

    label_distribution: Float64[np.ndarray, "N C"]
    total_variation: float
    commonest_share: float


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
            f"labels: got {num_classes - 1} as the largest, must number the classes without gaps from 0: a table of "
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
