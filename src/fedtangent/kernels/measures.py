"""What a kernel matrix says of a network and of its clients: drift, alignment, spectrum, Gram operators.

Pure functions of symmetric matrices [n, n] in NumPy float64. A matrix that is not finite (a run that diverged) gives
not-a-number instead of an error, so that what watches a run never ends it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedtangent.checks import finite
from fedtangent.types import Partition


class Drift(NamedTuple):
    """Relative change of a kernel, in two norms."""

    frobenius: float  # |Theta_t - Theta_0|_F / |Theta_0|_F
    operator: float  # the same in the operator norm, the largest absolute eigenvalue


class Spectrum(NamedTuple):
    """Eigenvalues of a kernel matrix and what they amount to."""

    eigenvalues: np.ndarray  # [n], largest first, those below 0 by rounding set to 0
    effective_rank: float  # exp of the entropy of the eigenvalues over their sum (Roy & Vetterli, 2007), 1 to n
    trace_ratio: float  # trace / lambda_max, 1 to n; never above the effective rank
    condition_number: float  # lambda_max / lambda_min; infinite where lambda_min is rounding, n eps lambda_max or less


class GramOperators(NamedTuple):
    """How far clients' Gram operators are from commuting, and from being one; see ``gram_operators``."""

    pairs: np.ndarray  # [p, 2] clients
    commutators: np.ndarray  # [p] |[Pi_i, Pi_j]| as operators on functions (Hilbert-Schmidt norm)
    relative: np.ndarray  # [p] the same over sqrt(2) |Pi_i| |Pi_j|, which it never exceeds: 0 to 1
    on_values: np.ndarray  # [p] Frobenius norm of the matrix [Pi_i, Pi_j] that acts on the n values
    num_pairs: int  # of clients with examples, of which p were computed
    variance: float  # |Var(Pi_i)| as an operator on functions
    relative_variance: float  # the same over |E[Pi_i]^2|
    variance_on_values: float  # Frobenius norm of the matrix that acts on the n values

    @property
    def mean(self) -> float:
        """Mean of ``commutators`` over the pairs; 0 where there is none."""
        return float(np.mean(self.commutators)) if len(self.commutators) else 0.0

    @property
    def relative_mean(self) -> float:
        """Mean of ``relative`` over the pairs; 0 where there is none."""
        return float(np.mean(self.relative)) if len(self.relative) else 0.0


def drift(theta: Any, theta_0: Any) -> Drift:
    """Relative change of a kernel from ``theta_0``, both [n, n]: what Theorem 9.1 of FE-2021 bounds by O(l^-1/2).

    Raises ``ValueError`` for matrices that are not square and of one shape, or a ``theta_0`` that is zero.
    """
    now, before = _square("theta", theta), _square("theta_0", theta_0)
    if now.shape != before.shape:
        raise ValueError(f"theta and theta_0 must have one shape, got {now.shape} and {before.shape}")
    if not before.any():
        raise ValueError("theta_0 must not be zero: its change has no scale")
    if not (np.isfinite(now).all() and np.isfinite(before).all()):
        return Drift(float("nan"), float("nan"))
    change = now - before
    norms = [_operator_norm(change) / _operator_norm(before)] if change.any() else [0.0]
    return Drift(float(np.linalg.norm(change) / np.linalg.norm(before)), norms[0])


def alignment(theta: Any, targets: Any, centred: bool = False) -> float:
    """Kernel-target alignment ``<Theta, Y Y'>_F / (|Theta|_F |Y Y'|_F)``, from 0 (at worst) to 1 for a kernel [n, n].

    Cristianini et al., 2001, definitions 1 and 3, for targets Y [n, C] (labels, one-hot classes, numbers). With
    ``centred`` both kernels are centred in feature space first, ``H Theta H`` with ``H = I - 11'/n`` (Cortes et al.,
    2012, definition 4): the plain one is near 1 for a kernel that is almost constant, whatever the targets.

    Returns not-a-number where a norm is zero. Raises ``ValueError`` for targets that are not finite [n, C].
    """
    kernel, y = _square("theta", theta), np.asarray(targets, np.float64)
    if y.ndim != 2 or len(y) != len(kernel):
        raise ValueError(f"targets must be [n, C] with n = {len(kernel)}, got shape {y.shape}")
    finite("targets", y)
    if centred:
        y = y - y.mean(axis=0)
        kernel = kernel - kernel.mean(axis=0)
        kernel = kernel - kernel.mean(axis=1, keepdims=True)
    # |Y Y'|_F = |Y' Y|_F and <Theta, Y Y'> = tr(Y' Theta Y): nothing of size n x n is made of Y
    scale = float(np.linalg.norm(kernel) * np.linalg.norm(y.T @ y))
    return float(np.sum(y * (kernel @ y)) / scale) if scale > 0 else float("nan")


