"""Tables and progress lines of the commands on the terminal."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedtangent._src.comparison.table import MethodRow
from fedtangent._src.comparison.verdicts import CONTROL_WORDS, Verdict

NARROW = 120  # columns of a screen below which a verdict's cells would be of a few letters
FOLDED = 24  # columns of a screen into which words are folded where it is narrow
EDGES, GAP = 2, 3  # columns of a screen at both ends of a table, and between two of its columns


def number(value: float | int | None, digits: int = 3) -> str:
    """Returns a number as text, in scientific notation if very small or large; "-" for None.

    Args:
        value: The number.
        digits: Decimals.
    """
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    return f"{value:.{digits}f}"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun in the singular or plural: ``1 run``, ``2 runs``.

    Args:
        number: The number.
        noun: The noun in the singular.
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


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
    "s a run": lambda r: number(r.seconds_a_run, 2),
}


def _titled(title: str | None) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


class TextTable(NamedTuple):
    """A table of text, printed by rich; on a narrow screen it is split into parts, which all repeat the first column.

    Attributes:
        title: Title above the table, or None.
        columns: Headings of the columns.
        rows: Cells of each row, in the order of ``columns``.
    """

    title: str | None
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Splits the columns into tables that each fit the screen's width, and yields these tables for printing."""
        for i, part in enumerate(self._parts(options.max_width)):
            yield self._table(self.title if i == 0 else None, part, options.max_width)

    def _parts(self, width: int) -> Iterable[list[int]]:
        first, *others = (self._least(place) for place in range(len(self.columns)))
        part, used = [0], EDGES + first
        for place, needed in enumerate(others, start=1):
            if len(part) > 1 and used + GAP + needed > width:
                yield part
                part, used = [0], EDGES + first
            part.append(place)
            used += GAP + needed
        yield part

    def _least(self, place: int) -> int:
        """Returns the least width, in characters, at which the column number ``place`` is readable; text may wrap."""
        cells = [row[place] for row in self.rows]
        longest = max(map(len, (*cells, *self.columns[place].split())), default=0)
        return longest if self._numeric(place) else min(longest, FOLDED)

    def _numeric(self, place: int) -> bool:
        """Tells whether all cells of the column number ``place`` begin as numbers do."""
        return all(re.match(r"[+-]?\.?\d|nan|inf|-$", row[place]) for row in self.rows if row[place])

    def _table(self, title: str | None, part: list[int], width: int) -> Table:
        table = _titled(title)
        longest = [max(map(len, (self.columns[place], *(row[place] for row in self.rows)))) for place in part]
        narrow = EDGES + sum(longest) + GAP * (len(part) - 1) > width
        for place in part:
            numeric, least = place > 0 and self._numeric(place), self._least(place)
            # numbers must not wrap, but their headings may
            heading = textwrap.fill(self.columns[place], max(least, 1)) if numeric and narrow else self.columns[place]
            table.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric, min_width=least)
        for row in self.rows:
            table.add_row(*(Text(row[place]) for place in part))
        return table


def comparison_table(rows: Sequence[MethodRow]) -> TextTable:
    """Builds the table of one comparison of networks with theory.

    ``rows`` has the measurements of each method: trained networks, NTK-FL and the predictions of theory. Columns in
    which no method has a value are left out.
    """
    columns = {name: text for name, text in _COLUMNS.items() if any(text(row) != "-" for row in rows)}
    cells = [(r.method, *(text(r) for text in columns.values())) for r in rows]
    return TextTable(rows[0].setting, ("method", *columns), cells)


LEGEND = (
    "test MSE, accuracy: of the ensemble of K models, averaged over the draws. NLL, 95 % cover: of a Gaussian with the "
    "mean and variance over all networks, plus fitted noise; under the cross entropy, of probabilities. Rows of theory "
    "show expected values; figures and metrics.csv show the flow from the networks' own initial functions.\n"
    "|diff| / SE, var ratio: distance to the GP limit, or to the flow's last round if there is no limit; 0.80 and 1 "
    "mean agreement. flow error: distance of each network to the flow, or other prediction, from its "
    "initial function, at the last round.\n"
    "MiB up, s a run: uplink and time of one run of the K models, the fastest of the draws, without what precedes and "
    "follows the runs; for the flow, the time of the whole prediction."
)
VERDICT_LEGEND = (
    "measured: by simulation. expected: by theory, with the tolerance. The negative control is a wrong theory, which "
    "must fail the same check.\n"
    "notices: the smallest error of the theory that the check notices. undecided: too few draws to tell; no run fails "
    "because of it, but with --strict."
)
COMPARISON_LEGEND = (
    "Means and variances of networks are extrapolated to infinite width; the distance of a mean is relative to how far "
    "training moved the function. Linear and linearised models follow the flow to rounding."
)


