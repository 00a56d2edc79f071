"""Description of a network's dense and convolutional layers, from which its tangent kernel is computed layer by layer.

At every position p of an example (a pixel, or a step of time) such a layer computes ``z(p) = patch(p) W + b``, with the
same matrix W and bias b at all positions. The patch is the window of a convolution, or the input vector of a dense
layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Float, Shaped

from fedtangent._src import pytrees
from fedtangent._src.models.gemm import Geometry, patches
from fedtangent._src.types import AnyArray, Array, PyTree

Path = tuple[str, ...]


@runtime_checkable
class WithShape(Protocol):
    """An array, or a ``jax.ShapeDtypeStruct`` that describes one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""

    @property
    def dtype(self) -> DTypeLike:
        """Type of the numbers."""


class Call(NamedTuple):
    """One application of a layer to an example: shapes and settings, all known before the network is run.

    Attributes:
        path: Path of the layer's weights in the tree of parameters.
        window, strides, padding, dilation: Settings of a convolution; the window is () for a dense layer.
        fan_in: How many numbers a patch has.
        has_bias: Whether the layer has a bias.
        input, output: Shapes of the layer's input and output for one example.
    """

    path: Path
    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str | Sequence[tuple[int, int]] | None
    dilation: tuple[int, ...]
    fan_in: int
    has_bias: bool
    input: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def positions(self) -> int:
        """Number P of positions at which the layer applies its matrix, such as the pixels of its output."""
        return math.prod(self.output[:-1])


class Plan(NamedTuple):
    """The layers of a network, and the parameters that are outside of them, for one shape of an example.

    Attributes:
        calls: Applications of the dense and convolutional layers whose weights have no other use, in forward order.
        others: Indices of all other leaves of the parameters.
        num_others: How many numbers these leaves have.
    """

    calls: tuple[Call, ...]
    others: tuple[int, ...]
    num_others: int


@runtime_checkable
class RunLayers(Protocol):
    """A function that computes a network's outputs on one example, and the inputs of its layers."""

    def __call__(self, plan: Plan, params: PyTree, shifts: list[Array], x: AnyArray, /) -> tuple[Array, list[Array]]:
        """Returns the network's outputs [1, C], and the input of each layer call in ``plan.calls``.

        Args:
            plan: Calls of the network's layers.
            params: Parameters of the network.
            shifts: An array for each call, which is added to the call's output. The derivative of the network's output
                by a shift is the gradient that reaches this call in backpropagation.
            x: One example, [1, ...].
        """


class LayeredStructure(NamedTuple):
    """Functions that find and run the dense and convolutional layers of a network, for its tangent kernel.

    Attributes:
        plan: Finds the layers for ``(params, x)``; some parameters may be outside of layers, such as normalisations.
        run: Computes outputs and the inputs of the layers.
    """

    plan: Callable[[PyTree, WithShape], Plan]  # (params, x [n, ...]), arrays or their shapes -> use of the weights
    run: RunLayers


def biased(z: Float[AnyArray, "*rows C"], bias: Float[AnyArray, "*ones C"]) -> Float[Array, "*rows C"]:
    """Returns ``z + bias`` in the dtype of ``z``; in half precision the gradient of ``bias`` is summed in float32.

    Args:
        z: Outputs of a layer without its bias.
        bias: The bias, with axes of size 1 for the rows.
    """
    return (pytrees.wide(z) + pytrees.wide(bias)).astype(z.dtype)


def layer_patches(call: Call, inputs: Shaped[Array, "n ..."]) -> Float[Array, "n P fan_in"]:
    """Gathers the patches of the inputs that a layer multiplies by its weight matrix, at each of its P positions.

    Args:
        call: The application of the layer.
        inputs: Inputs of the layer, [n, ...] with the shape ``call.input`` for each example.
    """
    n = inputs.shape[0]
    if not call.window:
        return inputs.reshape((n, call.positions, call.fan_in))
    num_axes = len(call.window)
    x = inputs.reshape((-1, *inputs.shape[-num_axes - 1 :]))
    padding = call.padding
    if isinstance(padding, str):
        extent = [(k - 1) * d + 1 for k, d in zip(call.window, call.dilation, strict=True)]
        padding = lax.padtype_to_pads(x.shape[1:-1], extent, call.strides, padding)
    pairs = tuple((int(low), int(high)) for low, high in padding or ())
    geometry = Geometry(x.shape[1:-1], call.window, call.strides, pairs, call.dilation, None)
    return patches(x, geometry).reshape((n, call.positions, call.fan_in))
