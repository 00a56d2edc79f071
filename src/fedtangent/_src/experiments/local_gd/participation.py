"""Beyond Local-GD's paper: how many local steps are too many where only some nodes take part in a round.

The task is linear regression in closed form, with cohorts drawn uniformly. With more dimensions than examples, training
ends at the centralised model for every number L of local steps, and the experiment measures how fast. With fewer
dimensions, no model fits all nodes: the global model keeps moving about a point that is not the centralised model, and
the experiment finds the least L at which it stays farther away than ``tolerance``. In that case training starts from
the centralised model, and the nodes' true models are one model with a spread about it, because independent ones, as in
the paper, would fit nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent import theory
from fedtangent._src.comparison.verdicts import EXACT, Verdict, exact_verdict
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.experiments.local_gd import problems
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent._src.output.style import METHODS

SUBJECT = "Local-GD, Lemma 1 for cohorts"
REMARKS = (
    "rate: the fall of ln |w - c| in a round, a line over the rounds above 1e-9; c is the centralised model",
    "away: |w - c| / |c|, root mean square over the second half of the rounds; bias: of the end of all nodes, exact",
    "too many: the first L with away above the tolerance",
)


@dataclass(frozen=True)
class ParticipationSettings:
    """Settings of the study of cohorts and local steps.

    ``wide`` and ``narrow`` are input dimensions above and below the number of all examples.
    """

    num_nodes: int = within(10, least=2)
    held: int = 10  # examples of a node
    wide: int = 200
    narrow: int = 30
    clients_per_round: int = 3
    learning_rate: float = within(0.02, above=0)
    local_steps: tuple[int, ...] = within((1, 10, 100, 1000), count=3, increasing=True)
    num_rounds: int = within(300, least=20)
    spread: float = within(0.4, at_least=0)  # of the narrow nodes' own truths
    tolerance: float = within(0.05, above=0)  # of |w - c| / |c|; where it stays above, L is too large


class ParticipationRun(NamedTuple):
    """Distances of the global model w from the centralised model c, by round, for one seed and dimension.

    Attributes:
        steps: Number of local steps in a round.
        distance: ``|w - c| / |c|`` if only the nodes drawn for a round (its cohort) take part in it, [R + 1].
        everybody: ``|w - c| / |c|`` if all nodes take part in every round, [R + 1].
        bias: Value to which ``everybody`` tends.
    """

    seed: int
    dimension: int
    steps: int
    distance: np.ndarray
    everybody: np.ndarray
    bias: float

    @property
    def rate(self) -> float:
        """Decrease per round of ln distance from the centralised model, if only the nodes drawn for a round train."""
        return fall(self.distance)

    @property
    def all_rate(self) -> float:
        """Decrease per round of ln distance from the centralised model, if all nodes take part in every round."""
        return fall(self.everybody)

    @property
    def away(self) -> float:
        """Distance from the centralised model over its norm: root mean square over the second half of the rounds.

        Only the nodes drawn for a round take part in it.
        """
        return float(np.sqrt(np.mean(self.distance[len(self.distance) // 2 :] ** 2)))


def fall(distance: np.ndarray) -> float:
    """Computes the decrease of ln ``distance`` per round, by a least-squares line.

    The line is fitted to the rounds before ``distance`` first falls to 1e-9, at least to the first two.
    """
    is_alive = distance > 1e-9
    count = max(len(is_alive) if is_alive.all() else int(np.argmin(is_alive)), 2)
    return -float(np.polyfit(np.arange(count), np.log(distance[:count]), 1)[0])


def check(study: Study) -> None:
    """Raises ``ValueError`` if dimensions, numbers of nodes and examples, or the learning rate do not fit together."""
    settings = study.settings
    examples = settings.num_nodes * settings.held
    if not settings.wide > examples:
        raise ValueError(f"wide: got {settings.wide}, must be above {examples}, the examples of all nodes")
    size, narrow, rate = settings.held, settings.narrow, settings.learning_rate
    if not size < narrow < examples:
        raise ValueError(
            f"narrow: got {narrow}, must be above {size}, the examples of one node, and below {examples}, those of all"
        )
    cohort, nodes = settings.clients_per_round, settings.num_nodes
    if cohort >= nodes:  # all nodes stay at the centralised model, 0 away from it, where L = 1
        raise ValueError(f"clients_per_round: got {cohort}, must be below num_nodes, {nodes}")
    for dimension in (settings.wide, settings.narrow):
        for seed in study.seeds:
            if _closed_form(_nodes(settings, seed, dimension), settings, 1).unfinished > 1:
                raise ValueError(f"learning_rate: got {rate}, at which local work diverges, must be smaller")


def _nodes(settings: ParticipationSettings, seed: int, dimension: int) -> problems.Problem:
    """Draws the nodes' regression data in ``dimension`` input dimensions: ``settings.wide`` or ``settings.narrow``.

    In the wide case every node has an independent true model, as in the Local-GD paper. In the narrow case the true
    models are one common vector plus N(0, ``settings.spread``^2).
    """
    spread = problems.TRUTH if dimension == settings.wide else settings.spread
    return problems.regression(
        seed, settings.num_nodes, settings.held, dimension, spread, common=dimension == settings.narrow
    )


def _closed_form(problem: problems.Problem, settings: ParticipationSettings, steps: int) -> theory.LocalRegression:
    """Computes the closed form of ``steps`` local steps per round (Local-GD, Lemma 1)."""
    x, y, clients = problem.x, problem.y, problem.partition
    return theory.local_regression(x, y, clients, learning_rate=settings.learning_rate, local_steps=steps)


def _cohorts(settings: ParticipationSettings, seed: int) -> ft.types.Cohort:
    """Draws the nodes that take part in each round, as a simulation with this seed does.

    Nodes are of equal size, so their weights are 1.
    """
    schedule = ft.schedules.uniform_sampling(settings.num_nodes, settings.clients_per_round)
    return ft.schedules.drawn_cohorts(schedule, None, settings.num_rounds, seed, weighting=None)


def run(study: Study) -> lab.Outcome:
    """Computes the models of every seed, dimension and number of local steps in closed form, and simulates one."""
    settings, results = study.settings, list[ParticipationRun]()
    for seed in study.each_seed():
        cohorts = _cohorts(settings, seed)
        for dimension in (settings.wide, settings.narrow):
            problem = _nodes(settings, seed, dimension)
            centre = theory.minimum_norm(problem.x, problem.y)
            for steps in settings.local_steps:
                place = seed, dimension, steps
                results.append(_follow(_closed_form(problem, settings, steps), centre, cohorts, settings, place))
                values, rounds = {"distance": results[-1].distance}, range(settings.num_rounds + 1)
                study.keep(lab.metric_rows(f"local_gd d={dimension} L={steps}", seed, rounds, values))
    return _conclude(study, results, _simulated(settings, study.seeds[0]))


def _follow(
    form: theory.LocalRegression,
    centre: np.ndarray,
    cohorts: ft.types.Cohort,
    settings: ParticipationSettings,
    place: tuple[int, int, int],
) -> ParticipationRun:
    """Computes ``|w - c| / |c|`` by round, of the global model w and the centralised model c, in closed form.

    It does so for the drawn cohorts and for all nodes in every round, and for the limit of many rounds of all nodes. w
    starts at 0 with ``settings.wide`` input dimensions, and at c with ``settings.narrow``.

    Args:
        form: Closed form of the global models, for one regression and one number of local steps.
        centre: The centralised model c.
        cohorts: The nodes drawn for each round.
        settings: Settings.
        place: Seed, dimension and number of local steps.
    """
    size = np.linalg.norm(centre)
    start = None if place[1] == settings.wide else centre
    both = [
        np.linalg.norm(form.models(rounds, start) - centre, axis=1) / size for rounds in (cohorts, settings.num_rounds)
    ]
    return ParticipationRun(*place, both[0], both[1], float(np.linalg.norm(form.limit() - centre) / size))


def _simulated(settings: ParticipationSettings, seed: int) -> Verdict:
    """Judges whether a simulation equals the closed form with the same cohorts, after a tenth of the rounds.

    The run has ``settings.narrow`` input dimensions and the second number of local steps, and starts at 0. Controls
    are the closed forms of other cohorts, of all nodes in every round, and of one local step more.
    """
    steps, short = settings.local_steps[1], max(settings.num_rounds // 10, 2)
    problem, work = _nodes(settings, seed, settings.narrow), ft.Work(steps=steps, batch_size=None)
    model = ft.models.linear(settings.narrow, dtype=jnp.float64)
    schedule = ft.schedules.uniform_sampling(settings.num_nodes, settings.clients_per_round)
    algorithm = ft.fed_avg(model, schedule, client_learning_rate=settings.learning_rate, work=work)
    path = ft.params_by_round(algorithm, problem.federated(), num_rounds=short, seed=seed, every=short)
    trained = path["weights"][-1, 0, :, 0]
    part, other = (jax.tree.map(lambda leaf: leaf[:short], _cohorts(settings, key)) for key in (seed, seed + 1))

    def off(form: theory.LocalRegression, rounds: ft.types.Cohort | int) -> float:
        predicted = form.models(rounds)[-1]
        return float(np.linalg.norm(trained - predicted) / np.linalg.norm(predicted))

    form = _closed_form(problem, settings, steps)
    controls = {
        "all nodes in every round": off(form, short),
        "other cohorts": off(form, other),
        "a step more": off(_closed_form(problem, settings, steps + 1), part),
    }
    statement = f"global model after {short} rounds, L = {steps}: simulation and closed form"
    return exact_verdict(SUBJECT, statement, off(form, part), controls, EXACT)


def _conclude(study: Study, results: list[ParticipationRun], verdict: Verdict) -> lab.Outcome:
    """Builds table, figure, claims and verdicts: how fast training is, and how many local steps are too many.

    ``verdict`` compares a simulation with the closed form.
    """
    settings, rows, entries = study.settings, list[lab.Row](), list[lab.Row]()
    for (dimension, steps), group in lab.grouped(results, "dimension", "steps").items():
        numbers: dict[str, list[Any]] = {
            "rate": [f.rate if dimension == settings.wide else None for f in group],
            "all_rate": [f.all_rate if dimension == settings.wide else None for f in group],
            "away": [f.away for f in group],
            "all_away": [f.bias for f in group],
            "end": [float(f.distance[-1]) for f in group],
        }
        rows.append({"dimension": dimension, "local_steps": steps, **numbers})
        entries.append({**rows[-1], **{n: None if None in v else lab.interval(v) for n, v in numbers.items()}})
    columns = "d: {dimension} | L: {local_steps} | rate: {rate:.2e} | rate, all nodes: {all_rate:.2e} | "
    columns += "away: {away:.2e} | bias, all nodes: {all_away:.2e}"
    sheet = lab.table(
        f"{settings.clients_per_round} of {settings.num_nodes} nodes a round, {settings.num_rounds} rounds",
        entries,
        columns,
    )
    verdicts = (verdict, _interpolating(settings, results))
    _draw(study, results)
    details = {"too_many": [_first_too_many(settings, results, seed) for seed in study.seeds]}
    claims = _claims(study, results, entries)
    return lab.Outcome((sheet,), rows, claims, details, REMARKS, lab.disagreeing(verdicts), verdicts)


def _first_too_many(settings: ParticipationSettings, results: list[ParticipationRun], seed: int) -> int | None:
    """Finds the least number of local steps with which the model stays too far from the centralised model.

    It is the number for one seed, with ``narrow`` input dimensions; None if every number of steps ends within
    ``tolerance`` (root mean square over the second half of the rounds).
    """
    runs = (f for f in results if f.seed == seed and f.dimension == settings.narrow)
    return next((f.steps for f in runs if f.away > settings.tolerance), None)


def _interpolating(settings: ParticipationSettings, results: list[ParticipationRun]) -> Verdict:
    """Judges whether the distance to the centralised model still falls late in training, with ``wide`` dimensions.

    With the most local steps it must fall by more than a factor e from a quarter of the rounds to the end. The control
    is training with fewer dimensions than examples (``narrow``), where it must not fall so far.
    """

    def factors(dimension: int) -> list[float]:
        runs = [f for f in results if f.dimension == dimension and f.steps == settings.local_steps[-1]]
        return [float(f.distance[-1] / f.distance[settings.num_rounds // 4]) for f in runs]

    largest, control = float(np.log(max(factors(settings.wide)))), float(np.log(min(factors(settings.narrow))))
    statement = "ln of the last distance over that at a quarter, largest L"
    sizes = f"d = {settings.wide}, the worst seed"
    right, wrong = (f"{largest:.3g}", "< -1", largest < -1), (f"d = {settings.narrow}", f"{control:.3g}", control > -1)
    return Verdict.of("Local-GD, Theorem 1 for cohorts", statement, sizes, right, wrong)


def _claims(study: Study, results: list[ParticipationRun], entries: list[lab.Row]) -> tuple[lab.Claim, ...]:
    """Judges the experiment's claims on speed and final distance, by differences paired over seeds."""
    settings = study.settings

    def of(dimension: int, steps: int) -> list[ParticipationRun]:
        return [f for f in results if f.dimension == dimension and f.steps == steps]

    def log_ratio(dimension: int, first: int, last: int, quantity: str) -> lab.MeanInterval:
        pairs = zip(of(dimension, first), of(dimension, last), strict=True)
        return lab.interval(float(np.log(getattr(b, quantity) / getattr(a, quantity))) for a, b in pairs)

    least, before, most = settings.local_steps[0], settings.local_steps[-2], settings.local_steps[-1]
    faster, more = log_ratio(settings.wide, least, most, "rate"), log_ratio(settings.wide, before, most, "rate")
    slower = lab.interval(f.rate / f.all_rate for f in of(settings.wide, most))
    farther = log_ratio(settings.narrow, least, most, "away")
    steps = [_first_too_many(settings, results, seed) for seed in sorted(study.seeds)]
    by_seed = ", ".join("none" if n is None else str(n) for n in steps)
    largest = [row["away"] for row in entries if row["dimension"] == settings.narrow][-1]
    too_many = f"there {most} local steps are too many", f"away {{:.3f}}; first too many by seed: {by_seed}"
    return (
        faster.claim_above(f"interpolating: L = {most} is faster a round than {least}", "ln ratio {:+.3f}"),
        more.claim_above(f"and not slower than {before} by 1 %: no L is too many", "ln ratio {:+.3f}", -0.01),
        slower.claim_below("some nodes a round are 5 % slower than all", "ratio {:.3f}", 0.95),
        farther.claim_above(f"not interpolating: {most} is farther off than {least}", "ln ratio {:+.2f}"),
        largest.claim_above(*too_many, settings.tolerance),
    )


