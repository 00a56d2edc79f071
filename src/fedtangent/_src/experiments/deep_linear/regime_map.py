"""Beyond DeepLin's paper: from lazy to rich, by width, initial scale and depth of a deep linear network.

A network of L layers whose weights start as s N(0, 1), at the learning rate eta, is s^L times the paper's own network
at the rate ``eta s^(2 (L - 1))`` with targets ``Y / s^L``. So a small scale s is a large true model W*, and the width
that Theorem IV.2 of DeepLin asks for grows as ``s^(-2 L)``. Each rate is the same fraction of the largest stable rate
at infinite width for its scale, so that at one depth the flow (theory at infinite width) differs only in its start.

For each depth, width and scale the experiment measures how fast the loss falls late, compared with the flow and with
bound (18) of DeepLin; how far the kernel changes; and whether N clients with K steps and 2 N clients with 2 K steps
have the same curve.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np

import fedtangent as ft
from fedtangent._src.comparison.theorems.deep_linear import Size, problem, run_of, work_of
from fedtangent._src.comparison.verdicts import EXACT, Verdict, bounded_verdict, exact_verdict
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.deep_linear.followed import check_width, kernel_flow
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.output.line_plots import Shades, heat_maps
from fedtangent._src.theory.deep_linear import gram, rounds
from fedtangent._src.theory.deep_linear.theorem import linear_model

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
    """Settings of two maps from lazy to rich: by width and scale at one depth, by depth and scale at one width.

    A scale is the standard deviation of the initial weights.
    """

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
        """Returns the sizes of a run with ``times`` as many clients and local steps as in the settings.

        Each client then has ``held // times`` examples.

        Args:
            depth: Number L of layers.
            width: Width m.
            times: Factor of the clients and of their local steps.
            rounds: Number of rounds; None for ``num_rounds``.
        """
        shape = times * self.num_clients, self.held // times, self.dimension, self.outputs, width
        return Size(*shape, times * self.local_steps, rounds or self.num_rounds, depth)

    @property
    def middle(self) -> int:
        """The width at which the map of depths is computed: the middle one of ``widths``."""
        return self.widths[len(self.widths) // 2]

    def networks(self) -> list[tuple[int, int]]:
        """Returns depth and width of all networks in the two maps, without repetitions."""
        return list(dict.fromkeys(place for _, _, places in _maps(self) for place in places))


class Cell(NamedTuple):
    """Losses of two networks of one seed, depth, width and initial scale, on N and on 2 N clients, and of their flows.

    A flow is theory's prediction for a kernel. P(0) is the tangent kernel of the initial network. Losses [T] after each
    round are relative to the initial loss.

    Attributes:
        scale: Standard deviation s of the initial weights.
        rounds: Numbers of rounds 0, .., R, [T].
        loss: Loss of the network with N clients and K steps.
        flow: Loss that theory at infinite width predicts for it.
        own: Loss that the flow for the kernel P(0) predicts for it.
        doubled: Loss of the network with 2 N clients and 2 K steps.
        own_doubled: Loss that the flow for P(0) predicts with 2 N clients and 2 K steps.
        rho: Factor by which a round changes the loss at most, by bound (18) of DeepLin.
        wrong: Control: ``1 - 2 eta K lambda_min``, the factor of the linear model without the division by N.
        need: Width that DeepLin's theorem asks for.
        moved: Relative change of the kernel from the first to the last round; NaN if the network diverged.
        apart: Relative distance of P(0) from the kernel of infinite width.
    """

    seed: int
    depth: int
    width: int
    scale: float
    rounds: np.ndarray
    loss: np.ndarray
    flow: np.ndarray
    own: np.ndarray
    doubled: np.ndarray
    own_doubled: np.ndarray
    rho: float
    wrong: float  # rho with N forgotten, at the rate of the linear model
    need: float
    moved: float
    apart: float

    @property
    def diverged(self) -> bool:
        """Whether the loss of either network is not finite."""
        return not (np.isfinite(self.loss).all() and np.isfinite(self.doubled).all())

    def late(self, loss: np.ndarray) -> float:
        """Computes the decrease per round of ln ``loss``, a curve [T] of this record, late in training.

        Late is the second half of the rounds in which the network's relative loss is above 1e-18. Below, only rounding
        is left.
        """
        count = alive(self.loss)
        first, last = count // 2, count - 1
        return float(np.log(loss[first] / loss[last]) / (self.rounds[last] - self.rounds[first]))

    def numbers(self) -> dict[str, float]:
        """Computes the quantities that the maps show, by the keys of NUMBERS; all NaN if a network diverged.

        Three are the late decay of the network's loss divided by the decay at infinite width, of the flow for P(0), and
        of bound (18). The others are the kernel's change, and the distances between the loss curves of (N, K) and
        (2 N, 2 K): of the networks and of the flows for P(0).
        """
        if self.diverged:
            return dict.fromkeys(NUMBERS, np.nan)
        rate = self.late(self.loss)
        decays = rate / self.late(self.flow), rate / self.late(self.own), rate / -np.log(self.rho), self.moved
        ratios = _apart(self.loss, self.doubled), _apart(self.own, self.own_doubled)
        return dict(zip(NUMBERS, map(float, (*decays, *ratios)), strict=True))

    def over(self, rho: float) -> float:
        """Computes the largest ratio of the network's relative loss to ``rho^t`` over the rounds t from 1 on."""
        return float(np.max(self.loss[1:] / rho ** self.rounds[1:]))


