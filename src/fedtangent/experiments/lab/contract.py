"""What an experiment is to the command line: what it is asked, and what it answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fedtangent.output.files import Metric

SCALES = ("smoke", "paper")
Settings = TypeVar("Settings")


class Request(NamedTuple):
    """What the user asks for."""

    scale: str  # one of SCALES
    seeds: tuple[int, ...]
    dataset: str | None = None  # None: the experiment's first
    data_dir: Path | None = None
    changes: tuple[str, ...] = ()  # settings given another value, as "num_rounds=20"


class Sheet(NamedTuple):
    """A table to print; numbers are already text."""

    title: str
    columns: tuple[str, ...]  # the first is text; of the others, those of numbers stand to the right
    rows: tuple[tuple[str, ...], ...]


class Outcome(NamedTuple):
    """What came out."""

    sheets: tuple[Sheet, ...]
    rows: list[dict[str, Any]]  # of result.json
    details: dict[str, Any]  # further entries of result.json
    remarks: tuple[str, ...] = ()  # what the reader should know before believing the numbers
    failed: tuple[str, ...] = ()  # why the experiment does not count; a claim that does not hold is no failure


class Prepared(NamedTuple):
    """A checked experiment, ready to run."""

    settings: Any
    dataset: str
    run: Callable[[Callable[[str], None], Callable[[Sequence[Metric]], None], Path], Outcome]
    # (say a line of progress, keep metrics, folder for figures) -> Outcome


class Experiment(NamedTuple):
    """An entry of the registry; ``prepare`` checks everything, raises ``ValueError`` and writes nothing."""

    description: str
    datasets: tuple[str, ...]
    prepare: Callable[[Request], Prepared]


def choose(experiment: Experiment, request: Request) -> str:
    """The data set of a request; raises ``ValueError`` for one that the experiment does not know, or another scale."""
    if request.scale not in SCALES:
        raise ValueError(f"scale: got {request.scale!r}, allowed are {', '.join(SCALES)}")
    name = experiment.datasets[0] if request.dataset is None else request.dataset
    if name not in experiment.datasets:
        raise ValueError(f"dataset: got {name!r}, allowed are {', '.join(experiment.datasets)}")
    return name


def changed(settings: Settings, changes: Sequence[str]) -> Settings:
    """``settings``, a frozen dataclass, with each ``name=value`` of ``changes``; lists are written ``0.1,0.3``.

    Raises ``ValueError`` for what is not ``name=value``, an unknown name, or a value that cannot be read.
    """
    known: dict[str, Any] = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise ValueError(f"set: got {change!r}, must be name=value")
        if name not in known:
            raise ValueError(f"set: got {name!r}, allowed are {', '.join(known)}")
        given[name] = _read(name, text, known[name])
    return dataclasses.replace(settings, **given)  # type: ignore[type-var]


def _read(name: str, text: str, like: Any) -> Any:
    """``text`` as the kind of value that ``like`` is."""
    try:
        if isinstance(like, tuple):
            return tuple(type(like[0])(part) for part in text.split(","))
        return type(like)(text)
    except ValueError as error:
        kind = f"numbers like {','.join(map(str, like))}" if isinstance(like, tuple) else f"a number like {like}"
        raise ValueError(f"set: {name} got {text!r}, must be {kind}") from error
