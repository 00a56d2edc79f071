"""Lemmas 9.2 and 9.3 and eq. (13)-(14) of FE-2021: the order of each error in the step size, by fitted slopes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Float64, Int

from fedtangent._src.comparison.statistics import log_slope
from fedtangent._src.comparison.theorems import entries, of_scale
from fedtangent._src.comparison.theorems.claims import Claim
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.theory.fed_ensemble import second_order as theory
from fedtangent._src.theory.fed_ensemble.convergence import Curvature
from fedtangent._src.types import Cohort, Partition

STEPS = np.array([1e-2, 5e-3, 2.5e-3, 1.25e-3])
BAND = 0.1  # of a fitted slope
NUM_MODELS, NUM_FEATURES = 3, 40  # of ``_federation``
Operators = list[np.ndarray]  # [n, n], one for each of STEPS


class RandomFederation(NamedTuple):
    """A kernel, clients of unequal sizes and steps, and which model each of them trains in the rounds of an age."""

    theta: Float64[np.ndarray, "n n"]
    rows: tuple[Int[np.ndarray, "_"], ...]  # kernel rows of each client
    model: Int[np.ndarray, "K N"]  # which model client i trains in round r
    steps: Int[np.ndarray, "N"]

    @property
    def partition(self) -> Partition:
        """The clients' rows as a ``Partition``."""
        offsets = np.cumsum([0] + [len(r) for r in self.rows]).astype(np.int32)
        return Partition(np.concatenate(self.rows).astype(np.int32), offsets)

    @property
    def cohorts(self) -> Cohort:
        """The cohorts of an age: all clients in every round, weighted by examples."""
        sizes = np.array([len(r) for r in self.rows], float)
        client = np.broadcast_to(np.arange(len(self.rows)), self.model.shape)
        return Cohort(client, self.model, np.broadcast_to(sizes, self.model.shape))  # type: ignore[arg-type]

    @property
    def constants(self) -> Curvature:
        """The constants of Theorem 9.1; C_2 is the sum over clients of C_i = sqrt(trace Theta_ii)."""
        return Curvature(float(sum(np.sqrt(np.trace(self.theta[np.ix_(r, r)])) for r in self.rows)))

    def true_age(
        self, rate: float, dynamics: str = "gradient_descent", trained_model: int = 0
    ) -> Float64[np.ndarray, "n n"]:
        """Computes the matrix that takes a model's residual from the start to the end of an age, without ``theory``.

        An age is the K rounds in which every client trains every model once. The clients' matrices are multiplied round
        by round.

        Args:
            rate: Learning rate of the clients.
            dynamics: "gradient_descent" or "gradient_flow".
            trained_model: Number of the model.
        """
        n = len(self.theta)
        product = np.eye(n)
        for models in self.model:
            cohort = [i for i, k in enumerate(models) if k == trained_model]
            total = sum(len(self.rows[i]) for i in cohort)
            round_ = np.zeros((n, n)) if cohort else np.eye(n)
            for i in cohort:
                gram, tau = np.zeros((n, n)), int(self.steps[i])
                gram[:, self.rows[i]] = self.theta[:, self.rows[i]] / len(self.rows[i])
                if dynamics == "gradient_flow":
                    trained = scipy.linalg.expm(-rate * tau * gram)
                else:
                    trained = np.linalg.matrix_power(np.eye(n) - rate * gram, tau)
                round_ += len(self.rows[i]) / total * trained
            product = round_ @ product
        return product


def _federation(scale: str, seed: int) -> RandomFederation:
    """Draws a federation of clients of unequal sizes, with the kernel of random features."""
    sizes = of_scale(scale, (3, 1, 5, 2, 3), (8, 3, 12, 6, 9, 2, 10))
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    features = rng.standard_normal((n, NUM_FEATURES)) / np.sqrt(NUM_FEATURES)
    rows = tuple(np.split(rng.permutation(n), np.cumsum(sizes)[:-1]))
    orders = np.array([rng.permutation(NUM_MODELS) for _ in sizes])
    return RandomFederation(features @ features.T, rows, orders.T, rng.integers(2, 6, len(sizes)))


def _checks(scale: str, seed: int) -> list[Verdict]:
    """Checks every statement on second-order terms."""
    case = _federation(scale, seed)
    where = f"n = {len(case.theta)}, {len(case.rows)} clients, K = {NUM_MODELS}, steps {STEPS[-1]:g} .. {STEPS[0]:g}"
    return [*_lemmas(case, where, seed), *_ages(case, where)]


def least_noticed(notices: Callable[[float], bool]) -> float:
    """Finds the least relative error up to 1 for which ``notices(error)`` is true, to 2 %; inf if it is never true."""
    low, high = 1e-9, 1.0
    if not notices(high):
        return np.inf
    while high > 1.02 * low:
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if notices(middle) else (middle, high)
    return high


class Orders(NamedTuple):
    """An operator, its first- and second-order approximations, and a wrong second-order one."""

    true: Operators
    first: Operators
    total: Operators
    wrong: Operators


def _row(claim: Claim, operators: Orders, control: str) -> Verdict:
    def slope(approximation: Operators) -> float:
        pairs = zip(operators.true, approximation, strict=True)
        return log_slope(STEPS, [float(np.linalg.norm(a - b)) for a, b in pairs])

    def notices(error: float) -> bool:
        pairs = zip(operators.total, operators.first, strict=True)
        return abs(slope([t + error * (t - f) for t, f in pairs]) - 3) >= BAND

    two, three, other = slope(operators.first), slope(operators.total), slope(operators.wrong)
    return claim.judged(
        (f"slopes {two:.3f}, {three:.3f}", f"2, 3 (+- {BAND:g})", abs(two - 2) < BAND and abs(three - 3) < BAND),
        (control, f"slope {other:.3f}", abs(other - 3) >= BAND),
        f"second-order terms x {1 + least_noticed(notices):.4f}",
    )


