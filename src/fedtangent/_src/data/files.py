"""Readers of files that fedtangent did not write; a bad file raises a ``ValueError`` in one line that names it.

Nothing in a file is executed, no pickle is read, and a pipe is refused instead of waited for.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import stat
import zipfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Shaped

from fedtangent._src import checks
from fedtangent._src.data import files

MOST_HEADER = 10_000  # bytes; the header of a plain array has about a hundred


class Header(NamedTuple):
    """Shape and dtype of an array in a file, which are read without the array."""

    shape: tuple[int, ...]
    dtype: np.dtype


@contextlib.contextmanager
def reading(name: str, path: Path | str) -> Iterator[None]:
    """Turns every exception inside the context into a ``ValueError`` that names the file.

    For damaged files, readers raise ``zlib.error``, ``tokenize.TokenError``, ``NotImplementedError`` and others.

    Args:
        name: Name of the data set or argument, for the error message.
        path: Path of the file.
    """
    try:
        yield
    except Exception as error:
        message = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{name}: {path} cannot be read: {message}") from error


def places(directory: Path, stem: str) -> list[Path]:
    """Returns the folders to search for files: ``directory``, then its subfolders ``stem*`` ordered by name.

    Args:
        directory: Data folder.
        stem: Beginning of the names of subfolders.
    """
    return [directory, *sorted(path for path in directory.glob(f"{stem}*") if path.is_dir())]


def content(name: str, path: Path) -> bytes:
    """Returns the bytes of a file; raises ``ValueError`` for a folder, a pipe or a file that cannot be read.

    Args:
        name, path: Name of the file, for the error message, and its path.
    """
    with reading(name, path), _opened(path) as file:
        return file.read()


def json_of(name: str, path: Path) -> Any:
    """Returns the content of a JSON file; raises ``ValueError`` if the file cannot be read or is not JSON.

    Args:
        name, path: Name of the file, for the error message, and its path.
    """
    raw = content(name, path)
    with reading(name, path):
        return json.loads(raw)


def headers(name: str, path: Path) -> dict[str, Header]:
    """Reads the shape and dtype of each array in an ``.npz`` file, but not the arrays.

    Args:
        name, path: Name of the file, for the error message, and its path.

    Raises:
        ValueError: Another kind of file, a damaged or encrypted one, or content other than plain arrays.
    """
    with reading(name, path), _opened(path) as file, zipfile.ZipFile(file) as packed:
        return {key: _header(packed, member) for key, member in _members(packed).items()}


def arrays(name: str, path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of an ``.npz`` file by name, in this machine's byte order.

    Args:
        name, path: Name of the file, for the error message, and its path.

    Raises:
        ValueError: Another kind of file, a damaged or encrypted one, or content other than plain arrays.
    """
    with reading(name, path), _opened(path) as file:
        return unpacked(file)


def unpacked(file: io.BufferedIOBase) -> dict[str, np.ndarray]:
    """Reads the arrays of an open ``.npz`` file by name.

    A bad file raises various exceptions; inside the context ``reading`` they become a ``ValueError``.
    """
    with zipfile.ZipFile(file) as packed:
        content = {}
        for key, member in _members(packed).items():
            _header(packed, member)
            with packed.open(member.filename) as array:
                content[key] = _native(np.lib.format.read_array(array, allow_pickle=False))
        return content


def array_of(raw: bytes) -> np.ndarray:
    """Decodes the contents of an ``.npy`` file into an array; raises ``ValueError`` for malformed contents."""
    _described(raw, len(raw), "the file")
    return _native(np.lib.format.read_array(io.BytesIO(raw), allow_pickle=False))


def _opened(path: Path) -> io.BufferedReader:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe that nobody writes to opens at once
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError("it is a folder, a pipe or a device, must be a file")
    return os.fdopen(handle, "rb")


