"""Do simulation and theory agree? Each verdict has a negative control that must fail the very same check."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedtangent.compare.statistics import (
    NUM_STANDARD_ERRORS,
    SIGNIFICANCE,
    Allowance,
    Statistic,
    agrees,
    finite_width_allowance,
    fitted_slope,
    mean_statistic,
    sign_flip_test,
    variance_statistic,
)

SLOPE, SLOPE_BAND = -0.5, 0.1
EXACT = 1e-9
MARGIN = 1e3  # how much farther than an exact bound its controls must be: orders of magnitude, never rounding


class Verdict(NamedTuple):
    """The outcome of one comparison and of its negative control."""

    setting: str
    comparison: str
    measured: str
    allowed: str
    agrees: bool
    control: str
    control_measured: str
    control_fails: bool

    @property
    def passed(self) -> bool:
        """The comparison holds and its control does not."""
        return self.agrees and self.control_fails


def slope_verdict(
    setting: str, widths: tuple[int, ...], errors: list[np.ndarray], control: str, wrong: list[np.ndarray]
) -> Verdict:
    """Relative errors to the flow fall with the width at slope -1/2 +- 0.1; those to a wrong flow do not."""
    fit, other = fitted_slope(np.array(widths), errors), fitted_slope(np.array(widths), wrong)
    return Verdict(
        setting,
        "each network to the flow: error against width",
        f"slope {fit.slope:+.3f} +- {fit.standard_error:.3f}",
        f"{SLOPE} +- {SLOPE_BAND}",
        abs(fit.slope - SLOPE) <= SLOPE_BAND,
        control,
        f"slope {other.slope:+.3f}",
        abs(other.slope - SLOPE) > SLOPE_BAND,
    )


def exact_verdict(setting: str, comparison: str, error: float, controls: dict[str, float], bound: float) -> Verdict:
    """An equality to ``bound``, which every control (name -> error) misses by ``MARGIN`` times the bound.

    The nearest of the controls is the one named; an error that is not a number counts as the nearest of all.
    """
    name = min(controls, key=lambda n: -np.inf if np.isnan(controls[n]) else controls[n])
    return Verdict(
        setting,
        comparison,
        f"{error:.1e}",
        f"<= {bound:.0e}",
        bool(error <= bound),
        name if len(controls) == 1 else f"{name}: nearest of {len(controls)}",
        f"{controls[name]:.1e}",
        bool(controls[name] > MARGIN * bound),
    )


def _row(
    setting: str, what: str, statistic: Statistic, allowance: Allowance, control: str, wrong: Statistic
) -> Verdict:
    error = np.hypot(statistic.standard_error, allowance.standard_error)
    return Verdict(
        setting,
        what,
        f"{statistic.value:.3f}",
        f"{statistic.expected + allowance.value:.3f} +- {NUM_STANDARD_ERRORS:.0f} x {error:.3f}",
        agrees(statistic, allowance),
        control,
        f"{wrong.value:.3f}",
        not agrees(wrong, allowance),
    )


class Sampled(NamedTuple):
    """One round's samples at every width, [K, E, m, C] each, with what the theory says of them."""

    widths: tuple[int, ...]
    samples: tuple[np.ndarray, ...]
    mean: np.ndarray  # [K, m, C]
    cov: np.ndarray  # [K, m, m]


def sampled_verdict(
    setting: str,
    what: str,
    widths: tuple[int, ...],
    statistics: list[Statistic],
    power: int,
    control: str,
    wrong: Statistic,
) -> Verdict:
    """A statistic at the largest width, after the finite-width term fitted on the others, beside a wrong one."""
    allowance = finite_width_allowance(np.array(widths), statistics, power)
    return _row(setting, what, statistics[int(np.argmax(widths))], allowance, control, wrong)


def mean_verdict(setting: str, what: str, seen: Sampled, control: str, wrong_mean: np.ndarray) -> Verdict:
    """The networks' mean against the theory's at the largest width, beside a wrong mean."""
    statistics = [mean_statistic(s, seen.mean, seen.cov) for s in seen.samples]
    wrong = mean_statistic(seen.samples[int(np.argmax(seen.widths))], wrong_mean, seen.cov)
    return sampled_verdict(setting, what, seen.widths, statistics, 2, control, wrong)


def variance_verdict(setting: str, what: str, seen: Sampled, control: str, wrong_cov: np.ndarray) -> Verdict:
    """The networks' variance against the theory's at the largest width, beside a wrong covariance."""
    statistics = [variance_statistic(s, seen.cov) for s in seen.samples]
    wrong = variance_statistic(seen.samples[int(np.argmax(seen.widths))], wrong_cov)
    return sampled_verdict(setting, what, seen.widths, statistics, 1, control, wrong)


def paired_verdict(setting: str, what: str, differences: np.ndarray, control: str, wrong: np.ndarray) -> Verdict:
    """Whether networks minus prediction has mean zero, beside the differences to a wrong prediction."""
    right, other = sign_flip_test(differences), sign_flip_test(wrong)
    return Verdict(
        setting,
        what,
        f"p = {right:.3f}",
        f"p >= {SIGNIFICANCE}",
        right >= SIGNIFICANCE,
        control,
        f"p = {other:.1e}",
        other < SIGNIFICANCE,
    )
