"""Predicts the loss of a run, and finds the learning rates that minimise it or are the largest stable ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Float, Float64

from fedtangent._src.checks import finite, instance, number, real_array, whole
from fedtangent._src.theory import checks
from fedtangent._src.theory.checks import in_float64, is_concrete, require_float64
from fedtangent._src.theory.flow.asymptotics import end_of_stable
from fedtangent._src.theory.flow.flow import Flow
from fedtangent._src.types import Array, ArrayLike


class PredictedLoss(NamedTuple):
    """Expected squared error of an ensemble's weighted prediction, averaged over test points and outputs.

    ``total`` is ``bias``, the squared error of the mean over initial functions, plus ``variance``, the variance over
    initial functions.
    """

    total: Float[Array, ""]
    bias: Float[Array, ""]  # mean squared error of the mean over initial functions
    variance: Float[Array, ""]  # variance over initial functions


@in_float64
def predicted_loss(
    flow: Flow, y_test: ArrayLike, r: int | None = None, mixing: ArrayLike | None = None
) -> PredictedLoss:
    """Computes an ensemble's exact expected squared error at the test points after round r (FE-2024, eq. 10).

    It is the average over test points and outputs of ``E |sum_k m_k f_k(x) - y|^2``, E over independent initial
    functions of the models f_k, whose weights in the prediction are m_k.

    The loss is differentiable in ``mixing`` and in every number that ``flow`` was built from (learning rates, weights
    of local steps and of clients, ``mu`` and others); ``jax.grad`` needs ``jax_enable_x64``.

    Args:
        flow: Flow of the run, with outputs "shared". Without nngp blocks every model starts as the zero function, and
            the variance is 0.
        y_test: Targets [m, C] at the test points.
        r: Number of finished rounds; all rounds by default.
        mixing: Weights [K] of the models in the prediction; uniform by default, as in eq. (2) of FE-2024.

    Raises:
        FloatingPointError: The run is unstable and leaves the range of float64. If the call is traced, the loss is inf
            or NaN instead.
    """
    instance("flow", flow, Flow)
    if flow.outputs != "shared":
        raise ValueError(f"flow: got one built with outputs={flow.outputs!r}, must be built with 'shared'")
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
    """The step size with the least predicted loss.

    ``slope`` is ``d loss / d log rate`` there: near 0 inside the interval, NaN if the loss has no derivative.
    ``at_edge`` says whether the best rate is an end of the interval. ``rates`` and ``losses`` list all evaluations of
    the loss, in the order in which they were made.
    """

    rate: float
    loss: float
    slope: float  # d loss / d log rate at ``rate``: near 0 inside the interval
    at_edge: bool  # whether ``rate`` is an end of the interval, where the loss still falls
    rates: Float64[np.ndarray, "tried"]  # all rates at which the loss was evaluated, in order of evaluation
    losses: Float64[np.ndarray, "tried"]


def best_learning_rate(
    loss: Callable[[Any], Any],
    low: float,
    high: float,
    *,
    coarse: int = 9,
    tolerance: float = 1e-4,
    derivative: bool = True,
) -> BestRate:
    """Minimises a predicted loss over the learning rates in [low, high].

    The loss is evaluated at ``coarse`` rates, evenly spaced in the logarithm. The minimum lies between the best of them
    and the neighbour towards which the loss falls; there SciPy's bisection finds the root of ``d loss / d log rate``.
    Without a derivative SciPy's bounded minimisation searches between the two neighbours.

    Args:
        loss: Function of the rate, such as ``lambda rate: predicted_loss(federated_flow(.., rate), y_test).total``. A
            loss that is not finite, or a ``FloatingPointError`` (an unstable rate), counts as infinite.
        low, high: Ends of the interval.
        coarse: Number of rates of the first search, at least 3.
        tolerance: Relative tolerance of the rate.
        derivative: Whether JAX can trace and differentiate ``loss``. If not, it is called with plain numbers, and the
            slope is NaN.

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
    differentiated = jax.jit(jax.value_and_grad(lambda log: loss(jnp.exp(log))))
    tried: list[_Tried] = []

    def look(log: float) -> _Tried:
        try:
            value, slope = differentiated(jnp.asarray(log)) if derivative else (loss(float(np.exp(log))), np.nan)
        except FloatingPointError:  # of an unstable ``predicted_loss`` that is not traced
            value, slope = np.inf, np.nan
        tried.append(_Tried(log, float(value) if np.isfinite(value) else np.inf, float(slope)))
        return tried[-1]

    grid = [look(log) for log in np.linspace(np.log(low), np.log(high), coarse).tolist()]
    place = int(np.argmin([point.value for point in grid]))
    if not np.isfinite(grid[place].value):
        raise ValueError(f"loss: got no finite number at learning rates from {low} to {high}, must be finite at some")
    (_descend if derivative else _narrow)(look, grid, place, tolerance)
    best = min(tried, key=lambda point: point.value)
    values = np.array(tried)
    edge = place in (0, coarse - 1) and best.log in (grid[0].log, grid[-1].log)
    return BestRate(float(np.exp(best.log)), best.value, best.slope, edge, np.exp(values[:, 0]), values[:, 1])


