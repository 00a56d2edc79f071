"""Closed forms: the input read off a dense first layer, the order of shuffled weights, projected inputs taken back."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedtangent.attacks.observation import Observed
from fedtangent.models.dense import DenseStructure
from fedtangent.types import Array, Model, PyTree


def read_first_layer(model: Model, params: PyTree, seen: Observed, fill: float = 0.0) -> Array:
    """Inputs [m, input_size] of a dense network from Jacobians [m, C, P] or gradients [m, P] of single examples.

    The derivative by the first layer's weights is the input times the derivative by its biases, ``dW[i, h] = x_i
    d[h]`` and ``db[h] = d[h]`` up to the layer's scales, for every output: ``x_i = sum_h dW[i, h] db[h] / sum_h
    db[h]^2`` over the hidden units (and outputs) where both entries were kept. Exact wherever one pair was kept, at
    any sparsity, and with any activation; a pixel of which none was kept becomes ``fill``. The gradient of a batch
    gives a mixture of its inputs. (Phong et al., 2018; Geiping et al., 2020, proposition 3.1.)

    Raises ``ValueError`` for a network that is not dense or has no biases in its first layer, and other shapes.
    """
    structure: Any = model.structure
    if not isinstance(structure, DenseStructure) or structure.layers[0].bias_scale is None:
        raise ValueError(f"model: got {model.name}, must have a dense first layer with biases, to be read off")
    flat = ravel_pytree(params)[0]
    if seen.values.shape[-1] != flat.size or seen.values.ndim not in (2, 3):
        raise ValueError(f"seen: got {seen.values.shape}, must be [m, C, {flat.size}] or [m, {flat.size}]")
    scale = structure.layers[0].bias_scale / structure.layers[0].weight_scale
    return _read(scale, float(fill), params, seen)


@partial(jax.jit, static_argnums=(0, 1))
def _read(scale: float, fill: float, params: PyTree, seen: Observed) -> Array:
    flat, unravel = ravel_pytree(params)
    values, kept = (part.reshape(len(part), -1, flat.size) for part in seen)

    def pieces(row: Array) -> tuple[Array, Array]:
        weight, bias = unravel(row.astype(flat.dtype))[0]
        return weight, bias

    def one(values: Array, kept: Array) -> Array:
        weight, bias = jax.vmap(pieces)(values)  # [C, input, hidden], [C, 1, hidden]
        both = jnp.multiply(*jax.vmap(pieces)(kept))
        squared = jnp.einsum("cih,ch->i", both, bias[:, 0] ** 2)
        read = scale * jnp.einsum("cih,ch->i", weight * both, bias[:, 0])
        return jnp.where(squared > 0, read / jnp.where(squared > 0, squared, 1), fill)

    return jax.lax.map(lambda pair: one(*pair), (values, kept))


def order_from_known(known: np.ndarray, shuffled: np.ndarray) -> np.ndarray:
    """The order [P] of ``shuffle_weights`` from Jacobians [m, C, P] known in both orders.

    ``shuffled`` are rows as the server got them, ``known`` the same examples' as a colluding client computes them:
    columns are sorted by their numbers and matched, so the numbers must be the very same. Weights whose columns are
    equal in all of the known examples (zero for a pixel that is dark in all of them) cannot be told apart and are
    matched in any order.

    Raises ``ValueError`` for other shapes and for columns that are no permutation of the known ones.
    """
    if known.ndim != 3 or known.shape != shuffled.shape:
        raise ValueError(f"known: got {known.shape} and shuffled {shuffled.shape}, must be equal, [m, C, P]")
    columns = [np.asarray(rows).reshape(-1, rows.shape[-1]) for rows in (known, shuffled)]
    places = [np.lexsort(part) for part in columns]
    if not np.array_equal(columns[0][:, places[0]], columns[1][:, places[1]]):
        raise ValueError("shuffled: its columns are no permutation of the known ones, the order cannot be found")
    order = np.empty(known.shape[-1], int)
    order[places[1]] = places[0]
    return order


def back_project(z: Array, matrix: Array) -> Array:
    """The shortest ``x`` [n, input_size] with ``x matrix = z`` [n, size]: the least-squares inverse of a projection.

    ``matrix`` is [input_size, size], as ``data.projection.projection_matrix`` makes it (Yue et al., 2022, section 4.2).
    With the clients' own it is ``x`` projected onto the ``size`` directions that were sent; with another one it is an
    image of noise, and so is the best that a server can do who has not the seed. Raises ``ValueError`` for shapes that
    do not fit.
    """
    if z.ndim != 2 or matrix.ndim != 2 or z.shape[1] != matrix.shape[1]:
        raise ValueError(f"z: got {z.shape} and matrix {matrix.shape}, must be [n, size] and [input_size, size]")
    return jnp.linalg.lstsq(matrix.T, z.T)[0].T
