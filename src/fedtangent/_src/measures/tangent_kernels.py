"""Measures of tangent kernels: change since the start, alignment with the targets, spectrum, clients' Gram operators.

The functions take symmetric matrices [n, n] and compute in NumPy float64. ``kernel_diagnostics`` applies them to the
kernel of every model during a run. If a matrix is not finite, because the run diverged, they return NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float64, Int, Shaped

from fedtangent._src import checks, pytrees
from fedtangent._src.checks import finite, real_array, square, whole
from fedtangent._src.data.dataset import classification_targets
from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.models.dense import DenseStructure
from fedtangent._src.models.features import LinearStructure
from fedtangent._src.types import (
    Algorithm,
    AnyArray,
    Array,
    ArrayLike,
    FederatedData,
    Key,
    Model,
    OfParameters,
    Partition,
    PyTree,
)

METRICS = (  # of each model
    *("drift", "drift_operator", "alignment", "alignment_centred", "effective_rank", "trace_over_largest"),
    *("largest_eigenvalue", "smallest_eigenvalue", "condition_number"),
    *("commutator", "commutator_relative", "gram_variance", "gram_variance_relative"),
)
BLOCK_SIZE = 128  # for networks without a structured kernel; bounds the memory


class Drift(NamedTuple):
    """Relative change of a tangent kernel since the start of a run, ``|Theta_t - Theta_0| / |Theta_0|``, in two norms.

    Attributes:
        frobenius: The change in the Frobenius norm.
        operator: The change in the operator norm, the largest absolute eigenvalue.
    """

    frobenius: float
    operator: float


class Spectrum(NamedTuple):
    """Eigenvalues of a kernel matrix [n, n] and numbers that summarise them.

    Attributes:
        eigenvalues: Largest first; those below 0 by rounding are set to 0.
        effective_rank: exp of the entropy of the eigenvalues divided by their sum, from 1 to n.
        trace_over_largest: Sum of the eigenvalues divided by the largest one, from 1 to n.
        condition_number: Largest eigenvalue over smallest; infinite if the smallest is 0 to rounding.
    """

    eigenvalues: Float64[np.ndarray, "n"]
    effective_rank: float
    trace_over_largest: float
    condition_number: float  # lambda_max / lambda_min; infinite where lambda_min is rounding, n eps lambda_max or less


class GramOperators(NamedTuple):
    """Differences between the clients' Gram operators Pi_i, which ``gram_operators`` defines.

    Attributes:
        commutators: Norm of ``Pi_i Pi_j - Pi_j Pi_i`` for each of p pairs of clients; 0 if they commute.
        relative: Each commutator's norm over its largest possible value ``sqrt(2) |Pi_i| |Pi_j|``, from 0 to 1.
        variance: Norm of the variance of Pi_i over clients; 0 if all are equal.
        relative_variance: ``variance`` over the norm of the squared mean of Pi_i.
    """

    commutators: Float64[np.ndarray, "p"]
    relative: Float64[np.ndarray, "p"]
    variance: float
    relative_variance: float

    @property
    def mean(self) -> float:
        """Mean over pairs of clients of the norm of their Gram operators' commutator; 0 if there are no pairs."""
        return float(np.mean(self.commutators)) if len(self.commutators) else 0.0

    @property
    def relative_mean(self) -> float:
        """Mean over pairs of clients of the commutator's norm divided by its largest possible value; 0 if no pairs."""
        return float(np.mean(self.relative)) if len(self.relative) else 0.0


def drift(theta: ArrayLike, theta_0: ArrayLike) -> Drift:
    """Computes the relative change of a kernel since the start, ``|theta - theta_0| / |theta_0|``, in two norms.

    For networks of width l, Theorem 9.1 of FE-2021 bounds the change by O(l^-1/2). The result is NaN if an entry is not
    finite.

    Args:
        theta: The kernel now, [n, n].
        theta_0: The initial kernel, [n, n].

    Raises:
        ValueError: The matrices are not square and of one shape, or ``theta_0`` is zero.
    """
    now, before = square("theta", theta), square("theta_0", theta_0)
    if now.shape != before.shape:
        raise ValueError(f"theta_0: got shape {before.shape}, must be {now.shape}, the shape of theta")
    if not before.any():
        raise ValueError("theta_0: got zeros only, must have other entries: drift is relative to theta_0")
    if not (np.isfinite(now).all() and np.isfinite(before).all()):
        return Drift(float("nan"), float("nan"))
    change = now - before
    frobenius = float(np.linalg.norm(change) / np.linalg.norm(before))
    return Drift(frobenius, _operator_norm(change) / _operator_norm(before) if change.any() else 0.0)


