"""Lemma 2 of NTK-FL (Yue et al., ICML 2022, C): how far the NTK weights leave those of gradient descent.

``|w_t - w~_t|_1 <= sqrt(2 n d / pi) eta R / (delta alpha) sum_{u=1}^{t-1} gamma_u``, gamma_u above every example's
residual after u steps, for the network of eq. (12). The proof takes for both weights (23), (24) the residuals of one
and the same run. The NTK weights follow those of the linearised network, so that the gap has a second part,
``eta/N |J_0' sum_u (r_u - r~_u)|_1``, which the lemma leaves out and ``residual_part`` bounds. Printed without R, (22)
would not follow from (25d) and Lemma 1; Fig. 9 has ``2 sum gamma_u`` in its place (``figure_bound``).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedtangent.theory import checks
from fedtangent.theory.ntk_fl.two_layer import undecided_bound


def weight_gap_bound(
    gamma: Any,
    *,
    learning_rate: float,
    width: int,
    input_size: int,
    radius: float,
    alpha: float = 1.0,
    delta: float = 0.05,
) -> np.ndarray:
    """Lemma 2's bound of ``|w_t - w~_t|_1`` for t = 0 .. T, [T + 1] float64.

    Args:
        gamma: [T], above ``|f_u(x_i) - y_i|`` for every i, u = 0 .. T - 1.
        learning_rate: eta of ``1/(2 N) |f - y|^2``; width: n; input_size: d of inputs of norm 1.
        radius: R, which no neuron leaves in those steps; alpha, delta: of Lemma 1.

    Raises:
        ValueError: numbers out of range, shapes that do not fit.
    """
    sums = _sums(gamma)
    undecided = undecided_bound(radius, alpha, delta, width)
    return _per_step(learning_rate, width, input_size) * undecided * sums


def switched_bound(
    gamma: Any, switched: Any, *, learning_rate: float, width: int, input_size: int, num_examples: int
) -> np.ndarray:
    """The same by (25d), with the activities that did change in place of Lemma 1: [T + 1] float64.

    ``eta sqrt(d) / (N sqrt(n)) sum_{u=1}^{t-1} gamma_u sum_i |S_i(u)|``; ``switched`` [T] are the inner sums, at u.
    """
    counts = checks.check_real("switched", switched)
    residuals = checks.check_real("gamma", gamma)
    if counts.shape != residuals.shape:
        raise ValueError(f"switched must have shape {residuals.shape}, got {counts.shape}")
    return _per_step(learning_rate, width, input_size) * _sums(residuals * counts) / num_examples


def residual_part(apart: Any, *, learning_rate: float, width: int, input_size: int, num_examples: int) -> np.ndarray:
    """Bound of the part that the lemma leaves out: ``eta sqrt(n d) / N |sum_{u<t} (r_u - r~_u)|_1``, [T + 1] float64.

    ``apart`` [T + 1]: that l1 norm over examples, of residuals of the network minus those of its linearisation, each
    under its own descent, summed over the steps before t.
    """
    norms = checks.check_real("apart", apart)
    if norms.ndim != 1 or not np.all(norms >= 0):
        raise ValueError(f"apart must be [T + 1] numbers of at least 0, got shape {norms.shape}")
    checks.check_real_number("num_examples", num_examples)
    return _per_step(learning_rate, width, input_size) * width * norms / num_examples


def figure_bound(gamma: Any) -> np.ndarray:
    """Fig. 9's "analytical upper bound": ``2 sum_{u=1}^{t-1} gamma_u`` for t = 0 .. T, [T + 1]."""
    return 2 * _sums(gamma)


def _per_step(learning_rate: float, width: int, input_size: int) -> float:
    """``eta sqrt(d / n)``: what one example's changed neuron adds, for a residual of 1, times N."""
    checks.check_positive(learning_rate=learning_rate, width=width, input_size=input_size)
    return learning_rate * math.sqrt(input_size / width)


def _sums(gamma: Any) -> np.ndarray:
    """``sum_{u=1}^{t-1} gamma_u`` for t = 0 .. T: the first step is taken with equal Jacobians."""
    values = checks.check_real("gamma", gamma)
    if values.ndim != 1 or len(values) == 0 or not np.all(values >= 0):
        raise ValueError(f"gamma must be [T] numbers of at least 0, got shape {values.shape}")
    return np.concatenate([[0.0], np.cumsum(values) - values[0]])