def _members(packed: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Returns the entries of an open ``.npz`` file by the names of their arrays; ``ValueError`` for a repeated name."""
    members: dict[str, zipfile.ZipInfo] = {}
    for member in packed.infolist():
        key = member.filename.removesuffix(".npy")
        if key in members:
            raise ValueError(f"{key} is there twice")
        members[key] = member
    return members


def _header(packed: zipfile.ZipFile, member: zipfile.ZipInfo) -> Header:
    with packed.open(member.filename) as file:
        return _described(file.read(MOST_HEADER), member.file_size, member.filename)


def _described(begin: bytes, size: int, name: str) -> Header:
    """Reads the shape and dtype of an array from the first bytes of a ``.npy`` file.

    Args:
        begin: The first bytes of the file.
        size: Size of the whole file in bytes.
        name: Name of the file, for error messages.

    Raises:
        ValueError: The file holds no array of numbers or strings, or its size does not fit its header.
    """
    file = io.BytesIO(begin[:MOST_HEADER])
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file, max_header_size=MOST_HEADER)
    except Exception as error:  # NumPy's own messages on odd headers would not help a user
        raise ValueError(f"{name} is no array as np.save writes it") from error
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, must be numbers or strings")
    num_bytes = size - file.tell()
    if min(shape, default=0) < 0 or dtype.itemsize == 0 or math.prod(shape) * dtype.itemsize != num_bytes:
        raise ValueError(f"{name} is damaged: it has {num_bytes} bytes after a header for {dtype} {shape}")
    return Header(shape, dtype)


def _native(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def find(directory: Path, stem: str) -> Path | None:
    """Returns the path of the first archive ``stem*.npz`` in the data folder or in a subfolder ``stem*``, or None.

    Args:
        directory: Data folder.
        stem: Beginning of the name of the archive, after which no digit may follow.
    """
    patterns = f"{stem}.npz", f"{stem}[!0-9]*.npz"  # not cifar100 for cifar10
    folders = files.places(directory, stem)
    return next((path for folder in folders for name in patterns for path in sorted(folder.glob(name))), None)


def read(name: str, path: Path, needed: Sequence[str]) -> dict[str, np.ndarray]:
    """Reads the arrays of an ``.npz`` archive by name, and checks that the needed ones are there.

    Args:
        name: Name of the data set in error messages.
        path: Path of the archive.
        needed: Names of the arrays that must be in it.

    Raises:
        ValueError: The archive cannot be read, or one of these arrays is missing.
    """
    arrays = files.arrays(name, path)
    require(name, path, arrays, needed)
    return arrays


def require(name: str, path: Path, present: Collection[str], needed: Sequence[str]) -> None:
    """Raises ``ValueError`` unless all names of ``needed`` are among ``present``, the names in the archive.

    Args:
        name: Name of the archive, for the error message.
        path: Path of the archive.
        present: Names in the archive.
        needed: Names that must be among them.
    """
    missing = [key for key in needed if key not in present]
    if missing:
        raise ValueError(f"{name}: {path} has no {', '.join(missing)}; it has {', '.join(present) or 'nothing'}")


def owners(name: str, offsets: Int[np.ndarray, "offsets"], count: int, least: int = 1) -> Int32[np.ndarray, "count"]:
    """Computes the user of each example, [count] int32, if the examples of each user follow one another.

    Args:
        name: Name of the offsets in error messages.
        offsets: Index of each user's first example, and ``count`` at the end, for N users: whole numbers [N + 1] from
            0.
        count: Number of examples.
        least: Smallest number of examples of a user.

    Raises:
        ValueError: The offsets are not of this form, or rise by less than ``least``.
    """
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or len(offsets) < 2:
        raise ValueError(f"{name}: got {offsets.dtype} {offsets.shape}, must be whole numbers [N + 1], N >= 1")
    sizes: np.ndarray = np.diff(offsets.astype(np.int64))  # unsigned numbers would wrap around where they fall
    if offsets[0] != 0 or offsets[-1] != count:
        raise ValueError(f"{name}: got {offsets[0]} to {offsets[-1]}, must be from 0 to {count}")
    if (sizes < least).any():
        at = int(np.argmax(sizes < least))
        raise ValueError(f"{name}: got {offsets[at : at + 2].tolist()} for user {at}, must rise by at least {least}")
    return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)


def images(
    name: str, path: Path, arrays: dict[str, np.ndarray], split: str, size: tuple[int, ...]
) -> tuple[Shaped[np.ndarray, "n ..."], Shaped[np.ndarray, "n"]]:
    """Takes the images uint8 [n, *size] and the labels [n] of a split from an archive's arrays, and checks them.

    Args:
        name: Name of the data set in error messages.
        path: Path of the archive, for error messages.
        arrays: Arrays of the archive.
        split: "train" or "test".
        size: Shape of an image.

    Raises:
        ValueError: Images or labels have another shape or type, or the split is empty.
    """
    x, y = arrays[f"{split}_images"], arrays.get(f"{split}_labels", np.zeros(0, int))
    if x.dtype != np.uint8 or x.shape[1:] != size or y.shape != x.shape[:1] or len(y) == 0:
        raise ValueError(
            f"{name}: got {x.dtype} {x.shape} and {y.shape} in {path}, {split} images and labels must be "
            f"uint8 [n, {', '.join(map(str, size))}] and [n]"
        )
    return x, checks.class_labels(f"{name}: labels", y)
