"""The tangent kernel of a finite network at given parameters, without a stored Jacobian [n, C, P].

A dense layer ``z = a h W + c b`` adds ``(a^2 <h_i, h_j> + c^2) <d_i^k, d_j^m>`` to the kernel of output k at example i
and output m at example j, where ``d_i^k`` is the derivative of output k with respect to that layer's z (the
back-propagated signal). The kernel is the sum over layers of these products of two Gram matrices.
``kernels.layered`` computes the kernels of convolutions, and of dense layers within any flax network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Shaped

from fedtangent._src.checks import whole
from fedtangent._src.kernels.layered import is_layered, layered_kernel
from fedtangent._src.models.dense import DenseStructure, forward
from fedtangent._src.models.features import LinearStructure
from fedtangent._src.models.layers import LayeredStructure
from fedtangent._src.models.rows import check_independent_rows
from fedtangent._src.types import AnyArray, Array, Model, PyTree

SYMMETRIC_BLOCK = 512  # examples: large enough for a fast product, small enough for half the work to be left out


class _Form(NamedTuple):
    """Two functions that compute the kernel of one kind of model: one prepares all examples, one computes a block.

    Attributes:
        prepare: Maps (params, x) to the rows that ``block`` needs, one for each example in x [n, ...].
        block: Maps (params, rows1, rows2, trace) to a block [n1, n2], or [n1, C, n2, C] without ``trace``; None for
            ``rows2`` means ``rows1``, for a symmetric block.
        is_cheap: Whether computing the kernel in smaller blocks takes no more time.
    """

    prepare: Callable[[PyTree, Shaped[AnyArray, "n ..."]], PyTree]
    block: Callable[[PyTree, PyTree, PyTree | None, bool], AnyArray]
    is_cheap: bool


def empirical_ntk(
    model: Model,
    params: PyTree,
    x1: Shaped[AnyArray, "n1 ..."],
    x2: Shaped[AnyArray, "n2 ..."] | None = None,
    trace: bool = True,
    block_size: int | None = None,
) -> Float[Array, "n1 n2"] | Float[Array, "n1 C n2 C"]:
    """Computes a finite network's tangent kernel ``<df_k(x_i)/dw, df_m(x_j)/dw>``, or its mean over outputs.

    Models with a known ``structure`` (dense, linear, recurrent, and flax networks with almost all parameters in dense
    or convolutional layers) have fast kernels without a Jacobian. neural-tangents computes the kernels of other models.

    Args:
        model: Network whose kernel is computed.
        params: Parameters of the network; the computation and the result have their dtype.
        x1, x2: Examples [n1, ...] and [n2, ...]; without ``x2`` the kernel is between ``x1`` and itself, and only the
            blocks on and above the diagonal are computed.
        trace: Whether to return the mean over outputs, ``H_ij = 1/C sum_k <df_k(x_i), df_k(x_j)>`` [n1, n2], as in
            NTK-FL (Yue et al., ICML 2022, eq. 6) and neural-tangents; it tends to ``model.kernel(x1, x2).ntk`` as the
            network widens. If False, the whole kernel [n1, C, n2, C] is returned.
        block_size: Largest number of examples on a side of a block, which bounds the memory in use. None: one block, or
            for a dense or linear model without ``x2`` blocks of at most 512 examples.

    Raises:
        ValueError: A ``block_size`` that is not a whole number of at least 1, parameters that do not fit ``model``, or
            a model whose output for an example depends on other examples.
        ImportError: The kernel needs neural-tangents, which is not installed or has another version.

    Example:

        >>> import jax, fedtangent as ft
        >>> model = ft.models.mlp(input_size=3, output_size=2, widths=(16,))
        >>> params, x = model.init(jax.random.key(0)), jax.numpy.ones((5, 3))
        >>> ft.kernels.empirical_ntk(model, params, x).shape
        (5, 5)
        >>> ft.kernels.empirical_ntk(model, params, x, trace=False).shape
        (5, 2, 5, 2)
    """
    if block_size is not None:
        whole("block_size", block_size)
    _check_params(model, params)
    check_independent_rows(model, x1.shape[1:], x1.dtype)
    form = _form(model, params, x1)
    n1, n2 = x1.shape[0], x1.shape[0] if x2 is None else x2.shape[0]
    if 0 in (n1, n2):
        return _zeros(model, params, n1, n2, trace)
    if block_size is None:
        block_size = min(SYMMETRIC_BLOCK, n1) if x2 is None and form.is_cheap else max(n1, n2)
    return _by_blocks(form, model, params, x1, x2, trace, block_size)


def _check_params(model: Model, params: PyTree) -> None:
    """Raises ``ValueError`` if a model with a ``structure`` has parameters of other shapes than ``model.init``."""
    if model.structure is None:
        return
    allowed = [leaf.shape for leaf in jax.tree.leaves(model.shapes)]
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
    if shapes != allowed:
        raise ValueError(f"params: got arrays of shapes {shapes}, must be {allowed}, as {model.name} has them")


def _form(model: Model, params: PyTree, x: Shaped[AnyArray, "n ..."]) -> _Form:
    """Returns the fastest functions for the tangent kernel of this kind of model: for examples and for blocks.

    Only the shapes and types of ``params`` and of the examples ``x`` count.
    """
    structure, outputs = model.structure, model.output_size
    if isinstance(structure, DenseStructure):
        return _Form(
            lambda params, x: forward(structure, params, x), functools.partial(_dense_block, structure), is_cheap=True
        )
    if isinstance(structure, LinearStructure):
        return _Form(
            lambda params, x: structure.features(x.astype(jax.tree.leaves(params)[0].dtype)),
            lambda params, phi1, phi2, trace: _linear(outputs, phi1, phi2, trace),
            is_cheap=True,
        )
    plan = structure.plan(params, x) if isinstance(structure, LayeredStructure) else None
    if plan is not None and is_layered(plan):
        return _Form(lambda params, x: x, functools.partial(layered_kernel, structure, plan, outputs), is_cheap=False)
    return _Form(lambda params, x: x, functools.partial(_general, model.apply), is_cheap=False)


def _balanced(n: int, block_size: int) -> tuple[int, int]:
    """Returns (size, count) of blocks of equal size, at most ``block_size``, that cover ``n`` examples."""
    blocks = -(-n // block_size)
    return -(-n // blocks), blocks


def _pad(rows: PyTree, n: int, length: int) -> PyTree:
    """Pads the rows of ``n`` examples with zeros to ``length`` rows; the caller removes the padding from the kernel."""
    if n == length:
        return rows
    return jax.tree.map(lambda r: jnp.concatenate([r, jnp.zeros((length - n, *r.shape[1:]), r.dtype)]), rows)


def _cut(rows: PyTree, start: Int[Array, ""], size: int) -> PyTree:
    return jax.tree.map(lambda r: jax.lax.dynamic_slice_in_dim(r, start, size), rows)


def _write(
    kernel: Float[Array, "..."], block: Float[AnyArray, "..."], row: Int[Array, ""], column: Int[Array, ""]
) -> Float[Array, "..."]:
    """Returns ``kernel`` [n1, n2] or [n1, C, n2, C] with ``block`` written from examples (``row``, ``column``) on."""
    zero = jnp.zeros_like(row)
    return jax.lax.dynamic_update_slice(kernel, block, (row, column) if kernel.ndim == 2 else (row, zero, column, zero))


def _by_blocks(
    form: _Form,
    model: Model,
    params: PyTree,
    x1: Shaped[AnyArray, "n1 ..."],
    x2: Shaped[AnyArray, "n2 ..."] | None,
    trace: bool,
    block_size: int,
) -> Float[Array, "n1 n2"] | Float[Array, "n1 C n2 C"]:
    """Computes the tangent kernel in blocks of at most ``block_size`` examples, with the functions of ``form``.

    Without ``x2`` it computes the blocks on and above the diagonal and mirrors them.
    """
    n1, n2 = x1.shape[0], x1.shape[0] if x2 is None else x2.shape[0]
    (size1, blocks1), (size2, blocks2) = _balanced(n1, block_size), _balanced(n2, block_size)
    rows1, rows2 = form.prepare(params, x1), None if x2 is None else form.prepare(params, x2)
    if blocks1 * blocks2 == 1:
        return jnp.asarray(form.block(params, rows1, rows2, trace))
    rows1 = _pad(rows1, n1, size1 * blocks1)
    rows2 = rows1 if rows2 is None else _pad(rows2, n2, size2 * blocks2)
    places = [(i, j) for i in range(blocks1) for j in range(blocks2) if x2 is not None or i < j]
    pairs = jnp.asarray(places, jnp.int32).reshape((-1, 2))

    def on_diagonal(i: Array, kernel: Float[Array, "..."]) -> Float[Array, "..."]:
        return _write(kernel, form.block(params, _cut(rows1, i * size1, size1), None, trace), i * size1, i * size1)

    def off_diagonal(p: Array, kernel: Float[Array, "..."]) -> Float[Array, "..."]:
        row, column = pairs[p, 0] * size1, pairs[p, 1] * size2
        block = form.block(params, _cut(rows1, row, size1), _cut(rows2, column, size2), trace)
        kernel = _write(kernel, block, row, column)
        if x2 is not None:
            return kernel
        return _write(kernel, block.T if trace else block.transpose(2, 3, 0, 1), column, row)

    kernel = _zeros(model, params, size1 * blocks1, size2 * blocks2, trace)
    if x2 is None:
        kernel = jax.lax.fori_loop(0, blocks1, on_diagonal, kernel)
    kernel = jax.lax.fori_loop(0, pairs.shape[0], off_diagonal, kernel)
    return kernel[:n1, :n2] if trace else kernel[:n1, :, :n2, :]


def _zeros(model: Model, params: PyTree, n1: int, n2: int, trace: bool) -> Float[Array, "..."]:
    shape = (n1, n2) if trace else (n1, model.output_size, n2, model.output_size)
    return jnp.zeros(shape, jnp.result_type(*jax.tree.leaves(params)))


def _dense_block(
    structure: DenseStructure,
    params: PyTree,
    rows1: tuple[list[Float[AnyArray, "n1 _"]], list[Float[Array, "n1 _"]]],
    rows2: tuple[list[Float[AnyArray, "n2 _"]], list[Float[Array, "n2 _"]]] | None,
    trace: bool,
) -> Float[AnyArray, "n1 n2"] | Float[AnyArray, "n1 C n2 C"]:
    """Computes a block of a dense network's tangent kernel at ``params``; if ``trace``, its mean over outputs.

    ``rows1`` and ``rows2`` are the inputs and the pre-activations of every layer at two sets of examples, from
    ``forward``; without ``rows2`` both sets are the first.
    """
    inputs1, outputs1 = rows1
    inputs2, outputs2 = rows1 if rows2 is None else rows2
    grams = []
    for h1, h2, layer in zip(inputs1, inputs2, structure.layers, strict=True):
        gram = layer.weight_scale**2 * (h1 @ h2.T)
        grams.append(gram if layer.bias_scale is None else gram + layer.bias_scale**2)
    if trace:
        return _dense_trace(structure, params, outputs1, outputs2, grams)
    identity = jnp.eye(outputs1[-1].shape[1], dtype=grams[-1].dtype)
    kernel = grams[-1][:, None, :, None] * identity[None, :, None, :]
    signals1, signals2 = back_propagated(structure, params, outputs1), back_propagated(structure, params, outputs2)
    for gram, signal1, signal2 in zip(grams[:-1], signals1, signals2, strict=True):
        kernel = kernel + gram[:, None, :, None] * jnp.einsum("iku,jmu->ikjm", signal1, signal2)
    return kernel


def _dense_trace(
    structure: DenseStructure,
    params: PyTree,
    outputs1: list[Float[Array, "n1 _"]],
    outputs2: list[Float[Array, "n2 _"]],
    grams: list[Float[AnyArray, "n1 n2"]],
) -> Float[AnyArray, "n1 n2"]:
    """Computes a dense network's tangent kernel at ``params``, averaged over its outputs.

    ``outputs1`` and ``outputs2`` are the layers' pre-activations at the two sets of examples. ``grams`` has for each
    layer ``weight_scale^2 h1 h2' + bias_scale^2``, where h1 and h2 are its inputs; the last term is absent without
    biases.
    """
    kernel = grams[-1]
    if len(grams) == 1:
        return kernel
    num_outputs = outputs1[-1].shape[1]
    # sum_k <d_i^k, d_j^k> = sum_u slope_iu slope_ju sum_k (a W_uk)^2 for the layer below the outputs
    squares = jnp.sum((structure.layers[-1].weight_scale * params[2 * (len(grams) - 1)][0]) ** 2, axis=1)
    weighted = _slope(structure, outputs1[-2]) * squares[None, :]
    kernel = kernel + grams[-2] * (weighted @ _slope(structure, outputs2[-2]).T) / num_outputs
    if len(grams) > 2:
        signals1, signals2 = back_propagated(structure, params, outputs1), back_propagated(structure, params, outputs2)
        for gram, signal1, signal2 in zip(grams[:-2], signals1[:-1], signals2[:-1], strict=True):
            kernel = kernel + gram * jnp.einsum("iku,jku->ij", signal1, signal2) / num_outputs
    return kernel


def _slope(structure: DenseStructure, z: Float[Array, "n width"]) -> Float[Array, "n width"]:
    """Computes the activation's derivative at ``z`` elementwise, by automatic differentiation."""
    return jax.jvp(structure.activation, (z,), (jnp.ones_like(z),))[1]


