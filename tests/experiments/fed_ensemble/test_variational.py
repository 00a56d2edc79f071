"""The experiment on Fed-ensemble's evidence bound: a row for each K, the curve of the run, and a figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtangent._src.comparison.theorems.fed_ensemble import variational

from ..performed import performed


@pytest.mark.slow
def test_it_prints_draws_and_keeps_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SAMPLES", 2000), ("ROUNDS", 160), ("EVERY", 40)):
        monkeypatch.setattr(variational, name, value)
    outcome, kept = performed("fed_ensemble.variational", ("num_models=2",), tmp_path, (3,))
    assert [row["num_models"] for row in outcome.rows] == [1, 2, 4]
    assert all(abs(row["gap"] - row["divergence"]) < 4 * row["error"] for row in outcome.rows)
    assert outcome.rows[-1]["papers"] < 0 < outcome.rows[-1]["gap"]
    assert len(outcome.verdicts) == 3 and all(v.passed for v in outcome.verdicts) and not outcome.failed
    assert [m.round for m in kept if m.metric == "evidence_bound"] == [0, 40, 80, 120, 160]
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["variational.png"]
