"""Local-GD on linear regression in closed form (the Local-GD paper, section 2), for any local work and cohorts.

Node i descends ``1/(2 n_i) |y_i - X_i w|^2`` for L steps from the global model. With the thin singular value
decomposition ``X_i = U_i S_i V_i'`` its steps move the model within the row space of X_i only, by a known filter:

    w_i = w - V_i (1 - kept_i) (V_i' w - S_i^-1 U_i' y_i),    kept_i = (1 - eta S_i^2 / n_i)^L.

The paper's eq. (4) is the limit of many steps, kept = 0 (errata `local_gd.26`, `local_gd.27`, `local_gd.gram`): then
``V_i V_i'`` is its projection P_i, and ``V_i S_i^-1 U_i'`` its pseudo-inverse. With weights p_i the mean is
``w - A w + Y``, where ``A = sum_i p_i V_i (1 - kept_i) V_i'`` is the averaged projection of Lemma 1, softened by
unfinished work. A is ``F'F`` of one stacked matrix F with as many rows as there are examples: its spectrum, and so
every round, follows from one decomposition of F, and no d x d matrix is formed.

A run ends at the least-squares solution of ``F w = f`` that is nearest to its start. If one model fits all examples,
the end is the centralised model for any weights and local work; if not (d below the number of examples), it depends on
both.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64

from fedtangent._src.checks import choice, instance, number, real_array, whole
from fedtangent._src.theory import checks
from fedtangent._src.theory.checks import ROUNDING, Assumption, assumption, failing, report
from fedtangent._src.theory.local_gd.local_problems import Nodes, check_start, check_weights, local_descent, nodes_of
from fedtangent._src.types import ArrayLike, Cohort, Partition

LOSSES = ("squared_error", "squared_error_sum")
MOST_ROUNDS = 10**12  # most rounds that ``rounds_to`` tries


def local_regression(
    x: ArrayLike,
    y: ArrayLike,
    partition: Partition,
    *,
    learning_rate: float | None = None,
    local_steps: int | None = None,
    weights: ArrayLike = "uniform",
    loss: str = "squared_error",
) -> LocalRegression:
    """Builds the closed form of Local-GD on a linear regression without intercept: its global model of every round.

    Args:
        x: Inputs [n, d].
        y: Targets [n]; or [n, C], for which a model is [d, C].
        partition: Examples of each node.
        learning_rate, local_steps: Step size eta and number L of steps of every node. Without both, local work goes on
            until convergence, as in eq. (4) of Local-GD; a node whose inputs X_i do not have full rank then takes the
            pseudo-inverse (see ``deficient``).
        weights: Weights of the nodes in the mean, "uniform" (as in Local-GD), "examples" (in proportion to a node's
            examples), or N numbers.
        loss: "squared_error", ``1/(2 n_i) |y_i - X_i w|^2``; or "squared_error_sum", without 1 / n_i (erratum
            `local_gd.loss`).

    Raises:
        ValueError: One of ``learning_rate`` and ``local_steps`` without the other; local work until convergence at a
            node with as many examples as dimensions or more, where eq. (3) of Local-GD has no solution.

    Example, two clients of one example each in three dimensions, with local work until convergence:

        >>> import numpy as np, fedtangent as ft
        >>> x, y = np.eye(3)[:2], np.ones(2)
        >>> run = ft.theory.local_regression(x, y, ft.partition.iid(2, num_clients=2, seed=0))
        >>> run.after(1).round(9).tolist(), run.limit().round(9).tolist()
        ([0.5, 0.5, 0.0], [1.0, 1.0, 0.0])
    """
    nodes = nodes_of(x, y, partition)
    choice("loss", loss, LOSSES)
    weight = check_weights(weights, nodes.sizes)
    descent = local_descent(learning_rate, local_steps)
    dimension = nodes.x.shape[2]
    if descent is None and dimension <= nodes.sizes.max():
        raise ValueError(
            f"x: got {dimension} dimensions and {nodes.sizes.max()} examples at node {int(nodes.sizes.argmax())}, must "
            "have more dimensions than examples for local work until convergence; or give learning_rate and local_steps"
        )
    u, singular, v = np.linalg.svd(nodes.x, full_matrices=False)
    nonzero = singular > max(nodes.x.shape[1:]) * np.finfo(float).eps * singular[:, :1]
    v = np.where(nonzero[..., None], v, 0.0)
    answers = np.einsum("ikr,ik...->ir...", u, nodes.y)
    answers /= _like(np.where(nonzero, singular, np.inf), answers)
    remaining, gone = np.zeros_like(singular), np.where(nonzero, 1.0, 0.0)
    if descent is not None:
        rate, steps = descent
        counts = nodes.sizes[:, None] if loss == "squared_error" else 1
        step = np.where(nonzero, rate * singular**2 / counts, 0.0)
        remaining = np.where(nonzero, (1 - step) ** steps, 0.0)
        small = np.minimum(step, 0.5)  # the difference to 1 keeps its digits where steps hardly move
        gone = np.where(step > small, 1 - remaining, -np.expm1(steps * np.log1p(-small)))
    return LocalRegression(nodes, weight, v, answers, remaining, gone, nonzero)


@dataclass(frozen=True, repr=False)
class LocalRegression:
    """A run of Local-GD on a linear regression; built by ``local_regression``.

    A model w is [d], or [d, C] for targets [n, C]. X_i are the inputs of node i, and ``r`` in the shapes is the largest
    rank that an X_i can have.

    The rows V_i' of ``bases`` span the row space of X_i; ``known`` tells them from padding. ``answers`` is the value of
    V_i' w at which local work converges, ``kept`` the share of the distance to it that local work leaves, and ``gone``
    is 1 - kept.
    """

    nodes: Nodes
    weights: Float64[np.ndarray, "N"]  # sum 1
    bases: Float64[np.ndarray, "N r d"]  # V_i'; rows beyond the rank of X_i are 0
    answers: Float64[np.ndarray, "N r *C"]  # value of V_i' w at which local work converges
    kept: Float64[np.ndarray, "N r"]  # share of the distance to ``answers`` that is left after the local work
    gone: Float64[np.ndarray, "N r"]  # 1 - kept, to relative precision; 0 beyond the rank
    known: Bool[np.ndarray, "N r"]  # within the rank of X_i

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a model: (d,) or (d, C)."""
        return self.bases.shape[2], *self.answers.shape[2:]

    @property
    def deficient(self) -> tuple[int, ...]:
        """Nodes whose inputs X_i do not have full rank; their local work ends at the pseudo-inverse's solution."""
        full = np.minimum(self.nodes.sizes, self.nodes.x.shape[2])
        return tuple(int(i) for i in np.flatnonzero(self.known.sum(axis=1) < full))

    @property
    def unfinished(self) -> float:
        """Largest share of the distance to a node's local optimum that local work leaves; above 1 if it diverges."""
        return float(np.abs(self.kept[self.known]).max(initial=0.0))

    def local(self, w: Float64[np.ndarray, "d *C"]) -> Float64[np.ndarray, "N d *C"]:
        """Computes every node's model after its local work from ``w`` [d]: [N, d] (eq. 4 of Local-GD)."""
        moves = _like(self.gone, self.answers) * (self.bases @ w - self.answers)
        columns = moves.reshape(*moves.shape[:2], -1)  # as matrices, whose product is much faster than np.einsum
        return np.asarray(w - (self.bases.mT @ columns).reshape(len(moves), *self.shape))

    def models(self, rounds: int | Cohort, start: ArrayLike | None = None) -> Float64[np.ndarray, "rounds d *C"]:
        """Computes the global model after every round, [R + 1, d], one round after the other.

        Args:
            rounds: Number of rounds of all nodes; or the cohorts of R rounds, with weights that replace the nodes'
                weights (their ``model`` is ignored). A round without a node raises ``ValueError``.
            start: Initial model w_0, zeros by default.
        """
        path = [check_start(start, self.shape)]
        for weight in self._weights_of(rounds):
            path.append(np.tensordot(weight, self.local(path[-1]), 1))
        return np.stack(path)

    def _weights_of(self, rounds: int | Cohort) -> Float64[np.ndarray, "R N"]:
        """Returns the weight of each node in each round, [R, N]; ``rounds`` as for ``models``."""
        if not isinstance(rounds, Cohort):
            return np.tile(self.weights, (whole("rounds", rounds, 0), 1))
        client, _, _ = checks.check_cohorts(rounds, self.nodes.sizes, None)
        totals = np.zeros((len(client), len(self.weights)))
        np.add.at(totals, (np.arange(len(client))[:, None], client), np.asarray(rounds.weight, np.float64))
        if not (totals.sum(axis=1) > 0).all():
            empty = int(np.argmin(totals.sum(axis=1) > 0))
            raise ValueError(f"rounds: got no node in round {empty}, must be one or more nodes in each")
        return totals / totals.sum(axis=1, keepdims=True)

    # ---- all rounds at once, for all nodes in every round ----------------------------------------------------------

    @functools.cached_property
    def _stacked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Decomposition of the averaged projection A = F'F.

        F stacks the rows of all ``bases``, each times the root of the node's weight and of ``gone``; f has the
        ``answers`` times the same roots. The parts are the right singular vectors of F [q, d], the eigenvalues of A
        that are not 0 [q], and F^+ f [d].
        Raises ``ValueError`` if local work diverges.
        """
        strength = self.weights[:, None] * self.gone
        if self.unfinished > 1:
            raise ValueError(
                f"learning_rate: got one at which local work diverges (by {self.unfinished:.3g} in a round), must be "
                "below 2 / the largest eigenvalue of X_i'X_i, times n_i where the loss is a mean"
            )
        root = np.sqrt(strength).reshape(-1)
        some = root > 0
        stacked = root[some, None] * self.bases.reshape(-1, self.bases.shape[2])[some]
        u, singular, v = np.linalg.svd(stacked, full_matrices=False)
        range_ = singular > max(stacked.shape) * np.finfo(float).eps * singular.max(initial=0.0)
        u, singular, v = u[:, range_], singular[range_], v[range_]
        f = (root[:, None] * self.answers.reshape(len(root), -1))[some]
        fitted = v.T @ ((u.T @ f) / singular[:, None])
        return v, singular**2, fitted.reshape(self.shape)

    @property
    def eigenvalues(self) -> Float64[np.ndarray, "q"]:
        """Eigenvalues of the averaged projection A that are not 0, [q], from the largest to the smallest.

        A round multiplies the difference from ``limit`` by I - A. If local work diverges, the property raises
        ``ValueError``.
        """
        return self._stacked[1]

    @property
    def contraction(self) -> float:
        """Factor by which a round shrinks the slowest part of the distance to ``limit``, ``max |1 - eigenvalue|``.

        The property raises ``ValueError`` if local work diverges.
        """
        return float(np.abs(1 - self.eigenvalues).max())

    def limit(self, start: ArrayLike | None = None) -> Float64[np.ndarray, "d *C"]:
        """Computes the global model after infinitely many rounds, [d].

        It is the least-squares solution of ``F w = f`` nearest to ``start``, zeros by default. F and f stack the nodes'
        ``bases`` and ``answers``, each row times the root of the node's weight and of ``gone``. If local work diverges,
        the method raises ``ValueError``.
        """
        begin = check_start(start, self.shape)
        right, _, fitted = self._stacked
        return np.asarray(fitted + begin - right.T @ (right @ begin))

    def after(self, rounds: int | Sequence[int], start: ArrayLike | None = None) -> Float64[np.ndarray, "..."]:
        """Computes the global model after ``rounds`` rounds directly, not round by round (eq. 6 of Local-GD).

        Args:
            rounds: Number of rounds, or several numbers.
            start: Initial model w_0, zeros by default.

        Returns:
            The model [d] for one number, [len(rounds), d] for several.

        Raises:
            ValueError: Local work diverges.
        """
        counts = [whole("rounds", r, 0) for r in np.atleast_1d(np.asarray(rounds, object))]
        begin = check_start(start, self.shape)
        right, values, _ = self._stacked
        end = self.limit(begin)
        shares = (1 - values) ** np.asarray(counts, float)[:, None]
        models = end + np.einsum("rq,q...,qd->rd...", shares, right @ (begin - end), right, optimize=True)
        return models if np.ndim(rounds) else models[0]

    def rounds_to(self, tolerance: float, start: ArrayLike | None = None) -> int:
        """Computes the least number of rounds after which the global model is close to ``limit`` (eq. 9 of Local-GD).

        Args:
            tolerance: Distance to the limit, relative to the distance of the start; above 0 and below 1.
            start: Initial model w_0, zeros by default.

        Raises:
            ValueError: The tolerance is not reached within 10^12 rounds, or local work diverges.
        """
        number("tolerance", tolerance, above=0, below=1)
        right, values, _ = self._stacked
        begin = check_start(start, self.shape)
        away = right @ (begin - self.limit(begin))
        allowed = tolerance * np.linalg.norm(away)

        def reached(rounds: int) -> bool:
            return bool(np.linalg.norm(_like((1 - values) ** float(rounds), away) * away) <= allowed)

        if not reached(MOST_ROUNDS):
            within = f"within {MOST_ROUNDS:.0e} rounds"
            raise ValueError(f"tolerance: got {tolerance:g}, must be large enough to be reached {within}")
        return bisect.bisect_left(range(MOST_ROUNDS), True, key=reached)


def _like(values: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns ``values`` with a trailing axis of length 1 for each additional axis of ``other``."""
    return values.reshape(values.shape + (1,) * (other.ndim - values.ndim))


