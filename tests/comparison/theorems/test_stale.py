"""The rows on late answers: they hold, and the edge of stability is where a run's growth is 0."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent._src.comparison import linear_models
from fedtangent._src.comparison.theorems import stale


def test_the_edge_is_interpolated_between_both_sides() -> None:
    """A growth that is linear in the log of the rate, with its zero 3 % above the predicted edge; then none between."""
    sides = np.log([1 - stale.WIDE_SIDE, 1 + stale.WIDE_SIDE])
    growth = np.array([0.2, 5.0])[:, None] * (sides - np.log(1.03))
    np.testing.assert_allclose(stale._crossed(growth, stale.WIDE_SIDE), 1.03, rtol=1e-12)
    assert stale._crossed(growth + 10, stale.WIDE_SIDE).max() < 1 - stale.WIDE_SIDE


@pytest.mark.slow
def test_a_delay_that_is_one_round_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only near miss that is left is that of the delays, and the checks still have a control that fails."""
    every = linear_models.near_misses

    def of_delays(*arguments: object) -> dict[str, object]:
        return {name: flow for name, flow in every(*arguments).items() if name == "delays one round less"}

    monkeypatch.setattr(linear_models, "near_misses", of_delays)
    monkeypatch.setattr(stale, "LATE", dict(list(stale.LATE.items())[-1:]))
    monkeypatch.setattr(stale, "of_scale", lambda scale, default, paper: 4)
    (row,) = stale._check_rounds("default", 0)
    assert row.passed and "delays one round less" in row.control and float(row.control_measured) > 1e-3


@pytest.mark.slow
@pytest.mark.theory
@pytest.mark.parametrize("seed", [0, 1])
def test_every_row_holds(seed: int) -> None:
    rows = [*stale._check_rounds("default", seed), *stale._check_stability("default", seed)]
    assert len(rows) == len(stale.LATE) + 4 and [row for row in rows if not row.passed] == []
