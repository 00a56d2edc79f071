"""Table I and corollary 1: the experiments' own comparisons at small sizes, and the fit to the published numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedtangent._src.comparison.theorems.fed_ensemble import bias_variance
from fedtangent._src.experiments.fed_ensemble import table1
from fedtangent._src.output.files import write_result
from fedtangent._src.theory.fed_ensemble.bias_variance import Estimate

from ..performed import performed

TABLE = ("num_clients=12", "num_models=1,2", "local_steps=3", "rounds=3,6", "ages=2", "scanned_schedules=2",
         "schedules=16", "draws=4")  # fmt: skip
COROLLARY = ("num_models=1,2", "num_clients=12", "local_steps=3", "num_rounds=6", "schedules=16", "draws=4",
             "widths=16", "network_clients=3", "network_rounds=3", "network_runs=4")  # fmt: skip


@pytest.mark.slow
def test_table_1_stands_beside_the_published_numbers(tmp_path: Path) -> None:
    outcome, metrics = performed("fed_ensemble.table1", TABLE, tmp_path)
    write_result(tmp_path, outcome.rows)
    assert outcome.failed == ()
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [(r["budget"], r["num_models"]) for r in rows] == [(b, k) for b in ("rounds", "ages") for k in (1, 2)]
    assert [r["published_variance"] for r in rows[:2]] == [0.0496, 0.0115]
    assert rows[3]["num_rounds"] == 2 * rows[2]["num_rounds"]
    assert metrics
    for check in outcome.details["checks"]:
        assert check["variance"] < 5 < check["control, variance not divided by K"]


@pytest.mark.slow
def test_corollary_1_has_the_slope_of_its_closed_form(tmp_path: Path) -> None:
    outcome, _ = performed("fed_ensemble.corollary1", COROLLARY, tmp_path)
    assert all(v.holds for v in outcome.verdicts)  # so few runs say little of a slope: its control may pass too
    assert outcome.verdicts[0].passed
    assert [v.sizes for v in outcome.verdicts] == ["linear toy", "linear toy", "erf, width 16"]
    slope = outcome.details["slopes"]["linear toy"]
    assert slope["closed_form"].slope == pytest.approx(-1, abs=0.02)
    assert abs(slope["simulated"].slope) > 5 * slope["simulated"].standard_error


def test_a_curve_made_of_the_published_numbers_is_found() -> None:
    """The fit recovers its own sigma and reading, and reports the distance of a curve that is off by a factor."""
    k = tuple(table1.PUBLISHED)
    bias, variance = np.array(list(table1.PUBLISHED.values())).T
    sigma = table1.SIGMAS[150]
    exact = table1.ScanCurve(0, 1, "rounds", 7, k, bias**2, 0.8 * variance / sigma**2, 0.2 * variance)
    off = exact._replace(
        length=8, initialisation=variance / sigma**2 * np.array([2, 0.5, 2, 0.5, 1]), schedules=0 * bias
    )
    fits = [table1._fit(c, reading) for c in (off, exact) for reading in table1.READINGS]
    best = min(fits, key=lambda f: f.distance)
    assert (best.length, best.reading, best.distance) == (7, "root", pytest.approx(0, abs=1e-9))
    assert best.sigma == pytest.approx(sigma)
    assert fits[1].variance_factor == pytest.approx(np.exp(np.sqrt(0.8) * np.log(2)), rel=0.01)
    assert fits[2].bias_factor > 5  # the squared bias is another number


@pytest.mark.slow
def test_simulation_is_the_closed_form_where_all_models_start_at_zero() -> None:
    problem = bias_variance.sine_problem(3, local_steps=4, sigma=0.0, num_clients=10)
    plan = bias_variance.permutations(10, 3)
    found = bias_variance.simulated(problem, plan, 5, (4, 9), 1)[:, 0]
    for seen, law in zip(found, bias_variance.laws_of(problem, plan, (5,), (4, 9)), strict=True):
        np.testing.assert_allclose(seen, law[0].mean, atol=1e-12)
        assert law[0].variance.max() == 0
    other = bias_variance.laws_of(problem, plan, (5,), (9,))[0][0].mean
    assert np.abs(found[0] - other).max() > 1e-3  # another schedule


def test_the_fitted_slope_is_weighted() -> None:
    line = {k: Estimate(3 * k**-1.2, 0.01 * 3 * k**-1.2) for k in (1, 2, 8)}
    found = bias_variance.power_law(line)
    assert found.slope == pytest.approx(-1.2) and 0 < found.standard_error < 0.02
    outlier = bias_variance.power_law(line | {4: Estimate(50.0, 5000.0)})
    assert outlier.slope == pytest.approx(-1.2, abs=1e-3)
    with pytest.raises(ValueError, match="variances: got"):
        bias_variance.power_law({1: Estimate(1.0, 0.1), 2: Estimate(-1.0, 0.1)})
