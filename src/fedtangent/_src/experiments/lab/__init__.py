"""The result of an experiment (``Outcome``): tables, claims judged by intervals over seeds, and verdicts.

The other modules are shared by several experiments. ``runner``: the record of an experiment, and how it is run;
``harness``: methods x settings x seeds, where each run is computed once and kept on disk; ``trials``: the data of one
seed; ``sine``: Fed-ensemble on sine functions; ``two_layer``: the regression problem of NTK-FL's theorems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from fedtangent._src.comparison.statistics import log_slope
from fedtangent._src.comparison.verdicts import undecided
from fedtangent._src.intervals import half_width
from fedtangent._src.output.files import Metric
from fedtangent._src.theory.checks import Assumption
from fedtangent._src.types import ArrayLike
from fedtangent.types import Verdict

SEEN, NOT_SEEN, UNDECIDED = "seen", "not seen", "undecided"
NOT_OWED = "where its assumptions fail a theorem promises nothing: a bound that is broken there is no counterexample"

Row = dict[str, Any]
"""A row of a tidy table: entries by the name of their column."""
Item = TypeVar("Item")


class Sheet(NamedTuple):
    """A table to print: title, column headings and rows, whose numbers are already formatted as text."""

    title: str
    columns: tuple[str, ...]  # the first holds text; others are aligned to the right where they hold numbers
    rows: tuple[tuple[str, ...], ...]


def table(title: str, rows: Iterable[Mapping[str, object]], columns: str) -> Sheet:
    """Formats rows of values as a ``Sheet``, the table that an experiment prints.

    Args:
        title: Title of the sheet.
        rows: Rows, each a mapping from the names in the format strings to values. A None with a
            format such as ``{rate:g}`` makes the cell "-".
        columns: Heading and format string of each column, as in ``"method: {label} | rate: {rate:g}"``.
    """
    headings, forms = [], []
    for column in columns.split(" | "):
        heading, _, before = column[: column.index("{")].rpartition(": ")
        headings.append(heading)
        forms.append(before + column[column.index("{") :])

    def cell(form: str, row: Mapping[str, object]) -> str:
        try:
            return form.format(**row)
        except TypeError:  # None has no format of a number
            return "-"

    return Sheet(title, tuple(headings), tuple(tuple(cell(form, row) for form in forms) for row in rows))


class Claim(NamedTuple):
    """A claim of a paper, or our own: the sentence, the measured value as text, and whether the claim is seen.

    The verdict is "seen" (the measurements show it), "not seen" (they show the contrary), or "undecided".
    """

    claim: str
    measured: str
    verdict: str  # SEEN, NOT_SEEN or UNDECIDED


class MeanInterval(NamedTuple):
    """A mean over seeds and its 95 % interval; ``f"{interval:.2f}"`` formats it as ``mean [low, high]``."""

    mean: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        """Formats the interval as ``mean [low, high]``, each number by the format string ``form``."""
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"

    def above(self, level: float = 0.0) -> str:
        """Returns "seen" if the whole interval is above ``level``, "not seen" if it is below, else "undecided"."""
        return SEEN if self.low > level else NOT_SEEN if self.high < level else UNDECIDED

    def below(self, level: float = 0.0) -> str:
        """Returns "seen" if the whole interval is below ``level``, "not seen" if it is above, else "undecided"."""
        return SEEN if self.high < level else NOT_SEEN if self.low > level else UNDECIDED

    def claim_above(self, claim: str, measured: str = "{:+.4f}", level: float = 0.0) -> Claim:
        """Judges the claim that the mean is above a level: "seen", "not seen" or "undecided", by the 95 % interval.

        Args:
            claim: The claim, as a sentence.
            measured: Format string for this interval, such as ``"by {:+.4f}"``.
            level: The level.
        """
        return Claim(claim, measured.format(self), self.above(level))

    def claim_below(self, claim: str, measured: str = "{:+.4f}", level: float = 0.0) -> Claim:
        """Judges the claim that the mean is below a level: "seen", "not seen" or "undecided", by the 95 % interval.

        Args:
            claim: The claim, as a sentence.
            measured: Format string for this interval, such as ``"by {:+.4f}"``.
            level: The level.
        """
        return Claim(claim, measured.format(self), self.below(level))

    def within(self, target: float, margin: float) -> bool | None:
        """Tells whether the mean is within ``margin`` of ``target``; None if the interval does not decide.

        It is True if the whole interval is within the margin, False if the whole interval is outside. The interval must
        be symmetric about its mean.

        Args:
            target: Value with which the mean is compared.
            margin: Allowed distance.
        """
        away, half = abs(self.mean - target), self.high - self.mean
        return True if away + half <= margin else False if away - half > margin else None

    def row(self, name: str = "difference") -> dict[str, float]:
        """Returns the dictionary ``{name: mean, "low_95": low, "high_95": high}`` for result.json."""
        return {name: self.mean, "low_95": self.low, "high_95": self.high}


def interval(values: Iterable[float] | np.ndarray) -> MeanInterval:
    """Computes the mean over seeds and its Student's 95 % interval.

    ``values`` holds one number, or paired difference, for each seed, at least two.
    """
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values), np.float64)
    mean, half = float(np.mean(array)), float(half_width(array))
    return MeanInterval(mean, mean - half, mean + half)


def ratio_interval(numerators: np.ndarray, denominators: np.ndarray) -> MeanInterval:
    """Computes the geometric mean of paired ratios over seeds and its 95 % interval, Student's of their logarithms.

    Args:
        numerators: A positive number for each seed, at least two.
        denominators: A positive number for each seed.
    """
    return MeanInterval(*np.exp(interval(np.log(numerators) - np.log(denominators))).tolist())


def grouped(rows: Iterable[Item], *keys: str) -> dict[tuple[Any, ...], list[Item]]:
    """Groups rows by their values of ``keys``, in order of first appearance.

    A key is the name of an entry if the row is a mapping, else of an attribute, which may be dotted ("config.rate").
    """
    groups: dict[tuple[Any, ...], list[Item]] = {}
    for row in rows:
        values = tuple(row[key] if isinstance(row, Mapping) else attrgetter(key)(row) for key in keys)
        groups.setdefault(values, []).append(row)
    return groups


def means(rows: Iterable[Row], *keys: str) -> list[Row]:
    """Averages rows in groups: returns one row for each combination of values of ``keys``.

    Its other entries are means over the group, and ``runs`` is the number of rows. An entry with a None in the group
    has the mean None; a text is taken from the group's first row.

    Args:
        rows: Rows of numbers and text.
        *keys: Names of the entries that define the groups.
    """

    def mean(values: list[Any]) -> float | str | None:
        if isinstance(values[0], str):
            return values[0]
        return None if None in values else float(np.mean(values))

    return [
        {name: mean([row[name] for row in group]) for name in group[0]}
        | {**dict(zip(keys, values, strict=True)), "runs": len(group)}
        for values, group in grouped(rows, *keys).items()
    ]


def log_slopes(items: Iterable[Item], x: str, y: Callable[[Item], float], *keys: str) -> MeanInterval:
    """Fits the slope of ``ln y`` against ``ln x`` in each group of items; returns the mean slope with its interval.

    Args:
        items: Items of at least two groups.
        x: Name of the attribute that holds x.
        y: Function that computes y from an item.
        *keys: Names of the attributes that define the groups, such as "seed".
    """
    groups = grouped(items, *keys).values()
    return interval(log_slope([getattr(item, x) for item in group], [y(item) for item in group]) for group in groups)


def metric_rows(
    run: str, seed: int, rounds: int | Iterable[int] | np.ndarray, values: Mapping[str, ArrayLike], split: str = "train"
) -> list[Metric]:
    """Builds the rows of metrics.csv for one run, with 0 in the columns of bytes.

    Args:
        run: Name of the run.
        seed: Seed of the run.
        rounds: The round of each value of a metric; a whole number if each metric has one value.
        values: The values of each metric, by its name.
        split: Part of the data on which the values were measured.
    """
    at = [rounds] if isinstance(rounds, int) else list(rounds)
    return [
        Metric(int(round_), run, seed, split, name, float(value), 0, 0)
        for name, curve in values.items()
        for round_, value in zip(at, np.atleast_1d(np.asarray(curve)), strict=True)
    ]


class Outcome(NamedTuple):
    """Result of an experiment: its tables, rows and ``details`` for result.json, claims, remarks and verdicts.

    The experiment has failed if ``failed`` has a reason. A claim that is not seen is no failure, and a verdict that
    does not hold is a failure only if ``failed`` has a line about it (``disagreeing``).
    """

    sheets: tuple[Sheet, ...]
    rows: list[Row]  # the table in result.json
    claims: tuple[Claim, ...] = ()
    details: Mapping[str, object] = {}  # further entries of result.json
    remarks: tuple[str, ...] = ()  # what the reader should know before believing the numbers
    failed: tuple[str, ...] = ()  # reasons why the experiment has failed
    verdicts: tuple[Verdict, ...] = ()  # simulation compared with theory; ``perform`` fails one whose control passes

    @property
    def undecided(self) -> tuple[str, ...]:
        """Names of the claims and verdicts that are undecided."""
        return *(c.claim for c in self.claims if c.verdict == UNDECIDED), *undecided(self.verdicts)


def disagreeing(verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    """Returns a line for ``Outcome.failed`` about each of ``verdicts`` whose ``holds`` is False or None."""
    return tuple(f"{v.statement} {v.sizes}: {v.measured}, must be {v.expected}" for v in verdicts if not v.holds)


@runtime_checkable
class Theorem(Protocol):
    """A theorem evaluated for one run: whether its assumptions hold there, and the constants in its bound."""

    @property
    def assumptions(self) -> Sequence[Assumption]:
        """The theorem's assumptions, each with its measured and its required value."""

    @property
    def constants(self) -> object:
        """The values of the theorem's constants for this run."""


def assumption_sheet(theorems: Sequence[Theorem], title: str) -> Sheet:
    """Builds a table of a theorem's assumptions: measured and required values, and in how many runs each holds.

    The values are of the first run.

    Args:
        theorems: The theorem for every run.
        title: Title of the sheet.
    """
    rows = [
        {**a._asdict(), "held": sum(theorem.assumptions[i].holds for theorem in theorems), "runs": len(theorems)}
        for i, a in enumerate(theorems[0].assumptions)
    ]
    columns = "assumption: {name} | what: {statement} | measured: {measured:.3g} | required: {relation} {required:.3g}"
    return table(title, rows, f"{columns} | holds: {{held}} of {{runs}}")


def theorem_details(theorems: Sequence[Theorem]) -> dict[str, object]:
    """Returns the assumptions and constants of each run's theorem, for ``Outcome.details``."""
    return {"assumptions": [t.assumptions for t in theorems], "constants": [t.constants for t in theorems]}
