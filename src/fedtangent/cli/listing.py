"""``fedtangent list``: what there is to choose from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich import box
from rich.table import Table

from fedtangent import data, entries, models
from fedtangent.cli.algorithms import ALGORITHMS
from fedtangent.cli.catalogue import PARTITIONS, SCHEDULES
from fedtangent.entries import catalogue
from fedtangent.output.tables import console


@dataclass(frozen=True)
class ListOptions:
    """List what there is to choose from: algorithms, datasets, models, partitions, schedules, cases and more."""

    what: Annotated[str, tyro.conf.Positional]
    """algorithms, datasets, models, partitions, schedules, cases, experiments or theorems."""


def _experiments() -> dict[str, str]:
    return {name: entry.summary for name, entry in entries.catalogue("experiments").items()}


_LISTS: dict[str, Callable[[], dict[str, str]]] = {
    "algorithms": lambda: {name: entry.description for name, entry in ALGORITHMS.items()},
    "datasets": data.available,
    "models": lambda: {name: str(getattr(models, name).__doc__).split("\n")[0] for name in models.available()},
    "partitions": lambda: {name: entry.description for name, entry in PARTITIONS.items()},
    "schedules": lambda: {name: entry.description for name, entry in SCHEDULES.items()},
    "cases": lambda: {name: entry.summary for name, entry in catalogue("cases").items()},
    "experiments": _experiments,
    "theorems": lambda: {name: f"{entry.statement}: {entry.summary}" for name, entry in catalogue("theorems").items()},
}


def prepare(options: ListOptions) -> ListOptions:
    """Check the option; raises ``ValueError``."""
    if options.what not in _LISTS:
        raise ValueError(f"list: got {options.what!r}, allowed are {', '.join(_LISTS)}")
    return options


def run_job(options: ListOptions) -> int:
    """Print the table; returns the exit code."""
    table = Table(title=options.what, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("name", no_wrap=True)
    table.add_column("what it is")
    for name, description in _LISTS[options.what]().items():
        table.add_row(name, description)
    console().print(table)
    return 0