def alignment(theta: ArrayLike, targets: ArrayLike, centred: bool = False) -> float:
    """Computes the kernel-target alignment ``<Theta, Y Y'>_F / (|Theta|_F |Y Y'|_F)``, between 0 (worst) and 1.

    Source: Cristianini et al., 2001, definitions 1 and 3. The alignment is NaN if a norm is zero or ``theta`` is not
    finite.

    Args:
        theta: Kernel [n, n].
        targets: Y [n, C]: labels, one-hot classes or numbers.
        centred: Whether both kernels are first centred in feature space, ``H Theta H`` with ``H = I - 11'/n`` (Cortes
            et al., 2012, definition 4). Without it the alignment of an almost constant kernel is near 1 for any
            targets.

    Raises:
        ValueError: ``theta`` is not square, or the targets have another shape than [n, C] or are not finite.
    """
    kernel, y = square("theta", theta), real_array("targets", targets)
    if y.ndim != 2 or len(y) != len(kernel):
        raise ValueError(f"targets: got shape {y.shape}, must be [n, C] with n = {len(kernel)}")
    finite("targets", y)
    if centred:
        y = y - y.mean(axis=0)
        kernel = kernel - kernel.mean(axis=0)
        kernel = kernel - kernel.mean(axis=1, keepdims=True)
    # |Y Y'|_F = |Y' Y|_F and <Theta, Y Y'> = tr(Y' Theta Y): nothing of size n x n is made of Y
    scale = float(np.linalg.norm(kernel) * np.linalg.norm(y.T @ y))
    return float(np.sum(y * (kernel @ y)) / scale) if scale > 0 else float("nan")


def spectrum(theta: ArrayLike) -> Spectrum:
    """Computes the eigenvalues of a positive semidefinite ``theta`` [n, n] and their summaries; see ``Spectrum``.

    Source of the effective rank: O. Roy and M. Vetterli, "The effective rank", EUSIPCO 2007, definition 1. If all
    eigenvalues are 0, ``effective_rank`` and ``trace_over_largest`` are NaN, and ``condition_number`` is infinite. If
    ``theta`` is not finite, all numbers are NaN.

    Raises:
        ValueError: ``theta`` is not square, or an eigenvalue is below 0 by more than float32's rounding.
    """
    kernel = square("theta", theta)
    if not np.isfinite(kernel).all():
        nothing = float("nan")
        return Spectrum(np.full(len(kernel), nothing), nothing, nothing, nothing)
    raw = np.linalg.eigvalsh(0.5 * (kernel + kernel.T))[::-1]
    if raw[-1] < -len(raw) * np.finfo(np.float32).eps * abs(raw).max():
        raise ValueError(f"theta: got the eigenvalue {raw[-1]:.6g} (the largest is {raw[0]:.6g}), must be at least 0")
    values = np.maximum(raw, 0.0)
    total = float(values.sum())
    if total == 0:
        return Spectrum(values, float("nan"), float("nan"), float("inf"))
    share = values / total
    share = share[share > 0]
    rank = float(np.exp(-np.sum(share * np.log(share))))
    rounding = len(values) * np.finfo(np.float64).eps * values[0]
    condition = float(values[0] / values[-1]) if values[-1] > rounding else float("inf")
    return Spectrum(values, rank, total / float(values[0]), condition)


