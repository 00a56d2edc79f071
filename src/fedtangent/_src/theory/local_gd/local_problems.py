"""The local problem of a node (client) in a round of Local-GD on separable data, solved from a Gram matrix alone.

With ``A`` [n, d] the signed examples ``y_ij x_ij'`` of a node and w [d] the global model, the node's local model is
``w + A' b`` with dual variables b [n] of at least 0. Each ``LocalSolver`` returns b and a number that measures its
error. Its arguments are ``gram = A A'`` [n, n], ``across = A w`` [n], the ``mask`` [n] of the rows that are examples,
and the parameters that all nodes share; ``vmap`` serves all nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from fedtangent._src.checks import finite, instance, number, real_array, whole
from fedtangent._src.theory import checks
from fedtangent._src.types import Array, ArrayLike, Partition


class Nodes(NamedTuple):
    """Inputs x and targets y of N nodes (clients), float64, padded to the n examples of the largest node.

    Rows beyond a node's examples are 0.
    """

    x: Float64[np.ndarray, "N n d"]
    y: Float64[np.ndarray, "N n *C"]  # [N, n] or [N, n, C]
    sizes: Int[np.ndarray, "N"]  # number of examples of a node

    @property
    def held(self) -> Bool[np.ndarray, "N n"]:
        """Mask of the rows that are examples, [N, n] bool."""
        return np.arange(self.y.shape[1]) < self.sizes[:, None]


def nodes_of(x: ArrayLike, y: ArrayLike, partition: Partition) -> Nodes:
    """Divides inputs and targets among nodes (clients); raises ``ValueError`` if they do not fit together.

    Args:
        x: Inputs [n, d].
        y: Targets [n] or [n, C].
        partition: Examples of each node, at least one.
    """
    inputs, targets = checks.check_rows("x", x, "n, d"), real_array("y", y)
    if targets.ndim not in (1, 2) or len(targets) != len(inputs) or 0 in targets.shape:
        raise ValueError(f"y: got shape {targets.shape}, must be ({len(inputs)},) or ({len(inputs)}, C)")
    finite("y", targets)
    instance("partition", partition, Partition)
    partition = checks.check_partition(partition, len(inputs), occupied=True)
    sizes = np.asarray(partition.sizes, np.int64)
    padded = len(sizes), int(sizes.max())
    nodes = Nodes(np.zeros((*padded, inputs.shape[1])), np.zeros((*padded, *targets.shape[1:])), sizes)
    for i, size in enumerate(sizes):
        rows = partition.client(i)
        nodes.x[i, :size], nodes.y[i, :size] = inputs[rows], targets[rows]
    return nodes


def check_start(start: ArrayLike | None, shape: tuple[int, ...]) -> Float64[np.ndarray, "..."]:
    """Checks the initial model of a run and returns it as float64; zeros for None.

    Args:
        start: Initial model, or None.
        shape: Required shape, (d,) or (d, C).
    """
    if start is None:
        return np.zeros(shape)
    values = real_array("start", start)
    checks.check_shape("start", values, shape)
    finite("start", values)
    return values


def local_descent(learning_rate: float | None, local_steps: int | None) -> tuple[float, int] | None:
    """Checks step size and number of a node's local steps and returns them; None if neither is set.

    Args:
        learning_rate: Step size; it and ``local_steps`` must be set both or neither.
        local_steps: Number of steps.
    """
    if (learning_rate is None) != (local_steps is None):
        got = f"got {local_steps} with learning_rate={learning_rate}"
        raise ValueError(f"local_steps: {got}, both or neither must be set")
    if learning_rate is None or local_steps is None:
        return None
    return number("learning_rate", learning_rate, above=0), whole("local_steps", local_steps)


def check_weights(weights: ArrayLike, sizes: Int[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
    """Returns the weight of each node in the average of the local models, [N] with sum 1.

    Args:
        weights: "uniform" (as in Local-GD), "examples" (in proportion to a node's examples), or N numbers.
        sizes: Number of examples of each node [N].
    """
    if isinstance(weights, str):
        if weights not in ("uniform", "examples"):
            raise ValueError(f"weights: got {weights!r}, allowed are uniform, examples, or one number per node")
        weights = sizes if weights == "examples" else np.ones(len(sizes))
    values = real_array("weights", weights)
    checks.check_shape("weights", values, (len(sizes),))
    finite("weights", values)
    if not np.all(values >= 0) or not np.any(values > 0):
        raise ValueError(
            f"weights: got {values.min():g} as the least, must be at least 0, and above 0 for at least one node"
        )
    values = values / values.max()  # so that their sum is finite
    return np.asarray(values / values.sum())


GAP = 1e-13  # relative duality gap that ends a projection
MOST_STEPS = 100  # of an interior-point or Newton's method
RIDGE = 1e-13  # added to a Gram matrix whose largest diagonal entry is 1
REFINEMENTS = 6
Gram = Float[Array, "n n"]
Vector = Float[Array, "n"]
Mask = Bool[Array, "n"]
LocalSolver = Callable[[Gram, Vector, Mask, tuple[Array, ...]], tuple[Vector, Float[Array, ""]]]


def projected(gram: Gram, across: Vector, mask: Mask, parameters: tuple[Array, ...]) -> tuple[Vector, Float[Array, ""]]:
    """Solves a node's problem by projecting the global model w onto the node's feasible set (eq. 13 of Local-GD).

    A [n, d] has the node's inputs times their labels. The local model is ``w + A' b``, where the dual variables b [n]
    solve ``min_{b >= 0} 1/2 b' A A' b - b' (1 - A w)``, by a primal-dual interior-point method with Mehrotra's
    predictor (Nocedal and Wright, 2006, algorithm 16.4). Returns b and its error, the largest of three numbers: the
    worst violation of a margin, an upper bound, from the duality gap, of the relative error of ``A' b``, and an
    estimate of the rounding errors in both.

    Args:
        gram: ``A A'``, [n, n].
        across: ``A w``, [n].
        mask: Whether a row is an example and not padding, [n].
        parameters: Not used.
    """
    return _nonnegative(gram, jnp.where(mask, 1 - across, -1.0))


def weak(gram: Gram, across: Vector, mask: Mask, parameters: tuple[Array, ...]) -> tuple[Vector, Float[Array, ""]]:
    """Minimises a node's exponential loss with a weak proximal term (eq. 12 of Local-GD), to rounding.

    A [n, d] has the node's inputs times their labels, and w [d] is the global model. The local model is ``w + A' b``,
    where the dual variables b [n] solve ``ln b = level - A w - A A' b``; Newton's method computes them in at most 100
    steps. Returns b, which is 0 in padding rows, and its error: the largest residual of this equation, divided by 1
    plus the largest ``|level - A w|``.

    Args:
        gram: ``A A'``, [n, n].
        across: ``A w``, [n].
        mask: Whether a row is an example and not padding, [n].
        parameters: The level ``ln(1 / lambda)`` for the strength lambda of the proximal term.
    """
    (level,) = parameters
    aim = jnp.where(mask, level - across, -1e3)  # e^-1000 is 0
    shrunk = 0.5 ** jnp.arange(40.0)

    def raised(log_b: Array) -> Array:
        return jnp.exp(jnp.minimum(log_b, 250.0))  # far above any b, and its square is finite

    def dual(log_b: Array) -> Array:
        """Computes the dual objective at ln b, which is convex in b and which Newton's method minimises."""
        b = raised(log_b)
        return b @ gram @ b / 2 + b @ (log_b - 1 - aim)

    def off(log_b: Array) -> Array:
        return log_b - aim + gram @ raised(log_b)

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        log_b, count, _ = carry
        root = jnp.exp(log_b / 2)
        miss = off(log_b)
        # (I + G B) change = -miss, made symmetric by the roots of B
        factor = jax.scipy.linalg.cho_factor(jnp.eye(len(log_b)) + jnp.outer(root, root) * gram, lower=True)
        change = -miss + gram @ (root * jax.scipy.linalg.cho_solve(factor, root * miss))
        slope = jnp.sum(jnp.exp(log_b) * miss * change)
        tried = log_b[None] + jnp.outer(shrunk, change)
        better = jax.vmap(dual)(tried) <= dual(log_b) + 1e-4 * shrunk * slope
        nearer = jax.vmap(lambda t: jnp.max(jnp.abs(off(t))))(tried) < 0.9 * jnp.max(jnp.abs(miss))
        good = better | nearer
        log_b = jnp.where(good.any(), tried[jnp.argmax(good)], log_b)
        return log_b, count + 1, jnp.max(jnp.abs(off(log_b)))

    def going(carry: tuple[Array, Array, Array]) -> Array:
        return (carry[2] > 1e-12 * (1 + jnp.max(jnp.abs(aim)))) & (carry[1] < MOST_STEPS)

    begin = jnp.minimum(aim, -jnp.log(jnp.maximum(jnp.max(jnp.sum(jnp.abs(gram), axis=1)), 1e-300)))
    log_b, _, missed = jax.lax.while_loop(going, step, (begin, jnp.int32(0), jnp.array(jnp.inf)))
    return jnp.exp(log_b), missed / (1 + jnp.max(jnp.abs(jnp.where(mask, aim, 0.0))))


def descended(gram: Gram, across: Vector, mask: Mask, parameters: tuple[Array, ...]) -> tuple[Vector, Float[Array, ""]]:
    """Takes gradient steps from w on a node's exponential loss with a proximal term (eq. 12, algorithm 2 of Local-GD).

    A [n, d] has the node's inputs times their labels, and w [d] is the global model. Returns the dual variables b [n]
    after the last step, at which the local model is ``w + A' b``, and as error 0, or NaN if the steps diverge.

    Args:
        gram: ``A A'``, [n, n].
        across: ``A w``, [n].
        mask: Whether a row is an example and not padding, [n].
        parameters: The level ``ln(1 / lambda)`` for the strength lambda of the proximal term, the step size eta, and
            the number of steps.
    """
    level, rate, steps = parameters

    def step(_: Array, b: Array) -> Array:
        slope = jnp.where(mask, jnp.exp(-across - gram @ b), 0.0)
        return (1 - rate * jnp.exp(-level)) * b + rate * slope

    b = jax.lax.fori_loop(0, steps, step, jnp.zeros_like(across))
    return b, jnp.where(jnp.all(jnp.isfinite(b)), 0.0, jnp.nan)


def _nonnegative(gram: Gram, linear: Vector) -> tuple[Vector, Float[Array, ""]]:
    """Minimises ``1/2 b'Gb - l'b`` over b >= 0, with G = ``gram``; returns b and its error as ``projected`` does."""
    size = jnp.max(jnp.diagonal(gram))
    size = jnp.where(size > 0, size, 1.0)
    height = jnp.maximum(jnp.max(linear), 1e-300)
    g, h = gram / size, linear / height  # b = height / size * (solution of the scaled problem)
    b, z = _interior_point(g, h)
    b = jnp.where(jnp.max(linear) <= 0, 0.0, b)

    def off(b: Array) -> Array:
        slope = g @ b - h
        noise = 4 * jnp.finfo(g.dtype).eps * (jnp.abs(g) @ b + jnp.abs(h))
        slope = jnp.where(jnp.abs(slope) <= noise, 0.0, slope)  # b may be large: noise times b is no gap
        gap, square = jnp.maximum(b @ slope, 0.0), b @ g @ b
        distance = jnp.sqrt(2 * gap / jnp.where(square > 0, square, 1.0))
        rounding = jnp.finfo(g.dtype).eps * square  # of the Gram matrix, which squares a margin
        violation = jnp.maximum(jnp.max(-slope), jnp.max(noise)) * height
        return jnp.maximum(violation, jnp.maximum(distance, rounding))

    polished = _on_active(g, h, b, b > z)
    first, second = off(b), off(polished)
    better = jnp.isfinite(second) & ~(first < second)
    return jnp.where(better, polished, b) * height / size, jnp.where(better, second, first)


def _on_active(g: Gram, h: Vector, b: Vector, active: Mask) -> Vector:
    """Improves b, an approximate minimiser of ``1/2 b'gb - h'b`` over b >= 0, and returns it.

    It solves for slope 0 at the ``active`` entries; the other entries, and those that would be negative, become 0.
    """
    both = active[:, None] & active[None, :]
    gram = jnp.where(both, g, 0.0)
    factor = jax.scipy.linalg.cho_factor(gram + jnp.diag(jnp.where(active, RIDGE, 1.0)), lower=True)

    def refine(_: Array, b: Array) -> Array:
        return b + jax.scipy.linalg.cho_solve(factor, jnp.where(active, h - gram @ b, 0.0))

    return jnp.maximum(jax.lax.fori_loop(0, REFINEMENTS, refine, jnp.where(active, b, 0.0)), 0.0)


def _interior_point(g: Gram, h: Vector) -> tuple[Vector, Vector]:
    """Minimises ``1/2 b'gb - h'b`` over b >= 0; returns b and its slope ``z = g b - h``, both above 0."""
    n = len(h)

    def residuals(b: Array, z: Array) -> tuple[Array, Array]:
        off = g @ b - h - z
        return off, jnp.maximum(jnp.max(jnp.abs(off)), b @ z / (1 + jnp.abs(h @ b)))

    def step(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        b, z, count, _ = carry
        off, before = residuals(b, z)
        factor = jax.scipy.linalg.cho_factor(g + jnp.diag(z / b + RIDGE), lower=True)

        def direction(product: Array) -> tuple[Array, Array]:
            """Computes the changes of b and z after which ``g b - h = z`` and, to first order, ``b z = product``."""
            db = jax.scipy.linalg.cho_solve(factor, -off + product / b - z)
            return db, (product - z * db) / b - z

        db, dz = direction(jnp.zeros(n))
        reach = _within(b, db), _within(z, dz)
        mean = b @ z / n
        ahead = (b + reach[0] * db) @ (z + reach[1] * dz) / n
        db, dz = direction((ahead / mean) ** 3 * mean - db * dz)
        both = jnp.minimum(_within(b, db), _within(z, dz))  # one length for both: the problem is not linear
        new = b + both * db, z + both * dz
        after = residuals(*new)[1]
        fine = jnp.isfinite(after)
        b, z = jnp.where(fine, new[0], b), jnp.where(fine, new[1], z)
        return b, z, jnp.where(fine, count + 1, MOST_STEPS), jnp.where(fine, after, before)

    def going(carry: tuple[Array, Array, Array, Array]) -> Array:
        return (carry[3] > GAP) & (carry[2] < MOST_STEPS)

    start = jnp.ones(n), jnp.ones(n) + jnp.maximum(jnp.max(jnp.abs(h)), 1.0), jnp.int32(0), jnp.array(jnp.inf)
    b, z, _, _ = jax.lax.while_loop(going, step, start)
    return b, z


def _within(values: Array, change: Array) -> Array:
    """Returns a step t of at most 1 with which ``values + t change`` stays above 0: 99.5 % of the longest."""
    return jnp.minimum(1.0, 0.995 * jnp.min(jnp.where(change < 0, -values / change, jnp.inf)))
