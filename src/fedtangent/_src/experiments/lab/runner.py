"""The one runner of experiments.

An ``Experiment`` is an entry: settings as data, and a function. A ``Study`` is one checked request to run it, and an
``Outcome`` (``results``) what it returns. A new experiment is one file: its settings, a frozen dataclass with values
for the three scales, the function from a ``Study`` to an ``Outcome``, and ``ENTRIES``.
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

from fedtangent._src import checks
from fedtangent._src.comparison.settings import exact_arithmetic
from fedtangent._src.comparison.verdicts import as_rows
from fedtangent._src.engine.sweeps import check_seeds
from fedtangent._src.entries import Entry, check_limits
from fedtangent._src.experiments.lab.results import Claim, Outcome, table
from fedtangent._src.output.files import Figures, Metric

PACKAGE = "fedtangent._src.experiments."

# ---- settings as data ---------------------------------------------------------------------------------------------

Settings = TypeVar("Settings")
SCALES = ("smoke", "default", "paper")


def by_scale(smoke: Settings, default: Settings | None = None, paper: Settings | None = None) -> dict[str, Settings]:
    """Returns the settings of each of ``SCALES``; a missing scale takes the settings of the scale before."""
    default = default or smoke
    return dict(zip(SCALES, (smoke, default, paper or default), strict=True))


def within(default: Any, **limits: Any) -> Any:
    """Builds the dataclass field of a setting with limits, which ``check_settings`` applies to each of its values.

    Args:
        default: Default value.
        **limits: Limits of ``checks.whole`` or ``checks.number``; ``of``, the allowed names; and for several values
            ``count``, the fewest values, and ``increasing``.
    """
    return dataclasses.field(default=default, metadata=limits)


def check_settings(settings: Any) -> None:
    """Raises ``ValueError`` for a setting out of its limits.

    By default, whole numbers must be from 1 on and fit 32 bits, other numbers must be finite, and several values must
    all be different.
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
    """Returns ``settings``, a frozen dataclass, with each ``name=value`` of ``changes``; lists are written ``0.1,0.3``.

    Raises ``ValueError`` for text that is not ``name=value``, an unknown name, a repeated name, or an invalid value.
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
    """Returns each of ``settings``, a dataclass, as ``name=value``, the form that ``changed`` reads."""
    pairs = vars(settings).items()
    return [f"{name}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for name, v in pairs]


def _read(name: str, text: str, like: Any) -> Any:
    """Converts ``text`` to the type of ``like``."""
    several = isinstance(like, tuple)
    try:
        return tuple(type(like[0])(part) for part in text.split(",")) if several else type(like)(text)
    except ValueError as error:
        kind = f"numbers like {','.join(map(str, like))}" if several else f"a number like {like}"
        raise ValueError(f"{name}: got {text!r}, must be {kind}") from error


# ---- an experiment, and a run of it -------------------------------------------------------------------------------


class Request(NamedTuple):
    """Request of the user, not yet checked."""

    scale: str  # one of SCALES
    seeds: tuple[int, ...]
    dataset: str | None = None  # None: the experiment's first
    data_dir: Path | None = None
    changes: tuple[str, ...] = ()  # changed settings, such as "num_rounds=20"


NOWHERE = Figures(Path())


def _silent(_: Any) -> None:
    """Ignores its argument."""


@dataclass
class Clock:
    """Sum of the expected times of a study's runs, which are timed instead of run (``runs.play``)."""

    seconds: float = 0.0
    by_run: dict[Any, Any] = dataclasses.field(default_factory=dict)  # by kind of run: seconds a round, and a record


@dataclass(frozen=True)
class Study:
    """A checked request, with the destinations of its progress, metrics and figures."""

    settings: Any
    dataset: str
    seeds: tuple[int, ...]
    data_dir: Path | None = None
    say: Callable[[str], None] = _silent  # reports a line of progress
    keep: Callable[[Sequence[Metric]], None] = _silent  # writes metrics
    figures: Figures = NOWHERE
    clock: Clock | None = None  # if given, runs are only timed

    def each_seed(self) -> Iterator[int]:
        """Yields the seeds, and reports the time spent on each of them."""
        for seed in self.seeds:
            start = time.perf_counter()
            yield seed
            self.say(f"seed {seed}: {time.perf_counter() - start:.0f} s")


@dataclass(frozen=True)
class Experiment(Entry):
    """A table, figure or claim; ``build`` takes a ``Study`` and returns its ``Outcome``."""

    scales: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Its settings by data set (the first is the default, and needs no files) and scale."""
    check: Callable[[Study], Any] = _silent
    """Raises ``ValueError`` for settings that are wrong beyond their own limits; writes nothing."""
    least_seeds: int = 1
    exact: bool = False
    """Whether it computes in float64."""

    def arithmetic(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context of its computations: float64 if ``exact``."""
        return exact_arithmetic() if self.exact else contextlib.nullcontext()


def experiment(
    module: str,
    run: Callable[[Study], Outcome],
    scales: Mapping[str, Mapping[str, Any]],
    papers: tuple[str, ...],
    **more: Any,
) -> Experiment:
    """Builds the entry of an experiment; its summary is the first paragraph of the module's docstring.

    Args:
        module: ``__name__`` of the module.
        run: Function that runs the experiment.
        scales: Settings by data set and scale.
        papers: Keys of the papers.
        **more: Further fields; ``name`` and ``summary`` if a module has several experiments.
    """
    room, _, own = module.removeprefix(PACKAGE).rpartition(".")
    name, said = more.pop("name", own), more.pop("summary", (sys.modules[module].__doc__ or "").split("\n\n")[0])
    return Experiment(f"{room}.{name}", " ".join(said.split()), run, papers=papers, scales=scales, **more)


def prepare_study(entry: Experiment, request: Request) -> Study:
    """Checks a request and builds the study; raises ``ValueError`` and writes nothing."""
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
    """Performs the experiment, and adds settings, claims and verdicts to the outcome's details, sheets and remarks.

    The experiment has failed if the control of a verdict passes too.
    """
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

SHARE = 40  # an experiment without ``lab.runs`` is timed with one in so many of its rounds


def expected_seconds(entry: Experiment, study: Study) -> float:
    """Estimates the time of the study on this device by a short measurement; nothing is written.

    For a comparison of runs (``lab.runs``) one round of each method is timed and counted as often as it occurs. Any
    other experiment is run twice, with as few seeds as it needs and with few and twice as few rounds; the difference
    gives the time of a round. An experiment without rounds in its settings is run once.
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
    """Measures the seconds of a study with a share of its rounds; returns its clock too if that has timed a run."""
    start, clock = time.perf_counter(), Clock()
    settings = dataclasses.replace(study.settings, **_rounds(study.settings, share))
    _rehearse(entry, dataclasses.replace(study, settings=settings), clock)
    return time.perf_counter() - start, clock if clock.by_run else None


def _rehearse(entry: Experiment, study: Study, clock: Clock) -> None:
    """Performs the experiment with ``clock`` and discards the outcome and its files."""
    with tempfile.TemporaryDirectory() as folder:
        perform(entry, dataclasses.replace(study, clock=clock, figures=Figures(Path(folder) / "figures")))


def _rounds(settings: Any, share: float = 1.0) -> dict[str, int]:
    """Returns ``share`` of each setting that is a number of rounds, within its limits."""
    found = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if "rounds" in field.name and isinstance(value, int):
            least = field.metadata.get("least", 1)
            found[field.name] = min(value, max(least, round(share * value)))
    return found
