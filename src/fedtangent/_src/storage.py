"""Writing of files so that a kill leaves the old or the complete new one; checksums; the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

PART = ".part"  # end of the name of a file or folder that is being written


@contextlib.contextmanager
def replacing(path: Path, durable: bool = False) -> Iterator[Path]:
    """Yields a temporary path; the file or folder there moves to ``path`` when the context ends without an error.

    Readers find the old file or the complete new one, even if the process is killed.

    Args:
        path: Final path of the file or folder.
        durable: Whether the result must survive a power failure. Then no other process may write to ``path``: the
            temporary name is always the same, so that the next writer overwrites the remains of a kill.
    """
    part = path.with_name(f"{path.name}{PART}" if durable else f"{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        yield part
        if durable and part.is_file():
            with part.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


def write_atomically(path: Path, content: str | bytes, durable: bool = False) -> None:
    """Writes ``content`` to ``path`` so that readers find the old file or the complete new one, even after a kill.

    Args:
        path: Path of the file.
        content: The new content; text is encoded as UTF-8.
        durable: Whether the file must survive a power failure, as in ``replacing``.
    """
    with replacing(path, durable) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def sync_folder(folder: Path) -> None:
    """Makes sure that the names of the files in ``folder`` survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(*parts: bytes | str | np.ndarray) -> str:
    """Computes the SHA-256, in hexadecimal, of texts, bytes and the numbers of arrays, put one behind the other."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(content if isinstance(content, bytes) else np.ascontiguousarray(content).tobytes())
    return digest.hexdigest()


def sha256_of_file(path: Path) -> str:
    """Computes the SHA-256 of a file as a hexadecimal text; raises ``OSError`` if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def expanded(name: str, path: str | os.PathLike[str]) -> Path:
    """Returns ``path`` with a leading ``~`` replaced by the home folder.

    Args:
        name: Name of the argument, for the error message.
        path: The path that the user passed.

    Raises:
        ValueError: The home folder is unknown.
    """
    try:
        return Path(path).expanduser()
    except Exception as error:
        raise ValueError(f"{name}: {os.fspath(path)} cannot be read: {' '.join(str(error).split())[:300]}") from error


def cache_directory(directory: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder of all caches of this package.

    It is ``directory`` if that is not None, else $FEDTANGENT_CACHE if that is set, else ``fedtangent`` in the user's
    cache folder, such as ``~/.cache``.

    Raises:
        ValueError: The home folder is unknown, and the path begins with ``~``.
        RuntimeError: The home folder is unknown, and the user's cache folder lies in it.
    """
    if directory is not None:
        return expanded("cache_dir", directory)
    if os.environ.get("FEDTANGENT_CACHE"):
        return expanded("FEDTANGENT_CACHE", os.environ["FEDTANGENT_CACHE"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fedtangent"
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedtangent"
