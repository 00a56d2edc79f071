"""The exact federated kernel flow: every round of federated training of a linear, linearised or infinitely wide model.

Under squared loss a client's local steps move the function by ``-Theta(x, X_i) z_i`` with z_i linear in its residual
(see ``clients``), so the global model of every round keeps the form ``f_r(x) = f_0(x) - Theta(x, X) M_r (f_0(X) - Y)``;
for FedAvg ``M_{r+1} = M_r + S_r (I - Theta M_r)`` with S_r block-diagonal over the round's cohort. This is the exact,
discrete version of the dynamics that FE-2021 section 9.2 follows to second order in eq. (13)-(16). Weight decay shrinks
the initial function as well: ``f_r(x) = gamma_r f_0(x) - Theta(x, X) (A_r f_0(X) - M_r Y)``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedtangent.checks import instance, number, whole
from fedtangent.kernels.gram import KernelBlocks, product
from fedtangent.kernels.large import LargeKernel
from fedtangent.losses import check_targets
from fedtangent.theory import checks
from fedtangent.theory.fed_ensemble.limit import covariance_terms, prior_blocks
from fedtangent.theory.flow import asymptotics, functions
from fedtangent.theory.flow.asymptotics import PassSpectrum, Stability
from fedtangent.theory.flow.clients import ClientBlocks, build_clients
from fedtangent.theory.flow.functions import Runs
from fedtangent.theory.flow.recursion import Input, Program, in_chunks, influence, path, shares_of_start
from fedtangent.theory.flow.rounds import (
    Rounds,
    RunSlots,
    build_rounds,
    check_once,
    only_model,
    rows_needed,
)
from fedtangent.theory.flow.rules import Kind, Numbers, Rule, batch_places, check_normalisers, read_rule
from fedtangent.theory.precision import in_float64, is_concrete, on_device
from fedtangent.types import Array, Cohort, Gaussian, Partition

# Costs in units of a multiply-add, measured on a CPU: reading one entry of Theta, and gathering one.
READ, GATHER = 40, 120


class LimitDistance(NamedTuple):
    """Relative Frobenius distance of a round's law from Theorem 2's."""

    mean: float
    cov: float


@in_float64
def federated_flow(
    kernels: KernelBlocks | LargeKernel,
    y_train: Any,
    partition: Partition,
    cohorts: Cohort,
    rule: Rule,
    *,
    num_models: int | None = None,
    outputs: str = "shared",
) -> Flow:
    """Exact prediction of every round of federated gradient descent on ``1/(2 n_i) sum_j |f(x_j) - y_j|^2``.

    The loss is FE-2024's eq. (9), summed over outputs; each client takes the rule's local steps from the server's
    model, and the server replaces its model by the weighted average of its clients'.
    Assumes a model linear in its parameters: a linear model, a network linearised at its initial weights (its empirical
    kernel), or the limit of infinite width (its analytic kernel; a network's error is of order width^-1/2).

    Args:
        kernels: kernel blocks of n training and m test points; the covariance needs the nngp blocks. Of a
            ``LargeKernel`` there is what follows from initial functions, with products in float32, and no law.
        y_train: [n, C] targets.
        partition: which training rows each of N clients holds; rows may belong to several clients.
        cohorts: client, model, weight of every slot, [R, S] each. Weights are relative within a model and round;
            0 marks an empty slot; a model without a slot does not move in that round.
        rule: what clients and server do: ``Rule(local_steps, learning_rate)`` is FedAvg.
        num_models: K; by default one more than the largest model in use.
        outputs: "shared", one [n, n] kernel for all outputs; or "full", [n C, n C] in example-major order.

    Returns:
        Flow. Differentiable with respect to every rate and number of the rule and the cohorts' weights (with
        ``jax_enable_x64`` set); kernels, targets and indices must be known numbers.

    Raises:
        ValueError: shapes that do not fit; indices out of range; values not finite; local_steps < 1; a rate <= 0; a
            client without examples in a slot; an anchoring outside [0, 1]; targets that the loss does not take;
            options that exclude each other; float64 unavailable because the call is
            traced with 64-bit types off.

    Example, FedAvg on three clients, of which two take part in every round:

        >>> import numpy as np, fedtangent as ft
        >>> ft.enable_x64()
        >>> x, x_test = np.linspace(-1, 1, 12)[:, None], np.linspace(-1, 1, 5)[:, None]
        >>> clients = ft.partition.iid(12, num_clients=3, seed=0)
        >>> model = ft.models.mlp(1, 1, widths=(64,), activation="erf", dtype="float64")
        >>> kernels = ft.kernels.kernel_blocks(model.kernel, x, x_test)
        >>> two = ft.federated.schedule.uniform_sampling(3, clients_per_round=2)
        >>> cohorts = ft.federated.compose.drawn_cohorts(two, clients, num_rounds=10, seed=0)
        >>> rule = ft.theory.Rule(local_steps=5, learning_rate=0.1)
        >>> flow = ft.theory.federated_flow(kernels, np.sin(3 * x), clients, cohorts, rule)
        >>> flow.mean(10).shape, flow.cov(10).shape  # of model 0 .. K - 1 at the five test points, after ten rounds
        ((1, 5, 1), (1, 5, 5))
    """
    large = isinstance(kernels, LargeKernel)
    given = (("partition", partition, Partition), ("cohorts", cohorts, Cohort), ("rule", rule, Rule))
    for name, value, kind_of in (*given, *(() if large else (("kernels", kernels, KernelBlocks),))):
        instance(name, value, kind_of)
    targets = checks.check_targets(y_train)
    kernels = (
        checks.check_large(kernels, len(targets), outputs, rule.dynamics)
        if isinstance(kernels, LargeKernel)
        else checks.check_blocks(kernels, targets.shape, outputs)
    )
    partition = checks.check_partition(partition, len(targets))
    client, model, num_models = checks.check_cohorts(cohorts, np.asarray(partition.sizes), num_models)
    slots = RunSlots(client, model, checks.present_slots(cohorts))
    steps = checks.check_steps(rule.local_steps, partition.num_clients)
    each_round = rule.learning_rate, rule.server_learning_rate, rule.anchoring
    for name, rate in zip(("learning_rate", "server_learning_rate"), each_round[:2], strict=True):
        checks.check_rate(name, rate, len(client))
    checks.check_shares("anchoring", rule.anchoring, len(client))
    kind, numbers = read_rule(rule, steps, stepwise=large)
    check_targets(kind.loss, targets, "y_train")
    check_normalisers(rule, kind, numbers, steps, slots.trains(partition.num_clients))
    if kind.corrects and is_concrete(cohorts.weight):
        check_once(slots, kind.algorithm)

    width = targets.shape[1] if outputs == "full" else 1
    batches = batch_places(rule, steps, partition, slots.client, slots.present)
    theta = kernels if isinstance(kernels, LargeKernel) else kernels.ntk_train
    clients = build_clients(theta, partition, steps, width, kind.stepwise)
    kind = kind._replace(rows_per_example=width)
    checks.check_own_blocks(clients.smallest_eigenvalue, clients.largest_eigenvalue)
    rounds = build_rounds(clients, slots, cohorts.weight, each_round, num_models)
    rounds = rounds._replace(batches=None if batches is None else jnp.asarray(batches))
    held: Any = kernels.ntk_train if isinstance(kernels, LargeKernel) else on_device(kernels.ntk_train)
    return Flow(kernels, targets, outputs, num_models, partition, slots, held, clients, rounds, kind, numbers, steps)


@dataclass(frozen=True, repr=False)
class Flow:
    """The law and the predictions of every model after every round; made by ``federated_flow``.

    ``r`` is a number of finished rounds, 0 (the initial model) to ``num_rounds``; where a sequence is allowed, the
    result has a leading axis for it, and one pass serves them all. ``model=None`` gives all K models, with a leading
    axis K after that. Outputs are [m, C] at the test points, [n, C] at the training points; all float64. Where a run
    that is not stable leaves the range of float64 they raise ``FloatingPointError``, but for ``runs``, which has inf or
    NaN there.
    """

    kernels: KernelBlocks | LargeKernel
    y_train: np.ndarray  # [n, C]
    outputs: str
    num_models: int
    partition: Partition
    cohorts: RunSlots
    theta: Array  # [q, q], q = n (outputs "shared") or n C ("full"); of a large kernel its [n, p]
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
        """R."""
        return len(self.cohorts.client)

    def mean(self, r: int | Sequence[int], model: int | None = None) -> Array:
        """Mean over initial functions of mean zero, ``Theta(x, X) M_r Y``: [..., m, C]."""
        self.check_linear("mean")
        return self.predict(*functions.zero_functions(self, model), r, model)

    def residual(self, r: int | Sequence[int], f0_train: Any = None, model: int | None = None) -> Array:
        """``f_r(X) - Y``, [..., n, C], for a given initial function, or for the mean over them (None)."""
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
        """``f_r(x)`` of a model that starts as f0: exact for a linear model, or one of infinite width.

        Args:
            f0_train: [n, C]; f0_test: [m, C], values of one model's initial function; with ``model=None`` of all
                models, [K, n, C] and [K, m, C].
            along_train, along_test: ``J(x) w_0`` of the same shapes, which weight decay takes away from a linearised
                network; by default ``homogeneity`` times f0, as it is for a linear model (1) or a network without
                biases whose activations are homogeneous (its number of layers).
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
        """``f_r`` at training and test points of runs from several initial functions, that share each pass over Theta.

        Args:
            f0_train: [E, K, n, C]; f0_test: [E, K, m, C], of all K models; r: rounds.
            num_train: the first so many training points are wanted; None for all.
        """
        wanted = len(self.y_train) if num_train is None else whole("num_train", num_train, 1, len(self.y_train))
        return functions.runs(self, f0_train, f0_test, self.rounds_of(r), wanted)

    def ensemble_mean(self, r: int | Sequence[int]) -> Array:
        """Mean of the uniform average of the K models: [..., m, C]."""
        return self.mean(r).mean(axis=-3)

    @in_float64
    def cov(self, r: int, model: int | None = None) -> Array:
        """Covariance ``K - B K(X, .) - K(., X) B' + B K(X, X) B'``, ``B = Theta(x, X) M_r``, of each output.

        [m, m] for one model, [K, m, m] for all; with outputs "full", [m C, m C]. Costs one backward pass over r rounds
        with m columns per model.
        """
        if model is None:  # one after the other, so that the memory is that of one
            return jnp.stack([jnp.asarray(self.cov(r, k)) for k in range(self.num_models)])
        b, gamma = self.dependence(r, model)
        return _finite(covariance_terms(self._prior, b[0], gamma[0]).total)

    @in_float64
    def variance(self, r: int | Sequence[int], model: int | None = None) -> Array:
        """Variance of each test point's outputs, [..., K, m] ([..., m] for one model); a backward pass for each round.

        With outputs "full", [..., m C]. See ``cov``.
        """
        found = [jnp.diagonal(jnp.asarray(self.cov(i, model)), axis1=-2, axis2=-1) for i in np.atleast_1d(r).tolist()]
        return jnp.stack(found) if np.ndim(r) else found[0]

    @in_float64
    def cross_cov(self, r: int, model: int, other: int) -> Array:
        """Covariance of two models that started as the same function, [m, m]; models that did not have none."""
        (prior, prior_cross, prior_test), last = prior_blocks(self._prior), self.num_models - 1
        model, other = whole("model", model, 0, last), whole("other", other, 0, last)
        (b,), (g,) = self.dependence(r, model)
        (c,), (h,) = self.dependence(r, other)
        cross = h * (b @ prior_cross.T) + g * (c @ prior_cross.T).T
        return _finite(g * h * prior_test + b @ prior @ c.T - cross)

    @in_float64
    def dependence(self, r: int, model: int | None = None) -> tuple[Array, Array]:
        """B [K, m, q] and gamma [K] of ``f_r(x) = gamma f_0(x) - B f_0(X) + ..``, K = 1 for one model."""
        self.check_law("covariance")
        r, theta_x = whole("r", r, 0, self.num_rounds), jnp.asarray(self.blocks.ntk_test_train)
        program, num_models = self.program(model, len(theta_x)), self.num_models if model is None else 1
        shares, active = self.shares(model), np.arange(self.num_rounds) < r
        found = influence(self.kind, program, theta_x, shares, active, num_models=num_models)
        c = self.numbers.homogeneity
        b = found.residual if found.along is None else found.residual + c * found.along
        return b.transpose(1, 2, 0), 1 + c * (shares[r] - 1)

    @in_float64
    def ensemble_cov(self, r: int, *, common_start: bool = False) -> Array:
        """Covariance of the uniform average of the K models, [m, m].

        Their initial functions are independent, or one and the same (``common_start``).
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
        eye = np.eye(len(self.blocks.ntk_train))[:, None, :]
        given: Any = Input(eye, np.zeros_like(eye) if self.kind.decays else None)  # type: ignore[arg-type]
        program = self.program(model, len(eye))
        return path(self.kind, program, given, self.shares(model), self.rounds_of(r))[0, :, 0]

    def fixed_point(self, model: int = 0) -> Gaussian:
        """Law of a model when the R rounds are repeated for ever, from their own operator (not from Theta^-1).

        Attained if ``contraction(model) < 1``. Where the clients can all be fitted it is Theorem 2's (of the data that
        is ever trained on); weight decay, and labels that contradict each other, move it: see ``bias``. Needs constant
        or repeating step sizes to be meaningful. O((R + n) n^2): for small problems.

        Raises:
            SingularKernelError: not determined in float64, as when Theta is nearly singular.
        """
        return asymptotics.fixed_point(self, whole("model", model, 0, self.num_models - 1))

    def bias(self, model: int = 0) -> Array:
        """How far the fixed point's mean is from Theorem 2's, [m, C]: 0 where local losses share their minimiser.

        With everybody in every round FedAvg ends where ``sum_i p_i Phi_i A_i (Phi_i' w - y_i) + decay kappa_i w = 0``
        (A_i and kappa_i of ``clients``): least squares that weighs a client's residual by A_i in the place of 1 / n_i.
        Where examples repeat, Theorem 2's ``Theta^-1`` is read as the pseudo-inverse.
        """
        kernels = self.blocks
        found = asymptotics.mean_at_end(self, whole("model", model, 0, self.num_models - 1))
        reference = kernels.ntk_test_train @ np.linalg.pinv(kernels.ntk_train, rcond=1e-12, hermitian=True)
        return found - (reference @ self.targets).reshape(found.shape)

    def contraction(self, model: int = 0) -> float:
        """Factor by which a pass over all rounds shrinks what is left: the spectral radius of the pass.

        Includes what server and clients remember; directions that no round ever changes do not count.
        """
        return self.spectrum(model).radius

    def spectrum(self, model: int = 0) -> PassSpectrum:
        """Eigenvalues of a pass over all rounds, as a map of all that a model's run remembers."""
        return asymptotics.spectrum(self, whole("model", model, 0, self.num_models - 1))

    def largest_stable_learning_rate(self, model: int = 0, *, tolerance: float = 1e-4) -> float:
        """The largest (last) learning rate, all rounds' scaled alike, for which repeated passes do not grow.

        Found on the spectral radius of the very schedule, to a relative ``tolerance``: unlike ``stability`` exact, for
        every algorithm, and no statement about other schedules. It is the end of the interval of stable rates that
        begins at 0, looked for by doubling; inf if none is too large. Each trial costs what ``spectrum`` does.
        """
        whole("model", model, 0, self.num_models - 1)
        number("tolerance", tolerance, above=0)
        return float(self.rounds.learning_rate[-1]) * asymptotics.largest_stable(self, model, tolerance)

    def limit_distance(self, r: int, model: int, limit: Gaussian) -> LimitDistance:
        """How far round r's mean and covariance are from Theorem 2's (``limit``, of ``gp_limit``)."""
        pairs = (self.mean(r, model), limit.mean), (self.cov(r, model), limit.cov)
        return LimitDistance(*(float(np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b)) for a, b in pairs))

    def stability(self) -> Stability:
        """Whether the run's largest step is within the sufficient bound of every client that trains (FedAvg's rounds).

        Raises:
            ValueError: an algorithm with a memory or FedNova (see ``largest_stable_learning_rate``); a traced rate.
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

    @property
    def width(self) -> int:
        """Kernel rows of an example."""
        return 1 if self.outputs == "shared" else self.y_train.shape[1]

    @functools.cached_property
    def _needed(self) -> np.ndarray:
        return rows_needed(self.partition, self.cohorts, self.num_models, self.width, len(self.theta))

    def program(self, model: int | None, columns: int) -> Program:
        """What the recursion runs on for one model, or all, with as many columns for each.

        Residuals are needed of the round's clients alone. Where many columns make the arithmetic dear, their rows of
        Theta are gathered; else one product with all of Theta is cheaper.
        """
        rounds, num_models = self.rounds, self.num_models if model is None else 1
        sizes = np.asarray(self.partition.sizes)[self.cohorts.client] * self.cohorts.present
        rows = np.sum(sizes) * self.width / self.num_rounds * num_models / self.num_models  # on average over rounds
        if rows * (columns + GATHER) < len(self.theta) * (num_models * columns + READ):
            rounds = rounds._replace(needed=jnp.asarray(self._needed))
        if model is not None:
            rounds = only_model(rounds, whole("model", model, 0, self.num_models - 1))
        targets = None if self.kind.is_linear else jnp.asarray(self.targets)
        return Program(self.theta, self.clients.buckets, rounds, self.numbers, targets)

    def shares(self, model: int | None) -> Any:
        """What weight decay has left of w_0 before each round and after the last, [R + 1, K]."""
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
        """The kernels as blocks, which a law needs; raises ``ValueError`` for a large kernel, which has products."""
        return _blocks(self.kernels)

    def check_law(self, what: str) -> None:
        """Raise ``ValueError`` where a run of one initial function is all that is known."""
        self.check_linear(what)
        _blocks(self.kernels)

    def _evolved(self, trained: Input, start: Input, at: Any, r: int | Sequence[int], model: int | None) -> Array:
        found = functions.evolved(self, trained, start, at, self.rounds_of(r), model)
        found = _finite(found if model is None else found[:, 0])
        return found if np.ndim(r) else found[0]

    def rounds_of(self, r: int | Sequence[int]) -> np.ndarray:
        """Numbers of finished rounds, checked."""
        wanted = [whole("r", value, 0, self.num_rounds) for value in np.atleast_1d(r).tolist()]
        if not wanted:
            raise ValueError("r: got an empty sequence, must have at least one round")
        return np.array(wanted)

    @property
    def targets(self) -> np.ndarray:
        """The targets as the kernel's rows, [q, D]."""
        return self.y_train.reshape(len(self.theta), -1)


def _finite(found: Array) -> Array:
    """What was found; raises ``FloatingPointError`` where a run that is not stable has left float64."""
    if is_concrete(found) and not np.isfinite(np.asarray(found)).all():
        raise FloatingPointError("learning_rate: got one at which the run is not stable: its functions are beyond "
                                 "float64; Flow.largest_stable_learning_rate() is the largest stable one")  # fmt: skip
    return found


def _blocks(kernels: KernelBlocks | LargeKernel) -> KernelBlocks:
    if isinstance(kernels, LargeKernel):
        raise ValueError("kernels: got a LargeKernel, must be KernelBlocks for a law, or an operator")
    return kernels
