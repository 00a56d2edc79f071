"""The analytic kernel of a model."""

from __future__ import annotations

from typing import Any

from fedtangent.models.kernels import KERNELS
from fedtangent.types import Array, Model


def analytic(model: Model, x1: Array, x2: Array | None = None, get: str | tuple[str, ...] = KERNELS) -> Any:
    """``Kernels(nngp, ntk)`` of ``model`` between ``x1`` [n1, ...] and ``x2`` [n2, ...] (None means ``x1``).

    The prior covariance and the tangent kernel of one output in the infinite-width limit (exact for a linear model),
    each [n1, n2] in the inputs' dtype. ``get`` may be one name, then that block itself is returned.
    Raises ``ValueError`` for unknown names in ``get`` and for a model without an analytic kernel.
    """
    if model.kernel is None:
        raise ValueError(f"model: {model.name!r} has no analytic kernel; kernels.empirical_ntk takes any model")
    return model.kernel(x1, x2, get)
