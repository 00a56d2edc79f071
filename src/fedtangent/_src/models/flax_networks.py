"""flax networks as models: which of their weights sit in dense and convolutional layers, and what enters those.

A weight that is used in any other way as well (tied, transformed, inside a lifted transformation such as ``nn.scan``)
is not counted as a layer's, so that what is counted is exact.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Shaped

from fedtangent._src.models.gemm import channels_last, gemm_convolution
from fedtangent._src.models.layers import Call, LayeredStructure, Path, Plan
from fedtangent._src.types import AnyArray, Array, Key, Model, PyTree

Apply = Callable[[PyTree, Array], Array]  # (params, x [n, ...]) -> [n, C]

_CUSTOM = ("dot_general", "dot_general_cls", "conv_general_dilated_cls", "mask")  # what makes a layer another function


def from_flax(module: Any, example_input: Any, output_size: int, name: str | None = None) -> Model:
    """Converts a user's ``flax.linen`` module to a ``Model``.

    ``from_flax(Network(), jnp.zeros((1, 28, 28, 1)), 10)`` converts a network for images with ten outputs. Parameters
    are the tree of the module's ``"params"`` collection. There is no analytic kernel.

    Args:
        module: Module with ``module(x)`` from ``x`` [n, ...] to [n, output_size], without random numbers and without
            state besides its parameters.
        example_input: A batch (an array, or a ``jax.ShapeDtypeStruct``) with the shape and type of examples. Unsigned
            whole numbers, such as the pixels of images, count as float32, which they are in training.
        output_size: Number of outputs.
        name: Name of the model; by default the name of the module's class.

    Raises:
        ValueError: The module keeps other collections (such as batch statistics, whose federated average is not defined
            here), or its output is not [n, output_size].
    """
    if not all(hasattr(module, name) for name in ("init", "apply")):
        raise ValueError(f"module: got a {type(module).__name__}, must be a flax.linen module")
    if not all(hasattr(example_input, name) for name in ("shape", "dtype")):
        raise ValueError(f"example_input: got {example_input!r}, must be an array or a jax.ShapeDtypeStruct")
    is_unsigned = jnp.issubdtype(example_input.dtype, jnp.unsignedinteger)
    example = jax.ShapeDtypeStruct(example_input.shape, jnp.float32 if is_unsigned else example_input.dtype)
    given = name or type(module).__name__

    def initialise(key: Key) -> PyTree:
        return module.init(key, jnp.zeros(example.shape, example.dtype))

    shapes = jax.eval_shape(initialise, jax.random.key(0))
    others = sorted(set(shapes) - {"params"})
    if others:
        raise ValueError(f"module: got {given}, which keeps {', '.join(others)}, must keep nothing but params")

    def apply(params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n C"]:
        return module.apply({"params": params}, x)

    output = jax.eval_shape(apply, shapes.get("params", {}), example)
    if output.shape != (example.shape[0], output_size):
        raise ValueError(
            f"module: got {given}, {example.shape} to {output.shape}, must map to {(example.shape[0], output_size)}"
        )
    return Model(
        name=given,
        init=lambda key: initialise(key).get("params", {}),
        apply=apply,
        kernel=None,
        output_size=output_size,
        structure=flax_structure(lambda params, x: apply(params, _in_their_dtype(params, x))),
    )


def flax_structure(apply: Apply) -> LayeredStructure:
    """Returns the structure of a network of flax layers, given ``apply(params, x)`` in the parameters' dtype."""
    return LayeredStructure(functools.partial(_read_plan, apply), functools.partial(_run_layers, apply))


def _in_their_dtype(params: PyTree, x: Array) -> Array:
    """Converts ``x`` to the parameters' dtype if it is floating."""
    return x.astype(jnp.result_type(*jax.tree.leaves(params))) if jnp.issubdtype(x.dtype, jnp.floating) else x


class _Uses(NamedTuple):
    calls: list[Call]
    leaves: dict[Path, list[int]]  # of a layer's own weights, by the layer's path
    inputs: list[Any]  # what enters each call


def _read_plan(apply: Apply, params: PyTree, x: Any) -> Plan:
    """Determines how ``apply`` uses the leaves of ``params`` on examples like ``x`` [n, ...]; arrays or their shapes.

    A leaf belongs to layers if only those layers' outputs depend on it. Leaves that nothing depends on are left out.
    """
    one = jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), params)
    uses = _Uses([], {}, [])

    def without_layers(p: PyTree, x: Array) -> tuple[Array, list[Array]]:
        leaves = jax.tree.leaves(p)
        with _intercept(functools.partial(_note, uses, leaves)):
            outputs = apply(p, x)
        return outputs, uses.inputs

    jaxpr = jax.make_jaxpr(without_layers)(shapes, one).jaxpr
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)]
    needed = _needed(jaxpr)
    read = {i for i, v in enumerate(jaxpr.invars[: len(sizes)]) if id(v) in needed}
    kept = {path for path, own in uses.leaves.items() if not read & set(own)}
    others = tuple(sorted(read | {i for path, own in uses.leaves.items() if path not in kept for i in own}))
    return Plan(tuple(call for call in uses.calls if call.path in kept), others, sum(sizes[i] for i in others))


