"""Do simulation and theory agree? Each verdict has a negative control that must fail the very same check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedtangent.compare.statistics import (
    NUM_STANDARD_ERRORS,
    SIGNIFICANCE,
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
    """One comparison of simulation with theory, beside its control: a wrong theory put through the same check.

    The one record of every comparison and every check of a theorem. What is measured and expected is text, as it is
    read, with standard errors and tolerance.
    """

    subject: str  # the theorem, or the setting that is compared
    statement: str  # what is compared
    measured: str
    expected: str  # by the theory, with the tolerance
    holds: bool  # what is measured is as expected
    control: str  # which wrong theory
    control_measured: str
    control_fails: bool  # as it must
    sizes: str = ""  # on what, and how large

    @classmethod
    def of(
        cls, subject: str, statement: str, sizes: str, found: tuple[str, str, bool], wrong: tuple[str, str, bool]
    ) -> Verdict:
        """Of what was ``found`` (measured, expected, holds), and of the ``wrong`` theory (name, measured, fails)."""
        return cls(subject, statement, *found, *wrong, sizes)

    @property
    def passed(self) -> bool:
        """The comparison holds and its control does not."""
        return self.holds and self.control_fails


def as_rows(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """The rows of result.json."""
    return [{**v._asdict(), "passed": v.passed} for v in verdicts]


def summary(verdicts: Sequence[Verdict]) -> str:
    """Whether all have passed, in one line."""
    failed = sum(not v.holds for v in verdicts)
    passing = sum(not v.control_fails for v in verdicts)
    if failed:
        return f"Simulation and theory DISAGREE in {failed} of {len(verdicts)} comparisons"
    if passing:
        return f"Inconclusive: {passing} of {len(verdicts)} negative controls pass too"
    return f"Simulation and theory agree in all {len(verdicts)} comparisons, and every wrong theory fails its own"


def slope_verdict(
    subject: str, widths: tuple[int, ...], errors: list[np.ndarray], control: str, wrong: list[np.ndarray]
) -> Verdict:
    """Relative errors to the flow fall with the width at slope -1/2 +- 0.1; those to a wrong flow do not."""
    fit, other = fitted_slope(np.array(widths), errors), fitted_slope(np.array(widths), wrong)
    measured, holds = f"slope {fit.slope:+.3f} +- {fit.standard_error:.3f}", abs(fit.slope - SLOPE) <= SLOPE_BAND
    wrong_one = control, f"slope {other.slope:+.3f}", abs(other.slope - SLOPE) > SLOPE_BAND
    statement = "each network to the flow: error against width"
    return Verdict.of(subject, statement, "", (measured, f"{SLOPE} +- {SLOPE_BAND}", holds), wrong_one)


def exact_verdict(subject: str, statement: str, error: float, controls: dict[str, float], bound: float) -> Verdict:
    """An equality to ``bound``, which every control (name -> error) misses by ``MARGIN`` times the bound.

    The nearest of the controls is the one named; an error that is not a number counts as the nearest of all.
    """
    name = min(controls, key=lambda n: -np.inf if np.isnan(controls[n]) else controls[n])
    control = name if len(controls) == 1 else f"{name}: nearest of {len(controls)}"
    found = f"{error:.1e}", f"<= {bound:.0e}", bool(error <= bound)
    wrong = control, f"{controls[name]:.1e}", bool(controls[name] > MARGIN * bound)
    return Verdict.of(subject, statement, "", found, wrong)


def bounded_verdict(subject: str, statement: str, sizes: str, ratio: float, control: str, wrong: float) -> Verdict:
    """What is measured over its bound is at most 1, over a wrong bound it is not."""
    found = f"{ratio:.3g}", "<= 1", bool(ratio <= 1)
    return Verdict.of(subject, statement, sizes, found, (control, f"{wrong:.3g}", bool(wrong > 1)))


class Sampled(NamedTuple):
    """One round's samples at every width, [K, E, m, C] each, with what the theory says of them."""

    widths: tuple[int, ...]
    samples: tuple[np.ndarray, ...]
    mean: np.ndarray  # [K, m, C]
    cov: np.ndarray  # [K, m, m]


def sampled_verdict(
    subject: str,
    statement: str,
    widths: tuple[int, ...],
    statistics: list[Statistic],
    power: int,
    control: str,
    wrong: Statistic,
) -> Verdict:
    """A statistic at the largest width, after the finite-width term fitted on the others, beside a wrong one."""
    allowance = finite_width_allowance(np.array(widths), statistics, power)
    found = statistics[int(np.argmax(widths))]
    error = np.hypot(found.standard_error, allowance.standard_error)
    expected = f"{found.expected + allowance.value:.3f} +- {NUM_STANDARD_ERRORS:.0f} x {error:.3f}"
    right = f"{found.value:.3f}", expected, agrees(found, allowance)
    return Verdict.of(subject, statement, "", right, (control, f"{wrong.value:.3f}", not agrees(wrong, allowance)))


def mean_verdict(subject: str, statement: str, seen: Sampled, control: str, wrong_mean: np.ndarray) -> Verdict:
    """The networks' mean against the theory's at the largest width, beside a wrong mean."""
    statistics = [mean_statistic(s, seen.mean, seen.cov) for s in seen.samples]
    wrong = mean_statistic(seen.samples[int(np.argmax(seen.widths))], wrong_mean, seen.cov)
    return sampled_verdict(subject, statement, seen.widths, statistics, 2, control, wrong)


def variance_verdict(subject: str, statement: str, seen: Sampled, control: str, wrong_cov: np.ndarray) -> Verdict:
    """The networks' variance against the theory's at the largest width, beside a wrong covariance."""
    statistics = [variance_statistic(s, seen.cov) for s in seen.samples]
    wrong = variance_statistic(seen.samples[int(np.argmax(seen.widths))], wrong_cov)
    return sampled_verdict(subject, statement, seen.widths, statistics, 1, control, wrong)


def paired_verdict(subject: str, statement: str, differences: np.ndarray, control: str, wrong: np.ndarray) -> Verdict:
    """Whether networks minus prediction has mean zero, beside the differences to a wrong prediction."""
    right, other = sign_flip_test(differences), sign_flip_test(wrong)
    found = f"p = {right:.3f}", f"p >= {SIGNIFICANCE}", right >= SIGNIFICANCE
    return Verdict.of(subject, statement, "", found, (control, f"p = {other:.1e}", other < SIGNIFICANCE))
