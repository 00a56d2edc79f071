"""Products and averages of exponentials to second order in the step: Lemmas 9.2 and 9.3 of FE-2021.

Both lemmas say how far federated training is from one exponential of the summed operators: rounds do not commute
(9.2), and the clients of a round differ (9.3). A third term of the same order belongs to gradient descent itself,
which is not the gradient flow that the papers put in its place:

    (I - h A / T)^T = exp(-h A) - h^2 / (2 T) A^2 + O(h^3),      h = eta T,

from ``T log(1 - x) = -T x - T x^2 / 2 - ...`` at ``x = h A / T``. Everything is NumPy float64 on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import expm

from fedtangent.kernels.gram import check_finite
from fedtangent.theory.checks import check_real, check_real_number

DYNAMICS = ("flow", "descent")


class Expansion(NamedTuple):
    """An operator to second order in the step: ``total`` is off by a term of third order."""

    first_order: np.ndarray  # [n, n], one exponential
    second_order: np.ndarray  # [n, n], what the lemma adds; proportional to the step's square

    @property
    def total(self) -> np.ndarray:
        """Both together, [n, n]."""
        return self.first_order + self.second_order


def commutator(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``[A, B] = A B - B A``, [n, n]."""
    return a @ b - b @ a


def commutator_sum(operators: Sequence[np.ndarray]) -> np.ndarray:
    """``sum_{i > j} [A_i, A_j]`` of Lemma 9.2 for operators in the order in which they act, [n, n].

    Costs K products, not K^2: operator i meets the sum of those before it.
    """
    total, before = np.zeros_like(operators[0]), np.array(operators[0])  # a copy: it grows
    for operator in operators[1:]:
        total += commutator(operator, before)
        before += operator
    return total


def variance(operators: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """``Var(A) = sum_i p_i A_i^2 - (sum_i p_i A_i)^2`` of Lemma 9.3, [n, n]; weights as given (they sum to 1)."""
    mean, square = np.zeros_like(operators[0]), np.zeros_like(operators[0])
    for p, a in zip(weights, operators, strict=True):
        mean += p * a
        square += p * a @ a
    return square - mean @ mean


def exponential_product(operators: Any, step: float) -> Expansion:
    """Lemma 9.2 of FE-2021, eq. (9): ``e^{-h A_K} ... e^{-h A_1}`` by one exponential of the sum.

    ``first_order = e^{-h (A_1 + ... + A_K)}`` and ``second_order = h^2/2 sum_{i > j} [A_i, A_j]``, where A_1 acts
    first; ``h = eta tau``. (The page calls the remainder o(eta tau^2) once; it is o(eta^2 tau^2), as in the proof.)

    Args:
        operators: [K, n, n], the first to act first.
        step: h, a number.

    Raises:
        ValueError: operators that are not square matrices of one size, or not finite.
    """
    a = _operators(operators)
    check_real_number("step", step)
    return Expansion(expm(-step * a.sum(axis=0)), 0.5 * step**2 * commutator_sum(list(a)))


def exponential_average(operators: Any, weights: Any, step: float) -> Expansion:
    """Lemma 9.3 of FE-2021, eq. (10): ``sum_i p_i e^{-h A_i}`` by the exponential of the average.

    ``first_order = e^{-h sum_i p_i A_i}`` and ``second_order = h^2/2 Var(A)``.

    Args:
        operators: [N, n, n].
        weights: [N], non-negative, summing to 1.
        step: h = eta tau, a number.

    Raises:
        ValueError: operators that are not square matrices of one size, or not finite; weights that do not fit.
    """
    a, p = _operators(operators), check_real("weights", weights)
    if p.shape != (len(a),) or not (np.all(p >= 0) and abs(p.sum() - 1) <= 1e-12):
        raise ValueError(f"weights must be [{len(a)}], >= 0 and sum to 1, got shape {p.shape} and sum {p.sum():.6g}")
    mean = np.einsum("i,ijk->jk", p, a)
    check_real_number("step", step)
    return Expansion(expm(-step * mean), 0.5 * step**2 * variance(list(a), p.tolist()))


def _operators(operators: Any) -> np.ndarray:
    a = check_real("operators", operators)
    if a.ndim != 3 or a.shape[1] != a.shape[2] or 0 in a.shape:
        raise ValueError(f"operators must be [K, n, n] with K, n >= 1, got shape {a.shape}")
    check_finite("operators", a)
    return a
