"""Files of TensorFlow Federated: a table of ``tf.train.Example`` by client in SQLite, packed as ``.lzma``.

They hold LEAF's data, with examples of every client to train and to test.
"""

from __future__ import annotations

import lzma
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedtangent.data.published import Published, verify

URL = "https://storage.googleapis.com/tff-datasets-public/"


class Row(NamedTuple):
    """One example: whose it is, and its features by name, bytes, float32 or int64."""

    client: str
    features: dict[str, Any]


def rows(published: Published, path: Path, split: str, features: tuple[str, ...]) -> Iterator[Row]:
    """The examples of ``split``, client after client in the order of their names, each in the order of the table.

    The database is unpacked beside the file for as long as it is read. Raises ``ValueError`` for a file that is not the
    published one, cannot be read or has no such split or feature.
    """
    from google.protobuf.message import DecodeError
    from tensorflow_datasets.proto import tf_example_pb2  # heavy: TensorFlow Datasets

    (role,) = published.files
    verify(published, role, path)
    query = "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ? ORDER BY client_id, rowid"
    count = 0
    with tempfile.TemporaryDirectory(prefix=f"{published.name}-") as folder:
        database = Path(folder) / "database.sqlite"
        try:
            with lzma.open(path) as packed, database.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 2**20)
            connection = sqlite3.connect(database)
            try:
                for client, serialised in connection.execute(query, (split,)):
                    held = tf_example_pb2.Example.FromString(serialised).features.feature
                    yield Row(str(client), {name: _value(held, name) for name in features})
                    count += 1
            finally:
                connection.close()
        except (OSError, EOFError, KeyError, lzma.LZMAError, sqlite3.Error, TypeError, DecodeError) as error:
            raise ValueError(f"{published.name}: {path} cannot be read: {error}") from error
    if count == 0:
        raise ValueError(f"{published.name}: {path} has no examples of {split!r}")


def _value(held: Mapping[str, Any], name: str) -> Any:
    if name not in held:
        raise KeyError(f"an example has no {name}")
    feature = held[name]
    kind = feature.WhichOneof("kind")
    if kind == "bytes_list":
        return bytes(feature.bytes_list.value[0])
    numbers = feature.float_list.value if kind == "float_list" else feature.int64_list.value
    return np.array(numbers, np.float32 if kind == "float_list" else np.int64)
