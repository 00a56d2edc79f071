"""``fedtangent check-theory``: every theorem against simulation, and a wrong theory too."""

from __future__ import annotations

import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

from fedtangent._src import cli
from fedtangent._src.checks import MAX_SEED, choice, seed
from fedtangent._src.cli.arguments import VerdictOptions
from fedtangent._src.comparison.theorems import SCALES, TheoremEntry, wanted
from fedtangent._src.comparison.verdicts import Verdict, as_rows, summary
from fedtangent._src.entries import option
from fedtangent._src.output.files import Ended, output_folder, write_config, write_result
from fedtangent._src.output.tables import clock, console, show_times, show_verdicts


@dataclass(frozen=True)
class CheckTheoryOptions:
    """Options of the theorem checks.

    The command exits with 1 if any check fails, or if a wrong theory, the negative control of a check, passes.
    """

    scale: str = "default"
    """Size: smoke (the quickest checks of every group), default (minutes) or paper (more and wider networks)."""
    only: tuple[str, ...] = ()
    """Run only these checks (`fedtangent list theorems`), or all of a group, such as fed_ensemble or deep_linear."""
    seed: int = option(0, most=MAX_SEED)
    """Seed of data, partitions, schedules and initialisations."""
    output: Path = Path("results/check-theory")
    """Folder for config.json and result.json."""


TheoryJob = tuple[CheckTheoryOptions, VerdictOptions, dict[str, TheoremEntry]]


def prepare(options: CheckTheoryOptions, verdicts: VerdictOptions) -> TheoryJob:
    """Checks the options of ``check-theory`` before anything is written, and builds the job of ``run_job``.

    Args:
        options: Names of the checks to run, their scale, the seed and the output folder.
        verdicts: Whether an undecided verdict changes the exit code, and the file for JUnit XML.

    Returns:
        Both groups of options, and the chosen checks by name.

    Raises:
        ValueError: The scale, the seed or a name in ``only`` is not allowed.
    """
    choice("scale", options.scale, SCALES)
    seed(options.seed)
    return options, verdicts, wanted(options.only, options.scale)


def run_job(job: TheoryJob) -> Ended:
    """Performs all checks, writes result.json after each and prints the table; returns the outcome."""
    (options, outcome, checks), screen, loading = job, console(), cli.seconds()
    say, folder = clock(screen), output_folder(options.output)
    write_config(folder, "check-theory", asdict(options) | asdict(outcome))
    done: dict[str, list[Verdict]] = {}
    seconds: dict[str, float] = {}
    for place, (name, entry) in enumerate(checks.items(), start=1):
        say(f"{name} ({place} of {len(checks)})")
        begun = time.perf_counter()
        done[name] = _run(entry, options)
        seconds[name] = time.perf_counter() - begun
        jax.clear_caches()  # the next check's programs are others, and a hundred of them fill the memory
        right = sum(v.passed is True for v in done[name])
        say(f"{name}: {right} of {len(done[name])} as they must be, {seconds[name]:.0f} s")
        rows = [{"check": name, **row} for name, verdicts in done.items() for row in as_rows(verdicts)]
        passed = len(done) == len(checks) and all(row["passed"] is not False for row in rows)
        write_result(folder, rows, passed=passed, seconds=seconds)
    screen.print()
    every = [v for verdicts in done.values() for v in verdicts]
    show_verdicts(screen, every, "Theory against simulation")
    show_times(screen, {"start: programs": loading, **seconds}, cli.seconds())
    screen.print(f"numbers in {folder / 'result.json'}", highlight=False)
    screen.print(f"[bold]{summary(every)}[/bold]", highlight=False)
    return outcome.ended("check-theory", done, seconds, [] if passed else [summary(every)])


def _run(entry: TheoremEntry, options: CheckTheoryOptions) -> list[Verdict]:
    """Performs a theorem check and returns its verdicts; an exception, which is printed, becomes a failed verdict."""
    try:
        verdicts: list[Verdict] = entry.build(options.scale, options.seed)
        failure = "returned no verdict"
    except Exception as error:
        traceback.print_exc()
        verdicts, failure = [], " ".join(f"{type(error).__name__}: {error}".split())
    return verdicts or [Verdict(entry.name, "the check runs", failure, "verdicts", False, "none", "was run", False)]
