"""The report of finished runs: one HTML page that contains its figures, style and script."""

from __future__ import annotations

import base64
import csv
import importlib.resources
import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from fedtangent._src.data.files import json_of
from fedtangent._src.output.files import FORMATS, Row
from fedtangent._src.output.tables import FAILS, HOLDS, counted

FILE_PIXELS, CSS_PIXELS = 150, 96  # pixels of an inch in the files, and in CSS
LEGIBLE = 0.7  # smallest share of its natural size to which a figure is shrunk; then it scrolls in its box
LONG = 120  # most letters of a list of numbers in a table
WORDS = 32  # most letters on one line of a column of words
TALL = 25  # rows of a table from which on it scrolls up and down as well
APART = {"rows", "verdicts", "status", "failed", "passed", "exit_code"}  # entries of result.json with their own place
KINDS: dict[str, dict[str, type]] = {  # types of the entries of a file that the page shows
    "config.json": {"command": str, "options": dict, "resolved": dict, "environment": dict},
    "result.json": {"rows": list, "verdicts": list, "failed": list},
}


class ReportedRun(NamedTuple):
    """The files of a run's folder, as read for the report; the run may be unfinished.

    Attributes:
        folder: Folder of the run.
        config: Content of config.json.
        result: Content of result.json, empty if the run has not written it yet.
        last: Rows of the last round in metrics.csv.
        figures: Bytes of each figure, by its path.
    """

    folder: Path
    config: Row
    result: Row
    last: Sequence[Mapping[str, str]]
    figures: Mapping[Path, bytes]

    @property
    def command(self) -> str:
        """Name of the command that wrote the run."""
        return str(self.config["command"])

    @property
    def ended(self) -> str:
        """Outcome of the run in a few words: its status, or the round that an unfinished run has reached."""
        code = self.result.get("exit_code")
        if code is None:
            at = f", at round {self.last[0]['round']}" if self.last else ""
            return f"unfinished{at}"
        return str(self.result.get("status") or f"exit code {code}")


def runs_below(folder: Path) -> list[Path]:
    """Finds the folders of runs: ``folder`` itself if it holds a run, else all folders below it that hold one.

    Raises:
        ValueError: ``folder`` is no folder, there is no run in it or below it, or a config.json is not a run's.
    """
    if not folder.is_dir():
        raise ValueError(f"runs: got {folder}, must be a folder")
    folders = _below(folder)
    if not folders:
        raise ValueError(f"runs: got {folder}, must be the folder of a run, or have folders of runs in it")
    return folders


def _below(folder: Path) -> list[Path]:
    """Finds the folders of runs at or below ``folder``, ordered by name; the folder of a report is not one of them."""
    path = folder / "config.json"
    if path.is_file() and _read(path).get("command", "report") != "report":
        return [folder]
    inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return [run for path in inner for run in _below(path)]


def _read(path: Path) -> Row:
    """Reads config.json or result.json of a run; raises ``ValueError`` if the file does not look as a run writes it."""
    content = json_of("runs", path)
    if not isinstance(content, dict):
        raise ValueError(f"runs: {path} is not a JSON file of a run")
    for name, kind in KINDS[path.name].items():
        if not isinstance(content.get(name), kind | None):
            got = type(content.get(name)).__name__
            raise ValueError(f"runs: {path} is not a file of a run: {name} is a {got}, must be a {kind.__name__}")
    return content


def read_run(folder: Path) -> ReportedRun:
    """Reads the files of a run's folder; leaves out figures that are written only in part.

    Raises:
        ValueError: A file cannot be read, or no run has written it; the message has its name.
    """
    config = _read(folder / "config.json")
    if config.get("command") is None or config.get("options") is None:
        path = folder / "config.json"
        raise ValueError(f"runs: {path} is not the configuration of a run, must have command and options")
    path = folder / "result.json"
    result = _read(path) if path.exists() else {}
    paths = [path for path in sorted((folder / "figures").glob("*")) if path.suffix[1:] in FORMATS]
    contents = {path: path.read_bytes() for path in paths}
    figures = {path: content for path, content in contents.items() if _is_whole(path, content)}
    return ReportedRun(folder, config, result, _last(folder / "metrics.csv"), figures)


