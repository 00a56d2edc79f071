"""The ledger's slope is decided by its interval: more noise leaves it undecided, and never makes it right."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent._src.comparison.ledger import ResidualLedger
from fedtangent._src.comparison.settings import Scale
from fedtangent._src.comparison.theorems import flow
from fedtangent._src.comparison.verdicts import Verdict

from ...stand_ins import stand_in

WIDTHS = (256, 1024, 4096)


def judged(patch: pytest.MonkeyPatch, slope: float, noise: float, wrong: float = 0.0) -> Verdict:
    """The verdict on 8 gaps a width that fall at ``slope``, those to any wrong theory at ``wrong``."""
    rng, size = np.random.default_rng(0), Scale(WIDTHS, 8, 24)
    scatter = {w: np.exp(noise * rng.standard_normal(8)) for w in WIDTHS}
    ledgers = {w: [stand_in(ResidualLedger, gaps=(w**slope * z, w**wrong * z)) for z in scatter[w]] for w in WIDTHS}
    patch.setattr(flow, "_last_gaps", lambda same, rounds: np.array([of.gaps[0] for of in same]))
    patch.setattr(flow, "_wrong_rate", lambda of, factor: stand_in(ResidualLedger, gaps=of.gaps[::-1]))
    return flow._slope_check(size, ledgers)


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
def test_a_slope_holds_where_its_whole_interval_does(
    monkeypatch: pytest.MonkeyPatch, slope: float, noise: float, holds: bool | None
) -> None:
    assert judged(monkeypatch, slope, noise).holds is holds


@pytest.mark.parametrize(("wrong", "fails"), [(0.0, True), (-0.4, None), (-0.9, False)])
def test_so_does_a_wrong_theorys(monkeypatch: pytest.MonkeyPatch, wrong: float, fails: bool | None) -> None:
    assert judged(monkeypatch, -0.9, 0.2, wrong).control_fails is fails