def alive(loss: np.ndarray) -> int:
    """Counts the rounds before a relative ``loss`` first falls below 1e-18, where only rounding is left; at least 3."""
    below = ~(loss > FLOOR)
    return max(int(np.argmax(below)) if below.any() else len(loss), 3)


def _apart(loss: np.ndarray, other: np.ndarray) -> float:
    """Computes how far two loss curves are apart: ``mean |ln other - ln loss| / mean |ln loss|``.

    Rounds count until one of the curves falls below 1e-18, where only rounding is left.
    """
    count = min(alive(loss), alive(other))
    first, second = np.log(loss[1:count]), np.log(other[1:count])
    return float(np.mean(np.abs(second - first)) / np.mean(np.abs(first)))


def check(study: Study) -> None:
    """Raises ``ValueError`` for settings that do not fit together.

    The width must be large enough for an invertible kernel, ``held`` even, the dimension at most the number of
    examples, and one scale below 1.
    """
    settings = study.settings
    check_width("widths", settings.widths[0], settings.outputs, settings.dimension)
    if settings.held % 2:
        raise ValueError(
            f"held: got {settings.held}, must be even: some runs have twice the clients, with half of it each"
        )
    if settings.dimension > (examples := settings.num_clients * settings.held):
        raise ValueError(f"dimension: got {settings.dimension}, must be at most {examples}, num_clients * held")
    if not settings.scales[0] < 1:
        raise ValueError(f"scales: got {settings.scales[0]:g} as the smallest, must have one below 1")


def _scaled(settings: RegimeSettings, seed: int, size: Size, scale: float) -> ft.theory.FullBatchWork:
    """Builds the training of DeepLin's own network that is equivalent to training from weights ``scale`` N(0, 1).

    DeepLin's network starts with weights N(0, 1). For L layers its outputs and targets are multiplied by ``scale^-L``.
    """
    x, y = problem(size, seed, settings.spread, settings.truth)
    return work_of(size, x, y / scale**size.depth, settings.step_factor * 2 * settings.outputs / size.depth)  # |X| is 1


