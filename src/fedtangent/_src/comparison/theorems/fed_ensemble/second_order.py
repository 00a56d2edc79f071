"""Lemmas 9.2 and 9.3 and eq. (13)-(14) of FE-2021: the order of each error in the step size, by fitted slopes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.linalg import expm

from fedtangent._src.comparison.theorems import TheoremEntry, of_scale
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.theory.fed_ensemble.second_order import (
    Age,
    age_operators,
    commutator_sum,
    equation_13,
    expansion,
    exponential_average,
    exponential_product,
    operator_u,
)
from fedtangent._src.types import Cohort, Partition

STEPS = np.array([1e-2, 5e-3, 2.5e-3, 1.25e-3])
BAND = 0.1  # of a fitted slope
NUM_MODELS, NUM_FEATURES = 3, 40  # of ``random_federation``
Operators = list[np.ndarray]  # [n, n], one for each of STEPS


class RandomFederation(NamedTuple):
    """A kernel, clients of unequal sizes and steps, and which model each of them trains in the rounds of an age."""

    theta: np.ndarray  # [n, n]
    rows: tuple[np.ndarray, ...]  # kernel rows of each client
    model: np.ndarray  # [K, N], which model client i trains in round r
    steps: np.ndarray  # [N]

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

    def age(self, rate: float) -> Age:
        """Computes the theory's operators of an age of model 0, at the learning rate ``rate``."""
        return age_operators(self.theta, self.partition, self.cohorts, self.steps, rate)

    def true_age(self, rate: float, dynamics: str = "gradient_descent", trained_model: int = 0) -> np.ndarray:
        """Computes the operator [n, n] of one age on a model's residual, client by client, not using ``theory``.

        Args:
            rate: Learning rate of the clients.
            dynamics: "gradient_descent" or "gradient_flow".
            trained_model: Number of the model.
        """
        n = len(self.theta)
        product = np.eye(n)
        for models in self.model:
            mine = [i for i, k in enumerate(models) if k == trained_model]
            total = sum(len(self.rows[i]) for i in mine)
            round_ = np.zeros((n, n)) if mine else np.eye(n)
            for i in mine:
                gram = np.zeros((n, n))
                gram[:, self.rows[i]] = self.theta[:, self.rows[i]] / len(self.rows[i])
                tau = int(self.steps[i])
                if dynamics == "gradient_flow":
                    trained = expm(-rate * tau * gram)
                else:
                    trained = np.linalg.matrix_power(np.eye(n) - rate * gram, tau)
                round_ += len(self.rows[i]) / total * trained
            product = round_ @ product
        return product


def random_federation(scale: str, seed: int) -> RandomFederation:
    """Draws a federation of clients of unequal sizes, with the kernel of random features."""
    sizes = of_scale(scale, (3, 1, 5, 2, 3), (8, 3, 12, 6, 9, 2, 10))
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    features = rng.standard_normal((n, NUM_FEATURES)) / np.sqrt(NUM_FEATURES)
    rows = tuple(np.split(rng.permutation(n), np.cumsum(sizes)[:-1]))
    orders = np.array([rng.permutation(NUM_MODELS) for _ in sizes])
    return RandomFederation(features @ features.T, rows, orders.T, rng.integers(2, 6, len(sizes)))


def checks(scale: str, seed: int) -> list[Verdict]:
    """Checks every statement on second-order terms."""
    case = random_federation(scale, seed)
    where = f"n = {len(case.theta)}, {len(case.rows)} clients, K = {NUM_MODELS}, steps {STEPS[-1]:g} .. {STEPS[0]:g}"
    return [*_lemmas(case, where, seed), *_ages(case, where)]


def slope_in_the_step(steps: np.ndarray, errors: list[float]) -> float:
    """Fits the least-squares slope of log error against log step."""
    return float(np.polyfit(np.log(steps), np.log(errors), 1)[0])


def least_noticed(notices: Callable[[float], bool]) -> float:
    """Finds the least relative error up to 1 for which ``notices(error)`` is true, to 2 %; inf if it is never true."""
    low, high = 1e-9, 1.0
    if not notices(high):
        return np.inf
    while high > 1.02 * low:
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if notices(middle) else (middle, high)
    return high


def _slope(errors: list[float]) -> float:
    return slope_in_the_step(STEPS, errors)


class Orders(NamedTuple):
    """An operator, its first- and second-order approximations, and a wrong second-order one."""

    true: Operators
    first: Operators
    total: Operators
    wrong: Operators


def _row(theorem: str, statement: str, where: str, of: Orders, control: str) -> Verdict:
    def slope(found: Operators) -> float:
        return _slope([float(np.linalg.norm(a - b)) for a, b in zip(of.true, found, strict=True)])

    def notices(error: float) -> bool:
        return abs(slope([t + error * (t - f) for t, f in zip(of.total, of.first, strict=True)]) - 3) >= BAND

    two, three, other = slope(of.first), slope(of.total), slope(of.wrong)
    return Verdict.of(
        theorem,
        statement,
        where,
        (f"slopes {two:.3f}, {three:.3f}", f"2, 3 (+- {BAND:g})", abs(two - 2) < BAND and abs(three - 3) < BAND),
        (control, f"slope {other:.3f}", abs(other - 3) >= BAND),
        f"second-order terms x {1 + least_noticed(notices):.4f}",
    )


