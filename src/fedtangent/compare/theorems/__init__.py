"""Every theorem against simulation, each beside a wrong theory that must not pass.

A file below this package checks one theorem, or some that belong together, and ends with its entry, or holds what
such files share. To add one, write the function in ``theory/``, the check with its ``TheoremEntry`` in a file here, and
a test. The command line, ``fedtangent list theorems`` and the documentation's index find it there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from fedtangent.checks import choice
from fedtangent.entries import Entry, catalogue

SCALES = ("default", "paper")
Size = TypeVar("Size")


@dataclasses.dataclass(frozen=True)
class TheoremEntry(Entry):
    """A check of one theorem. ``build(scale, seed)`` gives its verdicts; it needs JAX's 64-bit types.

    ``scale`` is one of ``SCALES``: "default" (some minutes at most on two cores) or "paper" (larger sizes, more seeds).
    ``seed`` sets every random draw.
    """

    statement: str = ""
    """Where it stands in its papers."""
    functions: tuple[Callable[..., Any], ...] = ()
    """The functions of ``theory`` that compute it."""
    figures: tuple[str, ...] = ()
    """The experiments whose figures show it."""


def wanted(names: tuple[str, ...]) -> dict[str, TheoremEntry]:
    """The entries called ``names``, or of the papers called so (``ntk_fl``); all of them for none.

    Raises ``ValueError`` for another name.
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
    """The one of the two that ``scale`` asks for; raises ``ValueError`` for another scale."""
    return default if choice("scale", scale, SCALES) == "default" else paper
