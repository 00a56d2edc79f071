"""Beyond DeepLin's paper: from lazy to rich, by width, initial scale and depth of a deep linear network.

A network whose weights start as s N(0, 1) is, at the rate eta, s^L times the paper's own at the rate
``eta s^(2 (L - 1))`` with targets ``Y / s^L``: a small scale is a large W*, and the width that Theorem IV.2 asks for
grows as ``s^(-2 L)``. Rates are one fraction of the stability limit of infinite width at that scale, so that
the flow is the same in all cells of a depth but for its start. Measured in each cell: how fast the loss falls late,
beside the flow and beside (18); how far the kernel moves; and whether {N, K} and {2 N, 2 K} have the same curve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedtangent._src.comparison.theorems.deep_linear.runs import Size, problem, run_of, work_of
from fedtangent._src.comparison.verdicts import EXACT, Verdict, bounded_verdict, exact_verdict
from fedtangent._src.experiments.deep_linear.followed import check_width, kernel_flow
from fedtangent._src.experiments.lab.results import (
    NOT_SEEN,
    SEEN,
    Claim,
    MeanInterval,
    Outcome,
    disagreeing,
    grouped,
    interval,
    log_slope,
    table,
)
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.output.files import Metric
from fedtangent._src.output.line_plots import Shades, heat_maps
from fedtangent._src.theory.deep_linear import gram, rounds
from fedtangent._src.theory.deep_linear.rounds import FullBatchWork
from fedtangent._src.theory.deep_linear.theorem import deep_linear_limit, deep_linear_theorem, linear_model

SUBJECT = "DeepLin, lazy to rich"
FLOOR = 1e-18  # share of the initial loss below which a loss is rounding
SLOPE, MARGIN = -1.0, 0.25  # of the kernel's motion against width, and its tolerance
NUMBERS = {  # what is measured in a cell
    "to_flow": "late rate / that of infinite width",
    "to_own": "late rate / that of P(0)",
    "to_bound": "late rate / that of (18)",
    "moved": "|P(end) - P(0)| / |P(0)|",
    "ratio": "curves of equal K/N apart",
    "flow_ratio": "the same of the flows of P(0)",
}
REMARKS = (
    "late: the second half of the rounds in which the loss is above 1e-18 of its start; flows start at the network's "
    "own function, and their rates are of the same rounds; that of (18) is -ln rho, rho of the network's own P(0)",
    "K/N: mean |ln(loss of {2N, 2K} / loss of {N, K})| over the mean |ln loss|; flow's: the same of both flows",
    "above: networks whose loss was above (18) at some round; lost: those that diverged, as a rate that is stable at "
    "the start may not be where the kernel grows; other numbers are without these",
    "s N(0, 1) is the paper's start at targets / s^L: its theorem's need for width grows as s^(-2 L)",
)


@dataclass(frozen=True)
class RegimeSettings:
    """A map of widths at one depth, and one of depths at one width, over the same scales."""

    num_clients: int = within(4, least=2)
    held: int = within(4, least=2)  # examples of a client
    dimension: int = 4
    outputs: int = 2
    spread: float = within(0.5, above=0, at_most=1)  # least singular value of X; the largest is 1
    truth: float = within(1.0, above=0)  # |W*|
    local_steps: int = within(2, least=2)
    scales: tuple[float, ...] = within((0.5, 1.0), above=0, count=2, increasing=True)  # the least below 1
    depth: int = within(3, least=2)  # of the map of widths
    widths: tuple[int, ...] = within((8, 32, 128), count=3, increasing=True)
    depths: tuple[int, ...] = within((2, 3), least=2, increasing=True)  # at the width in the middle
    step_factor: float = within(0.2, above=0, below=1)  # of the stability limit
    num_rounds: int = within(60, least=20)

    def size(self, depth: int, width: int, times: int = 1, rounds: int | None = None) -> Size:
        """Returns the size of a run with ``times`` as many clients and local steps.

        Each client then has ``held // times`` examples.
        """
        return Size(times * self.num_clients, self.held // times, self.dimension, self.outputs, width,
                    times * self.local_steps, rounds or self.num_rounds, depth)  # fmt: skip

    @property
    def middle(self) -> int:
        """The width of the map of depths."""
        return self.widths[len(self.widths) // 2]

    def networks(self) -> list[tuple[int, int]]:
        """Returns depth and width of all cells."""
        return list(dict.fromkeys(place for _, _, places in maps(self) for place in places))


class Cell(NamedTuple):
    """Networks of one seed, depth, width and scale; losses [T] are relative to the initial one."""

    seed: int
    depth: int
    width: int
    scale: float
    rounds: np.ndarray  # [T]
    loss: np.ndarray  # of the network
    flow: np.ndarray  # of infinite width
    own: np.ndarray  # of the flow of P(0)
    doubled: np.ndarray  # of the network with {2 N, 2 K}
    own_doubled: np.ndarray  # of its flow of P(0)
    rho: float  # of (18)
    wrong: float  # rho with N forgotten, at the rate of the linear model
    need: float  # the width that the theorem asks for
    moved: float  # |P(end) - P(0)| / |P(0)|
    apart: float  # |P(0) - P of infinite width| / |P of infinite width|

    @property
    def diverged(self) -> bool:
        """Whether either network has diverged."""
        return not (np.isfinite(self.loss).all() and np.isfinite(self.doubled).all())

    def late(self, loss: np.ndarray) -> float:
        """Computes the fall of ln ``loss`` in a round, over the network's late rounds."""
        count = alive(self.loss)
        first, last = count // 2, count - 1
        return float(np.log(loss[first] / loss[last]) / (self.rounds[last] - self.rounds[first]))

    def numbers(self) -> dict[str, float]:
        """Computes the values of NUMBERS; NaN if the cell diverged."""
        if self.diverged:
            return dict.fromkeys(NUMBERS, np.nan)
        rate = self.late(self.loss)
        found = rate / self.late(self.flow), rate / self.late(self.own), rate / -np.log(self.rho), self.moved
        ratios = apart(self.loss, self.doubled), apart(self.own, self.own_doubled)
        return dict(zip(NUMBERS, map(float, (*found, *ratios)), strict=True))

    def over(self, rho: float) -> float:
        """Computes the largest loss over ``rho^t`` of any round."""
        return float(np.max(self.loss[1:] / rho ** self.rounds[1:]))


