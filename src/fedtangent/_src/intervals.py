"""The record of an estimate with its confidence interval, and the width of such intervals."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float

Number: TypeAlias = Any  # a float, or an array; the three numbers of an interval are of one shape


class Interval(NamedTuple):
    """An estimate, and the lower and upper end of its confidence interval: numbers, or arrays of equal shape."""

    value: Number
    low: Number
    high: Number

    @classmethod
    def about(cls, value: Number, radius: Number) -> Interval:
        """Builds an interval that is symmetric about ``value``.

        Args:
            value: The estimate.
            radius: Distance of both ends from it.
        """
        return cls(value, value - radius, value + radius)

    @property
    def length(self) -> Number:
        """The length of the interval."""
        return self.high - self.low

    def within(self, low: float, high: float) -> bool | None:
        """Returns whether the interval lies in [low, high]: True if all of it does, False if none of it does, or None.

        None means that the interval is too wide to tell whether the estimated quantity is in the range. If one of the
        interval's three numbers is NaN, as after divergence, the result is False. The ends must not be arrays.

        Args:
            low: Lower end of the range.
            high: Upper end of the range.
        """
        if any(map(np.isnan, self)):
            return False
        if low <= self.low and self.high <= high:
            return True
        if self.high < low or self.low > high:
            return False
        return None

    def outside(self, low: float, high: float) -> bool | None:
        """Returns whether the interval lies outside [low, high]: True if none is inside, False if all is, else None.

        It tests whether a wrong theory is rejected. An interval with a NaN proves nothing and gives None. The
        ends must not be arrays.

        Args:
            low: Lower end of the range.
            high: Upper end of the range.
        """
        inside = self.within(low, high)
        return None if inside is None or any(map(np.isnan, self)) else not inside

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def half_width(values: Float[np.ndarray, "n *shape"], confidence: float = 0.95) -> Float[np.ndarray, "*shape"]:
    """Computes half the width of Student's t confidence interval of the mean over the first axis.

    Args:
        values: Independent values [n, ...], n at least 2.
        confidence: Confidence level of the interval.

    Raises:
        ValueError: There are fewer than two values.
    """
    from scipy.stats import t

    n = len(values)
    if n < 2:
        raise ValueError(f"values: got {n}, must be two or more")
    with np.errstate(invalid="ignore"):  # of values that are not finite
        error = np.std(values, axis=0, ddof=1) / np.sqrt(n)
    return np.asarray(t.ppf(0.5 + confidence / 2, n - 1) * error)
