"""``fedtangent list``: the algorithms, data sets and other names that options accept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from fedtangent._src.checks import choice
from fedtangent._src.entries import KINDS, catalogue
from fedtangent._src.output.files import Ended
from fedtangent._src.output.tables import TextTable, console


@dataclass(frozen=True)
class ListOptions:
    """Options of the command ``list``."""

    kind: Annotated[str, tyro.conf.Positional] = "kinds"
    """What to list, such as algorithms (default: the names of all lists)."""


def prepare(options: ListOptions) -> ListOptions:
    """Checks the option; raises ``ValueError`` for an unknown kind of names."""
    choice("kind", options.kind, ("kinds", *KINDS))
    return options


def run_job(options: ListOptions) -> Ended:
    """Prints a table of the names of one kind, with a description each; returns the outcome."""
    if options.kind == "kinds":
        rows = [(kind, ", ".join(catalogue(kind))) for kind in KINDS]
    else:
        entries = catalogue(options.kind).values()
        rows = [(entry.written, entry.told) for entry in entries]
    console().print(TextTable(options.kind, ("name", "what it is"), rows))
    return Ended()
