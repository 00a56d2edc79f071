"""Lemma 1 and Theorem 1 of Local-GD: the global model of every round in closed form, its rate and its limit."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedtangent._src.comparison.statistics import relative_distance
from fedtangent._src.comparison.theorems import TheoremEntry, of_scale
from fedtangent._src.comparison.theorems.local_gd.runs import SIZES, Descent, LinearProblem, Size, simulated
from fedtangent._src.comparison.verdicts import EXACT, Verdict, bounded_verdict, exact_verdict
from fedtangent._src.federated.algorithms import fed_avg
from fedtangent._src.federated.schedule import all_clients, drawn_cohorts, uniform_sampling
from fedtangent._src.theory import LocalRegression, local_regression, local_theorem_1, minimum_norm

ALIKE = 0.9  # correlation of one input of the first node with one of the second
STEPS = 12  # local steps that do not converge
MANY_STEPS = 40  # local steps that almost converge
ROUNDS = 30
SETTLED = 7  # the fit of a rate starts where the next mode is e^-7 below the slowest, and ends twice as late
RATE_MARGIN = 0.02  # of the rate
NEAR = 1e-11  # a run is compared with its limit when it is as near by theory


def problem_of(size: Size, seed: int) -> LinearProblem:
    """Draws the problem of section 5: Gaussian inputs, different true weights N(0, 4) per node, noise of variance 0.04.

    Two nodes have a nearly equal input, so that for every seed one eigenvalue of the averaged projection is well below
    all others: this eigenvalue sets the rate of late rounds.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size.nodes, size.held, size.dimension))
    x[1, 0] = ALIKE * x[0, 0] + np.sqrt(1 - ALIKE**2) * x[1, 0]
    truths = 2 * rng.standard_normal((size.nodes, size.dimension))
    y = np.einsum("ind,id->in", x, truths) + 0.2 * rng.standard_normal(x.shape[:2])
    return LinearProblem(size, x.reshape(-1, size.dimension), y.reshape(-1))


def rate_of(problem: LinearProblem) -> float:
    """Computes half of the largest step at which every node is stable."""
    nodes = problem.x.reshape(problem.size.nodes, problem.size.held, -1)
    return problem.size.held / float(np.linalg.svd(nodes, compute_uv=False).max() ** 2)


def theory_of(problem: LinearProblem, steps: int | None = None, **changes: Any) -> LocalRegression:
    """Builds the theory of the problem.

    Args:
        problem: The problem.
        steps: Local steps; None: local convergence.
        changes: Arguments of ``local_regression`` that make it a wrong theory.
    """
    work = {} if steps is None else {"learning_rate": rate_of(problem), "local_steps": steps}
    given: dict[str, Any] = {"partition": problem.partition, **work, **changes}
    return local_regression(problem.x, problem.y, **given)


def descent_of(problem: LinearProblem, seed: int, steps: int, rounds: int, cohort: int) -> Descent:
    """Builds the description of a run: with all nodes it starts at 0, as in Theorem 1, else at a random model.

    Args:
        problem: The problem.
        seed: Seed of the run.
        steps: Local steps.
        rounds: Rounds.
        cohort: Number of nodes in a round.
    """
    nodes = problem.size.nodes
    every = cohort == nodes
    schedule = all_clients(nodes) if every else uniform_sampling(nodes, cohort)
    return Descent(schedule, steps, rate_of(problem), rounds, seed, 0.0 if every else 1.0)


def lemma_1(problem: LinearProblem, seed: int, cohort: int) -> Verdict:
    """Checks that the simulated global model equals the closed form at every round.

    Args:
        problem: The problem.
        seed: Seed of the run.
        cohort: Number of nodes in a round.
    """
    size, descent = problem.size, descent_of(problem, seed, STEPS, ROUNDS, cohort)
    seen = simulated(fed_avg, problem, descent)
    cohorts = drawn_cohorts(descent.schedule, problem.partition, ROUNDS, seed)
    dealt = np.arange(size.examples, dtype=np.int32).reshape(size.held, size.nodes).T.ravel()
    others = problem.partition._replace(indices=dealt)
    runs = {
        "L = 1": theory_of(problem, 1),
        "a local step less": theory_of(problem, STEPS - 1),
        "local work until convergence": theory_of(problem),
        "projections onto other rows": theory_of(problem, STEPS, partition=others),
    }
    wrong = {name: _apart(seen, run.models(cohorts, seen[0])) for name, run in runs.items()}
    missing = theory_of(problem, STEPS, weights=size.without_last())
    wrong["a node missing"] = _apart(seen, missing.models(ROUNDS, seen[0]))
    right = _apart(seen, theory_of(problem, STEPS).models(cohorts, seen[0]))
    who = "all nodes" if cohort == size.nodes else f"{cohort} nodes a round"
    statement = f"simulated global model = closed form at every round: {who}"
    return exact_verdict("Local-GD Lemma 1", statement, right, wrong, EXACT)._replace(
        sizes=f"{size}, L = {STEPS}, {ROUNDS} rounds"
    )


def _apart(seen: np.ndarray, told: np.ndarray) -> float:
    """Returns the largest distance of the two models at any round, relative to the whole movement of ``seen``."""
    return float(np.linalg.norm(seen - told, axis=1).max() / np.linalg.norm(seen[-1] - seen[0]))


