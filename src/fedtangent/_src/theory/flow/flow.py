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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float64, Int, Num

from fedtangent._src.checks import number, whole
from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.kernels.large import LargeKernel
from fedtangent._src.pytrees import on_device
from fedtangent._src.theory.checks import in_float64, is_concrete
from fedtangent._src.theory.flow import asymptotics, functions, stale
from fedtangent._src.theory.flow.asymptotics import PassSpectrum, Stability
from fedtangent._src.theory.flow.clients import ClientBlocks
from fedtangent._src.theory.flow.functions import Runs
from fedtangent._src.theory.flow.recursion import Input, Program, influence, path, shares_of_start
from fedtangent._src.theory.flow.rounds import Rounds, RunSlots, only_model, rows_needed
from fedtangent._src.theory.flow.rules import Kind, Numbers
from fedtangent._src.theory.prior import PriorBlocks, prior_blocks, terms_of
from fedtangent._src.types import AnyArray, Array, ArrayLike, Gaussian, Partition

# Costs in units of a multiply-add, measured on a CPU: reading one entry of Theta, and gathering one.
READ, GATHER = 40, 120


class LimitDistance(NamedTuple):
    """Relative Frobenius distances of the mean and covariance after a round from a limit, such as ``gp_limit``."""

    mean: float
    cov: float


