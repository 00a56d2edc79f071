"""Checks of the Local-GD paper on linear problems, which ``ft.simulate`` trains with FedAvg and Modified Local-GD.

"local_gd.regression": Lemma 1 and Theorem 1. On linear regression the global model of every round has a closed form,
and tends at a known rate to a known limit.

"local_gd.max_margin": Lemmas 2 to 4, Theorems 2 and 3. On separable classes the global model follows repeated
projections onto the nodes' feasible sets.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64, Num

from fedtangent._src.comparison.statistics import log_slope, relative_distance
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.data.federated import federated_data
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.engine import Devices, params_by_round
from fedtangent._src.federated import schedule
from fedtangent._src.federated.algorithms import fed_avg, fed_prox, modified_local_gd
from fedtangent._src.federated.algorithms.entry import arguments_of
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import all_clients
from fedtangent._src.models.features import linear
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
from fedtangent._src.theory.local_gd.regression import LocalRegression, local_regression, local_theorem_1, minimum_norm
from fedtangent._src.types import Algorithm, ArrayLike, Partition, Recipe, Schedule


class Size(NamedTuple):
    """The sizes of a linear problem: M nodes (clients), N examples of each, d inputs."""

    nodes: int  # M
    per_node: int  # number N of examples of a node
    dimension: int  # d

    @property
    def examples(self) -> int:
        """The number of examples of all nodes."""
        return self.nodes * self.per_node

    def without_last(self) -> list[float]:
        """Returns weights [M] of the nodes: 1, and 0 for the last one, a wrong theory that ignores this node."""
        return [1.0] * (self.nodes - 1) + [0.0]

    def __str__(self) -> str:
        """Returns the sizes as text, such as "M = 4, N = 6, d = 60"."""
        return f"M = {self.nodes}, N = {self.per_node}, d = {self.dimension}"


SIZES = Size(4, 6, 60), Size(10, 50, 1500)


class LinearProblem(NamedTuple):
    """Inputs and targets of all nodes (clients) of a linear problem, its sizes, and the seed of the runs."""

    size: Size
    x: Float64[np.ndarray, "examples d"]
    y: Float64[np.ndarray, "examples"]
    seed: int

    @property
    def partition(self) -> Partition:
        """The partition in which each node has consecutive examples."""
        return consecutive([self.size.per_node] * self.size.nodes)

    @property
    def examples(self) -> tuple[np.ndarray, np.ndarray, Partition]:
        """Inputs, targets, and the partition of the examples among nodes."""
        return self.x, self.y, self.partition


class Descent(NamedTuple):
    """The schedule and the local training of a run, for any algorithm.

    A round has ``steps`` local steps of size ``rate`` on minibatches of ``batch`` examples (None: all). ``scatter`` is
    the standard deviation of the initial weights (0: zeros), and ``mapping`` how nodes are mapped to the device.
    """

    schedule: Schedule
    steps: int  # L
    rate: float  # eta
    rounds: int
    scatter: float = 0.0  # standard deviation of the first model's weights
    seed: int = 0
    mapping: str = "vmap"  # of the nodes
    batch: int | None = None  # size of minibatches; None: all examples


@functools.lru_cache(maxsize=8)
def _algorithm(recipe: Recipe, size: int, descent: Descent, options: tuple[tuple[str, float | str], ...]) -> Algorithm:
    """Builds the algorithm, cached so that the runs of all seeds share one compiled program.

    ``size`` is the number of inputs; ``options`` are further arguments of the recipe.
    """
    model, work = (
        linear(size, sigma=descent.scatter, dtype=jnp.float64),
        Work(steps=descent.steps, batch_size=descent.batch),
    )
    more = arguments_of(recipe, dict(options))
    return recipe(model, descent.schedule, client_learning_rate=descent.rate, work=work, **more)


def simulated(
    recipe: Recipe,
    examples: tuple[Float64[np.ndarray, "examples d"], Float64[np.ndarray, "examples"], Partition],
    descent: Descent,
    every: int = 1,
    **options: float | str,
) -> Float64[np.ndarray, "records d"]:
    """Simulates a run and returns the global model at the start and after every ``every`` rounds.

    Args:
        recipe: Function that builds the algorithm, such as ``fed_avg``.
        examples: Inputs, targets, and the partition of the examples among nodes.
        descent: Schedule and local steps.
        every: Rounds between two records of the model.
        options: Further arguments of the recipe.
    """
    x, y, nodes = examples
    fixed = descent._replace(rounds=0, seed=0), tuple(sorted(options.items()))
    algorithm = _algorithm(recipe, x.shape[1], *fixed)  # type: ignore[arg-type]  # a function is hashable
    data, devices = federated_data(x, y[:, None], nodes, dtype=jnp.float64), Devices(descent.mapping)
    path = params_by_round(algorithm, data, num_rounds=descent.rounds, seed=descent.seed, every=every, devices=devices)
    return np.asarray(path["weights"][:, 0, :, 0])


ALIKE = 0.9  # correlation of one input of the first node with one of the second
FEW_STEPS = 12  # local steps that do not converge
MANY_STEPS = 40  # local steps that almost converge
REGRESSION_ROUNDS = 30
SETTLED = 7  # the fit of a rate starts where the next mode is e^-7 below the slowest, and ends twice as late
RATE_MARGIN = 0.02  # of the rate
NEAR = 1e-11  # a run is compared with its limit when it is as near by theory


def _regression(size: Size, seed: int) -> LinearProblem:
    """Draws the linear regression of Local-GD, section 5, for which one mode converges much later than all others."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size.nodes, size.per_node, size.dimension))
    x[1, 0] = ALIKE * x[0, 0] + np.sqrt(1 - ALIKE**2) * x[1, 0]
    truths = 2 * rng.standard_normal((size.nodes, size.dimension))
    y = np.einsum("ind,id->in", x, truths) + 0.2 * rng.standard_normal(x.shape[:2])
    return LinearProblem(size, x.reshape(-1, size.dimension), y.reshape(-1), seed)


