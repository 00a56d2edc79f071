"""What an experiment answers: tables, intervals over paired seeds, claims that the intervals decide, verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedtangent.compare.verdicts import Verdict
from fedtangent.measures.paired import half_width

SEEN, NOT_SEEN, UNDECIDED = "seen", "not seen", "undecided"


class Sheet(NamedTuple):
    """A table to print; numbers are already text."""

    title: str
    columns: tuple[str, ...]  # the first is text; of the others, those of numbers stand to the right
    rows: tuple[tuple[str, ...], ...]


def table(title: str, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> Sheet:
    """A sheet of rows of result.json: of each column the format that shows a row, "-" where its number is None."""

    def cell(form: str, row: Mapping[str, Any]) -> str:
        try:
            return form.format(**row)
        except TypeError:  # None has no format of a number
            return "-"

    return Sheet(title, tuple(columns), tuple(tuple(cell(form, row) for form in columns.values()) for row in rows))


class MeanInterval(NamedTuple):
    """A mean over seeds and its 95 % interval; formatted as a number is, ``mean [low, high]``."""

    mean: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        """Every number in ``form``."""
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"

    def above(self, level: float = 0.0) -> str:
        """Whether the mean is above ``level``: seen, not seen, or undecided where the interval holds the level."""
        return SEEN if self.low > level else NOT_SEEN if self.high < level else UNDECIDED

    def below(self, level: float = 0.0) -> str:
        """Whether the mean is below ``level``."""
        return SEEN if self.high < level else NOT_SEEN if self.low > level else UNDECIDED

    def row(self, name: str = "difference") -> dict[str, float]:
        """As part of a row of result.json, the mean under ``name``."""
        return {name: self.mean, "low_95": self.low, "high_95": self.high}


def interval(values: Sequence[float] | np.ndarray) -> MeanInterval:
    """The mean of at least two seeds' values and Student's interval; of paired differences, that of the pairs."""
    array = np.asarray(values, np.float64)
    mean, half = float(np.mean(array)), float(half_width(array))
    return MeanInterval(mean, mean - half, mean + half)


def grouped(rows: Sequence[Mapping[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Rows by their values of ``keys``, in order of first appearance."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


class Claim(NamedTuple):
    """One claim of a paper."""

    claim: str
    measured: str
    verdict: str  # SEEN, NOT_SEEN or UNDECIDED


class Outcome(NamedTuple):
    """What came out. A claim that is not seen and a theorem that does not hold are results, no failures."""

    sheets: tuple[Sheet, ...]
    rows: list[dict[str, Any]]  # of result.json
    claims: tuple[Claim, ...] = ()
    details: Mapping[str, Any] = {}  # further entries of result.json
    remarks: tuple[str, ...] = ()  # what the reader should know before believing the numbers
    failed: tuple[str, ...] = ()  # why the experiment does not count
    verdicts: tuple[Verdict, ...] = ()  # simulation beside theory; where a control passes too, it does not count


def disagreeing(verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    """Those that do not hold, where simulation and theory are the same thing and have to."""
    return tuple(f"{v.statement} {v.sizes}: {v.measured}, must be {v.expected}" for v in verdicts if not v.holds)


NOT_OWED = "a bound that holds where its assumptions fail was not owed; one that is broken there is no counterexample"


def assumed(of: Sequence[Any], title: str) -> tuple[Sheet, dict[str, Any]]:
    """The assumptions of each run's theorem: those of the first run with in how many each holds; for result.json."""
    rows = [
        {**a._asdict(), "held": sum(theorem.assumptions[i].holds for theorem in of), "runs": len(of)}
        for i, a in enumerate(of[0].assumptions)
    ]
    columns = {"assumption": "{name}", "what": "{statement}", "measured": "{measured:.3g}",
               "required": "{relation} {required:.3g}", "holds": "{held} of {runs}"}  # fmt: skip
    details = {"assumptions": [t.assumptions for t in of], "constants": [t.constants for t in of]}
    return table(title, rows, columns), details
