"""The analytic (infinite-width) kernels of a model."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from fedtangent.models.kernels import KERNELS, check_get
from fedtangent.types import Array, Model


def analytic(model: Model, x1: Array, x2: Array | None = None, get: str | tuple[str, ...] = KERNELS) -> Any:
    """NNGP and tangent kernel of the infinitely wide network that ``model`` describes.

    Args:
        model: a model with an analytic kernel (``model.kernel`` is not None).
        x1: [n1, ...] inputs.
        x2: [n2, ...] inputs of the same shape per example; None means ``x1``.
        get: ``"nngp"`` (covariance of the outputs at initialisation), ``"ntk"``, or a tuple of them.

    Returns:
        The block [n1, n2] for a single name; for a tuple a named tuple with those blocks as ``.nngp`` and ``.ntk``.
        The outputs of the network are independent and share the kernel. A floating dtype: float64 where JAX's 64-bit
        mode is on and the kernel comes from neural-tangents.

    Raises:
        ValueError: the model has no analytic kernel; ``get`` names something else; ``x1`` and ``x2`` are not batches
            of examples of one shape.
    """
    if model.kernel is None:
        raise ValueError(f"model: {model.name!r} has no analytic kernel; use kernels.empirical_ntk with its parameters")
    names = check_get(get)
    shape1 = jnp.shape(x1)
    shape2 = shape1 if x2 is None else jnp.shape(x2)
    if min(len(shape1), len(shape2)) < 2:
        raise ValueError(f"x1 and x2 must be batches [n, ...] of examples, got shapes {shape1} and {shape2}")
    if shape1[1:] != shape2[1:]:
        raise ValueError(f"x1 and x2 must hold examples of one shape, got shapes {shape1} and {shape2}")
    return model.kernel(x1, x2, get if isinstance(get, str) else names)
