"""Statistics of the measurements, and the tables on the terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from floor import Floor, flops
from rich import box
from rich.table import Table
from scipy import stats
from workloads import WORKLOADS

REFERENCE = "fedtangent"
# Chance that a tool which does the same work is flagged nevertheless.
FALSE_ALARM = 1e-3
# Sums of up to 1,000 float32 models in another order; what remains where a workload leaves nothing to chance.
ROUNDING = 1e-5
# One forward pass of the same network on the same numbers.
SAME_START = 1e-5


class Summary(NamedTuple):
    """The median of a quantity over repeats, and its range."""

    median: float
    low: float
    high: float


def summarise(values: Sequence[float]) -> Summary:
    """Median, minimum and maximum; raises ``ValueError`` for no values."""
    if not values:
        raise ValueError("values: got none, a summary needs at least one")
    return Summary(statistics.median(values), min(values), max(values))


class Agreement(NamedTuple):
    """Whether a tool did the work of the others: its mean loss less theirs, and what chance allows."""

    difference: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether the difference is within what chance allows; a NaN is not."""
        return abs(self.difference) <= self.allowed


def agreement(losses: Mapping[str, Sequence[float]], tool: str, spread: Sequence[float] = ()) -> Agreement | None:
    """Compare ``tool``'s final losses with all the others'; None where nothing tells how much chance moves them.

    ``losses`` holds each tool's final loss for every repeat, which differ in cohorts and orders of batches alone;
    ``spread`` more of them for some tool, used for their scatter only. The scatter is pooled within tools, and the
    difference of means judged by Student's t at the level FALSE_ALARM; ROUNDING, relative, is always allowed.
    """
    groups = [list(values) for values in losses.values()] + [list(spread)]
    freedom = sum(max(len(group) - 1, 0) for group in groups)
    others = [value for name, values in losses.items() if name != tool for value in values]
    if freedom == 0 or not others:
        return None
    squares = sum(sum((value - statistics.fmean(group)) ** 2 for value in group) for group in groups if group)
    own = list(losses[tool])
    mean = statistics.fmean(others)
    error = math.sqrt(squares / freedom * (1 / len(own) + 1 / len(others)))
    allowed = float(stats.t.ppf(1 - FALSE_ALARM / 2, freedom)) * error + ROUNDING * abs(mean)
    return Agreement(statistics.fmean(own) - mean, allowed)


