"""Beyond Local-GD's paper: how fast its models turn to the projections as lambda goes to 0 (Lemma 2).

Lemma 2 bounds the residual ``|w^k - l v^k|``, of Local-GD's global model w and the projections' v, by ``O(k ln l)``
with ``l = ln(1 / lambda)``, so that the angle falls at least as ``ln l / l``. Here every local problem (eq. 12) is
solved exactly, far below the smallest lambda of float64, and both rates are fitted: of the angle, and of the residual's
part along v. A local minimum's dual ``b = exp(-A w) / lambda`` is of order l, so that its support vectors have the
margin ``l - ln l + O(1)``: the residual would be ``-ln l v^k + O(1)``, of Lemma 2's order, but hardly turn the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.experiments.lab.results import (
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
from fedtangent._src.experiments.local_gd import problems
from fedtangent._src.output.files import Metric
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent._src.theory.local_gd.max_margin import (
    direction_distance,
    exponential_models,
    feasible_sets,
    hard_margin,
    parallel_projections,
)

SUBJECT = "Local-GD, Lemma 2"
MARGIN = 0.05  # of a fitted exponent: a factor ln l more would be 0.08 over these l
LARGE = 1e4  # rates are fitted over values of l from here on
REMARKS = (
    "l = ln(1 / lambda); rates are least-squares slopes of logarithms, l from 1e4 on; mean and 95 % interval",
    "along: coefficient of ln l in the residual w - l v, its part along v over |v|, by a least-squares line in ln l",
    "support: share of examples with margin 1 at the SVM; angle: the chord |w / |w| - v / |v||, as in the paper",
)


@dataclass(frozen=True)
class LambdaSettings:
    """The data of the paper's section 5, in more dimensions than examples, and the values l of ``log_inverses``."""

    num_nodes: int = within(4, least=2)
    held: int = 10  # examples of a node
    dimensions: tuple[int, ...] = (60, 200)
    spread: float = within(0.3, at_least=0)  # of the nodes' own truths
    rounds: tuple[int, ...] = within((1, 5, 20), increasing=True)
    log_inverses: tuple[float, ...] = within(
        (9.21, 100.0, 1e3, 1e4, 1e5, 1e6, 1e7), above=1, count=3, increasing=True
    )  # 9.21: the paper's lambda = 1e-4


class Turned(NamedTuple):
    """Results of one seed and dimension after a number of rounds; arrays are over the values of l, [V]."""

    seed: int
    dimension: int
    round: int
    support: float  # share of examples with margin 1 at the SVM
    angle: np.ndarray  # to the projections v
    later: np.ndarray  # to the projections after one round more
    to_svm: np.ndarray  # angle to the SVM
    residual: np.ndarray  # |w - l v| / |v|
    along: np.ndarray  # (w - l v)'v / |v|^2


def check(study: Study) -> None:
    """Raises ``ValueError`` for fewer than three large values of l, or data of a seed that are not separable."""
    s = study.settings
    if sum(value >= LARGE for value in s.log_inverses) < 3:
        raise ValueError(f"log_inverses: got {s.log_inverses}, must be three or more of at least {LARGE:g}")
    for seed in study.seeds:
        for dimension in s.dimensions:
            drawn = problems.classification(seed, s.num_nodes, s.held, dimension, s.spread)
            feasible_sets(drawn.x, drawn.y, drawn.partition)


def run(study: Study) -> Outcome:
    """Solves every seed and dimension for all values of l."""
    found = list[Turned]()
    for seed in study.each_seed():
        for dimension in study.settings.dimensions:
            found += turned(study.settings, seed, dimension)
        study.keep([
            Metric(t.round, f"local_gd d={t.dimension} l={level:g}", seed, "train", "angle", float(value), 0, 0)
            for t in found if t.seed == seed
            for level, value in zip(study.settings.log_inverses, t.angle, strict=True)
        ])  # fmt: skip
    return conclude(study, found)


def turned(s: LambdaSettings, seed: int, dimension: int) -> list[Turned]:
    """Computes one seed and dimension after every number of rounds."""
    drawn = problems.classification(seed, s.num_nodes, s.held, dimension, s.spread)
    sets = feasible_sets(drawn.x, drawn.y, drawn.partition)
    last, svm = s.rounds[-1], hard_margin(sets)
    support = float(np.mean(sets.margins(svm) < 1 + 1e-6))
    projected = parallel_projections(sets, last + 1)
    models = np.stack([exponential_models(sets, last, level) for level in s.log_inverses])
    levels, found = np.array(s.log_inverses)[:, None], []
    for k in s.rounds:
        w, v = models[:, k], projected[k]
        size = np.linalg.norm(v)
        found.append(Turned(
            seed, dimension, k, support, direction_distance(w, v), direction_distance(w, projected[k + 1]),
            direction_distance(w, svm), np.linalg.norm(w - levels * v, axis=1) / size, (w - levels * v) @ v / size**2,
        ))  # fmt: skip
    return found