def gram_operators(theta: ArrayLike, clients: Partition, max_pairs: int = 1000, seed: int = 0) -> GramOperators:
    """Measures how much the clients' Gram operators ``Pi_i f = Theta(., X_i) f(X_i) / n_i`` differ from each other.

    Pi_i maps a function f to the kernel's smoothing of its values at the n_i examples X_i of client i. Two measures are
    from section 9.2 of FE-2021: the commutators ``[Pi_i, Pi_j] = Pi_i Pi_j - Pi_j Pi_i``, and ``Var(Pi_i) = sum_i
    p_i Pi_i^2 - (sum_i p_i Pi_i)^2`` with ``p_i = n_i / sum n``, here over all clients with examples. They are the
    second-order terms of the product (Lemma 9.2) and of the mean (Lemma 9.3) of the exponentials ``e^{-h Pi_i}``. Both
    vanish if the clients hold the same examples. They are positive for different examples of one distribution; compare
    with a random partition of the same sizes.

    Norms are Hilbert-Schmidt norms on the kernel's function space, where ``Pi_i`` is symmetric: with the Jacobian J_i
    of the outputs at X_i by the weights, it acts on weights as ``J_i' J_i / n_i``. Then ``|[Pi_i, Pi_j]|^2 = 2 tr(T_ji
    T_ii T_ij T_jj) - 2 |T_ij T_ji|_F^2`` over ``(n_i n_j)^2``, with ``T_ij = Theta(X_i, X_j)``. (The norm of the matrix
    that acts on the values at the n examples hardly tells clients of one distribution from clients of different ones.)
    A pair costs ``n_i n_j (n_i + n_j)``; the variance is one product of [n, n] matrices. If ``theta`` is not finite,
    all numbers are NaN.

    Args:
        theta: Kernel [n, n] of all examples, symmetric positive semidefinite.
        clients: Rows of ``theta`` that each client holds; clients may share rows, and clients without rows are left
            out.
        max_pairs: Number of pairs that are drawn if there are more.
        seed: Seed of the drawn pairs.

    Raises:
        ValueError: The matrix is not square, rows are out of its range, a client holds a row twice, no client holds a
            row, or ``max_pairs`` is below 1.
    """
    kernel = square("theta", theta)
    whole("max_pairs", max_pairs)
    rows = _rows_of(clients, len(kernel))
    first, second = np.triu_indices(len(rows), 1)
    if len(first) > max_pairs:
        pairs = np.sort(np.random.default_rng(checks.seed(seed)).choice(len(first), max_pairs, replace=False))
        first, second = first[pairs], second[pairs]
    if not np.isfinite(kernel).all():
        unknown = np.full(len(first), np.nan)
        return GramOperators(unknown, unknown, float("nan"), float("nan"))
    norms = np.array([np.linalg.norm(kernel[np.ix_(client, client)]) / len(client) for client in rows])
    squares = [_commutator(kernel, rows[i], rows[j]) for i, j in zip(first, second, strict=True)]
    commutators = np.sqrt(np.maximum(np.array(squares), 0.0))
    relative = commutators / (np.sqrt(2) * norms[first] * norms[second])
    return GramOperators(commutators, relative, *_variance(kernel, rows))


def _commutator(kernel: Float64[np.ndarray, "n n"], a: Int[np.ndarray, "n_a"], b: Int[np.ndarray, "n_b"]) -> float:
    """Computes ``|[Pi_a, Pi_b]|^2`` of two clients' Gram operators, as ``gram_operators`` defines it.

    ``a`` and ``b`` are the rows of the kernel that the two clients hold.
    """
    cross, of_a, of_b = kernel[np.ix_(a, b)], kernel[np.ix_(a, a)], kernel[np.ix_(b, b)]
    square = 2 * (np.sum((of_a @ cross) * (cross @ of_b)) - np.sum((cross @ cross.T) ** 2))
    return float(square) / (len(a) * len(b)) ** 2