def back_propagated(
    structure: DenseStructure, params: PyTree, outputs: list[Float[Array, "n _"]]
) -> list[Float[Array, "n C _"]]:
    """Computes the derivatives of the network's C outputs with respect to each hidden layer's pre-activations z.

    The list has [n, C, width] for each hidden layer, the first layer first.

    Args:
        structure: Layers of the network.
        params: Parameters of the network.
        outputs: Pre-activations z of every layer at n examples, [n, width] each, as ``forward`` returns them.
    """
    signals: list[Array] = []
    for i in range(len(structure.layers) - 2, -1, -1):
        above = structure.layers[i + 1].weight_scale * params[2 * (i + 1)][0].T
        passed = signals[0] @ above if signals else above[None, :, :]
        signals.insert(0, passed * _slope(structure, outputs[i])[:, None, :])
    return signals


def _linear(
    num_outputs: int, phi1: Float[Array, "n1 q"], phi2: Float[Array, "n2 q"] | None, trace: bool
) -> Float[Array, "n1 n2"] | Float[Array, "n1 C n2 C"]:
    """Computes the kernel of a linear model with features phi: ``phi1 phi2'``, the same for each of its outputs."""
    gram = phi1 @ (phi1 if phi2 is None else phi2).T
    if trace:
        return gram
    return gram[:, None, :, None] * jnp.eye(num_outputs, dtype=gram.dtype)[None, :, None, :]


def _general(
    apply: Callable[[PyTree, Array], Array],
    params: PyTree,
    x1: Shaped[AnyArray, "n1 ..."],
    x2: Shaped[AnyArray, "n2 ..."] | None,
    trace: bool,
) -> Float[Array, "n1 n2"] | Float[Array, "n1 C n2 C"]:
    # imported here: neural-tangents takes long to import, and the structured kernels do not need it
    from fedtangent._src.kernels.neural_tangents import nt

    kernel_fn = nt.empirical_ntk_fn(
        apply,
        trace_axes=(-1,) if trace else (),
        vmap_axes=0,
        implementation=nt.NtkImplementation.STRUCTURED_DERIVATIVES,
    )
    kernel = kernel_fn(x1, x2, params)
    return kernel if trace else kernel.transpose(0, 2, 1, 3)
