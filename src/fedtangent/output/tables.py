"""Tables on the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedtangent.compare.table import Row
from fedtangent.compare.verdicts import Verdict


def number(value: float | int | None, digits: int = 3) -> str:
    """A number as people read it; a dash for what does not apply."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    return f"{value:.{digits}f}"


_COLUMNS = {
    "test MSE": lambda r: number(r.test_mse, 4),
    "accuracy": lambda r: number(r.accuracy),
    "NLL": lambda r: number(r.nll),
    "95 % cover": lambda r: number(r.coverage),
    "|diff| / SE": lambda r: number(r.mean_difference, 2),
    "var ratio": lambda r: number(r.variance_ratio),
    "flow error": lambda r: number(r.flow_error),
    "rounds": lambda r: number(r.rounds),
    "MiB up": lambda r: number(r.uplink_mib, 1),
    "s": lambda r: number(r.seconds, 2),
}


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def comparison_table(rows: Sequence[Row]) -> Table:
    """One setting's methods side by side."""
    columns = {n: f for n, f in _COLUMNS.items() if n != "accuracy" or any(r.accuracy is not None for r in rows)}
    table = _table(rows[0].setting)
    table.add_column("method", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    for r in rows:
        table.add_row(r.method, *(cell(r) for cell in columns.values()))
    return table


LEGEND = (
    "test MSE, accuracy: the ensemble of K models, averaged over the independent draws. NLL, 95 % cover: Gaussian with "
    "the mean and variance of all the draws, plus fitted noise.\n"
    "For the two theory rows they are what K draws have on average, and what one draw has.\n"
    "|diff| / SE, var ratio: to the GP limit (to the flow's last round where the kernel is singular), 0.80 and 1 in "
    "agreement. flow error: of each network to the flow from its own initial function.\n"
    "MiB up, s: uplink and time of one run of the K models (for the flow: all of it)."
)
VERDICT_LEGEND = (
    "mean: squared distance of the networks' mean from the theory's, over what their own scatter explains. variance: "
    "theirs over the theory's.\nExpected: 1, plus the finite-width term fitted on the smaller widths, +- 3 standard "
    'errors. p: of a sign-flip test. Each control is a wrong theory put through the same check; "without one client": '
    'without the one that is missed most; "nearest of": of several small mistakes the one that comes nearest.\n'
    "linearised network, law: models for which the flow is exact, trained by the same code, so that these show."
)


class _Group:
    """Verdicts that differ in their round only."""

    def __init__(self, verdict: Verdict) -> None:
        self.all = [verdict]

    @property
    def passed(self) -> bool:
        return all(v.passed for v in self.all)

    @property
    def shown(self) -> Verdict:
        failed = [v for v in self.all if not v.passed]
        return failed[0] if failed else self.all[-1]


def _grouped(verdicts: Sequence[Verdict]) -> dict[str, _Group]:
    groups: dict[str, _Group] = {}
    for v in verdicts:
        key = f"{v.setting}|{re.sub(r', round [0-9]+$', '', v.comparison)}"
        if key in groups:
            groups[key].all.append(v)
        else:
            groups[key] = _Group(v)
    return groups


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """One line per comparison; rounds are folded into one line, which shows the last, or the first that fails."""
    table = _table("Do simulation and theory agree?")
    for name in ("setting", "comparison", "measured", "expected", "verdict", "negative control"):
        table.add_column(name)
    for group in _grouped(verdicts).values():
        v, count = group.shown, len(group.all)
        name = v.comparison if count == 1 else f"{v.comparison} (all {count} rounds)"
        agrees, fails = all(x.agrees for x in group.all), all(x.control_fails for x in group.all)
        verdict = Text("agrees", "green") if agrees else Text("DISAGREES", "bold red")
        control = Text(f"{v.control}: {v.control_measured}, ").append(
            Text("fails, as it must", "green") if fails else Text("PASSES TOO: inconclusive", "bold red")
        )
        table.add_row(v.setting, name, v.measured, v.allowed, verdict, control)
    return table


def console(stderr: bool = False) -> Console:
    """The console; a redirected one is wide enough not to fold tables."""
    plain = Console(stderr=stderr)
    return plain if plain.is_terminal else Console(stderr=stderr, width=200)
