"""Beyond DeepLin's paper: from lazy to rich, by width, initial scale and depth of a deep linear network.

Of weights that start as s N(0, 1) theory follows at any s: such a network, at the rate eta, is s^L times the paper's own
at the rate ``eta s^(2 (L - 1))`` with targets ``Y / s^L``. A small scale is a large W*, and the width that Theorem IV.2
asks for grows as ``s^(-2 L)``. Rates are one fraction of the stability limit of infinite width at that scale, so that
the flow is the same in all cells of a depth but for its start. Measured in each cell: how fast the loss falls late,
beside the flow and beside (18); how far the kernel moves; and whether {N, K} and {2 N, 2 K} have the same curve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedtangent.compare.verdicts import EXACT, Verdict, bounded_verdict, exact_verdict
from fedtangent.experiments.deep_linear import networks
from fedtangent.experiments.lab.results import (
    NOT_SEEN,
    SEEN,
    Claim,
    MeanInterval,
    Outcome,
    disagreeing,
    grouped,
    interval,
    table,
)
from fedtangent.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent.output.files import Metric
from fedtangent.output.line_plots import Shades, heat_maps
from fedtangent.theory.deep_linear import FullBatchWork, deep_linear_limit, full_batch_work, gram, rounds
from fedtangent.theory.deep_linear.theorem import deep_linear_theorem, linear_model

SUBJECT = "DeepLin, lazy to rich"
FLOOR = 1e-18  # of the initial loss: below, rates are those of rounding
SLOPE, MARGIN = -1.0, 0.25  # of the kernel's motion against width
REMARKS = (
    "late: the second half of the rounds before the loss is below 1e-18 of its start; / flow: over that of the flow of "
    "infinite width from the network's own start, in the same rounds; / (18): over -ln rho, rho of its own P(0)",
    "moved: |P(end) - P(0)| / |P(0)|; K/N: mean |ln(loss of {2N, 2K} / loss of {N, K})| over the mean |ln loss|",
    "need: the width of Theorem IV.2, its constant taken as 1; - where a network diverged: a rate that is stable at "
    "the start is none where the kernel grows",
)


@dataclass(frozen=True)
class RegimeSettings:
    """A map of widths at one depth, and one of depths at one width, over the same scales."""

    num_examples: int = within(16, least=2)
    dimension: int = 4
    outputs: int = 2
    kappa: float = within(4.0, at_least=1)
    truth: float = within(1.0, above=0)  # |W*|
    num_clients: int = within(4, least=2)
    local_steps: int = within(2, least=2)
    scales: tuple[float, ...] = within((0.5, 1.0), above=0, count=2, increasing=True)
    depth: int = within(3, least=2)  # of the map of widths
    widths: tuple[int, ...] = within((8, 32, 128), count=3, increasing=True)
    depths: tuple[int, ...] = within((2, 3), least=2, increasing=True)  # at the width in the middle
    step_factor: float = within(0.2, above=0, below=1)  # of the stability limit
    num_rounds: int = within(60, least=20)

    @property
    def middle(self) -> int:
        """The width of the map of depths."""
        return self.widths[len(self.widths) // 2]

    def networks(self) -> list[tuple[int, int]]:
        """Depth and width of all cells."""
        return list(dict.fromkeys([(self.depth, w) for w in self.widths] + [(d, self.middle) for d in self.depths]))


class Cell(NamedTuple):
    """One seed's networks of one depth, width and scale; losses are over that at the start, [T]."""

    seed: int
    depth: int
    width: int
    scale: float
    rounds: np.ndarray  # [T]
    loss: np.ndarray
    flow: np.ndarray
    doubled: np.ndarray  # of {2 N, 2 K}
    flow_doubled: np.ndarray
    rho: float
    wrong: float  # rho with N forgotten, at the rate of the linear model
    need: float  # width
    moved: float  # of the kernel
    apart: float  # |P(0) - P of infinite width| / |P of infinite width|

    @property
    def diverged(self) -> bool:
        """Either network."""
        return not (np.isfinite(self.loss).all() and np.isfinite(self.doubled).all())

    def late(self, loss: np.ndarray) -> float:
        """How fast ``loss`` falls in the late rounds of the network, a round."""
        count = alive(self.loss)
        first, last = count // 2, count - 1
        return float(np.log(loss[first] / loss[last]) / (self.rounds[last] - self.rounds[first]))

    @property
    def to_flow(self) -> float:
        """The late rate over the flow's."""
        return self.late(self.loss) / self.late(self.flow)

    @property
    def to_bound(self) -> float:
        """The late rate over that of (18)."""
        return self.late(self.loss) / -np.log(self.rho)

    def over(self, rho: float) -> float:
        """The loss over ``rho^t``, the largest of all rounds."""
        return float(np.max(self.loss[1:] / rho ** self.rounds[1:]))


