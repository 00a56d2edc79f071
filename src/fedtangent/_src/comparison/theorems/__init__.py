"""The theorems checked against simulation; every check also rejects a wrong theory, its negative control.

Each file below checks one theorem, or a few related ones, and ends with its ``ENTRIES``; the other files have the
shared code. To add a theorem, write its function in ``theory/``, its check with an entry in a file here, and a test.
The command line, ``fedtangent list theorems`` and the index of the documentation read the entries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

from fedtangent._src.checks import choice
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.entries import Entry, catalogue

SCALES = ("default", "paper")
Size = TypeVar("Size")


@runtime_checkable
class TheoryFunction(Protocol):
    """A function of ``theory``, known to the documentation by its name."""

    @property
    def __name__(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class TheoremEntry(Entry):
    """A check of one theorem: ``build(scale, seed)`` returns its verdicts, and needs JAX's 64-bit types.

    ``scale`` is one of ``SCALES``: "default" (a few minutes at most on two cores) or "paper" (larger sizes, more
    draws). ``seed`` sets every random draw.
    """

    statement: str = ""
    """Number of the theorem or equation in its papers."""
    functions: tuple[TheoryFunction, ...] = ()
    """The functions of ``theory`` that compute it."""
    figures: tuple[str, ...] = ()
    """The experiments whose figures show it."""


def entries(
    checks: Callable[[str, int], list[Verdict]],
    summary: str,
    *,
    papers: tuple[str, ...],
    statement: str,
    functions: tuple[TheoryFunction, ...],
    figures: tuple[str, ...] = (),
) -> tuple[TheoremEntry]:
    """Returns the one entry of a theorem's file, named after the file, such as ``ntk_fl.lemmas``.

    Args:
        checks: Performs the checks of the file: the ``build`` of the entry.
        summary: Description of the checks in one line.
        papers, statement, functions, figures: Fields of ``TheoremEntry``.
    """
    name = checks.__module__.removeprefix(f"{__name__}.")
    return (
        TheoremEntry(name, summary, checks, papers=papers, statement=statement, functions=functions, figures=figures),
    )


def wanted(names: tuple[str, ...]) -> dict[str, TheoremEntry]:
    """Returns the entries that ``names`` selects, keyed by name; without names, all entries.

    A name is an entry's, or a paper's (``ntk_fl``), which selects all its entries. Raises ``ValueError`` for another.
    """
    every = catalogue("theorems")
    papers = dict.fromkeys(name.split(".")[0] for name in every)
    selected: dict[str, TheoremEntry] = {}
    for wish in names or tuple(every):
        matches = {name: entry for name, entry in every.items() if wish in (name, name.split(".")[0])}
        if not matches:
            raise ValueError(f"only: got {wish!r}, allowed are {', '.join(every)}, or a paper: {', '.join(papers)}")
        selected |= matches
    return selected


def of_scale(scale: str, default: Size, paper: Size) -> Size:
    """Returns ``default`` or ``paper``, as ``scale`` says; raises ``ValueError`` for another scale.

    Args:
        scale: One of ``SCALES``.
        default, paper: Values at the two scales.
    """
    return default if choice("scale", scale, SCALES) == "default" else paper
