"""Errata of the five papers: every formula and statement that is built otherwise here than the paper prints it.

Docstrings name a row by its key, as in "erratum `fe2021.18`"; ``docs/errata.md`` is made of the table ``errata.toml``.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple


class Erratum(NamedTuple):
    """One place of a paper.

    Attributes:
        key: Name of the row: the paper, and the place in short.
        place: The place in the paper.
        printed: Text or formula of the paper.
        right: Correct text or formula; where the paper leaves a choice, the one that this package makes.
        shown: Theorem check or test (``file::name``) that computes with ``right``.
        read: Whether the erratum was found by reading; otherwise ``shown`` also shows that ``printed`` fails.
    """

    key: str
    place: str
    printed: str
    right: str
    shown: str
    read: bool = False

    @property
    def paper(self) -> str:
        """Short name of the paper."""
        return PAPER_OF[self.key.partition(".")[0]]


PAPER_OF = {
    "fe2021": "FE-2021",
    "fe2024": "FE-2024",
    "ntk_fl": "NTK-FL",
    "local_gd": "Local-GD",
    "deep_linear": "DeepLin",
}
ERRATA = tuple(
    Erratum(**row) for row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["errata"]
)
