"""``fedtangent report``: finished runs as one HTML page, with their commands."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

import fedtangent
from fedtangent._src.cli import commands
from fedtangent._src.cli.arguments import Option, words
from fedtangent._src.engine.description import DECIDING
from fedtangent._src.entries import Values
from fedtangent._src.output.files import Ended, output_folder, write_config, write_result
from fedtangent._src.output.report import ReportedRun, page, read_run, runs_below
from fedtangent._src.output.tables import TextTable, console, counted
from fedtangent._src.storage import write_atomically


@dataclass(frozen=True)
class ReportOptions:
    """Options of ``fedtangent report``: the folders of the runs, and the folder for the HTML page."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional] = ("results",)
    """Folders of runs, or folders with folders of runs below them."""
    output: Path = Path("results/report")
    """Folder for the page, report.html, which needs no other file."""


class ReportJob(NamedTuple):
    """The runs of a report, and its HTML page."""

    options: ReportOptions
    runs: list[ReportedRun]  # commands, results and figures, read from the folders of the runs
    html: str  # text of the page


def prepare(options: ReportOptions) -> ReportJob:
    """Reads the files of all runs and builds the page in memory.

    Raises ``ValueError`` if ``options.runs`` is empty, if a folder has no run or cannot be read, or if the output
    folder is one of the runs.
    """
    if not options.runs:
        raise ValueError("runs: got none, must be folders of runs")
    try:
        below = [folder for place in options.runs for folder in runs_below(Path(place))]
        folders = {folder.resolve(): folder for folder in below}  # a folder with two names counts once
        runs = [read_run(folder) for folder in folders.values()]
        html = page(runs, [command_of(run) for run in runs], fedtangent.__version__)
    except OSError as error:
        raise ValueError(f"runs: cannot read {error.filename}: {error.strerror}") from error
    if options.output.resolve() in folders:
        raise ValueError(f"output: got {options.output}, which is one of the runs: name another folder")
    return ReportJob(options, runs, html)


def run_job(job: ReportJob) -> Ended:
    """Writes the HTML page and prints a table of its runs; returns the outcome of the command."""
    folder, screen = output_folder(job.options.output), console()
    write_config(folder, "report", job.options)
    write_atomically(folder / "report.html", job.html)
    rows = [{"run": str(run.folder), "command": run.command, "ended": run.ended} for run in job.runs]
    write_result(folder, rows)
    screen.print(TextTable(None, ("run", "command", "ended"), [tuple(row.values()) for row in rows]))
    figures = sum(len(run.figures) for run in job.runs)
    count = f"{counted(len(rows), 'run')}, {counted(figures, 'figure')}"
    screen.print(f"{count} in {folder / 'report.html'}", highlight=False)
    return Ended()


def command_of(run: ReportedRun) -> str:
    """Returns the command line that repeats a run, with the options that differ from their defaults.

    If that line would not give all values of the run (a run of another version, say), it names the run's config.json.
    """
    path = ["--config", str(run.folder / "config.json")]
    try:
        whole = _values(run.command, path)
        decided = {name: whole[name] for name in DECIDING if whole.get(name) is not None}
        first = {name: value[0] if isinstance(value, list) else value for name, value in decided.items()}
        several = whole["algorithm"] if isinstance(whole.get("algorithm"), list) else []
        options: dict[str, Option] = {}
        for chosen in [first, *({**first, "algorithm": name} for name in several[1:])]:
            options = commands.options_by_name(commands.groups_of(commands.find(run.command, *path), chosen)) | options
        decided |= {name: value for name, value in whole.items() if options[name].positional}
        usual = _values(run.command, words(decided, options))
        needed = decided | {name: value for name, value in whole.items() if value != usual.get(name)}
        for name in decided:  # leaves out the choices that are defaults
            fewer = {other: value for other, value in needed.items() if other != name}
            needed = fewer if _means(run.command, words(fewer, options), whole) else needed
        line = words(needed, options)
        if _means(run.command, line, whole):
            return shlex.join([commands.PROGRAM, run.command, *line])
    except ValueError:
        pass
    return shlex.join([commands.PROGRAM, run.command, *path])


def _values(command: str, line: Sequence[str]) -> Values:
    """Parses the words ``line`` of a command; returns the value of every option of the run, with paths as text."""
    values = commands.read(commands.find(command, *line), line).values
    return {n: str(v) if isinstance(v, Path) else v for n, v in values.items() if n not in commands.ANEW}


def _means(command: str, line: Sequence[str], values: Mapping[str, object]) -> bool:
    """Tells whether parsing the words ``line`` of a command gives exactly the option values ``values``."""
    try:
        return _values(command, line) == values
    except ValueError:
        return False
