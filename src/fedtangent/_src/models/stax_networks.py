"""Networks of neural-tangents' ``stax`` as models, with the analytic kernel that stax derives for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from fedtangent._src.checks import shown, whole
from fedtangent._src.models.kernels import KERNELS, AnalyticKernel, StaxNetwork
from fedtangent._src.models.rows import check_independent_rows
from fedtangent._src.types import AnyArray, Array, Kernel, Key, Model, PyTree


def from_stax(
    network: StaxNetwork | Callable[[int], StaxNetwork],
    input_shape: int | Sequence[int],
    width: int | None = None,
    name: str = "stax",
) -> Model:
    """Converts a network of neural-tangents' ``stax`` to a ``Model`` with the network's analytic kernel.

    ``stax`` is ``fedtangent.kernels.stax()``. Parameters start as float32, with the same numbers whether or not 64-bit
    mode is on. ``apply`` takes ``x`` [n, ...] of any shape with as many numbers for each example as ``input_shape``,
    and computes in the parameters' dtype.

    Args:
        network: The triple ``(init_fn, apply_fn, kernel_fn)`` that ``stax.serial`` returns; or a function from the
            width of hidden layers to the triple, as ``compare`` needs it.
        input_shape: Shape of an example, channels last; a number for vectors.
        width: Width of the hidden layers if ``network`` is a function.
        name: Name of the model.

    Raises:
        ValueError: ``network`` is something else; a layer has no kernel, or needs further arguments such as random
            numbers; the output is not [n, C], depends on the other examples of the batch, or is not Gaussian at
            infinite width (the last layer must be linear, such as ``stax.Dense``); a size is below 1; ``width`` without
            a function, or a function without a width.

    Example, a network of two convolutions for ``compare``, which trains it at several widths:

        >>> import fedtangent as ft
        >>> stax = ft.kernels.stax()
        >>> def network(width):
        ...     layers = [stax.Conv(width, (3, 3), padding="SAME"), stax.Relu()] * 2
        ...     return stax.serial(*layers, stax.GlobalAvgPool(), stax.Dense(10))
        >>> model = ft.models.from_stax(network, input_shape=(8, 8, 1), width=32, name="two convolutions")
        >>> model, model.at_width(64)
        (Model(two convolutions, output_size=10), Model(two convolutions, output_size=10))
    """
    shape = tuple(np.atleast_1d(input_shape).tolist())
    for size in shape:
        whole("input_shape", size)
    if not callable(network):
        if width is not None:
            raise ValueError(f"width: got {width}, must be left out unless network is a function of the width")
        return _measured(stax_model(network, shape, name), shape)
    if width is None:
        raise ValueError("width: got none, must be given where network is a function of the width")
    model = _measured(stax_model(network(whole("width", width)), shape, name), shape)

    def at_width(other: int) -> Model:
        resized = from_stax(network, shape, other, name)
        if resized.output_size != model.output_size:
            sizes = f"{model.output_size} outputs at width {width} and {resized.output_size} at {other}"
            raise ValueError(f"network: got {name}, with {sizes}, must have the same number at every width")
        return resized

    return model._replace(at_width=at_width)


def _measured(model: Model, shape: tuple[int, ...]) -> Model:
    """Returns ``model``, marked as a user's network, so that checks do not skip it as one of this package.

    Raises ``ValueError`` if an example's output depends on other examples of the batch.
    """
    model.apply.__module__ = "stax"
    check_independent_rows(model, shape, jnp.dtype(jnp.float32), "network")
    return model


def stax_model(network: StaxNetwork, shape: tuple[int, ...], name: str, kernel: Kernel | None = None) -> Model:
    """Converts a stax network of one width to a ``Model``; raises ``ValueError`` as ``from_stax`` does.

    Args:
        network: The triple (init_fn, apply_fn, kernel_fn).
        shape: Shape of an example.
        name: Name of the model.
        kernel: Kernel of the same network at another width, which the model shares; None to build the network's kernel
            and to check it.
    """
    if not (isinstance(network, tuple) and len(network) == 3 and all(callable(part) for part in network)):
        raise ValueError(f"network: got {shown(network)}, must be the (init_fn, apply_fn, kernel_fn) of stax.serial")
    init_fn, apply_fn, _ = network

    def init(key: Key) -> PyTree:
        with jax.enable_x64(False):
            return init_fn(key, (1, *shape))[1]

    def as_examples(x: Shaped[Array, "n ..."]) -> Shaped[Array, "n ..."]:
        if math.prod(x.shape[1:]) != math.prod(shape):
            raise ValueError(f"x: got {x.shape}, must be examples of {shape}")
        return x.reshape((x.shape[0], *shape))

    def outputs_of(params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Array:
        dtype = jnp.result_type(*jax.tree.leaves(params))
        with jax.enable_x64(dtype == jnp.float64):  # stax scales by NumPy's float64, which turns float32 into float64
            return apply_fn(params, as_examples(jnp.asarray(x)).astype(dtype))

    def apply(params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n C"]:
        return outputs_of(params, x)

    one = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    outputs = _outputs(lambda: jax.eval_shape(lambda: outputs_of(init(jax.random.key(0)), jnp.zeros(one.shape))), name)
    if len(outputs.shape) != 2:
        raise ValueError(f"network: got {name}, from {one.shape} to {outputs.shape}, must map to [n, C]")
    if kernel is None:
        _check_kernel(network, one, name)
        kernel = AnalyticKernel(lambda: network, as_examples)
    return Model(name, init, apply, kernel, outputs.shape[1], vocabulary=0)


def _outputs(trace: Callable[[], jax.ShapeDtypeStruct], name: str) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a network's outputs from ``trace``, which traces the network on an example.

    Raises ``ValueError`` if that fails; ``name`` is the network's name for the message.
    """
    try:
        return trace()
    except Exception as error:
        raise ValueError(f"network: got {name}, which fails on an example: {_line(error)}") from error


def _check_kernel(network: StaxNetwork, one: jax.ShapeDtypeStruct, name: str) -> None:
    """Raises ``ValueError`` unless stax has both kernels of a network, and its output is Gaussian at infinite width.

    ``one`` is the shape and dtype of a batch of one example, and ``name`` the network's name for the error message.
    """
    gaussian: list[bool] = []

    def traced(x1: Array, x2: Array) -> tuple[Array, Array]:
        kernel: Any = network[2](x1, x2, (*KERNELS, "is_gaussian"))
        gaussian.append(kernel.is_gaussian)
        return kernel.nngp, kernel.ntk

    try:
        shapes = jax.eval_shape(traced, one, one)
    except Exception as error:
        raise ValueError(f"network: got {name}, of which a layer has no analytic kernel: {_line(error)}") from error
    if any(block.shape != (1, 1) for block in shapes):
        shape = shapes[0].shape
        raise ValueError(
            f"network: got {name}, whose kernel of one example has shape {shape}, must have shape (1, 1), as a network "
            "that ends in Flatten or GlobalAvgPool, and Dense"
        )
    if not gaussian[-1]:
        raise ValueError(f"network: got {name}, which ends in a layer without weights, must end in a linear layer")


def _line(error: Exception) -> str:
    """Returns the type and message of an error as text of one line, at most 300 letters."""
    return f"{type(error).__name__} {' '.join(str(error).split())}"[:300]
