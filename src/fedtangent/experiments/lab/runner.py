"""The one runner of experiments: an experiment is an entry (settings as data, a run, its claims), a study is one of
its runs as it is asked for, an outcome (``results``) what came out.

A new experiment is one file: its settings, a frozen dataclass with the three scales, the function of a ``Study`` that
makes the ``Outcome``, and ``ENTRIES``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fedtangent import checks
from fedtangent.compare.settings import exact_arithmetic
from fedtangent.compare.verdicts import as_rows
from fedtangent.engine.sweeps import check_seeds
from fedtangent.entries import Entry, check_limits
from fedtangent.experiments.lab.results import Claim, Outcome, table
from fedtangent.output.files import Figures, Metric

PACKAGE = "fedtangent.experiments."

# ---- settings as data ---------------------------------------------------------------------------------------------

Settings = TypeVar("Settings")
SCALES = ("smoke", "default", "paper")


def by_scale(smoke: Settings, default: Settings | None = None, paper: Settings | None = None) -> dict[str, Settings]:
    """The settings of each of ``SCALES``; one that is left out is that of the scale before."""
    default = default or smoke
    return dict(zip(SCALES, (smoke, default, paper or default), strict=True))


def within(default: Any, **limits: Any) -> Any:
    """A setting with limits beyond those of its kind, which ``check_settings`` holds it to, or each of its values.

    Those of ``checks.whole`` or ``checks.number``; ``of``, the names that are allowed; for several values ``count``,
    how many there must be at least, and ``increasing``.
    """
    return dataclasses.field(default=default, metadata=limits)


def check_settings(settings: Any) -> None:
    """Raise ``ValueError`` for a setting out of its limits.

    Without other limits whole numbers are at least 1 and fit 32 bits, other numbers are finite, and several values are
    one or more, all different.
    """
    for field in dataclasses.fields(settings):
        name, value, limits = field.name, getattr(settings, field.name), dict(field.metadata)
        names, count, increasing = limits.pop("of", None), limits.pop("count", 1), limits.pop("increasing", False)
        default: Any = field.default
        values, like = (value, default[0]) if isinstance(value, tuple) else ((value,), default)
        if len(values) < count or len(set(values)) < len(values) or (increasing and list(values) != sorted(values)):
            how = "increasing" if increasing else "different"
            raise ValueError(f"{name}: got {','.join(map(str, values))}, must be {count} or more {how} values")
        for one in values:
            if isinstance(like, str):
                checks.choice(name, one, names or (one,))
            elif isinstance(like, int):
                checks.whole(name, one, **limits)
            else:
                checks.number(name, one, **limits)


def changed(settings: Settings, changes: Sequence[str]) -> Settings:
    """``settings``, a frozen dataclass, with each ``name=value`` of ``changes``; lists are written ``0.1,0.3``.

    Raises ``ValueError`` for what is not ``name=value``, an unknown name, one given twice, or a value that cannot be
    read.
    """
    known, given = vars(settings), dict[str, Any]()
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise ValueError(f"set: got {change!r}, must be name=value")
        if name in given:
            raise ValueError(f"set: got {name} more than once, must be one value for each setting")
        given[name] = _read(name, text, known[checks.choice("set", name, known)])
    return dataclasses.replace(settings, **given)  # type: ignore[type-var]


def written(settings: Any) -> list[str]:
    """Each of ``settings``, a dataclass, as ``changed`` reads it."""
    pairs = vars(settings).items()
    return [f"{name}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for name, v in pairs]


def _read(name: str, text: str, like: Any) -> Any:
    """``text`` as the kind of value that ``like`` is."""
    several = isinstance(like, tuple)
    try:
        return tuple(type(like[0])(part) for part in text.split(",")) if several else type(like)(text)
    except ValueError as error:
        kind = f"numbers like {','.join(map(str, like))}" if several else f"a number like {like}"
        raise ValueError(f"{name}: got {text!r}, must be {kind}") from error


# ---- an experiment, and a run of it -------------------------------------------------------------------------------


class Request(NamedTuple):
    """What the user asks for."""

    scale: str  # one of SCALES
    seeds: tuple[int, ...]
    dataset: str | None = None  # None: the experiment's first
    data_dir: Path | None = None
    changes: tuple[str, ...] = ()  # settings given another value, as "num_rounds=20"


NOWHERE = Figures(Path())


def _silent(_: Any) -> None:
    """Nobody listens."""


@dataclass
class Clock:
    """What a study's runs will take, where they are timed and not run (``runs.play``)."""

    seconds: float = 0.0
    by_run: dict[Any, Any] = dataclasses.field(default_factory=dict)  # by what it depends on: of a round, and a run


@dataclass(frozen=True)
class Study:
    """A checked request, and where its progress, numbers and figures go."""

    settings: Any
    dataset: str
    seeds: tuple[int, ...]
    data_dir: Path | None = None
    say: Callable[[str], None] = _silent  # a line of progress
    keep: Callable[[Sequence[Metric]], None] = _silent
    figures: Figures = NOWHERE
    clock: Clock | None = None  # set, runs are timed and not run

    def each_seed(self) -> Iterator[int]:
        """The seeds; says how long was spent on each once the next is asked for."""
        for seed in self.seeds:
            start = time.perf_counter()
            yield seed
            self.say(f"seed {seed}: {time.perf_counter() - start:.0f} s")


