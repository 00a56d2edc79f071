"""What the tangent kernel needs to know of a network: which weights are matrices of layers, and what enters those.

Such a layer is linear in its weights with the same matrix at every position, ``z(p) = patch(p) W + b``, and that is
all that ``kernels.layered`` needs to know of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jax import lax

from fedtangent._src.models.gemm import Geometry, patches
from fedtangent._src.types import Array, PyTree

Path = tuple[str, ...]


class Call(NamedTuple):
    """A use of a layer on one example: static."""

    path: Path  # of the layer in the tree of parameters
    window: tuple[int, ...]  # of a convolution; () for a dense layer
    strides: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    fan_in: int  # numbers in a patch
    has_bias: bool
    input: tuple[int, ...]  # what enters and what comes out for a batch of one example
    output: tuple[int, ...]

    @property
    def positions(self) -> int:
        """Positions P at which the layer's matrix is used on an example."""
        return math.prod(self.output[:-1])


class Plan(NamedTuple):
    """Assignment of a network's weights to its layers: static, for one shape of an example."""

    calls: tuple[Call, ...]  # of layers all of whose uses are among these, in the order of the forward pass
    others: tuple[int, ...]  # leaves of the parameters that are used in any other way
    num_others: int  # parameters in them


class LayeredStructure(NamedTuple):
    """Structure of a network of matrix products (layers), and few other weights, such as scales of a normalisation."""

    plan: Callable[[PyTree, Any], Plan]  # (params, x [n, ...]), arrays or their shapes -> what the weights are
    run: Callable[[Plan, PyTree, list[Array], Array], tuple[Array, list[Array]]]
    # (plan, params, shifts, x [1, ...]) -> outputs [1, C] on one example with ``shifts[c]`` added to what call ``c``
    # returns, and each call's input; the derivative by a shift is the signal propagated back to that call


def layer_patches(call: Call, inputs: Array) -> Array:
    """Gathers the rows that the layer's matrix multiplies: ``inputs`` [n, *call.input] as [n, P, fan_in]."""
    n = inputs.shape[0]
    if not call.window:
        return inputs.reshape((n, call.positions, call.fan_in))
    num_axes = len(call.window)
    x = inputs.reshape((-1, *inputs.shape[-num_axes - 1 :]))
    padding = call.padding
    if isinstance(padding, str):
        extent = [(k - 1) * d + 1 for k, d in zip(call.window, call.dilation, strict=True)]
        padding = lax.padtype_to_pads(x.shape[1:-1], extent, call.strides, padding)
    pairs = tuple((int(low), int(high)) for low, high in padding)
    geometry = Geometry(x.shape[1:-1], call.window, call.strides, pairs, call.dilation, None)
    return patches(x, geometry).reshape((n, call.positions, call.fan_in))
