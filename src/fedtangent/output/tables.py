"""Tables on the terminal."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedtangent.compare.table import MethodRow
from fedtangent.compare.verdicts import Verdict

NARROW = 120  # columns of a screen below which a verdict's cells would be of a few letters


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


def _titled(title: str | None) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def text_table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Rows of text, the first column of names; columns all of whose cells begin as numbers do stand to the right."""
    cells, table = list(rows), _titled(title)
    table.add_column(columns[0], no_wrap=True)
    for place, name in enumerate(columns[1:], start=1):
        numeric = all(re.match(r"[+-]?\.?\d|nan|inf|-$", row[place]) for row in cells if row[place])
        table.add_column(name, justify="right" if numeric else "left")
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def comparison_table(rows: Sequence[MethodRow], width: int) -> Group:
    """One setting's methods side by side; in two halves where the screen is narrow."""
    columns = {n: f for n, f in _COLUMNS.items() if n != "accuracy" or any(r.accuracy is not None for r in rows)}
    names = list(columns)
    parts = [names] if width >= NARROW else [names[: len(names) // 2], names[len(names) // 2 :]]
    cells = ([(r.method, *(columns[name](r) for name in part)) for r in rows] for part in parts)
    titles = (rows[0].setting, None)
    return Group(*(text_table(t, ("method", *part), c) for t, part, c in zip(titles, parts, cells, strict=False)))


LEGEND = (
    "test MSE, accuracy: the ensemble of K models, averaged over the independent draws. NLL, 95 % cover: Gaussian with "
    "the mean and variance of all the draws, plus fitted noise; under the cross entropy, MSE and NLL are of "
    "probabilities.\n"
    "For the rows of theory they are what K draws have on average, and what one draw has.\n"
    "|diff| / SE, var ratio: to the GP limit; of a run of your own, or where there is no limit, to the flow's last "
    "round; 0.80 and 1 in agreement. flow error: of each network to the flow from its own initial function.\n"
    "MiB up, s: uplink and time of one run of the K models (for the flow: all of it)."
)
VERDICT_LEGEND = (
    "measured, expected: in simulation, and by the theory with its tolerance. Each negative control is a wrong theory, "
    "put through the same check, which it has to fail.\n"
    "notices: the smallest error of a theory that is noticed, in the units of what is measured, as a share of the "
    "control's mistake, or as a factor of the bound. undecided: too few draws to tell, which counts neither way."
)
COMPARISON_LEGEND = (
    "mean: distance of the networks' mean from the predicted one, over how far training has moved the function. "
    "variance: theirs over the predicted one. Both are extrapolated to infinite width; their intervals miss 1 in "
    "10,000. The control is the nearest of several wrong theories that is far enough to be noticed.\n"
    "linearised network, law: models for which the flow is exact, trained by the same code; small mistakes show."
)


HOLDS = {True: ("holds", "green"), False: ("FAILS", "bold red"), None: ("undecided", "yellow")}
FAILS = {
    True: ("fails, as it must", "green"),
    False: ("PASSES TOO: inconclusive", "bold red"),
    None: ("undecided", "yellow"),
}


def show_verdicts(screen: Console, verdicts: Sequence[Verdict], title: str, *legends: str) -> None:
    """Print every verdict, one line of a table each, or a paragraph where the screen is narrow, and what words mean."""
    screen.print(_verdict_table(verdicts, title) if screen.width >= NARROW else _paragraphs(verdicts, title))
    screen.print("\n".join([VERDICT_LEGEND, *legends]), style="dim", highlight=False)


def _verdict_table(verdicts: Sequence[Verdict], title: str) -> Table:
    table, before = _titled(title), None
    sized, noticed = any(v.sizes for v in verdicts), any(v.notices for v in verdicts)
    given = ("of", "what is compared", *["sizes"] * sized, "measured", "expected", "verdict", *["notices"] * noticed)
    for name in (*given, "negative control"):
        table.add_column(name, overflow="fold")
    for v in verdicts:
        table.add_row(
            *map(Text, (v.subject if v.subject != before else "", v.statement, *[v.sizes] * sized)),
            *map(Text, (v.measured, v.expected)),
            Text(*HOLDS[v.holds]),
            *map(Text, [v.notices] * noticed),
            _control(v),
        )
        before = v.subject
    return table


def _paragraphs(verdicts: Sequence[Verdict], title: str) -> Group:
    lines, before = list[RenderableType]([Text(title, "bold")]), None
    for v in verdicts:
        lines += [Text(f"\n{v.subject}", "bold")] if v.subject != before else []
        judged = Text(f"measured {v.measured}, expected {v.expected}: ").append(Text(*HOLDS[v.holds]))
        control = Text("control: ").append(_control(v)).append(f"; notices {v.notices}" if v.notices else "")
        lines += [Padding(Text(v.statement), (0, 0, 0, 2))]
        lines += [Padding(line, (0, 0, 0, 4)) for line in ([Text(v.sizes)] if v.sizes else []) + [judged, control]]
        before = v.subject
    return Group(*lines)


def _control(v: Verdict) -> Text:
    return Text(f"{v.control}: {v.control_measured}, ").append(Text(*FAILS[v.control_fails]))


def console(stderr: bool = False) -> Console:
    """The console; a redirected one is wide enough not to fold tables."""
    plain = Console(stderr=stderr)
    return plain if plain.is_terminal else Console(stderr=stderr, width=200)


def clock(screen: Console) -> Callable[[str], None]:
    """What prints lines of progress, each with the seconds since the clock was made."""
    start = time.perf_counter()

    def say(line: str) -> None:
        screen.print(f"  {time.perf_counter() - start:6.1f} s  {line}", style="dim", highlight=False)

    return say
