"""Conversion of flax networks to models, with a description of their dense and convolutional layers.

A layer is described only if its weights have no other use (such as being tied, transformed, or inside a lifted
transformation such as ``nn.scan``). So the tangent kernel that is computed layer by layer is exact.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr
from jaxtyping import Float, Shaped

from fedtangent._src.models.gemm import ConvolutionOptions, channels_last, gemm_convolution
from fedtangent._src.models.layers import Call, LayeredStructure, Path, Plan, WithShape
from fedtangent._src.models.rows import check_independent_rows
from fedtangent._src.types import AnyArray, Apply, Array, Key, Model, PyTree

if TYPE_CHECKING:  # flax takes longer to import than the rest of the package
    from flax.linen import Conv, Dense, Module
    from flax.linen.module import InterceptorContext

_CUSTOM = (
    "dot_general",
    "dot_general_cls",
    "conv_general_dilated_cls",
    "mask",
)  # fields that make a layer another function


class _Functions(NamedTuple):
    """A flax module as pure functions of its parameters.

    Attributes:
        title: Name of the module.
        init: Draws the parameters.
        apply: Computes the outputs.
        state: Names of variables that are not parameters, such as batch statistics.
    """

    title: str
    init: Callable[[Key], PyTree]
    apply: Apply
    state: list[str]


def is_module(module: object) -> bool:
    """Returns whether an object looks like a ``flax.linen`` module: it has ``init`` and ``apply``."""
    return all(hasattr(module, name) for name in ("init", "apply"))


def from_flax(module: object, example_input: object, output_size: int, name: str | None = None) -> Model:
    """Converts a user's flax module, of ``flax.linen`` or ``flax.nnx``, to a ``Model`` without an analytic kernel.

    ``from_flax(Network(), jnp.zeros((1, 28, 28, 1)), 10)`` converts a linen network for images with ten outputs;
    parameters are the tree of the module's ``"params"`` collection. A module of nnx carries its weights, so pass a
    class or a function that builds it: ``from_flax(lambda rngs: Network(8, rngs=rngs), x[:1], 10)``. Parameters are
    then nested dictionaries of its ``nnx.Param``; ``nnx.to_pure_dict(nnx.state(network, nnx.Param))`` reads them
    from an instance, for ``start=``.

    The model's default loss is the squared error; ``model._replace(loss="cross_entropy")`` sets another one.

    Args:
        module: Module of linen; or a function of the keyword ``rngs``, an ``nnx.Rngs``, that returns a module of nnx.
            ``module(x)`` maps ``x`` [n, ...] to [n, output_size], without random numbers and without state besides its
            parameters.
        example_input: A batch (an array, or a ``jax.ShapeDtypeStruct``) with the shape and type of examples. Unsigned
            whole numbers, such as the pixels of images, count as float32, which they are in training.
        output_size: Number of outputs.
        name: Name of the model; by default the name of the module's class.

    Raises:
        ValueError: The module keeps other variables (such as batch statistics or the random state of dropout), its
            output is not [n, output_size] or depends on the other examples of the batch, its call needs more than
            inputs, ``module`` is an instance of an nnx module, a class of linen or no module, or ``example_input`` is
            not an array.
    """
    if not isinstance(example_input, WithShape):
        raise ValueError(f"example_input: got {example_input!r}, must be an array or a jax.ShapeDtypeStruct")
    is_unsigned = jnp.issubdtype(example_input.dtype, jnp.unsignedinteger)
    example = jax.ShapeDtypeStruct(example_input.shape, jnp.float32 if is_unsigned else example_input.dtype)
    is_linen = is_module(module)
    if is_linen and isinstance(module, type):
        title = module.__name__
        raise ValueError(f"module: got the class {title}, must be an instance of it, such as {title}(..)")
    try:
        functions = _of_linen(cast("Module", module), example) if is_linen else _of_nnx(module)
        title, apply = name or functions.title, functions.apply
        if functions.state:
            variables = ", ".join(functions.state)
            raise ValueError(f"module: got {title}, which keeps {variables}, must keep nothing but params")
        output = jax.eval_shape(apply, jax.eval_shape(functions.init, jax.random.key(0)), example)
    except (TypeError, _flax_error()) as error:
        reason, title = str(error).partition("\n")[0], getattr(module, "__name__", type(module).__name__)
        raise ValueError(f"module: got {title}, which does not run on a batch of inputs alone: {reason}") from error
    if output.shape != (example.shape[0], output_size):
        raise ValueError(
            f"module: got {title}, which maps {example.shape} to {output.shape}, must map to "
            f"{(example.shape[0], output_size)}, [n, output_size]"
        )
    structure = flax_structure(lambda params, x: apply(params, _in_their_dtype(params, x))) if is_linen else None
    model = Model(title, functions.init, apply, kernel=None, output_size=output_size, structure=structure)
    check_independent_rows(model, example.shape[1:], example.dtype, "module")
    return model


def _flax_error() -> type[Exception]:
    from flax.errors import FlaxError

    return FlaxError


def _of_linen(module: Module, example: jax.ShapeDtypeStruct) -> _Functions:
    def initialise(key: Key) -> PyTree:
        return module.init(key, jnp.zeros(example.shape, example.dtype))

    def apply(params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n C"]:
        return cast("Array", module.apply({"params": params}, x))

    apply.__module__ = type(module).__module__
    others = sorted(set(jax.eval_shape(initialise, jax.random.key(0))) - {"params"})
    return _Functions(type(module).__name__, lambda key: initialise(key).get("params", {}), apply, others)


def _of_nnx(module: object) -> _Functions:
    from flax import nnx

    if isinstance(module, nnx.Module):
        raise ValueError(
            f"module: got an instance of {type(module).__name__}, must be its class or a function lambda rngs: .. that "
            "makes it, so that init can draw weights; to start from an instance's weights, give simulate "
            "start=nnx.to_pure_dict(nnx.state(module, nnx.Param))"
        )
    if not callable(module):
        title = type(module).__name__
        raise ValueError(
            f"module: got a {title}, must be a module of flax.linen, or a class of nnx or a function that makes one"
        )

    def made(key: Key) -> PyTree:
        instance = module(rngs=nnx.Rngs(key))
        if not isinstance(instance, nnx.Module):
            title = type(instance).__name__
            raise ValueError(f"module: got a function that returns a {title}, must return a module of nnx")
        return instance

    abstract = nnx.eval_shape(lambda: made(jax.random.key(0)))
    graph, *(_, others) = nnx.split(abstract, nnx.Param, ...)
    state = [f"{'.'.join(map(str, path))} ({type(v).__name__})" for path, v in nnx.to_flat_state(others)]

    def init(key: Key) -> PyTree:
        return nnx.to_pure_dict(nnx.state(made(key), nnx.Param))

    def apply(params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n C"]:
        return cast("Array", nnx.merge(graph, nnx.State(params))(x))

    apply.__module__ = type(abstract).__module__
    return _Functions(type(abstract).__name__, init, apply, state)


def flax_structure(apply: Apply) -> LayeredStructure:
    """Builds the functions that find and run the layers of a flax network, from which its tangent kernel is computed.

    Args:
        apply: ``(params, x [n, ...]) -> outputs [n, C]``, computed in the parameters' dtype.
    """
    return LayeredStructure(functools.partial(_read_plan, apply), functools.partial(_run_layers, apply))


def _in_their_dtype(params: PyTree, x: AnyArray) -> AnyArray:
    """Returns ``x`` in the dtype of ``params`` if ``x`` is floating, and else unchanged."""
    return x.astype(jnp.result_type(*jax.tree.leaves(params))) if jnp.issubdtype(x.dtype, jnp.floating) else x


class _Uses(NamedTuple):
    calls: list[Call]
    leaves: dict[Path, list[int]]  # indices of a layer's weights among all parameters, by the layer's path
    inputs: list[Array]  # of each call


def _read_plan(apply: Apply, params: PyTree, x: WithShape) -> Plan:
    """Determines which parameters a network uses only as weights of dense and convolutional layers.

    Returns the applications of these layers, and the indices of all other leaves of ``params``. ``apply`` computes the
    outputs from ``params`` and ``x`` [n, ...]. Only shapes and dtypes of ``params`` and ``x`` count.
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
    layers = {path for path, weights in uses.leaves.items() if not read & set(weights)}
    others = tuple(sorted(read | {i for path, weights in uses.leaves.items() if path not in layers for i in weights}))
    return Plan(tuple(call for call in uses.calls if call.path in layers), others, sum(sizes[i] for i in others))