def run(study: Study) -> lab.Outcome:
    """Trains networks of every seed, depth, width and initial scale; compares their losses and kernels with theory."""
    settings, cells = study.settings, list[Cell]()
    for seed in study.each_seed():
        for (depth, width), scale in itertools.product(settings.networks(), settings.scales):
            c = _cell(settings, seed, depth, width, scale)
            cells.append(c)
            name = f"deep_linear L={depth} m={width} s={scale:g}"
            metrics = lab.metric_rows(name, seed, c.rounds, {"relative_loss": c.loss})
            study.keep([metric for metric in metrics if np.isfinite(metric.value)])
    return _conclude(study, cells, _transcribed(settings, study.seeds[0]))


def _cell(settings: RegimeSettings, seed: int, depth: int, width: int, scale: float) -> Cell:
    """Trains two networks of one depth, width and initial scale, on N and 2 N clients, and computes their flows."""
    ends, curves = list[list[np.ndarray]](), list[np.ndarray]()
    for times in (2, 1):
        size = settings.size(depth, width, times)
        work = _scaled(settings, seed, size, scale)
        with np.errstate(over="ignore", invalid="ignore"):  # it may diverge
            run = run_of(size, work.x, work.y, work.learning_rate, seed, settings.num_rounds)
            residuals = work.x @ run.models - work.y
        ends = list(run.weights.values())
        kernel = gram.dense(gram.products(ends[0], work.x))
        flow = kernel_flow(work, work.x @ run.models[0], settings.num_rounds)(
            kernel, work.local_steps, work.learning_rate
        )
        curves = [_relative(residuals), _relative(flow - work.y), *curves]
    limit = ft.theory.deep_linear_limit(work, depth).models(settings.num_rounds, linear_model(ends[0]))
    constants, reduced = ft.theory.deep_linear_theorem(ends[0], work).constants, gram.in_row_space(work.x)
    unit = 2 * (1 - constants.rate())
    is_lost = not all(np.isfinite(w).all() for w in ends[-1])
    begin, end = (gram.dense(gram.products(w, reduced)) for w in (ends[0], ends[0 if is_lost else -1]))
    wide = depth / settings.outputs * np.kron(reduced @ reduced.T, np.eye(settings.outputs))
    moved, away = (np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in ((end, begin), (begin, wide)))
    loss, of_kernel, doubled, of_doubled = curves
    losses = loss, _relative(work.x @ limit - work.y), of_kernel, doubled, of_doubled
    rates = constants.rate(), max(1 - 2 * settings.num_clients * unit, 0.0), constants.least_width()
    motion, rounds = np.nan if is_lost else float(moved), np.arange(settings.num_rounds + 1)
    return Cell(seed, depth, width, scale, rounds, *losses, *rates, motion, float(away))


