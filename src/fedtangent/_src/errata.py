"""Errata of five papers: formulas and statements that this package corrects.

The papers are FE-2021 and FE-2024 (on Fed-ensemble), NTK-FL, Local-GD and DeepLin. The file ``errata.toml`` has a row
for each erratum. Docstrings name a row by its key, as in "erratum `fe2021.18`", and the page ``docs/errata.md`` shows
the table.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple


class Erratum(NamedTuple):
    """A mistake or a gap in one of the papers, with its correction.

    Attributes:
        key: Name of the erratum: the paper, a dot and a short name of the formula or section, such as "fe2021.18".
        place: Section or equation of the paper.
        printed: Text or formula of the paper.
        right: Correct text or formula; where the paper leaves a choice, the choice that this package makes.
        shown: Theorem check or test (``file::name``) that computes with ``right``.
        read: True if the erratum was found only by reading; False if ``shown`` also shows that ``printed`` fails.
    """

    key: str
    place: str
    printed: str
    right: str
    shown: str
    read: bool = False

    @property
    def paper(self) -> str:
        """Short name of the paper that has the mistake, such as FE-2021."""
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
