"""How far training a network is from training its linearisation: FE-2021 section 9.4.

The paper ends with ``gap <= kappa_4 / (1 - (1 + eta_0^2 tau^2 ||D_4||) e^{-eta_0 tau lambda_min / nbar})`` and
``kappa_4 = O(l^-1/2)``. Its kappa_4 has ``e^{eta_0 tau / (nbar C_2^2)}`` where the integral it bounds gives
``e^{eta_0 tau C_2^2 / n_i}``, and ``2 C_2^2 l^-1/2`` for the change of the kernel, from which the constant
``3 (1 + kappa_2) C_2 R_0 / lambda_m`` of (18) is missing. ``gap_from_drift`` is the first-order bound that the same
argument gives for a measured change of the kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def kappa_4(progress: float, c1: float, c2: float, r0: float, examples_per_round: float, width: float) -> float:
    """FE-2021 section 9.4, as printed, ``progress = eta_0 tau``; inf where it overflows.

    ``e^{p C_2^2 / nbar} [8 p^2 R_0^2 C_1 C_2^2 l^-1/2 + p e^{p / (nbar C_2^2)} 2 R_0 C_2^2 l^-1/2]``.

    Raises:
        ValueError: a constant that is negative or not a number, a width or number of examples not positive.
    """
    given = {"progress": progress, "c1": c1, "c2": c2, "r0": r0}
    _check(given, {"examples_per_round": examples_per_round, "width": width})
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        curved = 8 * progress**2 * r0**2 * c1 * c2**2
        drifting = 2 * progress * np.exp(progress / (examples_per_round * np.float64(c2) ** 2)) * r0 * c2**2
        value = np.exp(np.float64(progress) * c2**2 / examples_per_round) * (curved + drifting) / np.sqrt(width)
    return float(value) if np.isfinite(value) else float("inf")


def linearisation_gap(
    kappa: float, progress: float, lambda_min: float, examples_per_round: float, d4_norm: float = 0.0
) -> float:
    """The last bound of FE-2021 section 9.4 on ``||g_lin - g||`` at any age: ``kappa_4 / (1 - q)``.

    ``q = (1 + p^2 ||D_4||) e^{-p lambda_min(Theta_0) / nbar}``, ``p = eta_0 tau``; inf unless q < 1, as the paper
    requires. ``d4_norm`` is the operator norm of the second-order terms of an age (``second_order_terms`` / p^2).
    """
    _check({"kappa": kappa, "progress": progress, "lambda_min": lambda_min, "d4_norm": d4_norm},
           {"examples_per_round": examples_per_round})  # fmt: skip
    q = (1 + progress**2 * d4_norm) * np.exp(-progress * lambda_min / examples_per_round)
    return float(kappa / (1 - q)) if q < 1 else float("inf")


def gap_from_drift(progress: Any, drift: float, r0: float, lambda_min: float, examples_per_round: float) -> np.ndarray:
    """First-order bound of ``||g_lin - g||`` from how far the kernel has moved, ``drift >= ||Theta_s - Theta_0||``.

    With ``t = progress / nbar`` in all, ``g_lin - g = int_0^t e^{-Theta_0 (t - s)} (Theta_s - Theta_0) g_s ds`` (the
    identity that opens section 9.4, over an age and to first order in the step), and ``||g_s|| <= R_0 e^{-lambda s}``
    bounds it by ``R_0 drift t e^{-lambda t}``; lambda_min is the least eigenvalue along the way (Theta_0's, less the
    drift). Largest at ``t = 1 / lambda``: ``R_0 drift / (e lambda)``.

    Args:
        progress: sum over rounds or ages of eta_0 tau times the visits of each client, a number or an array.
    """
    _check({"drift": drift, "r0": r0, "lambda_min": lambda_min}, {"examples_per_round": examples_per_round})
    t = np.asarray(progress, np.float64) / examples_per_round
    return np.asarray(r0 * drift * t * np.exp(-lambda_min * t))


def _check(not_negative: dict[str, float], positive: dict[str, float]) -> None:
    for name, value in not_negative.items():
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value!r}")
    for name, value in positive.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value!r}")
