"""Runs as one HTML page that needs nothing else: figures within it, a style and a script of its own, no network."""

from __future__ import annotations

import base64
import csv
import importlib.resources
import json
import math
import struct
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from fedtangent._src.data.files import json_of
from fedtangent._src.output.files import FORMATS
from fedtangent._src.output.tables import FAILS, HOLDS, counted

DRAWN_PER_INCH, SHOWN_PER_INCH = 150, 96  # pixels: of the files, and what CSS calls one
LEGIBLE = 0.7  # of its natural size, below which a figure is not shrunk: it scrolls in its box
LONG = 120  # letters, beyond which a list of numbers is cut in a table
WORDS = 32  # letters of a column of words that stand in one line
TALL = 25  # rows, beyond which a table scrolls up and down as well
SHOWN_APART = {"rows", "verdicts", "status", "failed", "passed", "exit_code"}
KINDS: dict[str, dict[str, type]] = {  # of what the page is made, where a file has it
    "config.json": {"command": str, "options": dict, "resolved": dict, "environment": dict},
    "result.json": {"rows": list, "verdicts": list, "failed": list},
}


class ReportedRun(NamedTuple):
    """The files of a finished or unfinished run, as read from its folder for the report."""

    folder: Path
    config: Mapping[str, Any]
    result: Mapping[str, Any]  # empty where there is none yet
    last: Sequence[Mapping[str, str]]  # the rows of the last round in metrics.csv
    figures: Mapping[Path, bytes]

    @property
    def command(self) -> str:
        """The command that ran."""
        return str(self.config["command"])

    @property
    def ended(self) -> str:
        """The outcome of the run in a few words: its status, or the round at which an unfinished run stands."""
        code = self.result.get("exit_code")
        if code is None:
            at = f", at round {self.last[0]['round']}" if self.last else ""
            return f"unfinished{at}"
        return str(self.result.get("status") or f"exit code {code}")


def runs_below(folder: Path) -> list[Path]:
    """Finds the folders of runs: ``folder`` itself, or all runs below it; raises ``ValueError`` if there is no run."""
    if not folder.is_dir():
        raise ValueError(f"runs: got {folder}, must be a folder")
    found = _below(folder)
    if not found:
        raise ValueError(f"runs: got {folder}, must be the folder of a run, or have some below it")
    return found


def _below(folder: Path) -> list[Path]:
    """Finds the folders of runs, ordered by name; folders of reports are skipped."""
    path = folder / "config.json"
    if path.is_file() and _read(path).get("command", "report") != "report":
        return [folder]
    inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return [run for path in inner for run in _below(path)]


def _read(path: Path) -> dict[str, Any]:
    """Reads config.json or result.json; raises ``ValueError`` with the file's name if a run did not write it."""
    found = json_of("runs", path)
    if not isinstance(found, dict):
        raise ValueError(f"runs: {path} is no JSON that a run wrote")
    for name, kind in KINDS[path.name].items():
        if not isinstance(found.get(name), kind | None):
            raise ValueError(f"runs: {path} is none that a run wrote: {name} is of another kind")
    return found


def read_run(folder: Path) -> ReportedRun:
    """Reads the files of a run's folder; raises ``ValueError`` with the name of a file that cannot be read.

    Figures that were not written to their end are left out.
    """
    config = _read(folder / "config.json")
    if config.get("command") is None or config.get("options") is None:
        raise ValueError(f"runs: {folder / 'config.json'} is not the configuration of a run")
    path = folder / "result.json"
    result = _read(path) if path.exists() else {}
    drawn = {path: path.read_bytes() for path in sorted((folder / "figures").glob("*")) if path.suffix[1:] in FORMATS}
    figures = {path: content for path, content in drawn.items() if _is_whole(path, content)}
    return ReportedRun(folder, config, result, _last(folder / "metrics.csv"), figures)


def _last(path: Path) -> list[dict[str, str]]:
    """Reads the rows of the last round from metrics.csv, in the file's order."""
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if (row.get("round") or "").isdecimal()]
        latest = max((int(row["round"]) for row in rows), default=0)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"runs: {path} is no table that a run wrote") from error
    return [row for row in rows if int(row["round"]) == latest]


def _is_whole(path: Path, content: bytes) -> bool:
    known = FORMATS[path.suffix[1:]]
    return content.startswith(known.first) and content.endswith(known.last)


