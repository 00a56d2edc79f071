"""The linearised network with sparsified Jacobians: CP-NTK-FL's kernel and weight update, chunk by chunk.

The server of CP-NTK-FL only has the clients' messages: Jacobians whose small entries are zero. Its kernel is ``H_ij =
1/C sum <Js_i, Js_j>`` over the C outputs and its update of the weights ``Js' R`` with the dual R (``ntk_fl.dual``),
both with the sparsified Jacobian ``Js`` (Yue et al., ICML 2022, sections 4.1 and 4.2). No array [n, C, P] is in memory:
entries are computed again for a chunk of parameters at a time (dense networks, whose layers' Jacobians are outer
products) or for a block of examples (any other model).

For output k of a dense network at an example, the derivative by a layer's weights is the outer product of the layer's
(scaled) inputs h [U] and the back-propagated signal d_k [V], and the derivative by its biases is the (scaled) signal.
The last layer's signal is the identity, so its derivative is h, once for every output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.typing import DTypeLike
from jaxtyping import Float

from fedtangent._src.checks import dtype as checked_dtype
from fedtangent._src.checks import whole
from fedtangent._src.federated.ntk_fl.tangent import Linearise, Pool, Tangent
from fedtangent._src.federated.wire import sparsify
from fedtangent._src.kernels.empirical import back_propagated
from fedtangent._src.models.dense import DenseStructure, forward
from fedtangent._src.types import Array, Model, PyTree

BLOCK_BYTES = 2**27  # of the Jacobians of a block of examples
CHUNK_BYTES = 2**25  # of the entries of a dense layer made at once
SEARCH_ROWS = 64  # examples whose thresholds are sought at once
SYMMETRIC_BLOCKS = 8  # of the rows of a kernel; one half of the blocks is computed


def sparse_linearise(sparsity: float, *, value_bits: int | None = None, dtype: DTypeLike = jnp.float32) -> Linearise:
    """Builds ``(model, weights, pool) -> Tangent``, a function that linearises a network with sparsified Jacobians.

    For dense networks a kernel costs at most ``2 n^2 C P`` operations (the last layer's part C^2 times fewer), and the
    thresholds of the sparsification are computed without the Jacobian; other models form Jacobians of blocks of
    examples.

    Args:
        sparsity: Share of the numbers that is set to zero; of each example the ``num_kept(sparsity, C P)`` numbers of
            largest magnitude stay. 0 keeps all.
        value_bits: Bits of a kept number on the wire, 10 to 32: rounded to nearest, with an exponent of 8 bits. None:
            the bits of ``dtype``.
        dtype: Dtype in which clients compute their Jacobians, float32 or float64. Kernels are products in this dtype
            (for dense networks of a chunk of parameters at a time), summed in float64; updates are sums in float64.

    Raises:
        ValueError: A sparsity outside [0, 1), ``value_bits`` outside 10 .. 32, or another dtype.
    """
    sparsify.check_sparsity(sparsity)
    if value_bits is not None:
        whole("value_bits", value_bits, 10, 32)
    kind = checked_dtype(dtype, "float32", "float64")
    keep = Keep(sparsity, value_bits)

    def linearise(model: Model, weights: PyTree, pool: Pool) -> Tangent:
        outputs = pool.mask * model.apply(weights, pool.x)
        narrow = jax.tree.map(lambda leaf: leaf.astype(kind), weights)
        x = pool.x.astype(kind) if jnp.issubdtype(pool.x.dtype, jnp.floating) else pool.x
        if isinstance(model.structure, DenseStructure):
            return _dense_tangent(_layers(model.structure, narrow, x, pool.mask), outputs, keep)
        return _general_tangent(model, narrow, x, pool.mask, outputs, keep)

    return linearise


class Keep(NamedTuple):
    """The rule by which a Jacobian [C, P] is sparsified.

    Attributes:
        sparsity: Share of an example's C P numbers that is set to zero.
        value_bits: Bits of a kept number, 8 for the exponent and 1 for the sign; None: the bits of its dtype.
    """

    sparsity: float
    value_bits: int | None

    def of(self, entries: Array, at: Array) -> Array:
        """Sets entries below a magnitude to zero, and rounds the others to ``value_bits`` bits.

        Args:
            entries: Entries of the Jacobians of n examples, [n, ...].
            at: Threshold of each example, [n]: entries of at least this magnitude are kept.
        """
        reach = jnp.abs(entries) >= at.reshape((-1,) + (1,) * (entries.ndim - 1))
        return sparsify.rounded(jnp.where(reach, entries, 0), self.value_bits)


# ---- dense networks -----------------------------------------------------------------------------------------------


class _DensePart(NamedTuple):
    """The factors of the Jacobian by the parameters of one layer of U inputs and V units, for n examples.

    The derivative of output k by the layer's weights [U, V] is the outer product of ``inputs`` and ``signals`` at k,
    the derivatives of this output by the inputs of the layer's units.
    """

    inputs: Float[Array, "n U"]  # scaled
    signals: Float[Array, "n C V"] | None  # None at the last layer: the identity
    # scaled signals [n, C, V], or [n, 1] at the last layer, where all outputs have the same; None without biases
    bias: Float[Array, "n *CV"] | None


def _dense_tangent(layers: list[_DensePart], outputs: Array, keep: Keep) -> Tangent:
    """Returns the linearisation of a dense network with sparsified Jacobians; ``layers`` are the Jacobian's factors.

    ``outputs`` [n, C] are the network's outputs in float64; ``keep`` says which entries of the Jacobian are kept.
    """
    num_outputs = outputs.shape[1]
    keep_largest = functools.partial(keep.of, at=_thresholds(layers, num_outputs, keep.sparsity))

    *biases, last_bias = (None if layer.bias is None else keep_largest(layer.bias) for layer in layers)
    last = _DensePart(keep_largest(layers[-1].inputs), None, last_bias)
    hidden = [_Hidden(layer.inputs, *_units(layer), keep_largest) for layer in layers[:-1]]

    def gram() -> Array:
        kernel = num_outputs * (_square(last.inputs) + (0 if last.bias is None else _square(last.bias)))
        for layer, bias in zip(hidden, biases, strict=True):
            kernel = kernel + layer.gram()
            kernel = kernel if bias is None else kernel + _square(bias.reshape((bias.shape[0], -1)))
        return kernel / num_outputs

    def whole() -> Array:
        shared = _square(last.inputs) + (0 if last.bias is None else _square(last.bias))
        kernel = jnp.kron(shared, jnp.eye(num_outputs))
        for layer, bias in zip(hidden, biases, strict=True):
            kernel = kernel + layer.whole()
            kernel = kernel if bias is None else kernel + _square(bias.reshape((-1, bias.shape[2])))
        return kernel

    def push(change: PyTree) -> Array:
        by_weight, by_bias = jax.tree.map(_wide, change[2 * len(hidden)])
        moved = _wide(last.inputs) @ by_weight + (0 if last.bias is None else _wide(last.bias) * by_bias)
        for i, (layer, bias) in enumerate(zip(hidden, biases, strict=True)):
            by_weight, by_bias = jax.tree.map(_wide, change[2 * i])
            moved = moved + layer.push(by_weight)
            moved = moved if bias is None else moved + jnp.einsum("nkv,v->nk", _wide(bias), by_bias[0])
        return moved

    def pull(residual: Array) -> PyTree:
        change: list[PyTree] = []
        for layer, bias in zip(hidden, biases, strict=True):
            by_bias = None if bias is None else jnp.einsum("nkv,nk->v", _wide(bias), residual)[None]
            change += [(layer.pull(residual), by_bias), ()]
        by_bias = None if last.bias is None else _wide(last.bias).T @ residual
        return [*change, (_wide(last.inputs).T @ residual, by_bias)]

    return Tangent(outputs, gram, push, pull, whole, remade=True)


class _Hidden(NamedTuple):
    """The sparsified Jacobian by the weights [U, V] of a hidden layer (U inputs, V units), never in memory as a whole.

    Attributes:
        inputs: Scaled inputs of the layer, [n, U].
        signals: Back-propagated signals of its V units in groups of g units, [groups, n, C, g]; 0 for padded units.
        units: Number V of units.
        kept: Function that sets the entries of the Jacobian that are not kept to 0.
    """

    inputs: Array
    signals: Array
    units: int
    kept: Callable[[Array], Array]

    def entries(self, signals: Array) -> Array:
        """Computes the Jacobian's entries by the weights of one group of units, [n, C, U, g]; 0 where not kept.

        ``signals`` [n, C, g] are back-propagated: derivatives of each output by the inputs of the group's g units. A
        unit has U weights.
        """
        return self.kept(self.inputs[:, None, :, None] * signals[:, :, None, :])

    def _sum(self, one: Callable[[Array], Array], size: int) -> Array:
        """Returns ``A A'`` [size, size] in float64, where the columns of A are made one group of units at a time.

        ``one`` returns a group's columns of A, [size, columns], from the group's signals [n, C, g].
        """

        def add(total: Array, signals: Array) -> tuple[Array, None]:
            return _add_square(total, one(signals)), None

        return _mirrored(jax.lax.scan(add, jnp.zeros((size, size), jnp.float64), self.signals)[0])

    def gram(self) -> Array:
        """Returns the kernel of this layer's weights between all examples, [n, n], summed over outputs."""
        n = self.inputs.shape[0]
        return self._sum(lambda signals: self.entries(signals).reshape((n, -1)), n)

    def whole(self) -> Array:
        """Returns the kernel of this layer's weights between all examples and outputs, [n C, n C]."""
        rows = self.inputs.shape[0] * self.signals.shape[2]
        inputs = self.inputs.shape[1] * self.signals.shape[3]
        return self._sum(lambda signals: self.entries(signals).reshape((rows, inputs)), rows)

    def push(self, change: Array) -> Array:
        """Multiplies by the Jacobian: returns the change of the outputs [n, C] for a change of this layer's weights.

        ``change`` is [U, V], for a layer of U inputs and V units.
        """
        groups, _, _, size = self.signals.shape
        padded = jnp.pad(change, ((0, 0), (0, groups * size - self.units)))
        parts = padded.reshape((-1, groups, size)).transpose(1, 0, 2)

        def add(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
            return total + jnp.einsum("nkug,ug->nk", _wide(self.entries(part[0])), part[1]), None

        start = jnp.zeros(self.signals.shape[1:3], jnp.float64)
        return jax.lax.scan(add, start, (self.signals, parts))[0]

    def pull(self, residual: Array) -> Array:
        """Multiplies by the transposed Jacobian: returns a change of this layer's weights for a ``residual`` [n, C].

        The change is [U, V], for a layer of U inputs and V units.
        """
        groups = jax.lax.map(
            lambda signals: jnp.einsum("nkug,nk->ug", _wide(self.entries(signals)), residual), self.signals
        )
        return groups.transpose(1, 0, 2).reshape((self.inputs.shape[1], -1))[:, : self.units]


def _wide(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns ``values`` in float64."""
    return values.astype(jnp.float64)


def _layers(structure: DenseStructure, params: PyTree, x: Array, mask: Array) -> list[_DensePart]:
    """Returns, for each layer, the inputs and back-propagated signals whose products are the entries of the Jacobian.

    ``mask`` [n, 1] is 0 for an example of padding, whose entries are 0.
    """
    inputs, before = forward(structure, params, x)
    real = mask.astype(inputs[0].dtype)
    signals = [real[:, :, None] * d for d in back_propagated(structure, params, before)]
    parts = []
    for layer, h, d in zip(structure.layers, inputs, [*signals, None], strict=True):
        weight_scale = real * layer.weight_scale if d is None else layer.weight_scale
        bias = None if layer.bias_scale is None else layer.bias_scale * (real if d is None else d)
        parts.append(_DensePart(jnp.asarray(weight_scale * h), d, bias))
    return parts


def _units(layer: _DensePart) -> tuple[Array, int]:
    """Returns a hidden layer's signals in groups of g units, [groups, n, C, g], and the number of units.

    The groups are as large as ``CHUNK_BYTES`` allows; zeros fill the last one.
    """
    assert layer.signals is not None
    n, num_outputs, units = layer.signals.shape
    unit_bytes = n * num_outputs * layer.inputs.shape[1] * layer.signals.dtype.itemsize
    size = max(1, min(units, CHUNK_BYTES // max(1, unit_bytes)))
    padded = jnp.pad(layer.signals, ((0, 0), (0, 0), (0, -units % size)))
    return padded.reshape((n, num_outputs, -1, size)).transpose(2, 0, 1, 3), units


def _thresholds(layers: list[_DensePart], num_outputs: int, sparsity: float) -> Array:
    """Computes for each example the threshold of its Jacobian, [n]: entries of at least this magnitude are kept.

    The share ``sparsity`` of the entries is below the threshold, less if entries are equal. The threshold is 0 if there
    are no more nonzero entries than are kept. ``layers`` are the Jacobian's factors.
    """
    n = layers[0].inputs.shape[0]
    k = sparsify.num_kept(sparsity, num_outputs * sum(_num_weights(layer, num_outputs) for layer in layers))
    blocks = jax.tree.map(lambda values: _blocks(values, min(n, SEARCH_ROWS)), layers)
    return jax.lax.map(lambda block: _search(block, num_outputs, k), blocks).reshape(-1)[:n]


def _num_weights(layer: _DensePart, num_outputs: int) -> int:
    """Returns the number of weights and biases of a layer.

    The last layer has ``num_outputs`` units; a hidden layer has V, the last axis of its signals [n, C, V].
    """
    units = num_outputs if layer.signals is None else layer.signals.shape[2]
    return units * (layer.inputs.shape[1] + (layer.bias is not None))


def _search(layers: list[_DensePart], num_outputs: int, k: int) -> Array:
    """Computes for each example of a block a threshold that keeps the k largest magnitudes of its Jacobian, [n].

    ``layers`` are the Jacobian's factors for the n examples of the block; ``_thresholds`` joins the blocks.
    """
    counts: list[sparsify.Count] = []
    most: list[Array] = []
    for layer in layers:
        times, size = (num_outputs if layer.signals is None else 1), layer.inputs.shape[0]
        largest = jnp.max(jnp.abs(layer.inputs), axis=1)
        if layer.signals is None:
            counts.append(sparsify.count_numbers(layer.inputs, times))
            most.append(largest)
        else:
            flat = layer.signals.reshape((size, -1))
            counts.append(sparsify.count_products(layer.inputs, flat))
            most.append(largest * jnp.max(jnp.abs(flat), axis=1))
        if layer.bias is not None:
            counts.append(sparsify.count_numbers(layer.bias.reshape((size, -1)), times))
            most.append(jnp.max(jnp.abs(layer.bias.reshape((size, -1))), axis=1))

    def count(threshold: Array) -> Array:
        return jnp.sum(jnp.stack([one(threshold) for one in counts]), axis=0)

    return sparsify.threshold_of(count, jnp.max(jnp.stack(most), axis=0), k)


def _add_square(total: Array, rows: Array) -> Array:
    """Returns ``total + A A'`` for the matrix A = ``rows``, on the lower triangle.

    Only half of the products are computed: entries above the diagonal blocks are arbitrary.
    """
    n = rows.shape[0]
    block = _rows_a_block(n)
    for start in range(0, n, block):
        stop = min(start + block, n)
        product = jnp.matmul(rows[start:stop], rows[:stop].T, precision="highest")
        total = total.at[start:stop, :stop].add(product.astype(total.dtype))
    return total


def _rows_a_block(n: int) -> int:
    return n if n < 64 * SYMMETRIC_BLOCKS else -(-n // SYMMETRIC_BLOCKS)


def _mirrored(lower: Array) -> Array:
    """Copies the lower triangle of a matrix to the upper one, which makes it symmetric."""
    return jnp.tril(lower) + jnp.tril(lower, -1).T


def _square(rows: Array) -> Array:
    """Returns ``A A'`` in float64, for the matrix A = ``rows``."""
    return _mirrored(_add_square(jnp.zeros((rows.shape[0],) * 2, jnp.float64), rows))


# ---- any model ----------------------------------------------------------------------------------------------------


def _general_tangent(model: Model, weights: PyTree, x: Array, mask: Array, outputs: Array, keep: Keep) -> Tangent:
    """Returns the linearisation of any model with sparsified Jacobians, which are computed again for each use.

    ``weights`` and ``x`` are in the clients' dtype; ``mask`` [n, 1] is 0 for an example of padding. ``outputs`` [n, C]
    are the network's outputs in float64; ``keep`` says which entries of the Jacobian are kept.
    """
    num_rows, num_outputs = outputs.shape
    vector, unravel = ravel_pytree(jax.tree.map(_wide, weights))
    dtype = jax.tree.leaves(weights)[0].dtype
    block = max(1, min(num_rows, BLOCK_BYTES // (num_outputs * vector.size * dtype.itemsize)))
    xs, masks = (_blocks(values, block) for values in (x, mask.astype(dtype)))

    def of_one(x_i: Array) -> Array:
        derivatives = jax.jacrev(lambda w: model.apply(w, x_i[None])[0])(weights)
        return jnp.concatenate([leaf.reshape((num_outputs, -1)) for leaf in jax.tree.leaves(derivatives)], axis=1)

    def whole(part: tuple[Array, Array]) -> Array:
        return part[1][:, :, None] * jax.vmap(of_one)(part[0])

    at = jax.lax.map(lambda part: sparsify.thresholds(whole(part), keep.sparsity), (xs, masks))

    def jacobian(i: Array) -> Array:  # [block, C, P], sparsified
        return keep.of(whole((xs[i], masks[i])), at[i])

    def gram() -> Array:
        kernel = _by_blocks(lambda i: jacobian(i).reshape((block, -1)), len(xs), block)
        return kernel[:num_rows, :num_rows] / num_outputs

    def kernel() -> Array:
        flat = _by_blocks(lambda i: jacobian(i).reshape((block * num_outputs, -1)), len(xs), block * num_outputs)
        return flat[: num_rows * num_outputs, : num_rows * num_outputs]

    def push(change: PyTree) -> Array:
        along = ravel_pytree(jax.tree.map(_wide, change))[0]
        moved = jax.lax.map(lambda i: _wide(jacobian(i)) @ along, jnp.arange(len(xs)))
        return moved.reshape((-1, num_outputs))[:num_rows]

    def pull(residual: Array) -> PyTree:
        parts = _blocks(residual, block)

        def add(i: Array, total: Array) -> Array:
            return total + jnp.einsum("nkp,nk->p", _wide(jacobian(i)), parts[i])

        return unravel(jax.lax.fori_loop(0, len(xs), add, jnp.zeros_like(vector)))

    return Tangent(outputs, gram, push, pull, kernel, remade=True)


def _by_blocks(rows: Callable[[Array], Array], blocks: int, size: int) -> Array:
    """Returns ``A A'`` in float64, [blocks * size, blocks * size], for a matrix A given block by block.

    By symmetry half of the products of blocks suffice. ``rows(i)`` returns block i of A, with ``size`` rows.
    """

    def row(i: Array, kernel: Array) -> Array:
        block_rows = rows(i)

        def column(j: Array, kernel: Array) -> Array:
            product = jnp.matmul(block_rows, rows(j).T, precision="highest").astype(jnp.float64)
            kernel = jax.lax.dynamic_update_slice(kernel, product, (i * size, j * size))
            return jax.lax.dynamic_update_slice(kernel, product.T, (j * size, i * size))

        return jax.lax.fori_loop(0, i + 1, column, kernel)

    return jax.lax.fori_loop(0, blocks, row, jnp.zeros((blocks * size, blocks * size), jnp.float64))


def _blocks(values: Array, size: int) -> Array:
    """Returns ``values`` [n, ...] in blocks of ``size`` rows, [blocks, size, ...]; zeros fill the last block."""
    padded = jnp.pad(values, ((0, -len(values) % size),) + ((0, 0),) * (values.ndim - 1))
    return padded.reshape((-1, size, *values.shape[1:]))