def _learning_rate(problem: LinearProblem) -> float:
    """Computes half of the largest learning rate at which the local steps of every node are stable."""
    nodes = problem.x.reshape(problem.size.nodes, problem.size.per_node, -1)
    return problem.size.per_node / float(np.linalg.svd(nodes, compute_uv=False).max() ** 2)


def _theory(
    problem: LinearProblem,
    steps: int | None = None,
    partition: Partition | None = None,
    weights: ArrayLike = "uniform",
) -> LocalRegression:
    """Builds the closed form of Local-GD for ``steps`` local steps; None: local work until convergence.

    A ``partition`` or ``weights`` of the nodes other than the problem's make a wrong theory, a negative control.
    """
    rate = None if steps is None else _learning_rate(problem)
    clients = problem.partition if partition is None else partition
    return local_regression(problem.x, problem.y, clients, learning_rate=rate, local_steps=steps, weights=weights)


def _schedule(problem: LinearProblem, cohort: int) -> Schedule:
    nodes = problem.size.nodes
    return schedule.all_clients(nodes) if cohort == nodes else schedule.uniform_sampling(nodes, cohort)


def _models(
    problem: LinearProblem, steps: int, rounds: int, cohort: int | None = None, every: int = 1
) -> Float64[np.ndarray, "records d"]:
    """Simulates FedAvg, and returns the global model at the start and after every ``every`` rounds.

    By default all nodes take part and the model starts at 0, as in Theorem 1 of Local-GD. If only ``cohort`` nodes take
    part in a round, the model starts at random.
    """
    full = cohort in (None, problem.size.nodes)
    plan = _schedule(problem, problem.size.nodes if cohort is None else cohort)
    descent = Descent(plan, steps, _learning_rate(problem), rounds, 0.0 if full else 1.0, problem.seed)
    return simulated(fed_avg, problem.examples, descent, every)


def _lemma_1(problem: LinearProblem, cohort: int) -> Verdict:
    """Checks Local-GD's Lemma 1, a closed form of the global model in every round of linear regression.

    ``cohort`` nodes, drawn at random, take part in a round.
    """
    size, models = problem.size, _models(problem, FEW_STEPS, REGRESSION_ROUNDS, cohort)
    cohorts = schedule.drawn_cohorts(_schedule(problem, cohort), problem.partition, REGRESSION_ROUNDS, problem.seed)
    dealt = np.arange(size.examples, dtype=np.int32).reshape(size.per_node, size.nodes).T.ravel()
    theories = {
        "": _theory(problem, FEW_STEPS),
        "L = 1": _theory(problem, 1),
        "one local step less": _theory(problem, FEW_STEPS - 1),
        "local work until convergence": _theory(problem),
        "projections onto other rows": _theory(problem, FEW_STEPS, problem.partition._replace(indices=dealt)),
    }
    errors = {name: _distance(models, theory.models(cohorts, models[0])) for name, theory in theories.items()}
    missing = _theory(problem, FEW_STEPS, weights=size.without_last())
    errors["a node missing"] = _distance(models, missing.models(REGRESSION_ROUNDS, models[0]))
    who = "all nodes" if cohort == size.nodes else f"{cohort} nodes a round"
    statement = f"simulated global model = closed form at every round: {who}"
    claim = Claim("Local-GD Lemma 1", statement, f"{size}, L = {FEW_STEPS}, {REGRESSION_ROUNDS} rounds")
    return claim.exact(errors.pop(""), errors)