def alive(loss: np.ndarray) -> int:
    """Counts the values before the first below FLOOR, at least 3."""
    below = ~(loss > FLOOR)
    return max(int(np.argmax(below)) if below.any() else len(loss), 3)


def apart(loss: np.ndarray, other: np.ndarray) -> float:
    """Computes the mean distance of the logarithms of two curves, relative to the mean logarithm of the first."""
    count = min(alive(loss), alive(other))
    first, second = np.log(loss[1:count]), np.log(other[1:count])
    return float(np.mean(np.abs(second - first)) / np.mean(np.abs(first)))


def check(study: Study) -> None:
    """Raises ``ValueError`` for singular kernels, clients of odd size, too few examples, or no scale below 1."""
    s = study.settings
    check_width("widths", s.widths[0], s.outputs, s.dimension)
    if s.held % 2:
        raise ValueError(f"held: got {s.held}, must be even, as 2 N clients have half of it")
    if s.dimension > (examples := s.num_clients * s.held):
        raise ValueError(f"dimension: got {s.dimension}, must be at most the {examples} examples")
    if not s.scales[0] < 1:
        raise ValueError(f"scales: got {s.scales[0]:g} as the least, must be below 1")


def scaled(s: RegimeSettings, seed: int, size: Size, scale: float) -> FullBatchWork:
    """Builds the work for which the paper's network is equivalent to a network of this initial scale."""
    x, y = problem(size, seed, s.spread, s.truth)
    return work_of(size, x, y / scale**size.depth, s.step_factor * 2 * s.outputs / size.depth)  # |X| is 1


