"""The table of ``fedtangent check-theory``."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from fedtangent.compare.theorems import TheoremCheck

THEOREM_LEGEND = (
    "measured, predicted: on trained models and by the theory, or what the theory allows of the measured. Each "
    "negative control is a wrong theory put through the same check, which it has to fail."
)


def theorem_table(checks: Sequence[TheoremCheck]) -> Table:
    """One line for each check; a theorem is named once, at its first line."""
    table = Table(
        title="Theory against simulation", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for name in ("theorem", "statement checked", "sizes", "measured", "predicted", "verdict", "negative control"):
        table.add_column(name, overflow="fold")
    before = None
    for c in checks:
        verdict = Text("holds", "green") if c.passed else Text("FAILS", "bold red")
        control = Text(f"{c.control}: ").append(
            Text("fails, as it must", "green") if c.control_failed else Text("PASSES TOO: inconclusive", "bold red")
        )
        texts = [Text(t) for t in (c.theorem if c.theorem != before else "", *c[1:5])]
        table.add_row(*texts, verdict, control)
        before = c.theorem
    return table
