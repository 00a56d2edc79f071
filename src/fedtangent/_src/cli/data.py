"""``fedtangent data``: the files of a data set, downloaded and prepared, or checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import tyro

from fedtangent._src.checks import choice, folder
from fedtangent._src.data import load
from fedtangent._src.data.cache import Checked, check, given_directory
from fedtangent._src.data.published import Published, checksums, located
from fedtangent._src.data.stored import StoredOptions, obtain, stored_in
from fedtangent._src.entries import catalogue, choose, option
from fedtangent._src.output.files import Ended, ended
from fedtangent._src.output.tables import TextTable, console
from fedtangent._src.storage import sha256_of_file

ACTIONS = ("prepare", "verify")
VERDICTS = ("right", "not published", "missing", "WRONG")  # on a checksum


@dataclass(frozen=True)
class DataOptions:
    """Options of ``fedtangent data``: prepare or verify, the name of the data set, and the folders of its files."""

    action: Annotated[str, tyro.conf.Positional]
    """prepare: download and prepare missing files; verify: compare the checksums of present files."""
    name: Annotated[str, tyro.conf.Positional]
    """The data set (`fedtangent list datasets`)."""
    data_dir: Path | None = option(None)
    """Folder with original files, used as they are (default: $FEDTANGENT_DATA)."""
    cache_dir: Path | None = option(None)
    """Where prepared data are kept (default: $FEDTANGENT_CACHE, or the user's cache folder)."""
    tfds_dir: Path | None = option(None)
    """Folder for downloads of TensorFlow Datasets (default: its own)."""


class DataJob(NamedTuple):
    """A checked command ``fedtangent data``: its options, the data set and the folders.

    ``published`` describes the original files of the data set, and ``stored`` names the folders of the caches.
    ``directory`` is the user's folder of original files, which is used in place of the cache; None without such a
    folder.
    """

    options: DataOptions
    published: Published
    stored: StoredOptions
    directory: Path | None  # with original files


def prepare(options: DataOptions) -> DataJob:
    """Checks that the command can prepare or verify the data set; raises ``ValueError`` if not."""
    choice("action", options.action, ACTIONS)
    published = choose("datasets", options.name).published
    if published is None:
        allowed = ", ".join(name for name, entry in catalogue("datasets").items() if entry.published is not None)
        raise ValueError(f"name: got {options.name!r}, which this command does not download, allowed are {allowed}")
    folder("data_dir", options.data_dir)
    stored = StoredOptions(options.cache_dir, options.tfds_dir)
    directory = given_directory(options.data_dir)
    if options.action == "verify" and directory is None and not stored_in(published, stored).exists():
        raise ValueError(
            f"name: got {options.name!r}, which is not in {stored_in(published, stored)}, must be prepared first"
        )
    return DataJob(options, published, stored, directory)


def run_job(job: DataJob) -> Ended:
    """Prepares or verifies the data set and prints a table; returns the outcome (code 2 after an error)."""
    try:
        return _prepared(job) if job.options.action == "prepare" else _verified(job)
    except ValueError as error:  # no network, a wrong checksum, a full disk
        return Ended(f"error: {' '.join(str(error).split())}", 2)


def _prepared(job: DataJob) -> Ended:
    """Downloads and prepares the data set if it is missing, and prints a table of its arrays; returns the outcome."""
    if job.directory is not None:
        dataset = load(job.options.name, job.directory)
        parts = {name: part for name, part in dataset._asdict().items() if isinstance(part, np.ndarray)}
        place = Path(dataset.info.read_from)
    else:
        parts, place = obtain(job.published, job.stored, None)
    rows = [
        (name, str(part.dtype), " x ".join(map(str, part.shape)), _bytes(part.nbytes)) for name, part in parts.items()
    ]
    console().print(TextTable(job.options.name, ("array", "kind", "shape", "size"), rows))
    console().print(f"{'read from' if job.directory is not None else 'kept in'} {place}", highlight=False)
    return Ended()


def _verified(job: DataJob) -> Ended:
    """Compares every file's checksum with the published one, and prints a table; returns the outcome.

    Prepared files in the cache have no published checksums, but a list of checksums in the same folder. Missing files
    and wrong checksums are failures.
    """
    checked = _of_folder(job, job.directory) if job.directory else check(stored_in(job.published, job.stored))
    rows, count = [], dict.fromkeys(VERDICTS, 0)
    for path, expected, actual in checked:
        verdict = VERDICTS[2 if actual is None else 1 if expected is None else 0 if actual == expected else 3]
        count[verdict] += 1
        rows.append((path.name, _bytes(path.stat().st_size) if actual else "", (actual or "")[:16], verdict))
    console().print(TextTable(job.options.name, ("file", "size", "sha256", "checksum"), rows))
    console().print(", ".join(f"{number} {verdict}" for verdict, number in count.items() if number), highlight=False)
    return ended(f"{count[verdict]} {verdict}" for verdict in ("missing", "WRONG") if count[verdict])


def _of_folder(job: DataJob, directory: Path) -> list[Checked]:
    """Returns the files of the data set in a folder, with their published and actual checksums.

    If the folder has the data in another form than published, its files have no published checksums.
    """
    paths, missing = located(job.published, directory)
    if paths:
        present = [Checked(path, *checksums(job.published, role, path)) for role, path in paths.items()]
        return present + [Checked(directory / name, None, None) for name in missing]
    place = Path(load(job.options.name, directory).info.read_from)
    kinds = ("*.npz", "*.bin", "*/*.json", "by_play_and_character/*.txt")
    return [Checked(path, None, sha256_of_file(path)) for kind in kinds for path in sorted(place.glob(kind))]


def _bytes(number: int) -> str:
    return f"{number / 2**20:.1f} MiB" if number >= 2**20 else f"{number / 2**10:.1f} KiB"
