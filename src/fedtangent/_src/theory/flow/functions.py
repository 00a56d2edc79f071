"""Predicted functions of a flow: initial functions become the recursion's input, its coefficients become predictions.

A function is an array of rows and D columns, one row for each row of the kernel Theta. If the outputs share the kernel,
a row is an example and D = C. If the kernel couples the C outputs, an example has C rows and D = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float64, Int

from fedtangent._src.checks import finite, real_array
from fedtangent._src.kernels.gram import KernelBlocks, product
from fedtangent._src.theory.checks import is_concrete
from fedtangent._src.theory.flow.recursion import Input, Program, in_chunks, path
from fedtangent._src.types import AnyArray, Array, ArrayLike

if TYPE_CHECKING:
    from fedtangent._src.theory.flow.flow import Flow


class Runs(NamedTuple):
    """Outputs of the K models (K = 1 if one is selected) after each of r requested rounds, for E initial functions.

    ``train`` and ``test`` are the outputs at the n training points (or the selected ones) and at the m test points.
    """

    train: Float[AnyArray, "r K E n C"]  # at the training points, or at the selected ones
    test: Float[AnyArray, "r K E m C"]  # at the test points


def zero_functions(
    flow: Flow, model: int | None
) -> tuple[Float64[np.ndarray, "*K n C"], Float64[np.ndarray, "*K m C"]]:
    """Returns the function that is 0 everywhere, at the training and at the test points of a flow.

    Args:
        flow: Flow with n training and m test points.
        model: Index of one model, whose shapes are [n, C] and [m, C]; None for [K, n, C] and [K, m, C].
    """
    models, shape = (flow.num_models,) if model is None else (), flow.y_train.shape
    return np.zeros((*models, *shape)), np.zeros((*models, flow.num_test // flow.kind.rows_per_example, shape[1]))


def started(flow: Flow, split: str, f0: ArrayLike, along: ArrayLike | None, model: int | None) -> Input:
    """Builds the ``Input`` of the recursion from an initial function f_0 at the training or the test points.

    Its ``residual`` is f_0 itself, [rows, K, D], with the points' kernel rows, K = 1 for one model, and D = C outputs
    (D = 1 if the kernel couples the outputs); ``followed`` subtracts the targets if the recursion needs it. With weight
    decay the input also has ``J w_0``, the Jacobian at the points times the initial weights.

    Args:
        flow: Flow that the functions belong to.
        split: "train" or "test".
        f0: Initial function of one model [n, C], or of all models [K, n, C]; m in place of n for "test".
        along: ``J w_0`` in the same shape; None for ``homogeneity`` times f0. Without weight decay it must be None.
        model: Index of the one model, or None for all.
    """
    rows = len(flow.theta) if split == "train" else flow.num_test
    start = _rows(flow, f"f0_{split}", f0, rows, model)
    if not flow.kind.decays:
        if along is not None:
            raise ValueError(f"along_{split}: got an array, must be None without weight_decay")
        return Input(start, None)
    if along is None:
        return Input(start, flow.numbers.homogeneity * start)
    return Input(start, _rows(flow, f"along_{split}", along, rows, model))


def runs(
    flow: Flow,
    f0_train: AnyArray | Sequence[AnyArray],
    f0_test: AnyArray | Sequence[AnyArray],
    rounds: Int[np.ndarray, "r"],
    points: Int[np.ndarray, "t"] | None,
    model: int | None,
) -> Runs:
    """Computes the functions of E runs at training and test points, as ``Flow.runs`` documents.

    Args:
        flow: Flow to follow.
        f0_train, f0_test: Initial functions, [E, K, n, C] and [E, K, m, C]; of one model without the axis K.
        model: Index of one model, or None for all.
        rounds: Numbers of finished rounds, in any order.
        points: Indices of the training points in the result; None for all.
    """
    axes = "E, K" if model is None else "E"
    if not np.ndim(f0_train) == np.ndim(f0_test) == len(axes.split()) + 2 or not len(f0_train) == len(f0_test) > 0:
        got = f"shapes {np.shape(f0_train)} and {np.shape(f0_test)}"
        raise ValueError(f"f0_train and f0_test: got {got}, must be [{axes}, n, C] and [{axes}, m, C]")
    train, test = (
        jax.tree.map(stacked, *(started(flow, split, f, None, model) for f in functions))
        for split, functions in (("train", f0_train), ("test", f0_test))
    )
    at_train, at_test = followed(flow, train, test, rounds, points, model)
    assert at_test is not None
    return Runs(at_train, at_test)


def stacked(*parts: AnyArray) -> AnyArray:
    """Stacks arrays along a new first axis, with NumPy, or with JAX if one of them is traced."""
    return np.stack(parts) if is_concrete(parts) else jnp.stack(parts)


class _Request(NamedTuple):
    """Rounds and training points at which functions are requested, with numbers that the recursion needs.

    ``targets`` has a row for each of q kernel rows. ``shares`` is the share of the initial weights that weight decay
    leaves before each round and at the end. ``distinct`` lists each requested round once, increasing; ``places`` has,
    for each round of the result, its index in ``distinct``. ``rows`` are kernel rows of the training points in the
    result; None for all.
    """

    targets: Float[AnyArray, "q D"] | None  # None under another loss than the squared error
    shares: Float[AnyArray, "rounds K"]  # of w_0 (``Flow.shares``)
    distinct: Int[AnyArray, "distinct"]  # requested numbers of finished rounds, each once, increasing
    places: Int[AnyArray, "r"]  # index in ``distinct`` of each round of the result
    rows: Int[AnyArray, "t"] | None  # kernel rows of the training points in the result; None for all


def followed(
    flow: Flow,
    train: Input,
    test: Input | None,
    rounds: Int[np.ndarray, "r"],
    points: Int[np.ndarray, "t"] | None,
    model: int | None,
) -> tuple[Float[Array, "r K E t C"], Float[Array, "r K E m C"] | None]:
    """Computes the functions after each of ``rounds`` for E initial functions, at the training and the test points.

    Args:
        flow: Flow to follow.
        train: Initial functions at the q kernel rows of the training points, [E, q, K, D], with D = C outputs, or D = 1
            if the kernel couples the outputs.
        test: Initial functions at the p kernel rows of the test points, [E, p, K, D]; None for no result there.
        rounds: Numbers of finished rounds, in any order.
        points: Indices of the training points in the result; None for all.
        model: Index of one model, or None for all.
    """
    coupled, (distinct, places) = flow.kind.rows_per_example, np.unique(rounds, return_inverse=True)
    rows = None if points is None else (points[:, None] * coupled + np.arange(coupled)).ravel()
    program = flow.program(model, train.residual.shape[3])
    request = _Request(flow.targets if flow.kind.is_linear else None, flow.shares(model), distinct, places, rows)
    if isinstance(flow.kernels, KernelBlocks):
        return _in_one_program(program, train, test, flow.kernels.ntk_test_train, request)
    a = _paths(program, train, request)
    at_test = None if test is None else _functions(program, test, jnp.asarray(flow.kernels.at_test(a)), request)
    return _at_train(program, train, a, request), at_test


@jax.jit
def _in_one_program(
    program: Program, train: Input, test: Input | None, theta_test: Float[Array, "p q"], request: _Request
) -> tuple[Float[Array, "r K E t C"], Float[Array, "r K E m C"] | None]:
    a = _paths(program, train, request)
    at_test = None if test is None else _functions(program, test, product(theta_test, a), request)
    return _at_train(program, train, a, request), at_test


@jax.jit
def _paths(program: Program, train: Input, request: _Request) -> Float[Array, "q E distinct K D"]:
    """Computes the coefficients a of ``f_r(x) = f_0(x) - Theta(x, X) a`` for E initial functions ``train``.

    The rounds r are ``request.distinct``, the requested rounds without repetition. With weight decay f_0 shrinks too.
    """

    def one(start: Input) -> Array:
        if request.targets is not None:  # the recursion reads residuals
            start = start._replace(residual=start.residual - request.targets[:, None, :])
        return path(program, start, jnp.asarray(request.shares), jnp.asarray(request.distinct))

    return jnp.moveaxis(jax.vmap(one)(train), 2, 0)


@jax.jit
def _at_train(
    program: Program, train: Input, a: Float[Array, "q E distinct K D"], request: _Request
) -> Float[Array, "r K E t C"]:
    if request.rows is None:
        return _functions(program, train, product(program.theta, a), request)
    rows = jnp.asarray(request.rows)
    products = in_chunks(program.theta, rows, a.reshape(len(a), -1))[rows].reshape(len(rows), *a.shape[1:])
    return _functions(program, jax.tree.map(lambda values: values[:, rows], train), products, request)


@jax.jit
def _functions(
    program: Program, start: Input, products: Float[Array, "p E distinct K D"], request: _Request
) -> Float[Array, "r K E m C"]:
    """Computes the functions after the requested rounds: initial functions minus kernel rows times coefficients.

    With weight decay, the part ``J w_0`` of the initial functions also shrinks, as ``request.shares`` says.

    Args:
        program: Program of the recursion, whose kernel may couple the outputs.
        start: Initial functions of E runs, [E, p, K, D]. The m points have p = m kernel rows and D = C, or if the
            kernel couples the outputs p = m C and D = 1.
        products: These kernel rows times the coefficients of each run after each distinct round.
        request: Requested rounds, and the shares of the initial weights that weight decay leaves.
    """
    functions = jnp.moveaxis(jnp.asarray(start.residual), 1, 0)[:, :, None] - products
    if start.along is not None:
        lost = jnp.asarray(request.shares)[request.distinct][None, None, ..., None] - 1
        functions = functions + lost * jnp.moveaxis(jnp.asarray(start.along), 1, 0)[:, :, None]
    functions = functions[:, :, request.places].transpose(2, 3, 1, 0, 4)
    coupled = program.kind.rows_per_example  # values [.., m C, 1] of a kernel that couples outputs become [.., m, C]
    return functions.reshape(*functions.shape[:3], -1, coupled) if coupled > 1 else functions


def _rows(flow: Flow, name: str, values: ArrayLike, rows: int, model: int | None) -> Float[AnyArray, "rows K D"]:
    """Checks a function, [n, C] or with ``model=None`` [K, n, C], and returns it as [rows, K, D], a row per kernel row.

    D is C, or 1 if the kernel couples the outputs. ``name`` is the argument's name in error messages, ``rows`` the
    number of kernel rows of the n points. Raises ``ValueError`` for a wrong shape, and for known (not traced) numbers
    that are not finite.
    """
    models = () if model is not None else (flow.num_models,)
    shape = (*models, rows // flow.kind.rows_per_example, flow.y_train.shape[1])
    if is_concrete(values):
        values = np.asarray(real_array(name, values), np.float64)
        finite(name, values)
    else:
        values = jnp.asarray(values, jnp.float64)
    if values.shape != shape:
        raise ValueError(f"{name}: got shape {np.shape(values)}, must be {shape} for model={model}")
    return values.reshape(-1, rows, shape[-1] // flow.kind.rows_per_example).transpose(1, 0, 2)
