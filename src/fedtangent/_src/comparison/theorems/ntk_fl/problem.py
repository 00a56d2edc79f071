"""Random inputs of norm 1 with random signs as targets, for the two-layer ReLU network of eq. (12)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src.models.two_layer import two_layer_relu
from fedtangent._src.theory.ntk_fl.lemmas import empirical_kernel
from fedtangent._src.types import Model, PyTree

DIMENSION = 10


def sphere(seed: int, width: int, size: int) -> tuple[np.ndarray, np.ndarray, Model, PyTree]:
    """Draws a problem on the sphere.

    Args:
        seed: Seed of data and network.
        width: Number of neurons.
        size: Number of examples N.

    Returns:
        Inputs [N, d], targets [N], the network, and the initial weights of a run from ``jax.random.key(seed)``.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size, DIMENSION))
    model = two_layer_relu(DIMENSION, width, seed=seed, dtype=jnp.float64)
    params = model.init(jax.random.split(jax.random.key(seed), 1)[0])
    return x / np.linalg.norm(x, axis=1, keepdims=True), rng.choice(np.array([-1.0, 1.0]), size), model, params


def half_stable_step(x: np.ndarray, params: PyTree) -> float:
    """Computes N / lambda_max of the empirical kernel, which is half of the largest stable step."""
    return len(x) / float(np.linalg.eigvalsh(empirical_kernel(x, params["v"]))[-1])
