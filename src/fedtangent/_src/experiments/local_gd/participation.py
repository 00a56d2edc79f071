"""Beyond Local-GD's paper: how many local steps are too many where only some nodes take part in a round.

Linear regression, cohorts drawn uniformly, in closed form. With more dimensions than examples every number L of local
steps ends at the centralised model (a cohort's rounds all leave it in place): asked is how fast. With fewer, nodes
disagree: the model goes on moving about a point that is not the centralised one. Asked is from which L on it is
farther away than ``tolerance``, once it has settled: there runs start from the centralised model, and nodes' truths are
one truth and a spread about it, as the paper's wholly different ones leave no model that fits any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src.comparison.verdicts import EXACT, Verdict, exact_verdict
from fedtangent._src.engine.run import params_by_round
from fedtangent._src.experiments.lab.results import Claim, Outcome, disagreeing, grouped, interval, table
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.experiments.local_gd import problems
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.local import Work
from fedtangent._src.models.features import linear
from fedtangent._src.output.files import Metric
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent._src.output.style import METHODS
from fedtangent._src.theory.local_gd.regression import LocalRegression, local_regression, minimum_norm
from fedtangent._src.types import Cohort

SUBJECT = "Local-GD, Lemma 1 for cohorts"
REMARKS = (
    "rate: the fall of ln |w - c| in a round, a line over the rounds above 1e-9; c is the centralised model",
    "away: |w - c| / |c|, root mean square over the second half of the rounds; bias: of the end of all nodes, exact",
    "too many: the first L with away above the tolerance",
)


@dataclass(frozen=True)
class ParticipationSettings:
    """``dimensions``: one above and one below the number of examples, each above those of a node."""

    num_nodes: int = within(10, least=2)
    held: int = 10  # examples of a node
    wide: int = 200
    narrow: int = 30
    clients_per_round: int = 3
    learning_rate: float = within(0.02, above=0)
    local_steps: tuple[int, ...] = within((1, 10, 100, 1000), count=3, increasing=True)
    num_rounds: int = within(300, least=20)
    spread: float = within(0.4, at_least=0)  # of the narrow nodes' own truths
    tolerance: float = within(0.05, above=0)


class ParticipationRun(NamedTuple):
    """Results of one seed, dimension and number of local steps."""

    seed: int
    dimension: int
    steps: int
    distance: np.ndarray  # [R + 1], |w - c| / |c|
    everybody: np.ndarray  # the same with all nodes in every round
    bias: float  # |end with all nodes - c| / |c|

    @property
    def rate(self) -> float:
        """The fall of ``ln |w - c|`` in a round."""
        return fall(self.distance)

    @property
    def all_rate(self) -> float:
        """The fall of ``ln |w - c|`` in a round with all nodes in every round."""
        return fall(self.everybody)

    @property
    def away(self) -> float:
        """Root mean square of the distance over the second half of the rounds."""
        return float(np.sqrt(np.mean(self.distance[len(self.distance) // 2 :] ** 2)))


def fall(distance: np.ndarray) -> float:
    """Computes the fall of ln ``distance`` in a round, by a line through the rounds before it is below 1e-9."""
    alive = distance > 1e-9
    count = max(len(alive) if alive.all() else int(np.argmin(alive)), 2)
    return -float(np.polyfit(np.arange(count), np.log(distance[:count]), 1)[0])


def check(study: Study) -> None:
    """Raises ``ValueError`` unless the examples' number is between the dimensions and local work does not diverge."""
    s = study.settings
    examples = s.num_nodes * s.held
    if not s.wide > examples:
        raise ValueError(f"wide: got {s.wide}, must be more than the {examples} examples")
    if not s.held < s.narrow < examples:
        raise ValueError(f"narrow: got {s.narrow}, must be above held, {s.held}, and below the {examples} examples")
    if s.clients_per_round >= s.num_nodes:  # all nodes stay at the centralised model, 0 away from it, where L = 1
        raise ValueError(f"clients_per_round: got {s.clients_per_round}, must be below num_nodes, {s.num_nodes}")
    for dimension in (s.wide, s.narrow):
        for seed in study.seeds:
            run = closed_form(nodes(s, seed, dimension), s, 1)
            if run.unfinished > 1:
                raise ValueError(f"learning_rate: got {s.learning_rate}, at which local work diverges, must be smaller")


def nodes(s: ParticipationSettings, seed: int, dimension: int) -> problems.Problem:
    """Draws the paper's regression if ``wide``; else one truth and a spread about it, as no model fits all examples."""
    spread = problems.TRUTH if dimension == s.wide else s.spread
    return problems.regression(seed, s.num_nodes, s.held, dimension, spread, common=dimension == s.narrow)


def closed_form(drawn: problems.Problem, s: ParticipationSettings, steps: int) -> LocalRegression:
    """Computes Lemma 1 for this many local steps."""
    return local_regression(drawn.x, drawn.y, drawn.partition, learning_rate=s.learning_rate, local_steps=steps)


