"""Each verdict accepts the right theory, and passes only if its negative control fails."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent.compare import verdicts as vd

WIDTHS = np.array([32, 64, 128, 256])
K, E, M, C = 3, 24, 6, 2


def networks(rng: np.random.Generator, mean: np.ndarray, cov: np.ndarray, width: int, excess: float) -> np.ndarray:
    """Samples [K, E, M, C] whose variance is ``1 + excess / width`` times the limit's."""
    root = np.linalg.cholesky(cov * (1 + excess / width))
    return mean[:, None] + np.einsum("kij,kejc->keic", root, rng.standard_normal((K, E, M, C)))


def errors(slope: float) -> list[np.ndarray]:
    """Relative errors of three networks a width."""
    return [2.0 * w**slope * np.array([0.9, 1.0, 1 / 0.9]) for w in WIDTHS.astype(float)]


@pytest.fixture
def sampled() -> vd.Sampled:
    rng = np.random.default_rng(11)
    root = rng.standard_normal((K, M, M)) / 3 + np.eye(M)
    mean, cov = rng.standard_normal((K, M, C)), root @ root.transpose(0, 2, 1)
    samples = tuple(networks(rng, mean, cov, int(w), excess=20.0) for w in WIDTHS)
    return vd.Sampled(tuple(int(w) for w in WIDTHS), samples, mean, cov)


def test_mean_verdict(sampled: vd.Sampled) -> None:
    right = vd.mean_verdict("s", "mean", sampled, "untrained", sampled.mean + 2.0)
    assert right.passed
    wrong = vd.mean_verdict("s", "mean", sampled._replace(mean=sampled.mean + 2.0), "untrained", sampled.mean)
    assert not wrong.holds
    assert not wrong.passed


def test_variance_verdict_allows_for_the_finite_width_term(sampled: vd.Sampled) -> None:
    right = vd.variance_verdict("s", "variance", sampled, "thrice", 3 * sampled.cov)
    assert right.passed
    wrong = vd.variance_verdict("s", "variance", sampled._replace(cov=np.broadcast_to(np.eye(M) * 9, (K, M, M))), "c",
                                sampled.cov)  # fmt: skip
    assert not wrong.passed


def test_a_control_that_passes_too_is_no_pass(sampled: vd.Sampled) -> None:
    for verdict in (
        vd.mean_verdict("s", "mean", sampled, "the same", sampled.mean),
        vd.variance_verdict("s", "variance", sampled, "the same", sampled.cov),
        vd.slope_verdict("s", tuple(WIDTHS), errors(-0.5), "the same", errors(-0.5)),
        vd.exact_verdict("s", "equal", 1e-12, {"the same": 1e-12, "wrong": 0.3}, vd.EXACT),
    ):
        assert verdict.holds
        assert not verdict.control_fails
        assert not verdict.passed


@pytest.mark.parametrize(("slope", "agrees"), [(-0.5, True), (-0.41, True), (-0.39, False), (-0.61, False), (0, False)])
def test_slope_verdict(slope: float, agrees: bool) -> None:
    verdict = vd.slope_verdict("s", tuple(WIDTHS), errors(slope), "wrong", errors(0.0))
    assert (verdict.holds, verdict.control_fails, verdict.passed) == (agrees, True, agrees)
    assert f"{slope:+.3f}" in verdict.measured


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


def test_paired_verdict() -> None:
    rng = np.random.default_rng(12)
    small = 0.01 * rng.standard_normal((K, E, M, C))
    right = vd.paired_verdict("s", "paired", small, "shifted", small + 0.1)
    assert right.passed
    swapped = vd.paired_verdict("s", "paired", small + 0.1, "right", small)
    assert not swapped.holds
    assert not swapped.control_fails


def test_all_verdicts_in_one_line_and_as_rows() -> None:
    right = vd.Verdict("s", "one is one", "1", "1 +- 0", True, "two", "2", True, "n = 1")
    wrong, unclear = right._replace(holds=False), right._replace(control_fails=False)
    assert "agree in all 2 comparisons" in vd.summary([right, right])
    assert "Inconclusive: 1 of 2 negative controls pass too" in vd.summary([right, unclear])
    assert "DISAGREE in 1 of 3" in vd.summary([right, wrong, unclear])
    assert [row["passed"] for row in vd.as_rows([right, wrong, unclear])] == [True, False, False]
    assert vd.as_rows([right])[0] == {**right._asdict(), "passed": True}
