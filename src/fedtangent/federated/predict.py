"""How the models of an ensemble become one prediction."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedtangent.types import Array, Model, Prediction, PyTree


def mean_of_models(model: Model, params: PyTree, x: Array) -> Prediction:
    """Uniform average of the K models' outputs (FE-2024, eq. 2); ``params`` has leading axis K, ``x`` is [n, ...]."""
    members = jax.lax.map(lambda p: model.apply(p, x), params)
    return Prediction(jnp.mean(members, axis=0), members)
