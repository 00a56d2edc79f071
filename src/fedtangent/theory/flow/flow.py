"""The exact federated kernel flow: every round of federated training of a linear, linearised or infinitely wide model.

Under the squared loss the local steps of client i change the function by ``-Theta(x, X_i) z_i``, and z_i is linear in
the client's residual (see ``clients``). So the model after r rounds is ``f_r(x) = f_0(x) - Theta(x, X) M_r (f_0(X) -
Y)`` with a matrix M_r. For FedAvg ``M_{r+1} = M_r + S_r (I - Theta M_r)``, where S_r has one block for each client of
the round. FE-2021 section 9.2 follows the same dynamics to second order in the step, eq. (13)-(16); here they are exact
and discrete. Weight decay shrinks the initial function too: ``f_r(x) = gamma_r f_0(x) - Theta(x, X) (A_r f_0(X) - M_r
Y)``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedtangent.checks import number, whole
from fedtangent.kernels.gram import KernelBlocks, product
from fedtangent.kernels.large import LargeKernel
from fedtangent.theory.flow import asymptotics, functions
from fedtangent.theory.flow.asymptotics import PassSpectrum, Stability
from fedtangent.theory.flow.clients import ClientBlocks
from fedtangent.theory.flow.functions import Runs
from fedtangent.theory.flow.recursion import Input, Program, in_chunks, influence, path, shares_of_start
from fedtangent.theory.flow.rounds import Rounds, RunSlots, only_model, rows_needed
from fedtangent.theory.flow.rules import Kind, Numbers
from fedtangent.theory.precision import in_float64, is_concrete, on_device
from fedtangent.theory.prior import covariance_terms, prior_blocks
from fedtangent.types import Array, Gaussian, Partition

# Costs in units of a multiply-add, measured on a CPU: reading one entry of Theta, and gathering one.
READ, GATHER = 40, 120


class LimitDistance(NamedTuple):
    """Relative Frobenius distance of a round's law from Theorem 2's."""

    mean: float
    cov: float


@dataclass(frozen=True, repr=False)
class Flow:
    """What is predicted of every model after every round; made by ``federated_flow``.

    ``flow.mean(10, model=0)`` is the mean of model 0 after ten rounds [m, C], ``flow.cov(10, model=0)`` its covariance
    [m, m], and ``flow.predict(f0_train, f0_test, 10, model=0)`` the run that starts from a given function.

    ``r`` is the number of finished rounds, from 0 (the initial model) to ``num_rounds``. Several rounds may be asked
    for at once: the result then has a first axis for them. ``model=None`` is all K models, on the next axis. Functions
    are [m, C] at the test points and [n, C] at the training points, float64. An unstable run that leaves the range of
    float64 raises ``FloatingPointError``; only ``runs`` returns inf or NaN instead.
    """

    kernels: KernelBlocks | LargeKernel
    y_train: np.ndarray  # [n, C]
    outputs: str
    num_models: int
    partition: Partition
    slots: RunSlots
    theta: Array  # [q, q], q = n (outputs "shared") or n C ("full"); [n, p] of a large kernel
    clients: ClientBlocks
    rounds: Rounds
    kind: Kind
    numbers: Numbers
    local_steps: np.ndarray  # [N]

    def __repr__(self) -> str:
        n = len(self.y_train)
        return (
            f"Flow({self.kind.algorithm}, {self.kind.dynamics}, {self.num_models} models, {self.num_rounds} rounds, "
            f"{self.partition.num_clients} clients, {n} training and {self.num_test} test rows)"
        )

    @property
    def num_rounds(self) -> int:
        """Number of rounds R."""
        return len(self.slots.client)

    def mean(self, r: int | Sequence[int], model: int | None = None) -> Array:
        """Mean of the function over initial functions of mean zero, ``Theta(x, X) M_r Y``: [..., m, C]."""
        self.check_linear("mean")
        return self.predict(*functions.zero_functions(self, model), r, model)

    def residual(self, r: int | Sequence[int], f0_train: Any = None, model: int | None = None) -> Array:
        """``f_r(X) - Y``, [..., n, C], of the run from ``f0_train``; without it, of the mean over initial functions."""
        if f0_train is None:
            self.check_linear("residual of the mean")
            f0_train = functions.zero_functions(self, model)[0]
        after = self.predict_train(f0_train, r, model)
        return after - self.y_train.reshape((1,) * (after.ndim - 2) + self.y_train.shape)

    @in_float64
    def predict(
        self,
        f0_train: Any,
        f0_test: Any,
        r: int | Sequence[int],
        model: int | None = None,
        *,
        along_train: Any = None,
        along_test: Any = None,
    ) -> Array:
        """``f_r(x)`` [..., m, C] of a model that starts as f0: exact for a linear model, or one of infinite width.

        Args:
            f0_train, f0_test: values of one model's initial function, [n, C] and [m, C]; of all models, with
                ``model=None``, [K, n, C] and [K, m, C].
            along_train, along_test: ``J(x) w_0``, of the same shapes: what weight decay takes away from a linearised
                network. By default the rule's ``homogeneity`` times f0.
        """
        if (along_train is None) != (along_test is None):
            raise ValueError("along_train: got one of it and along_test, must be both or none")
        at_test = functions.started(self, "test", f0_test, along_test, model)
        trained = functions.started(self, "train", f0_train, along_train, model)
        return self._evolved(trained, at_test, self.kernels.at_test, r, model)

    @in_float64
    def predict_train(
        self, f0_train: Any, r: int | Sequence[int], model: int | None = None, *, along_train: Any = None
    ) -> Array:
        """``f_r(X)`` at the training points, [..., n, C]; see ``predict``."""
        trained = functions.started(self, "train", f0_train, along_train, model)
        return self._evolved(trained, trained, self.at_train, r, model)

    @in_float64
    def runs(self, f0_train: Any, f0_test: Any, r: Sequence[int], num_train: int | None = None) -> Runs:
        """``f_r`` at training and test points, of runs from E initial functions: faster than E calls of ``predict``.

        Args:
            f0_train, f0_test: initial functions of all K models, [E, K, n, C] and [E, K, m, C].
            r: rounds.
            num_train: how many training points, from the first on, are wanted; None for all.
        """
        wanted = len(self.y_train) if num_train is None else whole("num_train", num_train, 1, len(self.y_train))
        return functions.runs(self, f0_train, f0_test, self.rounds_of(r), wanted)

    def ensemble_mean(self, r: int | Sequence[int]) -> Array:
        """Mean of the average of the K models: [..., m, C]."""
        return self.mean(r).mean(axis=-3)

    @in_float64
    def cov(self, r: int, model: int | None = None) -> Array:
        """Covariance of each output over initial functions, [m, m] for one model, [K, m, m] for all.

        It is ``K(x, x) - B K(X, x) - K(x, X) B' + B K(X, X) B'`` with ``B = Theta(x, X) M_r``; with outputs "full"
        [m C, m C]. Costs one backward pass over r rounds with m columns per model.
        """
        if model is None:  # one after the other, so that the memory is that of one
            return jnp.stack([jnp.asarray(self.cov(r, k)) for k in range(self.num_models)])
        b, gamma = self.dependence(r, model)
        return _finite(covariance_terms(self._prior, b[0], gamma[0]).total)

    @in_float64
    def variance(self, r: int | Sequence[int], model: int | None = None) -> Array:
        """Variance at each test point, [..., m] for one model, [..., K, m] for all: the diagonal of ``cov``.

        With outputs "full" m C in place of m. Each of the rounds costs a backward pass.
        """
        found = [jnp.diagonal(jnp.asarray(self.cov(i, model)), axis1=-2, axis2=-1) for i in np.atleast_1d(r).tolist()]
        return jnp.stack(found) if np.ndim(r) else found[0]

    @in_float64
    def cross_cov(self, r: int, model: int, other: int) -> Array:
        """Covariance of two models that started as the same function, [m, m].

        Models that started as independent functions have none.
        """
        (prior, prior_cross, prior_test), last = prior_blocks(self._prior), self.num_models - 1
        model, other = whole("model", model, 0, last), whole("other", other, 0, last)
        (b,), (g,) = self.dependence(r, model)
        (c,), (h,) = self.dependence(r, other)
        cross = h * (b @ prior_cross.T) + g * (c @ prior_cross.T).T
        return _finite(g * h * prior_test + b @ prior @ c.T - cross)

    @in_float64
    def dependence(self, r: int, model: int | None = None) -> tuple[Array, Array]:
        """How ``f_r(x) = gamma f_0(x) - B f_0(X) + ..`` depends on f_0: B [K, m, q] and gamma [K], K = 1 for one model.

        ``..`` does not depend on f_0. gamma is 1 without weight decay.
        """
        theta_x = jnp.asarray(self.check_law("covariance").ntk_test_train)
        r = whole("r", r, 0, self.num_rounds)
        program, num_models = self.program(model, len(theta_x)), self.num_models if model is None else 1
        shares, active = self.shares(model), np.arange(self.num_rounds) < r
        found = influence(self.kind, program, theta_x, shares, active, num_models=num_models)
        c = self.numbers.homogeneity
        b = found.residual if found.along is None else found.residual + c * found.along
        return b.transpose(1, 2, 0), 1 + c * (shares[r] - 1)

    @in_float64
    def ensemble_cov(self, r: int, *, common_start: bool = False) -> Array:
        """Covariance of the average of the K models, [m, m].

        The models start as independent functions; with ``common_start`` all start as the same one.
        """
        if not common_start:
            return self.cov(r).mean(axis=0) / self.num_models
        b, gamma = self.dependence(r, None)
        return _finite(covariance_terms(self._prior, b.mean(axis=0), jnp.mean(gamma)).total)

    @in_float64
    def operator(self, r: int, model: int = 0) -> Array:
        """``M_r`` itself, [q, q]. An n x n recursion: meant for tests and small problems."""
        self.check_law("operator")
        model = whole("model", model, 0, self.num_models - 1)
        eye = np.eye(len(self.theta))[:, None, :]
        given: Any = Input(eye, np.zeros_like(eye) if self.kind.decays else None)  # type: ignore[arg-type]
        program = self.program(model, len(eye))
        return path(self.kind, program, given, self.shares(model), self.rounds_of(r))[0, :, 0]

    def fixed_point(self, model: int = 0) -> Gaussian:
        """Where a model ends when the R rounds are repeated for ever: mean [m, C] and covariance [m, m].

        It is computed from the operator of the rounds, not from Theta^-1, and is reached if ``contraction(model) < 1``.
        Where all clients can be fitted it is the limit of Theorem 2, of the data that are ever trained on. Weight
        decay, and labels that contradict each other, move it: see ``bias``. Costs O((R + n) n^2): for small problems.

        Raises:
            SingularKernelError: float64 does not determine it, as when Theta is nearly singular.
        """
        return asymptotics.fixed_point(self, whole("model", model, 0, self.num_models - 1))

    def bias(self, model: int = 0) -> Array:
        """The mean of the fixed point minus that of Theorem 2, [m, C]: 0 where the clients' losses share a minimiser.

        With all clients in every round FedAvg ends where ``sum_i p_i Phi_i A_i (Phi_i' w - y_i) + decay kappa_i w = 0``
        (A_i and kappa_i are those of ``theory.flow.clients``): least squares in which a client's residual has the
        weight A_i and not 1 / n_i. Where examples repeat, Theorem 2 is taken with the pseudo-inverse of Theta.
        """
        kernels = self.blocks
        found = asymptotics.mean_at_end(self, whole("model", model, 0, self.num_models - 1))
        reference = kernels.ntk_test_train @ np.linalg.pinv(kernels.ntk_train, rcond=1e-12, hermitian=True)
        return found - (reference @ self.targets).reshape(found.shape)

    def contraction(self, model: int = 0) -> float:
        """Factor by which a pass over all rounds shrinks the distance to the fixed point: its spectral radius.

        What server and clients remember (momentum, corrections) counts; directions that no round changes do not.
        """
        return self.spectrum(model).radius

    def spectrum(self, model: int = 0) -> PassSpectrum:
        """Eigenvalues of a pass over all rounds, as a map of a model and of what server and clients remember of it."""
        return asymptotics.spectrum(self, whole("model", model, 0, self.num_models - 1))

    def largest_stable_learning_rate(self, model: int = 0, *, tolerance: float = 1e-4) -> float:
        """The largest learning rate at which repeated passes do not grow, to a relative ``tolerance``.

        The rates of all rounds are scaled alike; what is returned is that of the last round. In contrast to
        ``stability`` it is exact and there for every algorithm, but it is a statement about this schedule alone. It is
        the end of the interval of stable rates that begins at 0; inf if none is too large. It is found by doubling and
        bisection, and each trial costs what ``spectrum`` does.
        """
        whole("model", model, 0, self.num_models - 1)
        number("tolerance", tolerance, above=0)
        return float(self.rounds.learning_rate[-1]) * asymptotics.largest_stable(self, model, tolerance)

    def limit_distance(self, r: int, model: int, limit: Gaussian) -> LimitDistance:
        """How far mean and covariance after round r are from those of ``limit``, as ``gp_limit`` returns it."""
        pairs = (self.mean(r, model), limit.mean), (self.cov(r, model), limit.cov)
        return LimitDistance(*(float(np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b)) for a, b in pairs))

    def stability(self) -> Stability:
        """Whether the largest step of a FedAvg run is small enough for each of its clients: sufficient, not necessary.

        Raises:
            ValueError: an algorithm other than plain FedAvg (see ``largest_stable_learning_rate``); a traced rate.
        """
        return asymptotics.stability(self)

    def check_linear(self, what: str) -> None:
        """Raise ``ValueError`` for a loss under which a run is not linear in its initial function."""
        if not self.kind.is_linear:
            raise ValueError(
                f"loss: got {self.kind.loss!r}, must be 'squared_error' for the {what}: under another loss the run of "
                "one initial function is known (predict), of which draws can be averaged"
            )

    @property
    def _prior(self) -> KernelBlocks:
        """The kernels, with the largest nngp block where JAX can use it without another copy."""
        kernels = self.blocks
        train = kernels.nngp_train
        return kernels if train is None else kernels._replace(nngp_train=on_device(train))  # type: ignore[arg-type]

    @functools.cached_property
    def _needed(self) -> np.ndarray:
        return rows_needed(self.partition, self.slots, self.num_models, self.kind.rows_per_example, len(self.theta))

    def program(self, model: int | None, columns: int) -> Program:
        """What the recursion runs on, for one model or all, with so many columns of coefficients for each.

        A round needs the residuals of its own clients only. With many columns it is cheaper to gather their rows of
        Theta, with few to multiply by all of Theta.
        """
        rounds, num_models = self.rounds, self.num_models if model is None else 1
        sizes = np.asarray(self.partition.sizes)[self.slots.client] * self.slots.present
        # rows of the clients, on average over rounds
        rows = np.sum(sizes) * self.kind.rows_per_example / self.num_rounds * num_models / self.num_models
        if rows * (columns + GATHER) < len(self.theta) * (num_models * columns + READ):
            rounds = rounds._replace(needed=jnp.asarray(self._needed))
        if model is not None:
            rounds = only_model(rounds, whole("model", model, 0, self.num_models - 1))
        targets = None if self.kind.is_linear else jnp.asarray(self.targets)
        return Program(self.theta, self.clients.buckets, rounds, self.numbers, targets)

    def shares(self, model: int | None) -> Any:
        """How much of w_0 weight decay has left before each round and after the last, [R + 1, K]."""
        program, num_models = self.program(model, 1), self.num_models if model is None else 1
        if not self.kind.decays:
            return np.ones((self.num_rounds + 1, num_models))
        return shares_of_start(self.kind, program, num_models=num_models)

    def at_train(self, a: Array, count: int | None = None) -> Array:
        """``Theta(X, X) a`` for a [q, ..]; of the first ``count`` rows, where they are fewer than all."""
        if count is None or count >= len(a):
            return product(self.theta, a)
        found = in_chunks(self.theta, jnp.arange(count), a.reshape(len(a), -1))
        return found[:count].reshape(count, *a.shape[1:])

    @property
    def num_test(self) -> int:
        """Kernel rows of the test points."""
        return len(self.kernels.x_test if isinstance(self.kernels, LargeKernel) else self.kernels.ntk_test_train)

    @property
    def blocks(self) -> KernelBlocks:
        """The kernel blocks; raises ``ValueError`` for a large kernel, of which only products are known."""
        if isinstance(self.kernels, LargeKernel):
            raise ValueError("kernels: got a LargeKernel, must be KernelBlocks for a law, or an operator")
        return self.kernels

    def check_law(self, what: str) -> KernelBlocks:
        """The kernel blocks of a run whose law is known; raises ``ValueError`` for another loss and a large kernel."""
        self.check_linear(what)
        return self.blocks

    def _evolved(self, trained: Input, start: Input, at: Any, r: int | Sequence[int], model: int | None) -> Array:
        found = functions.evolved(self, trained, start, at, self.rounds_of(r), model)
        found = _finite(found if model is None else found[:, 0])
        return found if np.ndim(r) else found[0]

    def rounds_of(self, r: int | Sequence[int]) -> np.ndarray:
        """``r`` as an array of rounds; raises ``ValueError`` for numbers out of range."""
        wanted = [whole("r", value, 0, self.num_rounds) for value in np.atleast_1d(r).tolist()]
        if not wanted:
            raise ValueError("r: got an empty sequence, must have at least one round")
        return np.array(wanted)

    @property
    def targets(self) -> np.ndarray:
        """The targets in rows as those of the kernel, [q, D]."""
        return self.y_train.reshape(len(self.theta), -1)


def _finite(found: Array) -> Array:
    """``found``; raises ``FloatingPointError`` where an unstable run has left the range of float64."""
    if is_concrete(found) and not np.isfinite(np.asarray(found)).all():
        raise FloatingPointError("learning_rate: got one at which the run is not stable: its functions are beyond "
                                 "float64; Flow.largest_stable_learning_rate() is the largest stable one")  # fmt: skip
    return found
