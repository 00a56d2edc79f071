"""The assumptions of FE-2024's Theorem 1 (4.1 and 9.1 of FE-2021), measured on a run.

They are the assumptions of Theorem 4.1 (i)-(iv), of Lemma 9.1 and of Theorem 9.1 of FE-2021, and further assumptions
that the proof uses without naming them (erratum `fe2021.assumptions`). An age is a number of rounds in which every
client trains each model once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int

from fedtangent._src.checks import real_array, symmetric, whole
from fedtangent._src.theory import checks
from fedtangent._src.theory.checks import ROUNDING, Assumption, assumption
from fedtangent._src.theory.flow.rules import Rule, check_fed_avg
from fedtangent._src.types import ArrayLike, Cohort, Partition

SAME_GRADIENT = 1e-8  # of the initial one: half of float64's digits, as a norm is the root of a quadratic form


class AgePlan(NamedTuple):
    """A run divided into ages of ``rounds_per_age`` rounds, in which every client should train each model once.

    ``examples`` [R, K] counts the examples of the clients that train each model in each round, ``visits`` [A, K, N] how
    often each client trains each model in each of the A ages. ``weight_error`` is the largest difference of a client's
    weight from its share of the examples. ``steps`` are local steps of the clients, ``rates`` step sizes of the rounds.
    ``trains`` says which clients train in any round.
    """

    rounds_per_age: int
    num_models: int
    examples: Float64[np.ndarray, "R K"]  # examples of the clients that train a model in a round
    visits: Int[np.ndarray, "A K N"]  # how often a client trains a model in an age
    weight_error: Float64[np.ndarray, "R K"]  # largest |p_i - n_i / sum n_i| over the clients of a model in a round
    steps: Int[np.ndarray, "N"]  # local steps
    rates: Float64[np.ndarray, "R"]  # step sizes
    trains: Bool[np.ndarray, "N"]  # whether the client trains in any round

    @property
    def num_ages(self) -> int:
        """Number A of whole ages, groups of ``rounds_per_age`` rounds; further rounds at the end belong to no age."""
        return len(self.visits)

    @property
    def least_progress(self) -> Float64[np.ndarray, "A"]:
        """Least step size of each age times the least number of local steps of any client that trains, [A]."""
        ages = self.rates[: self.num_ages * self.rounds_per_age].reshape(self.num_ages, -1)
        return ages.min(axis=1) * self.steps[self.trains].min()

    @property
    def most_progress(self) -> float:
        """Largest step size of any round times the largest number of local steps of any client that trains."""
        return float(self.rates.max() * self.steps[self.trains].max())


def age_plan(
    partition: Partition, cohorts: Cohort, rule: Rule, num_models: int | None, rounds_per_age: int | None
) -> AgePlan:
    """Divides a run of R rounds into ages, in which every client should train each model once.

    Args:
        partition: Training rows of each client.
        cohorts: Client, model and weight of every slot (place for a client in a round).
        rule: Rule of plain FedAvg.
        num_models: Number K of models; by default one more than the largest model index in use.
        rounds_per_age: Rounds of an age; K by default.

    Raises:
        ValueError: A rule other than plain FedAvg, cohorts that do not fit the partition, or numbers out of range.
    """
    check_fed_avg(rule)
    sizes = np.asarray(partition.sizes)
    client, model, num_models = checks.check_cohorts(cohorts, sizes, num_models)
    num_rounds = len(client)
    length = whole("rounds_per_age", num_models if rounds_per_age is None else rounds_per_age, 1, num_rounds)
    steps = checks.check_steps(rule.local_steps, partition.num_clients)
    checks.check_rate("learning_rate", rule.learning_rate, num_rounds)
    rates = np.broadcast_to(np.asarray(rule.learning_rate, np.float64), (num_rounds,))
    weight = np.where(checks.present_slots(cohorts), np.asarray(cohorts.weight, np.float64), 0.0)
    count = np.where(weight > 0, sizes[client], 0).astype(float)
    rounds = np.broadcast_to(np.arange(num_rounds)[:, None], client.shape)

    def totals(values: np.ndarray) -> np.ndarray:
        table = np.zeros((num_rounds, num_models))
        np.add.at(table, (rounds, model), values)
        return table

    examples, weights = totals(count), totals(weight)
    share = weight / np.maximum(weights[rounds, model], np.finfo(float).tiny)
    by_size = count / np.maximum(examples[rounds, model], 1.0)
    error = np.zeros((num_rounds, num_models))
    np.maximum.at(error, (rounds, model), np.abs(share - by_size))
    ages = num_rounds // length
    visits = np.zeros((ages, num_models, partition.num_clients), np.int64)
    inside = (weight > 0) & (rounds < ages * length)
    np.add.at(visits, (rounds[inside] // length, model[inside], client[inside]), 1)
    trains = np.zeros(partition.num_clients, bool)
    trains[client[weight > 0]] = True
    if not trains.any():
        raise ValueError("cohorts.weight: got zeros only, must be above 0 in at least one slot")
    return AgePlan(length, num_models, examples, visits, error, steps, rates, trains)


class Theorem1Data(NamedTuple):
    """Kernel, residual, targets and schedule of a run, on which assumptions of FE-2024's Theorem 1 are measured.

    ``theta`` is the kernel of the training points with its ``eigenvalues``, rising, and eigenvectors ``vectors``.
    ``residual`` is the initial residual, ``y`` the targets and ``x`` the inputs, if known. ``plan`` divides the rounds
    into ages, and ``initial_kernel`` is a network's kernel that is compared with ``theta``.
    """

    theta: Float64[np.ndarray, "n n"]
    eigenvalues: Float64[np.ndarray, "n"]  # of theta, rising
    vectors: Float64[np.ndarray, "n n"]  # columns
    residual: Float64[np.ndarray, "K n C"]  # initial
    y: Float64[np.ndarray, "n C"]
    partition: Partition
    plan: AgePlan
    x: ArrayLike | None = None
    initial_kernel: ArrayLike | None = None


def assumptions(problem: Theorem1Data, kappa_2: float, kappa_3: float) -> tuple[Assumption, ...]:
    """Measures the assumptions of Theorem 1 of FE-2024 on a run.

    Args:
        problem: Data of the run.
        kappa_2: Bound of the residual's relative growth inside an age (rounds in which every client trains each model
            once) at the largest step (``Curvature.kappa_2``).
        kappa_3: Bound of the second-order effects of the largest step (``Curvature.kappa_3``).
    """
    return (*_of_the_kernel(problem), *_of_the_rounds(problem), *_of_the_step(problem, kappa_2, kappa_3))


def _of_the_kernel(problem: Theorem1Data) -> list[Assumption]:
    zero = len(problem.theta) * float(np.finfo(np.float64).eps) * float(problem.eigenvalues[-1])  # to rounding
    text = "(iii) largest gradient norm of a client at a global minimum, relative to the initial one"
    conditions = [
        assumption("full_rank", "(i) lambda_min(Theta), above rounding", problem.eigenvalues[0], ">", zero),
        assumption("stationary_points_coincide", text, _local_gradient(problem, zero), "<=", SAME_GRADIENT),
    ]
    if problem.x is not None:
        conditions += _of_the_inputs(problem)
    if problem.initial_kernel is not None:
        kernel = symmetric("initial_kernel", problem.initial_kernel)
        checks.check_shape("initial_kernel", kernel, problem.theta.shape)
        text = "9.1 (2), width: operator norm of Theta_0 - Theta against lambda_m / 3"
        distance, third = float(np.linalg.norm(kernel - problem.theta, 2)), max(problem.eigenvalues[0], 0.0) / 3
        conditions.append(assumption("wide_enough", text, distance, "<=", third))
    return conditions


def _local_gradient(problem: Theorem1Data, zero: float) -> float:
    """Computes the largest norm of a client's gradient where training ends, divided by the largest norm at the start.

    Training ends at a global minimum, where only the residual's part in the kernel's null space is left. Eigenvalues up
    to ``zero`` count as 0.
    """
    null = problem.vectors[:, problem.eigenvalues <= zero]
    if null.shape[1] == 0:
        return 0.0
    # training cannot reach the part in Theta's null space; without null space every minimum fits all the data
    unreached = np.einsum("nz,mz,kmc->knc", null, null, problem.residual, optimize=True)
    start = _largest_gradient(problem, problem.residual)
    return _largest_gradient(problem, unreached) / start if start > 0 else 0.0


def _largest_gradient(problem: Theorem1Data, residual: Float64[np.ndarray, "K n C"]) -> float:
    largest = 0.0
    for i in np.flatnonzero(problem.plan.trains):
        rows = np.asarray(problem.partition.client(int(i)))
        local = residual[:, rows]
        square = np.einsum("knc,nm,kmc->k", local, problem.theta[np.ix_(rows, rows)], local, optimize=True)
        largest = max(largest, float(np.sqrt(max(square.max(), 0.0))) / len(rows))
    return largest


def _of_the_inputs(problem: Theorem1Data) -> list[Assumption]:
    x = real_array("x_train", problem.x)
    if x.ndim == 0 or len(x) != len(problem.theta):
        raise ValueError(f"x_train: got shape {x.shape}, must be of {len(problem.theta)} examples")
    x = x.reshape(len(x), -1)
    _, which = np.unique(x, axis=0, return_inverse=True)
    which = which.reshape(-1)
    spread = 0.0
    for same in np.flatnonzero(np.bincount(which) > 1):
        spread = max(spread, float(np.ptp(problem.y[which == same], axis=0).max()))
    norm = float(np.linalg.norm(x, axis=1).max())
    # Lemma 9.1 (i) prints "x_i != x_i', y_i != y_i'", which no classification task fulfils; the proof uses this.
    return [
        assumption("inputs_in_unit_ball", "(ii) largest norm of an input", norm, "<=", 1.0 + ROUNDING),
        assumption("consistent_data", "Lemma 9.1 (i): labels of equal inputs differ by", spread, "<=", 0.0),
    ]


def _of_the_rounds(problem: Theorem1Data) -> list[Assumption]:
    plan, partition = problem.plan, problem.partition
    used = plan.examples[: plan.num_ages * plan.rounds_per_age]
    once = float(np.mean(plan.visits[:, :, np.asarray(partition.sizes) > 0] != 1))
    shares = np.bincount(np.asarray(partition.indices, np.int64), minlength=len(problem.theta))
    steps, text = plan.steps[plan.trains], "sum_i Theta_i = Theta: examples of no or several clients"
    return [
        assumption("constant_examples_per_round", "(iv) examples of a model's round, max - min", np.ptp(used), "<=", 0),
        assumption("every_client_once_an_age", "eq. (27): share of ages without exactly one visit", once, "<=", 0),
        assumption("clients_divide_the_data", text, np.sum(shares != 1), "<=", 0),
        assumption("weights_by_examples", "largest |p_i - n_i / nbar|", plan.weight_error.max(), "<=", 1e-6),
        assumption("equal_local_steps", "tau, max - min over clients", np.ptp(steps), "<=", 0),
    ]


def _of_the_step(problem: Theorem1Data, kappa_2: float, kappa_3: float) -> list[Assumption]:
    plan, smallest = problem.plan, max(float(problem.eigenvalues[0]), 0.0)
    gain = float(np.expm1(plan.least_progress.min() * smallest / (6 * plan.examples.max())))
    largest = 0.0
    for i in np.flatnonzero(plan.trains):
        rows = np.asarray(problem.partition.client(int(i)))
        eigenvalue = np.linalg.eigvalsh(problem.theta[np.ix_(rows, rows)])[-1]
        largest = max(largest, float(plan.rates.max() * eigenvalue) / len(rows))
    return [
        assumption("kappa_2_below_1", "9.1 (1), eq. (26)", kappa_2, "<", 1.0),
        assumption("kappa_3_small", "(1 + kappa_3) e^(-u/2) <= e^(-u/3), last step of the proof", kappa_3, "<=", gain),
        assumption("stable_step", "gradient descent: eta lambda_max(Theta_ii) / n_i", largest, "<", 2.0),
    ]