def run(study: Study) -> Outcome:
    """Computes all cells of every seed."""
    s, found = study.settings, list[Cell]()
    for seed in study.each_seed():
        own = [cell(s, seed, depth, width, scale) for depth, width in s.networks() for scale in s.scales]
        found += own
        study.keep([
            Metric(int(t), f"deep_linear L={c.depth} m={c.width} s={c.scale:g}", seed, "train", "relative_loss",
                   float(value), 0, 0)
            for c in own for t, value in zip(c.rounds, c.loss, strict=True) if np.isfinite(value)
        ])  # fmt: skip
    return conclude(study, found, transcribed(s, study.seeds[0]))


def cell(s: RegimeSettings, seed: int, depth: int, width: int, scale: float) -> Cell:
    """Trains both networks of a cell, and computes their flows."""
    ends, curves = list[list[np.ndarray]](), list[np.ndarray]()
    for times in (2, 1):
        size = s.size(depth, width, times)
        work = scaled(s, seed, size, scale)
        with np.errstate(over="ignore", invalid="ignore"):  # it may diverge
            seen = run_of(size, work.x, work.y, work.learning_rate, seed, s.num_rounds)
            residuals = work.x @ seen.models - work.y
        ends = list(seen.weights.values())
        kernel = gram.dense(gram.products(ends[0], work.x))
        own = kernel_flow(work, work.x @ seen.models[0], s.num_rounds)(kernel, work.local_steps, work.learning_rate)
        curves = [relative(residuals), relative(own - work.y), *curves]
    limit = deep_linear_limit(work, depth).models(s.num_rounds, linear_model(ends[0]))
    told, reduced = deep_linear_theorem(ends[0], work).constants, gram.in_row_space(work.x)
    unit = 2 * (1 - told.rate())
    lost = not all(np.isfinite(w).all() for w in ends[-1])
    begin, end = (gram.dense(gram.products(w, reduced)) for w in (ends[0], ends[0 if lost else -1]))
    wide = depth / s.outputs * np.kron(reduced @ reduced.T, np.eye(s.outputs))
    moved, away = (np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in ((end, begin), (begin, wide)))
    loss, of_kernel, doubled, of_doubled = curves
    return Cell(
        seed, depth, width, scale, np.arange(s.num_rounds + 1), loss, relative(work.x @ limit - work.y), of_kernel,
        doubled, of_doubled, told.rate(), max(1 - 2 * s.num_clients * unit, 0.0), told.least_width(),
        np.nan if lost else float(moved), float(away),
    )  # fmt: skip


def relative(residuals: np.ndarray) -> np.ndarray:
    """Computes squared norms of residuals [T, n, C], relative to the first: [T]."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.sum(residuals**2, axis=(1, 2))
    return np.asarray(squares / squares[0])


def transcribed(s: RegimeSettings, seed: int) -> Verdict:
    """Checks that a direct computation of eqs. (6) to (8) from weights s N(0, 1) equals the engine's equivalent run."""
    scale, depth, count = s.scales[0], s.depth, 2
    size = s.size(depth, s.middle, rounds=count)
    paper = scaled(s, seed, size, scale)
    seen = run_of(size, paper.x, paper.y, paper.learning_rate, seed, count)
    path = scale**depth * seen.models

    def end(rate: float, targets: float = 1.0) -> float:
        own = paper._replace(y=paper.y * scale**depth * targets, learning_rate=rate)
        weights = [scale * w for w in seen.weights[0]]
        for _ in range(count):
            weights = rounds.averaged(rounds.local_paths(weights, own))
        return float(np.linalg.norm(linear_model(weights) - path[-1]) / np.linalg.norm(path[-1] - path[0]))

    rate = paper.learning_rate / scale ** (2 * (depth - 1))
    controls = {
        "rate / s^(L - 1)": end(paper.learning_rate / scale ** (depth - 1)),
        "rate as it is": end(paper.learning_rate),
        "targets s^L": end(rate, scale**depth),
    }
    statement = f"weights {scale:g} N(0, 1), {count} rounds: eqs. (6) to (8) and the loop at targets / s^L"
    return exact_verdict(SUBJECT, statement, end(rate), controls, EXACT)


# ---- what comes out -----------------------------------------------------------------------------------------------


