"""Federated training to second order in the step: Lemmas 9.2 and 9.3 of FE-2021, and its eq. (13)-(15).

Both lemmas compare federated training with a single exponential of the sum of all clients' operators: rounds do not
commute (9.2), and the clients of a round differ (9.3). A third term of the same order comes from gradient descent, for
which the papers substitute gradient flow (erratum `fe2021.flow`):

    (I - h A / T)^T = exp(-h A) - h^2 / (2 T) A^2 + O(h^3),      h = eta T,

from ``T log(1 - x) = -T x - T x^2 / 2 - ...`` at ``x = h A / T``.

For one age the operators are the Gram operators of section 9.2, which act on the residual at the training points,
``g = f(X) - Y`` [n]: client i's is ``Pi_i = Theta(X, X_i) P_i / n_i``. Local training of tau steps of size eta turns g
into ``e^{-eta tau Pi_i} g`` if it is gradient flow (the papers' approximation) and ``(I - eta Pi_i)^tau g`` if it is
gradient descent. Step sizes and numbers of steps are part of the operators here, ``A_i = eta tau_i Pi_i``, so clients
may take different numbers.

Everything is NumPy float64 on the host, O(n^3) for each round, for kernels that outputs share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Float64, Int

from fedtangent._src.checks import choice, finite, number, real_array, symmetric, whole
from fedtangent._src.theory import checks
from fedtangent._src.theory.flow.rules import DYNAMICS
from fedtangent._src.types import ArrayLike, Cohort, Partition

Operator = Float64[np.ndarray, "n n"]  # on the residual at the training points


class Expansion(NamedTuple):
    """A matrix [n, n] that takes the residual before training to the one after it, to second order in the step h.

    The step h is the step size times the number of local steps. The error of ``total``, the sum of both terms, is of
    order h^3.

    Attributes:
        first_order: Exponential of the summed or averaged operators of the clients.
        second_order: Correction, proportional to h^2.
    """

    first_order: Operator
    second_order: Operator

    @property
    def total(self) -> Operator:
        """Sum of the first- and second-order terms, [n, n]."""
        return self.first_order + self.second_order


def commutator_sum(operators: Sequence[Operator] | Float64[np.ndarray, "K n n"]) -> Operator:
    """Computes ``sum_{i > j} (A_i A_j - A_j A_i)`` of operators; A_1 acts first (FE-2021, Lemma 9.2)."""
    total, before = np.zeros_like(operators[0]), np.array(operators[0])  # a copy: it grows
    for operator in operators[1:]:
        total += operator @ before - before @ operator
        before += operator
    return total


def variance(operators: Sequence[Operator] | Float64[np.ndarray, "K n n"], weights: Sequence[float]) -> Operator:
    """Computes a weighted variance of matrices, ``Var(A) = sum_i p_i A_i^2 - (sum_i p_i A_i)^2`` (FE-2021, Lemma 9.3).

    Args:
        operators: Matrices A_i, [n, n] each.
        weights: Weights p_i, which must sum to 1; they are not checked.
    """
    mean, square = np.zeros_like(operators[0]), np.zeros_like(operators[0])
    for p, a in zip(weights, operators, strict=True):
        mean += p * a
        square += p * a @ a
    return square - mean @ mean


def exponential_product(operators: ArrayLike, step: float) -> Expansion:
    """Computes ``e^{-h A_K} ... e^{-h A_1}`` to second order, from the summed operators (FE-2021, Lemma 9.2, eq. 9).

    ``first_order = e^{-h (A_1 + ... + A_K)}`` and ``second_order = h^2/2 sum_{i > j} [A_i, A_j]``, where A_1 acts
    first; ``h = eta tau``. The remainder is o(h^2) (erratum `fe2021.lemma92`).

    Args:
        operators: Matrices A_i, [K, n, n], the first to act first.
        step: The number h, step size times local steps.
    """
    a = _operators(operators)
    number("step", step)
    return Expansion(scipy.linalg.expm(-step * a.sum(axis=0)), 0.5 * step**2 * commutator_sum(list(a)))


def exponential_average(operators: ArrayLike, weights: ArrayLike, step: float) -> Expansion:
    """Computes ``sum_i p_i e^{-h A_i}`` to second order, from the averaged operator (FE-2021, Lemma 9.3, eq. 10).

    ``first_order = e^{-h sum_i p_i A_i}`` and ``second_order = h^2/2 Var(A)``.

    Args:
        operators: Matrices A_i, [N, n, n].
        weights: Weights p_i [N], non-negative, summing to 1.
        step: The number h, step size times local steps.
    """
    a, p = _operators(operators), real_array("weights", weights)
    if p.shape != (len(a),) or not (np.all(p >= 0) and abs(p.sum() - 1) <= 1e-12):
        raise ValueError(f"weights: got shape {p.shape} and sum {p.sum():.6g}, must be [{len(a)}], >= 0 and sum to 1")
    mean = np.einsum("i,ijk->jk", p, a)
    number("step", step)
    return Expansion(scipy.linalg.expm(-step * mean), 0.5 * step**2 * variance(list(a), p.tolist()))


def _operators(operators: ArrayLike) -> Float64[np.ndarray, "K n n"]:
    a = real_array("operators", operators)
    if a.ndim != 3 or a.shape[1] != a.shape[2] or 0 in a.shape:
        raise ValueError(f"operators: got shape {a.shape}, must be [K, n, n] with K, n >= 1")
    finite("operators", a)
    return a


class Age(NamedTuple):
    """K rounds of one age (every client trains the model once) as matrices of the clients' ``A_i = eta tau_i Pi_i``.

    eta is the step size, tau_i the number of local steps, and Pi_i the Gram operator of client i: a round of gradient
    flow at only this client multiplies the residual by ``exp(-A_i)``.

    Attributes:
        means: Weighted mean of the A_i over the clients of each round; 0 for a round that does not train the model.
        variances: Their weighted variance (``variance``).
        discreteness: ``-sum_i p_i A_i^2 / tau_i`` of each round with weights p_i, the effect of finite steps.
    """

    means: Float64[np.ndarray, "K n n"]  # E[A_l] = sum_i p_i A_i over the round's clients
    variances: Float64[np.ndarray, "K n n"]  # Var[A_l] of Lemma 9.3
    discreteness: Float64[np.ndarray, "K n n"]


class Condition15(NamedTuple):
    """Condition (15) of FE-2021, under which the residual decays in every age; ``condition_15`` explains it.

    An age is the rounds in which every client trains the model once. ``value`` is the left side, to be below 1. ``b1``
    is ``eta^2 tau^2 B_1``, the largest norm of twice an age's second-order terms, and ``decay`` the least eigenvalue of
    an age's summed mean operators. ``largest_factor`` is the multiple of the step in use up to which the condition
    holds, to leading order.
    """

    holds: bool
    value: float  # (1 + B_1 / 2) e^{-lambda}; B_1 and lambda include the step
    b1: float  # largest operator norm of sum_l Var[E_l] + sum_{i>j} [E_i, E_j] over the ages, eta^2 tau^2 B_1
    decay: float  # lambda: least eigenvalue of sum_l E_l over the ages, eta tau K lambda_min(Pi)
    largest_factor: float  # the multiple of the step in use up to which (15) holds, to leading order


def age_operators(
    theta: ArrayLike,
    partition: Partition,
    cohorts: Cohort,
    local_steps: ArrayLike,
    learning_rate: ArrayLike,
    *,
    model: int = 0,
    rounds: Sequence[int] | None = None,
) -> Age:
    """Computes the ``Age`` of one model, the rounds in which every client trains it once, as matrices on the residual.

    Args:
        theta: Kernel [n, n] of the training points.
        partition: Training rows of each of N clients.
        cohorts: Client, model and weight of every slot (place for a client in a round), [R, S] each.
        local_steps: tau, an integer or one per client [N].
        learning_rate: eta, a number or one per round [R].
        model: Index of the model.
        rounds: Rounds of the age in order; all rounds if None. A round without a client of the model changes nothing.
    """
    theta = symmetric("theta", theta)
    partition = checks.check_partition(partition, len(theta))
    client, owner, count = checks.check_cohorts(cohorts, np.asarray(partition.sizes), None)
    steps = checks.check_steps(local_steps, partition.num_clients)
    checks.check_rate("learning_rate", learning_rate, len(client))
    whole("model", model, 0, count - 1)
    rates = np.broadcast_to(np.asarray(learning_rate, np.float64), (len(client),))
    weight = np.where(checks.present_slots(cohorts) & (owner == model), np.asarray(cohorts.weight, np.float64), 0.0)
    chosen = range(len(client)) if rounds is None else [whole("rounds", r, 0, len(client) - 1) for r in rounds]
    if len(chosen) == 0:
        raise ValueError("rounds: got none, must be at least one")
    terms = [_round_terms(theta, partition, client[r], weight[r], steps, float(rates[r])) for r in chosen]
    return Age(*(np.stack(parts) for parts in zip(*terms, strict=True)))


def _round_terms(
    theta: Operator,
    partition: Partition,
    client: Int[np.ndarray, "S"],
    weight: Float64[np.ndarray, "S"],
    steps: Int[np.ndarray, "N"],
    rate: float,
) -> tuple[Operator, Operator, Operator]:
    """Computes weighted mean, variance and ``-E[A^2 / tau]`` of the matrices A_i over one round's clients.

    ``A_i = eta tau_i Theta(X, X_i) P_i / n_i`` multiplies the residual; P_i selects the n_i examples of client i.
    ``client`` and ``weight`` belong to the round's S slots (places for a client), ``steps`` (tau) to all clients;
    ``rate`` is the step size eta.
    """
    n, total = len(theta), weight.sum()
    shares, square, discrete = np.zeros(n), np.zeros((n, n)), np.zeros((n, n))
    for i, p in zip(client[weight > 0], weight[weight > 0] / (total or 1.0), strict=True):
        rows = np.asarray(partition.client(int(i)), np.int64)
        step = rate * steps[i] / len(rows)
        np.add.at(shares, rows, p * step)
        block = p * step**2 * theta[np.ix_(rows, rows)]
        np.add.at(square, np.ix_(rows, rows), block)
        np.add.at(discrete, np.ix_(rows, rows), -block / steps[i])
    mean = theta * shares[None, :]
    return mean, theta @ square - mean @ mean, theta @ discrete


def second_order_terms(age: Age, dynamics: str = "gradient_flow") -> Operator:
    """Computes the second-order part of an age's map of the residual, [n, n]; its error is of third order in the step.

    It is ``1/2 (sum_l Var[A_l] + sum_{i>j} [E[A_i], E[A_j]])`` of FE-2021 eq. (13)-(14), with mean and variance over
    the clients of round l of their matrices ``A = eta tau Pi`` (see ``Age``). Gradient descent adds
    ``-1/2 sum_l E[A_l^2 / tau]``, that is ``-eta^2 tau / 2 E[Pi^2]`` a round, which is as large as the lemmas' terms
    for one local step and falls as 1 / tau at a fixed eta tau.

    Args:
        age: Operators of the age, the rounds in which every client trains the model once.
        dynamics: "gradient_flow" or "gradient_descent".
    """
    choice("dynamics", dynamics, DYNAMICS)
    terms = age.variances.sum(axis=0) + commutator_sum(list(age.means))
    return 0.5 * (terms if dynamics == "gradient_flow" else terms + age.discreteness.sum(axis=0))


def expansion(age: Age, dynamics: str = "gradient_flow") -> Expansion:
    """Computes the map of an age on the residual to second order (FE-2021 section 9.2).

    The first-order part is ``e^{-eta tau sum_l E[Pi_l]}``, with the mean over the clients of round l of their Gram
    operators Pi, which multiply the residual. If the cohorts of all rounds contain the same number nbar of examples and
    each client takes part once, it is ``e^{-eta tau Theta / nbar}``, as for training on all data at once.

    Args:
        age: Operators of the age, the rounds in which every client trains the model once.
        dynamics: "gradient_flow" or "gradient_descent".
    """
    return Expansion(scipy.linalg.expm(-age.means.sum(axis=0)), second_order_terms(age, dynamics))


def equation_13(age: Age, dynamics: str = "gradient_flow", order: str = "acting") -> Operator:
    """Computes an age's map of the residual, [n, n], by eq. (13) of FE-2021.

    It is a product of the rounds' exponentials, plus terms in which half of one round's variance replaces its
    exponential.

    Args:
        age: Operators of the age, the rounds in which every client trains the model once.
        dynamics: "gradient_flow", or "gradient_descent", which adds -E[A^2 / tau] (``Age.discreteness``) to each
            round's variance.
        order: "acting" has later rounds on the left, as operators act, and is right to second order. "printed" has the
            factors in the order of the page (erratum `fe2021.13`), which is the age with its rounds reversed, and is
            wrong by the second-order term ``sum_{i>j} [E_i, E_j]``.
    """
    choice("dynamics", dynamics, DYNAMICS)
    choice("order", order, ("acting", "printed"))
    exponentials = [scipy.linalg.expm(-mean) for mean in age.means]
    extra = 0.5 * (age.variances + (age.discreteness if dynamics == "gradient_descent" else 0.0))
    places = range(len(exponentials)) if order == "acting" else range(len(exponentials))[::-1]
    product, added = np.eye(age.means.shape[1]), np.zeros_like(age.means[0])
    for place in places:
        added = exponentials[place] @ added + extra[place] @ product
        product = exponentials[place] @ product
    return product + added


def operator_u(age: Age, dynamics: str = "gradient_flow") -> Operator:
    """Computes U of eq. (14) of FE-2021, the map of one age on the residual, [n, n].

    With mean E_l and variance Var_l of round l's operators it is
    ``(1 + 1/2 (sum_l Var_l + sum_{i>j} [E_i, E_j])) e^{-sum_l E_l}``. The left side of eq. (14) is printed with a wrong
    time (erratum `fe2021.14`); U is not affected.

    Args:
        age: Operators of the age, the rounds in which every client trains the model once.
        dynamics: "gradient_flow" or "gradient_descent".
    """
    return (np.eye(age.means.shape[1]) + second_order_terms(age, dynamics)) @ scipy.linalg.expm(-age.means.sum(axis=0))


def condition_15(ages: Sequence[Age], dynamics: str = "gradient_flow") -> Condition15:
    """Checks eq. (15) of FE-2021: the step is so small that the residual decays in every age.

    The condition is ``(1 + tau^2 eta^2 B_1 / 2) e^{-eta tau K lambda_min(Pi)} < 1``, with K rounds in an age, step size
    eta, tau local steps, and Pi the clients' mean Gram operator, which multiplies the residual.

    ``tau^2 eta^2 B_1`` is the largest operator norm, over ``ages``, of twice the ``second_order_terms``.
    ``eta tau K lambda_min(Pi)`` is the least eigenvalue, over the ages, of the sum of an age's K mean operators. This
    sum has the eigenvalues of the symmetric matrix ``Theta^1/2 D Theta^1/2``, where D is diagonal with a weight for
    each example. The least is 0 if Theta is singular or if a client with data is absent from an age; the paper takes
    the smallest eigenvalue that is not 0.

    To leading order (15) holds up to ``eta tau = 2 K lambda_min / ((K lambda_min)^2 + B_1)``, which is returned as a
    factor of the step in use. The paper prints another number (erratum `fe2021.15`). (15) also holds for steps so large
    that the exponential dominates again; there the second-order terms mean nothing, so require a factor above 1 too.

    Args:
        ages: Operators of one or more ages, rounds in which every client trains the model once.
        dynamics: "gradient_flow" or "gradient_descent".
    """
    if not ages:
        raise ValueError("ages: got none, must be at least one")
    b1 = max(2 * float(np.linalg.norm(second_order_terms(age, dynamics), 2)) for age in ages)
    decay = max(min(float(np.linalg.eigvals(age.means.sum(axis=0)).real.min()) for age in ages), 0.0)
    value = float((1 + 0.5 * b1) * np.exp(-decay))
    return Condition15(value < 1, value, b1, decay, 2 * decay / max(decay**2 + b1, np.finfo(float).tiny))