def _last(path: Path) -> list[dict[str, str]]:
    """Reads the rows of the last round from metrics.csv; returns an empty list if there is no such file.

    Raises ``ValueError`` if the file cannot be read as a table.
    """
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if (row.get("round") or "").isdecimal()]
        latest = max((int(row["round"]) for row in rows), default=0)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"runs: {path} is not the table of a run") from error
    return [row for row in rows if int(row["round"]) == latest]


def _is_whole(path: Path, content: bytes) -> bool:
    kind = FORMATS[path.suffix[1:]]
    return content.startswith(kind.first) and content.endswith(kind.last)


class _Link(NamedTuple):
    """A link to a section of the HTML page."""

    anchor: str
    text: str


class _Column(NamedTuple):
    name: str
    is_number: bool
    width: int  # least number of letters of a column of words


class _Table(NamedTuple):
    columns: list[_Column]
    rows: Sequence[Row]


def page(runs: Sequence[ReportedRun], commands: Sequence[str], version: str) -> str:
    """Builds the HTML page: a table of all runs, then for each run its results, its options and its command line.

    Args:
        runs: The runs, in the order of the page.
        commands: For each run the command line that repeats it.
        version: Version of fedtangent, for the footer.
    """
    files = importlib.resources.files("fedtangent._src.output")
    template, style, script = (
        files.joinpath(f"report.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    rows = [
        {
            "run": _Link(f"run-{i}", str(run.folder)),
            "command": run.command,
            "of": _subject(run),
            "ended": run.ended,
            "in short": _in_short(run),
        }
        for i, run in enumerate(runs, start=1)
    ]
    text = ENVIRONMENT.from_string(template).render(
        count=counted(len(runs), "run"),
        overview=_table(rows),
        runs=[_article(run, line) for run, line in zip(runs, commands, strict=True)],
        tall=TALL,
        version=version,
        style=style,
        script=script,
    )
    return text.encode(errors="backslashreplace").decode()


def _subject(run: ReportedRun) -> str:
    """Returns the subject of a run: its algorithm, data set and model, or the name and scale of an experiment."""
    options = run.config["options"]
    if "algorithm" in options:
        return ", ".join(filter(None, (_words(options.get(name)) for name in ("algorithm", "dataset", "model"))))
    name = options.get("name") or options.get("case") or options.get("only")
    return " ".join(filter(None, (_words(name), _words(options.get("scale")))))


def _words(value: object) -> str:
    """Converts the value of an option to text; None becomes ""."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


def _in_short(run: ReportedRun) -> str:
    """Summarises a run in a line: how many verdicts passed, or if it has no verdicts the first two test metrics."""
    verdicts = run.result.get("verdicts") or run.result.get("rows") or []  # of check-theory the rows are verdicts
    passed = [row["passed"] for row in verdicts if _is_verdict(row)]
    if passed:
        return "verdicts: " + ", ".join(
            f"{passed.count(mark)} {text}" for mark, text in PASSED.items() if mark in passed
        )
    rows = run.result.get("rows") or run.last
    test = [r for r in rows if isinstance(r, Mapping) and r.get("split") == "test" and {"metric", "value"} <= r.keys()]
    return ", ".join(f"test {row['metric']} {_text(_number(row['value']))}".replace("_", " ") for row in test[:2])


PASSED = {True: "as they must be", False: "not as they must be", None: "undecided"}
MARKS = ("holds", "control_fails", "passed")


def _is_verdict(row: object) -> bool:
    """Returns whether a row of a table is a verdict: its "holds", "control_fails", "passed" are True, False or None."""
    return isinstance(row, Mapping) and all(isinstance(row.get(mark, ""), bool | None) for mark in MARKS)


def _article(run: ReportedRun, line: str) -> Row:
    """Collects the parts of the page about one run: facts, tables, figures, options and the command ``line``."""
    result, config = run.result, run.config
    facts = {"command": run.command, "of": _subject(run), "ended": run.ended}
    facts |= {name: result[name] for name in ("rounds", "seconds") if isinstance(result.get(name), int | float)}
    tables = []
    if result.get("rows"):
        tables.append(("Results", "results", _table(_rows(result["rows"]))))
    elif run.last:
        rows = [{name: _number(value) for name, value in row.items() if name and value != ""} for row in run.last]
        tables.append((f"At round {run.last[0]['round']}", "metrics", _table(rows)))
    if result.get("verdicts"):
        tables.append(("Verdicts", "verdicts", _table(_rows(result["verdicts"]))))
    more = {name: value for name, value in result.items() if name not in APART | facts.keys()}
    details = {name: _table(_rows(more.pop(name))) for name, value in list(more.items()) if _is_table(value)}
    records = {"configuration": config["options"], "resolved": config.get("resolved"), "found": more}
    records["versions"] = config.get("environment")
    for name, record in records.items():
        if record:
            details[name] = _table([{"name": key, "value": value} for key, value in dict(record).items()])
    command, *options = line.split(" --")  # browsers break the line only in front of an option
    figures = [_figure(path, content) for path, content in run.figures.items()]
    names = {"folder": run.folder, "command": command, "options": options}
    return {**names, "facts": facts, "figures": figures, "tables": tables, "details": details}


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _rows(value: Sequence[object]) -> list[Row]:
    """Converts a list to the rows of a table; verdicts get words for True and False, and lose the entry "passed"."""
    return [_in_words(row) if isinstance(row, dict) else {"value": row} for row in value]


def _in_words(row: Row) -> Row:
    if not _is_verdict(row):
        return row
    words = {"holds": HOLDS[row["holds"]][0], "control_fails": FAILS[row["control_fails"]][0]}
    return {name: words.get(name, value) for name, value in row.items() if name != "passed"}


def _number(value: Any) -> Any:
    """Converts decimal digits to an int, any other number or text of one to a float; returns all else unchanged."""
    try:
        return int(value) if isinstance(value, str) and value.isdecimal() else float(value)
    except (TypeError, ValueError):
        return value


def _figure(path: Path, content: bytes) -> Row:
    """Returns the values with which the page embeds a figure: names, data, and for a PNG its size.

    The size has width and height of the file, and its natural and smallest width on the page in CSS pixels.
    """
    data = f"data:{FORMATS[path.suffix[1:]].kind};base64,{base64.b64encode(content).decode('ascii')}"
    figure: Row = {"name": _plain(path.stem), "file": path.name, "data": data}
    if path.suffix != ".png":
        return figure
    width, height = struct.unpack(">II", content[16:24])
    natural = round(width * CSS_PIXELS / FILE_PIXELS)
    size = {"width": width, "height": height, "shown": natural, "least": round(LEGIBLE * natural)}
    return {**figure, "size": size}


def _table(rows: Sequence[Row]) -> _Table:
    """Returns a table of the columns in which at least one row has a value."""
    columns = []
    for name in dict.fromkeys(name for row in rows for name in row if row[name] not in (None, "")):
        is_number = all(_is_number(row[name]) for row in rows if row.get(name) is not None)
        longest = max(len(_text(row.get(name))) for row in rows)
        columns.append(_Column(str(name), is_number, min(longest, WORDS)))
    return _Table(columns, rows)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: object) -> str:
    """Converts a value to text for the page: "-" for None, "yes" or "no", floats with 4 significant digits.

    Mappings and lists become JSON; a long list of numbers is cut off after ``LONG`` characters.
    """
    if value is None:
        return "-"
    if isinstance(value, _Link):
        return value.text
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    if isinstance(value, str | int):
        return str(value)
    text = json.dumps(value, ensure_ascii=False)
    is_list_of_numbers = isinstance(value, list) and all(isinstance(one, int | float | list) for one in value)
    return f"{text[:LONG]} …" if is_list_of_numbers and len(text) > LONG else text


def _plain(name: str) -> str:
    return name.replace("_", " ")


ENVIRONMENT = jinja2.Environment(autoescape=True)
ENVIRONMENT.filters |= {"text": _text, "plain": _plain}
