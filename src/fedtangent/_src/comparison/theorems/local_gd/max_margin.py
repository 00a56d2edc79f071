"""Lemmas 2 to 4 and Theorems 2 and 3 of Local-GD: separable classification, and projections onto feasible sets."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedtangent._src.comparison.statistics import relative_distance
from fedtangent._src.comparison.theorems import TheoremEntry, of_scale
from fedtangent._src.comparison.theorems.local_gd.runs import SIZES, Descent, LinearProblem, Size, simulated
from fedtangent._src.comparison.verdicts import EXACT, Verdict, exact_verdict
from fedtangent._src.federated.algorithms import fed_prox, modified_local_gd
from fedtangent._src.federated.schedule import all_clients
from fedtangent._src.theory import (
    FeasibleSets,
    direction_distance,
    exponential_models,
    feasible_sets,
    halpern,
    hard_margin,
    parallel_projections,
)
from fedtangent._src.theory.local_gd.max_margin import project

SPREAD = 0.4  # standard deviation of a node's true separator about the common one, per coordinate
LAMBDA = 0.1  # so large that ``STEPS`` local steps reach the minimiser of eq. (12) to rounding
STEPS = 600
SIMULATED_ROUNDS = 5
FEW_ROUNDS = 3  # of Lemma 2, which is about a fixed round
LEVELS = np.array([1e3, 1e4, 1e5, 1e6])  # ln(1 / lambda)
ROUNDS = 1000
LATE = np.array([125, 250, 500, 1000])  # rounds over which a slope is fitted
MARGIN = 0.25  # of a slope: nearer to 1 than to any other multiple of 1/2
GROWTH_MARGIN = 0.05


class Classified(NamedTuple):
    """A separable problem with its feasible sets and its hard-margin SVM."""

    problem: LinearProblem
    sets: FeasibleSets
    svm: np.ndarray  # [d]
    start: np.ndarray  # [d], another start than 0, of the SVM's norm
    seed: int


def problem_of(size: Size, seed: int) -> Classified:
    """Draws Gaussian inputs of norm about 1, with labels by each node's separator, which varies about a common one."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size.nodes, size.held, size.dimension)) / np.sqrt(size.dimension)
    truths = rng.standard_normal(size.dimension) + SPREAD * rng.standard_normal((size.nodes, size.dimension))
    y = np.where(np.einsum("ind,id->in", x, truths) >= 0, 1.0, -1.0)
    problem = LinearProblem(size, x.reshape(-1, size.dimension), y.reshape(-1))
    sets = feasible_sets(problem.x, problem.y, problem.partition)
    svm, start = hard_margin(sets), rng.standard_normal(size.dimension)
    return Classified(problem, sets, svm, start * np.linalg.norm(svm) / np.linalg.norm(start), seed)


def simulated_rounds(case: Classified, modified: bool) -> Verdict:
    """Checks that ``STEPS`` local steps on eq. (12) reach its exact local minimisers.

    Args:
        case: The problem.
        modified: Whether to run algorithm 3 instead of Local-GD.
    """
    size, rounds, level = case.problem.size, SIMULATED_ROUNDS, float(np.log(1 / LAMBDA))
    nodes = np.asarray(case.sets.signed)
    stable = 2 / float(np.linalg.svd(nodes, compute_uv=False).max() ** 2)  # at the start
    descent = Descent(all_clients(size.nodes), STEPS, stable / 4, rounds, case.seed)
    recipe = modified_local_gd if modified else fed_prox
    seen = simulated(recipe, case.problem, descent, loss="exponential_sum", mu=LAMBDA)[-1]
    anchors: dict[str, Any] = {"alpha": halpern(rounds, 0)} if modified else {}

    projections = parallel_projections(case.sets, rounds, **anchors)

    def away(log_inverse: float, **changes: Any) -> float:
        return relative_distance(exponential_models(case.sets, rounds, log_inverse, **anchors | changes)[-1], seen)

    wrong = {
        "lambda / 2": away(level + np.log(2)),
        "a mean in place of the sum": away(level - np.log(size.held)),
        "a node missing": away(level, weights=size.without_last()),
        "the projections of eq. (13)": relative_distance(level * projections[-1], seen),
        "alpha of eq. (16)": away(level, alpha=halpern(rounds)),
    }
    if modified:
        wrong["the plain mean"] = away(level, alpha=None)
    name = "algorithm 3" if modified else "Local-GD"
    statement = f"simulated {name} on eq. (12) = its exact local minimisers, round {rounds}"
    return exact_verdict("Local-GD eq. (12)", statement, away(level), wrong, EXACT)._replace(
        sizes=f"{size}, lambda = {LAMBDA:g}, L = {STEPS}"
    )