def _relative(residuals: np.ndarray) -> np.ndarray:
    """Computes squared norms of residuals [T, n, C] divided by the first squared norm; returns [T]."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.sum(residuals**2, axis=(1, 2))
    return np.asarray(squares / squares[0])


def _transcribed(settings: RegimeSettings, seed: int) -> Verdict:
    """Judges whether weights that start as s N(0, 1) train as the equivalent run of DeepLin's own network.

    It compares one network of middle width and the first scale after two rounds. The equivalent run starts as N(0, 1),
    with other targets and another rate. Eqs. (6) to (8) of DeepLin, which are its training steps, are computed directly
    for the first network, and must give the same model as the engine's run.
    """
    scale, depth, count = settings.scales[0], settings.depth, 2
    size = settings.size(depth, settings.middle, rounds=count)
    paper = _scaled(settings, seed, size, scale)
    run = run_of(size, paper.x, paper.y, paper.learning_rate, seed, count)
    path = scale**depth * run.models

    def end(rate: float, targets: float = 1.0) -> float:
        work = paper._replace(y=paper.y * scale**depth * targets, learning_rate=rate)
        weights = [scale * w for w in run.weights[0]]
        for _ in range(count):
            weights = rounds.averaged(rounds.local_paths(weights, work))
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


def _conclude(study: Study, cells: list[Cell], exact: Verdict) -> lab.Outcome:
    """Builds tables, figure, claims and verdicts of the maps of widths and of depths.

    ``exact`` is the verdict of ``_transcribed``. Undecided verdicts do not fail the experiment.
    """
    settings, rows, entries = study.settings, list[lab.Row](), list[lab.Row]()
    for (depth, width, scale), group in lab.grouped(cells, "depth", "width", "scale").items():
        numbers = {name: [c.numbers()[name] for c in group] for name in NUMBERS}
        counts = {"lost": sum(c.diverged for c in group), "above": sum(bool(c.over(c.rho) > 1) for c in group)}
        place = {"depth": depth, "width": width, "scale": scale, "seeds": len(group)}
        rows.append({**place, **numbers, **counts, "need": [c.need for c in group], "apart": [c.apart for c in group]})
        entries.append({**place, **{name: _mean(values) for name, values in numbers.items()}, **counts})
    sheets = []
    for letter, (varied, fixed, places) in zip("mL", _maps(settings), strict=True):
        columns = f"{letter}: {{{varied}}} | s: {{scale:g}} | / flow: {{to_flow:.2f}} | / P(0): {{to_own:.2f}} | "
        columns += "/ (18): {to_bound:.2f} | moved: {moved:.3f} | K/N: {ratio:.3f} | flow's: {flow_ratio:.3f} | "
        columns += "above: {above} | lost: {lost}"
        lines = [row for place in places for row in entries if (row["depth"], row["width"]) == place]
        title = f"{fixed}: {settings.num_rounds} rounds, N = {settings.num_clients}, K = {settings.local_steps}"
        sheets.append(lab.table(title, lines, columns))
    _draw(study, entries)
    verdicts = (exact, *_verdicts(settings, cells))
    failed = lab.disagreeing([v for v in verdicts if v.holds is not None])
    return lab.Outcome(tuple(sheets), rows, _claims(settings, cells), remarks=REMARKS, failed=failed, verdicts=verdicts)


def _maps(settings: RegimeSettings) -> list[tuple[str, str, list[tuple[int, int]]]]:
    """Returns the maps of widths and of depths: the varied size, the fixed size, and the networks as (depth, width)."""
    by_width = "width", f"depth {settings.depth}", [(settings.depth, w) for w in settings.widths]
    return [by_width, ("depth", f"width {settings.middle}", [(d, settings.middle) for d in settings.depths])]


def _mean(values: list[float]) -> float | None:
    """Computes the mean of the finite values; None if no value is finite."""
    finite = [v for v in values if np.isfinite(v)]
    return float(np.mean(finite)) if finite else None


def _at_corner(settings: RegimeSettings, cells: list[Cell], lazy: bool) -> list[Cell]:
    """Selects the lazy or the rich end of the map of widths, for every seed.

    The lazy end (``lazy``) is the widest network of largest scale, the rich end the narrowest of smallest scale.
    """
    place = -1 if lazy else 0
    return [
        c
        for c in cells
        if (c.depth, c.width, c.scale) == (settings.depth, settings.widths[place], settings.scales[place])
    ]


def _claims(settings: RegimeSettings, cells: list[Cell]) -> tuple[lab.Claim, ...]:
    lazy, rich = ([c for c in _at_corner(settings, cells, which) if not c.diverged] for which in (True, False))
    large = f"m = {settings.widths[-1]}, s = {settings.scales[-1]:g}"
    small = f"m = {settings.widths[0]}, s = {settings.scales[0]:g}"
    off_flow, off_own = (lab.interval(abs(c.numbers()[name] - 1) for c in lazy) for name in ("to_flow", "to_own"))
    times = lab.interval(c.numbers()["to_bound"] for c in lazy)
    ratio = lab.interval(c.numbers()["ratio"] - c.numbers()["flow_ratio"] for c in lazy)
    above = sorted({(c.depth, c.width, c.scale) for c in cells if not c.over(c.rho) <= 1})
    places = (
        "at " + ", ".join(f"L {d} m {w} s {v:g}" for d, w, v in above) if above else f"in 0 of {len(cells)} networks"
    )
    claims = [
        off_own.claim_below(f"{large}: the decay is that of P(0) to 5 %", "off by {:.3f}", 0.05),
        off_flow.claim_below(f"{large}: that of infinite width to 20 %", "off by {:.3f}", 0.2),
        times.claim_above(f"{large}: (18) has a third of it or less", "{:.2f} times", 3),
        ratio.claim_below(f"{large}: curves of equal K/N are as near as the flow's", level=0.01),
        lab.Claim("the loss is nowhere above (18)", f"above {places}", lab.NOT_SEEN if above else lab.SEEN),
    ]
    if len(rich) > 1:
        moved, far = (lab.interval(c.numbers()[name] for c in rich) for name in ("moved", "ratio"))
        beside = lab.interval(abs(np.log(c.numbers()["to_own"])) for c in rich)
        claims += [
            moved.claim_above(f"{small}: the kernel moves by more than half", "{:.2f}", 0.5),
            beside.claim_above(f"{small}: P(0) does not tell the decay to 20 %", "|ln ratio| {:.2f}", 0.2),
            far.claim_below(f"{small}: equal K/N still means equal curves to 10 %", "{:.3f}", 0.1),
        ]
    return tuple(claims)


def _verdicts(settings: RegimeSettings, cells: list[Cell]) -> tuple[Verdict, ...]:
    lazy = _at_corner(settings, cells, lazy=True)
    sizes = f"m {settings.widths[-1]}, s {settings.scales[-1]:g}, {len(lazy)} networks"
    largest, control = max(c.over(c.rho) for c in lazy), max(c.over(c.wrong) for c in lazy)
    forgotten, statement = "1 - 2 eta K lambda_min: N forgotten", "loss / bound (18) at the lazy corner"
    bound = bounded_verdict(SUBJECT, statement, sizes, largest, forgotten, control)
    large = [c for c in cells if (c.depth, c.scale) == (settings.depth, settings.scales[-1])]
    moved, away = (lab.log_slopes(large, "width", attrgetter(name), "seed") for name in ("moved", "apart"))
    right = f"{moved:.2f}", f"{SLOPE:g} +- {MARGIN:g}", moved.within(SLOPE, MARGIN)
    wrong = "P(0) from infinite width", f"{away:.2f}", abs(away.mean - SLOPE) > MARGIN
    statement = f"the kernel's motion at s = {settings.scales[-1]:g}: slope against width"
    return bound, Verdict.of(SUBJECT, statement, f"L {settings.depth}, {len(lazy)} seeds", right, wrong)


def _draw(study: Study, entries: list[lab.Row]) -> None:
    """Plots heat maps of late decay, change of the kernel and distance of curves, by width or depth and by scale."""
    settings, grid = study.settings, []
    by_place = {(r["depth"], r["width"], r["scale"]): r for r in entries}
    for varied, title, places in _maps(settings):
        axes = {varied: [str(place[varied == "width"]) for place in places]}
        axes["initial scale"] = [f"{v:g}" for v in settings.scales]
        line = []
        for name in ("to_own", "to_bound", "moved", "ratio"):
            values = [[by_place[*place, scale][name] for scale in settings.scales] for place in places]
            line.append(Shades(np.array(values, float), axes, "", f"{title}:\n{NUMBERS[name]}", ".2g", log=True))
        grid.append(line)
    heat_maps(grid, study.figures.path("regime_map"), "deep linear networks from rich to lazy, mean over seeds")


DEFAULT = with_changes(RegimeSettings(), "scales=0.4,0.5,0.6,0.7,0.85,1 widths=16,64,256 depths=2,3,4,6 num_rounds=100")
PAPER = with_changes(
    DEFAULT, "scales=0.3,0.4,0.5,0.6,0.7,0.85,1,1.2 widths=16,64,256,1024 depths=2,3,4,5,6 num_rounds=200"
)
SCALES = {"gaussian": by_scale(RegimeSettings(), DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("liu_deep_linear",), check=check, least_seeds=2, exact=True),)
