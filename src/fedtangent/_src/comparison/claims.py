"""Tests that networks follow theory: which verdicts must agree, and how near networks of a width must be to theory."""

from __future__ import annotations

import unittest
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from fedtangent._src.checks import number
from fedtangent._src.comparison.comparing import Compared
from fedtangent._src.comparison.outcomes import Gap
from fedtangent._src.comparison.simulated import Simulated
from fedtangent._src.comparison.statistics import combined, relative_errors
from fedtangent._src.comparison.verdicts import Rival, Verdict, judged
from fedtangent._src.intervals import Interval

Nearness = float | Mapping[int, float]


class UndecidedWarning(UserWarning):
    """Warning that some verdicts of a test are undecided, while none of them fails."""


def assert_follows_theory(
    compared: Compared, *, agree: Sequence[str] | None = None, within: Nearness | None = None
) -> tuple[Verdict, ...]:
    """Asserts that networks agree with theory, and that wrong theories, the negative controls, do not.

    A test of an algorithm calls ``compare`` and then this function. Under pytest a test is skipped if all its verdicts
    are undecided. If some are, ``UndecidedWarning`` is issued, and the test fails with
    ``-W error::fedtangent.testing.UndecidedWarning``.

    Args:
        compared: Result of ``fedtangent.compare``.
        agree: Which verdicts are checked: words that their statements contain, such as "slope" or "linearised network";
            default: all verdicts.
        within: Largest distance of a network from its prediction at the last round, on average over networks, relative
            to how far the prediction moved: a number for the widest networks, or a mapping from width to number. Each
            adds a verdict, whose control is the prediction of an earlier round.

    Returns:
        The checked verdicts. None of them fails.

    Raises:
        AssertionError: A verdict fails, or its control passes; the message says by how much, and names the control.
        ValueError: The comparison has no such verdict or width, or no verdict at all; or a distance is not above 0.
        unittest.SkipTest: All verdicts are undecided.
    """
    verdicts = claimed_verdicts(compared, agree, within)
    failed = [f"{v.statement}: {v.finding}" for v in verdicts if v.passed is False]
    if failed:
        counted = f"{len(failed)} of {len(verdicts)} comparisons with theory fail"
        raise AssertionError("\n".join([f"{compared.setting.title}: {counted}", *failed]))
    unclear = [f"{v.statement}: {v.finding}" for v in verdicts if v.passed is None]
    if unclear:
        text = "\n".join([f"{compared.setting.title}: {len(unclear)} of {len(verdicts)} are undecided", *unclear])
        warnings.warn(text, UndecidedWarning, stacklevel=2)
        if len(unclear) == len(verdicts):
            raise unittest.SkipTest(text)
    return verdicts


def claimed_verdicts(
    compared: Compared, agree: Sequence[str] | None = None, within: Nearness | None = None
) -> tuple[Verdict, ...]:
    """Returns the verdicts that ``assert_follows_theory`` checks.

    Args:
        compared, agree, within: As for ``assert_follows_theory``, whose ``ValueError`` this raises.
    """
    statements = [verdict.statement for verdict in compared.verdicts]
    for words in agree or ():
        if not any(words in statement for statement in statements):
            raise ValueError(f"agree: got {words!r}, must be words of a verdict: {'; '.join(statements) or 'none'}")
    verdicts = [v for v in compared.verdicts if agree is None or any(words in v.statement for words in agree)]
    sides = {networks.width: (networks, gap) for networks, gap in zip(compared.simulated, compared.gaps, strict=True)}
    tolerances: Mapping[int, float] = {}
    if within is not None:
        tolerances = within if isinstance(within, Mapping) else {max(sides): within}
    for width, tolerance in tolerances.items():
        check_width(width, sides)
        verdicts.append(_near(compared, *sides[width], number("within", tolerance, above=0)))
    if not verdicts:
        raise ValueError(f"within: got none, must be a number, because there is no other verdict: {compared.notes[0]}")
    return tuple(verdicts)


def check_width(width: int, widths: Iterable[int]) -> None:
    """Raises ``ValueError`` if a claim has a tolerance for a width that no network has.

    Args:
        width: The width in the claim.
        widths: Widths of the networks.
    """
    if width not in (allowed := list(widths)):
        raise ValueError(f"within: got width {width}, allowed are {', '.join(map(str, allowed))}")


def _near(compared: Compared, networks: Simulated, gap: Gap, tolerance: float) -> Verdict:
    """Checks that networks end on average within ``tolerance`` of their prediction; ``gap`` has the predictions.

    The distance is relative to how far the prediction moved. Controls are the predictions of earlier rounds.
    """
    last = gap.test[-1]
    moved, estimate = last - networks.test[0], _distance(gap.error[-1])
    rivals = []
    for at, round_ in enumerate(networks.rounds[:-1]):
        name = f"prediction of round {round_}" if round_ else "untrained network"
        apart = float(np.mean(relative_errors(gap.test[at], last, moved)))
        errors = relative_errors(gap.test[at], networks.test[-1], moved)
        rivals.append(Rival(name, apart, partial(_distance, errors)))
    statement = f"distance of each network from its prediction, round {networks.rounds[-1]}{networks.of_width}"
    return judged(compared.setting.name, statement, 0.0, tolerance, [estimate], rivals)


def _distance(errors: np.ndarray) -> Interval:
    """Estimates the mean error of a network, with its interval, from K models in E draws (initialisations), [K, E].

    The interval of a single draw has length 0.
    """
    of_draws = errors.mean(axis=0)
    if len(of_draws) == 1:
        return Interval.about(float(of_draws[0]), 0.0)
    estimate = combined([1], [of_draws])
    return estimate._replace(low=max(estimate.low, 0.0))
