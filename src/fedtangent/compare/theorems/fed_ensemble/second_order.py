"""Lemmas 9.2 and 9.3 and eq. (13)-(14) of FE-2021: orders in the step size, with wrong terms beside the right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.linalg import expm

from fedtangent.compare.theorems import TheoremEntry, of_scale
from fedtangent.compare.verdicts import Verdict
from fedtangent.theory.fed_ensemble.second_order import (
    Age,
    age_operators,
    commutator_sum,
    equation_13,
    expansion,
    exponential_average,
    exponential_product,
    operator_u,
)
from fedtangent.types import Cohort, Partition

STEPS = np.array([1e-2, 5e-3, 2.5e-3, 1.25e-3])
BAND = 0.1  # of a fitted slope
Approximation = Callable[[float], np.ndarray]


class RandomFederation(NamedTuple):
    """A random federation: kernel, clients of unequal sizes and steps, and the models that each trains in an age."""

    theta: np.ndarray  # [n, n]
    rows: tuple[np.ndarray, ...]  # of each client
    model: np.ndarray  # [K, N], which model client i trains in round r
    steps: np.ndarray  # [N]

    @property
    def partition(self) -> Partition:
        """The clients' rows as the theory takes them."""
        offsets = np.cumsum([0] + [len(r) for r in self.rows]).astype(np.int32)
        return Partition(np.concatenate(self.rows).astype(np.int32), offsets)

    @property
    def cohorts(self) -> Cohort:
        """All clients in every round, weighted by examples."""
        sizes = np.array([len(r) for r in self.rows], float)
        client = np.broadcast_to(np.arange(len(self.rows)), self.model.shape)
        return Cohort(client, self.model, np.broadcast_to(sizes, self.model.shape))  # type: ignore[arg-type]

    def age(self, rate: float) -> Age:
        """The theory's operators of model 0."""
        return age_operators(self.theta, self.partition, self.cohorts, self.steps, rate)

    def true_age(self, rate: float, dynamics: str) -> np.ndarray:
        """What one age does to model 0's residual, [n, n], client by client: no expansion, nothing of the theory's."""
        n = len(self.theta)
        product = np.eye(n)
        for models in self.model:
            mine = [i for i, k in enumerate(models) if k == 0]
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


def random_federation(scale: str, seed: int, num_models: int = 3, num_features: int = 40) -> RandomFederation:
    """A federation of clients of unequal sizes, whose points have random features."""
    sizes = of_scale(scale, (3, 1, 5, 2, 3), (8, 3, 12, 6, 9, 2, 10))
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    features = rng.standard_normal((n, num_features)) / np.sqrt(num_features)
    rows = tuple(np.split(rng.permutation(n), np.cumsum(sizes)[:-1]))
    orders = np.array([rng.permutation(num_models) for _ in sizes])
    return RandomFederation(features @ features.T, rows, orders.T, rng.integers(2, 6, len(sizes)))


def slope(steps: np.ndarray, errors: list[float]) -> float:
    """Least-squares slope of log error against log step."""
    return float(np.polyfit(np.log(steps), np.log(errors), 1)[0])


def checks(scale: str, seed: int) -> list[Verdict]:
    """Every statement on the second-order terms."""
    case = random_federation(scale, seed)
    where = f"n = {len(case.theta)}, {len(case.rows)} clients, K = 3, steps {STEPS[-1]:g} .. {STEPS[0]:g}"
    return [*_lemmas(case, where, seed), *_ages(case, where)]


def _errors(true: Approximation, found: Approximation) -> list[float]:
    return [float(np.linalg.norm(true(h) - found(h))) for h in STEPS.tolist()]


def _row(
    theorem: str, statement: str, where: str, true: Approximation, first: Approximation, total: Approximation,
    control: str, wrong: Approximation,
) -> Verdict:  # fmt: skip
    two, three, other = (slope(STEPS, _errors(true, f)) for f in (first, total, wrong))
    return Verdict.of(
        theorem,
        statement,
        where,
        (f"slopes {two:.3f}, {three:.3f}", f"2, 3 (+- {BAND:g})", abs(two - 2) < BAND and abs(three - 3) < BAND),
        (control, f"slope {other:.3f}", abs(other - 3) >= BAND),
    )


