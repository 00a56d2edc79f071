"""Files of TensorFlow Federated: a table of ``tf.train.Example`` by client in SQLite, packed as ``.lzma``.

They hold LEAF's data, with examples of every client to train and to test.
"""

from __future__ import annotations

import contextlib
import lzma
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from fedtangent._src.data.files import reading
from fedtangent._src.data.published import Published, verify

FeatureValue: TypeAlias = bytes | np.ndarray
URL = "https://storage.googleapis.com/tff-datasets-public/"


class Row(NamedTuple):
    """An example: its client, and its features by name: bytes, or arrays of float32 or int64."""

    client: str
    features: dict[str, FeatureValue]


def rows(published: Published, path: Path, split: str, features: Mapping[str, str]) -> Iterator[Row]:
    """Yields the examples of ``split``, client after client in the order of their names, each in the table's order.

    The database is unpacked into a temporary folder while it is read.

    Args:
        published: The data set.
        path: Its file.
        split: Name of a split in the database.
        features: Kind of each feature by name: ``bytes_list``, ``float_list`` or ``int64_list``; no feature may be
            empty.

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