def _needed(jaxpr: Any) -> set[int]:
    """Returns the identities of the variables on which a jaxpr's results depend."""
    needed = {id(v) for v in jaxpr.outvars}
    for eqn in reversed(jaxpr.eqns):
        if needed & {id(v) for v in eqn.outvars}:
            needed |= {id(v) for v in eqn.invars}
    return needed


def _run_layers(apply: Apply, plan: Plan, params: PyTree, shifts: list[Array], x: Array) -> tuple[Array, list[Array]]:
    """Implements ``LayeredStructure.run`` for a network of flax layers.

    Convolutions are computed by ``gemm_convolution``, whose derivatives stay fast inside loops on a CPU.
    """
    inputs: list[Array] = []
    own = {call.path for call in plan.calls}

    def shift(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if not _is_call(args, kwargs, context) or tuple(context.module.path) not in own:
            return next_fun(*args, **kwargs)
        call = plan.calls[len(inputs)]
        output = _convolve(context.module, call, args[0]) if call.window else next_fun(*args)
        moved = output + shifts[len(inputs)].astype(output.dtype)
        inputs.append(args[0])
        return moved

    with _intercept(shift):
        outputs = apply(params, x)
    return outputs, inputs


def _convolve(layer: Any, call: Call, x: Array) -> Array:
    """Computes the output of a convolutional layer."""
    images = x.reshape((-1, *x.shape[-len(call.window) - 1 :]))
    z = gemm_convolution(
        images, layer.get_variable("params", "kernel"), call.strides, call.padding, rhs_dilation=call.dilation,
        dimension_numbers=channels_last(images.ndim), precision=layer.precision,
    )  # fmt: skip
    if call.has_bias:
        z = z + layer.get_variable("params", "bias").reshape((1,) * (z.ndim - 1) + (-1,))
    return z.reshape(call.output)


@contextlib.contextmanager
def _intercept(interceptor: Callable[..., Any]) -> Iterator[None]:
    import flax.linen as nn  # here: it takes longer to import than the rest of the package

    with nn.intercept_methods(interceptor):
        yield


def _is_call(args: Any, kwargs: Any, context: Any) -> bool:
    """Tells whether the call is ``layer(x)`` of a plain dense or convolutional layer."""
    import flax.linen as nn

    return type(context.module) in (nn.Dense, nn.Conv) and context.method_name == "__call__" and (
        len(args) == 1 and not kwargs
    )  # fmt: skip


def _note(uses: _Uses, leaves: list[Any], next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Records a layer's call and returns zeros in place of its output, so that nothing depends on the layer."""
    output = next_fun(*args, **kwargs)
    if not _is_call(args, kwargs, context):
        return output
    layer, x = context.module, args[0]
    own = _own_leaves(layer, leaves)
    if own is None or not _is_plain(layer, leaves[own[0]], x):
        return output
    path = tuple(layer.path)
    uses.leaves[path] = own
    uses.inputs.append(x)
    uses.calls.append(_call(layer, path, leaves[own[0]].shape, x.shape, output.shape))
    return jnp.zeros(output.shape, output.dtype)


def _own_leaves(layer: Any, leaves: list[Any]) -> list[int] | None:
    """Returns the indices of a layer's kernel and bias among the leaves; None if one of them is not a leaf."""
    names = ("kernel", "bias") if layer.use_bias else ("kernel",)
    held = [layer.get_variable("params", name) for name in names]
    found = [[i for i, leaf in enumerate(leaves) if leaf is value] for value in held]
    return [where[0] for where in found] if all(len(where) == 1 for where in found) else None


def _is_plain(layer: Any, kernel: Any, x: Any) -> bool:
    """Tells whether the layer is ``patch W + b`` in the dtype of its kernel."""
    custom = [getattr(layer, name, None) for name in _CUSTOM]
    if any(value is not None for value in custom) or layer.dtype not in (None, kernel.dtype):
        return False
    if getattr(layer, "promote_dtype", None) not in (None, type(layer).promote_dtype) or x.dtype != kernel.dtype:
        return False
    if not hasattr(layer, "kernel_size"):
        return True
    convolution = layer.conv_general_dilated
    return (
        convolution in (None, lax.conv_general_dilated, gemm_convolution)
        and layer.feature_group_count == 1
        and set(_each(layer.input_dilation, 1)) == {1}
        and layer.padding not in ("CIRCULAR", "REFLECT", "CAUSAL")
    )


def _call(layer: Any, path: Path, kernel: tuple[int, ...], input_: tuple[int, ...], output: tuple[int, ...]) -> Call:
    fan_in, window = math.prod(kernel[:-1]), kernel[:-2]
    if not window:
        return Call(path, (), (), None, (), fan_in, layer.use_bias, input_, output)
    num_axes = len(window)
    padding = layer.padding
    if isinstance(padding, int):
        padding = [padding] * num_axes
    if not isinstance(padding, str):
        padding = tuple((p, p) if isinstance(p, int) else (int(p[0]), int(p[1])) for p in padding)
    strides, dilation = _each(layer.strides, num_axes), _each(layer.kernel_dilation, num_axes)
    return Call(path, window, strides, padding, dilation, fan_in, layer.use_bias, input_, output)


def _each(value: Any, num_axes: int) -> tuple[int, ...]:
    """Expands flax's number, numbers or None to one number for every spatial axis."""
    return (1 if value is None else value,) * num_axes if value is None or isinstance(value, int) else tuple(value)
