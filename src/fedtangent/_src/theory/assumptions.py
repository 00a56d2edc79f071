"""An assumption of a theorem, measured on data: one record for every theorem, and one report of such records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ROUNDING = 1e-12  # of inputs that were scaled to norm 1


class Assumption(NamedTuple):
    """One assumption of a theorem; it holds if ``measured relation required``, such as ``0.1 < 2``."""

    name: str
    statement: str  # meaning of the measured value
    holds: bool
    measured: float
    relation: str  # "<", "<=" or ">"
    required: float

    def __str__(self) -> str:
        """Returns the assumption as one line of a report."""
        word = "holds" if self.holds else "FAILS"
        return f"{self.name}: {word}, {self.measured:.3g} {self.relation} {self.required:.3g} ({self.statement})"


def assumption(
    name: str, statement: str, measured: float | np.number, relation: str, required: float | np.number
) -> Assumption:
    """Builds an assumption and compares its measured value with the required one; a measured NaN fails.

    Args:
        name: Short name of the assumption.
        statement: Meaning of the measured value, for the report.
        measured: Value on the data.
        relation: "<", "<=" or ">".
        required: Value that the theorem requires.
    """
    holds = {"<": measured < required, "<=": measured <= required, ">": measured > required}[relation]
    return Assumption(name, statement, bool(holds), float(measured), relation, float(required))


def failing(assumptions: Sequence[Assumption]) -> tuple[str, ...]:
    """Returns the names of the assumptions that do not hold."""
    return tuple(a.name for a in assumptions if not a.holds)


def report(title: str, assumptions: Sequence[Assumption]) -> str:
    """Returns ``title`` and one line for each assumption.

    Args:
        title: First line.
        assumptions: Assumptions of a theorem.
    """
    return "\n  ".join([title, *map(str, assumptions)])