def _lemmas(case: RandomFederation, where: str, seed: int) -> list[Verdict]:
    rng = np.random.default_rng(seed)
    several = rng.standard_normal((4, len(case.theta), len(case.theta))) / np.sqrt(len(case.theta))
    weights = rng.dirichlet(np.ones(4))

    def product(h: float) -> np.ndarray:
        whole = np.eye(len(case.theta))
        for a in several:
            whole = expm(-h * a) @ whole
        return whole

    def average(h: float) -> np.ndarray:
        return np.asarray(sum(p * expm(-h * a) for p, a in zip(weights, several, strict=True)))

    pair = lambda h: exponential_product(several, h)  # noqa: E731
    mean = lambda h: exponential_average(several, weights, h)  # noqa: E731
    return [
        _row(
            "FE-2021 Lemma 9.2",
            "product of exponentials - exponential of the sum: slope in the step, then with the commutators",
            f"4 random operators, {where}",
            product,
            lambda h: pair(h).first_order,
            lambda h: pair(h).total,
            "commutators of the other sign",
            lambda h: pair(h).first_order - pair(h).second_order,
        ),
        _row(
            "FE-2021 Lemma 9.3",
            "average of exponentials - exponential of the average: slope in the step, then with Var",
            f"4 random operators, {where}",
            average,
            lambda h: mean(h).first_order,
            lambda h: mean(h).total,
            "without the factor 1/2",
            lambda h: mean(h).first_order + 2 * mean(h).second_order,
        ),
    ]


def _ages(case: RandomFederation, where: str) -> list[Verdict]:
    def flow(h: float) -> np.ndarray:
        return case.true_age(h, "gradient_flow")

    def descent(h: float) -> np.ndarray:
        return case.true_age(h, "gradient_descent")

    def first(h: float) -> np.ndarray:
        return expansion(case.age(h)).first_order

    def without_variance(h: float) -> np.ndarray:
        return first(h) + 0.5 * commutator_sum(list(case.age(h).means))

    what = "one age - first-order exponential: slope in the step, then with Var and commutators"
    return [
        _row("FE-2021 section 9.2", f"gradient flow, {what}", where, flow, first,
             lambda h: expansion(case.age(h)).total, "Var dropped", without_variance),
        _row("FE-2021 section 9.2", f"gradient descent, {what} and -eta^2 tau E[Pi^2] / 2", where, descent, first,
             lambda h: expansion(case.age(h), "gradient_descent").total, "gradient flow's terms",
             lambda h: expansion(case.age(h)).total),
        _row("FE-2021 eq. (13)", "first-order exponential, then the product with one Var at a time", where, flow, first,
             lambda h: equation_13(case.age(h)), "order of factors as printed",
             lambda h: equation_13(case.age(h), order="printed")),
        _row("FE-2021 eq. (14)", "first-order exponential, then U", where, flow, first,
             lambda h: operator_u(case.age(h)), "U without its second-order terms", first),
        _predicted_error(case, where, flow, without_variance),
    ]  # fmt: skip


def _predicted_error(case: RandomFederation, where: str, true: Approximation, wrong: Approximation) -> Verdict:
    """The second-order terms against the measured difference: relative error falls as the step."""

    def relative(terms: Approximation) -> list[float]:
        measured = [true(h) - expansion(case.age(h)).first_order for h in STEPS.tolist()]
        return [
            float(np.linalg.norm(terms(h) - m) / np.linalg.norm(m))
            for h, m in zip(STEPS.tolist(), measured, strict=True)
        ]

    right = relative(lambda h: expansion(case.age(h)).second_order)
    other = relative(lambda h: wrong(h) - expansion(case.age(h)).first_order)
    found, control = slope(STEPS, right), slope(STEPS, other)
    return Verdict.of(
        "FE-2021 section 9.2",
        "second-order terms against the measured difference: relative error and its slope in the step",
        where,
        (f"{right[-1]:.1e} at step {STEPS[-1]:g}, slope {found:.3f}", f"slope 1 (+- {BAND:g})", abs(found - 1) < BAND),
        ("Var dropped", f"{other[-1]:.2f}, slope {control:.3f}", abs(control - 1) >= BAND),
    )


ENTRIES = (
    TheoremEntry(
        "fed_ensemble.second_order",
        "variance of the clients' operators and commutators: orders in the step size",
        checks,
        papers=("shi2021",),
        statement="Lemmas 9.2 and 9.3, eq. (13) and (14) of FE-2021",
    ),
)
