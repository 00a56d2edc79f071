"""Converts initial functions to the recursion's input, and the recursion's coefficients back to functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float64, Int

from fedtangent._src.checks import finite, real_array
from fedtangent._src.theory.checks import is_concrete
from fedtangent._src.theory.flow.recursion import Input, path
from fedtangent._src.types import AnyArray, Array, ArrayLike

if TYPE_CHECKING:
    from fedtangent._src.theory.flow.flow import Flow

KernelProduct: TypeAlias = Callable[[Array], AnyArray]  # maps coefficients a [q, ...] to Theta(points, X) a


class Runs(NamedTuple):
    """Predicted functions of runs from E initial functions after r requested rounds."""

    train: Float[AnyArray, "r K E n C"]  # at the training points
    test: Float[AnyArray, "r K E m C"]  # at the test points


def zero_functions(
    flow: Flow, model: int | None
) -> tuple[Float64[np.ndarray, "*K n C"], Float64[np.ndarray, "*K m C"]]:
    """Returns the zero function at the training and at the test points of a flow.

    Args:
        flow: Flow with n training and m test points.
        model: Index of one model, whose shapes are [n, C] and [m, C]; None for [K, n, C] and [K, m, C].
    """
    models, shape = (flow.num_models,) if model is None else (), flow.y_train.shape
    return np.zeros((*models, *shape)), np.zeros((*models, flow.num_test // flow.kind.rows_per_example, shape[1]))


def started(flow: Flow, split: str, f0: ArrayLike, along: ArrayLike | None, model: int | None) -> Input:
    """Builds the recursion's input, f_0 and (with weight decay) ``J w_0`` [rows, K, D], at the points of one split.

    Args:
        flow: Flow that the functions belong to.
        split: "train" or "test".
        f0: Initial function of one model [n, C], or of all models [K, n, C]; m in place of n for "test".
        along: ``J w_0`` at the same points and of the same shape, with weight decay only; None for ``homogeneity``
            times f0.
        model: Index of the one model, or None for all.
    """
    rows = len(flow.theta) if split == "train" else flow.num_test
    start = _rows(flow, f"f0_{split}", f0, rows, model)
    if not flow.kind.decays:
        if along is not None:
            raise ValueError(f"along_{split}: got one, must be None without weight_decay")
        return Input(start, None)
    if along is None:
        return Input(start, flow.numbers.homogeneity * start)
    return Input(start, _rows(flow, f"along_{split}", along, rows, model))


def evolved(
    flow: Flow, trained: Input, start: Input, at: KernelProduct, rounds: Int[np.ndarray, "r"], model: int | None
) -> Float[AnyArray, "r K m C"]:
    """Computes the functions [r, K, m, C] after each of ``rounds`` [r].

    Args:
        flow: Flow to follow.
        trained: Initial function at the training points.
        start: Initial function at the m points of the result.
        at: Product with the kernel at the m points.
        rounds: Numbers of finished rounds, in any order.
        model: Index of one model, or None for all.
    """
    distinct, places = np.unique(rounds, return_inverse=True)
    shares, program = flow.shares(model), flow.program(model, trained.residual.shape[2])
    a = path(program, recursion_input(flow, trained), shares, distinct)
    functions = _by_output(flow, _moved(start, a, at, shares[distinct]).transpose(0, 2, 1, 3))
    return functions if np.array_equal(rounds, distinct) else functions[places]


def runs(
    flow: Flow,
    f0_train: AnyArray | Sequence[AnyArray],
    f0_test: AnyArray | Sequence[AnyArray],
    rounds: Int[np.ndarray, "r"],
    points: Int[np.ndarray, "t"] | None,
    model: int | None,
) -> Runs:
    """Computes ``f_r`` at training and test points for E initial functions, as ``Flow.runs`` documents.

    Args:
        flow, f0_train, f0_test, model: As for ``Flow.runs``, of ``flow``.
        rounds: Numbers of finished rounds, in any order.
        points: Indices of the training points in the result; None for all.
    """
    axes = "E, K" if model is None else "E"
    if not np.ndim(f0_train) == np.ndim(f0_test) == len(axes.split()) + 2 or not len(f0_train) == len(f0_test) > 0:
        got = f"shapes {np.shape(f0_train)} and {np.shape(f0_test)}"
        raise ValueError(f"f0_train and f0_test: got {got}, must be [{axes}, n, C] and [{axes}, m, C]")
    train, test = (
        jax.tree.map(lambda *parts: jnp.stack(parts), *(started(flow, split, f, None, model) for f in functions))
        for split, functions in (("train", f0_train), ("test", f0_test))
    )
    distinct, places = np.unique(rounds, return_inverse=True)
    shares, program = flow.shares(model), flow.program(model, train.residual.shape[3])
    a = jax.vmap(lambda one: path(program, recursion_input(flow, one), shares, distinct))(train)[:, places]
    coupled = flow.kind.rows_per_example
    rows = None if points is None else (points[:, None] * coupled + np.arange(coupled)).ravel()
    chosen = train if rows is None else jax.tree.map(lambda values: values[:, rows], train)
    at_train = _moved(chosen, a, lambda a: flow.at_train(a, rows), shares[rounds])
    at_test = _moved(test, a, flow.kernels.at_test, shares[rounds])
    return Runs(*(_by_output(flow, values.transpose(1, 3, 0, 2, 4)) for values in (at_train, at_test)))


def recursion_input(flow: Flow, trained: Input) -> Input:
    """Returns the residuals of ``trained`` under the squared error, ``trained`` itself under another loss."""
    return trained._replace(residual=trained.residual - flow.targets[:, None, :]) if flow.kind.is_linear else trained


def _moved(
    start: Input, a: Float[Array, "*r q K D"], at: KernelProduct, shares: Float[AnyArray, "r K"]
) -> Float[Array, "*r m K D"]:
    """Computes functions [.., r, m, K, D] from coefficients a [.., r, q, K, D]; ``start`` has [.., m, K, D]."""
    functions = start.residual[..., None, :, :, :] - jnp.moveaxis(at(jnp.moveaxis(a, -3, 0)), 0, -3)
    if start.along is not None:
        lost = jnp.asarray(shares)[:, None, :, None] - 1
        lost = lost.reshape((1,) * (functions.ndim - 4) + lost.shape)
        functions = functions + lost * start.along[..., None, :, :, :]
    return functions


def _by_output(flow: Flow, rows: Float[Array, "..."]) -> Float[Array, "..."]:
    """Reshapes values [.., m C, 1] of a kernel that couples outputs to [.., m, C]."""
    return rows.reshape(*rows.shape[:-2], -1, flow.kind.rows_per_example) if flow.kind.rows_per_example > 1 else rows


def _rows(flow: Flow, name: str, values: ArrayLike, rows: int, model: int | None) -> Float[Array, "rows K D"]:
    """Checks values [n, C] of one model or [K, n, C] of all models and returns them as [rows, K, D]."""
    models = () if model is not None else (flow.num_models,)
    shape = (*models, rows // flow.kind.rows_per_example, flow.y_train.shape[1])
    if is_concrete(values):
        values = real_array(name, values)
        finite(name, values)
    values = jnp.asarray(values, jnp.float64)
    if values.shape != shape:
        raise ValueError(f"{name}: got shape {np.shape(values)}, must be {shape} for model={model}")
    return values.reshape(-1, rows, shape[-1] // flow.kind.rows_per_example).transpose(1, 0, 2)
