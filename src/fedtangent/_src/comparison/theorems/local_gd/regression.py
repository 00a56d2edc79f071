"""Lemma 1 and Theorem 1 of Local-GD: the global model of every round in closed form, its rate and its limit."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from fedtangent._src.comparison.statistics import relative_distance
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.theorems.local_gd.runs import SIZES, Descent, LinearProblem, Size, simulated
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.federated import schedule
from fedtangent._src.federated.algorithms import fed_avg
from fedtangent._src.theory.local_gd.regression import LocalRegression, local_regression, local_theorem_1, minimum_norm
from fedtangent._src.types import ArrayLike, Partition, Schedule

ALIKE = 0.9  # correlation of one input of the first node with one of the second
STEPS = 12  # local steps that do not converge
MANY_STEPS = 40  # local steps that almost converge
ROUNDS = 30
SETTLED = 7  # the fit of a rate starts where the next mode is e^-7 below the slowest, and ends twice as late
RATE_MARGIN = 0.02  # of the rate
NEAR = 1e-11  # a run is compared with its limit when it is as near by theory


def _problem(size: Size, seed: int) -> LinearProblem:
    """Draws the problem of section 5; one eigenvalue of the averaged projection is well below all others."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size.nodes, size.per_node, size.dimension))
    x[1, 0] = ALIKE * x[0, 0] + np.sqrt(1 - ALIKE**2) * x[1, 0]
    truths = 2 * rng.standard_normal((size.nodes, size.dimension))
    y = np.einsum("ind,id->in", x, truths) + 0.2 * rng.standard_normal(x.shape[:2])
    return LinearProblem(size, x.reshape(-1, size.dimension), y.reshape(-1), seed)


def _learning_rate(problem: LinearProblem) -> float:
    """Computes half of the largest step at which every node is stable."""
    nodes = problem.x.reshape(problem.size.nodes, problem.size.per_node, -1)
    return problem.size.per_node / float(np.linalg.svd(nodes, compute_uv=False).max() ** 2)


def _theory(
    problem: LinearProblem,
    steps: int | None = None,
    partition: Partition | None = None,
    weights: ArrayLike = "uniform",
) -> LocalRegression:
    """Builds the closed form for ``steps`` local steps, by default until convergence; other data make it wrong."""
    rate = None if steps is None else _learning_rate(problem)
    clients = problem.partition if partition is None else partition
    return local_regression(problem.x, problem.y, clients, learning_rate=rate, local_steps=steps, weights=weights)


def _schedule(problem: LinearProblem, cohort: int) -> Schedule:
    nodes = problem.size.nodes
    return schedule.all_clients(nodes) if cohort == nodes else schedule.uniform_sampling(nodes, cohort)


def _models(
    problem: LinearProblem, steps: int, rounds: int, cohort: int | None = None, every: int = 1
) -> Float64[np.ndarray, "records d"]:
    """Simulates rounds of all nodes from the model 0, as in Theorem 1, or of ``cohort`` nodes from a random model."""
    full = cohort in (None, problem.size.nodes)
    plan = _schedule(problem, problem.size.nodes if cohort is None else cohort)
    descent = Descent(plan, steps, _learning_rate(problem), rounds, 0.0 if full else 1.0, problem.seed)
    return simulated(fed_avg, problem.examples, descent, every)


def _lemma_1(problem: LinearProblem, cohort: int) -> Verdict:
    """Checks that the simulated global model equals the closed form at every round of ``cohort`` nodes."""
    size, models = problem.size, _models(problem, STEPS, ROUNDS, cohort)
    cohorts = schedule.drawn_cohorts(_schedule(problem, cohort), problem.partition, ROUNDS, problem.seed)
    dealt = np.arange(size.examples, dtype=np.int32).reshape(size.per_node, size.nodes).T.ravel()
    theories = {
        "": _theory(problem, STEPS),
        "L = 1": _theory(problem, 1),
        "one local step less": _theory(problem, STEPS - 1),
        "local work until convergence": _theory(problem),
        "projections onto other rows": _theory(problem, STEPS, problem.partition._replace(indices=dealt)),
    }
    errors = {name: _distance(models, theory.models(cohorts, models[0])) for name, theory in theories.items()}
    missing = _theory(problem, STEPS, weights=size.without_last())
    errors["a node missing"] = _distance(models, missing.models(ROUNDS, models[0]))
    who = "all nodes" if cohort == size.nodes else f"{cohort} nodes a round"
    statement = f"simulated global model = closed form at every round: {who}"
    claim = Claim("Local-GD Lemma 1", statement, f"{size}, L = {STEPS}, {ROUNDS} rounds")
    return claim.exact(errors.pop(""), errors)