def cohorts(s: ParticipationSettings, seed: int) -> Cohort:
    """Draws the cohorts of a simulation with this seed; nodes are of equal size, so their weights are 1."""
    plan = schedule.uniform_sampling(s.num_nodes, s.clients_per_round)
    return schedule.drawn_cohorts(plan, None, s.num_rounds, seed, weighting=None)


def run(study: Study) -> Outcome:
    """Computes every seed, dimension and number of local steps in closed form, and simulates one to check it."""
    s, found = study.settings, list[ParticipationRun]()
    for seed in study.each_seed():
        drawn_cohorts = cohorts(s, seed)
        for dimension in (s.wide, s.narrow):
            drawn = nodes(s, seed, dimension)
            centre = minimum_norm(drawn.x, drawn.y)
            for steps in s.local_steps:
                found.append(follow(closed_form(drawn, s, steps), centre, drawn_cohorts, s, (seed, dimension, steps)))
        study.keep([
            Metric(r, f"local_gd d={f.dimension} L={f.steps}", seed, "train", "distance", float(v), 0, 0)
            for f in found if f.seed == seed for r, v in enumerate(f.distance)
        ])  # fmt: skip
    return conclude(study, found, simulated(s, study.seeds[0]))


def follow(
    form: LocalRegression, centre: np.ndarray, drawn: Cohort, s: ParticipationSettings, of: tuple[int, int, int]
) -> ParticipationRun:
    """Computes the distance of the global to the centralised model by round, relative to the latter's norm.

    The distances are computed with the drawn cohorts and with all nodes in every round. Runs start from 0 in the wide
    dimension, and from the centralised model in the narrow one.
    """
    size = np.linalg.norm(centre)
    start = None if of[1] == s.wide else centre
    both = [np.linalg.norm(form.models(rounds, start) - centre, axis=1) / size for rounds in (drawn, s.num_rounds)]
    return ParticipationRun(*of, both[0], both[1], float(np.linalg.norm(form.limit() - centre) / size))