def _variance(kernel: Float64[np.ndarray, "n n"], rows: list[Int[np.ndarray, "_"]]) -> tuple[float, float]:
    """Computes the norm of the variance of the clients' Gram operators, and its ratio to the norm of the squared mean.

    ``gram_operators`` defines the operators. ``kernel`` has all n examples; ``rows`` lists each client's rows of it.
    """
    total = sum(map(len, rows))
    count, within = np.zeros(len(kernel)), np.zeros_like(kernel)
    for client in rows:
        count[client] += 1 / total
        within[np.ix_(client, client)] += kernel[np.ix_(client, client)] / (len(client) * total)
    mean_squared = kernel @ (count[:, None] * kernel * count[None, :])
    matrix = kernel @ within - mean_squared
    norms = [np.sqrt(max(float(np.sum(m * m.T)), 0.0)) for m in (matrix, mean_squared)]  # of J M J' from Theta M
    return norms[0], norms[0] / norms[1] if norms[1] > 0 else float("nan")


def _operator_norm(symmetric: Float64[np.ndarray, "n n"]) -> float:
    return float(np.max(np.abs(np.linalg.eigvalsh(0.5 * (symmetric + symmetric.T)))))


def _rows_of(clients: Partition, n: int) -> list[Int[np.ndarray, "_"]]:
    """Returns the rows of the kernel [n, n] that each client holds, without empty clients.

    Raises ``ValueError`` if all clients are empty, a row is not below n, or a client holds a row twice.
    """
    rows = [client for client in map(clients.client, range(clients.num_clients)) if len(client)]
    if not rows:
        raise ValueError("clients: got a partition without examples, must hold at least one")
    for client in rows:
        if client.min() < 0 or client.max() >= n:
            raise ValueError(
                f"clients: got rows {client.min()} to {client.max()}, must be from 0 to {n - 1}, the rows of theta"
            )
        if len(np.unique(client)) < len(client):
            raise ValueError("clients: got a client that holds a row twice, must hold each once")
    return rows


# ---- along training -------------------------------------------------------------------------------------------------


class Watched(NamedTuple):
    """Training examples on which the tangent kernels of a run are measured.

    Attributes:
        rows: Indices of the m examples in the training data, ascending.
        x: Inputs.
        targets: Targets; for classes, one-hot vectors less ``1 / C``.
        clients: Which of the m examples each client holds.
    """

    rows: Int[np.ndarray, "m"]
    x: Shaped[AnyArray, "m ..."]
    targets: Float64[np.ndarray, "m C"]
    clients: Partition


@dataclass(frozen=True)
class KernelDiagnostics:
    """Function that measures the tangent kernels of a run at an evaluation; built by ``kernel_diagnostics``.

    Metrics are means over the K models; with several models there is also one for each, such as ``drift_model_0``. A
    metric is NaN if a kernel is not finite. The measurement changes no other result of the run, not even in its last
    bit.

    Attributes:
        watched: Examples on which kernels are measured.
        kernels_of: Function of a state and inputs that computes the kernels.
        parameters: Function of a state that returns the networks' parameters.
        initial: Kernels at the start of the run.
    """

    watched: Watched
    kernels_of: Callable[[PyTree, Shaped[AnyArray, "m ..."]], Float[Array, "K m m"]]  # of a state, at ``watched.x``
    parameters: OfParameters  # of a state
    initial: Float64[np.ndarray, "K m m"]  # Theta_0

    def __call__(self, algorithm: Algorithm, state: PyTree) -> dict[str, float]:
        """Computes the metrics that ``kernel_diagnostics`` lists for a state of the run; returns them by name."""
        of_models = [self._measured(theta, k) for k, theta in enumerate(self.kernels(state))]
        metrics = {name: float(np.mean([values[name] for values in of_models])) for name in METRICS}
        if len(of_models) > 1:
            metrics |= {f"{name}_model_{k}": values[name] for name in METRICS for k, values in enumerate(of_models)}
        return metrics

    def kernels(self, state: PyTree) -> Float64[np.ndarray, "K m m"]:
        """Computes every model's tangent kernel on the examples ``watched``, mean over outputs, [K, m, m] float64."""
        return np.asarray(self.kernels_of(state, self.watched.x), np.float64)

    def drifts(self, state: PyTree) -> Float64[np.ndarray, "K"]:
        """Computes the relative change ``|Theta - Theta_0| / |Theta_0|`` of every model's kernel since the start, [K].

        Theta is the kernel at ``state``, Theta_0 the kernel of the initial model. The norm is the Frobenius norm.
        """
        return np.array([drift(*pair).frobenius for pair in zip(self.kernels(state), self.initial, strict=True)])

    def _measured(self, theta: Float64[np.ndarray, "m m"], model: int) -> dict[str, float]:
        eigen, gram = spectrum(theta), gram_operators(theta, self.watched.clients)
        largest, smallest = (float(eigen.eigenvalues[i]) for i in (0, -1))
        aligned = [alignment(theta, self.watched.targets, centred) for centred in (False, True)]
        values = (
            *(*drift(theta, self.initial[model]), *aligned, eigen.effective_rank, eigen.trace_over_largest),
            *(largest, smallest, eigen.condition_number),
            *(gram.mean, gram.relative_mean, gram.variance, gram.relative_variance),
        )
        return dict(zip(METRICS, values, strict=True))

    def of_seed(
        self, algorithm: Algorithm, num_clients: int, seed: int | Key, start: Key | PyTree | None = None
    ) -> KernelDiagnostics:
        """Returns these diagnostics for the run of another seed, with its initial kernels; nothing is compiled again.

        Args:
            algorithm: The algorithm for which these diagnostics were built.
            num_clients: Number of clients N.
            seed: Seed or key of the other run.
            start: Initial models of the run, as for ``simulate``.
        """
        return replace(self, initial=self.kernels(algorithm.init(seed, num_clients, start)))