def _needed(jaxpr: Jaxpr) -> set[int]:
    """Returns the ``id`` of every variable of a jaxpr on which its results depend."""
    needed = {id(v) for v in jaxpr.outvars}
    for eqn in reversed(jaxpr.eqns):
        if needed & {id(v) for v in eqn.outvars}:
            needed |= {id(v) for v in eqn.invars}
    return needed


def _run_layers(
    apply: Apply, plan: Plan, params: PyTree, shifts: list[Array], x: AnyArray
) -> tuple[Array, list[Array]]:
    """Computes a network's outputs [1, C] on one example ``x``, and the inputs of its layers.

    ``plan`` lists the calls of layers; ``shifts`` has an array for each, which is added to the call's output.
    Convolutions are computed by ``gemm_convolution``, which is fast inside loops.
    """
    inputs: list[Array] = []
    layers = {call.path for call in plan.calls}

    def shift(
        method: _Method, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], context: InterceptorContext
    ) -> PyTree:
        layer = _called_layer(args, kwargs, context)
        if layer is None or tuple(layer.path) not in layers:
            return method(*args, **kwargs)
        call = plan.calls[len(inputs)]
        output = _convolve(layer, call, args[0]) if call.window else method(*args)
        moved = output + shifts[len(inputs)].astype(output.dtype)
        inputs.append(args[0])
        return moved

    with _intercept(shift):
        outputs = apply(params, x)
    return outputs, inputs


