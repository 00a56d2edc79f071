"""NTK-FL's server evolution in the limit of infinite width: gradient descent on the pooled data of one cohort."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedtangent.checks import number, whole
from fedtangent.kernels.gram import KernelBlocks


def ntk_evolution(k: KernelBlocks, step: float, time: int) -> np.ndarray:
    """``B_t = Theta(x, X) Theta^-1 [I - (I - s Theta)^t]``: what t steps of gradient descent make of a residual.

    The discrete form of NTK-FL's eq. (7) and (9a) (Yue et al., ICML 2022) with the limiting kernel for H:
    ``f_t(x) = f_0(x) - B_t (f_0(X) - Y)``, so that ``covariance_terms(k, B_t)`` is its covariance, and Theorem 2 of
    FE-2024 its limit as t grows. Modes of eigenvalue 0 take their own limit, ``s t``, so Theta may be singular.

    Args:
        k: kernel blocks of the pooled training data and m test points.
        step: s > 0, step size on ``1/2 |f - y|^2`` (eta / (N C) for the loss averaged over examples and outputs).
        time: t >= 0, number of steps.

    Returns:
        [m, n] float64.

    Raises:
        ValueError: ``step`` not positive or beyond the stability bound 2 / lambda_max; ``time`` negative.
    """
    theta = np.asarray(k.ntk_train, np.float64)
    eigenvalues, vectors = np.linalg.eigh(theta)
    bound = 2 / float(eigenvalues[-1])
    number("step", step, above=0, at_most=bound)  # 2 / lambda_max: beyond, it is not stable
    whole("time", time, 0)
    return np.asarray(k.ntk_test_train) @ (vectors * descent_gain(eigenvalues, step, time)) @ vectors.T


def descent_gain(eigenvalues: Any, step: float, time: int) -> np.ndarray:
    """``(1 - (1 - s lambda)^t) / lambda`` for each eigenvalue, ``s t`` at 0 (negative rounding counts as 0)."""
    x = np.maximum(np.asarray(eigenvalues, np.float64) * step, 0.0)
    small = np.where((x > 0) & (x < 0.5), x, 0.25)  # expm1 and log1p keep all digits where 1 - (1 - x)^t would cancel
    large = np.where(x < 0.5, 0.5, x)
    few = np.where(x > 0, -np.expm1(time * np.log1p(-small)) / small, float(time))
    return step * np.where(x < 0.5, few, (1 - (1 - large) ** time) / large)