def summary_rows(name: str, measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One row a tool for workload ``name``: rates, ratios to fedtangent, losses and what is wrong with them."""
    losses = {tool: [m["final_loss"] for m in runs] for tool, runs in measured.items()}
    spread = [loss for runs in measured.values() for m in runs for loss in m.get("losses_of_other_seeds", ())]
    rates = {tool: summarise([m["client_steps_per_second"] for m in runs]) for tool, runs in measured.items()}
    start = {tool: runs[0]["initial_loss"] for tool, runs in measured.items()}
    middle = statistics.median(start.values())
    rows = []
    for tool, runs in measured.items():
        agreed = agreement(losses, tool, spread)
        rows.append(
            {
                "workload": name,
                "tool": tool,
                "setting": runs[0]["setting"],
                "repeats": len(runs),
                "client_steps_per_second": rates[tool]._asdict(),
                "rounds_per_second": summarise([m["rounds_per_second"] for m in runs])._asdict(),
                "fedtangent_over_tool": rates[REFERENCE].median / rates[tool].median if REFERENCE in rates else None,
                "peak_mib": max(m["peak_mib"] for m in runs),
                "timed_seconds": summarise([m["seconds"] for m in runs])._asdict(),
                "initial_loss": start[tool],
                "final_loss": statistics.fmean(losses[tool]),
                "loss_difference": None if agreed is None else agreed.difference,
                "loss_difference_allowed": None if agreed is None else agreed.allowed,
                "flags": flags(name, runs, middle, agreed),
                "versions": runs[0]["versions"],
            }
        )
    return rows


def flags(name: str, runs: Sequence[Mapping[str, Any]], start: float, agreed: Agreement | None) -> list[str]:
    """What shows that a tool did not do the same work; empty if nothing does."""
    found = []
    if any(abs(m["initial_loss"] - start) > SAME_START * abs(start) for m in runs):
        found.append("starts elsewhere")
    if not all(m["final_loss"] < m["initial_loss"] for m in runs):
        found.append("does not learn")
    if any(m["client_steps_counted"] != m["rounds"] * WORKLOADS[name].steps_per_round for m in runs):
        found.append("counted other steps")
    if agreed is not None and not agreed.holds:
        found.append("loss outside")
    return found


def _table(title: str, columns: Sequence[str], left: int) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at < left else "right")
    return table


def _number(value: float, digits: int = 3) -> str:
    """``digits`` significant digits without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def _loss(row: Mapping[str, Any]) -> str:
    if row["loss_difference"] is None:
        return "not judged"
    return f"{row['loss_difference']:+.5f} (+-{row['loss_difference_allowed']:.5f})"


def peers_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Every tool on every workload."""
    columns = ("workload", "tool", "setting", "steps/s", "min to max", "rounds/s", "fedtangent /", "peak MiB")
    table = _table("Client steps per second", (*columns, "final loss", "less the others'", "flags"), 3)
    for row in rows:
        rate, ratio = row["client_steps_per_second"], row["fedtangent_over_tool"]
        table.add_row(
            WORKLOADS[row["workload"]].title,
            row["tool"],
            row["setting"],
            _number(rate["median"]),
            f"{_number(rate['low'])} to {_number(rate['high'])}",
            _number(row["rounds_per_second"]["median"]),
            "-" if ratio is None else f"{_number(ratio)}x",
            f"{row['peak_mib']:.0f}",
            f"{row['final_loss']:.4f}",
            _loss(row),
            ", ".join(row["flags"]) or "none",
        )
    return table


def floor_row(name: str, steps_per_second: float, one: Floor, all_cores: Floor) -> dict[str, Any]:
    """fedtangent's distance to the floor of one stream of work, and to that of one stream on every core."""
    operations, step = flops(WORKLOADS[name]), 1 / steps_per_second
    return {
        "workload": name,
        "mflop_per_step": operations / 1e6,
        "step_seconds": step,
        "floor_seconds": one.seconds,
        "floor_compute_seconds": one.compute_seconds,
        "floor_bytes_seconds": one.bytes_seconds,
        "bound": "compute" if one.compute_seconds >= one.bytes_seconds else "bytes",
        "distance": step / one.seconds,
        "all_cores_floor_seconds": all_cores.seconds,
        "all_cores_distance": step / all_cores.seconds,
        "gflops_per_second": operations / step / 1e9,
        "fraction_of_rate_at_shapes": one.compute_seconds / step,
        "fraction_of_peak": operations / step / one.peak_flops_per_second,
        "peak_gflops_per_second": one.peak_flops_per_second / 1e9,
    }


def floor_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """fedtangent against the machine."""
    columns = ("workload", "bound by", "MFLOP a step", "us a step", "floor us", "distance", "all-core floor us")
    more = ("distance", "GFLOP/s", "of rate at shapes", "of 1024^3 peak")
    table = _table("fedtangent's distance to the floor", (*columns, *more), 2)
    for row in rows:
        table.add_row(
            WORKLOADS[row["workload"]].title,
            row["bound"],
            _number(row["mflop_per_step"]),
            _number(1e6 * row["step_seconds"]),
            _number(1e6 * row["floor_seconds"]),
            f"{row['distance']:.2f}x",
            _number(1e6 * row["all_cores_floor_seconds"]),
            f"{row['all_cores_distance']:.2f}x",
            _number(row["gflops_per_second"]),
            f"{100 * row['fraction_of_rate_at_shapes']:.0f} %",
            f"{100 * row['fraction_of_peak']:.0f} %",
        )
    return table


LEGEND = (
    "Medians over the repeats, tools taking turns; start-up, compilation and warm-up rounds are not timed.\n"
    "fedtangent /: its median over the tool's. Peak MiB: resident memory of all the tool's processes together.\n"
    "Every tool starts from the same parameters on the same data. Less the others': its mean final loss less that of\n"
    "the others, and the most that chance in cohorts and batches explains (1 in 1,000).\n"
    "Floor: matrix products at this machine's rate for their shapes, or bytes at its bandwidth, whichever is longer;\n"
    "for one stream of work, with as many threads as serve it best, and for one stream on every core."
)
