"""The tangent kernel of a finite network at given parameters, without ever holding a Jacobian [n, C, P].

A dense layer ``z = a h W + c b`` adds ``(a^2 <h_i, h_j> + c^2) <d_i^k, d_j^m>`` to the kernel of output k at example i
and output m at example j, where ``d_i^k`` is the derivative of output k with respect to that layer's z (the
back-propagated signal). The kernel is the sum over layers of these products of two Gram matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.models.dense import DenseStructure, forward
from fedtangent.models.rbf_linear import LinearStructure
from fedtangent.types import Array, Model, PyTree

Block = Callable[[PyTree, Array, Array, bool], Array]


def empirical_ntk(
    model: Model,
    params: PyTree,
    x1: Array,
    x2: Array | None = None,
    trace: bool = True,
    block_size: int | None = None,
) -> Array:
    """The tangent kernel ``<df_k(x_i)/dw, df_m(x_j)/dw>`` of a finite network, summed over its parameters.

    ``trace=True`` returns the mean of the diagonal blocks over outputs, ``H_ij = 1/C sum_k <df_k(x_i), df_k(x_j)>``
    [n1, n2]: the H of NTK-FL (Yue et al., ICML 2022, eq. 6), neural-tangents' own convention, and what tends to
    ``model.kernel(x1, x2).ntk`` as the network widens. ``trace=False`` returns the whole kernel [n1, C, n2, C].
    ``x2=None`` means ``x1``. The parameters' dtype is the dtype of the result, and of everything on the way.

    Structured (see the module) for models whose ``structure`` says that they are dense or linear; any other ``apply``
    goes to neural-tangents, which needs each example's output to depend on that example alone. ``block_size`` bounds
    what is held at once besides the result: blocks of at most that many examples by as many.

    Raises ``ValueError`` for a ``block_size`` that is not a whole number of at least 1, and for parameters that are
    not those of ``model``.
    """
    if block_size is not None and not _is_count(block_size):
        raise ValueError(f"block_size: got {block_size!r}, must be None or a whole number of at least 1")
    _check_params(model, params)
    x2 = x1 if x2 is None else x2
    block = _block_function(model)
    if block_size is None or block_size >= max(x1.shape[0], x2.shape[0]):
        return block(params, x1, x2, trace)
    rows, columns = _split(x1, block_size), _split(x2, block_size)
    blocks = jax.lax.map(lambda a: jax.lax.map(lambda b: block(params, a, b, trace), columns), rows)
    return _join(blocks, x1.shape[0], x2.shape[0], trace)


def _is_count(value: Any) -> bool:
    """Whether ``value`` is a whole number of at least 1."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) >= 1


def _check_params(model: Model, params: PyTree) -> None:
    """``ValueError`` unless the parameters have the shapes of ``model.init``'s; for models with a ``structure``."""
    if model.structure is None:
        return
    allowed = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))]
    given = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
    if given != allowed:
        raise ValueError(f"params: got arrays of shapes {given}, {model.name} has {allowed}")


def _block_function(model: Model) -> Block:
    """``(params, x1, x2, trace) -> kernel`` for this kind of model."""
    structure = model.structure
    if isinstance(structure, DenseStructure):
        return lambda params, x1, x2, trace: _dense(structure, params, x1, x2, trace)
    if isinstance(structure, LinearStructure):
        return lambda params, x1, x2, trace: _linear(structure, model.output_size, params, x1, x2, trace)
    return lambda params, x1, x2, trace: _general(model.apply, params, x1, x2, trace)


def _split(x: Array, block_size: int) -> Array:
    """[n, ...] as [blocks, block_size, ...], the last one padded with zeros, which ``_join`` cuts off again."""
    padding = -x.shape[0] % block_size
    padded = jnp.concatenate([x, jnp.zeros((padding, *x.shape[1:]), x.dtype)])
    return padded.reshape((-1, block_size, *x.shape[1:]))


def _join(blocks: Array, n1: int, n2: int, trace: bool) -> Array:
    """[rows, columns, b, b] or [rows, columns, b, C, b, C] as one kernel."""
    rows, columns, b = blocks.shape[:3]
    if trace:
        return blocks.transpose(0, 2, 1, 3).reshape(rows * b, columns * b)[:n1, :n2]
    outputs = blocks.shape[3]
    joined = blocks.transpose(0, 2, 3, 1, 4, 5).reshape(rows * b, outputs, columns * b, outputs)
    return joined[:n1, :, :n2, :]


