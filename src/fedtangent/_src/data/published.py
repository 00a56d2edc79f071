"""Published data sets: address, size and checksum of their original files, and how the files are found and read."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtangent._src.data.files import places, reading
from fedtangent._src.storage import sha256_of_file

Arrays = dict[str, np.ndarray]
GZIP = b"\x1f\x8b"  # the first two bytes of a gzip file
TABLE = Path(__file__).parent / "sources" / "files.csv"


class PublishedFile(NamedTuple):
    """One original file of a published data set; its address is the data set's ``url`` and then ``filename``.

    Attributes:
        filename: Name of the file.
        size: Size in bytes.
        sha256: Checksum of the file.
        sha256_unpacked: Checksum of the content of a ``.gz`` file, which the user may have unpacked; else "".
    """

    filename: str
    size: int
    sha256: str
    sha256_unpacked: str = ""


class Published(NamedTuple):
    """A published data set: its original files, how they are read, and facts about it.

    ``read(published, paths)`` verifies the files, whose paths it gets by role, and returns arrays of both splits. For
    ``train`` (and likewise for ``test``) there are ``x_train`` [n, ...], ``y_train`` [n] and, if users are known,
    ``user_train`` [n] int32. A data set of N texts has all bytes in ``text_train`` uint8 instead; text i is from
    ``offsets_train[i]`` to ``offsets_train[i + 1]``.

    Attributes:
        name, description, homepage, licence: Texts about the data set.
        url: Address of the folder of the files, which ends in "/".
        files: The files by role. A role is a key such as "x_train", which names the purpose of the file.
        read: Function that reads the files, as described above.
        example: Name, shape and dtype of each part of an example; None in a shape stands for any length.
        num_classes: Number of classes; 0 for regression.
        paper: Key of the paper in ``papers.PAPERS``.
        stem: Beginning of the names of subfolders in which files are searched; "" for the data set's name.
    """

    name: str
    url: str
    files: Mapping[str, PublishedFile]
    read: Callable[[Published, Mapping[str, Path]], Arrays]
    example: tuple[tuple[str, tuple[tuple[int | None, ...], str]], ...]
    num_classes: int
    description: str
    homepage: str
    licence: str
    paper: str
    stem: str = ""


def files_of(dataset: str) -> dict[str, PublishedFile]:
    """Returns the original files of a data set, by role, as the table ``sources/files.csv`` lists them."""
    with TABLE.open(encoding="utf-8", newline="") as table:
        rows = [row for row in csv.DictReader(table) if row["dataset"] == dataset]
    return {
        row["role"]: PublishedFile(row["filename"], int(row["size"]), row["sha256"], row["sha256_unpacked"])
        for row in rows
    }


def located(published: Published, directory: Path) -> tuple[dict[str, Path], list[str]]:
    """Finds the original files of a data set in the user's folder, or in subfolders that are named after the data set.

    The names of these subfolders begin with ``published.stem``, or with the data set's name if that is empty. A
    file that may also be unpacked is found without ``.gz`` too.

    Args:
        published: The data set.
        directory: The user's data folder.

    Returns:
        The path of each file by its role, and the names of the missing files.

    Raises:
        ValueError: ``directory`` is no directory.
    """
    if not directory.is_dir():
        advice = "name another by data_dir or FEDTANGENT_DATA"
        raise ValueError(f"{published.name}: data directory {directory} is not a directory: {advice}")
    folders = (directory / published.name, *places(directory, published.stem or published.name))
    by_role: dict[str, Path] = {}
    for role, file in published.files.items():
        names = [file.filename, *([file.filename.removesuffix(".gz")] if file.sha256_unpacked else [])]
        paths = [folder / name for folder in folders for name in names]
        existing = [path for path in paths if path.is_file()]
        if existing:
            by_role[role] = existing[0]
    return by_role, [file.filename for role, file in published.files.items() if role not in by_role]


def lacking(published: Published, directory: Path, missing: list[str], instead: str) -> ValueError:
    """Returns a ``ValueError`` whose message lists the original files of a data set that a folder does not have.

    Args:
        published: The data set.
        directory: The folder.
        missing: Names of the missing files.
        instead: Another form of the data that was searched for too, or "".
    """
    names = missing if len(missing) <= 6 else [*missing[:5], f"{len(missing) - 5} more"]
    packed = ", with and without .gz" if any(file.sha256_unpacked for file in published.files.values()) else ""
    return ValueError(
        f"{published.name}: data directory {directory} has no {', '.join(names)}{instead and f', nor {instead}'} "
        f"(looked in it and in its subfolders {published.stem or published.name}*{packed})"
    )


def checksums(published: Published, role: str, path: Path) -> tuple[str, str]:
    """Returns the published and the actual sha256 of a file; raises ``ValueError`` if it cannot be read.

    Args:
        published: The published files.
        role: Key of the file in ``published.files``, for example "x_train".
        path: Path of the file; if it is an unpacked ``.gz`` file, the published sha256 is ``sha256_unpacked``.
    """
    file = published.files[role]
    with reading(published.name, path):
        return file.sha256_unpacked if _is_unpacked(file, path) else file.sha256, sha256_of_file(path)


def verify(published: Published, role: str, path: Path) -> None:
    """Raises ``ValueError`` unless the file at ``path`` has the published checksum.

    Args:
        published: The data set.
        role: Key of the file in ``published.files``.
        path: Path of the file.
    """
    expected, actual = checksums(published, role, path)
    if actual != expected:
        raise ValueError(
            f"{published.name}: {path} is not the published {published.files[role].filename}: its sha256 is {actual}, "
            f"expected {expected}"
        )


def _is_unpacked(file: PublishedFile, path: Path) -> bool:
    if not file.sha256_unpacked:
        return False
    with path.open("rb") as opened:
        return opened.read(2) != GZIP


def contents(published: Published, role: str, path: Path) -> bytes:
    """Returns the content of a published file as bytes, after its checksum is verified.

    A gzip file is unpacked if its entry has ``sha256_unpacked``.

    Args:
        published: The data set.
        role: Key of the file in ``published.files``.
        path: Path of the file.

    Raises:
        ValueError: The file cannot be read, or its checksum is not the published one.
    """
    verify(published, role, path)
    with reading(published.name, path):
        raw = path.read_bytes()
        packed = bool(published.files[role].sha256_unpacked) and raw[:2] == GZIP
        return gzip.decompress(raw) if packed else raw