class _Tried(NamedTuple):
    log: float
    value: float
    slope: float


_Look = Callable[[float], _Tried]  # evaluates the loss at the logarithm of a rate


def _descend(look: _Look, grid: list[_Tried], place: int, tolerance: float) -> None:
    """Bisects for a slope of 0 between the best rate of the grid and the neighbour towards which the loss falls.

    ``look`` evaluates the loss at the logarithm of a rate and records it: the records are the only result.
    ``grid[place]`` is the best of the rates tried so far, and ``tolerance`` the relative tolerance of the rate.
    """
    other = place + (1 if grid[place].slope < 0 else -1)
    if not 0 <= other < len(grid):
        return
    low, high = sorted((grid[place].log, grid[other].log))

    def side(log: float) -> float:
        """Returns -1 if a rate's logarithm is left of the minimum; 1 if it is right of it or the loss is not finite."""
        if log in (low, high):
            return -1.0 if log == low else 1.0
        point = look(log)
        return -1.0 if np.isfinite(point.value) and point.slope < 0 else 1.0

    scipy.optimize.bisect(side, low, high, xtol=max(tolerance, 1e-14))


def _narrow(look: _Look, grid: list[_Tried], place: int, tolerance: float) -> None:
    """Minimises the loss without a derivative between the two neighbours of ``grid[place]``, the best rate so far.

    ``look`` evaluates the loss at the logarithm of a rate and records it: the records are the only result.
    ``tolerance`` is the relative tolerance of the rate.
    """
    ends = grid[max(place - 1, 0)].log, grid[min(place + 1, len(grid) - 1)].log
    most = max(point.value for point in grid if np.isfinite(point.value))  # parabolas need numbers
    scipy.optimize.minimize_scalar(
        lambda log: min(look(log).value, most), bounds=ends, method="bounded", options={"xatol": tolerance}
    )


TOLERANCE = 0.02  # of rates, relative
LOWEST = 1e-2  # the lowest rate tried, as a share of the run's rate, or of the largest stable one if that is less
APART = 2.7  # factor between the rates that are tried before the best is narrowed down
STEP = 1.25  # factor between the rates that are tried for the largest stable one


class Rates(NamedTuple):
    """Client learning rates found by ``searched_rates``; for a learning-rate schedule, each is its largest rate.

    Attributes:
        stable: Largest rate up to which the final training loss is not above the initial one; infinite if the search
            for ``stable`` finds no rate that raises the loss, 0 if every rate of this search raises it.
        guaranteed: Rate below which no round can diverge (``Flow.stability``); None if no such bound is known.
        best: Rate of the least test loss after the last round.
        at_edge: Whether the test loss still falls at the lowest or the highest rate of the search for ``best``.
        tried: Rates of the search for ``best``, rising.
        losses: Test loss after the last round at each rate of ``tried``.
    """

    stable: float
    guaranteed: float | None
    best: float
    at_edge: bool
    tried: np.ndarray
    losses: np.ndarray


def searched_rates(
    losses: Callable[[float], tuple[float, float]], start: float, first_loss: float, gentle: float
) -> Rates:
    """Searches for the largest stable client learning rate, and for the rate of the least test loss.

    If no rate is stable, the result has ``start`` as its best and only rate. ``guaranteed`` is None.

    Args:
        losses: Function from a rate to training and test loss after the last round, which may be infinite or NaN.
        start: Learning rate of the run; it limits how small a rate is tried for the least test loss.
        first_loss: Training loss of the untrained models; a rate with a larger loss is not stable.
        gentle: Rate at which the search for the largest stable rate begins (``end_of_stable``).
    """
    losses_at: dict[float, tuple[float, float]] = {}
    tried: dict[float, float] = {}

    def at(rate: float) -> tuple[float, float]:
        if rate not in losses_at:
            losses_at[rate] = losses(rate)
        return losses_at[rate]

    def test_loss(rate: float) -> float:
        tried[rate] = at(rate)[1]
        return tried[rate]

    stable = end_of_stable(lambda rate: at(rate)[0], first_loss, start=gentle, step=STEP, tolerance=TOLERANCE)
    if stable == 0:  # no rate that was tried trains, and none is better than another
        return Rates(0.0, None, start, True, np.array([start]), np.array([at(start)[1]]))
    high = min(stable, max(losses_at))
    low = LOWEST * min(high, start)
    coarse = 1 + int(np.ceil(np.log(high / low) / np.log(APART)))
    best = best_learning_rate(test_loss, low, high, coarse=coarse, tolerance=TOLERANCE, derivative=False)
    order = np.array(sorted(tried))
    return Rates(stable, None, best.rate, best.at_edge, order, np.array([tried[rate] for rate in order]))
