"""Local-GD on separable classification: projections onto feasible sets (the Local-GD paper, sections 3 and 4).

Node i's feasible set is ``C_i = {w : y_ij x_ij' w >= 1 for all j}`` (eq. 10). With the exponential loss and a weak
proximal term (eq. 12) the local models of Local-GD tend in direction to projections onto these sets (eq. 13, Lemma 2),
so that a round is a step of the parallel projection method. Its limit lies in the intersection of the sets (Lemma 3,
Theorem 2). If each round also moves the model back towards the start, at a suitable pace, the limit is the point of the
intersection nearest to the start (Lemma 4, Theorem 3); from 0 that is the hard-margin support vector machine (eq. 15).

All nodes' local problems are solved at once, in their duals (``local_problems``), in float64.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Bool, Float, Float64, Shaped

from fedtangent._src.checks import instance, number, real_array, whole
from fedtangent._src.theory import checks
from fedtangent._src.theory.checks import in_float64
from fedtangent._src.theory.local_gd.local_problems import (
    LocalSolver,
    Nodes,
    check_start,
    check_weights,
    descended,
    local_descent,
    nodes_of,
    projected,
    weak,
)
from fedtangent._src.types import Array, ArrayLike, Partition

TOLERANCE = 1e-6  # by how much a local model may be off (``local_problems``)
LEAST_MARGIN = 1e-10  # of unit inputs; margins up to it count as 0


class DivergenceError(ValueError):
    """Error for local gradient descent whose weights become infinite or NaN at its learning rate."""


class FeasibleSets(NamedTuple):
    """Sets C_i of the models that classify all of node i's examples with margin 1 or more; from ``feasible_sets``.

    There are N nodes (clients), padded to the n examples of the largest. ``signed`` has the examples times their
    labels, ``gram`` their inner products; ``held`` is False for padding rows.
    """

    signed: Float64[np.ndarray, "N n d"]  # y_ij x_ij; rows beyond a node's examples are 0
    gram: Float64[np.ndarray, "N n n"]  # their inner products
    held: Bool[np.ndarray, "N n"]  # which rows are examples, not padding

    @property
    def dimension(self) -> int:
        """Dimension d of a model."""
        return int(self.signed.shape[2])

    def pooled(self) -> FeasibleSets:
        """Returns the feasible set of a single node with all examples: the intersection of all sets."""
        rows = self.signed[self.held]
        return _sets(rows[None], np.ones((1, len(rows)), bool))

    def margins(self, w: ArrayLike) -> Float64[np.ndarray, "n"]:
        """Computes ``y_ij x_ij' w`` [n] of all examples, node after node; w is in all sets if each is at least 1."""
        return np.asarray(self.signed[self.held] @ np.asarray(w))


class Projection(NamedTuple):
    """The point of each of N feasible sets that is nearest to a chosen point.

    ``dual`` are the dual variables of each set's n examples, above 0 for support vectors; ``residual`` measures the
    error of each point.
    """

    point: Float[Array, "N d"]
    dual: Float[Array, "N n"]  # at least 0; above 0 for support vectors
    residual: Float[Array, "N"]  # the larger of the worst violation and the duality gap's bound of the distance


def feasible_sets(x: ArrayLike, y: ArrayLike, partition: Partition, *, separable: bool = True) -> FeasibleSets:
    """Builds each node's feasible set: the models that classify its examples with a margin of 1 or more.

    Args:
        x: Inputs [n, d].
        y: Labels [n] of -1 and 1.
        partition: Examples of each node.
        separable: Whether to check that a hyperplane through 0 separates the labels (Assumption 1).

    Raises:
        ValueError: Labels other than -1 and 1; with ``separable``, labels that no hyperplane through 0 separates
            (``farkas`` returns a certificate).
    """
    nodes = nodes_of(x, y, partition)
    if nodes.y.shape[2:] == (1,):
        nodes = nodes._replace(y=nodes.y[..., 0])
    _check_labels(nodes)
    sets = _sets(nodes.x * nodes.y[..., None], nodes.held)
    if separable and (certificate := farkas(sets)) is not None:
        some = int(np.count_nonzero(certificate > 0))
        norm = float(np.linalg.norm(certificate @ sets.signed[nodes.held]))
        raise ValueError(
            f"y: got labels that no hyperplane through 0 separates (a weighted mean of {some} signed examples has norm "
            f"{norm:.1e}), must be separable"
        )
    return sets


