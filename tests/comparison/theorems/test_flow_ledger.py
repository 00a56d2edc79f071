"""The ledger's slope is decided by its interval: more noise leaves it undecided, and never makes it right."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fedtangent._src.comparison.ledger import ResidualLedger
from fedtangent._src.comparison.settings import Scale
from fedtangent._src.comparison.theorems import flow
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.theory.flow import Rule

from ...stand_ins import stand_in

WIDTHS = (256, 1024, 4096)


def judged(slope: float, noise: float, wrong: float = 0.0) -> Verdict:
    """The verdict on 8 gaps a width that fall at ``slope``, those to any wrong theory at ``wrong``."""
    rng, size = np.random.default_rng(0), Scale(WIDTHS, 8, 24)

    def ledger(width: int, scatter: float) -> ResidualLedger:
        def last_gap(learning_rate: float) -> float:
            return width ** (slope if learning_rate == 1 else wrong) * scatter

        return stand_in(ResidualLedger, federation=SimpleNamespace(rule=Rule(1, 1.0)), last_gap=last_gap)

    scatter = {w: np.exp(noise * rng.standard_normal(8)) for w in WIDTHS}
    return flow._slope_check(size, {w: [ledger(w, z) for z in scatter[w]] for w in WIDTHS})


@pytest.mark.parametrize(
    ("slope", "noise", "holds"),
    [
        (-0.9, 0.3, True),
        (-0.45, 0.01, True),
        (-0.45, 0.3, None),
        (-0.9, 2.0, None),
        (-0.2, 2.0, None),
        (-0.2, 0.1, False),
    ],
)
def test_a_slope_holds_where_its_whole_interval_does(slope: float, noise: float, holds: bool | None) -> None:
    assert judged(slope, noise).holds is holds


@pytest.mark.parametrize(("wrong", "fails"), [(0.0, True), (-0.4, None), (-0.9, False)])
def test_so_does_a_wrong_theorys(wrong: float, fails: bool | None) -> None:
    assert judged(-0.9, 0.2, wrong).control_fails is fails