def page(runs: Sequence[ReportedRun], commands: Sequence[str], version: str) -> str:
    """Builds the HTML page: a table of all runs, then for each run its results, its options and its command line.

    Characters that UTF-8 cannot encode, as in some folders' names, are written as escapes.

    Args:
        runs: The runs, in the order of the page.
        commands: For each run the command line that repeats it.
        version: Version of fedtangent, for the footer.
    """
    style, script = (
        importlib.resources.files("fedtangent._src.output").joinpath(name).read_text(encoding="utf-8")
        for name in ("report.css", "report.js")
    )
    count = counted(len(runs), "run")
    rows = [
        {"run": _Link(f"#run-{i}", str(run.folder)), "command": run.command, "of": _subject(run)}
        | {"ended": run.ended, "in short": _in_short(run)}
        for i, run in enumerate(runs, start=1)
    ]
    bodies = (_article(i, run, line) for i, (run, line) in enumerate(zip(runs, commands, strict=True), start=1))
    whole = "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
            "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">",
            '<meta name="color-scheme" content="light dark">',
            f"<title>fedtangent: {count}</title>",
            f"<style>\n{style}</style>",
            "</head>",
            "<body>",
            f"<header><h1>{count} of fedtangent</h1></header>",
            "<main>",
            '<section aria-label="All runs">',
            _table("runs", rows),
            "</section>",
            *bodies,
            "</main>",
            f"<footer>Written by fedtangent {escape(version)}. A click on a column's name sorts by it.</footer>",
            f"<script>\n{script}</script>",
            "</body>",
            "</html>\n",
        ]
    )
    return whole.encode(errors="backslashreplace").decode()


class _Link(NamedTuple):
    """A link within the page."""

    to: str
    text: str


def _subject(run: ReportedRun) -> str:
    """Returns the subject of the run: algorithm, data set and model, or the name and scale of an experiment."""
    options = run.config["options"]
    if "algorithm" in options:
        parts = (_words(options["algorithm"]), _words(options.get("dataset")), _words(options.get("model")))
        return ", ".join(part for part in parts if part)
    named = options.get("name") or options.get("case") or options.get("only")
    return " ".join(part for part in (_words(named), _words(options.get("scale"))) if part)


def _words(value: Any) -> str:
    """Returns the value of an option as text; "" for None."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


def _in_short(run: ReportedRun) -> str:
    """Returns the counts of verdicts, or if there are no verdicts the first two test metrics."""
    judged = _verdicts(run)
    if judged:
        counts = {word: sum(row["passed"] is mark for row in judged) for mark, word in PASSED.items()}
        return "verdicts: " + ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    rows = run.result.get("rows") or run.last
    test = [r for r in rows if isinstance(r, Mapping) and r.get("split") == "test" and {"metric", "value"} <= r.keys()]
    return ", ".join(f"test {row['metric']} {_text(_number(row['value']))}".replace("_", " ") for row in test[:2])


PASSED = {True: "as they must be", False: "not as they must be", None: "undecided"}
MARKS = ("holds", "control_fails", "passed")


def _verdicts(run: ReportedRun) -> list[Mapping[str, Any]]:
    """Returns the verdicts of a run; for check-theory these are the rows of its table."""
    found = run.result.get("verdicts") or run.result.get("rows") or []
    return [row for row in found if _is_verdict(row)]


def _is_verdict(row: Any) -> bool:
    """Tells whether a row of a table is a verdict: each of its ``MARKS`` is True, False or None."""
    return isinstance(row, Mapping) and all(isinstance(row.get(mark, ""), bool | None) for mark in MARKS)


def _article(place: int, run: ReportedRun, line: str) -> str:
    """Builds the section of the page about one run."""
    result, config = run.result, run.config
    facts = {"command": run.command, "of": _subject(run), "ended": run.ended}
    facts |= {name: result[name] for name in ("rounds", "seconds") if isinstance(result.get(name), int | float)}
    parts = [
        f'<article id="run-{place}" aria-labelledby="name-{place}">',
        f'<h2 id="name-{place}">{escape(str(run.folder))}</h2>',
        "<dl>",
        *(f"<div><dt>{escape(name)}</dt><dd>{escape(_text(value))}</dd></div>" for name, value in facts.items()),
        "</dl>",
        "<h3>To repeat it</h3>",
        _box("command", f"<pre><code>{_unbroken(line)}</code></pre>"),
    ]
    if run.figures:
        drawn = [_figure(path, content, run) for path, content in run.figures.items()]
        parts += ["<h3>Figures</h3>", '<div class="figures">', *drawn, "</div>"]
    if result.get("rows"):
        parts += ["<h3>Results</h3>", _table("results", _rows(result["rows"]))]
    elif run.last:
        parts += [f"<h3>At round {escape(run.last[0]['round'])}</h3>", _table("metrics", [*map(_numbers, run.last)])]
    if result.get("verdicts"):
        parts += ["<h3>Verdicts</h3>", _table("verdicts", _rows(result["verdicts"]))]
    more = {name: value for name, value in result.items() if name not in SHOWN_APART | facts.keys()}
    for name, rows in [(name, value) for name, value in more.items() if _is_table(value)]:
        parts += [f"<details><summary>{escape(_plain(name))}</summary>", _table(name, _rows(rows)), "</details>"]
        del more[name]
    told = {"configuration": config["options"], "resolved": config.get("resolved"), "found": more}
    told["versions"] = config.get("environment")
    for name, values in told.items():
        if values:
            rows = [{"name": key, "value": value} for key, value in dict(values).items()]
            parts += [f"<details><summary>{name}</summary>", _table(name, rows), "</details>"]
    return "\n".join([*parts, "</article>"])


def _unbroken(line: str) -> str:
    """Returns the HTML of a command line that browsers break only in front of an option."""
    first, *options = line.split(" --")
    return " ".join([escape(first), *(f"<span>--{escape(option)}</span>" for option in options)])


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _rows(value: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Converts a list to rows of a table, with verdicts in the words of the terminal's table."""
    return [_in_words(row) if isinstance(row, Mapping) else {"value": row} for row in value]


