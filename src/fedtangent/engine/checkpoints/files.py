"""Files that are there whole or not at all, and that show damage."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from fedtangent.engine.checkpoints.options import CheckpointError


class DamagedError(CheckpointError):
    """A file that is missing, torn or altered."""


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, content: bytes) -> None:
    """Write ``content`` to a temporary file, sync, rename: a kill at any instant leaves the old file or the new one."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    sync_folder(path.parent)


def sha256(content: bytes) -> str:
    """The SHA-256 of ``content``, hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below ``folder``, by its path relative to it."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def check_digests(folder: Path, expected: dict[str, str]) -> None:
    """Raise ``DamagedError`` naming the first file that is not what was written."""
    found = digests(folder)
    for name, digest in expected.items():
        if found.get(name) != digest:
            raise DamagedError(f"{name} is {'altered' if name in found else 'missing'}")


def read_checked(path: Path, digest: str) -> bytes:
    """The content of ``path``; raises ``DamagedError`` unless its SHA-256 is ``digest``."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path.name}: {error.strerror}") from error
    if sha256(content) != digest:
        raise DamagedError(f"{path.name} is altered")
    return content


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON that holds its own SHA-256."""
    whole = {"sha256": sha256(_canonical(record)), "record": record}
    write_durably(path, json.dumps(whole, indent=1).encode())


def read_record(path: Path) -> dict[str, Any]:
    """The record at ``path``; raises ``DamagedError`` unless it is the one that was written."""
    try:
        whole = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedError(f"{path.name}: {error.strerror}") from error
    except ValueError as error:
        raise DamagedError(f"{path.name} is no JSON") from error
    intact = isinstance(whole, dict) and set(whole) == {"sha256", "record"}
    if not intact or sha256(_canonical(whole["record"])) != whole["sha256"]:
        raise DamagedError(f"{path.name} is altered")
    return whole["record"]
