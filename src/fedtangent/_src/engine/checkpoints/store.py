"""Checkpoints in a folder::

    checkpoints/run-0001/history/00000000-00000005.npz    a segment of the history: rounds 0 to 4
    checkpoints/run-0001/history-again/..                 a second copy, because all later checkpoints need it
    checkpoints/run-0001/round-00000005/state/...         the state, written by orbax
    checkpoints/run-0001/round-00000005/record.json       a description, with the SHA-256 of each file that is needed

A checkpoint first writes the new segment of the history. The folder of its round has a temporary name until it is
complete, so a kill leaves no incomplete checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedtangent._src.engine.checkpoints import files
from fedtangent._src.engine.checkpoints.options import CheckpointError, Checkpoints, differences, plain
from fedtangent._src.engine.checkpoints.segment import Link, Segment, decode, encode
from fedtangent._src.engine.history import Measurement
from fedtangent._src.engine.processes import environment
from fedtangent._src.storage import sha256, sync_folder, write_atomically
from fedtangent._src.types import PyTree

FORMAT = 3
RECORD = "record.json"
FIELDS = {  # types of the entries of a record
    "round": int,
    "identity": dict,
    "circumstances": dict,
    "layout": dict,
    "history": list,
    "files": dict,
}
HISTORIES = "history", "history-again"  # each has every segment
_SECONDS, _TIMES = 10.0, 20


class Store(NamedTuple):
    """The folder of a run's checkpoints, with the values that identify the run.

    Attributes:
        options: The user's options of checkpoints.
        folder: Folder of this run, below ``options.folder``.
        identity: Values that a resumed run must share with the run that it continues.
        circumstances: Values whose differences are only reported, such as versions.
        shapes: Shapes of the numbers that one round reports.
    """

    options: Checkpoints
    folder: Path
    identity: PyTree = None
    circumstances: PyTree = None
    shapes: PyTree = None


class Saved(NamedTuple):
    """The last checkpoint of a run.

    Attributes:
        round: Rounds done when it was written.
        link: The last file of the run's history; None before the first checkpoint.
        at: Time at which it was written, by ``time.monotonic``.
        seconds: Time that the writing took.
    """

    round: int
    link: Link | None
    at: float
    seconds: float


class RestoredRun(NamedTuple):
    """A run read from a checkpoint, which another run continues.

    Attributes:
        state: State at the checkpoint.
        infos: Numbers that the rounds reported, one chunk of rounds after the other.
        evaluations: Evaluations up to the checkpoint.
        saved: The checkpoint.
        seconds: Run time up to the checkpoint.
    """

    state: PyTree
    infos: list[PyTree]
    evaluations: list[Measurement]
    saved: Saved
    seconds: float


def _numbered(folder: Path, kind: str) -> list[tuple[int, Path]]:
    """Returns (number, path) of each entry of ``folder`` whose name is ``kind`` and a number, the largest number first.

    ``kind`` is the beginning of the names, such as "run-" of run-0001.
    """
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(((int(p.name[len(kind) :]), p) for p in paths if re.fullmatch(rf"{kind}\d+", p.name)), reverse=True)


def _rounds(run: Path) -> list[tuple[int, Path]]:
    """Returns the checkpoints in a run's folder, newest first."""
    return _numbered(run, "round-")


def open_store(options: Checkpoints) -> Store:
    """Returns the store of a new run or, to resume, of the newest run with a checkpoint in the folder; writes nothing.

    Raises:
        CheckpointError: There is no checkpoint to resume from, or ``folder`` is a file.
    """
    folder = Path(options.folder)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"checkpoint folder: {folder} is not a directory")
    runs = _numbered(folder, "run-")
    if not options.resume:
        return Store(options, folder / f"run-{runs[0][0] + 1 if runs else 1:04d}")
    for _, run in runs:
        if _rounds(run):
            return Store(options, run)
    raise CheckpointError(f"resume: there is no checkpoint in {folder}")


@contextlib.contextmanager
def claimed(store: Store | None) -> Iterator[None]:
    """Locks the checkpoint folder against other runs until the block ends; without checkpoints (None) locks nothing.

    Only the first process of a run locks it.

    Raises:
        CheckpointError: Another run holds the lock, or the folder cannot be written to.
    """
    if store is None or jax.process_index() != 0:
        yield
        return
    with files.locked(Path(store.options.folder), "checkpoint folder", store.options.notify):
        yield


def has_checkpoint(folder: Path) -> bool:
    """Returns whether ``folder`` has a complete checkpoint of any run; its files are not verified."""
    return any(_rounds(run) for _, run in _numbered(folder, "run-"))


