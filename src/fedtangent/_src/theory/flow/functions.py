"""Converts initial functions to the recursion's input, and the recursion's coefficients back to functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float64, Int

from fedtangent._src.checks import finite, real_array
from fedtangent._src.theory.checks import is_concrete
from fedtangent._src.theory.flow.recursion import Input, Program, path
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
    trained, start = (jax.tree.map(lambda values: values[None], part) for part in (trained, start))
    distinct, places = np.unique(rounds, return_inverse=True)
    a, shares = _coefficients(flow, trained, distinct, model)
    functions = _functions(start, at(a), shares, distinct, places, flow.kind.rows_per_example)
    return functions[:, :, 0]


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
        jax.tree.map(_stacked, *(started(flow, split, f, None, model) for f in functions))
        for split, functions in (("train", f0_train), ("test", f0_test))
    )
    distinct, places = np.unique(rounds, return_inverse=True)
    a, shares = _coefficients(flow, train, distinct, model)
    coupled = flow.kind.rows_per_example
    rows = None if points is None else (points[:, None] * coupled + np.arange(coupled)).ravel()
    chosen = train if rows is None else jax.tree.map(lambda values: values[:, rows], train)
    at_points = (chosen, flow.at_train(a, rows)), (test, flow.kernels.at_test(a))
    return Runs(*(_functions(start, product, shares, distinct, places, coupled) for start, product in at_points))


def _stacked(*parts: AnyArray) -> AnyArray:
    return np.stack(parts) if is_concrete(parts) else jnp.stack(parts)


def _coefficients(
    flow: Flow, trained: Input, rounds: Int[np.ndarray, "r"], model: int | None
) -> tuple[Float[Array, "q E r K D"], Float[AnyArray, "rounds K"]]:
    """Computes the coefficients of runs from E initial functions after ``rounds`` [r], increasing, and w_0's shares."""
    program, shares = flow.program(model, trained.residual.shape[3]), flow.shares(model)
    targets = flow.targets if flow.kind.is_linear else None
    return _paths(program, trained, targets, shares, rounds), shares


@jax.jit
def _paths(
    program: Program,
    trained: Input,
    targets: Float[AnyArray, "q D"] | None,
    shares: Float[AnyArray, "rounds K"],
    rounds: Int[AnyArray, "r"],
) -> Float[Array, "q E r K D"]:
    def one(start: Input) -> Array:
        if targets is not None:  # the recursion reads residuals
            start = start._replace(residual=start.residual - targets[:, None, :])
        return path(program, start, shares, rounds)

    return jnp.moveaxis(jax.vmap(one)(trained), 2, 0)


@functools.partial(jax.jit, static_argnames="coupled")
def _functions(
    start: Input,
    products: Float[AnyArray, "p E distinct K D"],
    shares: Float[AnyArray, "rounds K"],
    distinct: Int[AnyArray, "distinct"],
    places: Int[AnyArray, "r"],
    coupled: int,
) -> Float[Array, "r K E m C"]:
    """Computes functions from products with the kernel after the rounds ``distinct``; ``start`` is [E, p, K, D]."""
    functions = jnp.moveaxis(start.residual, 1, 0)[:, :, None] - products
    if start.along is not None:
        lost = shares[distinct][None, None, ..., None] - 1
        functions = functions + lost * jnp.moveaxis(start.along, 1, 0)[:, :, None]
    functions = functions[:, :, places].transpose(2, 3, 1, 0, 4)
    # values [.., m C, 1] of a kernel that couples outputs become [.., m, C]
    return functions.reshape(*functions.shape[:3], -1, coupled) if coupled > 1 else functions


def _rows(flow: Flow, name: str, values: ArrayLike, rows: int, model: int | None) -> Float[AnyArray, "rows K D"]:
    """Checks values [n, C] of one model or [K, n, C] of all models and returns them as [rows, K, D]."""
    models = () if model is not None else (flow.num_models,)
    shape = (*models, rows // flow.kind.rows_per_example, flow.y_train.shape[1])
    if is_concrete(values):
        values = real_array(name, values)
        finite(name, values)
    values = np.asarray(values, np.float64) if is_concrete(values) else jnp.asarray(values, jnp.float64)
    if values.shape != shape:
        raise ValueError(f"{name}: got shape {np.shape(values)}, must be {shape} for model={model}")
    return values.reshape(-1, rows, shape[-1] // flow.kind.rows_per_example).transpose(1, 0, 2)
