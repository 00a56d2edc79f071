"""The linearised network behind sparsified Jacobians: CP-NTK-FL's kernel and weight update, chunk by chunk.

The server of CP-NTK-FL only has what the clients sent: Jacobians whose small entries are zero. Its kernel is
``H_ij = 1/C sum <Js_i, Js_j>`` and its update ``Js' R``, both of the sparsified ``Js`` (Yue et al., ICML 2022, sections
4.1 and 4.2). No array [n, C, P] is held: entries are made again for a chunk of parameters at a time (dense networks, of
whose Jacobians the layers' parts are outer products) or for a block of examples (any other model).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedtangent.checks import check_positive
from fedtangent.federated.ntk_fl.sparse_dense import dense_tangent
from fedtangent.federated.ntk_fl.tangent import Linearise, Pool, Tangent
from fedtangent.federated.wire.sparsify import (
    Keep,
    check_sparsity,
    check_value_bits,
    count_numbers,
    num_kept,
    rounded,
    threshold_of,
)
from fedtangent.models.dense_structure import DenseStructure
from fedtangent.types import Array, Model, PyTree

BLOCK_BYTES = 2**27  # of the Jacobians of a block of examples


def sparse_linearise(
    sparsity: float | None = None,
    *,
    threshold: float | None = None,
    value_bits: int | None = None,
    dtype: Any = jnp.float32,
) -> Linearise:
    """What ``ntk_evolve`` sees of a network whose examples' Jacobians [C, P] are sparsified.

    Args:
        sparsity: share of the numbers that is set to zero; of each example the ``num_kept(sparsity, C P)`` largest
            magnitudes stay. 0 keeps all.
        threshold: instead, keep the numbers of at least that magnitude.
        value_bits: bits of a kept number on the wire, 10 to 32: rounded to nearest, with an exponent of 8 bits.
        dtype: in which clients compute their Jacobians, float32 or float64. Kernels are products in it, of a few
            thousand parameters at a time, summed in float64; updates are computed in float64.

    For dense networks a kernel costs ``2 n^2 C P`` operations (those of the last layer C times fewer) and thresholds
    are found without making the Jacobian; other models form Jacobians of blocks of examples.

    Raises ``ValueError`` unless one of ``sparsity`` and ``threshold`` is given, and for one out of range.
    """
    if (sparsity is None) == (threshold is None):
        raise ValueError(
            f"sparsity: exactly one of sparsity and threshold, got sparsity={sparsity}, threshold={threshold}"
        )
    if sparsity is not None:
        check_sparsity(sparsity)
    else:
        check_positive("threshold", threshold)
    check_value_bits(value_bits)
    keep, kind = Keep(sparsity, threshold, value_bits), jnp.dtype(dtype)
    if kind not in (jnp.float32, jnp.float64):
        raise ValueError(f"dtype: got {kind}, must be float32 or float64")

    def linearise(model: Model, weights: PyTree, pool: Pool) -> Tangent:
        outputs = pool.mask * model.apply(weights, pool.x)
        narrow = jax.tree.map(lambda leaf: leaf.astype(kind), weights)
        x = pool.x.astype(kind) if jnp.issubdtype(pool.x.dtype, jnp.floating) else pool.x
        if isinstance(model.structure, DenseStructure):
            return dense_tangent(model.structure, narrow, x, pool.mask, outputs, keep)
        return _general_tangent(model, narrow, x, pool.mask, outputs, keep)

    return linearise


# ---- any model ----------------------------------------------------------------------------------------------------


def _general_tangent(model: Model, weights: PyTree, x: Array, mask: Array, outputs: Array, keep: Keep) -> Tangent:
    num_rows, num_outputs = outputs.shape
    leaves, structure = jax.tree.flatten(weights)
    sizes = [leaf.size for leaf in leaves]
    total = num_outputs * sum(sizes)
    block = max(1, min(num_rows, BLOCK_BYTES // (total * leaves[0].dtype.itemsize)))
    rows = -(-num_rows // block) * block
    xs, masks = (_padded(a, rows).reshape((-1, block, *a.shape[1:])) for a in (x, mask.astype(leaves[0].dtype)))

    def of_one(x_i: Array) -> Array:
        found = jax.jacrev(lambda w: model.apply(w, x_i[None])[0])(weights)
        return jnp.concatenate([leaf.reshape((num_outputs, -1)) for leaf in jax.tree.leaves(found)], axis=1)

    def whole(part: tuple[Array, Array]) -> Array:
        return part[1][:, :, None] * jax.vmap(of_one)(part[0])

    def find(part: tuple[Array, Array]) -> Array:
        if keep.threshold is not None:
            return jnp.full((block,), keep.threshold, leaves[0].dtype)
        numbers = jnp.abs(whole(part)).reshape((block, -1))
        return threshold_of(count_numbers(numbers), jnp.max(numbers, axis=1), num_kept(keep.sparsity or 0.0, total))

    thresholds = jax.lax.map(find, (xs, masks))

    def jacobian(i: Array) -> Array:  # [block, C, P], sparsified
        entries = whole((xs[i], masks[i]))
        return rounded(jnp.where(jnp.abs(entries) >= thresholds[i][:, None, None], entries, 0), keep.value_bits)

    def gram() -> Array:
        found = _by_blocks(lambda i: jacobian(i).reshape((block, -1)), len(xs), block)
        return found[:num_rows, :num_rows] / num_outputs

    def kernel() -> Array:
        flat = _by_blocks(lambda i: jacobian(i).reshape((block * num_outputs, -1)), len(xs), block * num_outputs)
        return flat[: num_rows * num_outputs, : num_rows * num_outputs]

    def push(change: PyTree) -> Array:
        vector = jnp.concatenate([leaf.reshape(-1).astype(jnp.float64) for leaf in jax.tree.leaves(change)])
        moved = jax.lax.map(lambda i: jacobian(i).astype(jnp.float64) @ vector, jnp.arange(len(xs)))
        return moved.reshape((rows, num_outputs))[:num_rows]

    def pull(residual: Array) -> PyTree:
        parts = _padded(residual, rows).reshape((-1, block, num_outputs))

        def add(i: Array, sum_: Array) -> Array:
            return sum_ + jnp.einsum("nkp,nk->p", jacobian(i).astype(jnp.float64), parts[i])

        vector = jax.lax.fori_loop(0, len(xs), add, jnp.zeros((sum(sizes),), jnp.float64))
        ends = [sum(sizes[: j + 1]) for j in range(len(sizes) - 1)]
        split = jnp.split(vector, ends)
        return jax.tree.unflatten(structure, [v.reshape(leaf.shape) for v, leaf in zip(split, leaves, strict=True)])

    return Tangent(outputs, gram, push, pull, kernel, remade=True)


def _by_blocks(rows: Callable[[Array], Array], blocks: int, size: int) -> Array:
    """``A A'`` [blocks * size]^2 in float64 of a matrix whose rows come in blocks; half of its blocks are computed."""

    def row(i: Array, found: Array) -> Array:
        left = rows(i)

        def column(j: Array, found: Array) -> Array:
            product = jnp.matmul(left, rows(j).T, precision="highest").astype(jnp.float64)
            found = jax.lax.dynamic_update_slice(found, product, (i * size, j * size))
            return jax.lax.dynamic_update_slice(found, product.T, (j * size, i * size))

        return jax.lax.fori_loop(0, i + 1, column, found)

    return jax.lax.fori_loop(0, blocks, row, jnp.zeros((blocks * size, blocks * size), jnp.float64))


def _padded(values: Array, rows: int) -> Array:
    return jnp.concatenate([values, jnp.zeros((rows - values.shape[0], *values.shape[1:]), values.dtype)])
