"""The theorems checked against simulation; every check also rejects a wrong theory, its negative control.

Each file below checks one theorem, or a few related ones, and ends with its ``TheoremEntry``; the other files have the
shared code. To add a theorem, write its function in ``theory/``, its check with an entry in a file here, and a test.
The command line, ``fedtangent list theorems`` and the index of the documentation read the entries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from fedtangent._src.checks import choice
from fedtangent._src.entries import Entry, catalogue

SCALES = ("default", "paper")
Size = TypeVar("Size")


@dataclasses.dataclass(frozen=True)
class TheoremEntry(Entry):
    """A check of one theorem: ``build(scale, seed)`` returns its verdicts, and needs JAX's 64-bit types.

    ``scale`` is one of ``SCALES``: "default" (a few minutes at most on two cores) or "paper" (larger sizes, more
    draws). ``seed`` sets every random draw.
    """

    statement: str = ""
    """Number of the theorem or equation in its papers."""
    functions: tuple[Callable[..., Any], ...] = ()
    """The functions of ``theory`` that compute it."""
    figures: tuple[str, ...] = ()
    """The experiments whose figures show it."""


def wanted(names: tuple[str, ...]) -> dict[str, TheoremEntry]:
    """Returns the entries that ``names`` selects, by name; without names, all entries.

    A name is an entry's, or a paper's (``ntk_fl``), which selects all entries of that paper. Raises ``ValueError`` for
    an unknown name.
    """
    every = catalogue("theorems")
    papers = dict.fromkeys(name.split(".")[0] for name in every)
    found: dict[str, TheoremEntry] = {}
    for wish in names or tuple(every):
        some = {name: entry for name, entry in every.items() if wish in (name, name.split(".")[0])}
        if not some:
            raise ValueError(f"only: got {wish!r}, allowed are {', '.join(every)}, or a paper: {', '.join(papers)}")
        found |= some
    return found


def of_scale(scale: str, default: Size, paper: Size) -> Size:
    """Returns ``default`` or ``paper``, as ``scale`` says; raises ``ValueError`` for another scale."""
    return default if choice("scale", scale, SCALES) == "default" else paper