@dataclass(frozen=True)
class Experiment(Entry):
    """One table, figure or claim; ``build`` makes a study's ``Outcome``, and is given the ``Study``."""

    scales: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Its settings by data set (the first is the default, and needs no files) and scale."""
    check: Callable[[Study], Any] = _silent
    """Raises ``ValueError`` for what the settings' own limits do not say; writes nothing."""
    least_seeds: int = 1
    exact: bool = False
    """Whether it computes in float64."""

    def arithmetic(self) -> contextlib.AbstractContextManager[None]:
        """What it computes in."""
        return exact_arithmetic() if self.exact else contextlib.nullcontext()


def experiment(
    module: str,
    run: Callable[[Study], Outcome],
    scales: Mapping[str, Mapping[str, Any]],
    papers: tuple[str, ...],
    **more: Any,
) -> Experiment:
    """The entry of a module (``__name__``): named after it, and summed up by the first paragraph of its docstring.

    A module of several parts of one figure gives each its ``name``, in the module's room, and its ``summary``.
    """
    room, _, own = module.removeprefix(PACKAGE).rpartition(".")
    name, said = more.pop("name", own), more.pop("summary", (sys.modules[module].__doc__ or "").split("\n\n")[0])
    return Experiment(f"{room}.{name}", " ".join(said.split()), run, papers=papers, scales=scales, **more)


def prepare_study(entry: Experiment, request: Request) -> Study:
    """The checked study; raises ``ValueError`` and writes nothing."""
    checks.choice("scale", request.scale, SCALES)
    dataset = next(iter(entry.scales)) if request.dataset is None else request.dataset
    checks.choice("dataset", dataset, entry.scales)
    checks.folder("data_dir", request.data_dir)
    seeds = check_seeds(request.seeds)
    if len(seeds) < entry.least_seeds:
        raise ValueError(f"seeds: got {len(seeds)}, an interval needs at least {entry.least_seeds}")
    settings = changed(entry.scales[dataset][request.scale], request.changes)
    check_settings(settings)
    check_limits(settings)
    study = Study(settings, dataset, seeds, request.data_dir)
    with entry.arithmetic():
        entry.check(study)
    return study


def perform(entry: Experiment, study: Study) -> Outcome:
    """Run it; the outcome's details and sheets then tell the settings, the claims and the verdicts too."""
    with entry.arithmetic():
        found: Outcome = entry.build(study)
    details = {"settings": study.settings, "dataset": study.dataset, "claims": found.claims, "remarks": found.remarks}
    details |= found.details
    if found.verdicts:
        details["verdicts"] = as_rows(found.verdicts)
    form = dict(zip(Claim._fields, ("{claim}", "{measured}", "{verdict}"), strict=True))
    said = (
        [table("claims, the paper's and ours, and whether they are seen", [c._asdict() for c in found.claims], form)]
        if found.claims
        else []
    )
    passing = (f"{v.statement} {v.sizes}: passes for {v.control} too" for v in found.verdicts if not v.control_fails)
    return found._replace(
        sheets=(*found.sheets, *said),
        details=details,
        remarks=(*found.remarks, f"settings: {' '.join(written(study.settings))}"),
        failed=(*found.failed, *passing),
    )


# ---- how long it will take ----------------------------------------------------------------------------------------

SHARE = 40  # of its rounds a study makes one to be timed, where it is no comparison of runs


def expected_seconds(entry: Experiment, study: Study) -> float:
    """How long the study will take on this device, by a short measurement; nothing is written.

    Of a comparison (``lab.runs``) each method's round is timed, with the examples of few clients where all take part,
    and counted as often as the comparison makes it. Any other experiment is run twice with as few seeds as it takes and
    few of its rounds, and what the further ones took is scaled to all; one without rounds in its settings is run once.
    """
    one = dataclasses.replace(study, seeds=study.seeds[: entry.least_seeds])
    most = max(_rounds(study.settings).values(), default=1)
    few = min(most, -(-most // SHARE))
    first, used = _timed(entry, one, few / most)
    if used:
        clock = Clock(by_run=used.by_run)
        _rehearse(entry, study, clock)
        return clock.seconds
    if few < most:
        more = min(most, 2 * few)
        second, _ = _timed(entry, one, more / most)
        first = second + max(second - first, 0.0) / (more - few) * (most - more)
    return first * len(study.seeds) / len(one.seeds)


def _timed(entry: Experiment, study: Study, share: float) -> tuple[float, Clock | None]:
    """The seconds of a study with a share of its rounds, and its clock, if it has timed any run."""
    start, clock = time.perf_counter(), Clock()
    settings = dataclasses.replace(study.settings, **_rounds(study.settings, share))
    _rehearse(entry, dataclasses.replace(study, settings=settings), clock)
    return time.perf_counter() - start, clock if clock.by_run else None


def _rehearse(entry: Experiment, study: Study, clock: Clock) -> None:
    """Perform it with its runs timed by ``clock``, and throw away what comes out."""
    with tempfile.TemporaryDirectory() as folder:
        perform(entry, dataclasses.replace(study, clock=clock, figures=Figures(Path(folder) / "figures")))


def _rounds(settings: Any, share: float = 1.0) -> dict[str, int]:
    """The settings that count rounds, and a share of each, within its limits."""
    found = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if "rounds" in field.name and isinstance(value, int):
            least = field.metadata.get("least", 1)
            found[field.name] = min(value, max(least, round(share * value)))
    return found
