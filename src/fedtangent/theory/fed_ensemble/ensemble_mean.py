"""Corollary 4.1 of FE-2021: how often an ensemble's mean is far from the limit's."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedtangent.checks import real_array, whole
from fedtangent.types import Gaussian


def corollary_4_1(limit: Gaussian, num_models: int, epsilon: Any) -> np.ndarray:
    """Corollary 4.1 of FE-2021, eq. (5): ``P(|1/K sum_k f_k(x) - m(x)| >= epsilon) <= k(x, x) / (K epsilon^2)``.

    By Chebyshev's inequality from Theorem 4.2, which is what the page's ``O(1 / (epsilon^2 K))`` stands for: the K
    models are independent with mean m (the limit's most probable function) and variance k(x, x). After sufficiently
    many rounds; for kernels that outputs share.

    Args:
        limit: m and k, as from ``gp_limit``, [m, C] and [m, m].
        num_models: K.
        epsilon: a number above 0, or one for each point [m].

    Returns:
        The bound at each point, [m], at most 1.
    """
    whole("num_models", num_models)
    far, variance = real_array("epsilon", epsilon), np.diag(np.asarray(limit.cov))
    if far.shape not in ((), variance.shape) or not np.all(far > 0):
        raise ValueError(f"epsilon: got shape {far.shape}, least {far.min():g}, must be above 0, of shape () or "
                         f"{variance.shape}")  # fmt: skip
    return np.asarray(np.minimum(np.maximum(variance, 0.0) / (num_models * far**2), 1.0))