def _convolve(layer: Conv | Dense, call: Call, x: Array) -> Array:
    """Computes the output of a convolutional layer for its input ``x``, with the settings in ``call``."""
    images = x.reshape((-1, *x.shape[-len(call.window) - 1 :]))
    weights, numbers = layer.variables["params"], channels_last(images.ndim)
    more = ConvolutionOptions(rhs_dilation=call.dilation, dimension_numbers=numbers, precision=layer.precision)
    z = gemm_convolution(images, weights["kernel"], call.strides, call.padding or (), **more)
    if call.has_bias:
        z = z + weights["bias"].reshape((1,) * (z.ndim - 1) + (-1,))
    return z.reshape(call.output)


@runtime_checkable
class _Method(Protocol):
    """A method of a flax module."""

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Calls the method and returns its result."""


_Interceptor = Callable[[_Method, tuple[PyTree, ...], dict[str, PyTree], "InterceptorContext"], PyTree]


@contextlib.contextmanager
def _intercept(interceptor: _Interceptor) -> Iterator[None]:
    import flax.linen as nn

    with nn.intercept_methods(interceptor):
        yield


def _called_layer(
    args: tuple[PyTree, ...], kwargs: dict[str, PyTree], context: InterceptorContext
) -> Conv | Dense | None:
    """Returns the layer of an intercepted call of a flax method.

    Returns None unless the call is ``layer(x)`` of a dense or convolutional layer. ``args`` and ``kwargs`` are the
    arguments of the method; ``context`` describes the call, as ``flax.linen.intercept_methods`` passes it.
    """
    import flax.linen as nn

    layer = context.module
    is_plain = type(layer) in (nn.Dense, nn.Conv) and context.method_name == "__call__" and len(args) == 1
    return layer if isinstance(layer, nn.Dense | nn.Conv) and is_plain and not kwargs else None


def _note(
    uses: _Uses,
    leaves: list[Array],
    method: _Method,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    context: InterceptorContext,
) -> PyTree:
    """Intercepts a call of a flax method: records a plain layer in ``uses`` and returns zeros in place of its output.

    A plain layer is a dense or convolutional layer that ``_is_plain`` accepts and whose weights are among ``leaves``.
    Any other call returns its output unchanged. With the zeros, the network's output no longer depends on weights that
    are used in layers only. ``leaves`` are all parameters of the network. ``context`` describes the call of ``method``,
    as ``flax.linen.intercept_methods`` passes it.
    """
    output = method(*args, **kwargs)
    layer = _called_layer(args, kwargs, context)
    weights = None if layer is None else _places_of_weights(layer, leaves)
    if layer is None or weights is None or not _is_plain(layer, leaves[weights[0]], args[0]):
        return output
    path = tuple(layer.path)
    uses.leaves[path] = weights
    uses.inputs.append(args[0])
    uses.calls.append(_call(layer, path, leaves[weights[0]].shape, args[0].shape, output.shape))
    return jnp.zeros(output.shape, output.dtype)


def _places_of_weights(layer: Conv | Dense, leaves: list[Array]) -> list[int] | None:
    """Returns the indices in ``leaves`` of a layer's kernel and bias.

    Returns None if one of them is not among ``leaves``, because the network computes it from other parameters.
    """
    names = ("kernel", "bias") if layer.use_bias else ("kernel",)
    weights: list[Array] = [layer.get_variable("params", name) for name in names]
    places = [[i for i, leaf in enumerate(leaves) if leaf is weight] for weight in weights]
    return [place[0] for place in places] if all(len(place) == 1 for place in places) else None


def _is_plain(layer: Conv | Dense, kernel: Array, x: Array) -> bool:
    """Returns whether a layer computes ``patch W + b`` of its input ``x``, in the dtype of its weights W, ``kernel``.

    This is false if one of flax's special options is set, such as a custom product, circular padding or groups of
    channels.
    """
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
        and set(_for_each_axis(layer.input_dilation, 1)) == {1}
        and layer.padding not in ("CIRCULAR", "REFLECT", "CAUSAL")
    )


def _call(
    layer: Conv | Dense, path: Path, kernel: tuple[int, ...], input_: tuple[int, ...], output: tuple[int, ...]
) -> Call:
    fan_in, window = math.prod(kernel[:-1]), kernel[:-2]
    if not window:
        return Call(path, (), (), None, (), fan_in, layer.use_bias, input_, output)
    num_axes = len(window)
    padding = layer.padding
    if isinstance(padding, int):
        padding = [padding] * num_axes
    if not isinstance(padding, str):
        padding = tuple((p, p) if isinstance(p, int) else (int(p[0]), int(p[1])) for p in padding)
    strides, dilation = _for_each_axis(layer.strides, num_axes), _for_each_axis(layer.kernel_dilation, num_axes)
    return Call(path, window, strides, padding, dilation, fan_in, layer.use_bias, input_, output)


def _for_each_axis(numbers: int | Sequence[int] | None, num_axes: int) -> tuple[int, ...]:
    """Returns one number for each spatial axis; flax allows one number for all, a sequence, or None for 1."""
    if numbers is None or isinstance(numbers, int):
        return (1 if numbers is None else numbers,) * num_axes
    return tuple(numbers)
