"""The exact federated kernel flow: every round of federated training of a linear, linearised or infinitely wide model.

Under squared loss a client's local steps move the function by ``-Theta(x, X_i) A_i g_i`` (see ``_clients``), so the
global model of every round keeps the form ``f_r(x) = f_0(x) - Theta(x, X) M_r (f_0(X) - Y)`` with
``M_{r+1} = M_r + S_r (I - Theta M_r)`` and S_r block-diagonal over the round's cohort. This is the exact, discrete
version of the dynamics that FE-2021 section 9.2 follows to second order in eq. (13)-(16).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedtangent.kernels.gram import KernelBlocks
from fedtangent.theory import _checks as checks
from fedtangent.theory._clients import Clients, build_clients
from fedtangent.theory._fixed_point import contraction, fixed_point
from fedtangent.theory._precision import in_float64, is_concrete
from fedtangent.theory._recursion import Rounds, build_rounds, normalised, only_model, run_recursion
from fedtangent.theory._stability import Stability, stability
from fedtangent.theory.gp_limit import covariance_terms, gp_limit
from fedtangent.types import Array, Cohort, Gaussian, Partition


class LimitDistance(NamedTuple):
    """Relative Frobenius distance of a round's law from Theorem 2's."""

    mean: float
    cov: float


@dataclass(frozen=True)
class Flow:
    """The law and the predictions of every model after every round; made by ``federated_flow``.

    ``r`` is a number of finished rounds, 0 (the initial model) to ``num_rounds``; where a sequence is allowed, the
    result has a leading axis for it, and one pass serves them all. ``model=None`` gives all K models, with a leading
    axis K after that. Outputs are [m, C] at the test points, [n, C] at the training points; all float64.
    """

    kernels: KernelBlocks
    y_train: np.ndarray  # [n, C]
    outputs: str
    num_models: int
    num_rounds: int
    partition: Partition
    theta: Array  # [q, q], q = n (outputs "shared") or n C ("full")
    clients: Clients
    rounds: Rounds
    local_steps: np.ndarray  # [N]
    trains: np.ndarray  # [K, N] bool, which clients ever train which model
    server_learning_rate: float

    def mean(self, r: int | Sequence[int], model: int | None = None) -> Array:
        """Mean over initial functions of mean zero, ``Theta(x, X) M_r Y``: [..., m, C]."""
        return self.predict(*self._zero_functions(model), r, model)

    def train_mean(self, r: int | Sequence[int], model: int | None = None) -> Array:
        """The same at the training points: [..., n, C]."""
        return self.predict_train(self._zero_functions(model)[0], r, model)

    def residual(self, r: int | Sequence[int], f0_train: Any = None, model: int | None = None) -> Array:
        """``f_r(X) - Y``, [..., n, C], for a given initial function, or for the mean over them (None)."""
        f0_train = self._zero_functions(model)[0] if f0_train is None else f0_train
        after = self.predict_train(f0_train, r, model)
        return after - self.y_train.reshape((1,) * (after.ndim - 2) + self.y_train.shape)

    @in_float64
    def predict(self, f0_train: Any, f0_test: Any, r: int | Sequence[int], model: int | None = None) -> Array:
        """``f_r(x)`` of a model that starts as f0: exact for a linear model, or one of infinite width.

        Args:
            f0_train: [n, C]; f0_test: [m, C], values of one model's initial function; with ``model=None`` of all
                models, [K, n, C] and [K, m, C].

        Raises:
            ValueError: shapes that do not fit; a round or model out of range.
        """
        start = self._function("f0_test", f0_test, self.kernels.ntk_test_train.shape[0], model)
        return self._evolve(f0_train, start, jnp.asarray(self.kernels.ntk_test_train), r, model)

    @in_float64
    def predict_train(self, f0_train: Any, r: int | Sequence[int], model: int | None = None) -> Array:
        """``f_r(X)`` at the training points, [..., n, C]; see ``predict``."""
        start = self._function("f0_train", f0_train, len(self.theta), model)
        return self._evolve(f0_train, start, self.theta, r, model)

    def ensemble_mean(self, r: int | Sequence[int]) -> Array:
        """Mean of the uniform average of the K models: [..., m, C]."""
        return self.mean(r).mean(axis=-3)

    @in_float64
    def cov(self, r: int, model: int | None = None) -> Array:
        """Covariance ``K - B K(X, .) - K(., X) B' + B K(X, X) B'``, ``B = Theta(x, X) M_r``, of each output.

        [m, m] for one model, [K, m, m] for all; with outputs "full", [m C, m C]. Costs one backward pass over r rounds
        with m columns per model.
        """
        b = self._influence(checks.check_index("r", r, self.num_rounds), model)
        terms = [covariance_terms(self.kernels, b[:, i, :].T).total for i in range(b.shape[1])]
        return terms[0] if model is not None else jnp.stack(terms)

    @in_float64
    def influence(self, r: int, model: int) -> Array:
        """``B = Theta(x, X) M_r`` of one model, [m, q]: ``f_r(x) = f_0(x) - B (f_0(X) - Y)``."""
        return self._influence(checks.check_index("r", r, self.num_rounds), model)[:, 0, :].T

    @in_float64
    def ensemble_cov(self, r: int) -> Array:
        """Covariance of the uniform average of K models with independent initial functions: [m, m]."""
        return self.cov(r).mean(axis=0) / self.num_models

    @in_float64
    def operator(self, r: int, model: int = 0) -> Array:
        """``M_r`` itself, [q, q]. An n x n recursion: meant for tests and small problems."""
        return self._coefficients(jnp.eye(len(self.theta))[:, None, :], r, model)[0, :, 0, :]

    def fixed_point(self, model: int = 0) -> Gaussian:
        """Law of a model when the R rounds are repeated for ever, from their own ``M_R`` (not from Theta^-1).

        It is attained if ``contraction(model) < 1``, which ``stability().stable`` guarantees. Needs a constant or
        repeating step size to be meaningful. O(R n^3): for small problems.

        Raises:
            SingularKernelError: not unique in float64, as when some client never trains this model.
        """
        model = checks.check_index("model", model, self.num_models - 1)
        operator = np.asarray(self.operator(self.num_rounds, model))
        return fixed_point(self.kernels, self._rows(self.y_train), operator, self.y_train.shape[1])

    def contraction(self, model: int = 0) -> float:
        """Spectral radius of ``I - M_R Theta``: the factor by which a pass over all rounds shrinks what is left."""
        return contraction(np.asarray(self.theta), np.asarray(self.operator(self.num_rounds, model)))

    def limit_distance(self, r: int, model: int = 0, limit: Gaussian | None = None) -> LimitDistance:
        """How far round r's mean and covariance are from Theorem 2's (``limit``, by default ``gp_limit``'s).

        Raises:
            SingularKernelError: no limit was given and Theta has no usable inverse.
        """
        limit = gp_limit(self.kernels, self.y_train, outputs=self.outputs) if limit is None else limit
        return LimitDistance(
            _relative_distance(self.mean(r, model), limit.mean), _relative_distance(self.cov(r, model), limit.cov)
        )

    def stability(self) -> Stability:
        """Whether the run's largest step is within the sufficient bound of every client that trains."""
        if not is_concrete(self.rounds.learning_rate):
            raise ValueError("stability() needs a known learning_rate, but it is being traced")
        return stability(
            self.clients.largest_eigenvalue,
            self.partition,
            self.local_steps,
            np.any(self.trains, axis=0),
            np.asarray(self.rounds.learning_rate),
            self.server_learning_rate,
        )

    def _evolve(self, f0_train: Any, start: Array, theta_x: Array, r: int | Sequence[int], model: int | None) -> Array:
        """``start - theta_x a_r`` for the path of f0_train's residual, in the caller's axes."""
        initial = self._function("f0_train", f0_train, len(self.theta), model)
        path = self._coefficients(initial - jnp.asarray(self._rows(self.y_train))[:, None, :], r, model)
        moved = start[None] - jnp.einsum("xq,eqkd->exkd", theta_x, path, precision="highest")
        result = moved.transpose(0, 2, 1, 3).reshape(*moved.shape[:1], moved.shape[2], -1, self.y_train.shape[1])
        result = result if model is None else result[:, 0]
        return result if np.ndim(r) else result[0]

    def _coefficients(self, b: Array, r: int | Sequence[int], model: int | None) -> Array:
        """``M_r b`` after each requested round, [E, q, K, D] (K = 1 for one model)."""
        wanted = [checks.check_index("r", value, self.num_rounds) for value in np.atleast_1d(r).tolist()]
        if not wanted:
            raise ValueError("r must name at least one round, got an empty sequence")
        distinct = sorted(set(wanted))
        order = np.where(np.arange(self.num_rounds) < max(distinct, default=0), np.arange(self.num_rounds), -1)
        record = np.full(self.num_rounds, len(distinct))
        for place, value in enumerate(distinct):
            if value > 0:
                record[value - 1] = place
        path = self._run(b, order, record, len(distinct), model)
        return path if wanted == distinct else path[np.searchsorted(distinct, wanted)]

    def _influence(self, r: int, model: int | None) -> Array:
        """``(Theta(x, X) M_r)'`` by the recursion run from round r backwards, [q, K, m]."""
        b = jnp.asarray(self.kernels.ntk_test_train).T[:, None, :]
        order = np.maximum(r - 1 - np.arange(self.num_rounds), -1)
        record = np.where(np.arange(self.num_rounds) == r - 1, 0, 1)
        return self._run(b, order, record, 1, model)[0]

    def _run(self, b: Array, order: np.ndarray, record: np.ndarray, num_records: int, model: int | None) -> Array:
        rounds, num_models = self.rounds, self.num_models
        if model is not None:
            rounds, num_models = only_model(rounds, checks.check_index("model", model, num_models - 1)), 1
        steps = jnp.asarray(order, jnp.int32), jnp.asarray(record, jnp.int32)
        return run_recursion(
            self.theta, b, self.clients.buckets, rounds, *steps, num_models=num_models, num_records=num_records
        )

    def _function(self, name: str, values: Any, rows: int, model: int | None) -> Array:
        """Values [n, C] of one model or [K, n, C] of all, as [rows, K, D]."""
        examples = rows if self.outputs == "shared" else rows // self.y_train.shape[1]
        models = () if model is not None else (self.num_models,)
        shape = (*models, examples, self.y_train.shape[1])
        if np.shape(values) != shape:
            raise ValueError(f"{name} must have shape {shape} for model={model}, got {np.shape(values)}")
        stacked = jnp.asarray(values, jnp.float64).reshape(-1, rows, shape[-1] if self.outputs == "shared" else 1)
        return stacked.transpose(1, 0, 2)

    def _rows(self, values: np.ndarray) -> np.ndarray:
        """[n, C] as the kernel's rows, [q, D]."""
        return values if self.outputs == "shared" else values.reshape(-1, 1)

    def _zero_functions(self, model: int | None) -> tuple[np.ndarray, np.ndarray]:
        models = (self.num_models,) if model is None else ()
        num_test = self.kernels.ntk_test_train.shape[0] // (1 if self.outputs == "shared" else self.y_train.shape[1])
        return np.zeros((*models, *self.y_train.shape)), np.zeros((*models, num_test, self.y_train.shape[1]))


@in_float64
def federated_flow(
    k: KernelBlocks,
    y_train: Any,
    partition: Partition,
    cohorts: Cohort,
    local_steps: Any,
    learning_rate: Any,
    *,
    num_models: int | None = None,
    server_learning_rate: Any = 1.0,
    outputs: str = "shared",
) -> Flow:
    """Exact prediction of every round of federated gradient descent on ``1/(2 n_i) sum_j |f(x_j) - y_j|^2``.

    The loss is FE-2024's eq. (9), summed over outputs; each client takes full-batch steps from the server's model, and
    the server replaces its model by the weighted average of its clients' (``server_learning_rate`` scales the move).
    Assumes a model linear in its parameters: a linear model, a network linearised at its initial weights (k its
    empirical kernel), or the limit of infinite width (k analytic; a network's error is of order width^-1/2).

    Args:
        k: kernel blocks of n training and m test points; the covariance needs the nngp blocks.
        y_train: [n, C] targets.
        partition: which training rows each of N clients holds; rows may belong to several clients.
        cohorts: client, model, weight of every slot, [R, S] each. Weights are relative within a model and round;
            0 marks an empty slot; a model without a slot does not move in that round.
        local_steps: steps T of gradient descent, an integer or one per client [N].
        learning_rate: step size, a number or one per round [R].
        num_models: K; by default one more than the largest model in use.
        server_learning_rate: step of the server, a number.
        outputs: "shared", one [n, n] kernel for all outputs; or "full", [n C, n C] in example-major order.

    Returns:
        Flow. Differentiable with respect to learning_rate, server_learning_rate and the cohorts' weights (with
        ``jax_enable_x64`` set); kernels, targets and indices must be known numbers.

    Raises:
        ValueError: shapes that do not fit; indices out of range; values not finite; local_steps < 1; a rate <= 0; a
            client without examples in a slot; float64 unavailable because the call is traced with 64-bit types off.
    """
    targets = checks.check_targets(y_train)
    k = checks.check_blocks(k, targets.shape, outputs)
    partition = checks.check_partition(partition, len(targets))
    client, model, num_models = checks.check_cohorts(cohorts, np.asarray(partition.sizes), num_models)
    steps = checks.check_steps(local_steps, partition.num_clients)
    checks.check_rate("learning_rate", learning_rate, [(), (len(client),)])
    checks.check_rate("server_learning_rate", server_learning_rate, [()])
    present = checks.present_slots(cohorts)

    clients = build_clients(k.ntk_train, partition, steps, targets.shape[1] if outputs == "full" else 1)
    weight = normalised(model, jnp.asarray(cohorts.weight, jnp.float64), present, num_models)
    rates = jnp.broadcast_to(jnp.asarray(learning_rate, jnp.float64), (len(client),))
    rounds = build_rounds(clients, client, model, present, server_learning_rate * weight, rates)
    trains = np.zeros((num_models, partition.num_clients), bool)
    trains[model[present], client[present]] = True
    return Flow(
        k, targets, outputs, num_models, len(client), partition, jnp.asarray(k.ntk_train), clients, rounds,
        steps, trains, server_learning_rate,
    )  # fmt: skip


def _relative_distance(value: Any, reference: Any) -> float:
    return float(np.linalg.norm(np.asarray(value) - reference) / np.linalg.norm(reference))
