"""Floating-point operations of a model's training step, counted in its traced program.

Counted are products of matrices and convolutions, a multiplication and an addition as two operations; elementwise
operations are left out, as model FLOP utilisation does (Chowdhery et al., 2022, appendix B). The count is that of the
mathematics: it does not depend on how a mapping, or a faster convolution, computes the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fedtangent._src.liveness import inner_programs
from fedtangent._src.losses import get_loss
from fedtangent._src.types import FederatedData, Model


class Shaped(Protocol):
    """An abstract array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of its axes."""


def step_flops(model: Model, data: FederatedData, batch: int, loss: str = "cross_entropy") -> float:
    """Counts the operations of one gradient of the loss on one batch: forward and backward pass.

    Args:
        model: The network.
        data: Examples, of which the first ones are the batch.
        batch: Number of examples.
        loss: Name of the loss.
    """
    params, measure = jax.eval_shape(lambda: model.init(jax.random.key(0))), get_loss(loss)

    def value(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return measure(model.apply(params, x).astype(jnp.float32), y, jnp.ones(batch, bool))

    return counted(jax.grad(value), params, data.x[:batch], data.y[:batch])


def counted(function: Callable[..., object], *arguments: Any) -> float:
    """Counts the operations of a function.

    Args:
        function: Function of arrays.
        arguments: Its arguments, or their shapes.

    Raises:
        ValueError: A loop whose number of passes is not known before it runs.
    """
    return program_flops(jax.make_jaxpr(function)(*arguments).jaxpr)


def program_flops(program: core.Jaxpr) -> float:
    """Counts the operations of a traced program; of the branches of a condition the costliest counts."""
    total = 0.0
    for equation in program.eqns:
        inner = [program_flops(part) for part in inner_programs(equation)]
        match equation.primitive.name:
            case "dot_general":
                total += dot_flops(equation)
            case "conv_general_dilated":
                total += convolution_flops(equation)
            case "scan":
                total += equation.params["length"] * sum(inner)
            case "cond":
                total += max(inner)
            case "while" if sum(inner):
                raise ValueError("function: got a loop of unknown length around a product, must be a scan")
            case _:
                total += sum(inner)
    return total


def dot_flops(equation: core.JaxprEqn) -> float:
    """Counts the operations of a product of matrices."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, out = shape(equation.invars[0]), shape(equation.outvars[0])
    return 2.0 * math.prod(out) * math.prod(left[axis] for axis in contracted)


def convolution_flops(equation: core.JaxprEqn) -> float:
    """Counts the operations of a convolution; products with padding or with the zeros of a dilation do not count."""
    settings, numbers = equation.params, equation.params["dimension_numbers"]
    left, right, out = (shape(var) for var in (*equation.invars[:2], *equation.outvars[:1]))
    batch, features = (out[axis] for axis in numbers.out_spec[:2])
    inputs = right[numbers.rhs_spec[1]]  # of a group
    places = 1
    for k, (low, _) in enumerate(settings["padding"]):
        length, window, places_out = (
            array[spec[2 + k]]
            for array, spec in ((left, numbers.lhs_spec), (right, numbers.rhs_spec), (out, numbers.out_spec))
        )
        spread, apart = settings["lhs_dilation"][k], settings["rhs_dilation"][k]
        starts = np.arange(places_out)[:, None] * settings["window_strides"][k] - low
        at = starts + np.arange(window)[None, :] * apart
        places *= int(np.sum((at >= 0) & (at <= (length - 1) * spread) & (at % spread == 0)))
    return 2.0 * batch * features * inputs * places / settings["batch_group_count"]


def shape(var: core.Var | core.Literal) -> tuple[int, ...]:
    """Returns the shape of an input or result of an operation."""
    array: Shaped = var.aval  # type: ignore[assignment]
    return array.shape