def _lemmas(case: RandomFederation, where: str, seed: int) -> list[Verdict]:
    rng, n = np.random.default_rng(seed), len(case.theta)
    several = rng.standard_normal((4, n, n)) / np.sqrt(n)
    weights = rng.dirichlet(np.ones(4))
    products, averages = [], []
    for h in STEPS:
        exponentials = [scipy.linalg.expm(-h * a) for a in several]
        products.append(functools.reduce(lambda whole, one: one @ whole, exponentials, np.eye(n)))
        averages.append(np.asarray(sum(p * one for p, one in zip(weights, exponentials, strict=True))))
    pair = [theory.exponential_product(several, h) for h in STEPS.tolist()]
    mean = [theory.exponential_average(several, weights, h) for h in STEPS.tolist()]
    other_sign = [p.first_order - p.second_order for p in pair]
    twice = [m.first_order + 2 * m.second_order for m in mean]
    sizes = f"4 random operators, {where}"
    product = "product of exponentials - exponential of the sum: slope in the step, then with the commutators"
    average = "average of exponentials - exponential of the average: slope in the step, then with Var"
    rows = {
        Claim("FE-2021 Lemma 9.2", product, sizes): (pair, products, other_sign, "commutators of the other sign"),
        Claim("FE-2021 Lemma 9.3", average, sizes): (mean, averages, twice, "without the factor 1/2"),
    }
    return [
        _row(claim, Orders(true, [t.first_order for t in terms], [t.total for t in terms], wrong), control)
        for claim, (terms, true, wrong, control) in rows.items()
    ]


def _ages(case: RandomFederation, where: str) -> list[Verdict]:
    kinds = "gradient_flow", "gradient_descent"
    flow, descent = ([case.true_age(h, dynamics) for h in STEPS.tolist()] for dynamics in kinds)
    ages: list[theory.Age] = [
        theory.age_operators(case.theta, case.partition, case.cohorts, case.steps, h) for h in STEPS.tolist()
    ]  # of model 0
    by_flow, by_descent = ([theory.expansion(age, dynamics) for age in ages] for dynamics in kinds)
    first, total = [e.first_order for e in by_flow], [e.total for e in by_flow]
    no_variance = [f + 0.5 * theory.commutator_sum(list(age.means)) for f, age in zip(first, ages, strict=True)]
    product, printed = ([theory.equation_13(age, order=order) for age in ages] for order in ("acting", "printed"))
    errors = "one age - first-order exponential: slope in the step, then with Var and commutators"
    discrete = f"{errors} and -eta^2 tau E[Pi^2] / 2"
    one_var = "first-order exponential, then the product with one Var at a time"
    rows = [
        ("section 9.2", f"gradient flow, {errors}", "Var dropped", Orders(flow, first, total, no_variance)),
        (
            "section 9.2",
            f"gradient descent, {discrete}",
            "gradient flow's terms",
            Orders(descent, first, [e.total for e in by_descent], total),
        ),
        ("eq. (13)", one_var, "order of factors as printed", Orders(flow, first, product, printed)),
        (
            "eq. (14)",
            "first-order exponential, then U",
            "U without its second-order terms",
            Orders(flow, first, [theory.operator_u(age) for age in ages], first),
        ),
    ]
    verdicts = [
        _row(Claim(f"FE-2021 {place}", statement, where), orders, control) for place, statement, control, orders in rows
    ]
    measured = [t - f for t, f in zip(flow, first, strict=True)]
    without = [w - f for w, f in zip(no_variance, first, strict=True)]
    return [*verdicts, _predicted_error(where, measured, [e.second_order for e in by_flow], without)]


def _predicted_error(where: str, measured: Operators, terms: Operators, wrong: Operators) -> Verdict:
    """Checks that the second-order terms equal the measured difference, to a relative error that falls as the step."""

    def errors(terms: Operators, factor: float = 1.0) -> list[float]:
        pairs = zip(terms, measured, strict=True)
        return [float(np.linalg.norm(factor * t - m) / np.linalg.norm(m)) for t, m in pairs]

    def slope(errors: list[float]) -> float:
        return log_slope(STEPS, errors)

    right, other = errors(terms), errors(wrong)
    noticed = least_noticed(lambda error: abs(slope(errors(terms, 1 + error)) - 1) >= BAND)
    measured_error = f"{right[-1]:.1e} at step {STEPS[-1]:g}, slope {slope(right):.3f}"
    return Claim(
        "FE-2021 section 9.2",
        "second-order terms against the measured difference: relative error and its slope in the step",
        where,
    ).judged(
        (measured_error, f"slope 1 (+- {BAND:g})", abs(slope(right) - 1) < BAND),
        ("Var dropped", f"{other[-1]:.2f}, slope {slope(other):.3f}", abs(slope(other) - 1) >= BAND),
        f"second-order terms x {1 + noticed:.4f}",
    )


ENTRIES = entries(
    _checks,
    "variance of the clients' operators and commutators: orders in the step size",
    papers=("shi2021",),
    statement="Lemmas 9.2 and 9.3, eq. (13) and (14) of FE-2021",
    functions=(theory.expansion, theory.age_operators, theory.exponential_average, theory.exponential_product),
)