def for_run(store: Store, identity: Mapping[str, object], mapping: str, shapes: PyTree) -> Store:
    """Returns ``store`` with the values that identify one run.

    Args:
        store: The folder of the checkpoints, from ``open_store``.
        identity: Values that a resumed run must share with the run that it continues.
        mapping: Name of the run's mapping of clients onto devices.
        shapes: Shapes of one round's infos, the numbers that it reports for the history.
    """
    whole = {"config": plain(dict(store.options.config), "checkpoints.config"), **identity}
    circumstances = {**environment(), "mapping": mapping, "float": str(jax.numpy.result_type(float))}
    return store._replace(identity=whole, circumstances=circumstances, shapes=shapes)


def mapping_of(store: Store) -> str | None:
    """Returns the name of the mapping of clients onto devices of the run that is resumed.

    Returns None without a run to resume, or if that run was on devices of another kind or number.
    """
    for _, path in _rounds(store.folder) if store.options.resume else []:
        try:
            circumstances = _record(path)["circumstances"]
        except files.DamagedError:
            continue
        return circumstances.get("mapping") if circumstances.get("device") == environment()["device"] else None
    return None


def due(store: Store, saved: Saved) -> bool:
    """Returns whether enough time has passed since the last checkpoint to write the next, as ``Checkpoints`` explains.

    With a fixed interval of rounds the result is False.

    Args:
        store: The folder and options of the checkpoints.
        saved: The last checkpoint.
    """
    waited = time.monotonic() - saved.at
    return store.options.every is None and waited >= max(_SECONDS, _TIMES * saved.seconds)


def save(
    store: Store,
    saved: Saved,
    round_: int,
    state: PyTree,
    infos: PyTree,
    evaluations: list[Measurement],
    seconds: float,
) -> Saved:
    """Writes a checkpoint, and returns its description for the next call.

    Every process of the run must call it; the first process writes.

    Args:
        store: The folder of the checkpoints and the values that identify the run.
        saved: The previous checkpoint.
        round_: Rounds done.
        state: State after these rounds.
        infos: Infos (numbers for the history) of the rounds since ``saved``.
        evaluations: Evaluations since ``saved``.
        seconds: Run time so far.

    Raises:
        CheckpointError: The disk is full or cannot be written to.
        ValueError: A metric that a checkpoint cannot hold.
    """
    start = time.monotonic()
    arrays, shape, link = files.on_host(state), files.layout(state), None
    if jax.process_index() == 0:
        try:
            link = _write(store, Segment(saved.round, round_, saved.link, infos, evaluations, seconds), arrays, shape)
        except OSError as error:
            raise CheckpointError(f"checkpoint: cannot write in {store.folder}: {error.strerror}") from error
        except ValueError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):  # the message of orbax's writer for a full disk
                raise
            raise CheckpointError(f"checkpoint: cannot write in {store.folder}: no space left") from error
    now = time.monotonic()
    return Saved(round_, link, now, now - start)


def _write(store: Store, segment: Segment, arrays: dict[str, np.ndarray], shape: dict[str, str]) -> Link:
    content = encode(segment, store.shapes)
    link = Link(f"{segment.start:08d}-{segment.stop:08d}.npz", sha256(content))
    for history in HISTORIES:
        (store.folder / history).mkdir(parents=True, exist_ok=True)
        write_atomically(store.folder / history / link.name, content, durable=True)
    _write_round(store, segment.stop, arrays, shape, link)
    _tidy(store, segment.stop)
    return link


def _write_round(store: Store, round_: int, arrays: dict[str, np.ndarray], shape: dict[str, str], link: Link) -> None:
    final = store.folder / f"round-{round_:08d}"
    part = final.with_name(final.name + ".part")
    for stale in (part, final):
        if stale.exists():  # left by a kill, or damaged and therefore written again
            _remove(stale)
    part.mkdir()
    files.write_arrays(part / "state", arrays)
    record = {
        "format": FORMAT,
        "round": round_,
        "identity": store.identity,
        "circumstances": store.circumstances,
        "layout": shape,
        "history": link,
        "files": files.digests(part),
    }
    files.write_record(part / RECORD, record)
    os.rename(part, final)
    sync_folder(store.folder)


def _remove(folder: Path) -> None:
    """Removes a folder in such a way that a kill at any moment leaves nothing that looks like a checkpoint."""
    gone = folder.with_name(folder.name.removesuffix(".gone") + ".gone")
    if gone != folder:
        if gone.exists():
            shutil.rmtree(gone)
        os.rename(folder, gone)
    shutil.rmtree(gone)


