"""Lemmas 2 to 4 and Theorems 2 and 3 of Local-GD: separable classification, and projections onto feasible sets."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Num

from fedtangent._src.comparison.statistics import log_slope, relative_distance
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.theorems.local_gd.runs import SIZES, Descent, LinearProblem, Size, simulated
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.federated.algorithms import fed_prox, modified_local_gd
from fedtangent._src.federated.schedule import all_clients
from fedtangent._src.theory.local_gd.max_margin import (
    FeasibleSets,
    direction_distance,
    exponential_models,
    feasible_sets,
    halpern,
    hard_margin,
    parallel_projections,
    project,
)
from fedtangent._src.types import ArrayLike

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
    svm: Float64[np.ndarray, "d"]
    start: Float64[np.ndarray, "d"]  # another start than 0, of the SVM's norm

    def _projections(self, rounds: int, modified: bool = False, start: ArrayLike | None = None) -> np.ndarray:
        """Computes the projections' global models at every round, by eq. (13) or the modified eq. (16), [R + 1, d]."""
        return parallel_projections(self.sets, rounds, alpha=halpern(rounds) if modified else None, start=start)

    def _weak_models(self, rounds: int) -> Float64[np.ndarray, "levels d"]:
        """Computes Local-GD's models after ``rounds`` rounds at each weak regularisation ln(1/lambda) of ``LEVELS``."""
        return np.stack([exponential_models(self.sets, rounds, level)[-1] for level in LEVELS])


def _problem(size: Size, seed: int) -> Classified:
    """Draws Gaussian inputs of norm about 1, with labels by each node's separator, which varies about a common one."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size.nodes, size.per_node, size.dimension)) / np.sqrt(size.dimension)
    truths = rng.standard_normal(size.dimension) + SPREAD * rng.standard_normal((size.nodes, size.dimension))
    y = np.where(np.einsum("ind,id->in", x, truths) >= 0, 1.0, -1.0)
    problem = LinearProblem(size, x.reshape(-1, size.dimension), y.reshape(-1), seed)
    sets = feasible_sets(problem.x, problem.y, problem.partition)
    svm, start = hard_margin(sets), rng.standard_normal(size.dimension)
    return Classified(problem, sets, svm, start * np.linalg.norm(svm) / np.linalg.norm(start))


def _simulated_rounds(case: Classified, modified: bool) -> Verdict:
    """Checks that ``STEPS`` local steps of Local-GD, or of algorithm 3, on eq. (12) reach its local minimisers."""
    size, rounds, log_inverse = case.problem.size, SIMULATED_ROUNDS, float(np.log(1 / LAMBDA))
    stable = 2 / float(np.linalg.svd(np.asarray(case.sets.signed), compute_uv=False).max() ** 2)  # at the start
    descent = Descent(all_clients(size.nodes), STEPS, stable / 4, rounds, seed=case.problem.seed)
    recipe = modified_local_gd if modified else fed_prox
    model = simulated(recipe, case.problem.examples, descent, loss="exponential_sum", mu=LAMBDA)[-1]
    pace = halpern(rounds, 0) if modified else None
    projections = parallel_projections(case.sets, rounds, alpha=pace)

    def error(log_inverse: float, alpha: ArrayLike | None = pace, weights: ArrayLike = "uniform") -> float:
        models = exponential_models(case.sets, rounds, log_inverse, alpha=alpha, weights=weights)
        return relative_distance(models[-1], model)

    controls = {
        "lambda / 2": error(log_inverse + np.log(2)),
        "a mean instead of the sum": error(log_inverse - np.log(size.per_node)),
        "a node missing": error(log_inverse, weights=size.without_last()),
        "the projections of eq. (13)": relative_distance(log_inverse * projections[-1], model),
        "alpha of eq. (16)": error(log_inverse, alpha=halpern(rounds)),
    }
    if modified:
        controls["the plain mean"] = error(log_inverse, alpha=None)
    name = "algorithm 3" if modified else "Local-GD"
    statement = f"simulated {name} on eq. (12) = its exact local minimisers, round {rounds}"
    claim = Claim("Local-GD eq. (12)", statement, f"{size}, lambda = {LAMBDA:g}, L = {STEPS}")
    return claim.exact(error(log_inverse), controls)


def _few_rounds(case: Classified) -> str:
    return f"{case.problem.size}, round {FEW_ROUNDS}, ln(1/lambda) = {LEVELS[0]:.0e} to {LEVELS[-1]:.0e}"


def _lemma_2_residual(case: Classified) -> Verdict:
    """Checks that ``w - ln(1/lambda) w_bar`` grows as ``ln ln(1/lambda)``: equally in each decade of the level."""
    models, growths = case._weak_models(FEW_ROUNDS), []
    for modified in (False, True):
        bar = case._projections(FEW_ROUNDS, modified)[-1]
        change = np.linalg.norm(np.diff(models - LEVELS[:, None] * bar, axis=0), axis=1)
        growths.append(float(change[-1] / change[0]))
    growth, other = growths
    statement = "change of w - ln(1/lambda) w_bar in the last decade of ln(1/lambda) / in the first"
    return Claim("Local-GD Lemma 2", statement, _few_rounds(case)).near(
        growth,
        ("w_bar of eq. (16)", other),
        GROWTH_MARGIN,
        f"{GROWTH_MARGIN:.0%} of the growth",
        formats=(".3f", ".3g"),
    )


def _power_law(
    claim: Claim,
    over: Num[np.ndarray, "n"],
    values: Float64[np.ndarray, "n"],
    control: tuple[str, Float64[np.ndarray, "n"]],
    exponent: float,
) -> Verdict:
    """Checks that log(values) has the slope ``exponent`` against log(over), and the control's values have not."""
    slope, other = (log_slope(over, v) for v in (values, control[1]))
    notices = f"power x {1 - MARGIN:g}"
    return claim.near(slope, (control[0], other), MARGIN, notices, target=exponent, formats=(".2f", ".2f"))


