"""Beyond Local-GD's paper: how fast its models turn to the projections as lambda goes to 0 (Lemma 2).

lambda is the factor of the proximal term in the local problems, eq. (12) of Local-GD. With ``l = ln(1 / lambda)``,
Lemma 2 bounds the residual ``|w^k - l v^k|`` of Local-GD's global model w^k and of the projections' model v^k after k
rounds by ``O(k ln l)``; so the angle falls at least as fast as ``ln l / l``. Here every local problem is solved
exactly, far below the smallest lambda of float64, and two rates are fitted: of the angle, and of the part of the
residual along v. Let A have the rows ``y x'`` of a node's examples. A local minimum's dual ``b = exp(-A w) / lambda``
is of order l, so that its support vectors have the margin ``l - ln l + O(1)``. The residual would then be ``-ln l v^k +
O(1)``, of Lemma 2's order, but would hardly turn the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedtangent import theory
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.experiments.local_gd import problems
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent.types import Verdict

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
    """Settings of the data (Local-GD, section 5; more dimensions than examples), and values of ln(1 / lambda).

    lambda is the factor of the proximal term in the local problems. Models are compared after each number of
    ``rounds``.
    """

    num_nodes: int = within(4, least=2)
    held: int = 10  # examples of a node
    dimensions: tuple[int, ...] = (60, 200)
    spread: float = within(0.3, at_least=0)  # of the nodes' own truths
    rounds: tuple[int, ...] = within((1, 5, 20), increasing=True)
    log_inverses: tuple[float, ...] = within(
        (9.21, 100.0, 1e3, 1e4, 1e5, 1e6, 1e7), above=1, count=3, increasing=True
    )  # 9.21: the paper's lambda = 1e-4


class Turned(NamedTuple):
    """Distances of Local-GD's model w from the projections' model v and from the SVM, for one seed and dimension.

    In a round of projections every node projects v onto its feasible set, and results are averaged. Arrays are [V],
    over the V values of ``l = ln(1 / lambda)``, with the factor lambda of the proximal term. An angle is measured by
    its chord, ``|w / |w| - v / |v||``.

    Attributes:
        round: Number k of rounds after which the models are compared.
        support: Share of examples that are support vectors of the SVM.
        angle: Angle between w and v.
        later: Angle between w and the projections' model after one round more.
        to_svm: Angle between w and the SVM.
        residual: ``|w - l v| / |v|``.
        along: Part of the residual along v, ``(w - l v)' v / |v|^2``.
    """

    seed: int
    dimension: int
    round: int
    support: float
    angle: np.ndarray
    later: np.ndarray
    to_svm: np.ndarray
    residual: np.ndarray
    along: np.ndarray


def check(study: Study) -> None:
    """Raises ``ValueError`` unless at least three values of ln(1 / lambda) are >= 1e4 and a model fits all labels."""
    settings = study.settings
    if sum(value >= LARGE for value in settings.log_inverses) < 3:
        raise ValueError(f"log_inverses: got {settings.log_inverses}, must have three values of {LARGE:g} or more")
    for seed in study.seeds:
        for dimension in settings.dimensions:
            problem = problems.classification(seed, settings.num_nodes, settings.held, dimension, settings.spread)
            theory.feasible_sets(problem.x, problem.y, problem.partition)


def run(study: Study) -> lab.Outcome:
    """Solves the local problems of every seed and dimension for all values of lambda, and judges Lemma 2 of Local-GD.

    The lemma says how fast, as the proximal factor lambda goes to 0, the direction of Local-GD's model tends to the
    direction of the model that projections onto the nodes' feasible sets give.
    """
    results = list[Turned]()
    for seed in study.each_seed():
        for dimension in study.settings.dimensions:
            for t in _turned(study.settings, seed, dimension):
                results.append(t)
                for level, value in zip(study.settings.log_inverses, t.angle, strict=True):
                    study.keep(
                        lab.metric_rows(f"local_gd d={t.dimension} l={level:g}", seed, t.round, {"angle": value})
                    )
    return _conclude(study, results)


def _turned(settings: LambdaSettings, seed: int, dimension: int) -> list[Turned]:
    """Computes distances of Local-GD's model from the projections' model and the SVM, for one seed and dimension.

    Projections are onto the nodes' feasible sets. Returns one ``Turned`` for each number of rounds in the settings,
    with the distances at every value of lambda.
    """
    problem = problems.classification(seed, settings.num_nodes, settings.held, dimension, settings.spread)
    sets = theory.feasible_sets(problem.x, problem.y, problem.partition)
    last, svm, distance = settings.rounds[-1], theory.hard_margin(sets), theory.direction_distance
    support = float(np.mean(sets.margins(svm) < 1 + 1e-6))
    projected = theory.parallel_projections(sets, last + 1)
    models = np.stack([theory.exponential_models(sets, last, level) for level in settings.log_inverses])
    levels, results = np.array(settings.log_inverses)[:, None], []
    for k in settings.rounds:
        w, v = models[:, k], projected[k]
        angles = distance(w, v), distance(w, projected[k + 1]), distance(w, svm)
        residual, size = w - levels * v, np.linalg.norm(v)
        parts = np.linalg.norm(residual, axis=1) / size, residual @ v / size**2
        results.append(Turned(seed, dimension, k, support, *angles, *parts))
    return results


def _conclude(study: Study, results: list[Turned]) -> lab.Outcome:
    """Fits how Local-GD's models depend on ``l = ln(1 / lambda)``, and judges Lemma 2 of Local-GD by the fits.

    For each dimension and round it fits the power of l with which the angle between Local-GD's model w and the
    projections' model v falls, and the coefficient of ln l in the part of the residual ``w - l v`` along v. The fits
    use the values of l from 1e4 on (``LARGE``).
    """
    levels = np.array(study.settings.log_inverses)
    large = levels >= LARGE
    l_large = levels[large]
    rows, entries = list[lab.Row](), list[lab.Row]()
    for (dimension, k), group in lab.grouped(results, "dimension", "round").items():
        rates = {
            "angle": [-lab.log_slope(l_large, t.angle[large]) for t in group],
            "lemma": [lab.log_slope(np.log(l_large) / l_large, t.angle[large]) for t in group],
            "along": [float(np.polyfit(np.log(l_large), t.along[large], 1)[0]) for t in group],
            "later": [-lab.log_slope(l_large, t.later[large]) for t in group],
            "at_paper": [t.angle[0] for t in group],
            "to_svm": [t.to_svm[-1] for t in group],
            "support": [t.support for t in group],
        }
        rows.append({"dimension": dimension, "round": k, **rates})
        intervals = {name: lab.interval(v) for name, v in rates.items()}
        entries.append({**rows[-1], **intervals, "support": np.mean(rates["support"])})
    columns = f"d: {{dimension}} | round: {{round}} | support: {{support:.0%}} | angle at l = {levels[0]:g}: "
    columns += "{at_paper:.3f} | angle ~ l^-: {angle:.3f} | ~ (ln l / l)^: {lemma:.3f} | along: {along:.3f} | "
    columns += "angle to the SVM: {to_svm:.3f}"
    sheet = lab.table("how fast Local-GD turns to the projections", entries, columns)
    _draw(study, results)
    claims, verdicts = _claims(entries, results), _verdicts(entries)
    return lab.Outcome((sheet,), rows, claims, remarks=REMARKS, failed=lab.disagreeing(verdicts), verdicts=verdicts)


def _claims(entries: list[lab.Row], results: list[Turned]) -> tuple[lab.Claim, ...]:
    """Judges the claims on Lemma 2 of Local-GD, each at the dimension and round at which it is nearest to failing.

    ``entries`` has the fitted rates by dimension and round. The growth of the residual with the number of rounds is
    judged over all dimensions and seeds together, from ``results``.
    """
    least, slow, svm = (min((row[key] for row in entries), key=lambda v: v.low) for key in ("lemma", "angle", "to_svm"))
    order = max((row["along"] for row in entries), key=lambda v: v.high)
    claims = [
        order.claim_below("Lemma 2's residual is of order ln l", "coefficient {:.3f}", -0.5),
        least.claim_above("Lemma 2: the angle falls at least as ln l / l", "exponent {:.3f}", 1 - MARGIN),
        slow.claim_above("ours: it falls faster, as 1 / l", "exponent of l {:.3f}", 1 - MARGIN),
    ]
    first, last = min(t.round for t in results), max(t.round for t in results)
    if last > first:
        pairs = zip(*([t for t in results if t.round == k] for k in (first, last)), strict=True)
        grows = lab.interval(float(np.log(b.residual[-1] / a.residual[-1])) / np.log(last / first) for a, b in pairs)
        claims.append(grows.claim_above("Lemma 2's residual needs the factor k: it grows so", "as k^{:.3f}", 0.5))
    return (*claims, svm.claim_above("the vanilla model does not end at the SVM", "angle {:.3f}", 0.01))


def _verdicts(entries: list[lab.Row]) -> tuple[Verdict, ...]:
    sizes = f"{len(entries)} settings, the worst"

    def verdict(statement: str, name: str, target: float, control: tuple[str, lab.MeanInterval, float]) -> Verdict:
        farthest = max((row[name] for row in entries), key=lambda v: _off(v, target))
        right = f"{farthest:.3f}", f"{target:g} +- {MARGIN:g}", _off(farthest, target) <= MARGIN
        wrong = control[0], f"{control[1]:.3f}", control[1].within(control[2], MARGIN) is False
        return Verdict.of(SUBJECT, statement, sizes, right, wrong, f"{MARGIN:g}")

    later = min((row["later"] for row in entries), key=lambda v: abs(v.mean - 1))
    along = min((row["along"] for row in entries), key=lambda v: abs(v.mean))
    angle = "angle to the projections: exponent of 1 / l", "angle", 1.0
    residual = "residual along v: coefficient of ln l", "along", -1.0
    return (
        verdict(*angle, ("projections of a round more", later, 1.0)),
        verdict(*residual, ("no ln l: 0", along, 0.0)),
    )


def _off(values: lab.MeanInterval, target: float) -> float:
    """Computes the distance from ``target`` to the farther end of the interval ``values``."""
    return max(abs(values.low - target), abs(values.high - target))


def _draw(study: Study, results: list[Turned]) -> None:
    """Plots the first seed's angles against l = ln(1 / lambda), beside curves in 1 / l and in ln l / l.

    Both curves go through the angle after the last round at the largest l.
    """
    levels, panels = np.array(study.settings.log_inverses), []
    for (dimension,), group in lab.grouped([t for t in results if t.seed == results[0].seed], "dimension").items():
        end = group[-1].angle[-1]
        rates = {"1 / l": 1 / levels, "Lemma 2: ln l / l": np.log(levels) / levels}
        angles = {f"round {t.round}": t.angle for t in group}
        angles[f"to the SVM, round {group[-1].round}"] = group[-1].to_svm
        through = {name: end * rate / rate[-1] for name, rate in rates.items()}
        panels.append(BoundedPanel(f"d = {dimension}", levels, angles, through))
    title = "angle of Local-GD's exact model to the projections, by l = ln(1 / lambda)"
    names = ("l = ln(1 / lambda)", "distance of directions")
    bounded(panels, title, names, None, study.figures.path("lambda_rate"), log="xy")


PAPER = LambdaSettings(num_nodes=10, held=50, dimensions=(750, 1500, 4000), rounds=(1, 5, 20, 120))
DEFAULT = LambdaSettings(num_nodes=10, held=20, dimensions=(300, 1000), rounds=(1, 5, 20, 120))
SCALES = {"gaussian": by_scale(LambdaSettings(), DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("localgd",), check=check, least_seeds=2, exact=True),)