def _tidy(store: Store, round_: int) -> None:
    """Removes checkpoints that are no longer needed after the one of round ``round_``.

    These are the folders of all other runs, all checkpoints up to ``round_`` but the newest ``keep``, and all later
    checkpoints, which are damaged.
    """
    newest = [path for r, path in _rounds(store.folder) if r <= round_][: store.options.keep]
    unwanted = [path for path in store.folder.iterdir() if path.name.startswith("round-") and path not in newest]
    for path in unwanted + [run for run in Path(store.options.folder).glob("run-*") if run != store.folder]:
        _remove(path)


def restore(store: Store, num_rounds: int, like: PyTree) -> RestoredRun:
    """Returns the run in the newest checkpoint that is not damaged; all files of the checkpoint are verified.

    A damaged file of the run's history is replaced by its second copy. The first process calls ``store.options.notify``
    with a line about every repaired file, every damaged checkpoint that is skipped, and every circumstance that
    differs, such as a version.

    Args:
        store: The folder of the checkpoints, with the values that identify the run to be continued.
        num_rounds: Rounds of the run that continues.
        like: A fresh state of this run.

    Raises:
        CheckpointError: The checkpoint is another run's (the message names the fields), is beyond ``num_rounds``, or
            has another format; or no checkpoint is good (the message says how each is damaged).
    """
    tell = store.options.notify if jax.process_index() == 0 else (lambda line: None)
    checked, damage = False, []
    for round_, path in _rounds(store.folder):
        try:
            record = _record(path)
            if not checked:
                _refuse_another_run(store, record, num_rounds, files.layout(like))
                checked = True
            run = _read(store, path, record, like)
        except files.DamagedError as error:
            damage.append(f"the checkpoint of round {round_} is damaged ({error})")
            continue
        for line in damage:
            tell(f"{line}; going back to round {round_}")
        for line in differences(record["circumstances"], store.circumstances):
            tell(f"differs from the run that is continued: {line}; results may differ in rounding")
        return run
    raise CheckpointError(f"resume: no good checkpoint in {store.folder}: {'; '.join(damage)}")


def _record(checkpoint: Path) -> dict[str, Any]:
    """Returns the content of ``record.json`` in a checkpoint's folder.

    Raises ``CheckpointError`` if it has another format, and ``DamagedError`` if it is incomplete or altered.
    """
    record = files.read_record(checkpoint / RECORD)
    if record.get("format", FORMAT) != FORMAT:
        raise CheckpointError(f"resume: the checkpoint has format {record['format']}, this version reads only {FORMAT}")
    missing = [name for name, kind in FIELDS.items() if not isinstance(record.get(name), kind)]
    if missing:
        raise files.DamagedError(f"{RECORD} has no {', '.join(missing)}")
    return record


def _refuse_another_run(store: Store, record: dict[str, Any], num_rounds: int, shape: dict[str, str]) -> None:
    # The caller's config is compared first: another seed also changes keys and data, which would hide the reason.
    before, now = record["identity"], store.identity
    fields = differences(before.get("config", {}), now["config"])
    fields = fields or differences(before, now) + differences(record["layout"], shape, "state")
    if fields:
        raise CheckpointError(f"resume: the checkpoint is of a run with other settings: {', '.join(fields)}")
    if record["round"] > num_rounds:
        least = record["round"]
        raise CheckpointError(f"num_rounds: got {num_rounds}, must be at least {least}, the round of the checkpoint")


def _read(store: Store, path: Path, record: dict[str, Any], like: PyTree) -> RestoredRun:
    files.check_digests(path, record["files"])
    last: Link | None = Link(*record["history"])
    link, segments = last, []
    while link is not None:
        segment = decode(_content(store, link), store.shapes)
        segments.append(segment)
        link = segment.previous
    segments.reverse()
    return RestoredRun(
        files.read_state(path / "state", like),
        [segment.infos for segment in segments],
        [evaluation for segment in segments for evaluation in segment.evaluations],
        Saved(record["round"], last, time.monotonic(), 0.0),
        segments[-1].seconds,
    )


def _content(store: Store, link: Link) -> bytes:
    """Returns the bytes of the segment of the history that ``link`` names.

    The segment is stored twice, and an intact copy replaces a damaged one. Raises ``DamagedError`` if both are
    damaged.
    """
    content, damaged = None, []
    for place in (store.folder / history / link.name for history in HISTORIES):
        try:
            content = files.read_checked(place, link.sha256)
        except files.DamagedError as error:
            damaged.append((place, error))
    if content is None:
        raise damaged[0][1]
    if jax.process_index() == 0:
        for place, harm in damaged:
            store.options.notify(f"{harm}, and is restored from its second file")
            place.parent.mkdir(exist_ok=True)
            write_atomically(place, content, durable=True)
    return content