def weak_models(case: Classified, rounds: int) -> np.ndarray:
    """Computes Local-GD's models after ``rounds`` rounds at each of ``LEVELS``, [levels, d]."""
    return np.stack([exponential_models(case.sets, rounds, v)[-1] for v in LEVELS])


def lemma_2_residual(case: Classified) -> Verdict:
    """Checks that ``w - ln(1/lambda) w_bar`` grows as ``ln ln(1/lambda)``.

    Then it changes equally in each decade of ``ln(1/lambda)``.
    """
    models, growths = weak_models(case, FEW_ROUNDS), []
    for alpha in (None, halpern(FEW_ROUNDS)):
        bar = parallel_projections(case.sets, FEW_ROUNDS, alpha=alpha)[-1]
        change = np.linalg.norm(np.diff(models - LEVELS[:, None] * bar, axis=0), axis=1)
        growths.append(float(change[-1] / change[0]))
    found, wrong = growths
    return Verdict.of(
        "Local-GD Lemma 2",
        "change of w - ln(1/lambda) w_bar in the last decade of ln(1/lambda) / in the first",
        f"{case.problem.size}, round {FEW_ROUNDS}, ln(1/lambda) = {LEVELS[0]:.0e} to {LEVELS[-1]:.0e}",
        (f"{found:.3f}", f"1 +- {GROWTH_MARGIN:g}", abs(found - 1) <= GROWTH_MARGIN),
        ("w_bar of eq. (16)", f"{wrong:.3g}", abs(wrong - 1) > GROWTH_MARGIN),
        f"{GROWTH_MARGIN:.0%} of the growth",
    )


def slope_row(
    subject: str,
    statement: str,
    sizes: str,
    over: np.ndarray,
    right: np.ndarray,
    wrong: tuple[str, np.ndarray],
    expected: float,
) -> Verdict:
    """Checks a power law: the slope of log(right) against log(over), which a wrong theory must not have.

    Args:
        subject: The theorem.
        statement: Name of the comparison.
        sizes: Sizes of the problem, as text.
        over: Abscissas.
        right: Measured values.
        wrong: Name and values of the wrong theory.
        expected: Exponent that theory predicts.
    """
    found, other = (float(np.polyfit(np.log(over), np.log(v), 1)[0]) for v in (right, wrong[1]))
    return Verdict.of(
        subject,
        statement,
        sizes,
        (f"{found:.2f}", f"{expected:g} +- {MARGIN:g}", abs(found - expected) <= MARGIN),
        (wrong[0], f"{other:.2f}", abs(other - expected) > MARGIN),
        f"power x {1 - MARGIN:g}",
    )


def lemma_2_direction(case: Classified) -> Verdict:
    """Checks eq. (14): Local-GD's direction is within ``ln ln(1/lambda) / ln(1/lambda)`` of the projections' direction.

    Over these values of lambda ``1 / ln(1/lambda)`` would have slope 1.1: the check cannot tell it from the bound.
    """
    models = weak_models(case, FEW_ROUNDS)
    plain, modified = (
        direction_distance(models, parallel_projections(case.sets, FEW_ROUNDS, alpha=alpha)[-1])
        for alpha in (None, halpern(FEW_ROUNDS))
    )
    return slope_row(
        "Local-GD Lemma 2, (14)",
        "distance in direction from the projections, against ln ln(1/lambda) / ln(1/lambda): slope",
        f"{case.problem.size}, round {FEW_ROUNDS}, ln(1/lambda) = {LEVELS[0]:.0e} to {LEVELS[-1]:.0e}",
        np.log(LEVELS) / LEVELS,
        plain,
        ("the projections of eq. (16)", modified),
        1.0,
    )