def _in_words(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if not _is_verdict(row):
        return row
    said = {"holds": HOLDS[row["holds"]][0], "control_fails": FAILS[row["control_fails"]][0]}
    return {name: said.get(name, value) for name, value in row.items() if name != "passed"}


def _numbers(row: Mapping[str, str]) -> dict[str, Any]:
    return {name: _number(value) for name, value in row.items() if name and value != ""}


def _number(value: Any) -> Any:
    """Converts a text to int or float; returns any other value unchanged."""
    try:
        return int(value) if isinstance(value, str) and value.isdecimal() else float(value)
    except (TypeError, ValueError):
        return value


def _figure(path: Path, content: bytes, run: ReportedRun) -> str:
    """Embeds a figure in the page; a PDF becomes a link, since browsers do not show PDFs inline."""
    name, kind = _plain(path.stem), FORMATS[path.suffix[1:]].kind
    data = f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
    if path.suffix == ".pdf":
        return f'<figure><a download="{escape(path.name)}" href="{data}">{escape(path.name)}</a></figure>'
    told = f"{name} of {run.command} in {run.folder.name}"
    image = f'<img src="{data}" alt="{escape(told)}"{_size(content) if path.suffix == ".png" else ""}>'
    return f"<figure>{_box(name, image)}<figcaption>{escape(name)}</figcaption></figure>"


def _size(content: bytes) -> str:
    """Returns the HTML size of a PNG: at most as large as drawn, and at least legible. SVGs have their own size."""
    width, height = struct.unpack(">II", content[16:24])
    shown = round(width * SHOWN_PER_INCH / DRAWN_PER_INCH)
    return f' width="{width}" height="{height}" style="width:{shown}px;min-width:{round(LEGIBLE * shown)}px"'


def _box(name: str, content: str, kind: str = "") -> str:
    """Puts content that may be wider than the screen into a box that scrolls, also with the keyboard."""
    return f'<div class="scroll{kind}" role="region" tabindex="0" aria-label="{escape(_plain(name))}">{content}</div>'


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Builds a sortable HTML table with every column in which some row has a value."""
    columns = list(dict.fromkeys(column for row in rows for column in row if row[column] not in (None, "")))
    numeric = {c for c in columns if all(_is_number(row[c]) for row in rows if row.get(c) is not None)}
    lines = ["<table>", "<thead><tr>"]
    for column in columns:
        longest = max(len(_text(row.get(column))) for row in rows)
        kind = ' class="number"' if column in numeric else f' style="min-width:{min(longest, WORDS)}ch"'
        lines.append(f'<th scope="col"{kind}><button type="button">{escape(_plain(str(column)))}</button></th>')
    lines.append("</tr></thead><tbody>")
    for row in rows:
        lines.append(f"<tr>{''.join(_cell(row.get(column), column in numeric) for column in columns)}</tr>")
    lines.append("</tbody></table>")
    return _box(name, "\n".join(lines), " tall" if len(rows) > TALL else "")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any, numeric: bool) -> str:
    if isinstance(value, _Link):
        return f'<td><a href="{escape(value.to)}">{escape(value.text)}</a></td>'
    if not numeric:
        return f"<td>{escape(_text(value))}</td>"
    known = "" if value is None else f' data-value="{escape(repr(value))}" title="{escape(repr(value))}"'
    return f'<td class="number"{known}>{escape(_text(value))}</td>'


def _text(value: Any) -> str:
    """Returns a value as readable text, with 4 digits of a float."""
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
    said = json.dumps(value, ensure_ascii=False)
    return said if len(said) <= LONG or not _is_long(value) else f"{said[:LONG]} …"


def _is_long(value: Any) -> bool:
    """Tells whether a value is a list of numbers only, which can be cut after its first entries."""
    return isinstance(value, list) and all(isinstance(one, int | float | list) for one in value)


def _plain(name: str) -> str:
    return name.replace("_", " ")
