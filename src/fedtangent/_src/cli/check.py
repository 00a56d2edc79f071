"""``fedtangent check``: the claims of a file, runs that must agree with theory.

A claim is a table of a TOML file: options of ``fedtangent compare``, and which of its verdicts must hold.
"""

from __future__ import annotations

import shlex
import time
import tomllib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from fedtangent._src import cli
from fedtangent._src.checks import number, shown
from fedtangent._src.cli import commands
from fedtangent._src.cli.arguments import FigureOptions, OutputOptions, VerdictOptions, options_of
from fedtangent._src.comparison.claims import Nearness, check_width, claimed_verdicts
from fedtangent._src.comparison.comparing import compared
from fedtangent._src.comparison.followed import NotFollowed
from fedtangent._src.comparison.settings import Report, Setting
from fedtangent._src.comparison.verdicts import Verdict, summary
from fedtangent._src.output.files import Ended
from fedtangent._src.output.tables import clock, console, show_times, show_verdicts
from fedtangent._src.progress import added

# Options of `fedtangent compare` that a claim does not have.
NOT_OF_A_CLAIM = options_of({"output": OutputOptions, "figures": FigureOptions, "verdicts": VerdictOptions})


@dataclass(frozen=True)
class CheckOptions:
    """Options of ``fedtangent check``, which tests a file of claims that simulated runs agree with theory.

    The command exits with 0 if every claim holds, 1 if simulation and theory disagree or a wrong theory passes, 2 if a
    claim cannot be checked, and 3 with --strict if a verdict is undecided.
    """

    claims: Annotated[Path, tyro.conf.Positional] = Path("claims.toml")
    """TOML file with a table for each claim: options of `fedtangent compare`; agree, parts of the statements of the
    verdicts that count; within, the largest distance of a network from its prediction."""


class ClaimedRuns(NamedTuple):
    """The runs of a claim, and which verdicts on them must hold.

    Attributes:
        settings: The comparisons with theory to make.
        words: Command line of ``fedtangent compare`` for these comparisons.
        agree: Texts that select verdicts: a verdict must hold if its statement contains one of them; None for all
            verdicts.
        within: Largest allowed distance of networks' outputs from their prediction, relative to how far the prediction
            moved: one number for the widest networks, or a number for each width. None allows any distance.
    """

    settings: list[Setting]
    words: list[str]
    agree: list[str] | None
    within: Nearness | None


CheckJob = tuple[dict[str, ClaimedRuns], VerdictOptions]


def prepare(options: CheckOptions, verdicts: VerdictOptions) -> CheckJob:
    """Reads the claims, checks the options of each, and loads their data.

    Args:
        options: The file of claims.
        verdicts: Whether an undecided verdict changes the exit code, and the file for JUnit XML.

    Raises:
        ValueError: The file cannot be read, or a claim has a bad option, which the message names.
    """
    path = options.claims
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"claims: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not tables or not all(isinstance(table, dict) for table in tables.values()):
        raise ValueError(f"claims: got {path}, must have a table for each claim, such as [fed_avg], and nothing else")
    claims = {}
    for name, table in tables.items():
        try:
            claims[name] = _claim(table)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return claims, verdicts


def _claim(table: Mapping[str, Any]) -> ClaimedRuns:
    """Converts a table of the TOML file to a claim; raises ``ValueError`` for a bad option."""
    options = {name.replace("-", "_"): value for name, value in table.items()}
    if len(options) < len(table):
        raise ValueError("an option is given twice, once with - and once with _ in its name: leave one out")
    agree, within = options.pop("agree", None), options.pop("within", None)
    if agree is not None and not (
        isinstance(agree, list) and agree and all(isinstance(one, str) and one for one in agree)
    ):
        raise ValueError(f"agree: got {shown(agree)}, must be a list of texts, each part of a verdict")
    if isinstance(within, dict):
        if not within or not all(width.isdecimal() for width in within):
            raise ValueError(
                f"within: got {', '.join(within) or 'none'}, must be a number for each width, such as 128 = 0.2"
            )
        within = {int(width): number("within", value, above=0) for width, value in within.items()}
    elif within is not None:
        number("within", within, above=0)
    words = []
    for name, value in options.items():
        if name in NOT_OF_A_CLAIM:
            raise ValueError(f"{name}: is no option of a claim: leave it out")
        flag, several = name.replace("_", "-"), value if isinstance(value, list) else [value]
        words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", *map(str, several)]
    command = commands.find("compare", *words)
    job = command.prepare(**commands.read(command, words).arguments)
    for width in within if isinstance(within, dict) else ():
        check_width(width, job.settings[0].size.widths)
    return ClaimedRuns(job.settings, words, agree, within)


def run_job(job: CheckJob) -> Ended:
    """Compares the runs of every claim with theory, prints the verdicts and writes them if the options ask for a file.

    Returns how the command ended.
    """
    (claims, options), screen, loading = job, console(), cli.seconds()
    say, times = clock(screen), {"start: programs and data": loading}
    suites, seconds = dict[str, tuple[Verdict, ...] | str](), dict[str, float]()
    for name, claim in claims.items():
        begun = time.perf_counter()
        suites[name] = _outcome(name, claim, say, times)
        seconds[name] = time.perf_counter() - begun
    verdicts = [verdict for outcome in suites.values() if not isinstance(outcome, str) for verdict in outcome]
    screen.print()
    if verdicts:
        show_verdicts(screen, verdicts, "Do simulation and theory agree?")
    show_times(screen, times, cli.seconds())
    screen.print(f"[bold]{summary(verdicts)}[/bold]", highlight=False)
    decided = {name: outcome for name, outcome in suites.items() if not isinstance(outcome, str)}
    failing = {name: of_claim for name, of_claim in decided.items() if any(v.passed is False for v in of_claim)}
    failures = [f"{name}: {summary(of_claim)}" for name, of_claim in failing.items()]
    advice = f"figures: fedtangent compare {shlex.join(claims[next(iter(failing))].words)}" if failing else ""
    return options.ended("check", suites, seconds, failures, advice)


def _outcome(name: str, claim: ClaimedRuns, say: Report, times: dict[str, float]) -> tuple[Verdict, ...] | str:
    """Compares the runs of one claim with theory; returns its verdicts, or the text of the error that ended it.

    ``say`` prints a line of progress. The seconds of each step are added to ``times``. An unexpected error is also
    printed with its traceback.
    """
    verdicts: list[Verdict] = []
    try:
        for setting in claim.settings:
            side = compared(setting, progress=True, say=say)
            times |= added(times, side.times)
            subject = name if len(claim.settings) == 1 else f"{name}: {setting.name}"
            verdicts += [v._replace(subject=subject) for v in claimed_verdicts(side, claim.agree, claim.within)]
    except Exception as error:
        if not isinstance(error, ValueError | NotFollowed | FloatingPointError):
            traceback.print_exc()
        return " ".join(f"{type(error).__name__}: {error}".split())
    return tuple(verdicts)