def _check_labels(nodes: Nodes) -> None:
    if nodes.y.ndim != 2:
        raise ValueError(f"y: got {nodes.y.shape[2]} columns of targets, must be a single column of labels -1 or 1")
    labels = nodes.y[nodes.held]
    if not np.all(np.abs(labels) == 1):
        wrong = labels[np.abs(labels) != 1]
        raise ValueError(f"y: got label {wrong[0]:g}, must be -1 or 1")


def _sets(signed: Float64[np.ndarray, "N n d"], mask: Bool[np.ndarray, "N n"]) -> FeasibleSets:
    return FeasibleSets(signed, signed @ signed.transpose(0, 2, 1), mask)


def farkas(sets: FeasibleSets) -> Float64[np.ndarray, "n"] | None:
    """Returns a certificate that no w is in all sets, weights b [n] >= 0 with ``sum_j b_j y_j x_j = 0``; else None.

    The weights sum to 1, in the order of the examples of all nodes, node after node.

    By Farkas' lemma there is either such a b or a point in all sets. The least-squares problem
    ``|sum b_j y_j x_j|^2 + (1 - sum b_j)^2`` over b >= 0 (Lawson and Hanson, 1974, chapter 23) decides: its residual is
    0 for a certificate; otherwise ``sum b_j y_j x_j`` is a point, up to scale, whose margins are then computed for
    inputs of norm 1. A margin of at most ``LEAST_MARGIN`` counts as 0.
    """
    instance("sets", sets, FeasibleSets)
    rows = sets.signed[sets.held]
    scale = np.linalg.norm(rows, axis=1)
    scale = np.where(scale > 0, scale, 1)
    unit = rows / scale[:, None]
    triangle = np.linalg.qr(unit.T, mode="r")  # as many rows as needed: the same products in fewer dimensions
    system = np.vstack([triangle, np.ones(len(rows))])
    b, _ = scipy.optimize.nnls(system, np.eye(len(system))[-1], maxiter=30 * len(rows) + 1000)
    point = unit.T @ b
    length = np.linalg.norm(point)
    margins = unit @ point / (length if length > 0 else 1.0)  # of the hyperplane's unit normal
    return None if margins.min(initial=np.inf) > LEAST_MARGIN else b / scale / np.sum(b / scale)


@in_float64
def project(sets: FeasibleSets, w: ArrayLike) -> Projection:
    """Computes the point of every node's feasible set that is nearest to ``w`` (eq. 13 of Local-GD).

    Args:
        sets: Feasible sets of the nodes, from ``feasible_sets``.
        w: Point [d], or one for each node [N, d].

    Raises:
        ValueError: A set is empty or too thin for float64 to find the point.
    """
    at, shape = real_array("w", w), (len(sets.held), sets.dimension)
    if at.shape not in (shape, shape[1:]):
        raise ValueError(f"w: got shape {at.shape}, must be [{shape[1]}] or [{shape[0]}, {shape[1]}]")
    at = np.broadcast_to(at, shape)
    projection = _project(sets, jnp.asarray(at))
    _check_solved(np.asarray(projection.residual)[None])
    return projection


def _check_solved(residual: Float[np.ndarray, "R N"]) -> None:
    """Raises ``ValueError`` if the error of a node's local solution in a round is above ``TOLERANCE``."""
    bad = ~(residual <= TOLERANCE)
    if bad.any():
        r, i = (int(v) for v in np.argwhere(bad)[0])
        raise ValueError(
            f"sets: got a residual of {residual[r, i]:.1e} at node {i} in round {r}, must be {TOLERANCE:g} or less: "
            "its set is empty, or too thin or too far away for float64"
        )


@jax.jit
def _project(sets: FeasibleSets, at: Float[Array, "N d"]) -> Projection:
    across = jnp.einsum("nid,nd->ni", sets.signed, at, precision="highest")
    dual, residual = jax.vmap(projected, (0, 0, 0, None))(jnp.asarray(sets.gram), across, jnp.asarray(sets.held), ())
    point = at + jnp.einsum("nid,ni->nd", sets.signed, dual, precision="highest")
    margins = jnp.einsum("nid,nd->ni", sets.signed, point, precision="highest")
    lacking = jnp.max(jnp.where(sets.held, 1 - margins, 0.0), axis=1)  # the Gram matrix has half of their digits
    return Projection(point, dual, jnp.maximum(residual, lacking))