@dataclass(frozen=True, repr=False)
class Flow:
    """Closed-form prediction of every model after every round; built by ``federated_flow``.

    ``flow.mean(10, model=0)`` is the mean of model 0 after ten rounds [m, C], ``flow.cov(10, model=0)`` its covariance
    [m, m], and ``flow.predict(f0_train, f0_test, 10, model=0)`` the run from one known initial function.

    ``r`` is the number of finished rounds, from 0 (the initial model) to ``num_rounds``. Most methods also accept a
    sequence of rounds; the first axis of the result then runs over these rounds. ``model=None`` selects all K models,
    which the next axis runs over. Functions are [m, C] at the test points and [n, C] at the training points, float64.
    An unstable run that leaves the range of float64 raises ``FloatingPointError``; only ``runs`` and ``dependence``
    return inf or NaN instead. Means, covariances and stability need the squared error; under another loss only runs
    from known initial functions are predicted (``predict``, ``predict_train``, ``runs`` and ``residual``). Covariances
    and stability need ``KernelBlocks``. Otherwise these methods raise ``ValueError``.

    The fields are the checked arguments of ``federated_flow`` and the arrays of the recursion: ``slots`` and ``rounds``
    come from the cohorts, ``kind``, ``numbers`` and ``local_steps`` from the rule, ``theta`` and ``clients`` from the
    training points' kernel.
    """

    kernels: KernelBlocks | LargeKernel
    y_train: Float64[np.ndarray, "n C"]
    outputs: str
    num_models: int
    partition: Partition
    slots: RunSlots
    theta: Float[Array, "q p"]  # q = n (outputs "shared") or n C ("full"); [n, p] of a large kernel
    clients: ClientBlocks
    rounds: Rounds
    kind: Kind
    numbers: Numbers
    local_steps: Int[np.ndarray, "N"]

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

    def mean(self, r: int | Sequence[int], model: int | None = None) -> Float[AnyArray, "*r m C"]:
        """Computes the mean of the model's function after ``r`` rounds at the test points, [..., m, C].

        Initial functions are random with mean zero; the result is ``Theta(x, X) M_r Y`` with M_r of ``operator``. It
        exists under the squared error only; another loss raises ``ValueError``.

        Args:
            r, model: Finished rounds and model, as documented at ``Flow``.
        """
        self.check_linear("mean")
        return self.predict(*functions.zero_functions(self, model), r, model)

    def residual(
        self, r: int | Sequence[int], f0_train: ArrayLike | None = None, model: int | None = None
    ) -> Float[AnyArray, "*r n C"]:
        """Computes the residual ``f_r(X) - Y`` at the training points after ``r`` rounds, [..., n, C].

        Args:
            r, model: Finished rounds and model, as documented at ``Flow``.
            f0_train: Initial function at the training points, [n, C] of one model or [K, n, C] of all; by default zero,
                which gives the residual of the mean function and needs the squared error.
        """
        if f0_train is None:
            self.check_linear("residual of the mean")
            f0_train = functions.zero_functions(self, model)[0]
        after = self.predict_train(f0_train, r, model)
        return after - self.y_train.reshape((1,) * (after.ndim - 2) + self.y_train.shape)

    @in_float64
    def predict(
        self,
        f0_train: ArrayLike,
        f0_test: ArrayLike,
        r: int | Sequence[int],
        model: int | None = None,
        *,
        along_train: ArrayLike | None = None,
        along_test: ArrayLike | None = None,
    ) -> Float[AnyArray, "*r m C"]:
        """Computes a model's function ``f_r(x)`` at the test points, [..., m, C], from a known initial function f0.

        The result is exact for a linear model, a linearised network and a network of infinite width.

        Args:
            f0_train, f0_test: Initial function at the training and the test points: [n, C] and [m, C] of one model, or
                with ``model=None`` [K, n, C] and [K, m, C] of all models.
            r, model: Finished rounds and model, as documented at ``Flow``.
            along_train, along_test: Jacobian times initial weights, ``J(x) w_0``, in the same shapes: the part of a
                linearised network that weight decay shrinks. Both or neither, and only with weight decay. By default
                the rule's ``homogeneity`` times f0.
        """
        if (along_train is None) != (along_test is None):
            raise ValueError("along_train: got one of along_train and along_test, must be both or neither")
        at_test = functions.started(self, "test", f0_test, along_test, model)
        trained = functions.started(self, "train", f0_train, along_train, model)
        return self._evolved(trained, at_test, r, model)

    @in_float64
    def predict_train(
        self,
        f0_train: ArrayLike,
        r: int | Sequence[int],
        model: int | None = None,
        *,
        along_train: ArrayLike | None = None,
    ) -> Float[AnyArray, "*r n C"]:
        """Computes a model's function ``f_r(X)`` at the training points, [..., n, C], from a known initial function.

        Args:
            f0_train, r, model, along_train: As for ``predict``.
        """
        trained = functions.started(self, "train", f0_train, along_train, model)
        return self._evolved(trained, None, r, model)

    @in_float64
    def runs(
        self,
        f0_train: AnyArray | Sequence[AnyArray],
        f0_test: AnyArray | Sequence[AnyArray],
        r: Sequence[int],
        rows: Int[np.ndarray, "t"] | None = None,
        model: int | None = None,
    ) -> Runs:
        """Computes functions at training and test points for E initial functions, faster than E calls of ``predict``.

        Args:
            f0_train, f0_test: Initial functions of all K models, [E, K, n, C] and [E, K, m, C], or of one model,
                [E, n, C] and [E, m, C].
            r: Numbers of finished rounds.
            rows: Indices of the training points in the result; None for all.
            model: Index of one model, which is then the only one in the result; None for all.

        Returns:
            ``train`` [r, K, E, n, C] and ``test`` [r, K, E, m, C], with K = 1 for one model; inf or NaN where an
            unstable run leaves the range of float64.
        """
        return functions.runs(self, f0_train, f0_test, self.rounds_of(r), rows, model)

    def ensemble_mean(self, r: int | Sequence[int]) -> Float[AnyArray, "*r m C"]:
        """Computes the mean of the average of the K models after ``r`` rounds at the test points, [..., m, C]."""
        return self.mean(r).mean(axis=-3)

    @in_float64
    def cov(self, r: int, model: int | None = None) -> Float[AnyArray, "m m"] | Float[AnyArray, "K m m"]:
        """Computes the covariance of each output over initial functions, [m, m] for one model, [K, m, m] for all.

        Without weight decay it is ``K(x, x) - B K(X, x) - K(x, X) B' + B K(X, X) B'``, with the nngp kernel K,
        ``B = Theta(x, X) M_r`` and M_r of ``operator``. With outputs "full" its shape is [m C, m C]. The cost is one
        backward pass over r rounds for each model, with a column for each row of the result.

        Args:
            r, model: Number of finished rounds, and model as documented at ``Flow``.
        """
        if model is None:  # one after the other, so that the memory is that of one
            return functions.stacked(*(self.cov(r, k) for k in range(self.num_models)))
        b, gamma = self.dependence(r, model)
        return finite_functions(_covariance(prior_blocks(self._prior), b, gamma))

    @in_float64
    def variance(self, r: int | Sequence[int], model: int | None = None) -> Float[AnyArray, "*r m"]:
        """Computes the variance at each test point, the diagonal of ``cov``: [..., m], or [..., K, m] for all models.

        With outputs "full" there are m C variances in place of m. Each requested round costs as much as ``cov``: one
        backward pass for each model.

        Args:
            r, model: Finished rounds and model, as documented at ``Flow``.
        """
        covs = (self.cov(i, model) for i in np.atleast_1d(r).tolist())
        variances = [cov.diagonal(axis1=-2, axis2=-1) for cov in covs]
        return functions.stacked(*variances) if np.ndim(r) else variances[0]

    @in_float64
    def cross_cov(self, r: int, model: int, other: int) -> Float[AnyArray, "m m"]:
        """Computes the covariance [m, m] between two models that start from the same random initial function.

        With outputs "full" its shape is [m C, m C].

        Args:
            r: Number of finished rounds.
            model, other: Indices of the two models.
        """
        prior, prior_cross, prior_test = prior_blocks(self._prior)
        other = whole("other", other, 0, self.num_models - 1)
        (b,), (g,) = self.dependence(r, self._index(model))
        (c,), (h,) = self.dependence(r, other)
        cross = h * (b @ prior_cross.T) + g * (c @ prior_cross.T).T
        return finite_functions(g * h * prior_test + b @ prior @ c.T - cross)

    @in_float64
    def dependence(self, r: int, model: int | None = None) -> tuple[Float[Array, "K m q"], Float[AnyArray, "K"]]:
        """Computes how ``f_r(x) = gamma f_0(x) - B f_0(X) + ..`` depends on f_0, where ``..`` does not depend on f_0.

        Args:
            r, model: Number of finished rounds, and model as documented at ``Flow``.

        Returns:
            B [K, m, q], with q the rows of the training kernel, and gamma [K]; K = 1 if ``model`` selects one model.
            Without weight decay gamma is 1.
        """
        theta_x = self.check_law("covariance").ntk_test_train
        r = whole("r", r, 0, self.num_rounds)
        shares, active = self.shares(model), np.arange(self.num_rounds) < r
        b = influence(self.program(model, len(theta_x)), theta_x, shares, active)
        return b, 1 + self.numbers.homogeneity * (shares[r] - 1) if self.kind.decays else shares[r]

    @in_float64
    def ensemble_cov(self, r: int, *, common_start: bool = False) -> Float[AnyArray, "m m"]:
        """Computes the covariance of the average of the K models, [m, m], or [m C, m C] with outputs "full".

        Args:
            r: Number of finished rounds.
            common_start: Whether all models start from one random function; otherwise from independent ones.
        """
        if not common_start:
            return self.cov(r).mean(axis=0) / self.num_models
        b, gamma = self.dependence(r, None)
        return finite_functions(_covariance(prior_blocks(self._prior), b, gamma))

    @in_float64
    def operator(self, r: int, model: int = 0) -> Float[AnyArray, "q q"]:
        """Computes the matrix M_r [q, q] of ``f_r(x) = f_0(x) - Theta(x, X) M_r (f_0(X) - Y)``, for small problems.

        q is n, or n C with outputs "full". The cost is a recursion of q x q matrices. With weight decay M_r is the
        matrix of the targets in ``f_r(x) = gamma_r f_0(x) - Theta(x, X) (A_r f_0(X) - M_r Y)``.

        Args:
            r: Number of finished rounds.
            model: Index of the model.
        """
        self.check_law("operator")
        eye = np.eye(len(self.theta))[:, None, :]
        residuals = Input(eye, np.zeros_like(eye) if self.kind.decays else None)
        program, shares = self.program(self._index(model), len(eye)), self.shares(model)
        return finite_functions(path(program, residuals, shares, self.rounds_of(r)))[0, :, 0]

    def fixed_point(self, model: int = 0) -> Gaussian:
        """Computes the mean [m, C] and the covariance [m, m] to which a model tends if the R rounds repeat for ever.

        The model tends to them if ``contraction(model) < 1``. They solve the fixed-point equation of the rounds, and
        are not computed from Theta^-1. If one model can fit the data of all clients, they are the limit of FE-2024's
        Theorem 2 for the clients that train. Weight decay and contradictory labels shift them (see ``bias``). The cost
        is O((R + n) n^2): for small problems.

        Raises:
            SingularKernelError: The rounds have no fixed point, or float64 does not determine it, for example if Theta
                is nearly singular.
            FloatingPointError: The rounds leave the range of float64; a smaller learning rate is needed.
            ValueError: A loss other than the squared error, a ``LargeKernel``, kernels without nngp blocks, or traced
                numbers.
        """
        return asymptotics.pass_of(self, self._index(model)).fixed_point()

    def bias(self, model: int = 0) -> Float[AnyArray, "m C"]:
        """Computes the mean of ``fixed_point`` minus the mean of FE-2024's Theorem 2 (``gp_limit``), [m, C].

        Without weight decay it is 0 if the clients' losses share a minimiser and every example belongs to a client that
        trains. With all clients in every round FedAvg ends at weights w where
        ``sum_i p_i Phi_i A_i (Phi_i' w - y_i) + decay kappa_i w = 0``. Client i has the weight p_i, features Phi_i and
        targets y_i; A_i turns its residual into the coefficients of its update, and a constant gradient of size 1 moves
        it by kappa_i (both in ``theory.flow.clients``). This is least squares in which a client's residual
        has the weight A_i instead of 1 / n_i. If examples repeat, the mean of Theorem 2 uses the pseudo-inverse of
        Theta. It raises the errors of ``fixed_point``, but needs no nngp blocks.
        """
        kernels = self.blocks
        mean = asymptotics.pass_of(self, self._index(model)).mean()
        reference = kernels.ntk_test_train @ np.linalg.pinv(kernels.ntk_train, rcond=1e-12, hermitian=True)
        return mean - (reference @ self.targets).reshape(mean.shape)

    def contraction(self, model: int = 0) -> float:
        """Computes the factor by which a pass over all R rounds finally shrinks the distance to the fixed point.

        It is the spectral radius of the pass as a linear map of a model, its momentum and corrections; directions that
        no pass changes are left out. Above 1 repeated passes diverge. With weight decay the factor by which the initial
        weights shrink counts too, if test points have features that the training points lack. Without ``ntk_test`` this
        is unknown, and the result is an upper bound. The method raises ``FloatingPointError`` if a pass leaves the
        range of float64.
        """
        return self.spectrum(model).radius

    def spectrum(self, model: int = 0) -> PassSpectrum:
        """Computes the eigenvalues of a pass over all rounds, a linear map of a model, its momentum and corrections.

        Directions that no pass changes are counted, but their eigenvalues, which are 1, are left out. The method raises
        ``FloatingPointError`` if a pass leaves the range of float64.
        """
        return asymptotics.pass_of(self, self._index(model)).spectrum()

    def largest_stable_learning_rate(self, model: int = 0, *, tolerance: float = 1e-4) -> float:
        """Computes the largest learning rate at which repeated passes over the rounds do not grow.

        The clients' learning rates of all rounds are scaled by one factor; the returned rate is the rate of the last
        round, which must not be 0. In contrast to ``stability`` the result is exact and available for every algorithm,
        but it holds for this schedule only. It is the upper end of the interval of stable rates that begins at 0; inf
        if every rate is stable, 0 if none is. The search tries rates in steps of 5 % (of a factor 2 far above the first
        rate), and further ones around a maximum of the contraction; then it bisects. It may miss an interval of
        unstable rates that is narrower than its steps. Each trial costs one call of ``spectrum``.

        Args:
            model: Index of the model.
            tolerance: Relative tolerance of the result.
        """
        number("tolerance", tolerance, above=0)
        if (rate := float(self.rounds.learning_rate[-1])) == 0:
            raise ValueError("learning_rate: got 0 in the last round, must be above 0, because the result is its rate")
        return rate * asymptotics.largest_stable(self, self._index(model), tolerance)

    def largest_stable_server_rate(self, delays: ArrayLike, model: int = 0, *, tolerance: float = 1e-6) -> float:
        """Computes the largest server rate at which rounds with late answers are stable, for random delays.

        A round maps the last D + 1 models by a block companion matrix L, which depends on the round's delays. A run is
        stable in mean square, its expected squared distance from the fixed point does not grow, if the spectral radius
        of ``M -> E[L M L']`` is at most 1. Random delays are independent between clients and rounds; each of the flow's
        rounds takes place with the same probability, independently of the others.

        For example, take a mode that a round without delay multiplies by ``1 - g x`` at server rate g, and let all
        answers be s rounds late. With "fed_buff" the mode's growth z per round solves ``z^(s+1) - z^s + g x = 0``, and
        the largest stable rate is ``2 sin(pi / (2 (2 s + 1))) / x``. With "fed_async" z solves
        ``z^(s+1) - (1 - g) z^s - g (1 - x) = 0``, and all g from 0 to 1 are stable for x from 0 to 2.

        Args:
            delays: Probabilities of the delays 0 to D of every client [D + 1], or of each client [N, D + 1]. The rule's
                ``delay_weights`` [D + 1] discount the answers; the rule's delays and server rates are not used.
            model: Index of the model.
            tolerance: Relative tolerance of the result.

        Returns:
            The end of the interval of stable server rates that begins at 0; inf if every rate is stable, 0 if none is.

        Raises:
            ValueError: Another algorithm than "fed_buff" and "fed_async", a loss other than the squared error, or
                delays that are not probabilities.
        """
        number("tolerance", tolerance, above=0)
        return stale.largest_stable(self, delays, self._index(model), tolerance)

    def limit_distance(self, r: int, model: int, limit: Gaussian) -> LimitDistance:
        """Computes how far a model's mean and covariance after round r are from ``limit``, divided by the limit's norm.

        Args:
            r: Number of finished rounds.
            model: Index of the model.
            limit: Mean and covariance, for example of ``gp_limit``.
        """
        pairs = (self.mean(r, model), limit.mean), (self.cov(r, model), limit.cov)
        return LimitDistance(*(float(np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b)) for a, b in pairs))

    def stability(self) -> Stability:
        """Compares the largest step of a FedAvg run with the largest stable step of each client.

        The condition is sufficient for stability, not necessary.

        Raises:
            ValueError: The algorithm is not FedAvg, has server momentum or a client optimiser (see
                ``largest_stable_learning_rate``), the loss is not the squared error, or a rate is traced.
        """
        return asymptotics.stability(self)

    def _index(self, model: int) -> int:
        """Returns ``model``; raises ``ValueError`` unless it is the index of a model."""
        return whole("model", model, 0, self.num_models - 1)

    def check_linear(self, quantity: str) -> None:
        """Raises ``ValueError`` unless the loss is the squared error; the message says that ``quantity`` needs it."""
        if not self.kind.is_linear:
            raise ValueError(
                f"loss: got {self.kind.loss!r}, must be 'squared_error' for the {quantity}; under other losses call "
                "predict for drawn initial functions, and average"
            )

    @property
    def _prior(self) -> KernelBlocks:
        """Kernel blocks whose ``nngp_train`` is a JAX array, without a copy if the NumPy array is read-only."""
        kernels = self.blocks
        train = kernels.nngp_train
        return kernels if train is None else kernels._replace(nngp_train=on_device(train))

    @functools.cached_property
    def _needed(self) -> Int[np.ndarray, "R K E"]:
        return rows_needed(self.partition, self.slots, self.num_models, self.kind.rows_per_example, len(self.theta))

    def program(self, model: int | None, columns: int) -> Program:
        """Builds the ``Program`` (rule, kernel, rounds) for one model, or for all models with ``model=None``.

        Args:
            model: Index of one model, which becomes model 0 of the program; or None for all.
            columns: Number D of coefficient vectors that the recursion carries for each model.
        """
        rounds, num_models = self.rounds, self.num_models if model is None else 1
        sizes = np.asarray(self.partition.sizes)[self.slots.client] * self.slots.present
        # A round needs its clients' residuals only: their rows of Theta are gathered if many columns make that cheaper.
        # rows of the clients, on average over rounds
        rows = np.sum(sizes) * self.kind.rows_per_example / self.num_rounds * num_models / self.num_models
        if rows * (columns + GATHER) < len(self.theta) * (num_models * columns + READ):
            rounds = rounds._replace(needed=on_device(self._needed))
        if model is not None:
            rounds = only_model(rounds, self._index(model))
        targets = None if self.kind.is_linear else on_device(self.targets)
        return Program(self.kind, self.theta, self.clients.buckets, rounds, self.numbers, targets)

    def shares(self, model: int | None) -> Float[AnyArray, "rounds K"]:
        """Computes the share of the initial weights that weight decay leaves before each round and at the end.

        The result is [R + 1, K]; with an index ``model`` it is [R + 1, 1].
        """
        if not self.kind.decays:
            return np.ones((self.num_rounds + 1, self.num_models if model is None else 1))
        return shares_of_start(self.program(model, 1))

    @property
    def num_test(self) -> int:
        """Number of kernel rows of the test points."""
        return len(self.kernels.x_test if isinstance(self.kernels, LargeKernel) else self.kernels.ntk_test_train)

    @property
    def blocks(self) -> KernelBlocks:
        """Kernel blocks; raises ``ValueError`` for a large kernel, which has products but no blocks."""
        if isinstance(self.kernels, LargeKernel):
            raise ValueError("kernels: got a LargeKernel, must be KernelBlocks for all but means, residuals and runs")
        return self.kernels

    def check_law(self, quantity: str) -> KernelBlocks:
        """Returns the kernel blocks; raises ``ValueError`` without the squared error or for a large kernel.

        ``quantity`` is the result that needs both, such as a covariance, for the message.
        """
        self.check_linear(quantity)
        return self.blocks

    def _evolved(
        self, trained: Input, at_test: Input | None, r: int | Sequence[int], model: int | None
    ) -> Float[AnyArray, "*r rows C"]:
        """Computes the function of one run after ``r`` rounds.

        Args:
            trained: Initial function at the training points.
            at_test: Initial function at the test points; None to compute the function at the training points.
            r, model: Finished rounds and model, as documented at ``Flow``.
        """
        train, test = jax.tree.map(lambda values: values[None], (trained, at_test))
        of_train, of_test = functions.followed(self, train, test, self.rounds_of(r), None, model)
        of_models = finite_functions(of_train if of_test is None else of_test)[:, :, 0]
        outputs = of_models if model is None else of_models[:, 0]
        return outputs if np.ndim(r) else outputs[0]

    def rounds_of(self, r: int | Sequence[int]) -> Int[np.ndarray, "r"]:
        """Returns ``r`` as an array of rounds; raises ``ValueError`` for an empty sequence and rounds out of range."""
        rounds = [whole("r", value, 0, self.num_rounds) for value in np.atleast_1d(r).tolist()]
        if not rounds:
            raise ValueError("r: got an empty sequence, must have at least one round")
        return np.array(rounds)

    @property
    def targets(self) -> Num[np.ndarray, "q D"]:
        """Targets [q, D] with one row for each row of the kernel: [n, C], or [n C, 1] if the kernel couples outputs."""
        return self.y_train.reshape(len(self.theta), -1)


@jax.jit
def _covariance(prior: PriorBlocks, b: Float[Array, "K m q"], gamma: Float[AnyArray, "K"]) -> Float[AnyArray, "m m"]:
    """Computes the covariance [m, m] of the average of K models that start from one random function.

    ``prior`` are the nngp blocks; ``b`` and ``gamma`` come from ``Flow.dependence``.
    """
    return terms_of(prior, b.mean(axis=0), jnp.mean(gamma)).total


def finite_functions(values: Float[AnyArray, "*shape"]) -> Float[AnyArray, "*shape"]:
    """Returns ``values`` as a NumPy array, traced ones unchanged; raises ``FloatingPointError`` for inf or NaN."""
    if not is_concrete(values):
        return values
    on_host = np.asarray(values)
    if not np.isfinite(on_host).all():
        raise FloatingPointError(
            "learning_rate: got one at which the run is not stable: its functions are beyond float64; "
            "Flow.largest_stable_learning_rate() is the largest stable one"
        )
    return on_host