def _dense(structure: DenseStructure, params: PyTree, x1: Array, x2: Array, trace: bool) -> Array:
    inputs1, outputs1 = forward(structure, params, x1)
    inputs2, outputs2 = forward(structure, params, x2)
    grams = []
    for h1, h2, layer in zip(inputs1, inputs2, structure.layers, strict=True):
        gram = layer.weight_scale**2 * (h1 @ h2.T)
        grams.append(gram if layer.bias_scale is None else gram + layer.bias_scale**2)
    if trace:
        return _dense_trace(structure, params, outputs1, outputs2, grams)
    identity = jnp.eye(outputs1[-1].shape[1], dtype=grams[-1].dtype)
    kernel = grams[-1][:, None, :, None] * identity[None, :, None, :]
    signals1, signals2 = _signals(structure, params, outputs1), _signals(structure, params, outputs2)
    for gram, signal1, signal2 in zip(grams[:-1], signals1, signals2, strict=True):
        kernel = kernel + gram[:, None, :, None] * jnp.einsum("iku,jmu->ikjm", signal1, signal2)
    return kernel


def _dense_trace(
    structure: DenseStructure, params: PyTree, outputs1: list[Array], outputs2: list[Array], grams: list[Array]
) -> Array:
    """The mean over outputs, for which the last hidden layer costs one Gram product of its width, not of C widths."""
    kernel = grams[-1]
    if len(grams) == 1:
        return kernel
    num_outputs = outputs1[-1].shape[1]
    # sum_k <d_i^k, d_j^k> = sum_u slope_iu slope_ju sum_k (a W_uk)^2 for the layer below the outputs
    squares = jnp.sum((structure.layers[-1].weight_scale * params[2 * (len(grams) - 1)][0]) ** 2, axis=1)
    weighted = _slope(structure, outputs1[-2]) * squares[None, :]
    kernel = kernel + grams[-2] * (weighted @ _slope(structure, outputs2[-2]).T) / num_outputs
    if len(grams) > 2:
        signals1, signals2 = _signals(structure, params, outputs1), _signals(structure, params, outputs2)
        for gram, signal1, signal2 in zip(grams[:-2], signals1[:-1], signals2[:-1], strict=True):
            kernel = kernel + gram * jnp.einsum("iku,jku->ij", signal1, signal2) / num_outputs
    return kernel


def _slope(structure: DenseStructure, z: Array) -> Array:
    """The activation's derivative at ``z``, elementwise and as automatic differentiation has it."""
    return jax.jvp(structure.activation, (z,), (jnp.ones_like(z),))[1]


def _signals(structure: DenseStructure, params: PyTree, outputs: list[Array]) -> list[Array]:
    """Derivatives [n, C, width] of the outputs with respect to each hidden layer's z, first layer first."""
    signals: list[Array] = []
    for i in range(len(structure.layers) - 2, -1, -1):
        above = structure.layers[i + 1].weight_scale * params[2 * (i + 1)][0].T
        passed = signals[0] @ above if signals else above[None, :, :]
        signals.insert(0, passed * _slope(structure, outputs[i])[:, None, :])
    return signals


def _linear(structure: LinearStructure, num_outputs: int, params: PyTree, x1: Array, x2: Array, trace: bool) -> Array:
    """Every output has its own weights on the same features, so the kernel is ``phi phi' (x) I``."""
    dtype = jax.tree.leaves(params)[0].dtype
    gram = structure.features(x1.astype(dtype)) @ structure.features(x2.astype(dtype)).T
    if trace:
        return gram
    return gram[:, None, :, None] * jnp.eye(num_outputs, dtype=dtype)[None, :, None, :]


def _general(apply: Callable[[PyTree, Array], Array], params: PyTree, x1: Array, x2: Array, trace: bool) -> Array:
    # imported here: neural-tangents takes long to import, and the structured kernels do not need it
    from fedtangent.kernels.neural_tangents import nt

    kernel_fn = nt.empirical_ntk_fn(
        apply,
        trace_axes=(-1,) if trace else (),
        vmap_axes=0,
        implementation=nt.NtkImplementation.STRUCTURED_DERIVATIVES,
    )
    kernel = kernel_fn(x1, x2, params)
    return kernel if trace else kernel.transpose(0, 2, 1, 3)
