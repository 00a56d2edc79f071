"""Arithmetic on parameters: small functions over pytrees of arrays."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fedtangent._src.types import Array, PyTree


def on_device(tree: PyTree) -> PyTree:
    """Returns a pytree's arrays as JAX arrays; compiles nothing, unlike ``jnp.asarray`` of a NumPy array.

    Writeable NumPy arrays are copied, so that they may be changed later. On a CPU, JAX shares the memory of aligned
    read-only arrays, for example from ``kernels.gram.read_only``.
    """
    copied = jax.tree.map(lambda a: a.copy() if isinstance(a, np.ndarray) and a.flags.writeable else a, tree)
    return jax.device_put(copied)


def add(a: PyTree, b: PyTree) -> PyTree:
    """Returns ``a + b``, leaf by leaf."""
    return jax.tree.map(jnp.add, a, b)


def subtract(a: PyTree, b: PyTree) -> PyTree:
    """Returns ``a - b``, leaf by leaf."""
    return jax.tree.map(jnp.subtract, a, b)


def scale(factor: Array | float, a: PyTree) -> PyTree:
    """Returns ``factor * a``, leaf by leaf; each leaf keeps its dtype."""
    return jax.tree.map(lambda leaf: jnp.asarray(factor, leaf.dtype) * leaf, a)


def zeros_like(a: PyTree) -> PyTree:
    """Returns zeros with the shapes and dtypes of ``a``, whose leaves are arrays or ``jax.ShapeDtypeStruct``."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), a)


def widest(dtype: DTypeLike) -> DTypeLike:
    """Returns the dtype in which numbers of ``dtype`` are added up: float32 for half precision, else ``dtype``."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def wide(a: PyTree) -> PyTree:
    """Returns ``a`` with its half-precision leaves in float32."""
    return jax.tree.map(lambda leaf: leaf if widest(leaf.dtype) == leaf.dtype else leaf.astype(widest(leaf.dtype)), a)


def precision(a: PyTree) -> np.dtype:
    """Returns the widest dtype of the leaves of ``a``, at least float32."""
    return jnp.result_type(*jax.tree.leaves(a), jnp.float32)


def cast_like(a: PyTree, like: PyTree) -> PyTree:
    """Returns ``a`` in the dtypes of ``like``.

    Args:
        a: Arrays.
        like: Arrays or ``jax.ShapeDtypeStruct`` of the same structure.
    """
    return jax.tree.map(lambda leaf, other: leaf if leaf.dtype == other.dtype else leaf.astype(other.dtype), a, like)


def accumulator(a: PyTree) -> PyTree:
    """Returns zeros in the shapes of ``a``, with float32 in place of half precision, to add such pytrees to."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, widest(leaf.dtype)), a)


def where(condition: Array, a: PyTree, b: PyTree) -> PyTree:
    """Returns ``a`` where ``condition`` is True and ``b`` elsewhere, leaf by leaf.

    Args:
        condition: A scalar [], or an array whose shape equals the leading axes of every leaf.
        a: Values where the condition holds.
        b: Values elsewhere.
    """

    def choose(x: Array, y: Array) -> Array:
        return jnp.where(condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim)), x, y)

    return jax.tree.map(choose, a, b)


def take(a: PyTree, i: Array | int) -> PyTree:
    """Returns row ``i`` of every leaf; for an array ``i`` [..], the rows [.., ...]."""
    return jax.tree.map(lambda leaf: leaf[i], a)


