"""Choosing a run's numbers by its predicted test loss: the flow is differentiable in all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize

from fedtangent.checks import finite, number, real_array, whole
from fedtangent.theory import checks
from fedtangent.theory.flow.flow import Flow
from fedtangent.theory.precision import in_float64, is_concrete, require_float64
from fedtangent.types import Array


class PredictedLoss(NamedTuple):
    """Expected squared error of an ensemble's mixed prediction, averaged over test points and outputs."""

    total: Array  # []
    bias: Array  # [] mean squared error of the mean over initial functions
    variance: Array  # [] what the initial functions add


@in_float64
def predicted_loss(flow: Flow, y_test: Any, r: int | None = None, mixing: Any = None) -> PredictedLoss:
    """``E |sum_k m_k f_k(x) - y|^2`` after round r, over independent initial functions: FE-2024's eq. (10), exactly.

    Differentiable in whatever ``flow`` was built from (learning rates, weights of local steps and of clients, mu, ..)
    and in ``mixing``; ``jax.grad`` needs ``jax_enable_x64``.

    Args:
        flow: with nngp blocks, or without, for which the variance is 0 (a given, zero initial function).
        y_test: [m, C]; r: finished rounds, all of them by default.
        mixing: [K] weights of the models in the prediction; by default uniform (eq. 2).

    Raises:
        ValueError: shapes that do not fit; outputs "full".
    """
    checks.check_kind("flow", flow, Flow)
    if flow.outputs != "shared":
        raise ValueError(f"flow: got outputs {flow.outputs!r}, must be of outputs 'shared'")
    checks.check_known("y_test", y_test)
    finite("y_test", targets := real_array("y_test", y_test))
    checks.check_shape("y_test", targets, (flow.blocks.ntk_test_train.shape[0], flow.y_train.shape[1]))
    r = flow.num_rounds if r is None else whole("r", r, 0, flow.num_rounds)
    if mixing is not None and is_concrete(mixing):
        finite("mixing", real_array("mixing", mixing))
    weights = jnp.full(flow.num_models, 1 / flow.num_models) if mixing is None else jnp.asarray(mixing, jnp.float64)
    checks.check_shape("mixing", weights, (flow.num_models,))
    mean = jnp.einsum("k,kmc->mc", weights, flow.mean(r))
    bias = jnp.mean((mean - targets) ** 2)
    variance = (
        jnp.sum(weights**2 * jnp.mean(flow.variance(r), axis=1))
        if flow.blocks.nngp_train is not None
        else jnp.zeros(())
    )
    return PredictedLoss(bias + variance, bias, variance)


class BestRate(NamedTuple):
    """The step size with the least predicted loss."""

    rate: float
    loss: float
    slope: float  # d loss / d log rate there: 0 but at the end of the interval
    at_edge: bool  # the loss still falls at the end of the interval
    rates: np.ndarray  # every rate that was tried, in the order of trying
    losses: np.ndarray


def best_learning_rate(
    loss: Callable[[Array], Array], low: float, high: float, *, coarse: int = 9, tolerance: float = 1e-4
) -> BestRate:
    """Minimise a predicted loss over the rates in [low, high], by its derivative.

    The best of ``coarse`` rates, evenly spaced in the logarithm, is bracketed by its neighbours and the root of
    ``d loss / d log rate`` found between them by SciPy's bisection to a relative ``tolerance``.

    Args:
        loss: differentiable, such as ``lambda rate: predicted_loss(federated_flow(.., rate), y_test).total``; a loss
            that is not finite (an unstable rate) counts as infinite.

    Raises:
        ValueError: not ``0 < low < high``; fewer than 3 coarse rates; no rate with a finite loss; 64-bit types off.
    """
    for name, value in (("low", low), ("high", high)):
        number(name, value, above=0)
    if not low < high:
        raise ValueError(f"low: got {low}, must be below high, {high}")
    whole("coarse", coarse, 3)
    number("tolerance", tolerance, above=0)
    require_float64()
    of_log = jax.jit(jax.value_and_grad(lambda log: loss(jnp.exp(log))))
    tried: list[tuple[float, float, float]] = []

    def look(log: float) -> tuple[float, float, float]:
        value, slope = (float(part) for part in of_log(jnp.asarray(log)))
        tried.append((log, value if np.isfinite(value) else np.inf, slope))
        return tried[-1]

    grid = [look(log) for log in np.linspace(np.log(low), np.log(high), coarse).tolist()]
    place = int(np.argmin([value for _, value, _ in grid]))
    if not np.isfinite(grid[place][1]):
        raise ValueError(f"loss: got no finite one for learning rates from {low} to {high}, must be finite for some")
    other = place + (1 if grid[place][2] < 0 else -1)  # downhill
    if 0 <= other < coarse:
        left, right = sorted((grid[place][0], grid[other][0]))

        def side(log: float) -> float:
            """Below 0 left of the minimum; a loss that is not finite is right of it, of too large a rate."""
            if log in (left, right):
                return -1.0 if log == left else 1.0
            _, value, slope = look(log)
            return -1.0 if np.isfinite(value) and slope < 0 else 1.0

        optimize.bisect(side, left, right, xtol=max(tolerance, 1e-14))
    best = min(tried, key=lambda found: found[1])
    values = np.array(tried)
    edge = place in (0, coarse - 1) and best[0] in (grid[0][0], grid[-1][0])
    return BestRate(float(np.exp(best[0])), best[1], best[2], edge, np.exp(values[:, 0]), values[:, 1])