HOLDS = {True: ("holds", "green"), False: ("FAILS", "bold red"), None: ("undecided", "yellow")}
FAILS = {outcome: (CONTROL_WORDS[outcome], colour) for outcome, (_, colour) in HOLDS.items()}


def show_verdicts(screen: Console, verdicts: Sequence[Verdict], title: str, *legends: str) -> None:
    """Prints verdicts and the meaning of the columns: as a table, or as paragraphs if the screen is narrow.

    Args:
        screen: Console to print to.
        verdicts: The verdicts, in order.
        title: Title of the table.
        *legends: Further lines of explanation.
    """
    screen.print(_verdict_table(verdicts, title) if screen.width >= NARROW else _paragraphs(verdicts, title))
    screen.print("\n".join([VERDICT_LEGEND, *legends]), style="dim", highlight=False)


def _verdict_table(verdicts: Sequence[Verdict], title: str) -> Table:
    table, before = _titled(title), None
    sized, noticed = any(v.sizes for v in verdicts), any(v.notices for v in verdicts)
    compared = ("of", "what is compared", *["sizes"] * sized, "measured", "expected", "verdict")
    for name in (*compared, *["notices"] * noticed, "negative control"):
        table.add_column(name, overflow="fold")
    for v in verdicts:
        table.add_row(
            *map(Text, (v.subject if v.subject != before else "", v.statement, *[v.sizes] * sized)),
            *map(Text, (v.measured, v.expected)),
            Text(*HOLDS[_answer(v)]),
            *map(Text, [v.notices] * noticed),
            _control(v),
        )
        before = v.subject
    return table


def _paragraphs(verdicts: Sequence[Verdict], title: str) -> Group:
    """Builds a paragraph for each verdict, with a heading for each new subject.

    The sizes of a comparison (such as widths and draws) are named only if they differ from the previous verdict.
    """
    parts, subject, sizes = list[RenderableType]([Text(title, "bold")]), "", ""
    for v in verdicts:
        parts += [Text(f"\n{v.subject}", "bold")] if v.subject != subject else []
        lines = [Text(v.statement), *[Text(v.sizes)] * (v.sizes not in ("", sizes))]
        lines.append(Text(f"measured {v.measured}, expected {v.expected}"))
        lines.append(Text("control: ").append(_control(v)))
        lines += [Text(f"notices {v.notices}")] if v.notices else []
        paragraph = Table.grid(padding=(0, 0, 0, 2))
        paragraph.add_column(width=max(len(word) for word, _ in HOLDS.values()))
        paragraph.add_row(Text(*HOLDS[_answer(v)]), Text("\n").join(lines))
        parts.append(paragraph)
        subject, sizes = v.subject, v.sizes
    return Group(*parts, Text())


def _answer(v: Verdict) -> bool | None:
    """Returns whether theory holds; None if this is undecided, or if theory holds but the control is undecided."""
    return v.holds if v.passed is not None else None


def _control(v: Verdict) -> Text:
    return Text(f"{v.control}: {v.control_measured}, ").append(Text(*FAILS[v.control_fails]))


def console(stderr: bool = False) -> Console:
    """Returns a console for standard output or standard error; it has 200 columns if it is not a terminal.

    So tables that are redirected to a file are not folded.
    """
    plain = Console(stderr=stderr)
    return plain if plain.is_terminal else Console(stderr=stderr, width=200)


def show_times(screen: Console, times: Mapping[str, float], total: float) -> None:
    """Prints a table of the seconds of each step of a command, which add up to the total.

    Args:
        screen: Console to print to.
        times: Seconds of each step.
        total: Seconds of the whole command. Seconds outside of all steps have a row of their own.
    """
    rest = {"tables, figures and files": total - sum(times.values()), "total": total}
    rows = [(step, f"{seconds:.1f}") for step, seconds in {**times, **rest}.items()]
    screen.print(TextTable("Time", ("step", "seconds"), rows))


def clock(screen: Console) -> Callable[[str], None]:
    """Returns a function that prints lines of progress, each with the seconds since ``clock`` was called."""
    start = time.perf_counter()

    def say(line: str) -> None:
        screen.print(f"  {time.perf_counter() - start:6.1f} s  {line}", style="dim", highlight=False)

    return say
