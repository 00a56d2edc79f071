"""``fedtangent check-theory``: every theorem against simulation, in one table with a wrong theory beside each."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from fedtangent.compare import theorems
from fedtangent.compare.theorems import MODULES, SCALES, Checks, TheoremCheck
from fedtangent.output.files import output_folder, write_config, write_result
from fedtangent.output.tables import console
from fedtangent.output.theorem_table import THEOREM_LEGEND, theorem_table


@dataclass(frozen=True)
class CheckTheoryOptions:
    """Every theorem's check against simulation at larger sizes, each with a wrong theory that has to fail.

    Ends with a table: theorem, statement checked, sizes, measured, predicted, verdict, negative control. Exits with 1
    if any check fails, or if any wrong theory passes.
    """

    scale: str = "default"
    """How large: default (minutes) or large (wider networks, more of them)."""
    only: tuple[str, ...] = ()
    """Run these groups of checks alone (`fedtangent list theorems`): flow, convergence, gp_limit, .."""
    seed: int = 0
    """Seed of data, partitions, schedules and initialisations."""
    output: Path = Path("results/check-theory")
    """Folder for config.json and result.json."""


class Job(NamedTuple):
    """Checks to run, by the name of their group."""

    options: CheckTheoryOptions
    groups: dict[str, Checks]


def prepare(options: CheckTheoryOptions) -> Job:
    """Check every option; raises ``ValueError``, and writes nothing."""
    if options.scale not in SCALES:
        raise ValueError(f"scale: got {options.scale!r}, allowed are {', '.join(SCALES)}")
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"seed: got {options.seed}, must be from 0 to 2**32 - 1")
    wanted = options.only or tuple(MODULES)
    return Job(options, {name: theorems.load(name) for name in wanted})


def run_job(job: Job) -> int:
    """Run group after group, write result.json after each, print the table; returns the exit code."""
    screen, start, options = console(), time.perf_counter(), job.options
    folder = output_folder(options.output)
    write_config(folder, "check-theory", options)
    done: dict[str, list[TheoremCheck]] = {}
    seconds: dict[str, float] = {}
    write_result(folder, [], passed=False, seconds=seconds)  # nothing is left of an earlier run's verdict

    def write() -> bool:
        rows = [{"group": name, **c._asdict(), "ok": c.ok} for name, checks in done.items() for c in checks]
        passed = len(done) == len(job.groups) and all(row["ok"] for row in rows)
        write_result(folder, rows, passed=passed, seconds=seconds)
        return passed

    for place, (name, checks) in enumerate(job.groups.items(), start=1):
        _say(screen, start, f"{name} ({place} of {len(job.groups)})")
        begun = time.perf_counter()
        done[name] = _run(name, checks, options)
        seconds[name] = time.perf_counter() - begun
        right = sum(c.ok for c in done[name])
        _say(screen, start, f"{name}: {right} of {len(done[name])} as they must be, {seconds[name]:.0f} s")
        passed = write()
    screen.print()
    every = [c for checks in done.values() for c in checks]
    screen.print(THEOREM_LEGEND, style="dim")
    screen.print(f"{time.perf_counter() - start:.0f} s; numbers in {folder / 'result.json'}", highlight=False)
    screen.print()
    screen.print(theorem_table(every))
    screen.print(_summary(every), highlight=False)
    return 0 if passed else 1


def _run(
    name: str, checks: Callable[[str, int], list[TheoremCheck]], options: CheckTheoryOptions
) -> list[TheoremCheck]:
    """The group's checks; what stops it is a failed check of its own, so that the other groups still run."""
    try:
        found = checks(options.scale, options.seed)
    except Exception as error:
        traceback.print_exc()
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return [_not_run(name, said)]
    return found or [_not_run(name, "returned no check")]


def _not_run(name: str, why: str) -> TheoremCheck:
    return TheoremCheck(name, "the group's checks run", "-", why, "checks", False, "none was run", False)


def _summary(checks: list[TheoremCheck]) -> str:
    failed = sum(not c.passed for c in checks)
    passing = sum(not c.control_failed for c in checks if c.passed)
    if failed:
        return f"[bold red]{failed} of {len(checks)} checks FAIL[/bold red]"
    if passing:
        return f"[bold red]Inconclusive: {passing} of {len(checks)} negative controls pass too[/bold red]"
    return f"[bold]All {len(checks)} checks hold, and every wrong theory fails its own.[/bold]"


def _say(screen: Console, start: float, line: str) -> None:
    screen.print(f"  {time.perf_counter() - start:6.1f} s  {line}", style="dim", highlight=False)
