"""Theorem 1 of FE-2024 (4.1 and 9.1 of FE-2021): exponential decay of the training error, and the weights' movement.

Conventions. The papers' step is ``eta = eta_0 / l`` on weights of the standard parameterisation at width l, and their
Theta is ``J' J / l``. Here Theta is the kernel in the NTK parameterisation, so eta_0 is the step size in use, and
``l^-1/2 ||J_i||_F`` is ``sqrt(trace Theta_ii)``. A movement of the weights in the NTK parameterisation is the bound
without its factor ``l^-1/2``; ``width`` puts it back.

The papers state the decay in three forms that do not agree. In an age, K rounds in which every client trains each model
once, the norm of the residual falls by ``e^{-f u}`` with ``u = eta_0 tau lambda_m / nbar``: tau local steps, lambda_m
the least eigenvalue of Theta, nbar examples in a round. To first order u is the true rate (FE-2021, eq. 27). Each form
has its factor f:

==============  =====  ============================================================================================
"proof"         1/3    the last lines of the proof of 9.1: the proved form
"equation_18"   K/3    eq. (18) as printed (erratum `fe2021.18`)
"informal"      K/6    4.1 (FE-2024's Theorem 1) as printed, of the squared error (erratum `fe2024.theorem1`)
==============  =====  ============================================================================================

All have a remainder ``o(eta_0^2 tau^2)``, which the bounds here leave out. kappa_2 is eq. (19) of FE-2021, and kappa_3
the formula that FE-2021 prints before eq. (27), both uncorrected (errata `fe2021.26`, `fe2021.20`, `fe2021.kappa3`).
The bound of the movement has three forms, too (erratum `fe2021.18movement`).

Section 9.4 of FE-2021, how far training a network is from training its linearisation, ends with
``gap <= kappa_4 / (1 - (1 + eta_0^2 tau^2 ||D_4||) e^{-eta_0 tau lambda_min / nbar})`` and ``kappa_4 = O(l^-1/2)``.
eta_0^2 tau^2 D_4 are the second-order terms of an age. The function ``kappa_4`` computes the printed formula, although
the proof gives another one (erratum `fe2021.kappa4`). ``gap_from_drift`` is the first-order bound that the same
argument gives for a measured change of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from fedtangent._src.checks import choice, finite, number, real_array
from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.theory import checks
from fedtangent._src.theory.checks import Assumption, failing, report
from fedtangent._src.theory.fed_ensemble.conditions import AgePlan, Theorem1Data, age_plan, assumptions
from fedtangent._src.theory.flow.rules import Rule
from fedtangent._src.types import ArrayLike, Cohort, Partition

FORMS = ("proof", "equation_18", "informal", "first_order")
MOVEMENTS = ("summed", "proof", "equation_18")


class Constants(NamedTuple):
    """Constants of Theorem 9.1 of FE-2021, from the kernel, the clients and the initial residual.

    Attributes:
        lambda_min, lambda_max: Least eigenvalue of the kernel Theta (0 if it is negative) and largest eigenvalue.
        examples_per_round, least_examples_per_round: Largest and smallest nbar, the number of examples of the clients
            that train one model in a round.
        client_norms: C_i, the root of the trace of client i's block Theta_ii; 0 for a client that never trains.
        c1: C_1, which bounds ``l^-1/2 ||H||`` with H the Hessian by the papers' weights, or ``l^1/2 ||H||`` with H the
            Hessian by weights in the NTK parameterisation; 0 for a model linear in its weights.
        c2: C_2, the sum of the C_i.
        r0: R_0, the norm of each model's initial residual.
        width: Width l of the network.
        kappa_2, kappa_3: Bounds of the theorem at the largest product of step size and local steps in the run: the
            growth of the residual inside an age (rounds in which every client trains each model once), and second-order
            effects (see ``Curvature``).
        largest_progress: Step size times local steps at which kappa_2 is 1.
    """

    lambda_min: float
    lambda_max: float
    examples_per_round: float
    least_examples_per_round: float
    client_norms: Float64[np.ndarray, "N"]
    c1: float
    c2: float
    r0: Float64[np.ndarray, "K"]
    width: float
    kappa_2: float  # eq. (19) at the largest eta_0 tau; inf where it overflows
    kappa_3: float  # at the largest eta_0 tau, as printed
    largest_progress: float


class Curvature(NamedTuple):
    """Constants of FE-2021's Theorem 9.1 that limit the step, by default of a linear model and a residual of norm 1.

    Attributes:
        c2: C_2, the sum of the clients' norms C_i, each the root of the trace of a client's block of Theta.
        c1: C_1, the bound of the network's Hessian as in ``Constants``; 0 for a linear model.
        r0: R_0, the norm of the initial residual.
        width: Width l of the network.
    """

    c2: float
    c1: float = 0.0
    r0: float = 1.0
    width: float = 1.0

    def _quartic(self) -> float:
        return 2 * self.c2**4 + 8 * self.r0 * self.c1 * self.c2**2 / np.sqrt(self.width)

    def kappa_2(self, progress: float) -> float:
        """Computes kappa_2 of FE-2021: 1 + kappa_2 bounds the growth of the residual's norm inside an age (eq. 20).

        It is ``-1 + exp(p C_2 + p^2 (2 C_2^4 + 8 R_0 C_1 C_2^2 / sqrt(l)))`` (eq. 19), with p = ``progress`` the step
        size times local steps, and this record's constants; inf if it overflows. In an age every client trains each
        model once.
        """
        with np.errstate(over="ignore"):
            return float(np.expm1(progress * self.c2 + progress**2 * self._quartic()))

    def kappa_3(self, progress: float, num_clients: int) -> float:
        """Computes FE-2021's bound kappa_3 of the second-order effects of the step in an age, printed before eq. (27).

        It is ``p^2 (2 C_2^4 + 8 R_0 C_1 C_2^2 / sqrt(l) + N (N - 1) / 2 C_2^4)``, with this record's constants (erratum
        `fe2021.kappa3`). In an age every client trains each model once.

        Args:
            progress: p, the step size eta_0 times tau local steps.
            num_clients: Number N of clients.
        """
        return float(progress**2 * (self._quartic() + 0.5 * num_clients * (num_clients - 1) * self.c2**4))

    def largest_progress(self) -> float:
        """Computes the largest product of step size and local steps for Theorem 9.1 of FE-2021: there kappa_2 is 1."""
        # the root of quartic p^2 + c2 p = ln 2, written without a difference of nearly equal numbers
        return float(2 * np.log(2) / (self.c2 + np.sqrt(self.c2**2 + 4 * self._quartic() * np.log(2))))


@dataclass(frozen=True, repr=False)
class Theorem1:
    """Theorem 1 of FE-2024 for one run of A ages (an age: every client trains each model once); from ``theorem_1``.

    It has the theorem's constants, its assumptions, and in ``plan`` the run's division into ages.
    """

    constants: Constants
    assumptions: tuple[Assumption, ...]
    plan: AgePlan

    def __repr__(self) -> str:
        p, c = self.plan, self.constants
        of = f"{p.num_ages} ages of {p.rounds_per_age} rounds, {p.num_models} models"
        numbers = f"lambda_min {c.lambda_min:.3g}, nbar {c.examples_per_round:g}, R_0 {c.r0.max():.3g}"
        return report(f"Theorem1({of}\n  {numbers}", self.assumptions) + ")"

    @property
    def failing(self) -> tuple[str, ...]:
        """Names of the assumptions that do not hold."""
        return failing(self.assumptions)

    def exponent(self, form: str = "proof", eigenvalue: float | None = None) -> Float64[np.ndarray, "ages"]:
        """Computes by how much the logarithm of ``residual_bound`` has fallen after 0, 1, .., A ages, [A + 1].

        In an age, K rounds, every client trains each model once. With ``u = eta_0 tau lambda_m / nbar`` (step size
        eta_0, tau local steps, least eigenvalue lambda_m of Theta, nbar examples in a round) an age adds a multiple of
        u, which depends on ``form``.

        Args:
            form: Reading of the theorem: "proof", u / 3; "equation_18", K u / 3; "informal", K u / 6; or
                "first_order", u.
            eigenvalue: Number that replaces Theta's least eigenvalue, for a negative control.
        """
        choice("form", form, FORMS)
        length = self.plan.rounds_per_age
        factor = {"proof": 1 / 3, "equation_18": length / 3, "informal": length / 6, "first_order": 1.0}[form]
        smallest = self.constants.lambda_min if eigenvalue is None else eigenvalue
        steps = factor * smallest * self.plan.least_progress / self.constants.examples_per_round
        return np.concatenate([[0.0], np.cumsum(steps)])

    def residual_bound(self, form: str = "proof", eigenvalue: float | None = None) -> Float64[np.ndarray, "ages K"]:
        """Computes the bound of the residual's norm ``||f_t(X) - Y||`` of each model after each age, [A + 1, K].

        It is the initial norm R_0 times ``e^{-exponent}``. In an age every client trains each model once.

        Args:
            form, eigenvalue: As for ``exponent``.
        """
        return self.constants.r0 * np.exp(-self.exponent(form, eigenvalue))[:, None]

    def movement_bound(self, form: str = "summed", growth: float | None = None) -> Float64[np.ndarray, "ages K"]:
        """Computes the bound of the weights' movement ``||w(t) - w(0)||`` after each age, [A + 1, K] (FE-2021, eq. 18).

        In an age every client trains each model once. The bound is ``R_0 (1 + kappa_2) C_2 width^-1/2`` times a factor
        that depends on ``form``, with t the number of ages and ``u = eta_0 tau lambda_m / nbar``: step size eta_0, tau
        local steps, least eigenvalue lambda_m of Theta, nbar examples in a round.

        Args:
            form: "summed", the result of the proof: the geometric sum of the movements of all ages,
                ``eta_0 tau / nbar sum_s e^{-s u / 3}``, with the largest steps, the smallest nbar and the most visits
                of a client. "proof", its value for small steps, ``3 / lambda_m (1 - e^{-t u / 3})``. "equation_18", as
                printed, ``eta_0 nbar`` times "proof".
            growth: Number that replaces ``1 + kappa_2``.
        """
        choice("form", form, MOVEMENTS)
        c, exponent = self.constants, self.exponent("proof")
        inside = 1 + c.kappa_2 if growth is None else growth
        if form == "summed":
            visits = max(int(self.plan.visits.max(initial=0)), 1)
            steps = visits * self.plan.most_progress / c.least_examples_per_round * np.exp(-exponent[:-1])
            reach = np.concatenate([[0.0], np.cumsum(steps)])
        else:
            reach = -3 * np.expm1(-exponent) / c.lambda_min if c.lambda_min > 0 else 3 * self.exponent("proof", 1.0)
            reach = reach * (float(self.plan.rates.max()) * c.examples_per_round if form == "equation_18" else 1.0)
        return inside * c.c2 / np.sqrt(c.width) * reach[:, None] * c.r0


class Networks(NamedTuple):
    """Optional facts about the trained networks for ``theorem_1``, such as their width and initial functions.

    Attributes:
        f0_train: Initial functions of the K models at the training points, [K, n, C]; zero by default.
        x_train: Inputs [n, ...]; without them the assumptions about inputs are left out.
        initial_kernel: Kernel of a network at its initial weights, [n, n], to compare with Theta.
        c1: C_1, the bound of the network's Hessian as in ``Constants``; 0 for a model linear in its weights.
        width: Width l of the network.
    """

    f0_train: ArrayLike | None = None
    x_train: ArrayLike | None = None
    initial_kernel: ArrayLike | None = None
    c1: float = 0.0
    width: float = 1.0  # l, for the factor l^-1/2 of the movement and beside C_1


def theorem_1(
    kernels: KernelBlocks,
    y_train: ArrayLike,
    partition: Partition,
    cohorts: Cohort,
    rule: Rule,
    *,
    num_models: int | None = None,
    rounds_per_age: int | None = None,
    networks: Networks | None = None,
) -> Theorem1:
    """Computes constants and bounds of Theorem 1 of FE-2024 (4.1 and 9.1 of FE-2021) and checks its assumptions.

    The theorem bounds the norm of the training residual, which decays exponentially, and the movement of the weights.
    The function runs on the host in NumPy float64 at a cost of O(n^3).

    Args:
        kernels, y_train, partition, cohorts, num_models: As for ``federated_flow``, with outputs that share a kernel.
        rule: Rule of plain FedAvg by gradient descent.
        rounds_per_age: Rounds K of an age, in which every client trains each model once; by default the number of
            models.
        networks: Known properties of the networks; by default none.

    Returns:
        The theorem for this run. An assumption that fails does not raise; it is reported in ``assumptions``.
    """
    y = checks.check_rows("y_train", y_train, "n, C")
    theta = checks.check_blocks(kernels, y.shape, "shared").ntk_train
    partition = checks.check_partition(partition, len(y))
    plan = age_plan(partition, cohorts, rule, num_models, rounds_per_age)
    start, x_train, initial_kernel, c1, width = networks or Networks()
    f0 = np.zeros((plan.num_models, *y.shape)) if start is None else real_array("f0_train", start)
    checks.check_shape("f0_train", f0, (plan.num_models, *y.shape))
    finite("f0_train", f0)
    c1, width = number("c1", c1, at_least=0), number("width", width, at_least=1)
    eigenvalues, vectors = np.linalg.eigh(theta)
    diagonal, r0, clients = np.diag(theta), np.linalg.norm(f0 - y, axis=(1, 2)), range(partition.num_clients)
    norms = np.sqrt([float(diagonal[partition.client(i)].sum()) if plan.trains[i] else 0.0 for i in clients])
    curvature, progress = Curvature(float(norms.sum()), float(c1), float(r0.max()), float(width)), plan.most_progress
    constants = Constants(
        lambda_min=max(float(eigenvalues[0]), 0.0),
        lambda_max=float(eigenvalues[-1]),
        examples_per_round=float(plan.examples.max()),
        least_examples_per_round=float(plan.examples[plan.examples > 0].min(initial=np.inf)),
        client_norms=norms,
        c1=curvature.c1,
        c2=curvature.c2,
        r0=r0,
        width=curvature.width,
        kappa_2=curvature.kappa_2(progress),
        kappa_3=curvature.kappa_3(progress, int(plan.trains.sum())),
        largest_progress=curvature.largest_progress(),
    )
    problem = Theorem1Data(theta, eigenvalues, vectors, f0 - y, y, partition, plan, x_train, initial_kernel)
    return Theorem1(constants, assumptions(problem, constants.kappa_2, constants.kappa_3), plan)


def weight_movement(theta: ArrayLike, operator: ArrayLike, residual: ArrayLike) -> float:
    """Computes ``||w_r - w_0||`` of a linear model exactly: the distance that its weights have moved after round r.

    The weights move by ``-J' M_r g_0``, with the Jacobian J and the initial residual g_0, so the square is
    ``tr(a' Theta a)`` with ``a = M_r g_0``. Each output has weights of its own, so their squares add. The second line
    of eq. (18) of FE-2021 bounds this distance.

    Args:
        theta: Kernel [n, n] of the training points.
        operator: M_r [n, n], ``Flow.operator(r, model)``.
        residual: Initial residual ``f_0(X) - Y`` [n, C].
    """
    a = real_array("operator", operator) @ real_array("residual", residual)
    return float(np.sqrt(max(float(np.sum(a * (real_array("theta", theta) @ a))), 0.0)))


def kappa_4(progress: float, c1: float, c2: float, r0: float, examples_per_round: float, width: float) -> float:
    """Computes kappa_4, the constant of ``linearisation_gap`` (FE-2021, section 9.4).

    It is ``e^{p C_2^2 / nbar} [8 p^2 R_0^2 C_1 C_2^2 l^-1/2 + p e^{p / (nbar C_2^2)} 2 R_0 C_2^2 l^-1/2]``; inf if it
    overflows, or for C_2 = 0.

    Args:
        progress: p, the step size eta_0 times tau local steps.
        c1, c2, r0: Constants C_1, C_2 and R_0 of Theorem 9.1, as in ``Constants``.
        examples_per_round: nbar, examples of the clients that train a model in a round.
        width: Width l.

    Raises:
        ValueError: A negative number; or ``examples_per_round`` or ``width`` is 0.
    """
    _not_negative(progress=progress, c1=c1, c2=c2, r0=r0)
    _positive(examples_per_round=examples_per_round, width=width)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        curved = 8 * progress**2 * r0**2 * c1 * c2**2
        drifting = 2 * progress * np.exp(progress / (examples_per_round * np.float64(c2) ** 2)) * r0 * c2**2
        value = np.exp(np.float64(progress) * c2**2 / examples_per_round) * (curved + drifting) / np.sqrt(width)
    return float(value) if np.isfinite(value) else float("inf")


def linearisation_gap(
    kappa: float, progress: float, lambda_min: float, examples_per_round: float, d4_norm: float = 0.0
) -> float:
    """Bounds the distance between the residuals of a network and of its linearisation, at any time of training.

    Source: FE-2021, end of section 9.4. The bound is ``kappa_4 / (1 - q)`` with
    ``q = (1 + p^2 ||D_4||) e^{-p lambda_min(Theta_0) / nbar}`` and p the ``progress``. The result is inf unless q < 1,
    as the paper requires.

    Args:
        kappa: Constant kappa_4, from the function ``kappa_4``.
        progress: Step size eta_0 times tau local steps.
        lambda_min: Least eigenvalue of the initial kernel Theta_0.
        examples_per_round: nbar, as for ``kappa_4``.
        d4_norm: Operator norm of D_4, the second-order terms (``second_order_terms`` / p^2) of an age, the rounds in
            which every client trains each model once.
    """
    _not_negative(kappa=kappa, progress=progress, lambda_min=lambda_min, d4_norm=d4_norm)
    _positive(examples_per_round=examples_per_round)
    q = (1 + progress**2 * d4_norm) * np.exp(-progress * lambda_min / examples_per_round)
    return float(kappa / (1 - q)) if q < 1 else float("inf")


def gap_from_drift(
    progress: ArrayLike, drift: float, r0: float, lambda_min: float, examples_per_round: float
) -> Float64[np.ndarray, "..."]:
    """Bounds the distance between the residuals of a network and of its linearisation at the times ``progress``.

    The bound grows with the change of the kernel, and holds to first order in the step. With Theta_s the kernel and
    g_s the network's residual at time s, g_lin the residual of the linearisation, and ``t = progress / nbar`` the
    whole time, ``g_lin - g = int_0^t e^{-Theta_0 (t - s)} (Theta_s - Theta_0) g_s ds`` (the identity that opens
    section 9.4 of FE-2021, over an age). With lambda for ``lambda_min``, ``||g_s|| <= R_0 e^{-lambda s}`` bounds it
    by ``R_0 drift t e^{-lambda t}``, which is largest at ``t = 1 / lambda``: ``R_0 drift / (e lambda)``.

    Args:
        progress: Sum of eta_0 tau (step size times local steps) over the rounds in which a client has trained the
            model; a number or an array.
        drift: Bound of ``||Theta_s - Theta_0||`` in operator norm.
        r0: Norm R_0 of the initial residual.
        lambda_min: Least eigenvalue of the kernel during training (of Theta_0, minus the drift).
        examples_per_round: nbar, as for ``kappa_4``.
    """
    _not_negative(drift=drift, r0=r0, lambda_min=lambda_min)
    _positive(examples_per_round=examples_per_round)
    t, largest = np.asarray(progress, np.float64) / examples_per_round, r0 * drift
    decay = np.exp(-lambda_min * t) if lambda_min > 0 else np.ones_like(t)
    return np.asarray(np.where(decay > 0, t, 0.0) * decay * largest if largest > 0 else np.zeros_like(t))


def _not_negative(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value >= 0:
            raise ValueError(f"{name}: got {value!r}, must be at least 0")


def _positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0:
            raise ValueError(f"{name}: got {value!r}, must be above 0")