def kernel_diagnostics(
    algorithm: Algorithm,
    model: Model,
    data: FederatedData,
    seed: int | Key = 0,
    num_examples: int = 256,
    examples_seed: int = 0,
    start: Key | PyTree | None = None,
) -> KernelDiagnostics:
    """Builds the function that measures the tangent kernels of a run at every evaluation.

    A run with ``evaluation=Evaluation(measure=kernel_diagnostics(algorithm, model, data, seed=0))`` has these metrics,
    always on the same training examples. They are means over the K models; if K > 1, each model has its metrics, too,
    such as ``drift_model_0``.

    - ``drift``, ``drift_operator``: relative change since the start, which Theorem 9.1 of FE-2021 bounds;
    - ``alignment``, ``alignment_centred``: alignment with the targets;
    - ``effective_rank``, ``trace_over_largest``, ``largest_eigenvalue``, ``smallest_eigenvalue``, ``condition_number``;
    - ``commutator`` and ``gram_variance``: mean norm of the commutators and norm of the variance of the clients' Gram
      operators (``gram_operators``); also ``commutator_relative`` and ``gram_variance_relative``.

    Kernels are means over outputs. They are float64 if JAX's 64-bit types are enabled and the model is an ``mlp`` or
    linear in its parameters; otherwise they have the network's precision (in float32, eigenvalues below 1e-6 of the
    largest are rounding errors).

    Args:
        algorithm: An algorithm that predicts with K networks of ``model``, so that its ``params`` is not None.
        model: The network.
        data: The clients' data.
        seed: Seed of the run, from which the initial kernels are computed.
        num_examples: Largest number of examples, drawn from each client in proportion to the client's size. The Gram
            operator of a client is computed from its drawn examples.
        examples_seed: Seed of the drawn examples.
        start: Initial models of the run, as for ``simulate``.

    Raises:
        ValueError: The algorithm has no such networks, ``model`` is not the algorithm's, or a number is out of range.
    """
    params = check_watchable(algorithm, model, data.num_clients, num_examples)
    watched = stratified(data, model.output_size, num_examples, examples_seed)
    cheap = isinstance(model.structure, (DenseStructure, LinearStructure))

    @jax.jit
    def kernels_of(state: PyTree, x: Shaped[AnyArray, "m ..."]) -> Float[Array, "K m m"]:
        all_params = params(state)
        wide, inputs = jax.tree.map(_widest, (all_params, x)) if cheap else (all_params, x)
        block = None if cheap else BLOCK_SIZE
        return jax.lax.map(lambda p: empirical_ntk(model, p, inputs, block_size=block), wide)

    fresh = KernelDiagnostics(watched, kernels_of, params, np.zeros((0, 0, 0)))
    return fresh.of_seed(algorithm, data.num_clients, seed, start)