def minimum_norm(x: ArrayLike, y: ArrayLike, start: ArrayLike | None = None) -> Float64[np.ndarray, "d *C"]:
    """Computes the centralised model [d], the least-squares solution of ``X w = y`` nearest to ``start``.

    Args:
        x: Inputs [n, d].
        y: Targets [n]; or [n, C], for which the model is [d, C].
        start: Initial model, zeros by default.
    """
    count = len(real_array("x", x)) if np.ndim(x) else 0
    pooled = nodes_of(x, y, Partition(np.arange(count), np.array([0, count])))
    begin = check_start(start, (pooled.x.shape[2], *pooled.y.shape[2:]))
    move: np.ndarray = np.linalg.lstsq(pooled.x[0], pooled.y[0] - pooled.x[0] @ begin, rcond=None)[0]
    return begin + move


class LocalTheorem1(NamedTuple):
    """Theorem 1 of Local-GD for one run: its assumptions, and the limit and rate that it states.

    ``centralised`` is the limit, the least-squares solution on all nodes' examples that is nearest to 0.
    """

    assumptions: tuple[Assumption, ...]
    centralised: Float64[np.ndarray, "d *C"]
    contraction: float  # bound of the factor of the distance to ``centralised`` in a round

    @property
    def applies(self) -> bool:
        """Whether every assumption holds."""
        return not failing(self.assumptions)

    def __str__(self) -> str:
        """Returns a report with one line for each assumption."""
        return report(f"Theorem 1 of Local-GD: a round leaves at most {self.contraction:.6g}", self.assumptions)