def conclude(study: Study, found: list[Turned]) -> Outcome:
    """Fits the rates, and judges Lemma 2 by them."""
    levels = np.array(study.settings.log_inverses)
    large = levels >= LARGE
    l_large = levels[large]
    rows, shown = list[dict[str, Any]](), list[dict[str, Any]]()
    for (dimension, k), own in grouped(found, "dimension", "round").items():
        rates = {
            "angle": [-log_slope(l_large, t.angle[large]) for t in own],
            "lemma": [log_slope(np.log(l_large) / l_large, t.angle[large]) for t in own],
            "along": [float(np.polyfit(np.log(l_large), t.along[large], 1)[0]) for t in own],
            "later": [-log_slope(l_large, t.later[large]) for t in own],
            "at_paper": [t.angle[0] for t in own],
            "to_svm": [t.to_svm[-1] for t in own],
            "support": [t.support for t in own],
        }
        rows.append({"dimension": dimension, "round": k, **rates})
        shown.append(
            {**rows[-1], **{name: interval(v) for name, v in rates.items()}, "support": np.mean(rates["support"])}
        )
    sheet = table("how fast Local-GD turns to the projections", shown, {
        "d": "{dimension}", "round": "{round}", "support": "{support:.0%}",
        f"angle at l = {levels[0]:g}": "{at_paper:.3f}",
        "angle ~ l^-": "{angle:.3f}", "~ (ln l / l)^": "{lemma:.3f}", "along": "{along:.3f}",
        "angle to the SVM": "{to_svm:.3f}",
    })  # fmt: skip
    _draw(study, found)
    verdicts = _verdicts(shown)
    return Outcome(
        (sheet,), rows, _claims(shown, found), remarks=REMARKS, failed=disagreeing(verdicts), verdicts=verdicts
    )


def _claims(shown: list[dict[str, Any]], found: list[Turned]) -> tuple[Claim, ...]:
    """Judges each claim by the dimension and round that are nearest to failing it."""
    least = min((row["lemma"] for row in shown), key=lambda v: v.low)
    slow = min((row["angle"] for row in shown), key=lambda v: v.low)
    first, last = min(t.round for t in found), max(t.round for t in found)
    grows = interval([
        float(np.log(b.residual[-1] / a.residual[-1])) / np.log(last / first)
        for a, b in zip((t for t in found if t.round == first), (t for t in found if t.round == last), strict=True)
    ]) if last > first else None  # fmt: skip
    svm = min((row["to_svm"] for row in shown), key=lambda v: v.low)
    order = max((row["along"] for row in shown), key=lambda v: v.high)
    claims = [
        Claim("Lemma 2's residual is of order ln l", f"coefficient {order:.3f}", order.below(-0.5)),
        Claim("Lemma 2: the angle falls at least as ln l / l", f"exponent {least:.3f}", least.above(1 - MARGIN)),
        Claim("ours: it falls faster, as 1 / l", f"exponent of l {slow:.3f}", slow.above(1 - MARGIN)),
    ]
    if grows is not None:
        claims.append(
            Claim("Lemma 2's residual needs the factor k: it grows so", f"as k^{grows:.3f}", grows.above(0.5))
        )
    return (*claims, Claim("the vanilla model does not end at the SVM", f"angle {svm:.3f}", svm.above(0.01)))


def _verdicts(shown: list[dict[str, Any]]) -> tuple[Verdict, ...]:
    sizes = f"{len(shown)} settings, the worst"

    def verdict(
        statement: str, name: str, target: float, control: str, wrong: MeanInterval, wrong_target: float
    ) -> Verdict:
        right = max((r[name] for r in shown), key=lambda v: _off(v, target))
        fails = wrong.within(wrong_target, MARGIN) is False
        found = f"{right:.3f}", f"{target:g} +- {MARGIN:g}", _off(right, target) <= MARGIN
        return Verdict.of(SUBJECT, statement, sizes, found, (control, f"{wrong:.3f}", fails), f"{MARGIN:g}")

    later = min((r["later"] for r in shown), key=lambda v: abs(v.mean - 1))
    along = min((r["along"] for r in shown), key=lambda v: abs(v.mean))
    return (
        verdict("angle to the projections: exponent of 1 / l", "angle", 1.0, "projections of a round more", later, 1.0),
        verdict("residual along v: coefficient of ln l", "along", -1.0, "no ln l: 0", along, 0.0),
    )


def _off(values: MeanInterval, target: float) -> float:
    """Computes the largest distance of the interval from ``target``."""
    return max(abs(values.low - target), abs(values.high - target))


def _draw(study: Study, found: list[Turned]) -> None:
    """Draws the first seed's angles by l, with both rates through the last point."""
    levels, panels = np.array(study.settings.log_inverses), []
    for (dimension,), own in grouped([t for t in found if t.seed == found[0].seed], "dimension").items():
        end = own[-1].angle[-1]
        rates = {"1 / l": 1 / levels, "Lemma 2: ln l / l": np.log(levels) / levels}
        angles = {f"round {t.round}": t.angle for t in own}
        angles[f"to the SVM, round {own[-1].round}"] = own[-1].to_svm
        through = {name: end * rate / rate[-1] for name, rate in rates.items()}
        panels.append(BoundedPanel(f"d = {dimension}", levels, angles, through))
    title = "angle of Local-GD's exact model to the projections, by l = ln(1 / lambda)"
    bounded(
        panels,
        title,
        ("l = ln(1 / lambda)", "distance of directions"),
        None,
        study.figures.path("lambda_rate"),
        log="xy",
    )


PAPER = LambdaSettings(num_nodes=10, held=50, dimensions=(750, 1500, 4000), rounds=(1, 5, 20, 120))
DEFAULT = LambdaSettings(num_nodes=10, held=20, dimensions=(300, 1000), rounds=(1, 5, 20, 120))
SCALES = {"gaussian": by_scale(LambdaSettings(), DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("localgd",), check=check, least_seeds=2, exact=True),)
