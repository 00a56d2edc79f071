"""The files of an output folder: config.json, metrics.csv, result.json, and the event files of TensorBoard."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import importlib.util
import io
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedtangent._src.data.files import json_of
from fedtangent._src.engine.history import FINISHED
from fedtangent._src.engine.processes import environment
from fedtangent._src.storage import PART, write_atomically

# Everything that a run writes, except for the kernels of predict, which later runs use again if they fit.
WRITTEN = ("config.json", "metrics.csv", "result.json", "figures", "checkpoints", "runs", "tensorboard", "report.html")


Row = dict[str, Any]  # a row of the table in result.json, by column


class Metric(NamedTuple):
    """One row of metrics.csv: the value of one metric at one evaluation of a run.

    ``uplink_bytes`` and ``downlink_bytes`` are totals up to the round. ``seconds`` is the time since the run
    began, or None if it was not measured.
    """

    round: int
    algorithm: str
    seed: int
    split: str  # "train" or "test"
    metric: str
    value: float
    uplink_bytes: int
    downlink_bytes: int
    seconds: float | None = None  # by the clock since that run began, where that was measured


class Format(NamedTuple):
    """A file format of figures: its MIME type, and the bytes with which a file begins and ends."""

    kind: str
    first: bytes
    last: bytes


FORMATS = {
    "png": Format("image/png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"IEND\xaeB`\x82"),
    "pdf": Format("application/pdf", b"%PDF-", b"%%EOF\n"),
    "svg": Format("image/svg+xml", b"<?xml", b"</svg>\n"),
}


class Figures(NamedTuple):
    """Folder and file format of the figures that a command draws; ``kind`` is "png", "pdf" or "svg"."""

    folder: Path
    kind: str = "png"

    def path(self, name: str) -> Path:
        """Returns the path of the figure called ``name``."""
        return self.folder / f"{name}.{self.kind}"


ERROR = 2  # exit code of a command that cannot do its work
UNDECIDED = 3  # exit code of a command with --strict whose verdicts do not fail, but of which one is undecided


class Ended(NamedTuple):
    """The outcome of a command.

    Attributes:
        status: Status for result.json.
        code: Exit code.
        advice: Advice to the user, printed after a failure.
        remark: Last line that is printed if nothing failed.
    """

    status: str = FINISHED
    code: int = 0
    advice: str = ""
    remark: str = ""


def ended(failures: Iterable[str], advice: str = "", undecided: Sequence[str] = (), strict: bool = False) -> Ended:
    """Returns the outcome of a command: exit code 1 with all failures as its status, or success without failures.

    Args:
        failures: Descriptions of the failures, a few words each.
        advice: Advice to the user after a failure.
        undecided: Names of the undecided verdicts, for the last line.
        strict: Whether undecided verdicts without a failure end with exit code 3 instead of 0.
    """
    failed, remark = list(failures), f"undecided: {', '.join(undecided)}" if undecided else ""
    if failed:
        return Ended("; ".join([*failed, *[remark] * bool(remark)]), 1, advice)
    return Ended(remark, UNDECIDED) if remark and strict else Ended(remark=remark)


def output_folder(path: str | os.PathLike[str]) -> Path:
    """Creates the folder at ``path`` if need be, and returns it.

    Raises ``ValueError`` if it cannot be created, or if there is a file ``figures`` in it.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output: cannot make the folder {folder}: {error.strerror}") from error
    figures = folder / "figures"  # made with the first of them, when the work is done
    if os.path.lexists(figures) and not figures.is_dir():
        raise ValueError(f"output: got {folder}, in which {figures.name} is not a folder: name another folder")
    return folder


def check_free(folder: Path, command: str, options: Mapping[str, object], goes_on: bool, can_go_on: bool) -> None:
    """Raises ``ValueError`` if ``folder`` holds a run, unless the command may continue this run.

    Args:
        folder: Output folder.
        command: Name of the command that is to write there.
        options: Values of the options by which the command's run differs from other runs.
        goes_on: Whether the command may continue the run in the folder.
        can_go_on: Whether the error message should offer ``--resume``.

    Raises:
        ValueError: The folder holds a run of another command or with other options, which the message names, or a run
            that is not to be continued.
    """
    config = config_of(folder)
    if config is None:
        return
    if config.get("command") != command:
        raise ValueError(
            f"output: {folder} holds a run of fedtangent {config.get('command')}: name another folder, or give "
            "--overwrite to replace it"
        )
    if not goes_on:
        more = ", --resume to continue it" if can_go_on else ""
        raise ValueError(f"output: {folder} holds a run: name another folder{more} or --overwrite to replace it")
    before, now = config.get("options", {}), _finite(options)
    texts = {name: (json.dumps(before.get(name)), json.dumps(_plain(value))) for name, value in now.items()}
    differ = [f"{name} ({old} there, {new} here)" for name, (old, new) in texts.items() if old != new]
    if differ:
        advice = f"repeat its options, or give --config {folder / 'config.json'}"
        raise ValueError(f"output: {folder} holds a run with other options, {', '.join(differ)}: {advice}")