def alive(loss: np.ndarray) -> int:
    """How many values, 3 or more, stand before the first that is below the floor."""
    below = ~(loss > FLOOR)
    return max(int(np.argmax(below)) if below.any() else len(loss), 3)


def apart(loss: np.ndarray, other: np.ndarray) -> float:
    """Distance of two curves: of their logarithms, relative to that of the first."""
    count = min(alive(loss), alive(other))
    first, second = np.log(loss[1:count]), np.log(other[1:count])
    return float(np.mean(np.abs(second - first)) / np.mean(np.abs(first)))


def check(study: Study) -> None:
    """Clients of equal size, twice as many too."""
    s = study.settings
    if s.num_examples % (2 * s.num_clients):
        must = 2 * s.num_clients
        raise ValueError(f"num_examples: got {s.num_examples}, must be a multiple of 2 num_clients, {must}")


def work_of(s: RegimeSettings, seed: int, depth: int, scale: float, times: int = 1) -> FullBatchWork:
    """The work at which the paper's network is the one of this scale; ``times`` are of clients and local steps."""
    drawn = networks.problem(seed, s.num_examples, s.dimension, s.outputs, s.kappa, s.truth)
    held = networks.contiguous(s.num_examples, times * s.num_clients)
    rate = s.step_factor * 2 * s.outputs / depth  # inputs have norm 1
    return full_batch_work(drawn.x, drawn.y / scale**depth, held, rate, times * s.local_steps)


def run(study: Study) -> Outcome:
    """All cells of every seed."""
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
    """Both networks of a cell beside their flows."""
    every = max(s.num_rounds // 50, 1)
    at = np.arange(0, s.num_rounds + 1, every)
    kept, curves = list[networks.Weights](), list[np.ndarray]()

    def look(t: int, weights: networks.Weights) -> None:
        kept[1:] = [weights]

    def relative(work: FullBatchWork, path: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            squares = np.sum((work.x @ path - work.y) ** 2, axis=(1, 2))
        return np.asarray(squares / squares[0])

    ends: list[networks.Weights] = []
    for times in (1, 2):
        work = work_of(s, seed, depth, scale, times)
        path = networks.walk(work, (width, depth), int(at[-1]), seed, every, look)
        ends = ends or [kept[0], kept[-1]]
        limit = deep_linear_limit(work, depth).models(int(at[-1]), path[0])
        curves += [relative(work, path), relative(work, limit[at])]
    work = work_of(s, seed, depth, scale)
    told = deep_linear_theorem(ends[0], work).constants
    unit = 2 * (1 - told.rate())
    begin, end = (gram.dense(gram.products(w, gram.in_row_space(work.x))) for w in ends)
    wide = depth / s.outputs * np.kron(*(m @ m.T for m in (gram.in_row_space(work.x), np.eye(s.outputs))))
    moved, away = (np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in ((end, begin), (begin, wide)))
    return Cell(seed, depth, width, scale, at, *curves, told.rate(), max(1 - 2 * s.num_clients * unit, 0.0),
                told.least_width(), float(moved), float(away))  # fmt: skip


def transcribed(s: RegimeSettings, seed: int) -> Verdict:
    """Weights s N(0, 1) by a transcription of eqs. (6) to (8), beside the federated loop that stands for them."""
    scale, depth, width, count = s.scales[0], s.depth, s.widths[0], 5
    paper = work_of(s, seed, depth, scale)
    start: list[networks.Weights] = []

    def look(t: int, weights: networks.Weights) -> None:
        start.append(weights)

    path = scale**depth * networks.walk(paper, (width, depth), count, seed, look=look)

    def end(rate: float, targets: float = 1.0) -> float:
        own = paper._replace(y=paper.y * scale**depth * targets, learning_rate=rate)
        weights = [scale * w for w in start[0]]
        for _ in range(count):
            weights = rounds.averaged(rounds.local_paths(weights, own))
        return float(np.linalg.norm(linear_model(weights) - path[-1]) / np.linalg.norm(path[-1] - path[0]))

    rate = paper.learning_rate / scale ** (2 * (depth - 1))
    controls = {
        "rate / s^(2 L)": end(paper.learning_rate / scale ** (2 * depth)),
        "rate as it is": end(paper.learning_rate),
        "targets / s^L": end(rate, scale**-depth),
    }
    statement = f"weights {scale:g} N(0, 1), {count} rounds: eqs. (6) to (8) and the loop at targets / s^L"
    return exact_verdict(SUBJECT, statement, end(rate), {k: v for k, v in controls.items() if np.isfinite(v)}, EXACT)