def conclude(study: Study, found: list[Cell], exact: Verdict) -> Outcome:
    """Builds tables, figure, claims and verdicts of both maps."""
    s, rows, shown = study.settings, list[dict[str, Any]](), list[dict[str, Any]]()
    for (depth, width, scale), own in grouped(found, "depth", "width", "scale").items():
        numbers = {name: [c.numbers()[name] for c in own] for name in NUMBERS}
        counts = {"lost": sum(c.diverged for c in own), "above": sum(bool(c.over(c.rho) > 1) for c in own)}
        place = {"depth": depth, "width": width, "scale": scale, "seeds": len(own)}
        rows.append({**place, **numbers, **counts, "need": [c.need for c in own], "apart": [c.apart for c in own]})
        shown.append({**place, **{name: _mean(values) for name, values in numbers.items()}, **counts})
    sheets = [
        table(f"{title}: {s.num_rounds} rounds, N = {s.num_clients}, K = {s.local_steps}",
              [row for place in places for row in shown if (row["depth"], row["width"]) == place], {
            short: f"{{{down}}}", "s": "{scale:g}", "/ flow": "{to_flow:.2f}", "/ P(0)": "{to_own:.2f}",
            "/ (18)": "{to_bound:.2f}", "moved": "{moved:.3f}", "K/N": "{ratio:.3f}", "flow's": "{flow_ratio:.3f}",
            "above": "{above}", "lost": "{lost}",
        })
        for short, (down, title, places) in zip("mL", maps(s), strict=True)
    ]  # fmt: skip
    _draw(study, shown)
    verdicts = (exact, *_verdicts(s, found))
    wrong = disagreeing([v for v in verdicts if v.holds is not None])
    return Outcome(tuple(sheets), rows, _claims(s, found), remarks=REMARKS, failed=wrong, verdicts=verdicts)


def maps(s: RegimeSettings) -> list[tuple[str, str, list[tuple[int, int]]]]:
    """Returns the maps of widths and of depths: varying quantity, fixed quantity, and (depth, width) of each line."""
    by_width = "width", f"depth {s.depth}", [(s.depth, w) for w in s.widths]
    return [by_width, ("depth", f"width {s.middle}", [(d, s.middle) for d in s.depths])]


def _mean(values: list[float]) -> float | None:
    """Computes the mean of the finite values; None if no value is finite."""
    finite = [v for v in values if np.isfinite(v)]
    return float(np.mean(finite)) if finite else None


def at_corner(s: RegimeSettings, found: list[Cell], lazy: bool) -> list[Cell]:
    """Selects every seed's cell at one corner of the map of widths.

    With ``lazy`` it is the cell with the largest width and the largest scale, otherwise the one with the smallest width
    and the smallest scale.
    """
    place = -1 if lazy else 0
    return [c for c in found if (c.depth, c.width, c.scale) == (s.depth, s.widths[place], s.scales[place])]


def slope(s: RegimeSettings, found: list[Cell], name: str) -> MeanInterval:
    """Computes the slope of ln ``moved`` or ln ``apart`` against ln width at the largest scale, over seeds."""
    own = {(c.seed, c.width): getattr(c, name) for c in found if (c.depth, c.scale) == (s.depth, s.scales[-1])}
    seeds = sorted({c.seed for c in found})
    return interval([log_slope(s.widths, [own[seed, width] for width in s.widths]) for seed in seeds])