def hard_margin(sets: FeasibleSets) -> Float64[np.ndarray, "d"]:
    """Computes the hard-margin support vector machine without intercept, [d]: the point of least norm in all sets.

    It raises ``ValueError`` if no point is in all sets, or if their intersection is too thin for float64.
    """
    instance("sets", sets, FeasibleSets)
    return np.asarray(project(sets.pooled(), np.zeros(sets.dimension)).point[0])


def halpern(num_rounds: int, first_index: int = 1) -> Float64[np.ndarray, "num_rounds"]:
    """Returns weights ``alpha_k = 1 - 1 / (k + 1)`` for ``parallel_projections``: Halpern's scheme, [num_rounds].

    The index k runs from ``first_index``; the rest, 1 - alpha_k, is the weight of the initial model.

    Args:
        num_rounds: Number of rounds.
        first_index: 1 for eq. (16) of Local-GD, whose first round has alpha = 1/2; 0 for algorithm 3 and eq. (63),
            whose first round changes nothing (erratum `local_gd.alpha`). Both meet the conditions of Lemma 4.
    """
    whole("num_rounds", num_rounds)
    return 1 - 1 / (np.arange(num_rounds) + whole("first_index", first_index, 0) + 1.0)


@in_float64
def parallel_projections(
    sets: FeasibleSets,
    num_rounds: int,
    *,
    alpha: ArrayLike | None = None,
    start: ArrayLike | None = None,
    weights: ArrayLike = "uniform",
) -> Float64[np.ndarray, "rounds d"]:
    """Computes the global model of the parallel projection method after every round, [R + 1, d] float64.

    ``w^{k+1} = (1 - alpha_k) w^0 + alpha_k sum_i p_i P_i(w^k)``, where P_i projects onto node i's set (``project``).
    Without ``alpha`` every alpha_k is 1, and the model is the weighted mean of the projections (eq. 13 and Lemma 3 of
    Local-GD). With it this is the paper's modified method (eq. 16, Lemma 4).

    Args:
        sets: Feasible sets of the nodes, from ``feasible_sets``.
        num_rounds: Number R of rounds.
        alpha: None, or one number from 0 to 1 for each round, for example from ``halpern``.
        start: Initial model w^0, zeros by default.
        weights: Weights p_i, "uniform" (as in Local-GD), "examples" (in proportion to a node's examples), or N numbers.

    Raises:
        ValueError: A set is empty, or too thin for float64 to find the point; ``alpha`` or another argument has a wrong
            shape or range.
    """
    models, residuals = _rounds(projected, sets, (), _anchoring(alpha, num_rounds), *_begin(sets, start, weights))
    _check_solved(np.asarray(residuals))
    return np.asarray(models)


@in_float64
def exponential_models(
    sets: FeasibleSets,
    num_rounds: int,
    log_inverse: float,
    *,
    learning_rate: float | None = None,
    local_steps: int | None = None,
    alpha: ArrayLike | None = None,
    start: ArrayLike | None = None,
    weights: ArrayLike = "uniform",
) -> Float64[np.ndarray, "rounds d"]:
    """Computes Local-GD's global model after every round under the exponential loss, [R + 1, d] float64.

    Node i minimises ``sum_j exp(-y_ij x_ij' w) + lambda / 2 |w - w^k|^2`` (eq. 12 of Local-GD), exactly or by gradient
    steps. The minimum is ``w^k + A' b`` with ``b = exp(-A w) / lambda``; A has the node's examples times their labels,
    and Newton's method finds ln b.

    Args:
        sets, num_rounds, alpha, start, weights: As for ``parallel_projections``.
        log_inverse: ``ln(1 / lambda)``. lambda itself may be far below the least float64, where Lemma 2's rate
            ``ln ln(1 / lambda) / ln(1 / lambda)`` becomes visible.
        learning_rate, local_steps: Step size eta and number L of steps of descent in place of the exact solution
            (algorithm 2 of Local-GD), both or neither. The steps stay at ``w^k + A' b`` with
            ``b <- (1 - eta lambda) b + eta exp(-A (w^k + A' b))``.

    Raises:
        ValueError: Newton's method does not converge.
        DivergenceError: Descent diverges; it is a ``ValueError`` too.
    """
    level = number("log_inverse", log_inverse)
    descent = local_descent(learning_rate, local_steps)
    solve = weak if descent is None else descended
    parameters = tuple(jnp.asarray(value) for value in (level, *(descent or ())))
    models, residuals = _rounds(solve, sets, parameters, _anchoring(alpha, num_rounds), *_begin(sets, start, weights))
    residual = np.asarray(residuals)
    if descent is not None and not np.isfinite(residual).all():
        r, i = (int(v) for v in np.argwhere(~np.isfinite(residual))[0])
        raise DivergenceError(
            f"learning_rate: got {descent[0]:g}, at which node {i} diverges in round {r}, must be less"
        )
    _check_solved(residual)
    return np.asarray(models)


