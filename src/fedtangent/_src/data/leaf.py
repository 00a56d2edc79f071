"""Readers of the data sets of LEAF (Caldas et al., 2018), which have the examples of each user.

The files are LEAF's own JSON, or TensorFlow Federated's ``.lzma``: a packed SQLite database with a table of
``tf.train.Example`` by client, with examples to train and to test.
"""

from __future__ import annotations

import contextlib
import lzma
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedtangent._src import checks
from fedtangent._src.data import files
from fedtangent._src.data.files import reading
from fedtangent._src.data.published import Arrays, Published, verify

SPLITS = ("train", "test")
PAPER = "caldas2018"


class User(NamedTuple):
    """One user's examples in a JSON file of LEAF.

    Attributes:
        name: Name of the user.
        x, y: Inputs and targets of the user's examples, in order.
        path: The file.
    """

    name: str
    x: list[Any]
    y: list[Any]
    path: Path


def find(directory: Path, stem: str) -> Path | None:
    """Returns the folder that has LEAF's files ``train/*.json`` and ``test/*.json``, or None.

    Args:
        directory: The user's data folder. Its subfolders ``stem*`` are searched too, and ``data`` in each of these
            folders, where LEAF's scripts write.
        stem: Beginning of a subfolder's name.
    """
    for place in files.places(directory, stem):
        for folder in (place, place / "data"):
            if all(any((folder / split).glob("*.json")) for split in SPLITS):
                return folder
    return None


def users(name: str, folder: Path, split: str) -> Iterator[User]:
    """Yields the users of ``folder/split/*.json``, file after file by name, in the order of each file's list.

    A file is ``{"users": [..], "user_data": {user: {"x": [..], "y": [..]}}}``.

    Args:
        name: Name of the data set in error messages.
        folder: Folder with a subfolder for each split.
        split: "train" or "test".

    Raises:
        ValueError: A file has another form, a user has no examples or is listed twice, or there are no users.
    """
    names: set[str] = set()
    for path in sorted((folder / split).glob("*.json")):
        whole = files.json_of(name, path)
        try:
            rows = [(user, whole["user_data"][user]["x"], whole["user_data"][user]["y"]) for user in whole["users"]]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{name}: {path} is no file of LEAF, must have users, and in user_data the lists x and y of each user"
            ) from error
        for user, x, y in rows:
            if not (isinstance(user, str) and isinstance(x, list) and isinstance(y, list)) or len(x) != len(y) or not y:
                must = "must be a string with lists x and y of one length, at least 1"
                raise ValueError(f"{name}: got user {user!r} in {path}, {must}")
            if user in names:
                raise ValueError(f"{name}: got user {user!r} again in {path}, must be listed once in {split}")
            names.add(user)
            yield User(user, x, y, path)
    if not names:
        raise ValueError(f"{name}: got no user in {folder / split}, must be one or more")


def joined(
    of_split: Callable[[str], Iterable[User]], examples: Callable[[User], tuple[np.ndarray, np.ndarray]]
) -> Arrays:
    """Joins the users' examples, user after user, to arrays such as ``x_train``, ``y_train`` and ``user_train`` [n].

    Args:
        of_split: Function from a split, "train" or "test", to its users. Users are numbered in this order; users
            without training examples (LEAF's split ``-t user``) come last.
        examples: Converts a user's examples to arrays ``x`` and ``y``.
    """
    number: dict[str, int] = {}
    arrays: Arrays = {}
    for split in SPLITS:
        parts = []
        for user in of_split(split):
            parts.append((*examples(user), np.full(len(user.y), number.setdefault(user.name, len(number)), np.int32)))
        for axis, columns in zip(("x", "y", "user"), zip(*parts, strict=True), strict=True):
            arrays[f"{axis}_{split}"] = np.concatenate(columns)
    return arrays


def selected(arrays: Arrays, rows: Mapping[str, np.ndarray]) -> Arrays:
    """Keeps only some examples of a data set; returns its arrays of both splits, such as ``x_train``.

    Args:
        arrays: Arrays by name, ending in ``_train`` or ``_test``.
        rows: Whether to keep each example, [n] bool by split; a split that is not in it stays whole.
    """
    splits = {name: name.rpartition("_")[2] for name in arrays}
    return {name: array[rows[splits[name]]] if splits[name] in rows else array for name, array in arrays.items()}


def first_users(arrays: Arrays, num_users: int | None) -> Arrays:
    """Keeps only the examples of the first ``num_users`` training users, and of users who have test examples only.

    Args:
        arrays: Arrays by name, such as ``user_train``; a split without users stays whole.
        num_users: Number of users; None for all.

    Raises:
        ValueError: There are fewer users.
    """
    if num_users is None:
        return arrays
    users = np.unique(arrays["user_train"])
    others = users[checks.whole("num_users", num_users, 1, len(users)) :]
    splits = [split for split in SPLITS if f"user_{split}" in arrays]
    return selected(arrays, {split: ~np.isin(arrays[f"user_{split}"], others) for split in splits})


FeatureValue: TypeAlias = bytes | np.ndarray
URL = "https://storage.googleapis.com/tff-datasets-public/"


class Row(NamedTuple):
    """An example in TensorFlow Federated's database: its client, and its features by name (bytes or arrays)."""

    client: str
    features: dict[str, FeatureValue]


def rows(published: Published, path: Path, split: str, features: Mapping[str, str]) -> Iterator[Row]:
    """Yields the examples of a split of TensorFlow Federated's database as ``Row``, client after client by name.

    The database is unpacked into a temporary folder while it is read. Errors are raised when rows are taken.

    Args:
        published: The data set.
        path: Its file, compressed by xz.
        split: Name of a split in the database.
        features: Kind of each feature by name: ``bytes_list`` (only its first entry is returned), ``float_list`` or
            ``int64_list``; no feature may be empty.

    Raises:
        ValueError: The file is not the published one, cannot be read, or has no such split or feature.
    """
    from tensorflow_datasets.proto import tf_example_pb2  # heavy: TensorFlow Datasets

    (role,) = published.files
    verify(published, role, path)
    query = "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ? ORDER BY client_id, rowid"
    count = 0
    with tempfile.TemporaryDirectory(prefix=f"{published.name}-") as folder:
        database = Path(folder) / "database.sqlite"
        with reading(published.name, path):
            with lzma.open(path) as packed, database.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 2**20)
            with contextlib.closing(sqlite3.connect(database)) as connection:
                for client, serialised in connection.execute(query, (split,)):
                    stored = tf_example_pb2.Example.FromString(serialised).features.feature
                    yield Row(str(client), {name: _value(stored, name, kind) for name, kind in features.items()})
                    count += 1
    if count == 0:
        raise ValueError(f"{published.name}: {path} has no examples of {split!r}")


def _value(stored: Mapping[str, object], name: str, kind: str) -> FeatureValue:
    values = getattr(stored[name], kind).value if name in stored else ()
    if not values:
        raise ValueError(f"an example has no {name} of kind {kind}")
    if kind == "bytes_list":
        return bytes(values[0])
    return np.array(values, np.float32 if kind == "float_list" else np.int64)
