"""Rows of the theorem table on Local-GD: what is checked holds, and every wrong theory is told apart."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from fedtangent._src.comparison.theorems import Claim, local_gd, local_gd_steps
from fedtangent._src.comparison.theorems.local_gd import Size

from ...nightly import nightly

pytestmark = pytest.mark.theory
SMALL = Size(3, 4, 30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_every_row(seed: int) -> None:
    rows = [row for check in (local_gd._check_regression, local_gd._check_max_margin) for row in check("default", seed)]
    assert len(rows) == 15
    assert [row for row in rows if not row.passed] == []


def test_the_closed_form_of_regression() -> None:
    problem = local_gd._regression(SMALL, 3)
    rows = local_gd._lemma_1(problem, 3), local_gd._lemma_1(problem, 2), local_gd._finite_steps(problem)
    for row in rows:
        assert row.passed, row


def test_where_regression_ends_and_how_fast() -> None:
    problem = local_gd._regression(SMALL, 3)
    for row in (local_gd._rate(problem), local_gd._limit(problem, 3), local_gd._limit(problem, 2)):
        assert row.passed, row
    # Fewer dimensions than examples: outside of the theorem, and the run ends elsewhere.
    narrow = local_gd._regression(Size(3, 4, 9), 3)
    assert local_gd._limit(narrow, 3).holds is False
    assert local_gd._rate(narrow).holds is False
    # As many dimensions as examples: the rate is right, but the theorem does not apply.
    square = local_gd._rate(local_gd._regression(Size(2, 2, 4), 3))
    assert abs(float(square.measured) - 1) < 1e-3
    assert square.holds is False


@pytest.mark.parametrize("modified", nightly([False, True], [True]))
def test_the_exponential_loss_is_simulated(modified: bool) -> None:
    row = local_gd._simulated_rounds(local_gd._classification(SMALL, 3), modified)
    assert row.passed, row


@pytest.mark.parametrize(
    "check",
    [
        local_gd._lemma_2_residual,
        local_gd._lemma_2_direction,
        partial(local_gd._lemma_3, from_zero=True),
        partial(local_gd._lemma_3, from_zero=False),
        local_gd._theorem_2,
        local_gd._theorem_3,
        local_gd._lemma_4,
    ],
)
def test_projections(check: partial) -> None:
    row = check(local_gd._classification(SMALL, 3))
    assert row.passed, row


def test_a_slope_is_told_from_another() -> None:
    claim, over = Claim("", "", ""), np.array([1.0, 2.0, 4.0, 8.0])
    for power, holds in ((-1, True), (-1.3, False), (-0.7, False)):
        assert local_gd._power_law(claim, over, 3 * over**power, ("", over), -1.0).holds is holds
    assert local_gd._power_law(claim, over, over**-1.0, ("", over**-1.2), -1.0).passed is False


def test_any_number_of_local_steps_ends_at_the_centralised_direction() -> None:
    case = local_gd_steps._any_steps(2**11, 3)
    for check in (local_gd_steps._direction, local_gd_steps._rate, local_gd_steps._stochastic):
        row = check(case)
        assert row.passed and row.control_fails, row
    # The models are those of a NumPy loop.
    x, y, nodes = case.problem.examples
    w = np.zeros(x.shape[1])
    for _ in range(2**11 // local_gd_steps.RECORDS):
        ends = []
        for i in range(nodes.num_clients):
            own, signed = w.copy(), (x * y[:, None])[nodes.client(i)]
            for _ in range(4):
                own += case.rate * signed.T @ np.exp(-signed @ own)
            ends.append(own)
        w = np.mean(ends, axis=0)
    assert case.paths[4][1] == pytest.approx(w, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_every_row_of_any_number_of_local_steps(seed: int) -> None:
    rows = local_gd_steps._check("default", seed)
    assert len(rows) == 4 and [row for row in rows if not row.passed] == []