def _distance(models: np.ndarray, predicted: np.ndarray) -> float:
    """Returns the largest distance between simulated and predicted model at a round.

    It is relative to the distance between the first and the last simulated model.
    """
    return float(np.linalg.norm(models - predicted, axis=1).max() / np.linalg.norm(models[-1] - models[0]))


def _finite_steps(problem: LinearProblem) -> Verdict:
    """Checks how far FedAvg's models are from Local-GD's eq. (6), in which nodes train until convergence.

    The bound is the sum over rounds of the local work that finitely many steps leave unfinished.
    """
    exact = _theory(problem)
    models = exact.models(REGRESSION_ROUNDS)
    moves = [np.linalg.norm(exact.local(w) - w, axis=1).mean() for w in models[:-1]]
    longest = np.cumsum(moves)  # a round adds its unfinished share of the mean move; old distances shrink
    many = (FEW_STEPS, 2 * FEW_STEPS, 4 * FEW_STEPS)
    ratios, controls = [], []
    for steps in many:
        gap = np.linalg.norm(_models(problem, steps, REGRESSION_ROUNDS) - models, axis=1)[1:] / longest
        ratios.append(float(gap.max()) / _theory(problem, steps).unfinished)
        controls.append(float(gap.max()) / _theory(problem, 2 * steps).unfinished)
    statement = "distance of finite L from eq. (6), every round / bound by the unfinished local work, (1 - eta s / N)^L"
    sizes = f"{problem.size}, L = {', '.join(map(str, many))}, {REGRESSION_ROUNDS} rounds"
    return Claim("Local-GD Lemma 1", statement, sizes).bounded(max(ratios), "the bound of 2 L steps", max(controls))


def _rate(problem: LinearProblem) -> Verdict:
    """Checks the rate of Local-GD's Theorem 1: late rounds multiply the distance to the centralised model by a factor.

    The factor is 1 minus the least nonzero eigenvalue of the averaged projection: a node's matrix projects onto the
    span of its inputs, and the nodes' matrices are averaged.
    """
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
    """Checks Local-GD's Theorem 1: a run ends at the solution of all examples that is nearest to its start.

    ``cohort`` nodes, drawn at random, take part in a round.
    """
    size = problem.size
    full = cohort == size.nodes
    rounds = _theory(problem, FEW_STEPS).rounds_to(NEAR) * (1 if full else 2)
    start, end = _models(problem, FEW_STEPS, rounds, cohort, every=rounds)
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
    sizes = f"{size}, L = {FEW_STEPS}, {rounds} rounds"
    claim = Claim("Local-GD Theorem 1", f"the run ends at the centralised model: {who}", sizes)
    return claim.exact(errors.pop(""), errors)


