"""Verdicts: whether simulation and theory agree. Each has a negative control that must fail the very same check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from fedtangent._src.comparison.simulated import Simulated
from fedtangent._src.comparison.statistics import (
    Interval,
    Pair,
    combined,
    mean_error,
    run_errors,
    variance_ratio,
    width_slope,
    worst,
)

SLOPE, SLOPE_MARGIN = -0.5, 0.25  # nearer to -1/2 than to any other multiple of it
MEAN_MARGIN = 0.03  # of how far training has moved the function
VARIANCE_MARGIN = 0.2
INITIAL_MARGIN = 0.25
EXACT = 1e-9
MARGIN = 1e3  # how much farther than an exact bound its controls must be: orders of magnitude, never rounding
ByWidth = Sequence[np.ndarray]  # [n] errors for each width

CONTROL_WORDS = {True: "fails, as it must", False: "PASSES TOO: inconclusive", None: "undecided"}


class Verdict(NamedTuple):
    """A comparison of simulation with theory, and its control: a wrong theory that must fail the same check.

    Every comparison and every theorem check returns this record. Measured and expected values are text for the reader,
    with standard errors and tolerance. ``holds`` says whether they agree, and ``control_fails`` whether the control
    does not; None means too few draws to tell.
    """

    subject: str  # the theorem or the setting
    statement: str  # name of the comparison
    measured: str
    expected: str  # by theory, with the tolerance
    holds: bool | None  # the measured value agrees; None: too few draws to tell
    control: str  # name of the wrong theory
    control_measured: str
    control_fails: bool | None  # the control fails, as it must; None: too few draws to tell
    sizes: str = ""  # sizes of the problem
    notices: str = ""  # how large an error of the theory must be for the comparison to detect it

    @classmethod
    def of(
        cls,
        subject: str,
        statement: str,
        sizes: str,
        right: tuple[str, str, bool | np.bool | None],
        wrong: tuple[str, str, bool | np.bool | None],
        notices: str = "",
    ) -> Verdict:
        """Builds a verdict from the measurement of the right theory and the measurement of the control.

        Args:
            subject: The theorem or the setting.
            statement: Name of the comparison.
            sizes: Sizes of the problem, as text.
            right: Measured value, expected value, and whether they agree.
            wrong: Name of the control, its measured value, and whether it fails.
            notices: How large an error of the theory must be for the comparison to detect it.
        """
        # plain bools: answers are compared by ``is False``, which a NumPy False never is
        holds, fails = (None if answer is None else bool(answer) for answer in (right[2], wrong[2]))
        return cls(subject, statement, *right[:2], holds, *wrong[:2], fails, sizes, notices)

    @property
    def passed(self) -> bool | None:
        """Whether ``holds`` and ``control_fails`` are both True; False if one is False, otherwise None (undecided)."""
        if self.holds is False or self.control_fails is False:
            return False
        return None if self.holds is None or self.control_fails is None else True

    @property
    def finding(self) -> str:
        """Measured and expected value, and whether the control fails, in one line."""
        control = f"{self.control}: {self.control_measured}, {CONTROL_WORDS[self.control_fails]}"
        return f"measured {self.measured}, expected {self.expected}; control: {control}"


def as_rows(verdicts: Sequence[Verdict]) -> list[dict[str, object]]:
    """Returns the verdicts as dictionaries for the file ``result.json``: their fields, and ``passed``."""
    return [{**v._asdict(), "passed": v.passed} for v in verdicts]


def undecided(verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    """Returns the names of the undecided verdicts: the statement of each, with its subject in brackets."""
    return tuple(f"{v.statement} [{v.subject}]" for v in verdicts if v.passed is None)


def summary(verdicts: Sequence[Verdict]) -> str:
    """Returns one line that says whether all verdicts have passed."""
    if not verdicts:
        return "No verdict"
    failed = sum(v.holds is False for v in verdicts)
    passing = sum(v.control_fails is False for v in verdicts)
    unclear = len(undecided(verdicts))
    parts = [f"{passing} of {len(verdicts)} negative controls pass too"] if passing else []
    near = sum(v.holds is True and v.control_fails is None for v in verdicts)
    parts += [f"{unclear - near} undecided, for too few draws"] if unclear > near else []
    parts += [f"{near} undecided, because the wrong theory is too near to tell apart"] if near else []
    if failed:
        parts = [f"Simulation and theory DISAGREE in {failed} of {len(verdicts)} comparisons", *parts]
    elif passing:
        parts[0] = f"Inconclusive: {parts[0]}"
    elif unclear < len(verdicts):
        decided = len(verdicts) - unclear
        agreeing = f"{decided} of {len(verdicts)} comparisons, whose wrong theories fail"
        if not unclear:
            of_all = "the one comparison" if decided == 1 else f"all {decided} comparisons"
            agreeing = f"{of_all}, and every wrong theory fails"
        parts = [f"Simulation and theory agree in {agreeing}", *parts]
    return "; ".join(parts)


class Rival(NamedTuple):
    """A wrong theory that may become a verdict's control.

    Attributes:
        name: Name of the wrong theory, or of its mistake.
        distance: Its largest calculated distance from the right theory, in the unit of the verdict's estimate.
        measured: Function that computes the verdict's estimate with the wrong theory in place of the right one.
    """

    name: str
    distance: float
    measured: Callable[[], Interval]


def judged(
    subject: str, statement: str, target: float, margin: float, estimates: Sequence[Interval], rivals: Sequence[Rival]
) -> Verdict:
    """Checks that all estimates are within ``margin`` of ``target``, with a wrong theory as the negative control.

    A single estimate outside the margin is enough to disagree, and the verdict shows the estimate that decides. The
    control must be so wrong that its interval lies outside the margin: its distance exceeds the margin plus the longer
    of two intervals, of the estimates and of the wrong theory. It is the nearest such theory; without one the verdict
    is undecided, or fails if an estimate is outside the margin.

    Args:
        subject: The theorem or the setting.
        statement: Name of the comparison.
        target: Value that theory predicts.
        margin: Allowed deviation from it.
        estimates: Estimates of the value, at least one, for instance one for each round.
        rivals: Wrong theories.
    """
    least = margin + max(e.length for e in estimates)
    are_sizes = target == 0 and min(e.low for e in estimates) >= 0  # they cannot be below
    allowed = f"<= {margin:g}" if are_sizes else f"{target:g} +- {margin:g}"
    decisive = worst(estimates, target, margin)
    right = str(decisive), allowed, decisive.within(target - margin, target + margin)
    wrong: tuple[str, str, bool | None] = f"none of {len(rivals)} wrong theories is far enough to tell", "-", None
    for rival in sorted(rivals, key=lambda rival: rival.distance):
        if rival.distance < least:
            continue
        other = rival.measured()
        if rival.distance >= margin + other.length:
            wrong = rival.name, str(other), other.outside(target - margin, target + margin)
            break
    return Verdict.of(subject, statement, "", right, wrong, f"{least:.2g}")


def slope_rival(name: str, widths: Sequence[int], errors: ByWidth, missed: ByWidth, floors: ByWidth) -> Rival:
    """Builds a wrong theory as a negative control, for a verdict on the slope of errors against the width.

    The errors to a wrong theory cannot fall below the distance between the two theories, so their slope is flatter than
    -1/2 by a known amount, the ``distance`` of the result.

    Args:
        name: The mistake in the wrong theory.
        widths: Widths of the networks.
        errors: Errors to the right theory, for each width.
        missed: Errors to the wrong theory, for each width.
        floors: Distances between the two theories, for each width.
    """
    expected = width_slope(widths, [np.hypot(e, floor) for e, floor in zip(errors, floors, strict=True)])
    return Rival(name, abs(expected.value - SLOPE), partial(width_slope, widths, list(missed)))


def slope_verdict(
    subject: str,
    widths: tuple[int, ...],
    networks: Sequence[Simulated],
    right: Sequence[np.ndarray],
    wrong: Mapping[str, Sequence[np.ndarray]],
) -> Verdict:
    """Checks that relative errors to the flow fall with the width at a slope near -1/2; to a wrong flow they do not.

    The slope is of log error against log width. The error of a network is taken over all r rounds together.

    Args:
        subject: The setting.
        widths: Widths of the networks.
        networks: Simulated networks, one entry for each width.
        right: Predictions of the flow for the last r evaluated rounds, [r, K, E, m, C] for each width, from E draws.
        wrong: The same predictions of each wrong flow, by name.
    """
    errors = [run_errors(p, n.test[-len(p) :], n.test[0]) for n, p in zip(networks, right, strict=True)]
    rivals = []
    for name, other in wrong.items():
        floors = [run_errors(p, q, n.test[0]) for n, p, q in zip(networks, right, other, strict=True)]
        missed = [run_errors(q, n.test[-len(q) :], n.test[0]) for n, q in zip(networks, other, strict=True)]
        rivals.append(slope_rival(name, widths, errors, missed, floors))
    statement = "error of each network to the flow: slope against width"
    return judged(subject, statement, SLOPE, SLOPE_MARGIN, [width_slope(widths, errors)], rivals)


def exact_verdict(subject: str, statement: str, error: float, controls: dict[str, float], bound: float) -> Verdict:
    """Checks that an error is at most ``bound``, and the error of every control above 1000 times ``bound``.

    The verdict names the control with the smallest error (NaN counts as the smallest). Errors are linear in a mistake.
    So the check detects that control's mistake even if it is smaller by the factor ``bound`` / the control's error.

    Args:
        subject: The theorem or the setting.
        statement: Name of the comparison.
        error: Measured error.
        controls: Error of each wrong theory, by name.
        bound: Largest allowed error.
    """
    name = min(controls, key=lambda n: -np.inf if np.isnan(controls[n]) else controls[n])
    control = name if len(controls) == 1 else f"{name}: nearest of {len(controls)}"
    right = f"{error:.1e}", f"<= {bound:.0e}", bool(error <= bound)
    wrong = control, f"{controls[name]:.1e}", bool(controls[name] > MARGIN * bound)
    share = bound / controls[name] if controls[name] else np.inf
    return Verdict.of(subject, statement, "", right, wrong, f"{share:.0e} of the control")


def bounded_verdict(subject: str, statement: str, sizes: str, ratio: float, control: str, wrong: float) -> Verdict:
    """Checks that a quantity is at most its bound, and more than a wrong bound.

    Args:
        subject: The theorem.
        statement: Name of the comparison.
        sizes: Sizes of the problem, as text.
        ratio: Measured value divided by its bound.
        control: Name of the wrong bound.
        wrong: Measured value divided by the wrong bound.
    """
    right, other = (f"{ratio:.3g}", "<= 1", bool(ratio <= 1)), (control, f"{wrong:.3g}", bool(wrong > 1))
    return Verdict.of(subject, statement, sizes, right, other, f"bound x {ratio:.2g}")


class AtRound(NamedTuple):
    """Networks of every width at one round, with the predictions from their initial functions.

    ``exact`` is the known variance of these predictions, and ``law`` the variance that is tested. Both are of one
    output, summed over points, for each model. ``scale`` is how far training moves the functions, as a norm.
    """

    pairs: tuple[Pair, ...]
    exact: Float[np.ndarray, "K"]  # variance of the predictions, by construction
    law: Float[np.ndarray, "K"]  # variance of the law that is tested
    scale: float  # norm of the function's movement by training


def initial_verdict(subject: str, widths: Sequence[int], squares: Mapping[str, Sequence[np.ndarray]]) -> Verdict:
    """Checks that the initial functions of networks have the variance that the prior predicts.

    Args:
        subject: The setting.
        widths: Widths of the networks.
        squares: Squares of initial functions in units of the prior's variance, [n] for each width; their mean should be
            1. One entry for each way to sum over points, by name.
    """
    estimates = [combined(widths, values) for values in squares.values()]
    rivals = [
        Rival(f"weights x {by}", 1 - by**-2, partial(combined, widths, [of_width / by**2 for of_width in values]))
        for by in (1.2, 1.3, 1.4, 1.6)
        for values in squares.values()
    ]
    statement = f"variance of initial functions = prior's: {' and '.join(squares)}"
    return judged(subject, statement, 1.0, INITIAL_MARGIN, estimates, rivals)


def independence_verdict(
    subject: str, widths: Sequence[int], products: Mapping[str, Sequence[np.ndarray]], squares: Sequence[np.ndarray]
) -> Verdict:
    """Checks that the initial functions of different networks are independent: products are 0 on average.

    Args:
        subject: The setting.
        widths: Widths of the networks.
        products: Products of two networks' initial functions in units of the prior's variance, [n] for each width (or
            for the last widths). One entry for each way to choose the two networks, by name.
        squares: Squares of initial functions, [n] for each width, for the control: if both outputs came from the same
            network, their products would equal ``squares``.
    """
    estimates = [combined(widths[-len(values) :], values) for values in products.values()]
    statement = f"initial functions of different {', '.join(products)} are independent"
    rival = Rival("the same start", 1.0, partial(combined, widths, squares))
    return judged(subject, statement, 0.0, INITIAL_MARGIN, estimates, [rival])


def mean_verdict(
    subject: str, statement: str, rounds: Sequence[AtRound], wrong: Mapping[str, Sequence[np.ndarray]]
) -> Verdict:
    """Checks that the networks' mean, extrapolated to infinite width, equals the predicted mean at every round.

    Args:
        subject: The setting.
        statement: Name of the comparison.
        rounds: Networks and predictions at each round; a round is left out if training has not moved the prediction by
            then. If no round remains, the verdict is undecided.
        wrong: Difference [m, C] between the wrong and the right mean at each round, for each wrong theory.
    """
    moved, rivals = [f.scale > 0 for f in rounds], []
    for name, away in wrong.items():
        far = [float(np.linalg.norm(a)) / f.scale if m else 0.0 for f, a, m in zip(rounds, away, moved, strict=True)]
        at = int(np.argmax(far))
        rivals.append(Rival(name, far[at], partial(mean_error, rounds[at].pairs, rounds[at].scale, away[at])))
    estimates = [mean_error(f.pairs, f.scale) for f, m in zip(rounds, moved, strict=True) if m]
    if not estimates:
        unmoved = "no finite movement of the prediction in any round", f"<= {MEAN_MARGIN:g}", None
        return Verdict.of(subject, statement, "", unmoved, ("none", "-", None))
    return judged(subject, statement, 0.0, MEAN_MARGIN, estimates, rivals)


def variance_verdict(
    subject: str, statement: str, rounds: Sequence[AtRound], wrong: Mapping[str, np.ndarray]
) -> Verdict:
    """Checks that the networks' variance, extrapolated to infinite width, equals the predicted one at every round.

    Args:
        subject: The setting.
        statement: Name of the comparison.
        rounds: Networks and predictions at each round.
        wrong: Wrong variances [K] at the last round, by name.
    """
    estimates, last, rivals = [_variance(f) for f in rounds], rounds[-1], []
    for name, law in wrong.items():
        away = abs(float(np.mean(last.law / law)) - 1)
        rivals.append(Rival(name, away, partial(_variance, last._replace(law=law))))
    return judged(subject, statement, 1.0, VARIANCE_MARGIN, estimates, rivals)


def _variance(followed: AtRound) -> Interval:
    return variance_ratio(followed.pairs, followed.exact, followed.law)
