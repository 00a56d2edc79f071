"""The loss on the plane through three models in weight space, and on the segment between two models.

Let w1, w2 and w3 be the weights of the models. The directions are ``u = w2 - w1`` and ``v = (w3 - w1) - <w3 - w1, u> u
/ |u|^2``, both scaled to norm 1. A point of the plane is ``w1 + a u + b v`` with numbers a and b (Garipov et al., "Loss
surfaces, mode connectivity, and fast ensembling of DNNs", NeurIPS 2018, appendix A.1). Fig. 3 of FE-2024 shows the loss
on such a plane.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float, Float64, Int, Num, Shaped

from fedtangent._src import pytrees
from fedtangent._src.checks import finite, number, real_array, whole
from fedtangent._src.losses import get_loss, mean_form
from fedtangent._src.models.rows import check_independent_rows
from fedtangent._src.progress import progress_of
from fedtangent._src.types import Array, ArrayLike, Model, PyTree

POINTS_A_CALL, AT_ONCE = 512, 8  # between two updates of a progress bar, and evaluated together


@runtime_checkable
class Loss(Protocol):
    """A function that computes the loss of a model."""

    def __call__(self, params: PyTree, /, *arguments: PyTree) -> Float[Array, ""]:
        """Returns the loss, a scalar [].

        Args:
            params: Parameters of the model.
            arguments: Pytrees of arrays that the loss needs, such as the data.
        """


Arguments: TypeAlias = tuple[PyTree, ...]  # of a loss, after the parameters


class Plane(NamedTuple):
    """A plane in parameter space through three models.

    Attributes:
        origin: Parameters of the first model.
        first: Direction of norm 1 towards the second model.
        second: Direction of norm 1, orthogonal to ``first``, on the side of the third model.
        coordinates: Coordinates of the three models along both directions, [3, 2].
    """

    origin: PyTree
    first: PyTree
    second: PyTree
    coordinates: Float64[np.ndarray, "3 2"]  # (0, 0), (|w2 - w1|, 0), (a3, b3) with b3 > 0


def plane_through(models: Sequence[PyTree]) -> Plane:
    """Computes the plane through the weights w1, w2, w3 of three models, by Gram-Schmidt of ``(w2 - w1, w3 - w1)``.

    Args:
        models: Three pytrees of floating arrays with one structure and equal shapes.

    Raises:
        ValueError: The number of models is not three, structures or shapes differ, leaves are not floating or not
            finite, or the models are equal or lie on one line (to the precision of their dtype).
    """
    vectors, precision = _vectors(models)
    u, towards = vectors[1] - vectors[0], vectors[2] - vectors[0]
    rounding = precision * np.max(np.abs(vectors)) * np.sqrt(vectors.shape[1])
    lengths = [float(np.linalg.norm(d)) for d in (u, towards, vectors[2] - vectors[1])]
    if min(lengths) <= rounding:
        i, j = ((0, 1), (0, 2), (1, 2))[int(np.argmin(lengths))]
        raise ValueError(f"models: got models[{i}] and models[{j}] at distance {min(lengths):.3g}, must be different")
    u /= lengths[0]
    a = float(towards @ u)
    v = towards - a * u
    v -= (v @ u) * u  # again: the first pass leaves rounding in proportion to a
    b = float(np.linalg.norm(v))
    if b <= np.sqrt(precision) * lengths[1]:
        raise ValueError(
            f"models: got three on one line (models[2] is {b:.3g} off it, at a distance of {lengths[1]:.3g}), "
            "must span a plane"
        )
    coordinates = np.array([[0.0, 0.0], [lengths[0], 0.0], [a, b]])
    return Plane(models[0], _tree(u, models[0]), _tree(v / b, models[0]), coordinates)


def point(plane: Plane, a: float | Float[Array, ""], b: float | Float[Array, ""]) -> PyTree:
    """Returns the parameters at a point of a plane, ``origin + a first + b second``.

    Args:
        plane: The plane.
        a: Coordinate along the first direction; may be traced.
        b: Coordinate along the second direction; may be traced.
    """
    return pytrees.add(plane.origin, pytrees.add(pytrees.scale(a, plane.first), pytrees.scale(b, plane.second)))


def grid(
    plane: Plane, num_points: int, margin: float = 0.3
) -> tuple[Float64[np.ndarray, "num_points"], Float64[np.ndarray, "num_points"]]:
    """Computes the coordinates of a square grid on a plane, around its three models; [num_points] for each direction.

    Args:
        plane: The plane.
        num_points: Number of points along each direction, at least 2.
        margin: Distance from the models' bounding box to each end of the square, along the box's larger side and as a
            share of it.

    Raises:
        ValueError: There are fewer than 2 points, or the margin is negative.
    """
    whole("num_points", num_points, 2)
    number("margin", margin, at_least=0)
    low, high = plane.coordinates.min(axis=0), plane.coordinates.max(axis=0)
    half = (0.5 + margin) * float(np.max(high - low))
    first, second = 0.5 * (low + high)
    return np.linspace(first - half, first + half, num_points), np.linspace(second - half, second + half, num_points)


def surface(
    loss: Loss, plane: Plane, a: ArrayLike, b: ArrayLike, arguments: Arguments = (), progress: bool = False
) -> Float[np.ndarray, "B A"]:
    """Evaluates a loss at every point of a grid on a plane through three models, [B, A].

    The entry [i, j] is ``loss(point(plane, a_j, b_i), *arguments)``.

    Args:
        loss: Function of parameters and ``arguments`` that returns a number; compiled once for each function object.
        plane: The plane.
        a: Coordinates [A] along the first direction.
        b: Coordinates [B] along the second direction.
        arguments: Pytrees of arrays that the loss needs, such as the data.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: ``a`` or ``b`` is not a vector of one or more numbers.
    """
    for name, values in (("a", a), ("b", b)):
        if np.ndim(values) != 1 or np.size(values) == 0:
            raise ValueError(f"{name}: got shape {np.shape(values)}, must be a vector of one or more coordinates")
    points = np.stack(np.meshgrid(real_array("a", a), real_array("b", b)), axis=-1).reshape(-1, 2)
    basis = plane.origin, (plane.first, plane.second)
    return _evaluate(loss, basis, points, arguments, progress).reshape(np.size(b), np.size(a))


def segment(
    loss: Loss, start: PyTree, end: PyTree, shares: ArrayLike, arguments: Arguments = ()
) -> Float[np.ndarray, "q"]:
    """Evaluates a loss along the segment between two models, ``loss(start + s (end - start), *arguments)``, [q].

    Args:
        loss: Function of parameters and ``arguments``, as in ``surface``.
        start: Parameters of the first model, at s = 0.
        end: Parameters of the second model, at s = 1.
        shares: Values of s, [q].
        arguments: Pytrees of arrays that the loss needs, such as the data.

    Raises:
        ValueError: The models differ in structure or shapes, or ``shares`` is not a vector of one or more numbers.
    """
    if _form(start) != _form(end):
        raise ValueError("end: got parameters of another structure or other shapes than start, must have the same")
    if np.ndim(shares) != 1 or np.size(shares) == 0:
        raise ValueError(f"shares: got shape {np.shape(shares)}, must be a vector of one or more numbers")
    basis = start, (pytrees.subtract(end, start),)
    return _evaluate(loss, basis, real_array("shares", shares)[:, None], arguments)


def barrier(losses: Num[np.ndarray, "q"]) -> float:
    """Computes the highest loss on a segment between two models minus the larger loss of the two; 0 if none is higher.

    Args:
        losses: Losses [q] along the segment, both ends included.

    Raises:
        ValueError: ``losses`` is not a vector, or q < 2.
    """
    if np.ndim(losses) != 1 or np.size(losses) < 2:
        raise ValueError(
            f"losses: got shape {np.shape(losses)}, must be a vector of two or more losses along the segment"
        )
    return float(np.max(losses) - max(losses[0], losses[-1]))


def mean_loss(model: Model, loss: str, block: int = 2000) -> Loss:
    """Builds a function ``(params, x [n, ...], y [n, ...]) -> []``: the mean loss of all examples, computed in blocks.

    Args:
        model: Network that is evaluated.
        loss: Name of a loss in ``fedtangent.losses`` that is a mean over examples.
        block: Number of examples that are evaluated at a time.

    Raises:
        ValueError: The loss is unknown or a sum over examples, or ``block`` is below 1. The function that is built
            raises it if the network's output for an example depends on other examples.
    """
    one = get_loss(loss)
    if loss != mean_form(loss):
        raise ValueError(f"loss: got {loss!r}, must be {mean_form(loss)!r}, the mean over examples")
    whole("block", block)

    def mean_loss(params: PyTree, x: Shaped[Array, "n ..."], y: Shaped[Array, "n ..."]) -> Float[Array, ""]:
        check_independent_rows(model, x.shape[1:], x.dtype)
        n, size = x.shape[0], min(block, x.shape[0])
        starts = jnp.arange(-(-n // size), dtype=jnp.int32) * size

        def of_block(start: Int[Array, ""]) -> Float[Array, ""]:
            first = jnp.minimum(start, n - size)  # the last block overlaps the one before: its first rows do not count
            rows = [jax.lax.dynamic_slice_in_dim(values, first, size) for values in (x, y)]
            mask = first + jnp.arange(size, dtype=jnp.int32) >= start
            mean = one(model.apply(params, rows[0]), rows[1], mask)
            return mean * jnp.sum(mask.astype(mean.dtype))

        return jnp.sum(jax.lax.map(of_block, starts)) / n

    return mean_loss


@partial(jax.jit, static_argnames="loss")
def _chunk(loss: Loss, basis: PyTree, points: Float[Array, "q d"], arguments: Arguments) -> Float[Array, "q"]:
    """Evaluates the loss at q points ``origin + sum_i points[:, i] directions[i]`` in parameter space, [q].

    ``basis`` is the pair (origin, directions), with a tuple of d directions. ``arguments`` are passed to the loss after
    the parameters.
    """
    origin, directions = basis

    def at(coordinates: Float[Array, "d"]) -> Float[Array, ""]:
        params = origin
        for i, direction in enumerate(directions):
            params = pytrees.add(params, pytrees.scale(coordinates[i], direction))
        return loss(params, *arguments)

    return jax.lax.map(at, points, batch_size=AT_ONCE)


def _evaluate(
    loss: Loss, basis: PyTree, points: Float64[np.ndarray, "q d"], arguments: Arguments, progress: bool = False
) -> Float[np.ndarray, "q"]:
    """Evaluates the loss at all points; equally large groups of points are computed at a time by one compiled function.

    The arguments are as for ``_chunk``, which evaluates a group; ``progress`` shows a progress bar.
    """
    size = min(len(points), POINTS_A_CALL)
    padded = np.concatenate([points, np.repeat(points[-1:], -len(points) % size, axis=0)])
    losses = []
    with progress_of(len(points), "loss surface", "point", shown=progress) as bar:
        for start in range(0, len(padded), size):
            part = jnp.asarray(padded[start : start + size])
            losses.append(np.asarray(_chunk(loss, basis, part, arguments)))
            bar.update(min(size, len(points) - start))
    return np.concatenate(losses)[: len(points)]


def _vectors(models: Sequence[PyTree]) -> tuple[Float64[np.ndarray, "3 P"], float]:
    """Checks three models; returns their parameters as rows [3, P] float64, and the largest epsilon of their dtypes."""
    if not isinstance(models, Sequence) or len(models) != 3:
        got = f"a list of {len(models)}" if isinstance(models, Sequence) else f"{models!r:.60}"
        raise ValueError(f"models: got {got}, must be a list of three models")
    for i in (1, 2):
        if _form(models[i]) != _form(models[0]):
            raise ValueError(f"models: models[0] and models[{i}] differ in structure or shapes, must be alike")
    dtypes = {jnp.result_type(leaf) for leaf in jax.tree.leaves(list(models))}
    if not dtypes or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        raise ValueError(f"models: got {', '.join(sorted(map(str, dtypes))) or 'no'} arrays, must be floating")
    rows = np.stack([np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(m)]) for m in models])
    finite("models", rows)
    return rows, max(float(jnp.finfo(dtype).eps) for dtype in dtypes)


def _form(model: PyTree) -> tuple[jax.tree_util.PyTreeDef, list[tuple[int, ...]]]:
    """Returns the structure and the shapes of a model's parameters."""
    return jax.tree.structure(model), [np.shape(leaf) for leaf in jax.tree.leaves(model)]


def _tree(vector: Float64[np.ndarray, "P"], like: PyTree) -> PyTree:
    """Converts a vector [P] to a tree with the structure, shapes and dtypes of ``like``."""
    flat, unravel = ravel_pytree(like)
    return unravel(jnp.asarray(vector, flat.dtype))
