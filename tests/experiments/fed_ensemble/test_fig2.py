"""Fig. 2: bands, their scores where there are data and where not, and the claim's parts."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import stats

from fedtangent._src.experiments.fed_ensemble import fig2
from fedtangent._src.experiments.fed_ensemble.fig2 import Band
from fedtangent._src.experiments.lab import MeanInterval, sine

from ..performed import performed

GRID = np.linspace(-1, 1, 41)[:, None]
TRUTH = np.sin(2 * np.pi * GRID)


def test_bands_of_models_and_of_processes() -> None:
    rng = np.random.default_rng(0)
    members = rng.normal(size=(4, 41, 1))
    band = fig2._band_of_members(members, 0.3)
    np.testing.assert_allclose(band.sd, np.sqrt(members.var(axis=0)[:, 0] + 0.3), rtol=1e-12)
    np.testing.assert_allclose(fig2._band_of_members(members[:1], 0.3).sd, np.sqrt(0.3), rtol=1e-12)  # constant
    means, roots = rng.normal(size=(3, 41, 1)), rng.normal(size=(3, 41, 5))
    band = fig2._band_of_processes(means, roots @ roots.swapaxes(1, 2))
    draws = means + roots @ rng.normal(size=(20_000, 3, 5, 1))
    spread = draws[..., 0].reshape(-1, 41).var(axis=0)
    np.testing.assert_allclose(band.sd**2, spread, rtol=0.1)
    np.testing.assert_allclose(band.mean, means.mean(axis=0)[:, 0], rtol=1e-12)


def test_scores_against_counts_and_draws() -> None:
    rng = np.random.default_rng(1)
    band = Band(rng.normal(size=41), rng.uniform(0.5, 2, 41), np.zeros((0, 41)))
    found = fig2._scores(band, GRID, TRUTH)
    amplitude, noise = rng.normal(1, 0.2, (40_000, 1)), rng.normal(0, 0.2, (40_000, 41))
    y = amplitude * TRUTH[:, 0] + noise  # FE-2024, section V-A
    nll = -stats.norm.logpdf(y, band.mean, band.sd)
    for name, at in (("data", np.abs(GRID[:, 0]) > 0.49), ("gap", np.abs(GRID[:, 0]) < 0.49)):
        low, high = (band.mean + z * band.sd for z in stats.norm.ppf([0.025, 0.975]))
        inside = (low <= TRUTH[:, 0]) & (TRUTH[:, 0] <= high)
        assert found[f"coverage.{name}"] == pytest.approx(inside[at].mean())
        assert found[f"width.{name}"] == pytest.approx((high - low)[at].mean())
        error = nll[:, at].mean(axis=1).std() / 200
        assert abs(found[f"nll.{name}"] - nll[:, at].mean()) < 4 * error
    assert found["ratio"] == pytest.approx(found["width.gap"] / found["width.data"])
    flat = fig2._scores(Band(TRUTH[:, 0], np.zeros(41), np.zeros((0, 41))), GRID, TRUTH)
    assert flat["nll.data"] == np.inf and flat["coverage.gap"] == 1.0


def test_intervals_over_seeds() -> None:
    values = [1.0, 2.0, 4.0, 4.5]
    found = fig2._summary("width.gap", values)
    interval = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    np.testing.assert_allclose(found, [np.mean(values), interval.low, interval.high], rtol=1e-12)
    ratio = fig2._summary("ratio", values)
    logs = stats.ttest_1samp(np.log(values), 0).confidence_interval(0.95)
    np.testing.assert_allclose(ratio, [stats.gmean(values), *np.exp(logs)], rtol=1e-12)
    shares = fig2._summary("coverage.gap", [1.0, 0.5, 0.9, 0.0])
    wilson = stats.binomtest(60, 100).proportion_ci(method="wilson")  # more points, a narrower interval
    assert shares.mean == pytest.approx(0.6) and shares.low < wilson.low < wilson.high < shares.high <= 1
    assert np.isnan(fig2._summary("nll.gap", [1.0, np.inf]).low)


def test_the_claim_can_fail_in_each_part() -> None:
    def table(ratio: float, own: float, single: float) -> dict[str, dict[str, MeanInterval]]:
        def near(mean: float) -> MeanInterval:
            return MeanInterval(mean, mean - 0.1, mean + 0.1)

        return {
            fig2.ENSEMBLE: {"ratio": near(ratio), "coverage.gap": near(own)},
            fig2.AVERAGE: {"ratio": near(1.0), "coverage.gap": near(single)},
        }

    def verdicts(*means: float) -> list[str]:
        return [claim.verdict for claim in fig2.judge(table(*means))]

    assert verdicts(9, 1.06, 0.2) == ["seen", "seen", "seen"]
    assert verdicts(0.8, 0.5, 1.2) == ["not seen", "not seen", "not seen"]
    assert verdicts(1.05, 0.99, 0.9) == ["undecided", "undecided", "undecided"]


@pytest.mark.slow
def test_the_experiment_shows_the_gap_and_its_simulation_is_the_flow(tmp_path: Path) -> None:
    changes = ("num_clients=8", "spacing=0.03", "num_models=3", "num_rounds=40")
    with jax.enable_x64(False):
        outcome, kept = performed("fed_ensemble.fig2", changes, tmp_path)
    assert outcome.failed == () and len(outcome.sheets) == 2
    assert [v.passed for v in outcome.verdicts] == [True]  # to 1e-9, and the flow's mean alone is far
    found = {(row["method"], row["score"]): row["mean"] for row in outcome.rows}
    assert {method for method, _ in found} == {fig2.AVERAGE, fig2.ENSEMBLE, fig2.WITH_NOISE, fig2.FLOW, fig2.LIMIT}
    assert found[fig2.AVERAGE, "ratio"] == pytest.approx(1)
    assert found[fig2.ENSEMBLE, "ratio"] > 5 and found[fig2.FLOW, "ratio"] > 5 and found[fig2.LIMIT, "ratio"] > 5
    assert found[fig2.WITH_NOISE, "width.data"] > found[fig2.ENSEMBLE, "width.data"]
    ends = {(row["method"], row["score"]): (row["low_95"], row["high_95"]) for row in outcome.rows}
    assert (outcome.claims[0].verdict == "seen") == (ends[fig2.ENSEMBLE, "ratio"][0] > 1)
    assert (outcome.claims[2].verdict == "seen") == (ends[fig2.AVERAGE, "coverage.gap"][1] < 0.95)
    assert len(kept) == 2 * 5 * 7


def test_a_simulation_that_is_not_the_flow_does_not_count() -> None:
    held = sine.load(0, 4, 2, gap=True)
    right, wrong = (fig2.GapCase(0, held, {}, {}, distance, 0.5, "") for distance in (1e-12, 1e-6))
    assert fig2.exact([right]).passed and not fig2.exact([right, wrong]).holds
    assert not fig2.exact([right, right._replace(wrong=1e-8)]).control_fails
