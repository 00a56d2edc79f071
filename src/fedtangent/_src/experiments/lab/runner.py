"""The runner of experiments: their settings, the check of what a user requests, and the function that runs them.

An ``Experiment`` is an entry: settings, and a function. A ``Study`` is a request to run it that has passed the checks,
and an ``Outcome`` is the result. A new experiment is one file with its settings (a frozen dataclass, with values for
three scales), the function from a ``Study`` to an ``Outcome``, and ``ENTRIES``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
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
from fedtangent._src.experiments.lab import Outcome, table
from fedtangent._src.output.files import Figures, Metric
from fedtangent._src.progress import TimeLeft

PACKAGE = "fedtangent._src.experiments."
SCALES = ("smoke", "default", "paper")
AnySettings = Any
"""The settings of any experiment: a frozen dataclass of numbers, names, and tuples of either."""
Settings = TypeVar("Settings")

# ---- settings as data ---------------------------------------------------------------------------------------------


def by_scale(smoke: Settings, default: Settings | None = None, paper: Settings | None = None) -> dict[str, Settings]:
    """Returns settings by scale, "smoke", "default" and "paper"; a missing scale takes the settings of the one before.

    Args:
        smoke: Settings for a run of one minute or a few minutes on two cores.
        default: Settings for a run of up to an hour.
        paper: The paper's settings.
    """
    default = default or smoke
    return dict(zip(SCALES, (smoke, default, paper or default), strict=True))


def within(default: Any, **limits: object) -> Any:
    """Declares a field of a settings dataclass with limits on its values, which ``check_settings`` checks.

    Args:
        default: Default value.
        **limits: For whole numbers ``least`` and ``most``; others ``above``, ``at_least``, ``below``, ``at_most``; for
            text ``of``, the allowed names; for a tuple also ``count``, the least number of values, and ``increasing``.
    """
    return dataclasses.field(default=default, metadata=limits)


def check_settings(settings: AnySettings) -> None:
    """Raises ``ValueError`` if a field of ``settings`` is outside the limits that ``within`` declared.

    A field without limits must be a whole number from 1 to 2^31 - 1, a finite number, any text, or a tuple of one or
    more different values of one of these kinds.
    """
    for field in dataclasses.fields(settings):
        name, value, limits = field.name, getattr(settings, field.name), dict(field.metadata)
        names, count, increasing = limits.pop("of", None), limits.pop("count", 1), limits.pop("increasing", False)
        default: Any = field.default
        values, example = (value, default[0]) if isinstance(value, tuple) else ((value,), default)
        if len(values) < count or len(set(values)) < len(values) or (increasing and list(values) != sorted(values)):
            how = "increasing" if increasing else "different"
            raise ValueError(f"{name}: got {','.join(map(str, values))}, must be {count} or more {how} values")
        for one in values:
            if isinstance(example, str):
                checks.choice(name, one, names or (one,))
            elif isinstance(example, int):
                checks.whole(name, one, **limits)
            else:
                checks.number(name, one, **limits)


def changed(settings: Settings, changes: Sequence[str]) -> Settings:
    """Returns a copy of ``settings`` with each change ``name=value``; several values are written ``0.1,0.3``.

    Args:
        settings: A frozen dataclass.
        changes: Changes, ``name=value`` each.

    Raises:
        ValueError: A text is not ``name=value``, a name is unknown or repeated, or a value cannot be converted.
    """
    current, replaced = vars(settings), dict[str, Any]()
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise ValueError(f"set: got {change!r}, must be name=value")
        if name in replaced:
            raise ValueError(f"set: got {name} more than once, must be one value for each setting")
        replaced[name] = _parse(name, text, current[checks.choice("set", name, current)])
    return dataclasses.replace(settings, **replaced)  # type: ignore[type-var]


def with_changes(settings: Settings, *texts: str) -> Settings:
    """Returns a copy of ``settings`` changed by texts such as ``num_rounds=20 rates=0.1,0.3``; later texts win."""
    for text in texts:
        settings = changed(settings, text.split())
    return settings


def written(settings: AnySettings) -> list[str]:
    """Returns the fields of ``settings``, a dataclass, as texts ``name=value``, the form that ``changed`` reads."""
    pairs = vars(settings).items()
    return [f"{name}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for name, v in pairs]


def _parse(name: str, text: str, example: Any) -> object:
    """Converts ``text`` to the type of ``example``, the present value of setting ``name``; splits a tuple at commas.

    Raises ``ValueError`` for a text that is no such number.
    """
    is_list = isinstance(example, tuple)
    try:
        return tuple(type(example[0])(part) for part in text.split(",")) if is_list else type(example)(text)
    except ValueError as error:
        whole = "whole " if isinstance(example[0] if is_list else example, int) else ""
        kind = f"{whole}numbers like {','.join(map(str, example))}" if is_list else f"a {whole}number like {example}"
        raise ValueError(f"{name}: got {text!r}, must be {kind}") from error


# ---- an experiment, and a run of it -------------------------------------------------------------------------------


class Request(NamedTuple):
    """A user's request to run an experiment, before ``prepare_study`` checks it; ``changes`` are texts "name=value"."""

    scale: str  # one of SCALES
    seeds: tuple[int, ...]
    dataset: str | None = None  # None: the experiment's first
    data_dir: Path | None = None
    changes: tuple[str, ...] = ()  # changed settings, such as "num_rounds=20"


NOWHERE = Figures(Path())


def _ignore(_: object) -> None:
    """Does nothing: the default of the functions that report progress, write metrics or check a study."""


