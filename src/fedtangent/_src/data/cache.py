"""A cache of plain ``.npy`` arrays, one folder for each data set, every file's sha256 verified on every load."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtangent._src.data import files

MANIFEST = "manifest.json"
FORMAT = 1


def cache_directory(directory: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder of all caches: ``directory``, else $FEDTANGENT_CACHE, else the user's cache folder."""
    if directory is not None:
        return files.expanded("cache_dir", directory)
    if os.environ.get("FEDTANGENT_CACHE"):
        return files.expanded("FEDTANGENT_CACHE", os.environ["FEDTANGENT_CACHE"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fedtangent"
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedtangent"


def given_directory(directory: str | os.PathLike[str] | None = None) -> Path | None:
    """Returns the user's folder with original files: ``directory``, else $FEDTANGENT_DATA, else None."""
    if directory is not None:
        return files.expanded("data_dir", directory)
    given = os.environ.get("FEDTANGENT_DATA")
    return files.expanded("FEDTANGENT_DATA", given) if given else None


def read(folder: Path) -> dict[str, np.ndarray] | None:
    """Reads the arrays of a cache folder, by name; None if there is no such folder.

    Raises ``ValueError`` with the file's name and advice if a file is missing or does not have the listed sha256.
    """
    if not folder.exists():
        return None
    listed = _manifest(folder)
    return {name: _array(folder, name, digest) for name, digest in listed.items()}


class Checked(NamedTuple):
    """A file with its expected and its actual sha256; None for an unknown one."""

    path: Path
    expected: str | None
    actual: str | None


def check(folder: Path) -> list[Checked]:
    """Computes the checksums of every file in a cache folder; raises ``ValueError`` if their list is damaged."""
    paths = {folder / f"{name}.npy": digest for name, digest in _manifest(folder).items()}
    return [Checked(path, digest, _digest(path)) for path, digest in paths.items()]


def _digest(path: Path) -> str | None:
    try:
        return files.digest(path)
    except OSError:
        return None


def write(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes a cache folder atomically, all files at once; keeps a folder that another process wrote first.

    Raises ``ValueError`` if the folder cannot be written.
    """
    work = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        work.mkdir(parents=True)
        digests = {}
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, array, allow_pickle=False)
            (work / f"{name}.npy").write_bytes(buffer.getbuffer())
            digests[name] = hashlib.sha256(buffer.getbuffer()).hexdigest()
        (work / MANIFEST).write_text(json.dumps({"format": FORMAT, "sha256": digests}, indent=1, sort_keys=True) + "\n")
        work.rename(folder)
    except OSError as error:
        if not (folder / MANIFEST).is_file():
            raise ValueError(f"cache folder {folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _manifest(folder: Path) -> dict[str, str]:
    """Reads names and sha256 of the arrays in a cache folder."""
    path = folder / MANIFEST
    with _advised(path):
        content = files.json_of("cached file", path)
        digests = content.get("sha256") if isinstance(content, dict) else None
        if not isinstance(digests, dict) or not digests or content.get("format") != FORMAT:
            raise ValueError(f"cached file: {path} does not list sha256 sums in format {FORMAT}")
    return digests


def _array(folder: Path, name: str, digest: str) -> np.ndarray:
    path = folder / f"{name}.npy"
    with _advised(path):
        raw = files.content("cached file", path)
        actual = hashlib.sha256(raw).hexdigest()
        if actual != digest:
            raise ValueError(f"cached file: {path} is corrupted: its sha256 is {actual}, expected {digest}")
        with files.reading("cached file", path):
            return files.array_of(raw)


@contextlib.contextmanager
def _advised(path: Path) -> Iterator[None]:
    """Adds advice to the message of a ``ValueError`` inside the context: remove the folder."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}; remove the folder {path.parent} and it is made again") from error