def _lemma_2_direction(case: Classified) -> Verdict:
    """Checks eq. (14): the distance in direction from the projections falls as ``ln ln(1/lambda) / ln(1/lambda)``."""
    models = case._weak_models(FEW_ROUNDS)
    plain, modified = (direction_distance(models, case._projections(FEW_ROUNDS, m)[-1]) for m in (False, True))
    statement = "distance in direction from the projections, against ln ln(1/lambda) / ln(1/lambda): slope"
    claim = Claim("Local-GD Lemma 2, (14)", statement, _few_rounds(case))
    # 1 / ln(1/lambda) would have slope 1.1 over these values of lambda: the two cannot be told apart
    return _power_law(claim, np.log(LEVELS) / LEVELS, plain, ("the projections of eq. (16)", modified), 1.0)


def _lemma_3(case: Classified, from_zero: bool) -> Verdict:
    """Checks that the plain mean of projections ends in every feasible set: all margins reach 1, from any start."""
    start, violations = None if from_zero else case.start, {}
    for name, weights in (("", "uniform"), ("a node missing", case.problem.size.without_last())):
        end = parallel_projections(case.sets, ROUNDS, start=start, weights=weights)[-1]
        violations[name] = float(1 - case.sets.margins(end).min())
    begin = "0" if from_zero else "elsewhere"
    statement = f"the mean of projections ends in all feasible sets: largest 1 - y x'w, from {begin}"
    claim = Claim("Local-GD Lemma 3", statement, f"{case.problem.size}, {ROUNDS} rounds")
    return claim.exact(max(violations.pop(""), 0.0), violations)


def _theorem_2(case: Classified) -> Verdict:
    """Checks that Local-GD's direction tends to the direction of the projections' end point, not to the SVM's."""
    models = case._weak_models(ROUNDS)
    statement = "distance in direction from the projections' end point, against ln ln(1/lambda) / ln(1/lambda): slope"
    sizes = f"{case.problem.size}, {ROUNDS} rounds, ln(1/lambda) = {LEVELS[0]:.0e} to {LEVELS[-1]:.0e}"
    distance = direction_distance(models, case._projections(ROUNDS)[-1])
    control = "the SVM", direction_distance(models, case.svm)
    return _power_law(Claim("Local-GD Theorem 2", statement, sizes), np.log(LEVELS) / LEVELS, distance, control, 1.0)


def _theorem_3(case: Classified) -> Verdict:
    """Checks that with eq. (16) the direction tends to the SVM's as 1 / k; control: the plain mean."""
    plain, modified = (direction_distance(case._projections(ROUNDS, m)[LATE], case.svm) for m in (False, True))
    statement = "Modified Local-GD's distance in direction from the SVM, against the round: slope"
    claim = Claim("Local-GD Theorem 3", statement, f"{case.problem.size}, rounds {LATE[0]} to {LATE[-1]}")
    return _power_law(claim, LATE, modified, ("the plain mean", plain), -1.0)


def _lemma_4(case: Classified) -> Verdict:
    """Checks that eq. (16) converges as 1 / k to the feasible point nearest to its start; control: the SVM."""
    nearest = np.asarray(project(case.sets.pooled(), case.start).point[0])
    path = case._projections(ROUNDS, modified=True, start=case.start)[LATE]
    distance, from_svm = (np.linalg.norm(path - point, axis=1) for point in (nearest, case.svm))
    statement = "distance from the feasible point nearest to the start, against the round: slope"
    sizes = f"{case.problem.size}, rounds {LATE[0]} to {LATE[-1]}, a start as far from 0 as the SVM"
    claim = Claim("Local-GD Lemma 4", statement, sizes)
    return _power_law(claim, LATE, distance, ("distance from the SVM", from_svm), -1.0)


def _checks(scale: str, seed: int) -> list[Verdict]:
    """Checks eq. (12) by simulation, its weak limit (Lemma 2), and where projections end (the other statements)."""
    case = _problem(of_scale(scale, *SIZES), seed)
    return [
        *(_simulated_rounds(case, modified) for modified in (False, True)),
        _lemma_2_residual(case),
        _lemma_2_direction(case),
        *(_lemma_3(case, from_zero) for from_zero in (True, False)),
        _theorem_2(case),
        _theorem_3(case),
        _lemma_4(case),
    ]


ENTRIES = (
    TheoremEntry(
        "local_gd.max_margin",
        "separable classification: local max-margin models; their mean ends feasible, the modified one at the SVM",
        _checks,
        papers=("localgd",),
        statement="Lemmas 2, 3 and 4, Theorems 2 and 3 of Local-GD",
        functions=(hard_margin, feasible_sets, parallel_projections, halpern, exponential_models, direction_distance),
        figures=("local_gd.fig1d", "local_gd.lambda_rate"),
    ),
)