def stratified(data: FederatedData, output_size: int, num_examples: int, seed: int) -> Watched:
    """Draws at most ``num_examples`` distinct training examples, from each client in proportion to its size.

    Every client with examples gives at least one. If there are more clients than ``num_examples``, that many clients
    are drawn, and each gives one. An example belongs to every client that holds it.

    Args:
        data: The clients' data.
        output_size: Number of outputs, for one-hot targets of classes.
        num_examples: Largest number of examples.
        seed: Seed of the draw.
    """
    rng = np.random.default_rng(checks.seed(seed))
    indices, offsets = np.asarray(data.indices), np.asarray(data.offsets)
    owned = [np.unique(indices[a:b]) for a, b in itertools.pairwise(offsets)]
    quota = _quotas(np.array(list(map(len, owned))), num_examples, rng)
    sample = [rng.choice(client, count, replace=False) for client, count in zip(owned, quota, strict=True)]
    rows = np.unique(np.concatenate(sample))
    parts = [np.flatnonzero(np.isin(rows, client)) for client in owned]
    ends = np.cumsum([0, *map(len, parts)])
    clients = Partition(np.concatenate(parts).astype(np.int32), ends.astype(np.int32))
    y = np.asarray(data.y)[rows]
    targets = classification_targets(y, output_size, centred=True) if np.issubdtype(y.dtype, np.integer) else y
    return Watched(rows, jnp.take(data.x, rows, axis=0), np.asarray(targets, np.float64), clients)


def _quotas(sizes: Int[np.ndarray, "N"], total: int, rng: np.random.Generator) -> Int[np.ndarray, "N"]:
    """Computes how many of ``total`` examples each client gives: in proportion to its size, and at least one.

    Shares are rounded by the largest remainder. A client without examples gives none. If more than ``total`` clients
    have examples, ``total`` of them give one each.
    """
    if sizes.sum() <= total:
        return sizes
    full = np.flatnonzero(sizes)
    quota = np.zeros(len(sizes), int)
    if len(full) >= total:
        quota[rng.choice(full, total, replace=False)] = 1
        return quota
    share = sizes * (total / sizes.sum())
    quota = np.where(sizes > 0, np.maximum(np.floor(share).astype(int), 1), 0)
    while quota.sum() != total:  # a few steps: floors and ones change each quota by less than 1
        step = 1 if quota.sum() < total else -1
        free = (quota < sizes) if step > 0 else (quota > 1)
        quota[np.argmax(np.where(free, step * (share - quota), -np.inf))] += step
    return quota


def _widest(leaf: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """Converts a floating array to float64 if JAX's 64-bit types are enabled; returns any other array unchanged.

    Kernels are computed from it in float64, since float32 cannot resolve small eigenvalues.
    """
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.result_type(float)))


def check_watchable(algorithm: Algorithm, model: Model, num_clients: int, num_examples: int = 2) -> OfParameters:
    """Checks that kernels of an algorithm's networks can be measured, and returns its function ``params``.

    This function maps a state of the algorithm to the parameters [K, ...] of its networks.

    Args:
        algorithm: Algorithm of the run.
        model: Network whose kernels are to be measured.
        num_clients: Number of clients of the run.
        num_examples: Number of examples to measure on.

    Raises:
        ValueError: The algorithm does not predict with K trained networks, ``model`` has other parameters than these
            networks, or ``num_examples`` is below 2.
    """
    whole("num_examples", num_examples, 2)
    params = algorithm.params
    if params is None:
        raise ValueError(
            f"algorithm: got {algorithm.name}, must predict with trained networks, whose kernels are measured"
        )
    stacked = pytrees.by_path(jax.eval_shape(lambda: params(algorithm.init(0, num_clients))))
    single = pytrees.by_path(model.shapes)
    if {path: leaf.shape for path, leaf in single.items()} != {path: a.shape[1:] for path, a in stacked.items()}:
        raise ValueError(
            f"model: got {model.name}, must have parameters of the same shapes as the networks of {algorithm.name}"
        )
    return params