def simulated(s: ParticipationSettings, seed: int) -> Verdict:
    """Compares the closed form with the engine for the same cohorts, after a tenth of the rounds."""
    steps, short = s.local_steps[1], max(s.num_rounds // 10, 2)
    drawn = nodes(s, seed, s.narrow)
    algorithm = algorithms.fed_avg(
        linear(s.narrow, dtype=jnp.float64), schedule.uniform_sampling(s.num_nodes, s.clients_per_round),
        client_learning_rate=s.learning_rate, work=Work(steps=steps, batch_size=None),
    )  # fmt: skip
    path = params_by_round(algorithm, drawn.federated(), num_rounds=short, seed=seed, every=short)
    seen = path["weights"][-1, 0, :, 0]
    part, other = (jax.tree.map(lambda leaf: leaf[:short], cohorts(s, each)) for each in (seed, seed + 1))

    def off(form: LocalRegression, rounds: Cohort | int) -> float:
        predicted = form.models(rounds)[-1]
        return float(np.linalg.norm(seen - predicted) / np.linalg.norm(predicted))

    form = closed_form(drawn, s, steps)
    controls = {
        "all nodes in every round": off(form, short),
        "other cohorts": off(form, other),
        "a step more": off(closed_form(drawn, s, steps + 1), part),
    }
    statement = f"global model after {short} rounds, L = {steps}: simulation and closed form"
    return exact_verdict(SUBJECT, statement, off(form, part), controls, EXACT)


def conclude(study: Study, found: list[ParticipationRun], verdict: Verdict) -> Outcome:
    """Builds tables and claims: how fast runs are, how far away they settle, and from which L on that is too far."""
    s, rows, shown = study.settings, list[dict[str, Any]](), list[dict[str, Any]]()
    for (dimension, steps), runs in grouped(found, "dimension", "steps").items():
        numbers: dict[str, list[Any]] = {
            "rate": [f.rate if dimension == s.wide else None for f in runs],
            "all_rate": [f.all_rate if dimension == s.wide else None for f in runs],
            "away": [f.away for f in runs],
            "all_away": [f.bias for f in runs],
            "end": [float(f.distance[-1]) for f in runs],
        }
        rows.append({"dimension": dimension, "local_steps": steps, **numbers})
        shown.append({**rows[-1], **{n: None if None in v else interval(v) for n, v in numbers.items()}})
    columns = {"d": "{dimension}", "L": "{local_steps}", "rate": "{rate:.2e}", "rate, all nodes": "{all_rate:.2e}",
               "away": "{away:.2e}", "bias, all nodes": "{all_away:.2e}"}  # fmt: skip
    sheet = table(f"{s.clients_per_round} of {s.num_nodes} nodes a round, {s.num_rounds} rounds", shown, columns)
    verdicts = (verdict, _interpolating(s, found))
    _draw(study, found)
    details = {"too_many": [_first_too_many(s, [f for f in found if f.seed == seed]) for seed in study.seeds]}
    return Outcome((sheet,), rows, _claims(s, found, shown), details, REMARKS, disagreeing(verdicts), verdicts)


def _first_too_many(s: ParticipationSettings, found: list[ParticipationRun]) -> int | None:
    """Finds the first L with a distance above the tolerance in the narrow dimension, for one seed's runs."""
    return next((f.steps for f in found if f.dimension == s.narrow and f.away > s.tolerance), None)


def _interpolating(s: ParticipationSettings, found: list[ParticipationRun]) -> Verdict:
    """Checks that the distance to the centralised model keeps falling in the wide dimension; control: narrow."""

    def factor(dimension: int) -> list[float]:
        own = [f for f in found if f.dimension == dimension and f.steps == s.local_steps[-1]]
        return [float(f.distance[-1] / f.distance[s.num_rounds // 4]) for f in own]

    right, wrong = float(np.log(max(factor(s.wide)))), float(np.log(min(factor(s.narrow))))
    return Verdict.of(
        "Local-GD, Theorem 1 for cohorts", "ln of the last distance over that at a quarter, largest L",
        f"d = {s.wide}, the worst seed", (f"{right:.3g}", "< -1", right < -1),
        (f"d = {s.narrow}", f"{wrong:.3g}", wrong > -1),
    )  # fmt: skip


def _claims(s: ParticipationSettings, found: list[ParticipationRun], shown: list[dict[str, Any]]) -> tuple[Claim, ...]:
    """Judges the claims, paired over seeds."""

    def of(dimension: int, steps: int) -> list[ParticipationRun]:
        return [f for f in found if f.dimension == dimension and f.steps == steps]

    def pairs(dimension: int, first: int, last: int, what: str) -> Any:
        both = zip(of(dimension, first), of(dimension, last), strict=True)
        return interval([float(np.log(getattr(b, what) / getattr(a, what))) for a, b in both])

    least, before, most = s.local_steps[0], s.local_steps[-2], s.local_steps[-1]
    faster, more = pairs(s.wide, least, most, "rate"), pairs(s.wide, before, most, "rate")
    slower = interval([f.rate / f.all_rate for f in of(s.wide, most)])
    farther = pairs(s.narrow, least, most, "away")
    steps = [_first_too_many(s, [f for f in found if f.seed == seed]) for seed in sorted({f.seed for f in found})]
    said = ", ".join("none" if n is None else str(n) for n in steps)
    worst = [r["away"] for r in shown if r["dimension"] == s.narrow][-1]
    return (
        Claim(f"interpolating: L = {most} is faster a round than {least}", f"ln ratio {faster:+.3f}", faster.above()),
        Claim(f"and not slower than {before} by 1 %: no L is too many", f"ln ratio {more:+.3f}", more.above(-0.01)),
        Claim("some nodes a round are 5 % slower than all", f"ratio {slower:.3f}", slower.below(0.95)),
        Claim(f"not interpolating: {most} is farther off than {least}", f"ln ratio {farther:+.2f}", farther.above()),
        Claim(f"there {most} local steps are too many", f"away {worst:.3f}; first too many by seed: {said}",
              worst.above(s.tolerance)),
    )  # fmt: skip


def _draw(study: Study, found: list[ParticipationRun]) -> None:
    """Draws the first seed's distances by round, for at most six values of L."""
    s, panels = study.settings, []
    for dimension, what in ((s.wide, "interpolating"), (s.narrow, "not interpolating")):
        own = [f for f in found if f.seed == found[0].seed and f.dimension == dimension]
        own = [own[i] for i in np.unique(np.linspace(0, len(own) - 1, len(METHODS)).astype(int))]
        panels.append(BoundedPanel(
            f"d = {dimension}, {s.num_nodes * s.held} examples: {what}", np.arange(1, s.num_rounds + 1),
            {f"L = {f.steps}": f.distance[1:] for f in own}, {f"L = {own[-1].steps}, all nodes": own[-1].everybody[1:]},
        ))  # fmt: skip
    title = f"distance to the centralised model, {s.clients_per_round} of {s.num_nodes} nodes a round"
    bounded(panels, title, ("round", "|w - c| / |c|"), None, study.figures.path("participation"))


DEFAULT = ParticipationSettings(
    held=20, wide=400, narrow=60, local_steps=(1, 3, 10, 30, 100, 300, 1000), num_rounds=1000
)  # fmt: skip
PAPER = ParticipationSettings(
    held=50, wide=1500, narrow=150, local_steps=(1, 3, 10, 30, 100, 300, 1000, 3000), num_rounds=2000
)  # fmt: skip
SCALES = {"gaussian": by_scale(ParticipationSettings(), DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("localgd",), check=check, least_seeds=2, exact=True),)