@dataclass(frozen=True)
class Study:
    """A checked request to run an experiment, passed to the experiment's function.

    It has the settings, the data set and the seeds, and where progress, metrics and figures go.
    """

    settings: AnySettings
    dataset: str
    seeds: tuple[int, ...]
    data_dir: Path | None = None
    say: Callable[[str], None] = _ignore  # reports a line of progress
    keep: Callable[[Sequence[Metric]], None] = _ignore  # writes metrics
    figures: Figures = NOWHERE
    time_left: TimeLeft = dataclasses.field(default_factory=TimeLeft)

    def each_seed(self) -> Iterator[int]:
        """Yields the seeds one after another; after each it reports the time taken and an estimate of the time left."""
        seconds = list[float]()
        for seed in self.seeds:
            start = time.perf_counter()
            yield seed
            seconds.append(time.perf_counter() - start)
            longest = max(seconds)  # a seed whose runs are read from files takes almost no time
            time_left = TimeLeft(len(self.seeds), len(seconds), longest * len(seconds))
            self.say(f"seed {seed}: {seconds[-1]:.0f} s; {time_left}")


@dataclass(frozen=True)
class Experiment(Entry):
    """Entry of an experiment (a table, figure or claim of a paper) in the list of all experiments.

    Its ``build`` takes a ``Study``, the checked request, and returns the ``Outcome``.
    """

    scales: Mapping[str, Mapping[str, AnySettings]] = dataclasses.field(default_factory=dict)
    """Its settings by data set (the first is the default, and needs no files) and scale."""
    check: Callable[[Study], object] = _ignore
    """Raises ``ValueError`` for wrong settings that the limits of single fields allow; writes nothing."""
    least_seeds: int = 1
    exact: bool = False
    """Whether it computes in float64."""

    def arithmetic(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context manager in which the experiment runs: with 64-bit numbers if ``exact``."""
        return exact_arithmetic() if self.exact else contextlib.nullcontext()


def experiment(
    module: str,
    run: Callable[[Study], Outcome],
    scales: Mapping[str, Mapping[str, AnySettings]],
    papers: tuple[str, ...],
    *,
    check: Callable[[Study], object] = _ignore,
    least_seeds: int = 1,
    exact: bool = False,
    part: tuple[str, str] | None = None,
) -> Experiment:
    """Builds the entry of an experiment; its summary is the first paragraph of the module's docstring.

    Args:
        module: ``__name__`` of the experiment's module.
        run: Function that runs the experiment.
        scales: Settings by data set and scale.
        papers: Keys of the papers.
        check: Function that raises ``ValueError`` for wrong settings.
        least_seeds: The least number of seeds.
        exact: Whether it computes in float64.
        part: Name and summary of this experiment, if the module has several.
    """
    folder, _, file = module.removeprefix(PACKAGE).rpartition(".")
    name, summary = part or (file, (sys.modules[module].__doc__ or "").split("\n\n")[0])
    more = {"papers": papers, "scales": scales, "check": check, "least_seeds": least_seeds, "exact": exact}
    return Experiment(f"{folder}.{name}", " ".join(summary.split()), run, **more)  # type: ignore[arg-type]


def prepare_study(entry: Experiment, request: Request) -> Study:
    """Checks a request to run an experiment and returns the ``Study``; writes no file.

    Args:
        entry: The experiment.
        request: The user's request.

    Raises:
        ValueError: A scale, data set, folder, seed or setting is not allowed, or there are too few seeds.
    """
    checks.choice("scale", request.scale, SCALES)
    dataset = next(iter(entry.scales)) if request.dataset is None else request.dataset
    checks.choice("dataset", dataset, entry.scales)
    checks.folder("data_dir", request.data_dir)
    seeds = check_seeds(request.seeds)
    if len(seeds) < entry.least_seeds:
        least = f"at least {entry.least_seeds} seeds, for confidence intervals"
        raise ValueError(f"seeds: got {len(seeds)} of them, must be {least}")
    settings = changed(entry.scales[dataset][request.scale], request.changes)
    check_settings(settings)
    check_limits(settings)
    study = Study(settings, dataset, seeds, request.data_dir)
    with entry.arithmetic():
        entry.check(study)
    return study


def perform(entry: Experiment, study: Study) -> Outcome:
    """Runs an experiment and completes its outcome.

    It adds the table of claims, the settings and the verdicts. If a verdict's control does not clearly fail
    (``control_fails`` is False or None), the experiment has failed: the test cannot tell right theory from wrong.

    Args:
        entry: The experiment.
        study: The checked request.
    """
    with entry.arithmetic():
        outcome: Outcome = entry.build(study)
    details = {"settings": study.settings, "dataset": study.dataset, "claims": outcome.claims}
    details |= {"remarks": outcome.remarks, **outcome.details}
    if outcome.verdicts:
        details["verdicts"] = as_rows(outcome.verdicts)
    sheets = outcome.sheets
    if outcome.claims:
        title = "claims, the paper's and ours, and whether they are seen"
        form = "claim: {claim} | measured: {measured} | verdict: {verdict}"
        sheets += (table(title, [claim._asdict() for claim in outcome.claims], form),)
    passing = (f"{v.statement} {v.sizes}: passes for {v.control} too" for v in outcome.verdicts if not v.control_fails)
    return outcome._replace(
        sheets=sheets,
        details=details,
        remarks=(*outcome.remarks, f"settings: {' '.join(written(study.settings))}"),
        failed=(*outcome.failed, *passing),
    )
