"""Each verdict accepts the right theory, and passes only if its negative control fails."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent._src.comparison import verdicts as vd
from fedtangent._src.comparison.simulated import Simulated
from fedtangent._src.comparison.statistics import Interval, Pair

from ..stand_ins import stand_in

WIDTHS = (32, 64, 128, 256)
K, E, M, C = 3, 24, 6, 2


def followed(shift: float = 0.0, wider: float = 1.0, scatter: float = 0.1) -> vd.AtRound:
    """Networks of unit variance beside predictions that are ``shift`` from their mean."""
    rng, pairs = np.random.default_rng(11), []
    for width in WIDTHS:
        predicted = rng.standard_normal((K, E, M, C))
        noise = scatter * rng.standard_normal(predicted.shape) / np.sqrt(width)
        pairs.append(Pair(width, wider * predicted + noise, predicted - shift))
    ones = np.full(K, float(M))
    return vd.AtRound(tuple(pairs), ones, ones, 10.0)


def estimates(*values: float, radius: float = 0.01) -> list[Interval]:
    return [Interval.about(value, radius) for value in values]


def rival(distance: float, radius: float = 0.01) -> vd.Rival:
    return vd.Rival(f"{distance} off", distance, lambda: Interval.about(distance, radius))


def test_the_nearest_theory_that_can_be_told_is_the_control() -> None:
    found = vd.judged("s", "zero", 0.0, 0.1, estimates(0.02, 0.03), [rival(0.5), rival(0.13), rival(0.11)])
    assert (found.holds, found.control_fails, found.passed) == (True, True, True)
    assert (found.control, found.measured, found.notices) == ("0.13 off", "0.030 (0.020 to 0.040)", "0.12")
    # one whose own interval is wide is left alone, and the next is taken
    found = vd.judged("s", "zero", 0.0, 0.1, estimates(0.02), [rival(0.5), rival(0.13, radius=0.1)])
    assert found.control == "0.5 off"


def test_without_power_a_verdict_is_undecided_and_not_right() -> None:
    found = vd.judged("s", "zero", 0.0, 0.1, estimates(0.0), [rival(0.11)])
    assert (found.holds, found.control_fails, found.passed) == (True, None, None)
    assert "none of 1" in found.control
    noisy = vd.judged("s", "zero", 0.0, 0.1, estimates(0.05, radius=0.06), [rival(0.5)])
    assert (noisy.holds, noisy.passed) == (None, None)


def test_one_round_outside_is_not_hidden_by_a_noisier_one() -> None:
    found = vd.judged("s", "zero", 0.0, 0.1, [Interval.about(0.2, 0.05), Interval.about(0.1, 0.3)], [rival(0.9)])
    assert (found.holds, found.measured) == (False, "0.200 (0.150 to 0.250)")


def test_a_wrong_theory_disagrees_and_a_rival_that_is_right_is_no_control() -> None:
    assert vd.judged("s", "zero", 0.0, 0.1, estimates(0.3), [rival(0.5)]).passed is False
    same = vd.Rival("said to be far", 0.5, lambda: Interval.about(0.0, 0.01))
    found = vd.judged("s", "zero", 0.0, 0.1, estimates(0.0), [same])
    assert (found.holds, found.control_fails, found.passed) == (True, False, False)


def test_mean_verdict() -> None:
    right, wrong, away = followed(), followed(shift=0.2), np.full((M, C), 0.2)
    found = vd.mean_verdict("s", "mean", [right], {"shifted": [away], "far": [5 * away]})
    assert found.passed and found.control == "shifted"
    swapped = vd.mean_verdict("s", "mean", [wrong], {"right": [away]})
    assert (swapped.holds, swapped.control_fails) == (False, False)
    assert vd.mean_verdict("s", "mean", [right, wrong], {"shifted": [away, away]}).holds is False  # at one round


def test_a_round_in_which_the_prediction_has_not_moved_is_left_out_of_the_mean() -> None:
    right, away = followed(), np.full((M, C), 0.2)
    still = right._replace(scale=0.0)
    found = vd.mean_verdict("s", "mean", [still, right], {"shifted": [away, away]})
    assert found == vd.mean_verdict("s", "mean", [right], {"shifted": [away]}) and found.passed
    for nothing in (0.0, np.nan):
        assert vd.mean_verdict("s", "mean", [right._replace(scale=nothing)], {"shifted": [away]}).passed is None


def test_variance_verdict() -> None:
    right, wider = followed(), followed(wider=1.5)
    laws = {"a tenth": 0.9 * right.law, "half": 0.5 * right.law}
    found = vd.variance_verdict("s", "variance", [right], laws)
    assert found.passed and found.control == "half"  # a tenth is within the margin
    assert vd.variance_verdict("s", "variance", [wider], laws).holds is False


def errors(slope: float, scatter: float = 0.3) -> tuple[list[Simulated], list[np.ndarray]]:
    """Networks of every width, and unit predictions that are off by ``width^slope``."""
    rng, seen = np.random.default_rng(5), []
    one = np.ones((K, E, M, C))
    for width in WIDTHS:
        off = float(width) ** slope * np.exp(scatter * rng.standard_normal((K, E, 1, 1)))
        seen.append(stand_in(Simulated, test=np.stack([0 * one, one + off])))  # initial functions are 0
    return seen, [one[None]] * len(WIDTHS)


@pytest.mark.parametrize(("slope", "holds"), [(-0.5, True), (-0.1, False), (-1.0, False), (0.0, False)])
def test_slope_verdict(slope: float, holds: bool) -> None:
    seen, right = errors(slope)
    wrong = {"slightly": [p - 1e-3 for p in right], "off": [p + 1.0 for p in right]}
    verdict = vd.slope_verdict("s", WIDTHS, seen, right, wrong)  # type: ignore[arg-type]
    assert verdict.holds is holds
    if holds:
        assert verdict.passed and verdict.control == "off"


def test_a_slope_of_few_networks_is_undecided() -> None:
    seen, right = errors(-0.5, scatter=3.0)
    verdict = vd.slope_verdict("s", WIDTHS, seen, right, {"off": [p + 1.0 for p in right]})  # type: ignore[arg-type]
    assert verdict.holds is None and verdict.passed is None


def test_initial_functions_of_the_wrong_weights_are_seen() -> None:
    rng = np.random.default_rng(6)
    squares = [rng.standard_normal(1000) ** 2 for _ in WIDTHS]
    found = vd.initial_verdict("s", WIDTHS, {"all": squares})
    assert found.passed and found.control == "weights x 1.6"
    wrong = [1.6**2 * s for s in squares]
    assert vd.initial_verdict("s", WIDTHS, {"all": wrong}).holds is False
    assert vd.initial_verdict("s", WIDTHS, {"all": squares, "one": wrong}).holds is False


def test_networks_that_start_as_one_are_seen() -> None:
    first, second = np.random.default_rng(7).standard_normal((2, len(WIDTHS), 1000))
    squares, apart = list(first**2), list(first * second)
    found = vd.independence_verdict("s", WIDTHS, {"draws": apart, "widths": apart[-1:]}, squares)
    assert found.passed and found.control == "the same start"
    for same in ({"draws": squares}, {"draws": apart, "widths": squares[-1:]}):
        assert vd.independence_verdict("s", WIDTHS, same, squares).holds is False


def test_answers_of_numpy_count() -> None:
    found = vd.Verdict.of("s", "one is two", "", ("1", "2", np.bool_(False)), ("three", "3", np.bool_(False)))  # type: ignore[arg-type]
    assert found.passed is False and "DISAGREE" in vd.summary([found])


def test_a_control_that_passes_too_is_no_pass() -> None:
    verdict = vd.exact_verdict("s", "equal", 1e-12, {"the same": 1e-12, "wrong": 0.3}, vd.EXACT)
    assert (verdict.holds, verdict.control_fails, verdict.passed) == (True, False, False)


@pytest.mark.parametrize(("error", "agrees"), [(0.0, True), (1e-9, True), (2e-9, False), (float("nan"), False)])
def test_exact_verdict(error: float, agrees: bool) -> None:
    verdict = vd.exact_verdict("s", "equal", error, {"one client dropped": 0.3}, vd.EXACT)
    assert (verdict.holds, verdict.control_fails, verdict.passed) == (agrees, True, agrees)


def test_a_control_that_is_not_a_number_proves_nothing() -> None:
    assert not vd.exact_verdict("s", "equal", 0.0, {"a": 0.1, "c": float("nan"), "b": 0.2}, vd.EXACT).control_fails


@pytest.mark.parametrize(("nearest", "fails"), [(2e-6, True), (1e-6, False), (2e-9, False)])
def test_the_nearest_control_is_shown_and_must_be_orders_of_magnitude_away(nearest: float, fails: bool) -> None:
    verdict = vd.exact_verdict("s", "equal", 0.0, {"far": 0.3, "near": nearest, "farther": 0.4}, vd.EXACT)
    assert verdict.control == "near: nearest of 3"
    assert verdict.control_measured == f"{nearest:.1e}"
    assert verdict.control_fails is fails


def test_all_verdicts_in_one_line_and_as_rows() -> None:
    right = vd.Verdict("s", "one is one", "1", "1 +- 0", True, "two", "2", True, "n = 1")
    wrong, unclear = right._replace(holds=False), right._replace(control_fails=False)
    assert "agree in all 2 comparisons" in vd.summary([right, right])
    assert "Inconclusive: 1 of 2 negative controls pass too" in vd.summary([right, unclear])
    assert "DISAGREE in 1 of 3" in vd.summary([right, wrong, unclear])
    assert [row["passed"] for row in vd.as_rows([right, wrong, unclear])] == [True, False, False]
    assert "DISAGREE in 1 of 2 comparisons; 1 of 2 negative controls pass too" in vd.summary([wrong, unclear])
    open_ = right._replace(control_fails=None)
    assert "agree in 1 of 2 comparisons, whose wrong theories fail; 1 undecided" in vd.summary([right, open_])
    assert vd.summary([open_]) == "1 undecided, because the wrong theory is too near to tell apart"
    assert vd.summary([right._replace(holds=None)]) == "1 undecided, for too few draws"
    assert "Inconclusive: 1 of 2 negative controls pass too; 1 undecided" in vd.summary([unclear, open_])
    assert open_.passed is None and right._replace(holds=None, control_fails=False).passed is False
    assert vd.as_rows([right])[0] == {**right._asdict(), "passed": True}
    assert vd.undecided([right, wrong, unclear, open_]) == ("one is one [s]",)