def spectrum(theta: Any) -> Spectrum:
    """Eigenvalues of a positive semidefinite ``theta`` [n, n] and their summaries; see ``Spectrum``.

    Effective rank: O. Roy and M. Vetterli, "The effective rank", EUSIPCO 2007, definition 1 (singular values of a
    positive semidefinite matrix are its eigenvalues).
    """
    kernel = _square("theta", theta)
    if not np.isfinite(kernel).all():
        nothing = float("nan")
        return Spectrum(np.full(len(kernel), nothing), nothing, nothing, nothing)
    raw = np.linalg.eigvalsh(0.5 * (kernel + kernel.T))[::-1]
    values = np.maximum(raw, 0.0)
    total = float(values.sum())
    if total == 0:
        return Spectrum(values, float("nan"), float("nan"), float("inf"))
    share = values[values > 0] / total
    rank = float(np.exp(-np.sum(share * np.log(share))))
    rounding = len(values) * np.finfo(np.float64).eps * values[0]
    condition = float(values[0] / values[-1]) if values[-1] > rounding else float("inf")
    return Spectrum(values, rank, total / float(values[0]), condition)


def gram_operators(theta: Any, clients: Partition, max_pairs: int = 1000, seed: int = 0) -> GramOperators:
    """Commutators and variance of the clients' Gram operators ``Pi_i f = Theta(., X_i) f(X_i) / n_i``.

    FE-2021 section 9.2: ``[Pi_i, Pi_j]`` is the second-order term of Lemma 9.2, and ``Var(Pi_i) = sum_i p_i Pi_i^2 -
    (sum_i p_i Pi_i)^2``, ``p_i = n_i / sum n``, that of Lemma 9.3, here over all clients with examples. Both vanish for
    clients that hold the same examples. Clients with different examples of one distribution still have some of each:
    the yardstick is a random partition with the same sizes.

    Norms are those of operators on the kernel's own function space, where ``Pi_i`` is ``J_i J_i' / n_i`` on weights and
    symmetric: ``|[Pi_i, Pi_j]|^2 = 2 tr(T_ji T_ii T_ij T_jj) - 2 |T_ij T_ji|_F^2`` over ``(n_i n_j)^2``, with ``T_ij =
    Theta(X_i, X_j)``. As a matrix that acts on the values at the n examples (``on_values``), ``Theta P_i' P_i / n_i``,
    it depends on its columns: those of clients without a common example are disjoint, so that its norm hardly tells
    clients of one distribution from clients of different ones.

    A pair costs ``n_i n_j (n_i + n_j)``; of more than ``max_pairs`` pairs that many are drawn by ``seed``. ``Var`` is
    one product, ``Theta (B - D Theta D)`` with B block-diagonal, whatever the number of clients.

    Args:
        theta: [n, n], symmetric positive semidefinite.
        clients: which of the n rows each client holds, common ones allowed; clients without examples are left out.

    Raises ``ValueError`` for a matrix that is not square, rows that it does not have, a row held twice by one client,
    no examples at all, or ``max_pairs`` below 1.
    """
    kernel = _square("theta", theta)
    if max_pairs < 1:
        raise ValueError(f"max_pairs: got {max_pairs}, must be at least 1")
    rows = _rows_of(clients, len(kernel))
    first, second = np.triu_indices(len(rows), 1)
    num_pairs, ids = len(first), np.flatnonzero(np.asarray(clients.sizes))
    if num_pairs > max_pairs:
        drawn = np.sort(np.random.default_rng(seed).choice(num_pairs, max_pairs, replace=False))
        first, second = first[drawn], second[drawn]
    pairs = ids[np.stack([first, second], axis=1)]
    if not np.isfinite(kernel).all():
        unknown, nothing = np.full(len(pairs), np.nan), float("nan")
        return GramOperators(pairs, unknown, unknown, unknown, num_pairs, nothing, nothing, nothing)
    squared = kernel @ kernel
    norms = np.array([np.linalg.norm(kernel[np.ix_(own, own)]) / len(own) for own in rows])
    found = [_commutator(kernel, squared, rows[i], rows[j]) for i, j in zip(first, second, strict=True)]
    commutators, on_values = np.sqrt(np.maximum(np.array(found).reshape(-1, 2), 0.0)).T
    relative = commutators / (np.sqrt(2) * norms[first] * norms[second])
    return GramOperators(pairs, commutators, relative, on_values, num_pairs, *_variance(kernel, rows))


