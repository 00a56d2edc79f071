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

PASS, FAIL = Text("agrees", "green"), Text("DISAGREES", "bold red")


def number(value: float | int | None, digits: int = 3) -> str:
    """A number as people read it; a dash for what does not apply."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    return f"{value:.{digits}f}"


def comparison_table(rows: Sequence[Row]) -> Table:
    """One setting's methods side by side."""
    classifies = any(r.accuracy is not None for r in rows)
    table = Table(title=rows[0].setting, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    names = ["test MSE", "accuracy", "NLL", "95 % cover", "|diff| / SE", "var ratio", "flow error", "rounds", "MiB up", "s"]
    if not classifies:
        names.remove("accuracy")
    for name in names:
        table.add_column(name, justify="right")
    for r in rows:
        cells = [number(r.test_mse, 4), number(r.accuracy), number(r.nll), number(r.coverage), number(r.mean_difference, 2),
                 number(r.variance_ratio), number(r.flow_error), number(r.rounds), number(r.uplink_mib, 1),
                 number(r.seconds, 2)]  # fmt: skip
        if not classifies:
            del cells[1]
        table.add_row(r.method, *cells)
    return table


LEGEND = (
    "test MSE, accuracy: the ensemble of K models, averaged over the independent draws. NLL, 95 % cover: Gaussian with the "
    "mean and variance of all the draws, plus fitted noise.\n"
    "|diff| / SE, var ratio: to the GP limit (to the flow's last round where the kernel is singular), 0.80 and 1 in "
    "agreement. flow error: of each network to the flow from its own initial function."
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
    table = Table(title="Do simulation and theory agree?", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
                  pad_edge=False)  # fmt: skip
    for name in ("setting", "comparison", "measured", "expected", "verdict", "negative control", "its value", "control"):
        table.add_column(name)
    for group in _grouped(verdicts).values():
        v, count = group.shown, len(group.all)
        name = v.comparison if count == 1 else f"{v.comparison} (all {count} rounds)"
        agrees = all(x.agrees for x in group.all)
        fails = all(x.control_fails for x in group.all)
        table.add_row(v.setting, name, v.measured, v.allowed, PASS if agrees else FAIL, v.control, v.control_measured,
                      Text("fails, as it must", "green") if fails else Text("PASSES", "bold red"))  # fmt: skip
    return table


def console(stderr: bool = False) -> Console:
    """The console; a redirected one is wide enough not to fold tables."""
    plain = Console(stderr=stderr)
    return plain if plain.is_terminal else Console(stderr=stderr, width=200)