def _begin(
    sets: FeasibleSets, start: ArrayLike | None, weights: ArrayLike
) -> tuple[Float[Array, "d"], Float[Array, "N"]]:
    instance("sets", sets, FeasibleSets)
    sizes = sets.held.sum(axis=1)
    return jnp.asarray(check_start(start, (sets.dimension,))), jnp.asarray(check_weights(weights, sizes))


def _anchoring(alpha: ArrayLike | None, num_rounds: int) -> Float[Array, "num_rounds"]:
    whole("num_rounds", num_rounds, 0)
    values = np.ones(num_rounds) if alpha is None else real_array("alpha", alpha)
    checks.check_shape("alpha", values, (num_rounds,))
    if not np.all((values >= 0) & (values <= 1)):
        raise ValueError(f"alpha: got {values[~((values >= 0) & (values <= 1))][0]:g}, must be from 0 to 1")
    return jnp.asarray(values)


@partial(jax.jit, static_argnums=0)
def _rounds(
    solve: LocalSolver,
    sets: FeasibleSets,
    parameters: tuple[Shaped[Array, ""], ...],
    alpha: Float[Array, "R"],
    start: Float[Array, "d"],
    weights: Float[Array, "N"],
) -> tuple[Float[Array, "R+1 d"], Float[Array, "R N"]]:
    """Computes the global model after every round, and how far each local solution is from exact.

    Args:
        solve: Solver of one node's local problem.
        sets: Feasible sets of the N nodes.
        parameters: Parameters of ``solve``.
        alpha: Share of the nodes' mean in the model of each round; the rest is ``start``.
        start: Initial model.
        weights: Weights of the nodes in the mean.

    Returns:
        Models [R + 1, d], and the error of each node's solution in each round [R, N].
    """
    nodes, gram, mask = jax.vmap(solve, (0, 0, 0, None)), jnp.asarray(sets.gram), jnp.asarray(sets.held)

    def one(w: Array, share: Array) -> tuple[Array, tuple[Array, Array]]:
        across = jnp.einsum("nid,d->ni", sets.signed, w, precision="highest")
        dual, residual = nodes(gram, across, mask, parameters)
        moved = jnp.einsum("nid,ni,n->d", sets.signed, dual, weights, precision="highest")
        w = (1 - share) * start + share * (w + moved)
        return w, (w, residual)

    _, (models, residuals) = jax.lax.scan(one, start, alpha)
    return jnp.concatenate([start[None], models]), residuals


def direction_distance(w: ArrayLike, other: ArrayLike) -> Float64[np.ndarray, "..."]:
    """Computes the distance of the directions of two models, ``|w / |w| - other / |other||``, from 0 to 2.

    Section 5 of Local-GD compares models so.

    Args:
        w: Models [..., d].
        other: Models that are compared with them, of the same or a broadcastable shape.

    Returns:
        The distances [...], NaN where one of the two models is 0, which has no direction.
    """
    unit = [real_array(name, v) for name, v in (("w", w), ("other", other))]
    with np.errstate(invalid="ignore"):
        unit = [v / np.linalg.norm(v, axis=-1, keepdims=True) for v in unit]
    return np.asarray(np.linalg.norm(unit[0] - unit[1], axis=-1))
