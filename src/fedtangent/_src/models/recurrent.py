"""The next-character network of the federated-learning literature: embedding, LSTM layers, a linear output.

For speed, the inputs of a layer are multiplied by its input kernel for all characters at once. In the backward pass the
gradients of the input kernel and the recurrent kernel are also computed at once. In the loop over characters only the
product of the state with the recurrent kernel remains, for all four gates together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Float, Shaped

from fedtangent._src.checks import choice, whole
from fedtangent._src.models.entry import CROSS_ENTROPY, MOST_LAYERS, MOST_UNITS, SQUARED_ERROR, network
from fedtangent._src.models.kernels import check_dtype
from fedtangent._src.models.layers import Call, LayeredStructure, Plan, WithShape, biased
from fedtangent._src.pytrees import widest
from fedtangent._src.types import AnyArray, Array, Key, Model, PyTree

POSITIONS = ("last", "all")
DIFFERENTIATION = ("reverse", "any")
Recurrence = Callable[[Array, Array], Array]  # (projected inputs [T, B, 4 H], recurrent kernel) -> hidden [T, B, H]


def _gates(z: Array) -> tuple[Array, Array]:
    """Computes the input, forget and output gates [B, 3 H] and the candidate [B, H] of an LSTM from ``z`` [B, 4 H]."""
    size = z.shape[-1] // 4
    return jax.nn.sigmoid(z[:, : 3 * size]), jnp.tanh(z[:, 3 * size :])


def _forward(z: Array, kernel: Array) -> tuple[Array, tuple[Array, ...]]:
    """Runs one LSTM layer over T characters of B examples.

    Returns the hidden states [T, B, H], and a tuple of all states: hidden, cell, gates and candidates.

    Args:
        z: Products of the inputs with the input kernel, plus bias, [T, B, 4 H] for H units.
        kernel: Recurrent kernel [H, 4 H].
    """
    start = jnp.zeros((z.shape[1], kernel.shape[0]), z.dtype)

    def step(carry: tuple[Array, Array], z_t: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
        h, c = carry
        gates, candidate = _gates(z_t + h @ kernel)
        i, f, output = jnp.split(gates, 3, axis=-1)
        c = f * c + i * candidate
        h = output * jnp.tanh(c)
        return (h, c), (h, c, gates, candidate)

    _, states = lax.scan(step, (start, start), z)
    return states[0], states


def _layer(z: Array, kernel: Array) -> Array:
    """Computes the hidden states [T, B, H] of an LSTM layer with H units.

    Args:
        z: Products of the inputs with the input kernel, plus bias, [T, B, 4 H].
        kernel: Recurrent kernel [H, 4 H].
    """
    return _forward(z, kernel)[0]


def _save(z: Array, kernel: Array) -> tuple[Array, PyTree]:
    hidden, states = _forward(z, kernel)
    return hidden, (states, kernel)


def _previous(states: Array) -> Array:
    return jnp.concatenate([jnp.zeros_like(states[:1]), states[:-1]])


def _backward(saved: PyTree, by_hidden: Array) -> tuple[Array, Array]:
    """Computes the gradients of the loss with respect to the arguments ``z`` and ``kernel`` of ``_layer``.

    ``saved`` has all states of the forward pass and the recurrent kernel. ``by_hidden`` is the gradient of the loss
    with respect to the hidden states, [T, B, H].
    """
    (hidden, cell, gates, candidate), kernel = saved
    transposed = kernel.T

    def step(carry: tuple[Array, Array], row: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        by_h, by_c = carry
        outer, c, c_before, gates_t, g = row
        i, f, output = jnp.split(gates_t, 3, axis=-1)
        by_h = by_h + outer
        squashed = jnp.tanh(c)
        by_c = by_c + by_h * output * (1 - squashed**2)
        by_gates = jnp.concatenate([by_c * g, by_c * c_before, by_h * squashed], axis=-1) * gates_t * (1 - gates_t)
        by_z = jnp.concatenate([by_gates, by_c * i * (1 - g**2)], axis=-1)
        return (by_z @ transposed, by_c * f), by_z

    start = jnp.zeros_like(hidden[0])
    rows = (by_hidden, cell, _previous(cell), gates, candidate)
    _, by_z = lax.scan(step, (start, start), rows, reverse=True)
    flat = _previous(hidden).reshape((-1, hidden.shape[-1]))
    return by_z, flat.T @ by_z.reshape((-1, by_z.shape[-1]))


_layer_reverse = jax.custom_vjp(_layer)
_layer_reverse.defvjp(_save, _backward)


def _initialise(sizes: tuple[int, int, int, int, int], dtype: DTypeLike, key: Key) -> PyTree:
    vocabulary, embedding, units, layers, output_size = sizes
    glorot, orthogonal = jax.nn.initializers.glorot_uniform(), jax.nn.initializers.orthogonal()
    keys = iter(jax.random.split(key, 2 + 2 * layers))
    params: dict[str, PyTree] = {
        "embedding": jax.random.uniform(next(keys), (vocabulary, embedding), dtype, -0.05, 0.05)
    }
    bias = jnp.zeros((4 * units,), dtype).at[units : 2 * units].set(1)
    for layer in range(layers):
        fan_in = embedding if layer == 0 else units
        params[f"layer_{layer}"] = {
            "input": jnp.concatenate([glorot(k, (fan_in, units), dtype) for k in jax.random.split(next(keys), 4)], 1),
            # LAPACK knows no half precision
            "recurrent": jnp.concatenate(
                [orthogonal(k, (units, units), widest(dtype)).astype(dtype) for k in jax.random.split(next(keys), 4)], 1
            ),
            "bias": bias,
        }
    params["output"] = {
        "kernel": glorot(next(keys), (units, output_size), dtype),
        "bias": jnp.zeros(output_size, dtype),
    }
    return params


def _hidden(layers: int, recur: Recurrence, params: PyTree, x: Shaped[AnyArray, "n ..."]) -> tuple[list[Array], Array]:
    """Runs the embedding and the LSTM layers of the network on characters.

    Returns the inputs of each layer, [T, B, ..], and the hidden states of the last layer, [T, B, H].

    Args:
        layers: Number of LSTM layers.
        recur: Runs one layer, with the arguments and the result of ``_layer``.
        params: Parameters of the network.
        x: Characters [B, T] as whole numbers.
    """
    table = params["embedding"]
    # a product and not a gather: the gradient of a gather is a scatter, which is slow on a CPU
    characters = jax.nn.one_hot(x.T.astype(jnp.int32), table.shape[0], dtype=table.dtype)  # [T, B, V]
    h, inputs = characters @ table, []
    for layer in range(layers):
        part = params[f"layer_{layer}"]
        inputs.append(h)
        flat = biased(h.reshape((-1, h.shape[-1])) @ part["input"], part["bias"][None])
        h = recur(flat.reshape((*h.shape[:2], -1)), part["recurrent"])
    return inputs, h


def _apply(layers: int, positions: str, recur: Recurrence, params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Array:
    h = _hidden(layers, recur, params, x)[1]
    chosen = h[-1] if positions == "last" else jnp.swapaxes(h, 0, 1)
    bias = params["output"]["bias"]
    return biased(chosen @ params["output"]["kernel"], bias.reshape((1,) * (chosen.ndim - 1) + bias.shape))


def _plan(layers: int, params: PyTree, x: WithShape) -> Plan:
    """Lists the layers of the network for its tangent kernel, as ``layers.Plan``.

    An LSTM layer counts as one layer, whose matrix acts on its input and its previous state together. ``layers`` is the
    number of LSTM layers.
    """
    length, calls = x.shape[1], []
    for layer in range(layers):
        weights = params[f"layer_{layer}"]
        fan_in, gates = weights["input"].shape[0] + weights["recurrent"].shape[0], weights["bias"].shape[0]
        shapes = (1, length, fan_in), (1, length, gates)
        calls.append(Call((f"layer_{layer}",), (), (), None, (), fan_in, True, *shapes))
    units, outputs = params["output"]["kernel"].shape
    calls.append(Call(("output",), (), (), None, (), units, True, (1, units), (1, outputs)))
    names = [path[0].key for path, _ in jax.tree.leaves_with_path(params)]
    return Plan(tuple(calls), (names.index("embedding"),), math.prod(params["embedding"].shape))


def _run(
    layers: int, recur: Recurrence, plan: Plan, params: PyTree, shifts: list[Array], x: Array
) -> tuple[Array, list[Array]]:
    """Computes the network's outputs [1, C] after the last character of one example ``x``, and its layers' inputs.

    ``recur`` runs one of the ``layers`` LSTM layers, as ``_layer`` does. ``shifts`` has an array for each layer, which
    is added to the layer's output. ``plan`` is not used.
    """
    before: list[Array] = []  # the hidden states before each character

    def moved(z: Array, kernel: Array) -> Array:
        layer = len(before)
        hidden = recur(z + jnp.swapaxes(shifts[layer], 0, 1), kernel)
        before.append(_previous(hidden))
        return hidden

    inputs, h = _hidden(layers, moved, params, x)
    inputs = [jnp.swapaxes(jnp.concatenate(pair, axis=-1), 0, 1) for pair in zip(inputs, before, strict=True)]
    output = params["output"]
    return h[-1] @ output["kernel"] + output["bias"][None] + shifts[-1], [*inputs, h[-1]]


def _of_characters(input_shape: tuple[int, ...], output_size: int) -> dict[str, int]:
    return {"vocabulary": output_size, "output_size": output_size}  # an example may have any number of characters


@network(
    {"embedding": MOST_UNITS, "units": MOST_UNITS, "layers": MOST_LAYERS, "positions": None, "differentiation": None},
    ("mcmahan2017",),
    _of_characters,
    kinds=("tokens",),
    loss=CROSS_ENTROPY,
    learning_rates={SQUARED_ERROR: 0.1, CROSS_ENTROPY: 1.0},
)
def lstm(
    vocabulary: int = 80,
    output_size: int | None = None,
    embedding: int = 8,
    units: int = 256,
    layers: int = 2,
    positions: str = "last",
    differentiation: str = "reverse",
    dtype: DTypeLike = jnp.float32,
) -> Model:
    """Builds FedAvg's next-character network: embedding, LSTM layers, a linear output (McMahan et al., 2017).

    The defaults are the sizes of the paper and of LEAF (2018). ``apply`` takes ``x`` [n, T] of whole numbers in [0,
    vocabulary), which a run checks, and returns logits of the next character. There is no analytic kernel.

    Cells follow Gers et al. (2000): gates ``i, f, o`` and candidate ``g``, in this order along the kernels' last axis;
    ``c = f c + i g``, ``h = o tanh(c)``. Each gate's kernels are drawn on their own: Glorot uniform for inputs,
    orthogonal for hidden states. (Keras draws one kernel for all four gates, with numbers up to twice as small.) The
    forget bias starts at 1, other biases at 0, embeddings uniform in [-0.05, 0.05].

    Args:
        vocabulary: Number of characters.
        output_size: Number of outputs C, by default ``vocabulary``.
        embedding: Dimensions of an embedded character.
        units: Units H of a layer.
        layers: Number of LSTM layers.
        positions: last for outputs [n, C] after the last character (LEAF), all for outputs [n, T, C] after each.
        differentiation: reverse (fast), or any (forward derivatives too, which NTK-FL needs). With "reverse" the
            backward pass is explicit, about twice as fast on a CPU, for reverse mode of any order. "any" leaves
            differentiation to JAX and allows forward mode too (``jax.linearize``).
        dtype: Type of the parameters.

    Raises:
        ValueError: A size is below 1, a name is unknown, or ``dtype`` is not floating. ``init`` raises it for
            ``float64`` without 64-bit mode.
    """
    sizes = (vocabulary, embedding, units, layers, vocabulary if output_size is None else output_size)
    for name, size in zip(("vocabulary", "embedding", "units", "layers", "output_size"), sizes, strict=True):
        whole(name, size)
    for name, value, allowed in (
        ("positions", positions, POSITIONS),
        ("differentiation", differentiation, DIFFERENTIATION),
    ):
        choice(name, value, allowed)
    check_dtype(dtype, needs_x64=False)
    recur = _layer_reverse if differentiation == "reverse" else _layer

    def init(key: Key) -> PyTree:
        check_dtype(dtype, needs_x64=True)
        return _initialise(sizes, dtype, key)

    def apply(params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n *T C"]:
        if x.ndim != 2:
            raise ValueError(f"x: got shape {x.shape}, must be characters [n, T]")
        return _apply(layers, positions, recur, params, x)

    name = f"lstm({vocabulary}, {embedding}, {layers}x{units})"
    # with several outputs for each example the kernel would be between positions too
    structure = LayeredStructure(partial(_plan, layers), partial(_run, layers, recur)) if positions == "last" else None
    return Model(
        name=name,
        init=init,
        apply=apply,
        kernel=None,
        output_size=sizes[-1],
        structure=structure,
        loss=CROSS_ENTROPY,
        vocabulary=vocabulary,
    )