def local_theorem_1(run: LocalRegression, start: ArrayLike | None = None) -> LocalTheorem1:
    """Checks Theorem 1 of Local-GD: with fewer examples than dimensions the global model tends to the centralised one.

    Five assumptions are measured on the run's data: more dimensions than examples, every X_i of full rank, local work
    until convergence, a start in the span of the data, and that one model fits all examples (which the proof derives
    from the first two).

    Args:
        run: Run of Local-GD.
        start: Initial model w_0, zeros by default.

    Returns:
        The ``assumptions`` and whether the theorem ``applies``, the ``centralised`` model, and the ``contraction``: a
        bound of the factor by which a round shrinks the distance to that model. ``str`` of the result is a report.

    Raises:
        ValueError: Local work diverges.
    """
    instance("run", run, LocalRegression)
    begin = check_start(start, run.shape)
    rows = run.nodes.held
    x, y = run.nodes.x[rows], run.nodes.y[rows]
    centralised = minimum_norm(x, y)
    right = run._stacked[0]
    outside = float(np.linalg.norm(begin - right.T @ (right @ begin)))
    residual = float(np.linalg.norm(x @ centralised - y) / max(np.linalg.norm(y), np.finfo(float).tiny))
    assumptions = (
        assumption("overparameterised", "examples of all nodes < dimensions", len(y), "<", x.shape[1]),
        assumption("full rank", "nodes with an X_i of lower rank", len(run.deficient), "<=", 0),
        assumption("converged", "share of a local residual that is left", run.unfinished, "<=", ROUNDING),
        assumption("start", "part of w_0 outside the span of the data", outside, "<=", ROUNDING),
        assumption("interpolation", "relative residual of the centralised model", residual, "<=", 1e-9),
    )
    return LocalTheorem1(assumptions, centralised, run.contraction)