def _draw(study: Study, results: list[ParticipationRun]) -> None:
    """Plots the first seed's distances by round, for at most six numbers of local steps."""
    settings, panels = study.settings, []
    for dimension, kind in ((settings.wide, "interpolating"), (settings.narrow, "not interpolating")):
        runs = [f for f in results if f.seed == results[0].seed and f.dimension == dimension]
        runs = [runs[i] for i in np.unique(np.linspace(0, len(runs) - 1, len(METHODS)).astype(int))]
        title = f"d = {dimension}, {settings.num_nodes * settings.held} examples: {kind}"
        rounds = np.arange(1, settings.num_rounds + 1)
        lines, everybody = {f"L = {f.steps}": f.distance[1:] for f in runs}, runs[-1].everybody[1:]
        panels.append(BoundedPanel(title, rounds, lines, {f"L = {runs[-1].steps}, all nodes": everybody}))
    title = f"distance to the centralised model, {settings.clients_per_round} of {settings.num_nodes} nodes a round"
    bounded(panels, title, ("round", "|w - c| / |c|"), None, study.figures.path("participation"))


DEFAULT = with_changes(
    ParticipationSettings(), "held=20 wide=400 narrow=60 local_steps=1,3,10,30,100,300,1000 num_rounds=1000"
)
PAPER = with_changes(DEFAULT, "held=50 wide=1500 narrow=150 local_steps=1,3,10,30,100,300,1000,3000 num_rounds=2000")
SCALES = {"gaussian": by_scale(ParticipationSettings(), DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("localgd",), check=check, least_seeds=2, exact=True),)