def lemma_3(case: Classified, from_zero: bool) -> Verdict:
    """Checks that the plain mean of projections ends in every feasible set: all margins reach 1, from any start.

    Args:
        case: The problem.
        from_zero: Whether to start at 0 instead of at ``case.start``.
    """
    start = None if from_zero else case.start
    short = {}
    for name, weights in (("", "uniform"), ("a node missing", case.problem.size.without_last())):
        end = parallel_projections(case.sets, ROUNDS, start=start, weights=weights)[-1]
        short[name] = float(1 - case.sets.margins(end).min())
    begin = "0" if from_zero else "elsewhere"
    statement = f"the mean of projections ends in all sets: largest 1 - y x'w, from {begin}"
    return exact_verdict("Local-GD Lemma 3", statement, max(short.pop(""), 0.0), short, EXACT)._replace(
        sizes=f"{case.problem.size}, {ROUNDS} rounds"
    )


def theorem_2(case: Classified) -> Verdict:
    """Checks that Local-GD's direction tends to the direction of the projections' end point, not to the SVM's."""
    models, end = weak_models(case, ROUNDS), parallel_projections(case.sets, ROUNDS)[-1]
    return slope_row(
        "Local-GD Theorem 2",
        "distance in direction from the mean's end in all sets, against ln ln(1/lambda) / ln(1/lambda): slope",
        f"{case.problem.size}, {ROUNDS} rounds, ln(1/lambda) = {LEVELS[0]:.0e} to {LEVELS[-1]:.0e}",
        np.log(LEVELS) / LEVELS,
        direction_distance(models, end),
        ("the SVM", direction_distance(models, case.svm)),
        1.0,
    )


def theorem_3(case: Classified) -> Verdict:
    """Checks that with eq. (16), which pulls back to 0, the direction tends to the SVM's as 1 / k.

    The control is the plain mean of projections, whose direction does not.
    """
    plain, drawn = (
        direction_distance(parallel_projections(case.sets, ROUNDS, alpha=alpha)[LATE], case.svm)
        for alpha in (None, halpern(ROUNDS))
    )
    return slope_row(
        "Local-GD Theorem 3",
        "Modified Local-GD's distance in direction from the SVM, against the round: slope",
        f"{case.problem.size}, rounds {LATE[0]} to {LATE[-1]}",
        LATE,
        drawn,
        ("the plain mean", plain),
        -1.0,
    )


def lemma_4(case: Classified) -> Verdict:
    """Checks that eq. (16), started away from 0, converges as 1 / k to the feasible point nearest to its start.

    A feasible point lies in every node's feasible set. The negative control is the distance from the SVM's solution.
    """
    nearest = np.asarray(project(case.sets.pooled(), case.start).point[0])
    path = parallel_projections(case.sets, ROUNDS, alpha=halpern(ROUNDS), start=case.start)[LATE]
    near, machine = (np.linalg.norm(path - point, axis=1) for point in (nearest, case.svm))
    return slope_row(
        "Local-GD Lemma 4",
        "distance from the point of all sets nearest to the start, against the round: slope",
        f"{case.problem.size}, rounds {LATE[0]} to {LATE[-1]}, a start as far from 0 as the SVM",
        LATE,
        near,
        ("distance from the SVM", machine),
        -1.0,
    )


def checks(scale: str, seed: int) -> list[Verdict]:
    """Checks eq. (12) by simulation, its weak limit (Lemma 2), and where projections end.

    The end of the projections is the subject of Lemmas 3 and 4 and Theorems 2 and 3.
    """
    case = problem_of(of_scale(scale, *SIZES), seed)
    return [
        *(simulated_rounds(case, modified) for modified in (False, True)),
        lemma_2_residual(case),
        lemma_2_direction(case),
        *(lemma_3(case, from_zero) for from_zero in (True, False)),
        theorem_2(case),
        theorem_3(case),
        lemma_4(case),
    ]


ENTRIES = (
    TheoremEntry(
        "local_gd.max_margin",
        "separable classification: local max-margin models, their mean in the feasible set, the modified at the SVM",
        checks,
        papers=("localgd",),
        statement="Lemmas 2, 3 and 4, Theorems 2 and 3 of Local-GD",
        functions=(hard_margin, feasible_sets, parallel_projections, halpern, exponential_models, direction_distance),
        figures=("local_gd.fig1d", "local_gd.lambda_rate"),
    ),
)
