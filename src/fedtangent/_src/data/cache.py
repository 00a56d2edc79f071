"""A cache of data sets: one folder each, with arrays in ``.npy`` files whose sha256 is verified at every reading."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtangent._src.data import files
from fedtangent._src.storage import expanded, replacing, sha256, sha256_of_file

MANIFEST = "manifest.json"
FORMAT = 1


def given_directory(directory: str | os.PathLike[str] | None = None) -> Path | None:
    """Returns the user's folder with original files: ``directory``, else $FEDTANGENT_DATA, else None."""
    if directory is not None:
        return expanded("data_dir", directory)
    variable = os.environ.get("FEDTANGENT_DATA")
    return expanded("FEDTANGENT_DATA", variable) if variable else None


def read(folder: Path) -> dict[str, np.ndarray] | None:
    """Reads the arrays of a cache folder, by name; None if there is no such folder.

    Raises:
        ValueError: The folder's list is damaged, or a file is missing or does not have the listed sha256.
    """
    if not folder.exists():
        return None
    return {name: _array(folder / f"{name}.npy", digest) for name, digest in _manifest(folder).items()}


class Checked(NamedTuple):
    """A file with its expected and its actual sha256; None for a checksum that is not known."""

    path: Path
    expected: str | None
    actual: str | None


def check(folder: Path) -> list[Checked]:
    """Computes the sha256 of each file in a cache folder, and returns it with the sha256 in the folder's list.

    The actual sha256 of a file that cannot be read is None. Raises ``ValueError`` if the list is damaged.
    """
    paths = {folder / f"{name}.npy": digest for name, digest in _manifest(folder).items()}
    return [Checked(path, digest, _digest(path)) for path, digest in paths.items()]


def _digest(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return sha256_of_file(path)
    return None


def write(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays to a new cache folder, all files at once; keeps a folder that another process wrote first.

    Args:
        folder: The folder.
        arrays: Its arrays by name.

    Raises:
        ValueError: The folder cannot be written.
    """
    try:
        with replacing(folder) as work:
            work.mkdir(parents=True)
            digests = {}
            for name, array in arrays.items():
                buffer = io.BytesIO()
                np.save(buffer, array, allow_pickle=False)
                (work / f"{name}.npy").write_bytes(buffer.getbuffer())
                digests[name] = sha256(buffer.getvalue())
            manifest = {"format": FORMAT, "sha256": digests}
            (work / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        if not (folder / MANIFEST).is_file():
            raise ValueError(f"cache folder {folder} cannot be written: {error}") from error


def _manifest(folder: Path) -> dict[str, str]:
    """Reads a cache folder's list of checksums: the sha256 of each array by name; ``ValueError`` if it is damaged."""
    path = folder / MANIFEST
    with _advised(path):
        content = files.json_of("cached file", path)
        digests = content.get("sha256") if isinstance(content, dict) else None
        if not isinstance(digests, dict) or not digests or content.get("format") != FORMAT:
            raise ValueError(f"cached file: {path} does not list sha256 sums in format {FORMAT}")
    return digests


def _array(path: Path, expected: str) -> np.ndarray:
    with _advised(path):
        raw = files.content("cached file", path)
        actual = sha256(raw)
        if actual != expected:
            raise ValueError(f"cached file: {path} is corrupted: its sha256 is {actual}, expected {expected}")
        with files.reading("cached file", path):
            return files.array_of(raw)


@contextlib.contextmanager
def _advised(path: Path) -> Iterator[None]:
    """If the context raises a ``ValueError``, adds to its message the advice to remove the folder of ``path``."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}; remove the folder {path.parent}; the next load writes it again") from error
