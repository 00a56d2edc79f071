"""The one runner of experiments: an experiment is an entry (settings as data, a run, its claims), a study is one of
its runs as it is asked for.

A new experiment is one file: its settings, a frozen dataclass with the three scales, the function of a ``Study`` that
makes the ``Outcome``, and ``ENTRIES``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedtangent.checks import choice
from fedtangent.compare.settings import exact_arithmetic
from fedtangent.engine.sweeps import check_seeds
from fedtangent.entries import Entry
from fedtangent.experiments.lab.results import Outcome, claim_sheet
from fedtangent.experiments.lab.settings import SCALES, changed, check_settings
from fedtangent.output.files import Metric, check_data_dir

PACKAGE = "fedtangent.experiments."


class Request(NamedTuple):
    """What the user asks for."""

    scale: str  # one of SCALES
    seeds: tuple[int, ...]
    dataset: str | None = None  # None: the experiment's first
    data_dir: Path | None = None
    changes: tuple[str, ...] = ()  # settings given another value, as "num_rounds=20"


def _silent(_: Any) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class Study:
    """A checked request, and where its progress, numbers and figures go."""

    settings: Any
    dataset: str
    seeds: tuple[int, ...]
    data_dir: Path | None = None
    say: Callable[[str], None] = _silent  # a line of progress
    keep: Callable[[Sequence[Metric]], None] = _silent
    figures: Path = Path()

    def each_seed(self) -> Iterator[int]:
        """The seeds; says how long was spent on each once the next is asked for."""
        for seed in self.seeds:
            start = time.perf_counter()
            yield seed
            self.say(f"seed {seed}: {time.perf_counter() - start:.0f} s")


def _nothing_more(_: Study) -> None:
    """The limits of the settings say it all."""


@dataclass(frozen=True)
class Experiment(Entry):
    """One table, figure or claim; ``build`` makes a study's ``Outcome``, and is given the ``Study``."""

    scales: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Its settings by data set (the first is the default, and needs no files) and scale."""
    check: Callable[[Study], None] = _nothing_more
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
    """The entry of a module (``__name__``): named after it, and summed up by the first paragraph of its docstring."""
    said = (sys.modules[module].__doc__ or "").split("\n\n")[0]
    return Experiment(module.removeprefix(PACKAGE), " ".join(said.split()), run, papers=papers, scales=scales, **more)


def prepare_study(entry: Experiment, request: Request) -> Study:
    """The checked study; raises ``ValueError`` and writes nothing."""
    choice("scale", request.scale, SCALES)
    dataset = next(iter(entry.scales)) if request.dataset is None else request.dataset
    choice("dataset", dataset, entry.scales)
    check_data_dir(request.data_dir)
    seeds = check_seeds(request.seeds)
    if len(seeds) < entry.least_seeds:
        raise ValueError(f"seeds: got {len(seeds)}, an interval needs at least {entry.least_seeds}")
    settings = changed(entry.scales[dataset][request.scale], request.changes)
    check_settings(settings)
    study = Study(settings, dataset, seeds, request.data_dir)
    with entry.arithmetic():
        entry.check(study)
    return study


def perform(entry: Experiment, study: Study) -> Outcome:
    """Run it; the outcome's details and sheets then tell the settings and the claims too."""
    with entry.arithmetic():
        found: Outcome = entry.build(study)
    details = {"settings": study.settings, "dataset": study.dataset, "claims": found.claims, **found.details}
    sheets = (*found.sheets, *([claim_sheet(found.claims)] if found.claims else []))
    shown = ", ".join(f"{name} {value}" for name, value in vars(study.settings).items())
    return found._replace(sheets=sheets, details=details, remarks=(*found.remarks, f"settings: {shown}"))
