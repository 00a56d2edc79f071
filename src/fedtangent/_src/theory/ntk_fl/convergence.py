"""Theorems 1 and 2 of NTK-FL (Yue et al., ICML 2022, section 5, D and E): decay of the squared residual.

For the two-layer ReLU network of eq. (12) trained on ``1/(2 N) |f - y|^2`` over N pooled examples:

Theorem 1  ``|f_t - y|^2 <= (1 - eta lambda / (2 N))^t |f_0 - y|^2`` after t steps (14),
Theorem 2  ``|f_k - y|^2 <= (1 - eta tau lambda / (2 N M))^k |f_0 - y|^2`` after k rounds of FedAvg (15),

with lambda the least eigenvalue of the kernel (13), tau local steps and M clients. Both come from one inequality, (76),
which becomes (51) for tau = M = 1. With ``g = (1 + eta)^tau - 1`` and the condition number kappa the squared residual
changes by

``1 + 2/M {g [4 sqrt(2/pi) R/(delta alpha) + sqrt(ln(2 N^2/delta)/(2 n)) + kappa lambda/N] - eta tau (1 + kappa)
lambda/N} + g^2/M^2``

(``proof_factor``), where R is the distance that a neuron moves, n the number of neurons, alpha^2 the least eigenvalue
of the covariance of a neuron's initial weights, and delta the probability with which the theorem may fail. The theorems
require "small enough" steps and R and "large enough" n; ``assumptions`` allows each of the three a third of the margin
3 lambda / (2 N). These are explicit constants for ``eta = O(lambda/N)``, ``n = Omega(N^2/lambda^2 ln(N^2/delta))``,
``R = O(delta alpha lambda/N)``.

Points that the proofs leave open or state otherwise:

- ``movement_bound`` bounds R, which the proofs do not (erratum `ntk_fl.radius`).
- The proof of Theorem 1 is of gradient descent, not of NTK-FL's weights (erratum `ntk_fl.theorem1`), which decay by
  ``linear_rate`` with no condition on R.
- The rates are a quarter of the first-order ones (erratum `ntk_fl.rate`).
- The proofs need the lemmas for all examples or entries (see ``lemmas``), each with delta / 3 (erratum
  `ntk_fl.delta`); ``proof_factor`` has the lemmas as printed, with delta.
- Over many rounds the theorems hold if the kernel H, the sets S of neurons that switch, and R refer to the weights of
  round 0 (erratum `ntk_fl.assumption1`).
- (58b) divides by N and by M (erratum `ntk_fl.58b`). FedAvg as usually run has the step ``eta N_m / N`` in the
  theorem's terms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Float, Float64

from fedtangent._src.checks import instance, number, real_array, symmetric, whole
from fedtangent._src.kernels.gram import KernelBlocks, known_modes, product
from fedtangent._src.kernels.large import LargeKernel
from fedtangent._src.theory import checks
from fedtangent._src.theory.checks import ROUNDING, Assumption, assumption, failing, in_float64, report
from fedtangent._src.theory.flow.clients import response
from fedtangent._src.theory.ntk_fl.lemmas import drift_bound, expected_kernel, sampling_bound
from fedtangent._src.types import AnyArray, Array, ArrayLike, Partition


class TwoLayerStart(NamedTuple):
    """Two-layer ReLU network (eq. 12 of NTK-FL) before training: the properties on which the theorems depend.

    Attributes:
        width: Number n of neurons.
        covariance: Covariance of a neuron's weights, [d, d]; or a number times the identity.
        kernel: Tangent kernel at the start, [N, N] for N examples; its distance from the infinite-width kernel is
            compared with the bound of Lemma 4 (``sampling_bound``). None for no comparison.
    """

    width: int
    covariance: ArrayLike = 1.0
    kernel: ArrayLike | None = None


class NtkConstants(NamedTuple):
    """Constants of Theorems 1 and 2 of NTK-FL for one network, its data and its training.

    Attributes:
        num_examples, width: Number N of examples, number n of neurons.
        lambda_min, lambda_max: Least (lambda) and largest eigenvalue of the infinite-width kernel.
        alpha: Root of the least eigenvalue of the covariance of a neuron's initial weights.
        delta: Probability with which the theorem may fail.
        residual: Norm of the initial residual f_0 - y.
        learning_rate, local_steps, num_clients: Step size eta, local steps tau and number M of clients.
    """

    num_examples: int
    width: int
    lambda_min: float  # lambda, least eigenvalue of the kernel (13); 0 if rounding makes it negative
    lambda_max: float
    alpha: float
    delta: float
    residual: float
    learning_rate: float
    local_steps: int = 1
    num_clients: int = 1

    def movement_bound(self) -> float:
        """Computes a bound of the distance that a neuron moves, ``4 G sqrt(N) |f_0 - y| / (sqrt(n) lambda)``.

        It holds if the theorem holds; the record explains the symbols. ``G = ((1 + eta)^tau - 1) / (eta tau)`` is 1 in
        Theorem 1. A step moves a neuron by at most ``eta / sqrt(N n)`` times the residual; the sum over all steps
        converges because the residual decays. For FedAvg this bounds the server's neurons over all rounds; with several
        local steps ``((1 + eta)^tau - 1) |f_0 - y| / sqrt(N n)`` is added, a client's movement inside a round. The
        bound is inf for lambda = 0.
        """
        if self.lambda_min == 0:
            return math.inf
        stretch = _growth(self) / (self.learning_rate * self.local_steps)
        rounds = 4 * stretch * math.sqrt(self.num_examples) * self.residual / (math.sqrt(self.width) * self.lambda_min)
        if self.local_steps == 1:
            return rounds
        return rounds + _growth(self) * self.residual / math.sqrt(self.num_examples * self.width)


@dataclass(frozen=True, repr=False)
class NtkTheorem:
    """Theorem 1 (gradient descent) or 2 (FedAvg) of NTK-FL for one network and its data; see ``ntk_theorem_1``.

    ``radius`` is R, the largest distance that a neuron moves: measured, or a bound of it (``movement_bound``).
    """

    name: str
    constants: NtkConstants
    radius: float  # R: as measured, or movement_bound
    assumptions: tuple[Assumption, ...]

    def __repr__(self) -> str:
        c = self.constants
        numbers = f"N {c.num_examples}, n {c.width}, lambda {c.lambda_min:.3g}, eta {c.learning_rate:.3g}"
        return report(f"NtkTheorem({self.name}\n  {numbers}, factor {self.rate():.9g}", self.assumptions) + ")"

    @property
    def failing(self) -> tuple[str, ...]:
        """Names of the assumptions that do not hold."""
        return failing(self.assumptions)

    def rate(self, eigenvalue: float | None = None) -> float:
        """Computes a bound of the factor by which the squared residual changes in a step, or for Theorem 2 in a round.

        It is ``1 - eta tau lambda / (2 N M)``, or 0 if this is negative; ``NtkConstants`` defines the symbols. For a
        negative control ``eigenvalue`` replaces lambda.
        """
        return 1 - self._fall(eigenvalue)

    def _fall(self, eigenvalue: float | None) -> float:
        c = self.constants
        value = c.lambda_min if eigenvalue is None else eigenvalue
        return min(c.learning_rate * c.local_steps * value / (2 * c.num_examples * c.num_clients), 1.0)

    def residual_bound(self, steps: ArrayLike, eigenvalue: float | None = None) -> Float64[np.ndarray, "..."]:
        """Computes the bound of ``|f - y|^2`` after each number of steps (Theorem 1) or rounds (Theorem 2).

        Args:
            steps: Numbers of steps or rounds; the result has their shape.
            eigenvalue: Number that replaces lambda, the kernel's least eigenvalue, for a negative control.
        """
        times, fall = np.asarray(steps, np.float64), self._fall(eigenvalue)
        with np.errstate(divide="ignore", invalid="ignore"):  # keeps the digits of a small fall
            decay = np.where((times > 0) & (fall > 0), np.exp(times * np.log1p(-fall)), 1.0)
        return np.asarray(self.constants.residual**2 * decay)

    def proof_factor(self) -> float:
        """Computes a bound of the factor by which the squared residual changes, as in the proofs of NTK-FL.

        For Theorem 1 it is the factor of a gradient step, eq. (51); for Theorem 2, of a round, eq. (76). If the
        assumptions hold it is at most ``rate()``; otherwise it may be above 1.
        """
        c = self.constants
        growth = _growth(c)
        drift = 2 * drift_bound(self.radius, c.alpha, c.delta, c.width, c.num_examples) / c.num_examples
        sampling = sampling_bound(c.width, c.num_examples, c.delta) / c.num_examples
        gain = growth * (drift + sampling + c.lambda_max / c.num_examples)
        fall = c.learning_rate * c.local_steps * (c.lambda_min + c.lambda_max) / c.num_examples
        return 1 + 2 * (gain - fall) / c.num_clients + (growth / c.num_clients) ** 2


@in_float64
def ntk_evolution(kernels: KernelBlocks, step: float, time: int) -> Float[AnyArray, "m n"]:
    """Computes the matrix ``B_t = Theta(x, X) Theta^-1 [I - (I - s Theta)^t]`` of t steps of NTK-FL's server.

    It is the discrete form of eq. (7) and (9a) of NTK-FL: t steps of gradient descent on the pooled data of a cohort
    give ``f_t(x) = f_0(x) - B_t (f_0(X) - Y)``. The covariance is ``covariance_terms(kernels, B_t)``, and the limit as
    t grows is Theorem 2 of FE-2024. Theta may be singular: no function depends on modes of eigenvalue 0.

    Args:
        kernels: Kernel blocks of n training and m test points.
        step: Step size s on ``1/2 |f - y|^2`` (eta / (N C) for the loss averaged over examples and outputs), at most
            ``2 / lambda_max`` with Theta's largest eigenvalue lambda_max.
        time: Number t >= 0 of steps.

    Returns:
        [m, n] float64.

    Raises:
        ValueError: A step above 2 / lambda_max.
    """
    eigenvalues, vectors = known_modes(kernels.ntk_train)
    number("step", step, above=0, at_most=2 / float(eigenvalues[-1]))  # beyond, it is not stable
    gain = response(np.maximum(eigenvalues, 0.0), step, 1.0, whole("time", time, 0))
    return np.asarray(kernels.ntk_test_train) @ (vectors * np.asarray(gain)) @ vectors.T


@in_float64
def ntk_evolved(
    kernels: KernelBlocks | LargeKernel, residual: ArrayLike, step: float, times: Sequence[int]
) -> Float64[np.ndarray, "T n C"]:
    """Computes coefficients a_t of ``f_t(x) = f_0(x) - Theta(x, X) a_t`` after t steps of NTK-FL's server.

    The functions are the same as with ``ntk_evolution``, but no matrix B_t [m, n] is built. Each step,
    ``a_{t+1} = a_t + s (f_0(X) - Y - Theta a_t)``, is one product with the kernel of the training points. The functions
    at the test points change by ``-kernels.at_test(a_t)``.

    Args:
        kernels: Kernel blocks, or a large kernel, of n training points.
        residual: f_0(X) - Y, [n, C].
        step: Step size s, as in ``ntk_evolution``.
        times: Numbers of steps t, increasing.

    Returns:
        [T, n, C] float64.

    Raises:
        ValueError: Times that do not increase, or a step at which the residual is larger after the last time than at
            the start.
    """
    start = jnp.asarray(checks.check_rows("residual", residual, "n, C"))
    increasing = [whole("times", t, 0) for t in np.ravel(times).tolist()]
    checks.check_shape("residual", start, (len(kernels.ntk_train), start.shape[1]))
    if not increasing or sorted(set(increasing)) != increasing:
        raise ValueError(f"times: got {increasing}, must be one or more numbers that increase")
    number("step", step, above=0)

    @jax.jit
    def steps(theta: Array, a: Array, count: int | Array) -> Array:
        return jax.lax.fori_loop(0, count, lambda i, a: a + step * (start - product(theta, a)), a)

    coefficients, a, theta = [], jnp.zeros_like(start), jnp.asarray(kernels.ntk_train)
    for before, t in itertools.pairwise((0, *increasing)):
        a = steps(theta, a, t - before)
        coefficients.append(np.asarray(a))
    residual_norm = float(jnp.linalg.norm(start - product(theta, a)))
    if not residual_norm <= float(jnp.linalg.norm(start)) * (1 + 1e-5):  # no stable step makes a residual larger
        raise ValueError(f"step: got {step}, which diverges, must be at most 2 / lambda_max")
    return np.stack(coefficients)


def linear_rate(kernel: ArrayLike, learning_rate: float) -> float:
    """Computes a bound of the factor by which a step changes the linearised network's squared residual.

    It is the largest ``(1 - eta lambda_i / N)^2`` over the kernel's eigenvalues lambda_i, with N examples.

    Args:
        kernel: Tangent kernel [N, N] at the start of the round.
        learning_rate: eta of gradient descent on ``1/(2 N) |f - y|^2``.

    Raises:
        ValueError: ``kernel`` is not a finite symmetric matrix.
    """
    matrix = symmetric("kernel", kernel)
    eigenvalues = np.linalg.eigvalsh(matrix)
    return float(np.max((1 - learning_rate * eigenvalues[[0, -1]] / len(matrix)) ** 2))


def largest_learning_rate(constants: NtkConstants) -> float:
    """Computes the largest step size eta at which the assumption ``small_step`` of NTK-FL's theorems holds.

    For one client and one local step it is ``lambda / (2 N)``, with the kernel's least eigenvalue lambda and N
    examples; otherwise a root search finds it. It is 0 for lambda = 0. The eta of ``constants`` is ignored.
    """
    spare = constants.lambda_min / (2 * constants.num_examples)
    if spare == 0:
        return 0.0

    def excess(eta: float) -> float:
        return _step_terms(constants._replace(learning_rate=eta)) - spare

    return float(scipy.optimize.brentq(excess, 0.0, 2 * constants.num_clients * spare, xtol=1e-300))


def ntk_theorem_1(
    x: ArrayLike,
    residual: ArrayLike,
    network: TwoLayerStart,
    *,
    learning_rate: float,
    delta: float = 0.05,
    radius: float | None = None,
) -> NtkTheorem:
    """Computes how fast the squared residual decays by NTK-FL's Theorem 1, and checks the theorem's assumptions.

    The function runs on the host in NumPy float64 at a cost of O(N^3).

    Args:
        x: Pooled inputs [N, d].
        residual: Initial residual ``f_0(x) - y`` [N].
        network: Network before training.
        learning_rate: eta of ``1/(2 N) |f - y|^2``.
        delta: Probability with which the statement may fail.
        radius: R, the largest distance that a neuron moves in training, if it was measured; by default a bound of it
            (``movement_bound``).

    Returns:
        The theorem for these data. An assumption that fails does not raise; it is reported in ``assumptions``.
    """
    return _theorem(
        "Theorem 1", checks.check_rows("x", x, "N, d"), residual, network, (learning_rate, 1, 1), delta, radius
    )


def ntk_theorem_2(
    x: ArrayLike,
    residual: ArrayLike,
    partition: Partition,
    network: TwoLayerStart,
    *,
    learning_rate: float,
    local_steps: int,
    delta: float = 0.05,
    radius: float | None = None,
) -> NtkTheorem:
    """Computes how fast the squared residual decays by NTK-FL's Theorem 2, and checks the theorem's assumptions.

    Theorem 2 is about FedAvg with every client in every round.

    Args:
        x, residual, network, delta: As for ``ntk_theorem_1``.
        partition: Examples of each client; every example belongs to exactly one client.
        learning_rate: eta of the theorem. A local step is ``eta / N`` times the sum over the client's examples, so that
            FedAvg on the client's mean loss with step s has ``eta = s N / N_m``, with N_m of the N examples at the
            client.
        local_steps: Number tau of local steps.
        radius: R, the largest distance that a neuron moved, including local steps; by default a bound of it.
    """
    inputs = checks.check_rows("x", x, "N, d")
    clients = checks.check_partition(partition, len(inputs), exact=True, occupied=True).num_clients
    steps = learning_rate, whole("local_steps", local_steps), clients
    return _theorem("Theorem 2", inputs, residual, network, steps, delta, radius)


def _theorem(
    name: str,
    x: Float64[np.ndarray, "N d"],
    residual: ArrayLike,
    network: TwoLayerStart,
    steps: tuple[float, int, int],
    delta: float,
    radius: float | None,
) -> NtkTheorem:
    """Computes the constants of NTK-FL's Theorem 1 or 2, and checks its assumptions; the result has both.

    Args:
        name: "Theorem 1" or "Theorem 2", a label for the result; ``steps`` makes the difference.
        x, residual, network, delta, radius: As for ``ntk_theorem_1``.
        steps: Step size eta, local steps tau and number of clients M; for Theorem 1 tau and M are 1.
    """
    instance("network", network, TwoLayerStart)
    start, covariance = real_array("residual", residual), network.covariance
    checks.check_shape("residual", start, (len(x),))
    number("learning_rate", steps[0], above=0)
    number("width", network.width, above=0)
    number("delta", delta, above=0, below=1)
    kernel = expected_kernel(x, covariance)
    eigenvalues = np.linalg.eigvalsh(kernel)
    least = float(np.asarray(covariance)) if np.ndim(covariance) == 0 else float(np.linalg.eigvalsh(covariance)[0])
    c = NtkConstants(
        num_examples=len(x),
        width=int(network.width),
        lambda_min=max(float(eigenvalues[0]), 0.0),
        lambda_max=float(eigenvalues[-1]),
        alpha=math.sqrt(least),
        delta=float(delta),
        residual=float(np.linalg.norm(start)),
        learning_rate=float(steps[0]),
        local_steps=steps[1],
        num_clients=steps[2],
    )
    reach = c.movement_bound() if radius is None else number("radius", radius, at_least=0)
    conditions = [*_of_the_data(x, c), *_of_the_proof(c, reach, radius is not None)]
    if network.kernel is not None:
        empirical = symmetric("network.kernel", network.kernel)
        checks.check_shape("network.kernel", empirical, kernel.shape)
        text, bound = "Lemma 4: operator norm of H - H_inf at the start", sampling_bound(c.width, len(x), c.delta)
        conditions.append(assumption("lemma_4", text, float(np.linalg.norm(empirical - kernel, 2)), "<=", bound))
    return NtkTheorem(name, c, reach, tuple(conditions))


def _of_the_data(x: Float64[np.ndarray, "N d"], c: NtkConstants) -> list[Assumption]:
    zero = c.num_examples * float(np.finfo(np.float64).eps) * c.lambda_max
    error = float(np.max(np.abs(np.linalg.norm(x, axis=1) - 1)))
    return [
        assumption("unit_inputs", "Assumption 2: largest | |x_i| - 1 |", error, "<=", ROUNDING),
        assumption("positive_definite", "Assumption 3: lambda, above rounding", c.lambda_min, ">", zero),
    ]


def _of_the_proof(c: NtkConstants, radius: float, measured: bool) -> list[Assumption]:
    """Checks that the step is stable, and that step, width and movement are within the margins of the proof.

    The proof leaves a margin of ``3 lambda / (2 N)``; step, width and movement may each use a third of it.

    Args:
        c: Constants of the theorem.
        radius: R, the largest distance that a neuron moves.
        measured: Whether R was measured, or is ``c.movement_bound()``; only the text of a condition depends on it.
    """
    spare, n = c.lambda_min / (2 * c.num_examples), c.num_examples
    stretch = _growth(c) / (c.learning_rate * c.local_steps)
    wide = math.inf if spare == 0 else 2 * (stretch / spare) ** 2 * math.log(2 * n**2 / c.delta)
    close = spare * math.sqrt(math.pi) * c.delta * c.alpha / (8 * math.sqrt(2) * stretch)
    how = "measured" if measured else "by the theorem's own decay"
    stable = c.learning_rate * c.lambda_max / n
    return [
        assumption("stable_step", "gradient descent: eta lambda_max / N", stable, "<", 2.0),
        assumption("small_step", "eta = O(lambda/N): terms of the step in (76)", _step_terms(c), "<=", spare),
        assumption("wide_enough", "n = Omega(N^2/lambda^2 ln(N^2/delta)): width required", wide, "<=", c.width),
        assumption("lazy", f"R = O(delta alpha lambda/N): a neuron moves, {how}", radius, "<=", close),
    ]


def _growth(c: NtkConstants) -> float:
    """Computes ``(1 + eta)^tau - 1`` for the step size eta and tau local steps."""
    with np.errstate(over="ignore"):
        return float(np.expm1(c.local_steps * np.log1p(c.learning_rate)))


def _step_terms(c: NtkConstants) -> float:
    """Computes the terms of NTK-FL's eq. (76) that depend only on the step, divided by ``eta tau / M``."""
    progress = c.learning_rate * c.local_steps
    stretch = _growth(c) / progress if progress > 0 else 1.0
    return 2 * (stretch - 1) * c.lambda_max / c.num_examples + progress * stretch**2 / c.num_clients
