"""Deep linear networks: products of matrices, whose tangent kernel is linear in the inputs at infinite width."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from fedtangent.checks import whole
from fedtangent.models.dense import DenseLayer, DenseStructure, flatten_inputs
from fedtangent.models.entry import SQUARED_ERROR, ModelEntry
from fedtangent.models.kernels import AnalyticKernel, check_dtype
from fedtangent.types import Array, Key, Model, PyTree


def _same(z: Array) -> Array:
    return z


def deep_linear(input_size: int, output_size: int, width: int = 500, depth: int = 3, dtype: Any = jnp.float32) -> Model:
    """``f(x) = (m^(L-1) C)^(-1/2) W^L .. W^1 x``, entries N(0, 1), no bias (DeepLin, eq. 1).

    ``width`` is m, ``depth`` L of at least 1. Parameters are as those of ``mlp``: ``params[2 l][0]`` is the transpose
    of ``W^(l + 1)``, [fan_in, fan_out]. ``apply`` multiplies the matrices from the output's side before it meets the
    examples, so that no intermediate of theirs is wider than C, nor its gradient's: a step costs ``O(n d C)`` and what
    does not depend on n.

    The kernel is the limit of infinite width, [n1, n2] for every output: ``nngp = x1 x2' / C``, ``ntk = L x1 x2' / C``.

    Raises ``ValueError`` for sizes below 1 and ``float64`` without 64-bit mode.
    """
    for name, size in (("input_size", input_size), ("output_size", output_size), ("width", width), ("depth", depth)):
        whole(name, size)
    check_dtype(dtype, needs_x64=False)
    sizes = (input_size, *(width,) * (depth - 1), output_size)
    scales = [1.0, *(width**-0.5,) * (depth - 1)]
    scales[-1] *= output_size**-0.5
    total = math.prod(scales)

    def init(key: Key) -> PyTree:
        check_dtype(dtype, needs_x64=True)
        params: list[Any] = []
        for i, shape in enumerate(itertools.pairwise(sizes)):
            weight = jax.random.normal(jax.random.fold_in(key, i), shape, dtype)
            params.extend([(weight, None), ()] if i + 1 < depth else [(weight, None)])
        return params

    def apply(params: PyTree, x: Array) -> Array:
        product = total * params[-1][0].T  # rows for outputs: what few columns make slow, few rows do not
        for layer in params[-3::-2]:
            product = product @ layer[0].T
        return flatten_inputs(x, input_size).astype(product.dtype) @ product.T

    def network() -> Any:
        # imported here: neural-tangents takes longer to import than the rest of the package together
        from fedtangent.kernels.neural_tangents import stax

        layers = zip(sizes[:-1], sizes[1:], scales, strict=True)
        return stax.serial(*(stax.Dense(wide, scale * fan_in**0.5, None) for fan_in, wide, scale in layers))

    return Model(
        name=f"deep_linear({'-'.join(map(str, sizes))})",
        init=init,
        apply=apply,
        kernel=AnalyticKernel(functools.cache(network), lambda x: flatten_inputs(x, input_size)),
        output_size=output_size,
        structure=DenseStructure(input_size, _same, tuple(DenseLayer(scale, None) for scale in scales)),
    )


@dataclasses.dataclass(frozen=True)
class DeepLinearOptions:
    """Options of deep_linear."""

    width: int = 500
    """Width m of every hidden layer."""
    depth: int = 3
    """Layers L."""


def _build(o: DeepLinearOptions, input_shape: tuple[int, ...], output_size: int) -> Model:
    return deep_linear(math.prod(input_shape), output_size, o.width, o.depth)


ENTRIES = (
    ModelEntry(
        "deep_linear",
        "a deep linear network, whose kernel is linear in the inputs (FedAvg on deep linear networks)",
        _build,
        DeepLinearOptions,
        ("liu_deep_linear",),
        function=deep_linear,
        learning_rates={SQUARED_ERROR: 0.3},
        at_width=lambda o, width, depth: dataclasses.replace(o, width=width, depth=depth + 1),
    ),
)
