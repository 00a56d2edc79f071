"""Sparsified Jacobians of dense networks, a few units of a layer at a time.

Of output k at an example, the derivative by a layer's weights is the outer product of the layer's (scaled) inputs h
[U] and the back-propagated signal d_k [V], and the one by its biases is the (scaled) signal. The last layer's signal is
the identity: its part is h, once for every output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedtangent.federated.ntk_fl.tangent import Tangent
from fedtangent.federated.wire.sparsify import (
    Count,
    Keep,
    count_all,
    count_numbers,
    count_products,
    num_kept,
    rounded,
    threshold_of,
)
from fedtangent.models.dense_structure import DenseStructure, forward
from fedtangent.types import Array, PyTree

CHUNK_BYTES = 2**25  # of the entries made at once
SEARCH_ROWS = 64  # examples whose thresholds are sought at once
SYMMETRIC_BLOCKS = 8  # of the rows of a kernel, of which one half is computed


class _Layer(NamedTuple):
    inputs: Array  # [n, U], scaled
    signals: Array | None  # [n, C, V]; None at the last layer: the identity
    bias: Array | None  # scaled signals [n, C, V]; [n, 1] at the last layer, of its own output; None without biases


def dense_tangent(
    structure: DenseStructure, params: PyTree, x: Array, mask: Array, outputs: Array, keep: Keep
) -> Tangent:
    """The tangent of a dense network's sparsified Jacobians at ``params``, whose dtype is that of the entries.

    ``x`` [n, ...], ``mask`` [n, 1] of real rows, ``outputs`` [n, C] of the network, in float64.
    """
    layers, num_outputs = _layers(structure, params, x, mask), outputs.shape[1]
    at = _thresholds(layers, num_outputs, keep)

    def kept(entries: Array) -> Array:
        reach = jnp.abs(entries) >= at.reshape((-1,) + (1,) * (entries.ndim - 1))
        return rounded(jnp.where(reach, entries, 0), keep.value_bits)

    last = _Layer(kept(layers[-1].inputs), None, None if layers[-1].bias is None else kept(layers[-1].bias))
    biases = [None if layer.bias is None else kept(layer.bias) for layer in layers[:-1]]
    hidden = [_Hidden(layer.inputs, *_units(layer), kept) for layer in layers[:-1]]

    def gram() -> Array:
        found = num_outputs * (_square(last.inputs) + (0 if last.bias is None else _square(last.bias)))
        for layer, bias in zip(hidden, biases, strict=True):
            found = found + layer.gram()
            found = found if bias is None else found + _square(bias.reshape((bias.shape[0], -1)))
        return found / num_outputs

    def whole() -> Array:
        shared = _square(last.inputs) + (0 if last.bias is None else _square(last.bias))
        found = jnp.kron(shared, jnp.eye(num_outputs))
        for layer, bias in zip(hidden, biases, strict=True):
            found = found + layer.whole()
            found = found if bias is None else found + _square(bias.reshape((-1, bias.shape[2])))
        return found

    def push(change: PyTree) -> Array:
        by_weight, by_bias = (wide(change[2 * len(hidden)][j]) for j in range(2))
        found = wide(last.inputs) @ by_weight + (0 if last.bias is None else wide(last.bias) * by_bias)
        for i, (layer, bias) in enumerate(zip(hidden, biases, strict=True)):
            by_weight, by_bias = (wide(change[2 * i][j]) for j in range(2))
            found = found + layer.push(by_weight)
            found = found if bias is None else found + jnp.einsum("nkv,v->nk", wide(bias), by_bias[0])
        return found

    def pull(residual: Array) -> PyTree:
        change: list[PyTree] = []
        for layer, bias in zip(hidden, biases, strict=True):
            by_bias = None if bias is None else jnp.einsum("nkv,nk->v", wide(bias), residual)[None]
            change += [(layer.pull(residual), by_bias), ()]
        by_bias = None if last.bias is None else wide(last.bias).T @ residual
        return [*change, (wide(last.inputs).T @ residual, by_bias)]

    return Tangent(outputs, gram, push, pull, whole, remade=True)


class _Hidden(NamedTuple):
    """The weights' part of a layer below the last, in groups of units; padded units have no signal."""

    inputs: Array  # [n, U]
    signals: Array  # [groups, n, C, g]
    units: int  # V
    kept: Callable[[Array], Array]

    def entries(self, signals: Array) -> Array:
        """[n, C, U, g]."""
        return self.kept(self.inputs[:, None, :, None] * signals[:, :, None, :])

    def _sum(self, one: Callable[[Array], Array], size: int) -> Array:
        """The sum of ``A A'`` over groups, in float64, A [size, ...] being what ``one`` makes of a group's signals."""

        def add(found: Array, signals: Array) -> tuple[Array, None]:
            return _add_square(found, one(signals)), None

        return _mirrored(jax.lax.scan(add, jnp.zeros((size, size), jnp.float64), self.signals)[0])

    def gram(self) -> Array:
        """[n, n], summed over outputs."""
        n = self.inputs.shape[0]
        return self._sum(lambda signals: self.entries(signals).reshape((n, -1)), n)

    def whole(self) -> Array:
        """[n C, n C]."""
        rows = self.inputs.shape[0] * self.signals.shape[2]
        inputs = self.inputs.shape[1] * self.signals.shape[3]
        return self._sum(lambda signals: self.entries(signals).reshape((rows, inputs)), rows)

    def push(self, change: Array) -> Array:
        """[U, V] -> [n, C]."""
        groups, _, _, size = self.signals.shape
        padded = jnp.pad(change, ((0, 0), (0, groups * size - self.units)))
        parts = padded.reshape((-1, groups, size)).transpose(1, 0, 2)

        def add(found: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
            return found + jnp.einsum("nkug,ug->nk", wide(self.entries(part[0])), part[1]), None

        start = jnp.zeros(self.signals.shape[1:3], jnp.float64)
        return jax.lax.scan(add, start, (self.signals, parts))[0]

    def pull(self, residual: Array) -> Array:
        """[n, C] -> [U, V]."""
        found = jax.lax.map(
            lambda signals: jnp.einsum("nkug,nk->ug", wide(self.entries(signals)), residual), self.signals
        )
        return found.transpose(1, 0, 2).reshape((self.inputs.shape[1], -1))[:, : self.units]


def wide(values: Array) -> Array:
    """In float64; None stays None."""
    return values if values is None else values.astype(jnp.float64)


def _layers(structure: DenseStructure, params: PyTree, x: Array, mask: Array) -> list[_Layer]:
    """What the Jacobian is made of, first layer first; zero in rows of padding."""
    inputs, before = forward(structure, params, x)
    real = mask.astype(inputs[0].dtype)
    top, layer = len(inputs) - 1, structure.layers[-1]
    bias = None if layer.bias_scale is None else layer.bias_scale * real
    found = [_Layer(real * layer.weight_scale * inputs[top], None, bias)]
    signals = jnp.eye(before[-1].shape[1], dtype=real.dtype)[None]
    for i in range(top - 1, -1, -1):
        above = structure.layers[i + 1].weight_scale * params[2 * (i + 1)][0].T
        slope = jax.jvp(structure.activation, (before[i],), (jnp.ones_like(before[i]),))[1]
        signals = (signals @ above) * (real * slope)[:, None, :]
        layer = structure.layers[i]
        bias = None if layer.bias_scale is None else layer.bias_scale * signals
        found.insert(0, _Layer(layer.weight_scale * inputs[i], signals, bias))
    return found


def _units(layer: _Layer) -> tuple[Array, int]:
    """A hidden layer's signals in groups of units [groups, n, C, g], and how many units there are."""
    assert layer.signals is not None
    n, num_outputs, units = layer.signals.shape
    each = n * num_outputs * layer.inputs.shape[1] * layer.signals.dtype.itemsize
    size = max(1, min(units, CHUNK_BYTES // max(1, each)))
    padded = jnp.pad(layer.signals, ((0, 0), (0, 0), (0, -units % size)))
    return padded.reshape((n, num_outputs, -1, size)).transpose(2, 0, 1, 3), units


def _thresholds(layers: list[_Layer], num_outputs: int, keep: Keep) -> Array:
    """The magnitude from which an example's entries are kept, [n]."""
    n, dtype = layers[0].inputs.shape[0], layers[0].inputs.dtype
    if keep.threshold is not None:
        return jnp.full((n,), keep.threshold, dtype)
    k = num_kept(keep.sparsity or 0.0, num_outputs * sum(_num_weights(layer, num_outputs) for layer in layers))
    rows = min(n, SEARCH_ROWS)
    blocks = [
        jax.tree.map(lambda a: jnp.pad(a, ((0, -n % rows),) + ((0, 0),) * (a.ndim - 1)), layer) for layer in layers
    ]
    blocks = jax.tree.map(lambda a: a.reshape((-1, rows, *a.shape[1:])), blocks)
    return jax.lax.map(lambda block: _search(block, num_outputs, k), blocks).reshape(-1)[:n]


def _num_weights(layer: _Layer, num_outputs: int) -> int:
    """Weights and biases of a layer."""
    units = num_outputs if layer.signals is None else layer.signals.shape[2]
    return units * (layer.inputs.shape[1] + (layer.bias is not None))


def _search(layers: list[_Layer], num_outputs: int, k: int) -> Array:
    counts: list[Count] = []
    most: list[Array] = []
    for layer in layers:
        times, size = (num_outputs if layer.signals is None else 1), layer.inputs.shape[0]
        largest = jnp.max(jnp.abs(layer.inputs), axis=1)
        if layer.signals is None:
            counts.append(count_numbers(layer.inputs, times))
            most.append(largest)
        else:
            flat = layer.signals.reshape((size, -1))
            counts.append(count_products(layer.inputs, flat))
            most.append(largest * jnp.max(jnp.abs(flat), axis=1))
        if layer.bias is not None:
            counts.append(count_numbers(layer.bias.reshape((size, -1)), times))
            most.append(jnp.max(jnp.abs(layer.bias.reshape((size, -1))), axis=1))
    return threshold_of(count_all(*counts), jnp.max(jnp.stack(most), axis=0), k)


def _add_square(found: Array, rows: Array) -> Array:
    """``found + A A'`` on and below the diagonal blocks; what lies above is not meant."""
    n = rows.shape[0]
    block = _rows_a_block(n)
    for start in range(0, n, block):
        stop = min(start + block, n)
        product = jnp.matmul(rows[start:stop], rows[:stop].T, precision="highest")
        found = found.at[start:stop, :stop].add(product.astype(found.dtype))
    return found


def _rows_a_block(n: int) -> int:
    return n if n < 64 * SYMMETRIC_BLOCKS else -(-n // SYMMETRIC_BLOCKS)


def _mirrored(found: Array) -> Array:
    """The symmetric matrix of which ``_add_square`` has the lower part."""
    return jnp.tril(found) + jnp.tril(found, -1).T


def _square(rows: Array) -> Array:
    """``A A'`` in float64."""
    return _mirrored(_add_square(jnp.zeros((rows.shape[0],) * 2, jnp.float64), rows))