def config_of(folder: Path) -> dict[str, Any] | None:
    """Returns the content of config.json in ``folder``; None if there is no such file.

    For a file that cannot be read as the config of a run, it returns only the entry "command", with the text "that
    cannot be read".
    """
    path, config = folder / "config.json", None
    if not path.exists():
        return None
    with contextlib.suppress(ValueError):
        config = json_of("output", path)
    return config if isinstance(config, dict) and "command" in config else {"command": "that cannot be read"}


def clear(folder: Path, whole: bool = True) -> None:
    """Removes the files of a run from an output folder.

    Args:
        folder: Output folder.
        whole: True to remove all files of the run, if there is a config.json; False to remove only the incomplete
            files of a killed process.
    """
    halves = [path for name in WRITTEN for path in folder.glob(f"{name}.*{PART}")]
    for path in halves + ([folder / name for name in WRITTEN] if whole and config_of(folder) is not None else []):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _plain(value: Any) -> object:
    """Converts ``value`` to types that JSON has; numbers that are not finite become null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.generic):
        return value.item()
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def _finite(options: Mapping[str, object]) -> dict[str, object]:
    """Returns the options with infinities and NaN as text, since JSON has neither."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in options.items()}


def write_json(path: Path, value: object) -> None:
    """Writes a value to a JSON file, atomically; numbers that are not finite become null.

    Args:
        path: File to write.
        value: A dataclass, NamedTuple, dict or list.
    """
    write_atomically(path, json.dumps(_plain(value), indent=2) + "\n")


def write_config(folder: Path, command: str, config: Any, **more: object) -> None:
    """Writes config.json, which has all that is needed to repeat a run: the command, its options and the environment.

    Also removes result.json and the figures that an earlier part of the same run has written.

    Args:
        folder: Output folder.
        command: Name of the command.
        config: Options, as a mapping or a dataclass.
        **more: Further entries of the file.
    """
    figures = [path for path in folder.glob("figures/*") if path.suffix[1:] in FORMATS]
    for path in (folder / "result.json", *figures):
        path.unlink(missing_ok=True)
    options = config if isinstance(config, Mapping) else dataclasses.asdict(config)
    whole = {"command": command, "options": _finite(options), **more, "environment": environment()}
    write_json(folder / "config.json", whole)


def write_metrics(folder: Path, metrics: Iterable[Metric]) -> None:
    """Writes metrics.csv, atomically.

    Args:
        folder: Output folder.
        metrics: All rows of the file.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(Metric._fields)
    writer.writerows(metrics)
    write_atomically(folder / "metrics.csv", text.getvalue())


def write_result(folder: Path, rows: Iterable[object], **more: object) -> None:
    """Writes result.json, atomically.

    Args:
        folder: Output folder.
        rows: Rows of the final table.
        **more: Further entries of the file.
    """
    write_json(folder / "result.json", {"rows": list(rows), **more})


def write_end(folder: Path, ended: Ended) -> None:
    """Adds the status and the exit code of a command to result.json, if the command has written that file.

    Args:
        folder: Output folder.
        ended: Outcome of the command.
    """
    path = folder / "result.json"
    if path.exists():
        result = json.loads(path.read_text(encoding="utf-8"))
        write_json(path, result | {"status": ended.status, "exit_code": ended.code})


def check_tensorboard() -> None:
    """Raises ``ValueError`` if tensorboardX is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ValueError(
            "log: got tensorboard, but tensorboardX is not installed: pip install 'fedtangent[tensorboard]'"
        )


@contextlib.contextmanager
def tensorboard(folder: Path) -> Iterator[Callable[[Iterable[Metric]], None]]:
    """Opens a writer of metrics for TensorBoard below ``folder``/tensorboard, with one TensorBoard run for each seed.

    Yields a function that writes the metrics of an evaluation to disk. Its first call removes the files of an earlier
    writer, since a resumed run writes all its evaluations again. Each metric is a scalar ``split/metric`` at its round.
    The bytes sent up to this round are ``bytes/uplink`` and ``bytes/downlink``.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    place, begun, writers = folder / "tensorboard", time.time(), dict[int, EventsWriter]()

    def write(metrics: Iterable[Metric]) -> None:
        if not writers:
            shutil.rmtree(place, ignore_errors=True)
        for m in metrics:
            if m.seed not in writers:
                (place / f"seed-{m.seed}").mkdir(parents=True)
                writers[m.seed] = EventsWriter(str(place / f"seed-{m.seed}" / "events"))
            scalars = {f"{m.split}/{m.metric}": m.value}
            scalars |= {"bytes/uplink": m.uplink_bytes, "bytes/downlink": m.downlink_bytes}
            values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
            at = begun + (m.seconds or 0.0)  # so that the axis of time has the run's seconds
            writers[m.seed].write_event(Event(step=m.round, wall_time=at, summary=Summary(value=values)))
        for writer in writers.values():
            writer.flush()

    try:
        yield write
    finally:
        for writer in writers.values():
            writer.close()
