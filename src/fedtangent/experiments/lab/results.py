"""What an experiment answers: tables, intervals over paired seeds, and the claims that the intervals decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedtangent.measures.paired import half_width

SEEN, NOT_SEEN, UNDECIDED = "seen", "not seen", "undecided"


class Sheet(NamedTuple):
    """A table to print; numbers are already text."""

    title: str
    columns: tuple[str, ...]  # the first is text; of the others, those of numbers stand to the right
    rows: tuple[tuple[str, ...], ...]


class MeanInterval(NamedTuple):
    """A mean over seeds and its 95 % interval."""

    mean: float
    low: float
    high: float

    def text(self, form: str = "+.4f") -> str:
        """``mean [low, high]``."""
        return f"{self.mean:{form}} {self.ends(form)}"

    def ends(self, form: str = "+.4f") -> str:
        """``[low, high]``."""
        return f"[{self.low:{form}}, {self.high:{form}}]"

    def above(self, level: float = 0.0) -> str:
        """Whether the mean is above ``level``: seen, not seen, or undecided where the interval holds the level."""
        return SEEN if self.low > level else NOT_SEEN if self.high < level else UNDECIDED

    def below(self, level: float = 0.0) -> str:
        """Whether the mean is below ``level``."""
        return SEEN if self.high < level else NOT_SEEN if self.low > level else UNDECIDED


def interval(values: Sequence[float] | np.ndarray) -> MeanInterval:
    """The mean of at least two seeds' values and Student's interval; of paired differences, that of the pairs."""
    array = np.asarray(values, np.float64)
    mean, half = float(np.mean(array)), float(half_width(array))
    return MeanInterval(mean, mean - half, mean + half)


class Claim(NamedTuple):
    """One claim of a paper."""

    claim: str
    measured: str
    verdict: str  # SEEN, NOT_SEEN or UNDECIDED


def claim_sheet(claims: Sequence[Claim], title: str = "what the paper claims") -> Sheet:
    """The claims as a table."""
    return Sheet(title, ("claim", "measured", "verdict"), tuple(tuple(claim) for claim in claims))


def grouped(rows: Sequence[Mapping[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Rows by their values of ``keys``, in order of first appearance."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def assumption_sheet(of: Sequence[Any], title: str) -> Sheet:
    """A theorem's assumptions: the numbers of the first of the runs, and in how many each holds."""
    rows = tuple(
        (a.name, a.statement, f"{a.measured:.3g}", f"{a.relation} {a.required:.3g}",
         f"{sum(theorem.assumptions[i].holds for theorem in of)} of {len(of)}")
        for i, a in enumerate(of[0].assumptions)
    )  # fmt: skip
    return Sheet(title, ("assumption", "what", "measured", "required", "holds"), rows)


def theorem_details(of: Sequence[Any]) -> dict[str, Any]:
    """Assumptions and constants of each run's theorem, for result.json."""
    return {
        "assumptions": [[a._asdict() for a in theorem.assumptions] for theorem in of],
        "constants": [theorem.constants._asdict() for theorem in of],
    }


class Outcome(NamedTuple):
    """What came out."""

    sheets: tuple[Sheet, ...]
    rows: list[dict[str, Any]]  # of result.json
    claims: tuple[Claim, ...] = ()  # a claim that is not seen is a result, no failure
    details: Mapping[str, Any] = {}  # further entries of result.json
    remarks: tuple[str, ...] = ()  # what the reader should know before believing the numbers
    failed: tuple[str, ...] = ()  # why the experiment does not count
