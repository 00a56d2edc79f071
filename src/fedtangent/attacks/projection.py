"""Projected inputs: clients compute with ``z = x P``, whose matrix comes from a seed that the server does not have."""

from __future__ import annotations

import jax.numpy as jnp

from fedtangent.types import Array


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
