"""What an experiment returns: tables, mean intervals over seeds, the claims that these decide, and verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.intervals import half_width

SEEN, NOT_SEEN, UNDECIDED = "seen", "not seen", "undecided"
Row = TypeVar("Row")


class Sheet(NamedTuple):
    """A table to print; numbers are already text."""

    title: str
    columns: tuple[str, ...]  # the first holds text; others are aligned to the right where they hold numbers
    rows: tuple[tuple[str, ...], ...]


def table(title: str, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> Sheet:
    """Builds a sheet of ``rows``; ``columns`` maps headings to the format strings of cells; None is shown as "-"."""

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
        """Formats ``mean [low, high]`` with every number in ``form``."""
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"

    def above(self, level: float = 0.0) -> str:
        """Judges whether the mean is above ``level``: SEEN, NOT_SEEN, or UNDECIDED if ``level`` is in the interval."""
        return SEEN if self.low > level else NOT_SEEN if self.high < level else UNDECIDED

    def below(self, level: float = 0.0) -> str:
        """Judges whether the mean is below ``level``: SEEN, NOT_SEEN, or UNDECIDED if ``level`` is in the interval."""
        return SEEN if self.high < level else NOT_SEEN if self.low > level else UNDECIDED

    def within(self, target: float, margin: float) -> bool | None:
        """Tells whether the mean is within ``margin`` of ``target``; None if the interval does not decide."""
        away, half = abs(self.mean - target), self.high - self.mean
        return True if away + half <= margin else False if away - half > margin else None

    def row(self, name: str = "difference") -> dict[str, float]:
        """Returns the entries of a row of result.json, the mean under ``name``."""
        return {name: self.mean, "low_95": self.low, "high_95": self.high}


def interval(values: Sequence[float] | np.ndarray) -> MeanInterval:
    """Computes mean and Student's 95 % interval of one value, or paired difference, for each of two or more seeds."""
    array = np.asarray(values, np.float64)
    mean, half = float(np.mean(array)), float(half_width(array))
    return MeanInterval(mean, mean - half, mean + half)


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Groups rows by their values of ``keys``, in order of first appearance.

    A key is an entry of a mapping, and an attribute (which may be dotted) of any other row.
    """
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        at = tuple(row[key] if isinstance(row, Mapping) else attrgetter(key)(row) for key in keys)
        found.setdefault(at, []).append(row)
    return found


def means(rows: Sequence[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    """Computes for each value of ``key`` the means of the rows' other entries, and the number of rows, ``runs``."""
    return [
        {name: float(np.mean([row[name] for row in own])) for name in own[0]} | {key: at, "runs": len(own)}
        for (at,), own in grouped(rows, key).items()
    ]


def log_slope(x: Any, y: Any) -> float:
    """Computes the slope of ``ln y`` against ``ln x``, by least squares."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


class Claim(NamedTuple):
    """A claim of a paper."""

    claim: str
    measured: str
    verdict: str  # SEEN, NOT_SEEN or UNDECIDED


class Outcome(NamedTuple):
    """Result of an experiment; a claim that is not seen, or a theorem that does not hold, is not a failure."""

    sheets: tuple[Sheet, ...]
    rows: list[dict[str, Any]]  # the table in result.json
    claims: tuple[Claim, ...] = ()
    details: Mapping[str, Any] = {}  # further entries of result.json
    remarks: tuple[str, ...] = ()  # what the reader should know before believing the numbers
    failed: tuple[str, ...] = ()  # reasons why the experiment does not count
    verdicts: tuple[Verdict, ...] = ()  # simulation beside theory; the experiment does not count if a control passes


def disagreeing(verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    """Returns a line for ``Outcome.failed`` for each verdict that does not hold, if it has to."""
    return tuple(f"{v.statement} {v.sizes}: {v.measured}, must be {v.expected}" for v in verdicts if not v.holds)


NOT_OWED = "a bound that holds where its assumptions fail was not owed; one that is broken there is no counterexample"


def assumption_sheet(theorems: Sequence[Any], title: str) -> Sheet:
    """Builds the table of assumptions: values from the first run's theorem, and the number of runs where each holds."""
    rows = [
        {**a._asdict(), "held": sum(theorem.assumptions[i].holds for theorem in theorems), "runs": len(theorems)}
        for i, a in enumerate(theorems[0].assumptions)
    ]
    columns = {"assumption": "{name}", "what": "{statement}", "measured": "{measured:.3g}",
               "required": "{relation} {required:.3g}", "holds": "{held} of {runs}"}  # fmt: skip
    return table(title, rows, columns)


def theorem_details(theorems: Sequence[Any]) -> dict[str, Any]:
    """Returns the assumptions and constants of each run's theorem, for ``Outcome.details``."""
    return {"assumptions": [t.assumptions for t in theorems], "constants": [t.constants for t in theorems]}
