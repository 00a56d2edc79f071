"""A user's test that an algorithm follows theory: which verdicts it judges, and how near networks must be."""

from __future__ import annotations

import unittest
import warnings

import numpy as np
import pytest
import scipy

import fedtangent as ft
from fedtangent._src.comparison.claims import claimed_verdicts
from fedtangent._src.comparison.side_by_side import Comparison
from fedtangent._src.comparison.verdicts import Verdict

RIGHT = Verdict("S", "slope against width", "1", "1 +- 0", True, "one is two", "2", True)
UNCLEAR = RIGHT._replace(statement="mean = flow", holds=None)


def having(result: Comparison, *verdicts: Verdict) -> Comparison:
    return result._replace(verdicts=verdicts)


def distances(result: Comparison, width: int) -> list[float]:
    """The distance of each network of a width from its prediction at the last round, by a plain loop."""
    (networks, gap), *_ = (pair for pair in zip(result.simulated, result.gaps, strict=True) if pair[0].width == width)
    found = []
    for draw in range(networks.test.shape[2]):
        apart = []
        for k in range(networks.test.shape[1]):
            right, mine, start = gap.test[-1][k, draw], networks.test[-1][k, draw], networks.test[0][k, draw]
            apart.append(np.sqrt(np.sum((mine - right) ** 2) / np.sum((right - start) ** 2)))
        found.append(float(np.mean(apart)))
    return found


def at_distances(result: Comparison, errors: np.ndarray) -> Comparison:
    """The result with its widest networks [K, E] moved to these distances from their predictions at the last round."""
    networks, gap, rng = result.simulated[-1], result.gaps[-1], np.random.default_rng(0)
    moved, away = gap.test[-1] - networks.test[0], rng.normal(size=gap.test[-1].shape)
    norm, unit = (np.sqrt(np.sum(array**2, axis=(-2, -1), keepdims=True)) for array in (moved, away))
    test, error = networks.test.copy(), gap.error.copy()
    test[-1], error[-1] = gap.test[-1] + away / unit * norm * errors[..., None, None], errors
    simulated = *result.simulated[:-1], networks._replace(test=test)
    return result._replace(simulated=simulated, gaps=(*result.gaps[:-1], gap._replace(error=error)))


def test_how_near_networks_of_a_width_are(network_result: Comparison) -> None:
    models, draws = network_result.gaps[-1].error.shape[1:]
    side = at_distances(having(network_result), np.linspace(0.09, 0.11, models * draws).reshape(models, draws))
    width = side.simulated[-1].width
    errors = np.array(distances(side, width))
    middle = float(errors.mean())
    assert middle == pytest.approx(0.1, rel=1e-6)
    radius = float(scipy.stats.t.ppf(1 - 5e-5, len(errors) - 1) * errors.std(ddof=1) / np.sqrt(len(errors)))
    (verdict,) = claimed_verdicts(side, within=middle + 1.01 * radius)
    assert verdict.measured == f"{middle:.3f} ({middle - radius:.3f} to {middle + radius:.3f})"
    assert verdict.statement.endswith(f"width {width}")
    assert verdict.holds and verdict.control_fails and verdict.passed, verdict
    (wrong,) = claimed_verdicts(side, within=0.99 * (middle - radius))
    assert wrong.holds is False
    (unclear,) = claimed_verdicts(side, within=middle)
    assert unclear.holds is None
    (lax,) = claimed_verdicts(side, within=2.0)  # so is an untrained network: it shows nothing
    assert lax.holds and lax.control_fails is None and lax.passed is None


def test_every_width_may_have_a_tolerance(network_result: Comparison) -> None:
    widths = [networks.width for networks in network_result.simulated]
    narrow, *_, wide = (float(np.mean(distances(network_result, width))) for width in widths)
    assert wide < narrow
    found = claimed_verdicts(having(network_result, RIGHT), within={widths[0]: wide / 2, widths[-1]: wide / 2})
    assert [v.statement.split()[-1] for v in found[1:]] == [str(widths[0]), str(widths[-1])]
    with pytest.raises(ValueError, match=f"within: got width 7, allowed are {widths[0]}, "):
        claimed_verdicts(network_result, within={7: 0.1})
    with pytest.raises(ValueError, match="within: got 0, must be above 0"):
        claimed_verdicts(network_result, within=0)


def test_what_fails_is_named_with_its_control(network_result: Comparison) -> None:
    failing = RIGHT._replace(statement="mean = flow", holds=False, measured="3")
    side = having(network_result, RIGHT, failing)
    with pytest.raises(AssertionError) as caught:
        ft.testing.assert_follows_theory(side)
    title, line = str(caught.value).splitlines()
    assert title == f"{side.setting.title}: 1 of 2 comparisons with theory fail"
    assert line == "mean = flow: measured 3, expected 1 +- 0; control: one is two: 2, fails, as it must"
    assert ft.testing.assert_follows_theory(side, agree=["slope"]) == (RIGHT,)
    with pytest.raises(AssertionError, match="PASSES TOO: inconclusive"):
        ft.testing.assert_follows_theory(having(network_result, RIGHT._replace(control_fails=False)))
    with pytest.raises(ValueError, match="agree: got 'slop of', must be words of a verdict: slope against width; mean"):
        ft.testing.assert_follows_theory(side, agree=["slope", "slop of"])
    with pytest.raises(ValueError, match="within: got none, must be a number, because there is no other verdict"):
        ft.testing.assert_follows_theory(having(network_result))


def test_an_undecided_verdict_warns_and_nothing_decided_skips(network_result: Comparison) -> None:
    with pytest.warns(ft.testing.UndecidedWarning, match="1 of 2 are undecided\nmean = flow: measured 1"):
        assert len(ft.testing.assert_follows_theory(having(network_result, RIGHT, UNCLEAR))) == 2
    with pytest.warns(ft.testing.UndecidedWarning), pytest.raises(unittest.SkipTest, match="1 of 1 are undecided"):
        ft.testing.assert_follows_theory(having(network_result, UNCLEAR))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ft.testing.assert_follows_theory(having(network_result, RIGHT)) == (RIGHT,)


def test_the_seconds_of_all_steps_add_up(network_result: Comparison) -> None:
    times = network_result.times
    assert network_result.seconds == sum(times.values()) and len(times) >= 5
    assert all(seconds >= 0 for seconds in times.values()) and not any(name.startswith("sine") for name in times)
