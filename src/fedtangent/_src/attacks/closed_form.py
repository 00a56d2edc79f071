"""Attacks in closed form: they read inputs off a dense first layer, undo a shuffling of weights, or a projection."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float, Int, Num

from fedtangent._src import pytrees
from fedtangent._src.attacks.observation import Observed
from fedtangent._src.models.dense import DenseStructure
from fedtangent._src.types import AnyArray, Array, Model, PyTree


def read_first_layer(
    model: Model, params: PyTree, messages: Observed, fill: float = 0.0
) -> Float[Array, "m input_size"]:
    """Reconstructs the inputs [m, input_size] of a dense network from Jacobians or gradients of single examples.

    The derivative dW by the first layer's weights is the input x times the derivative db by its biases: ``dW[i, h] =
    x_i db[h]``, up to the layer's scales, for pixel i, hidden unit h and every output. So ``x_i = sum_h dW[i, h] db[h]
    / sum_h db[h]^2`` over the hidden units (and outputs) for which both entries were sent. A pixel is exact if one such
    pair was sent. The gradient of a batch gives a mixture of its inputs. (Phong et al., 2018; Geiping et al., 2020,
    proposition 3.1.)

    Args:
        model: Dense network with biases in its first layer.
        params: Parameters at which the derivatives were taken.
        messages: Derivatives that the server received, and which entries were sent: ``values`` are Jacobians [m, C, P]
            of C outputs by P parameters, or gradients [m, P].
        fill: Value of a pixel for which no pair was sent.

    Raises:
        ValueError: The network is not dense or has no biases in its first layer, or ``messages`` has another shape.
    """
    structure = model.structure
    if not isinstance(structure, DenseStructure) or structure.layers[0].bias_scale is None:
        raise ValueError(f"model: got {model.name}, must be a network of dense layers, the first with biases")
    flat = ravel_pytree(params)[0]
    if messages.values.shape[-1] != flat.size or messages.values.ndim not in (2, 3):
        allowed = f"[m, C, {flat.size}] or [m, {flat.size}]"
        raise ValueError(f"messages.values: got shape {messages.values.shape}, must be {allowed}")
    scale = structure.layers[0].bias_scale / structure.layers[0].weight_scale
    return _read(scale, float(fill), params, messages)


@partial(jax.jit, static_argnums=(0, 1))
def _read(scale: float, fill: float, params: PyTree, messages: Observed) -> Float[Array, "m input_size"]:
    flat, unravel = ravel_pytree(params)
    values, sent = (part.reshape(len(part), -1, flat.size) for part in messages)

    def pieces(row: Array) -> tuple[Array, Array]:
        weight, bias = unravel(row.astype(flat.dtype))[0]
        return weight, bias

    def one(values: Array, sent: Array) -> Array:
        weight, bias = jax.vmap(pieces)(values / pytrees.magnitude(values))  # [C, input, hidden], [C, 1, hidden]
        both = jnp.multiply(*jax.vmap(pieces)(sent))
        squared = jnp.einsum("cih,ch->i", both, bias[:, 0] ** 2)
        read = scale * jnp.einsum("cih,ch->i", weight * both, bias[:, 0])
        return jnp.where(squared > 0, read / jnp.where(squared > 0, squared, 1), fill)

    return jax.lax.map(lambda pair: one(*pair), (values, sent))


def order_from_known(known: Num[AnyArray, "m C P"], shuffled: Num[AnyArray, "m C P"]) -> Int[np.ndarray, "P"]:
    """Recovers the order [P] in which ``shuffle_weights`` permuted weights, from Jacobians known in both orders.

    Columns are sorted by their numbers, which must be exactly equal, and matched. Weights whose columns are equal in
    all known examples (zero for a pixel that is dark in all of them) cannot be told apart and are matched in any order.

    Args:
        known: Jacobians [m, C, P] of m examples as a colluding client computes them, for C outputs and P weights.
        shuffled: Jacobians [m, C, P] of the same examples as the server received them.

    Raises:
        ValueError: The shapes differ, or the columns of ``shuffled`` are no permutation of the known ones.
    """
    if known.ndim != 3 or known.shape != shuffled.shape:
        raise ValueError(f"known and shuffled: got shapes {known.shape} and {shuffled.shape}, must be equal, [m, C, P]")
    columns = [np.asarray(rows).reshape(-1, rows.shape[-1]) for rows in (known, shuffled)]
    places = [np.lexsort(part) for part in columns]
    if not np.array_equal(columns[0][:, places[0]], columns[1][:, places[1]]):
        raise ValueError("shuffled: got other columns than known, must be the columns of known in another order")
    order = np.empty(known.shape[-1], int)
    order[places[1]] = places[0]
    return order


def back_project(
    z: Float[AnyArray, "n size"], matrix: Float[AnyArray, "input_size size"]
) -> Float[Array, "n input_size"]:
    """Computes the shortest ``x`` [n, input_size] with ``x matrix = z``: the least-squares inverse of a projection.

    With the matrix by which the clients projected their inputs, x is the input projected onto the ``size`` directions
    that were sent. With any other matrix x looks like noise.

    Args:
        z: Projected inputs [n, size].
        matrix: [input_size, size], from ``data.projection_matrix`` (Yue et al., 2022, section 4.2).

    Raises:
        ValueError: The shapes of ``z`` and ``matrix`` do not fit each other.
    """
    if z.ndim != 2 or matrix.ndim != 2 or z.shape[1] != matrix.shape[1]:
        got = f"shapes {z.shape} and {matrix.shape}"
        raise ValueError(f"z and matrix: got {got}, must be [n, size] and [input_size, size]")
    return jnp.linalg.lstsq(matrix.T, z.T)[0].T