def _check_regression(scale: str, seed: int) -> list[Verdict]:
    """Checks the closed form of every round of Local-GD on a regression, its rate and limit (Lemma 1, Theorem 1)."""
    problem = _regression(of_scale(scale, *SIZES), seed)
    cohorts = problem.size.nodes, problem.size.nodes // 2
    lemma_1, limit = ([check(problem, cohort) for cohort in cohorts] for check in (_lemma_1, _limit))
    return [*lemma_1, _finite_steps(problem), _rate(problem), *limit]


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
    """A separable classification problem, the feasible sets of its nodes, and its hard-margin SVM.

    A node's feasible set contains the models that classify its examples with margin 1 or more. ``start`` is a random
    model with the norm of ``svm``, from which checks start that do not start at 0.
    """

    problem: LinearProblem
    sets: FeasibleSets
    svm: Float64[np.ndarray, "d"]
    start: Float64[np.ndarray, "d"]  # another start than 0, of the SVM's norm

    def _projections(self, rounds: int, modified: bool = False, start: ArrayLike | None = None) -> np.ndarray:
        """Returns the global models [R + 1, d] of repeated projection onto the nodes' feasible sets.

        Each round averages the projections (Local-GD, eq. 13). If ``modified``, a weighted mean of this average and the
        start is the new model (eq. 16). Without ``start`` the first model is 0.
        """
        return parallel_projections(self.sets, rounds, alpha=halpern(rounds) if modified else None, start=start)

    def _weak_models(self, rounds: int) -> Float64[np.ndarray, "levels d"]:
        """Computes Local-GD's model after ``rounds`` rounds for ln(1/lambda) of 1e3, 1e4, 1e5 and 1e6 (``LEVELS``).

        lambda is the weight of the local regularisation, here very small.
        """
        return np.stack([exponential_models(self.sets, rounds, level)[-1] for level in LEVELS])


def _classification(size: Size, seed: int) -> Classified:
    """Draws Gaussian inputs of norm about 1, labelled by each node's separator, which varies about a common one."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size.nodes, size.per_node, size.dimension)) / np.sqrt(size.dimension)
    truths = rng.standard_normal(size.dimension) + SPREAD * rng.standard_normal((size.nodes, size.dimension))
    y = np.where(np.einsum("ind,id->in", x, truths) >= 0, 1.0, -1.0)
    problem = LinearProblem(size, x.reshape(-1, size.dimension), y.reshape(-1), seed)
    sets = feasible_sets(problem.x, problem.y, problem.partition)
    svm, start = hard_margin(sets), rng.standard_normal(size.dimension)
    return Classified(problem, sets, svm, start * np.linalg.norm(svm) / np.linalg.norm(start))


def _simulated_rounds(case: Classified, modified: bool) -> Verdict:
    """Compares the simulated global model after the last round with theory, whose nodes minimise eq. (12) exactly.

    The simulated nodes take many steps on this regularised loss. The algorithm is Local-GD, or Modified Local-GD
    (algorithm 3 of the paper) if ``modified``.
    """
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
    """Checks Lemma 2 of Local-GD after three rounds: ``w - ln(1/lambda) w_bar`` grows as ``ln ln(1/lambda)``.

    So it changes as much in the last decade of ln(1/lambda) as in the first. w is the model of Local-GD with local
    regularisation of weight lambda, and w_bar the model of repeated projections onto the nodes' feasible sets.
    """
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
    """Checks that log ``values`` against log ``over`` has the slope ``exponent``, and that the control has another."""
    slope, other = (log_slope(over, v) for v in (values, control[1]))
    notices = f"power x {1 - MARGIN:g}"
    return claim.near(slope, (control[0], other), MARGIN, notices, target=exponent, formats=(".2f", ".2f"))


def _lemma_2_direction(case: Classified) -> Verdict:
    """Checks Local-GD, eq. (14), after three rounds: its model has nearly the direction of the projections' model.

    The distance between the directions falls as ``ln ln(1/lambda) / ln(1/lambda)``; lambda is the weight of the local
    regularisation.
    """
    models = case._weak_models(FEW_ROUNDS)
    plain, modified = (direction_distance(models, case._projections(FEW_ROUNDS, m)[-1]) for m in (False, True))
    statement = "distance in direction from the projections, against ln ln(1/lambda) / ln(1/lambda): slope"
    claim = Claim("Local-GD Lemma 2, (14)", statement, _few_rounds(case))
    # 1 / ln(1/lambda) would have slope 1.1 over these values of lambda: the two cannot be told apart
    return _power_law(claim, np.log(LEVELS) / LEVELS, plain, ("the projections of eq. (16)", modified), 1.0)


def _lemma_3(case: Classified, from_zero: bool) -> Verdict:
    """Checks Lemma 3 of Local-GD: averaged projections end in every feasible set (all margins reach 1).

    The run has 1000 rounds. The start is 0 if ``from_zero``, otherwise a random model.
    """
    start, violations = None if from_zero else case.start, {}
    for name, weights in (("", "uniform"), ("a node missing", case.problem.size.without_last())):
        end = parallel_projections(case.sets, ROUNDS, start=start, weights=weights)[-1]
        violations[name] = float(1 - case.sets.margins(end).min())
    begin = "0" if from_zero else "elsewhere"
    statement = f"the mean of projections ends in all feasible sets: largest 1 - y x'w, from {begin}"
    claim = Claim("Local-GD Lemma 3", statement, f"{case.problem.size}, {ROUNDS} rounds")
    return claim.exact(max(violations.pop(""), 0.0), violations)


def _theorem_2(case: Classified) -> Verdict:
    """Checks Theorem 2 of Local-GD: the model's direction tends to the limit of averaged projections on feasible sets.

    Both are compared after 1000 rounds, where the distance falls as ``ln ln(1/lambda) / ln(1/lambda)``. The control is
    the direction of the hard-margin SVM, to which the model's direction must not tend.
    """
    models = case._weak_models(ROUNDS)
    statement = "distance in direction from the projections' end point, against ln ln(1/lambda) / ln(1/lambda): slope"
    sizes = f"{case.problem.size}, {ROUNDS} rounds, ln(1/lambda) = {LEVELS[0]:.0e} to {LEVELS[-1]:.0e}"
    distance = direction_distance(models, case._projections(ROUNDS)[-1])
    control = "the SVM", direction_distance(models, case.svm)
    return _power_law(Claim("Local-GD Theorem 2", statement, sizes), np.log(LEVELS) / LEVELS, distance, control, 1.0)


def _theorem_3(case: Classified) -> Verdict:
    """Checks Local-GD's Theorem 3: Modified Local-GD's projections tend to the SVM's direction, as 1 / k in round k."""
    plain, modified = (direction_distance(case._projections(ROUNDS, m)[LATE], case.svm) for m in (False, True))
    statement = "Modified Local-GD's distance in direction from the SVM, against the round: slope"
    claim = Claim("Local-GD Theorem 3", statement, f"{case.problem.size}, rounds {LATE[0]} to {LATE[-1]}")
    return _power_law(claim, LATE, modified, ("the plain mean", plain), -1.0)


