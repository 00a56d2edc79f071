"""The tangent kernel of a network from its dense, convolutional and recurrent layers, one output's signals at a time.

A layer that uses one matrix at positions p, ``z_i(p) = a_i(p) W + b``, adds
``sum_{p,q} (<a_i(p), a_j(q)> + 1) <d_i^k(p), d_j^m(q)>`` to the kernel of output k at example i and output m at example
j (the 1 comes from the bias), where ``a_i(p)`` is the layer's input patch and ``d_i^k(p)`` the derivative of output k
by ``z_i(p)``. The sum runs either in this order, over pairs of positions, or as the product of the layer's gradients
``G_i^k = sum_p (a_i(p), 1) d_i^k(p)'`` [fan_in + 1, channels], whichever takes fewer multiplications.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped

from fedtangent._src.models.layers import Call, LayeredStructure, Path, Plan, layer_patches
from fedtangent._src.types import AnyArray, Array, PyTree

MOST_OTHERS = 2**16  # parameters outside layers whose per-example gradients are built even if layers' outputs are fewer
HELD = 2**25  # entries of the intermediate arrays in memory at once
STRIPS = 8  # of a symmetric product; only the upper ones are computed
SMALLEST_STRIP = 128  # examples


class _Layer(NamedTuple):
    """A layer with all its calls in a forward pass, whose positions (such as pixels) are concatenated.

    Attributes:
        calls: Indices of the layer's calls among all layer calls of the network.
        positions: Number of positions in all its calls together.
        fan_in: Inputs at one position, plus 1 for a bias.
        channels: Outputs at one position.
    """

    calls: tuple[int, ...]
    positions: int
    fan_in: int
    channels: int


class _Rows(NamedTuple):
    """The forward pass of a batch of examples, with a function that computes derivatives of a network output.

    Attributes:
        inputs: Input of each layer call (application of a layer).
        pull: Maps k to the derivatives of output k by each call's output and by the parameters outside layers.
    """

    inputs: list[Array]
    pull: Callable[[Array], tuple[list[Array], list[Array]]]  # k -> (by call [n, ...], gradients of others [n, ...])


def is_layered(plan: Plan) -> bool:
    """Returns whether a network has dense or convolutional layers, and few parameters outside of them.

    Few means at most 2^16, or at most the number of all layers' outputs for one example. Parameters outside are
    depthwise kernels, scales and shifts. ``plan`` lists the layer calls and counts these parameters.
    """
    outputs = sum(math.prod(call.output) for call in plan.calls)  # of all layers for an example, kept by every pass
    return bool(plan.calls) and plan.num_others <= max(MOST_OTHERS, outputs)


def layered_kernel(
    structure: LayeredStructure,
    plan: Plan,
    num_outputs: int,
    params: PyTree,
    x1: Shaped[AnyArray, "n1 ..."],
    x2: Shaped[AnyArray, "n2 ..."] | None,
    trace: bool,
) -> Float[Array, "n1 n2"] | Float[Array, "n1 C n2 C"]:
    """Computes ``empirical_ntk`` of a layered network: the mean over outputs [n1, n2], or all of it [n1, C, n2, C].

    Args:
        structure: Network whose layer calls are traced.
        plan: Calls of the layers, and the parameters outside them.
        num_outputs: Number C of outputs.
        params: Parameters of the network.
        x1, x2: Examples [n1, ...] and [n2, ...]; ``x2=None`` means ``x1``.
        trace: Whether to return the mean over outputs.
    """
    layers = _layers(plan)
    rows1 = _rows(structure, plan, num_outputs, params, x1)
    rows2 = None if x2 is None else _rows(structure, plan, num_outputs, params, x2)
    sizes = (x1.shape[0], x1.shape[0] if x2 is None else x2.shape[0], num_outputs if trace else num_outputs**2)
    by_gradients = [_prefers_gradients(layer, *sizes, num_outputs) for layer in layers]
    contract = _trace if trace else _full
    kernel = contract(plan, layers, by_gradients, rows1, rows2, num_outputs)
    return kernel.astype(jnp.result_type(*jax.tree.leaves(params)))


def _layers(plan: Plan) -> list[_Layer]:
    """Returns a record of each layer of the network, with all its calls in ``plan``."""
    by_path: dict[Path, list[int]] = {}
    for c, call in enumerate(plan.calls):
        by_path.setdefault(call.path, []).append(c)
    layers = []
    for calls in by_path.values():
        call = plan.calls[calls[0]]
        positions = sum(plan.calls[c].positions for c in calls)
        layers.append(_Layer(tuple(calls), positions, call.fan_in + call.has_bias, call.output[-1]))
    return layers


def _prefers_gradients(layer: _Layer, n1: int, n2: int, blocks: int, num_outputs: int) -> bool:
    """Returns whether the layer's kernel takes fewer multiplications from gradients than from pairs of positions.

    Args:
        layer: The layer.
        n1, n2: Numbers of examples.
        blocks: Blocks [n1, n2] to compute: C for the mean over the C outputs, C^2 for the whole kernel.
        num_outputs: Number C of outputs.
    """
    size = layer.fan_in * layer.channels
    by_gradients = (n1 + n2) * num_outputs * layer.positions * size + n1 * n2 * blocks * size
    by_positions = n1 * n2 * layer.positions**2 * (layer.fan_in + blocks * (layer.channels + 1))
    return by_gradients < by_positions


def _rows(
    structure: LayeredStructure, plan: Plan, num_outputs: int, params: PyTree, x: Shaped[AnyArray, "n ..."]
) -> _Rows:
    """Runs the network on ``x`` [n, ...]; returns the layers' inputs and a function for an output's derivatives."""
    leaves, tree = jax.tree.flatten(params)
    dtype = jnp.result_type(*leaves)
    n = x.shape[0]

    def one(
        shifts: list[Array], others: list[Array], example: Shaped[Array, "..."]
    ) -> tuple[Float[Array, "C"], list[Array]]:
        weights = list(leaves)
        for i, leaf in zip(plan.others, others, strict=True):
            weights[i] = leaf
        outputs, inputs = structure.run(plan, jax.tree.unflatten(tree, weights), shifts, example[None])
        return outputs[0], inputs

    # shifts and other leaves are copied for each example, so that one backward pass gives each example's derivative
    shifts = [jnp.zeros((n, *call.output), dtype) for call in plan.calls]
    others = [jnp.broadcast_to(leaves[i], (n, *jnp.shape(leaves[i]))) for i in plan.others]

    def every(shifts: list[Array], others: list[Array]) -> tuple[Array, list[Array]]:
        return jax.vmap(one)(shifts, others, jnp.asarray(x))

    outputs, pull, inputs = jax.vjp(every, shifts, others, has_aux=True)

    def of_output(k: Int[Array, ""]) -> tuple[list[Array], list[Array]]:
        basis = (jnp.arange(num_outputs) == k).astype(outputs.dtype)
        return pull(jnp.broadcast_to(basis, outputs.shape))

    return _Rows([h.astype(dtype) for h in inputs], of_output)


def _signals(layer: _Layer, by_call: list[Array]) -> Float[Array, "n P channels"]:
    """Joins a layer's signals, the derivatives of a network output by the layer's outputs, to [n, P, channels].

    ``by_call`` has the derivatives for each layer call; the layer's P positions are the positions in all its calls.
    """
    parts = [by_call[c].reshape((by_call[c].shape[0], -1, layer.channels)) for c in layer.calls]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _features(calls: tuple[Call, ...], layer: _Layer, inputs: list[Array]) -> Float[Array, "n P fan_in"]:
    """Returns a layer's inputs at all P positions, with a 1 for a bias: [n, P, fan_in].

    ``calls`` are all calls of layers in the network, and ``inputs`` the inputs of each call.
    """
    parts = [layer_patches(calls[c], inputs[c]) for c in layer.calls]
    features = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
    if not calls[layer.calls[0]].has_bias:
        return features
    return jnp.concatenate([features, jnp.ones((*features.shape[:-1], 1), features.dtype)], axis=-1)


def _trace(
    plan: Plan, layers: list[_Layer], by_gradients: list[bool], rows1: _Rows, rows2: _Rows | None, num_outputs: int
) -> Float[Array, "n1 n2"]:
    """Computes the mean over outputs of the tangent kernel, [n1, n2].

    ``by_gradients`` says for each layer whether to multiply its gradients or to sum over pairs of positions. ``rows1``
    and ``rows2`` are the forward passes of both sets of examples; without ``rows2`` both are ``rows1``.
    """

    def one_output(total: Float[Array, "n1 n2"], k: Int[Array, ""]) -> tuple[Array, list[tuple[Array, Array | None]]]:
        signals1, others1 = rows1.pull(k)
        signals2, others2 = (None, None) if rows2 is None else rows2.pull(k)
        signals = []
        for layer, gradients in zip(layers, by_gradients, strict=True):
            d1 = _signals(layer, signals1)[:, None]
            d2 = None if signals2 is None else _signals(layer, signals2)[:, None]
            if gradients:
                total = total + _gradient_product(plan.calls, layer, rows1, d1, rows2, d2)
            else:
                signals.append((d1[:, 0], None if d2 is None else d2[:, 0]))
        if plan.others:
            total = total + gram(_flat(others1), None if others2 is None else _flat(others2))
        return total, signals

    n1, n2, dtype = _sizes(rows1, rows2)
    total, signals = jax.lax.scan(one_output, jnp.zeros((n1, n2), dtype), jnp.arange(num_outputs))
    rest = [layer for layer, gradients in zip(layers, by_gradients, strict=True) if not gradients]
    for layer, (d1, d2) in zip(rest, signals, strict=True):
        wide2 = None if d2 is None else _channels(d2)
        total = total + _position_product(plan.calls, layer, rows1, _channels(d1), rows2, wide2)[:, 0, :, 0]
    return total / num_outputs


def _channels(d: Float[Array, "C n P channels"]) -> Float[Array, "n 1 P C*channels"]:
    """Reshapes signals [C, n, P, channels] to [n, 1, P, C channels], so that a sum over channels sums over outputs."""
    moved = d.transpose(1, 2, 0, 3)
    return moved.reshape((moved.shape[0], 1, moved.shape[1], -1))


def _full(
    plan: Plan, layers: list[_Layer], by_gradients: list[bool], rows1: _Rows, rows2: _Rows | None, num_outputs: int
) -> Float[Array, "n1 C n2 C"]:
    """Computes the tangent kernel of all outputs, [n1, C, n2, C], as the sum over ``layers`` and other parameters.

    ``by_gradients`` says for each layer whether to multiply its gradients or to sum over pairs of positions. ``rows1``
    and ``rows2`` are the forward passes of both sets of examples; without ``rows2`` both are ``rows1``.
    """

    def every_output(rows: _Rows | None) -> tuple[list[Array], Array] | None:
        if rows is None:
            return None
        by_call, others = jax.lax.map(rows.pull, jnp.arange(num_outputs))
        signals = [_signals(layer, [d.reshape((-1, *d.shape[2:])) for d in by_call]) for layer in layers]
        split = [d.reshape((num_outputs, -1, *d.shape[1:])).swapaxes(0, 1) for d in signals]
        flat = [other.swapaxes(0, 1).reshape((other.shape[1] * num_outputs, -1)) for other in others]
        return split, jnp.concatenate(flat, axis=1) if flat else jnp.zeros(())

    n1, n2, dtype = _sizes(rows1, rows2)
    every1, every2 = every_output(rows1), every_output(rows2)
    assert every1 is not None
    total = jnp.zeros((n1, num_outputs, n2, num_outputs), dtype)
    if plan.others:
        total = total + gram(every1[1], None if every2 is None else every2[1]).reshape(total.shape)
    for i, (layer, gradients) in enumerate(zip(layers, by_gradients, strict=True)):
        product = _gradient_product if gradients else _position_product
        d2 = None if every2 is None else every2[0][i]
        total = total + product(plan.calls, layer, rows1, every1[0][i], rows2, d2).reshape(total.shape)
    return total


def _sizes(rows1: _Rows, rows2: _Rows | None) -> tuple[int, int, DTypeLike]:
    return rows1.inputs[0].shape[0], (rows2 or rows1).inputs[0].shape[0], rows1.inputs[0].dtype


def _flat(others: list[Array]) -> Float[Array, "n parameters"]:
    """Flattens the gradients of the parameters outside layers to [n, parameters]."""
    return jnp.concatenate([other.reshape((other.shape[0], -1)) for other in others], axis=1)


def _gradient_product(
    calls: tuple[Call, ...],
    layer: _Layer,
    rows1: _Rows,
    d1: Float[Array, "n1 K P channels"],
    rows2: _Rows | None,
    d2: Float[Array, "n2 K P channels"] | None,
) -> Float[Array, "n1*K _"]:
    """Computes a layer's part of the kernel [n1 K, n2 K] as a product of gradients, a few channels at a time.

    ``d1`` and ``d2`` are the derivatives of K network outputs by the layer's outputs, and ``rows1`` and ``rows2`` the
    forward passes of the two sets of examples; without the second of each, both are the first. ``calls`` are all calls
    of layers in the network.
    """
    rows = max(d1.shape[0], 0 if d2 is None else d2.shape[0]) * d1.shape[1]
    most = max(1, HELD // (rows * layer.fan_in))
    width = next(w for w in range(min(most, layer.channels), 0, -1) if layer.channels % w == 0)

    def gradients(rows: _Rows, d: Array) -> Array:
        def one(example: tuple[list[Array], Array]) -> Array:
            inputs, signal = example  # [...], [K, P, width]
            features = _features(calls, layer, [h[None] for h in inputs])[0]
            wide = signal.transpose(1, 0, 2).reshape((layer.positions, -1))
            return (features.T @ wide).reshape((layer.fan_in, signal.shape[0], -1)).transpose(1, 0, 2)

        built = _map_examples(one, (rows.inputs, d), layer.positions * layer.fan_in)
        return built.reshape((d.shape[0] * d.shape[1], -1))

    def some(total: Array, start: Array) -> tuple[Array, None]:
        def part(d: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(d, start, width, axis=3)

        g2 = None if rows2 is None or d2 is None else gradients(rows2, part(d2))
        return total + gram(gradients(rows1, part(d1)), g2), None

    n2 = d1.shape[0] if d2 is None else d2.shape[0]
    zero = jnp.zeros((d1.shape[0] * d1.shape[1], n2 * d1.shape[1]), d1.dtype)
    return jax.lax.scan(some, zero, jnp.arange(0, layer.channels, width))[0]


def _position_product(
    calls: tuple[Call, ...],
    layer: _Layer,
    rows1: _Rows,
    d1: Float[Array, "n1 K P channels"],
    rows2: _Rows | None,
    d2: Float[Array, "n2 K P channels"] | None,
) -> Float[Array, "n1 K _ K"]:
    """Computes a layer's part of the kernel [n1, K, n2, K] as a sum over pairs of positions.

    ``d1`` and ``d2`` are the derivatives of K network outputs by the layer's outputs, and ``rows1`` and ``rows2`` the
    forward passes of the two sets of examples; without the second of each, both are the first. ``calls`` are all calls
    of layers in the network.
    """
    if layer.positions == 1:
        a1 = _features(calls, layer, rows1.inputs)[:, 0]
        a2 = None if rows2 is None else _features(calls, layer, rows2.inputs)[:, 0]
        n1, k = d1.shape[:2]
        signals = gram(d1.reshape((n1 * k, -1)), None if d2 is None else d2.reshape((-1, d2.shape[-1])))
        return gram(a1, a2)[:, None, :, None] * signals.reshape((n1, k, -1, k))
    other_inputs, other_d = (rows1.inputs, d1) if rows2 is None or d2 is None else (rows2.inputs, d2)
    a2 = _features(calls, layer, other_inputs)

    def some(example: tuple[list[Array], Array]) -> Array:
        inputs, signal = example
        a1 = _features(calls, layer, [h[None] for h in inputs])[0]
        pairs = jnp.einsum("pf,jqf->pjq", a1, a2)
        return jnp.einsum("pjq,kpjmq->kjm", pairs, jnp.einsum("kpc,jmqc->kpjmq", signal, other_d))

    numbers = layer.positions**2 * other_d.shape[0] * (1 + d1.shape[1] ** 2)
    return _map_examples(some, (rows1.inputs, d1), numbers)


def _map_examples(function: Callable[[PyTree], Array], examples: PyTree, numbers: int) -> Array:
    """Maps ``function`` over examples: one by one on a CPU, else in batches.

    ``numbers`` is the size of the arrays that ``function`` builds for one example, and limits the size of a batch.
    """
    if jax.default_backend() == "cpu":
        return jax.lax.map(function, examples)
    return jax.lax.map(function, examples, batch_size=max(1, HELD // numbers))


def gram(a: Float[Array, "m p"], b: Float[Array, "n p"] | None = None) -> Float[Array, "m _"]:
    """Computes ``a b'``; without ``b`` it is ``a a'``, mirrored from one half.

    Args:
        a: Matrix [m, p].
        b: Matrix [n, p], or None.
    """
    if b is not None:
        return a @ b.T
    m = a.shape[0]
    strips = min(STRIPS, m // SMALLEST_STRIP)
    if strips < 2:
        return a @ a.T
    ends = [math.ceil(m * i / strips) for i in range(strips + 1)]
    upper = jnp.zeros((m, m), a.dtype)
    for start, stop in itertools.pairwise(ends):
        upper = upper.at[start:stop, start:].set(a[start:stop] @ a[start:].T)
    index = jnp.arange(m)
    return jnp.where(index[:, None] <= index[None, :], upper, upper.T)