def _commutator(kernel: np.ndarray, squared: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Squared norms of ``[Pi_a, Pi_b]``: on functions, and as a matrix on values."""
    cross, of_a, of_b = kernel[np.ix_(a, b)], kernel[np.ix_(a, a)], kernel[np.ix_(b, b)]
    on_functions = 2 * (np.sum((of_a @ cross) * (cross @ of_b)) - np.sum((cross @ cross.T) ** 2))
    # |Pi_a Pi_b|^2 + |Pi_b Pi_a|^2 - 2 <Pi_a Pi_b, Pi_b Pi_a>: to the last, only examples of both contribute
    on_values = np.sum((squared[np.ix_(a, a)] @ cross) * cross) + np.sum((cross @ squared[np.ix_(b, b)]) * cross)
    _, in_a, in_b = np.intersect1d(a, b, assume_unique=True, return_indices=True)
    if len(in_a):
        on_values -= 2 * np.sum((cross.T[in_b] @ squared[np.ix_(a, b)]) * cross[in_a])
    scale = (len(a) * len(b)) ** 2
    return float(on_functions) / scale, float(on_values) / scale


def _variance(kernel: np.ndarray, rows: list[np.ndarray]) -> tuple[float, float, float]:
    """``|Var(Pi_i)|`` on functions, its ratio to ``|E[Pi_i]^2|``, and the former as a matrix on values."""
    total = sum(map(len, rows))
    count, within = np.zeros(len(kernel)), np.zeros_like(kernel)
    for own in rows:
        count[own] += 1 / total
        within[np.ix_(own, own)] += kernel[np.ix_(own, own)] / (len(own) * total)
    mean_squared = kernel @ (count[:, None] * kernel * count[None, :])
    matrix = kernel @ within - mean_squared
    norms = [np.sqrt(max(float(np.sum(m * m.T)), 0.0)) for m in (matrix, mean_squared)]  # of J M J' from Theta M
    return norms[0], norms[0] / norms[1] if norms[1] > 0 else float("nan"), float(np.linalg.norm(matrix))


def _operator_norm(symmetric: np.ndarray) -> float:
    return float(np.max(np.abs(np.linalg.eigvalsh(0.5 * (symmetric + symmetric.T)))))


def _square(name: str, matrix: Any) -> np.ndarray:
    array = np.asarray(matrix, np.float64)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.shape[0] == 0:
        raise ValueError(f"{name} must be a square matrix [n, n] with n >= 1, got shape {array.shape}")
    return array


def _rows_of(clients: Partition, n: int) -> list[np.ndarray]:
    """The rows of every client that has some."""
    rows = [own for own in map(clients.client, range(clients.num_clients)) if len(own)]
    if not rows:
        raise ValueError("clients: got a partition without examples, must hold at least one")
    for own in rows:
        if own.min() < 0 or own.max() >= n:
            raise ValueError(f"clients: got rows {own.min()} to {own.max()}, must lie in 0..{n - 1}, those of theta")
        if len(np.unique(own)) < len(own):
            raise ValueError("clients: a client holds a row twice")
    return rows
