"""Corollary 4.1 of FE-2021: the probability that an ensemble's mean is far from the limit's mean."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from fedtangent._src.checks import real_array, whole
from fedtangent._src.types import ArrayLike, Gaussian


def corollary_4_1(limit: Gaussian, num_models: int, epsilon: ArrayLike) -> Float64[np.ndarray, "m"]:
    """Computes the bound of ``P(|1/K sum_k f_k(x) - m(x)| >= epsilon)``, Corollary 4.1 of FE-2021, eq. (5).

    The bound is ``k(x, x) / (K epsilon^2)``, by Chebyshev's inequality from Theorem 4.2; the paper prints
    ``O(1 / (epsilon^2 K))``. The K models are independent with mean m (the limit's most probable function) and variance
    k(x, x). It holds after sufficiently many rounds, for kernels that outputs share.

    Args:
        limit: Mean m [m, C] and covariance k [m, m], for example from ``gp_limit``.
        num_models: Number K of models.
        epsilon: A number above 0, or one for each point [m].

    Returns:
        The bound at each point, [m], at most 1.
    """
    whole("num_models", num_models)
    far, variance = real_array("epsilon", epsilon), np.diag(np.asarray(limit.cov))
    if far.shape not in ((), variance.shape) or not np.all(far > 0):
        got = f"shape {far.shape}, least {far.min():g}"
        raise ValueError(f"epsilon: got {got}, must be above 0, of shape () or {variance.shape}")
    return np.asarray(np.minimum(np.maximum(variance, 0.0) / (num_models * far**2), 1.0))
