"""The structure of a dense network, and its forward pass: what training and the structured kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fedtangent.types import Array, PyTree


class DenseLayer(NamedTuple):
    """``z = weight_scale * h W + bias_scale * b``; ``bias_scale`` is None where the layer has no bias."""

    weight_scale: float  # Python floats, so that they never decide the dtype
    bias_scale: float | None


class DenseStructure(NamedTuple):
    """Dense layers with one elementwise activation between them.

    Parameters follow neural-tangents' stax: a list with ``(W [fan_in, fan_out], b [1, fan_out] or None)`` for each
    layer and ``()`` for each activation in between, so layer ``l``'s parameters are ``params[2 * l]``.
    """

    input_size: int
    activation: Callable[[Array], Array]
    layers: tuple[DenseLayer, ...]


def flatten_inputs(x: Array, input_size: int) -> Array:
    """``x`` [n, ...] as [n, input_size]; raises ``ValueError`` naming both sizes if they differ."""
    flat = x.reshape((x.shape[0], -1)) if x.shape[0] else x.reshape((0, input_size))
    if flat.shape[1] != input_size:
        raise ValueError(f"x: got {x.shape}, that is {flat.shape[1]} numbers an example, the model takes {input_size}")
    return flat


def forward(structure: DenseStructure, params: PyTree, x: Array) -> tuple[list[Array], list[Array]]:
    """Every layer's inputs ``h`` [n, fan_in] and outputs before the activation ``z`` [n, fan_out].

    Computed in the parameters' dtype; ``z[-1]`` is the network's output [n, C].
    """
    h = flatten_inputs(x, structure.input_size).astype(params[0][0].dtype)
    inputs: list[Array] = []
    outputs: list[Array] = []
    for i, layer in enumerate(structure.layers):
        weight, bias = params[2 * i]
        h = structure.activation(outputs[-1]) if i else h
        z = layer.weight_scale * (h @ weight)
        if layer.bias_scale is not None:
            z = z + layer.bias_scale * bias
        inputs.append(h)
        outputs.append(z)
    return inputs, outputs