def _distance(models: np.ndarray, predicted: np.ndarray) -> float:
    """Returns the largest distance of the two models at any round, relative to the whole movement of ``models``."""
    return float(np.linalg.norm(models - predicted, axis=1).max() / np.linalg.norm(models[-1] - models[0]))


def _finite_steps(problem: LinearProblem) -> Verdict:
    """Checks that runs with finite L differ from eq. (6) by at most the sum of their unfinished local work."""
    exact = _theory(problem)
    models = exact.models(ROUNDS)
    moves = [np.linalg.norm(exact.local(w) - w, axis=1).mean() for w in models[:-1]]
    longest = np.cumsum(moves)  # a round adds its unfinished share of the mean move; old distances shrink
    many = (STEPS, 2 * STEPS, 4 * STEPS)
    ratios, controls = [], []
    for steps in many:
        gap = np.linalg.norm(_models(problem, steps, ROUNDS) - models, axis=1)[1:] / longest
        ratios.append(float(gap.max()) / _theory(problem, steps).unfinished)
        controls.append(float(gap.max()) / _theory(problem, 2 * steps).unfinished)
    statement = "distance of finite L from eq. (6), every round / bound by the unfinished local work, (1 - eta s / N)^L"
    sizes = f"{problem.size}, L = {', '.join(map(str, many))}, {ROUNDS} rounds"
    return Claim("Local-GD Lemma 1", statement, sizes).bounded(max(ratios), "the bound of 2 L steps", max(controls))


def _rate(problem: LinearProblem) -> Verdict:
    """Checks that late rounds multiply the distance to the centralised model by one minus the least eigenvalue."""
    theory = _theory(problem)
    least, following = (float(np.log1p(-value)) for value in theory.eigenvalues[[-1, -2]])
    first = int(np.ceil(SETTLED / (least - following)))
    late = np.arange(first, 2 * first + 1)
    models = _models(problem, MANY_STEPS, 2 * first)
    distance = np.linalg.norm(models[late] - minimum_norm(problem.x, problem.y), axis=1)
    slope = float(np.polyfit(late, np.log(distance), 1)[0])
    statement = "fitted rate of the distance to the centralised model / ln(1 - least eigenvalue)"
    sizes = f"{problem.size}, L = {MANY_STEPS}, rounds {first} to {2 * first}"
    return Claim("Local-GD Theorem 1", statement, sizes).near(
        slope / least,
        ("the next eigenvalue", slope / following),
        RATE_MARGIN,
        f"{RATE_MARGIN:.0%} of the rate",
        formats=(".4f", ".3f"),
        applies=local_theorem_1(theory).applies,
    )


def _limit(problem: LinearProblem, cohort: int) -> Verdict:
    """Checks that a run ends at the solution of all examples nearest to its start, whichever nodes take part."""
    size = problem.size
    full = cohort == size.nodes
    rounds = _theory(problem, STEPS).rounds_to(NEAR) * (1 if full else 2)
    start, end = _models(problem, STEPS, rounds, cohort, every=rounds)
    most = size.examples - size.per_node
    solutions = {
        "": minimum_norm(problem.x, problem.y, start),
        "a node's examples left out": minimum_norm(problem.x[:most], problem.y[:most], start),
        "the mean of the nodes' solutions": _theory(problem).models(1, start)[-1],
    }
    if not full:
        solutions["the solution nearest to 0"] = minimum_norm(problem.x, problem.y)
    errors = {name: relative_distance(end, solution) for name, solution in solutions.items()}
    who = "all nodes from 0" if full else f"{cohort} nodes a round, from a random model"
    sizes = f"{size}, L = {STEPS}, {rounds} rounds"
    claim = Claim("Local-GD Theorem 1", f"the run ends at the centralised model: {who}", sizes)
    return claim.exact(errors.pop(""), errors)


def _checks(scale: str, seed: int) -> list[Verdict]:
    """Checks the closed form at every round, its limit of many local steps, and the rate and limit of Theorem 1."""
    problem = _problem(of_scale(scale, *SIZES), seed)
    cohorts = problem.size.nodes, problem.size.nodes // 2
    lemma_1, limit = ([check(problem, cohort) for cohort in cohorts] for check in (_lemma_1, _limit))
    return [*lemma_1, _finite_steps(problem), _rate(problem), *limit]


ENTRIES = (
    TheoremEntry(
        "local_gd.regression",
        "every round of a linear regression in closed form, its limit, and its rate towards the centralised model",
        _checks,
        papers=("localgd",),
        statement="Lemma 1 and Theorem 1 of Local-GD",
        functions=(local_regression, local_theorem_1, minimum_norm),
        figures=("local_gd.fig1a", "local_gd.fig1b", "local_gd.fig1c", "local_gd.participation"),
    ),
)
