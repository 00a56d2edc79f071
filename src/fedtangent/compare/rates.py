"""The client rates of a run, by what is predicted at each: the largest that is stable, and the best."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedtangent.theory import best_learning_rate

TOLERANCE = 0.02  # of rates, relative
LOWEST = 1e-2  # of the run's rate, or the largest stable one if that is less: the least that is tried
APART = 2.7  # factor between the rates that are tried before the best is narrowed down
FACTORS = 2.0**-40, 2.0**40  # of the run's rate, beyond which no bound of stability is looked for


class Rates(NamedTuple):
    """Clients' rates; of a schedule its first, the others being scaled alike."""

    stable: float  # the largest for which the training loss at the horizon is not above the first; inf, or 0 for none
    guaranteed: float | None  # below which no round can diverge, where there is a closed bound (``Flow.stability``)
    best: float  # of the least test loss at the horizon
    at_edge: bool  # whether the loss still falls at an end of the rates that were tried
    tried: np.ndarray  # rising
    losses: np.ndarray  # test loss at the horizon of each


def searched_rates(losses: Callable[[float], tuple[float, float]], given: float, first_loss: float) -> Rates:
    """Stable and best rate, looked for around the one that is given.

    Args:
        losses: rate -> training and test loss at the horizon, which need not be finite.
        first_loss: training loss of the untrained models, above which a rate is not stable.
    """
    seen: dict[float, tuple[float, float]] = {}
    tried: dict[float, float] = {}

    def at(rate: float) -> tuple[float, float]:
        if rate not in seen:
            seen[rate] = losses(rate)
        return seen[rate]

    def test_loss(rate: float) -> float:
        tried[rate] = at(rate)[1]
        return tried[rate]

    stable = given * largest_factor(lambda factor: at(given * factor)[0] <= first_loss)  # nor is what is no number
    if stable == 0:  # then none that was tried trains, and none is better than another
        return Rates(0.0, None, given, True, np.array([given]), np.array([at(given)[1]]))
    high = min(stable, max(seen))
    low = LOWEST * min(high, given)
    coarse = 1 + int(np.ceil(np.log(high / low) / np.log(APART)))
    best = best_learning_rate(test_loss, low, high, coarse=coarse, tolerance=TOLERANCE, derivative=False)
    order = np.array(sorted(tried))
    return Rates(stable, None, best.rate, best.at_edge, order, np.array([tried[rate] for rate in order]))


def largest_factor(is_stable: Callable[[float], bool]) -> float:
    """The end of the stable factors around 1, by doubling or halving and bisection; inf or 0 where none is found."""
    low = high = 1.0
    if is_stable(1.0):
        while is_stable(high := 2 * low):
            low = high
            if high >= FACTORS[1]:
                return float("inf")
    else:
        while not is_stable(low := high / 2):
            high = low
            if low <= FACTORS[0]:
                return 0.0
    while high > (1 + TOLERANCE) * low:
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if is_stable(middle) else (low, middle)
    return low
