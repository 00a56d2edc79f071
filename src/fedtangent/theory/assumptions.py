"""An assumption of a theorem, measured on given data: one kind for every theorem, and one way to report it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ROUNDING = 1e-12  # of inputs that were scaled to norm 1


class Assumption(NamedTuple):
    """One assumption: it holds if ``measured relation required``."""

    name: str
    statement: str
    holds: bool
    measured: float
    relation: str  # "<", "<=" or ">"
    required: float

    def __str__(self) -> str:
        """One line of a report."""
        word = "holds" if self.holds else "FAILS"
        return f"{self.name}: {word}, {self.measured:.3g} {self.relation} {self.required:.3g} ({self.statement})"


def assumption(name: str, statement: str, measured: float, relation: str, required: float) -> Assumption:
    """The comparison carried out; a measured value that is not a number fails."""
    holds = {"<": measured < required, "<=": measured <= required, ">": measured > required}[relation]
    return Assumption(name, statement, bool(holds), float(measured), relation, float(required))


def failing(found: Sequence[Assumption]) -> tuple[str, ...]:
    """Names of those that do not hold."""
    return tuple(a.name for a in found if not a.holds)


def report(title: str, found: Sequence[Assumption]) -> str:
    """``title`` and a line for each assumption: what is printed of a theorem on given data."""
    return "\n  ".join([title, *map(str, found)])