def limit_form(problem: LinearProblem, seed: int) -> Verdict:
    """Checks that runs with finite L differ from eq. (6) by at most the sum of their unfinished local work.

    A round adds at most ``(1 - eta s / N)^L``, the fraction of a local residual that remains, with s the least
    eigenvalue of any ``X_i X_i'``, times the mean over nodes of how far eq. (4) moves a model. Old distances shrink.
    """
    size, exact = problem.size, theory_of(problem)
    models = exact.models(ROUNDS)
    moves = [np.linalg.norm(exact.local(w) - w, axis=1).mean() for w in models[:-1]]
    longest = np.cumsum(moves)
    many = (STEPS, 2 * STEPS, 4 * STEPS)
    gaps, left, twice = [], [], []
    for steps in many:
        seen = simulated(fed_avg, problem, descent_of(problem, seed, steps, ROUNDS, size.nodes))
        gaps.append(np.linalg.norm(seen - models, axis=1)[1:] / longest)
        left.append(theory_of(problem, steps).unfinished)
        twice.append(theory_of(problem, 2 * steps).unfinished)
    found, wrong = (max(float(gap.max()) / bound for gap, bound in zip(gaps, b, strict=True)) for b in (left, twice))
    statement = "distance of finite L from eq. (6), every round / what the local work leaves, (1 - eta s / N)^L"
    sizes = f"{size}, L = {', '.join(map(str, many))}, {ROUNDS} rounds"
    return bounded_verdict("Local-GD Lemma 1", statement, sizes, found, "that of 2 L steps", wrong)


def rate(problem: LinearProblem, seed: int) -> Verdict:
    """Checks Theorem 1's rate: late rounds multiply the distance to the centralised model by one minus an eigenvalue.

    It is the least eigenvalue of the mean projection.
    """
    size, run = problem.size, theory_of(problem)
    promised = local_theorem_1(run)
    least, following = (float(np.log1p(-value)) for value in run.eigenvalues[[-1, -2]])
    first = int(np.ceil(SETTLED / (least - following)))
    late = np.arange(first, 2 * first + 1)
    seen = simulated(fed_avg, problem, descent_of(problem, seed, MANY_STEPS, 2 * first, size.nodes))
    distance = np.linalg.norm(seen[late] - minimum_norm(problem.x, problem.y), axis=1)
    slope = float(np.polyfit(late, np.log(distance), 1)[0])
    found, wrong = slope / least, slope / following
    holds = promised.applies and abs(found - 1) <= RATE_MARGIN
    return Verdict.of(
        "Local-GD Theorem 1",
        "fitted rate of the distance to the centralised model / ln(1 - least eigenvalue)",
        f"{size}, L = {MANY_STEPS}, rounds {first} to {2 * first}",
        (f"{found:.4f}", f"1 +- {RATE_MARGIN:g}", holds),
        ("the next eigenvalue", f"{wrong:.3f}", abs(wrong - 1) > RATE_MARGIN),
        f"{RATE_MARGIN:.0%} of the rate",
    )


def limit(problem: LinearProblem, seed: int, cohort: int) -> Verdict:
    """Checks that a run ends at the solution of all examples nearest to its start, whichever nodes take part.

    Args:
        problem: The problem.
        seed: Seed of the run.
        cohort: Number of nodes in a round.
    """
    size = problem.size
    every = cohort == size.nodes
    rounds = theory_of(problem, STEPS).rounds_to(NEAR) * (1 if every else 2)
    seen = simulated(fed_avg, problem, descent_of(problem, seed, STEPS, rounds, cohort), every=rounds)
    start, end = seen
    most = size.examples - size.held
    wrong = {
        "a node's examples left out": minimum_norm(problem.x[:most], problem.y[:most], start),
        "the mean of the nodes' own": theory_of(problem).models(1, start)[-1],
    }
    if not every:
        wrong["the solution nearest to 0"] = minimum_norm(problem.x, problem.y)
    right = relative_distance(end, minimum_norm(problem.x, problem.y, start))
    errors = {name: relative_distance(end, w) for name, w in wrong.items()}
    who = "all nodes from 0" if every else f"{cohort} nodes a round, from a random model"
    statement = f"the run ends at the centralised model: {who}"
    return exact_verdict("Local-GD Theorem 1", statement, right, errors, EXACT)._replace(
        sizes=f"{size}, L = {STEPS}, {rounds} rounds"
    )


def checks(scale: str, seed: int) -> list[Verdict]:
    """Checks the closed form at every round, its limit of many local steps, and the rate and limit of Theorem 1."""
    problem = problem_of(of_scale(scale, *SIZES), seed)
    cohorts = problem.size.nodes, problem.size.nodes // 2
    return [
        *(lemma_1(problem, seed, cohort) for cohort in cohorts),
        limit_form(problem, seed),
        rate(problem, seed),
        *(limit(problem, seed, cohort) for cohort in cohorts),
    ]


ENTRIES = (
    TheoremEntry(
        "local_gd.regression",
        "every round of a linear regression in closed form, the rate at which it nears the centralised model, its end",
        checks,
        papers=("localgd",),
        statement="Lemma 1 and Theorem 1 of Local-GD",
        functions=(local_regression, local_theorem_1, minimum_norm),
        figures=("local_gd.fig1a", "local_gd.fig1b", "local_gd.fig1c", "local_gd.participation"),
    ),
)
