"""Lemmas 9.2 and 9.3 and eq. (13)-(14) of FE-2021: orders in the step size, with wrong terms beside the right ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.linalg import expm

from fedtangent.compare.theorems import TheoremCheck
from fedtangent.compare.theorems._ages import Toy, slope, toy
from fedtangent.theory.fed_ensemble.second_order import (
    commutator_sum,
    equation_13,
    expansion,
    exponential_average,
    exponential_product,
    operator_u,
)

STEPS = np.array([1e-2, 5e-3, 2.5e-3, 1.25e-3])
BAND = 0.1  # of a fitted slope
Approximation = Callable[[float], np.ndarray]


def second_order_checks(scale: str, seed: int) -> list[TheoremCheck]:
    """Every statement on the second-order terms."""
    sizes = (3, 1, 5, 2, 3) if scale == "default" else (8, 3, 12, 6, 9, 2, 10)
    case = toy(seed, sizes, 3)
    where = f"n = {sum(sizes)}, {len(sizes)} clients, K = 3, steps {STEPS[-1]:g} .. {STEPS[0]:g}"
    return [*_lemmas(case, where, seed), *_ages(case, where)]


def _errors(true: Approximation, found: Approximation) -> list[float]:
    return [float(np.linalg.norm(true(h) - found(h))) for h in STEPS.tolist()]


def _row(
    theorem: str, statement: str, where: str, true: Approximation, first: Approximation, total: Approximation,
    control: str, wrong: Approximation,
) -> TheoremCheck:  # fmt: skip
    two, three, other = (slope(STEPS, _errors(true, f)) for f in (first, total, wrong))
    return TheoremCheck(
        theorem,
        statement,
        where,
        f"slopes {two:.3f}, {three:.3f}",
        f"2, 3 (+- {BAND:g})",
        abs(two - 2) < BAND and abs(three - 3) < BAND,
        f"{control}: slope {other:.3f}",
        abs(other - 3) >= BAND,
    )


def _lemmas(case: Toy, where: str, seed: int) -> list[TheoremCheck]:
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


def _ages(case: Toy, where: str) -> list[TheoremCheck]:
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


def _predicted_error(case: Toy, where: str, true: Approximation, wrong: Approximation) -> TheoremCheck:
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
    return TheoremCheck(
        "FE-2021 section 9.2",
        "second-order terms against the measured difference: relative error and its slope in the step",
        where,
        f"{right[-1]:.1e} at step {STEPS[-1]:g}, slope {found:.3f}",
        f"slope 1 (+- {BAND:g})",
        abs(found - 1) < BAND,
        f"Var dropped: {other[-1]:.2f}, slope {control:.3f}",
        abs(control - 1) >= BAND,
    )
