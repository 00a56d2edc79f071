"""A flax network as a ``Model``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedtangent.models.layers import FlaxStructure
from fedtangent.types import Array, Key, Model, PyTree


def from_flax(module: Any, example_input: Any, output_size: int, name: str | None = None) -> Model:
    """A ``flax.linen`` module as a ``Model``, for networks of one's own.

    ``module(x)`` maps ``x`` [n, ...] to [n, output_size], without random numbers and without state besides its
    parameters. ``example_input`` is a batch (an array, or a ``jax.ShapeDtypeStruct``) that fixes the shape and type of
    an example. Parameters are the tree of the module's ``"params"`` collection. There is no analytic kernel.

    Raises ``ValueError`` for a module that keeps other collections (batch statistics, say: a federated average of
    them is not defined here) or whose output is not [n, output_size].
    """
    if not all(hasattr(module, name) for name in ("init", "apply")):
        raise ValueError(f"module: got a {type(module).__name__}, must be a flax.linen module")
    if not all(hasattr(example_input, name) for name in ("shape", "dtype")):
        raise ValueError(f"example_input: got {example_input!r}, must be an array or a jax.ShapeDtypeStruct")
    example = jax.ShapeDtypeStruct(example_input.shape, example_input.dtype)
    given = name or type(module).__name__

    def initialise(key: Key) -> PyTree:
        return module.init(key, jnp.zeros(example.shape, example.dtype))

    shapes = jax.eval_shape(initialise, jax.random.key(0))
    others = sorted(set(shapes) - {"params"})
    if others:
        raise ValueError(f"module: {given} keeps {', '.join(others)} besides its params, must keep nothing else")

    def apply(params: PyTree, x: Array) -> Array:
        return module.apply({"params": params}, x)

    output = jax.eval_shape(apply, shapes.get("params", {}), example)
    if output.shape != (example.shape[0], output_size):
        raise ValueError(
            f"module: {given} maps {example.shape} to {output.shape}, must map it to {(example.shape[0], output_size)}"
        )
    return Model(
        name=given,
        init=lambda key: initialise(key).get("params", {}),
        apply=apply,
        kernel=None,
        output_size=output_size,
        structure=FlaxStructure(lambda params, x: apply(params, _in_their_dtype(params, x))),
    )


def _in_their_dtype(params: PyTree, x: Array) -> Array:
    """``x`` in the parameters' dtype, unless it is not floating."""
    return x.astype(jnp.result_type(*jax.tree.leaves(params))) if jnp.issubdtype(x.dtype, jnp.floating) else x