def _lemmas(case: RandomFederation, where: str, seed: int) -> list[Verdict]:
    rng = np.random.default_rng(seed)
    several = rng.standard_normal((4, len(case.theta), len(case.theta))) / np.sqrt(len(case.theta))
    weights = rng.dirichlet(np.ones(4))
    products, averages = [], []
    for h in STEPS:
        exponentials = [expm(-h * a) for a in several]
        products.append(functools.reduce(lambda whole, one: one @ whole, exponentials, np.eye(len(case.theta))))
        averages.append(np.asarray(sum(p * one for p, one in zip(weights, exponentials, strict=True))))
    pair = [exponential_product(several, h) for h in STEPS.tolist()]
    mean = [exponential_average(several, weights, h) for h in STEPS.tolist()]
    other_sign = [p.first_order - p.second_order for p in pair]
    twice = [m.first_order + 2 * m.second_order for m in mean]
    return [
        _row(
            "FE-2021 Lemma 9.2",
            "product of exponentials - exponential of the sum: slope in the step, then with the commutators",
            f"4 random operators, {where}",
            Orders(products, [p.first_order for p in pair], [p.total for p in pair], other_sign),
            "commutators of the other sign",
        ),
        _row(
            "FE-2021 Lemma 9.3",
            "average of exponentials - exponential of the average: slope in the step, then with Var",
            f"4 random operators, {where}",
            Orders(averages, [m.first_order for m in mean], [m.total for m in mean], twice),
            "without the factor 1/2",
        ),
    ]


def _ages(case: RandomFederation, where: str) -> list[Verdict]:
    flow, descent = ([case.true_age(h, f"gradient_{way}") for h in STEPS.tolist()] for way in ("flow", "descent"))
    ages = [case.age(h) for h in STEPS.tolist()]
    by_flow, by_descent = ([expansion(age, f"gradient_{way}") for age in ages] for way in ("flow", "descent"))
    first, total = [e.first_order for e in by_flow], [e.total for e in by_flow]
    no_variance = [f + 0.5 * commutator_sum(list(age.means)) for f, age in zip(first, ages, strict=True)]
    product, printed = [equation_13(age) for age in ages], [equation_13(age, order="printed") for age in ages]
    what = "one age - first-order exponential: slope in the step, then with Var and commutators"
    rows = {
        ("section 9.2", f"gradient flow, {what}", "Var dropped"): Orders(flow, first, total, no_variance),
        ("section 9.2", f"gradient descent, {what} and -eta^2 tau E[Pi^2] / 2", "gradient flow's terms"): Orders(
            descent, first, [e.total for e in by_descent], total
        ),
        (
            "eq. (13)",
            "first-order exponential, then the product with one Var at a time",
            "order of factors as printed",
        ): Orders(flow, first, product, printed),
        ("eq. (14)", "first-order exponential, then U", "U without its second-order terms"): Orders(
            flow, first, [operator_u(age) for age in ages], first
        ),
    }
    found = [_row(f"FE-2021 {place}", said, where, of, control) for (place, said, control), of in rows.items()]
    terms = [e.second_order for e in by_flow], [w - f for w, f in zip(no_variance, first, strict=True)]
    return [*found, _predicted_error(where, [t - f for t, f in zip(flow, first, strict=True)], *terms)]


def _predicted_error(where: str, measured: Operators, terms: Operators, wrong: Operators) -> Verdict:
    """Checks that the second-order terms equal the measured difference, to a relative error that falls as the step."""

    def errors(of: Operators, factor: float = 1.0) -> list[float]:
        return [float(np.linalg.norm(factor * t - m) / np.linalg.norm(m)) for t, m in zip(of, measured, strict=True)]

    right, other = errors(terms), errors(wrong)
    found, control = _slope(right), _slope(other)
    noticed = least_noticed(lambda error: abs(_slope(errors(terms, 1 + error)) - 1) >= BAND)
    return Verdict.of(
        "FE-2021 section 9.2",
        "second-order terms against the measured difference: relative error and its slope in the step",
        where,
        (f"{right[-1]:.1e} at step {STEPS[-1]:g}, slope {found:.3f}", f"slope 1 (+- {BAND:g})", abs(found - 1) < BAND),
        ("Var dropped", f"{other[-1]:.2f}, slope {control:.3f}", abs(control - 1) >= BAND),
        f"second-order terms x {1 + noticed:.4f}",
    )


ENTRIES = (
    TheoremEntry(
        "fed_ensemble.second_order",
        "variance of the clients' operators and commutators: orders in the step size",
        checks,
        papers=("shi2021",),
        statement="Lemmas 9.2 and 9.3, eq. (13) and (14) of FE-2021",
        functions=(expansion, age_operators, exponential_average, exponential_product),
    ),
)