def _lemma_4(case: Classified) -> Verdict:
    """Checks Local-GD's Lemma 4: averaged projections converge if each round mixes them with the start, by eq. (16).

    The limit is the feasible point nearest the start; the distance from it falls as 1 / k in round k.
    """
    nearest = np.asarray(project(case.sets.pooled(), case.start).point[0])
    path = case._projections(ROUNDS, modified=True, start=case.start)[LATE]
    distance, from_svm = (np.linalg.norm(path - point, axis=1) for point in (nearest, case.svm))
    statement = "distance from the feasible point nearest to the start, against the round: slope"
    sizes = f"{case.problem.size}, rounds {LATE[0]} to {LATE[-1]}, a start as far from 0 as the SVM"
    claim = Claim("Local-GD Lemma 4", statement, sizes)
    return _power_law(claim, LATE, distance, ("distance from the SVM", from_svm), -1.0)


def _check_max_margin(scale: str, seed: int) -> list[Verdict]:
    """Checks the limits of Local-GD on separable classes: Lemmas 2 to 4 and Theorems 2 and 3 of its paper.

    With weak regularisation Local-GD follows repeated projections: each node projects the global model onto the models
    that separate its examples with margin 1, and the server averages the projections. These averages should end in the
    intersection of all nodes' sets, and the averages of Modified Local-GD (eq. (16)) at the support vector machine's
    model.

    Args:
        scale: Scale of the check, which sets the sizes of the problem.
        seed: Seed of the problem.
    """
    case = _classification(of_scale(scale, *SIZES), seed)
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
        "local_gd.regression",
        "every round of a linear regression in closed form, its limit, and its rate towards the centralised model",
        _check_regression,
        papers=("localgd",),
        statement="Lemma 1 and Theorem 1 of Local-GD",
        functions=(local_regression, local_theorem_1, minimum_norm),
        figures=("local_gd.fig1a", "local_gd.fig1b", "local_gd.fig1c", "local_gd.participation"),
        is_quick=True,
    ),
    TheoremEntry(
        "local_gd.max_margin",
        "separable classification: local max-margin models; their mean ends feasible, the modified one at the SVM",
        _check_max_margin,
        papers=("localgd",),
        statement="Lemmas 2, 3 and 4, Theorems 2 and 3 of Local-GD",
        functions=(hard_margin, feasible_sets, parallel_projections, halpern, exponential_models, direction_distance),
        figures=("local_gd.fig1d", "local_gd.lambda_rate"),
    ),
)