def stack(trees: list[PyTree]) -> PyTree:
    """Stacks pytrees of one structure along a new leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def vdot(a: PyTree, b: PyTree) -> Array:
    """Computes the Euclidean inner product of two pytrees, a scalar []."""
    return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b)), jnp.zeros(()))


def magnitude(values: Array, axis: int | None = None) -> Array:
    """Returns the largest power of two that is not above the largest absolute value of ``values``.

    Numbers divided by it lose no digit, and their squares neither overflow nor vanish. The result is 1 if all numbers
    are 0, or if a number is not finite. It is clipped to powers that have an inverse, and its gradient is 0.

    Args:
        values: Numbers in float32 at least.
        axis: Axis along which the largest is taken, which stays with size 1; None: all axes, for a scalar [].
    """
    largest = jnp.max(jnp.abs(values), axis=axis, keepdims=axis is not None, initial=0)
    most = jnp.finfo(largest.dtype).maxexp - 28  # far enough from the ends that the power has an inverse
    power = jnp.ldexp(jnp.ones_like(largest), jnp.clip(jnp.frexp(largest)[1] - 1, -most, most))
    return jax.lax.stop_gradient(jnp.where((largest > 0) & jnp.isfinite(largest), power, 1))


def norm(a: PyTree) -> Array:
    """Computes the Euclidean norm of a pytree, a scalar [], without overflow or underflow of the squares."""
    leaves = jax.tree.leaves(wide(a))
    scale = magnitude(jnp.stack([jnp.zeros(()), *(jnp.max(jnp.abs(leaf), initial=0) for leaf in leaves)]))
    return scale * jnp.sqrt(
        sum((jnp.sum(jnp.square(leaf / scale.astype(leaf.dtype))) for leaf in leaves), jnp.zeros(()))
    )


def size(a: PyTree) -> int:
    """Returns the number of scalars in a pytree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(a))


def is_key(leaf: PyTree) -> bool:
    """Returns whether an array or shape holds typed PRNG keys (``jax.random.key``)."""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def item_bytes(dtype: Any) -> int:
    """Returns the bytes of one entry of a dtype, which may be the dtype of typed PRNG keys."""
    return dtype.itemsize if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else jnp.dtype(dtype).itemsize


def num_bytes(a: PyTree) -> int:
    """Returns the bytes that a pytree of arrays or shapes takes, uncompressed."""
    return sum(math.prod(leaf.shape) * item_bytes(leaf.dtype) for leaf in jax.tree.leaves(a))


def by_path(tree: PyTree) -> dict[str, PyTree]:
    """Returns the leaves of a pytree of arrays or shapes by their paths, such as ``"['layer']['weight']"``."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def each_model(name: str, params: PyTree, like: PyTree) -> PyTree:
    """Returns parameters of K models, leaves [K, ...], with the structure and shapes of ``like``.

    Args:
        name: Name of the argument, for the error message.
        params: Parameters of one model, which are copied K times; or of K models, with a leading axis K in each leaf.
        like: Arrays or shapes of the parameters of K models.

    Raises:
        ValueError: A leaf is missing, superfluous, or of another shape or dtype; the message names the first such leaf.
    """
    expected, leaves = by_path(like), by_path(params)
    leaves = {path: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for path, leaf in leaves.items()}
    is_one = any(path in leaves and leaves[path].ndim == leaf.ndim - 1 for path, leaf in expected.items())
    for path in (*expected, *leaves):
        leaf, shape = leaves.get(path), expected[path].shape[is_one:] if path in expected else None
        if leaf is None or shape is None or leaf.shape != shape or leaf.dtype != expected[path].dtype:
            got = "nothing" if leaf is None else f"{leaf.dtype} {leaf.shape}"
            if shape is None:
                raise ValueError(
                    f"{name}: got {got} at {path or 'the root'}, must be left out: the model has no such leaf"
                )
            one, models = f"{expected[path].dtype} {expected[path].shape[1:]}", expected[path].shape[0]
            several = f"or every leaf must begin with an axis of {models}, for {models} models"
            raise ValueError(f"{name}: got {got} at {path or 'the root'}, must be {one}, {several}")
    arrays = [jnp.broadcast_to(jnp.array(leaves[path]), leaf.shape) for path, leaf in expected.items()]
    return jax.tree.unflatten(jax.tree.structure(like), arrays)
