"""A search for the largest stable and the best client learning rate, by the losses predicted at each rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedtangent._src.theory.flow import best_learning_rate
from fedtangent._src.theory.flow.asymptotics import end_of_stable

TOLERANCE = 0.02  # of rates, relative
LOWEST = 1e-2  # the lowest rate tried, as a share of the run's rate, or of the largest stable one if that is less
APART = 2.7  # factor between the rates that are tried before the best is narrowed down
STEP = 1.25  # factor between the rates that are tried for the largest stable one


class Rates(NamedTuple):
    """Client learning rates found by a search; for a schedule, its largest rate (the others scale with it)."""

    stable: float  # up to it, from 0, the final training loss is not above the first; inf, or 0 for none
    guaranteed: float | None  # below it no round can diverge (``Flow.stability``); None without a closed bound
    best: float  # rate of the least test loss after the last round
    at_edge: bool  # whether the loss still falls at an end of the rates that were tried
    tried: np.ndarray  # rising
    losses: np.ndarray  # test loss after the last round at each


def searched_rates(
    losses: Callable[[float], tuple[float, float]], start: float, first_loss: float, gentle: float
) -> Rates:
    """Searches the largest stable rate and the best rate.

    Args:
        losses: Maps a rate to training and test loss after the last round, which may be infinite or NaN.
        start: The run's rate.
        first_loss: Training loss of the untrained models; a rate with a larger one is not stable.
        gentle: Rate at which the search for the largest stable one begins (``end_of_stable``).
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