def _claims(s: RegimeSettings, found: list[Cell]) -> tuple[Claim, ...]:
    lazy, rich = ([c for c in at_corner(s, found, which) if not c.diverged] for which in (True, False))
    where = f"m = {s.widths[-1]}, s = {s.scales[-1]:g}"
    there = f"m = {s.widths[0]}, s = {s.scales[0]:g}"

    def of(cells: list[Cell], name: str) -> MeanInterval:
        return interval([c.numbers()[name] for c in cells])

    off_flow, off_own = (interval([abs(c.numbers()[name] - 1) for c in lazy]) for name in ("to_flow", "to_own"))
    times, ratio = of(lazy, "to_bound"), interval([c.numbers()["ratio"] - c.numbers()["flow_ratio"] for c in lazy])
    above = sorted({(c.depth, c.width, c.scale) for c in found if not c.over(c.rho) <= 1})
    claims = [
        Claim(f"{where}: the decay is that of P(0) to 5 %", f"off by {off_own:.3f}", off_own.below(0.05)),
        Claim(f"{where}: that of infinite width to 20 %", f"off by {off_flow:.3f}", off_flow.below(0.2)),
        Claim(f"{where}: (18) has a third of it or less", f"{times:.2f} times", times.above(3)),
        Claim(f"{where}: curves of equal K/N are as near as the flow's", f"{ratio:+.4f}", ratio.below(0.01)),
        Claim("the loss is nowhere above (18)", f"above in {len(above)} of {len(found)} networks"
              if not above else "above at " + ", ".join(f"L {d} m {w} s {v:g}" for d, w, v in above),
              NOT_SEEN if above else SEEN),
    ]  # fmt: skip
    if len(rich) > 1:
        moved, far = of(rich, "moved"), interval([c.numbers()["ratio"] for c in rich])
        beside = interval([abs(np.log(c.numbers()["to_own"])) for c in rich])
        claims += [
            Claim(f"{there}: the kernel moves by more than half", f"{moved:.2f}", moved.above(0.5)),
            Claim(f"{there}: P(0) does not tell the decay to 20 %", f"|ln ratio| {beside:.2f}", beside.above(0.2)),
            Claim(f"{there}: equal K/N still means equal curves to 10 %", f"{far:.3f}", far.below(0.1)),
        ]
    return tuple(claims)


def _verdicts(s: RegimeSettings, found: list[Cell]) -> tuple[Verdict, ...]:
    lazy = at_corner(s, found, lazy=True)
    sizes = f"m {s.widths[-1]}, s {s.scales[-1]:g}, {len(lazy)} networks"
    bound = bounded_verdict(
        SUBJECT, "loss / bound (18) at the lazy corner", sizes, max(c.over(c.rho) for c in lazy),
        "1 - 2 eta K lambda_min: N forgotten", max(c.over(c.wrong) for c in lazy),
    )  # fmt: skip
    moved, away = slope(s, found, "moved"), slope(s, found, "apart")
    motion = Verdict.of(
        SUBJECT, f"the kernel's motion at s = {s.scales[-1]:g}: slope against width", f"L {s.depth}, {len(lazy)} seeds",
        (f"{moved:.2f}", f"{SLOPE:g} +- {MARGIN:g}", moved.within(SLOPE, MARGIN)),
        ("P(0) from infinite width", f"{away:.2f}", abs(away.mean - SLOPE) > MARGIN),
    )  # fmt: skip
    return bound, motion


def _draw(study: Study, shown: list[dict[str, Any]]) -> None:
    """Draws four of NUMBERS on both maps."""
    s, grid = study.settings, []
    kept = {(r["depth"], r["width"], r["scale"]): r for r in shown}
    for down, title, places in maps(s):
        ticks = [str(place[down == "width"]) for place in places]
        axes = {down: ticks, "initial scale": [f"{v:g}" for v in s.scales]}
        line = []
        for name in ("to_own", "to_bound", "moved", "ratio"):
            values = [[kept[*place, scale][name] for scale in s.scales] for place in places]
            line.append(Shades(np.array(values, float), axes, "", f"{title}:\n{NUMBERS[name]}", ".2g", log=True))
        grid.append(line)
    heat_maps(grid, study.figures.path("regime_map"), "deep linear networks from rich to lazy, mean over seeds")


DEFAULT = RegimeSettings(
    scales=(0.4, 0.5, 0.6, 0.7, 0.85, 1.0), widths=(16, 64, 256), depths=(2, 3, 4, 6), num_rounds=100
)
PAPER = RegimeSettings(
    scales=(0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2), widths=(16, 64, 256, 1024), depths=(2, 3, 4, 5, 6),
    num_rounds=200,
)  # fmt: skip
SCALES = {"gaussian": by_scale(RegimeSettings(), DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("liu_deep_linear",), check=check, least_seeds=2, exact=True),)
