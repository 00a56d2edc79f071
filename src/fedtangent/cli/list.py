"""``fedtangent list``: what there is to choose from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro
from rich import box
from rich.table import Table

from fedtangent.checks import choice
from fedtangent.entries import KINDS, catalogue
from fedtangent.output.tables import console


@dataclass(frozen=True)
class ListOptions:
    """What to list."""

    kind: Annotated[str, tyro.conf.Positional]
    """What to list, such as algorithms; see `fedtangent list --help`."""


def prepare(options: ListOptions) -> ListOptions:
    """Check the option; raises ``ValueError``."""
    choice("kind", options.kind, KINDS)
    return options


def run_job(options: ListOptions) -> int:
    """Print the table; returns the exit code."""
    table = Table(title=options.kind, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("name", no_wrap=True)
    table.add_column("what it is")
    for entry in catalogue(options.kind).values():
        table.add_row(getattr(entry, "written", entry.name), entry.summary)
    console().print(table)
    return 0
