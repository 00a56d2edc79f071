"""The experiment on Theorem 2: its table is the checks' own, a wrong theory stands beside every row."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtangent.experiments.fed_ensemble import theorem2 as experiment
from fedtangent.experiments.lab.results import Outcome
from fedtangent.output.files import Metric

from ...compare.drawn import drawn_for
from ..performed import performed

TINY = ("num_models=30", "widths=64,256", "sine_rounds=60", "digits_rounds=10")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[Metric], Path]:
    folder = tmp_path_factory.mktemp("theorem2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "compare", lambda setting, say: drawn_for(setting))
        return *performed("fed_ensemble.theorem2", TINY, folder, (0, 1), "sine"), folder / "figures"


def test_every_statistic_has_a_wrong_theory_beside_it(ended: tuple[Outcome, list[Metric], Path]) -> None:
    outcome, _, _ = ended
    assert len(outcome.rows) == 2 * 4 * 2
    assert [row["dataset"] for row in outcome.rows] == ["sine"] * 16
    assert [row["is_control"] for row in outcome.rows] == [False, True] * 8
    assert all(row["agrees"] for row in outcome.rows if not row["is_control"])
    means = [row for row in outcome.rows if row["statistic"] == "mean"]
    assert [row["agrees"] for row in means] == [True, False] * 2
    assert {row["width"] for row in outcome.rows} == {64, 256}
    assert all(row["theory"] == "Theorem 2's limit" for row in outcome.rows if not row["is_control"])
    assert all(line.endswith("too") for line in outcome.failed)  # 30 models, drawn: not every control fails


def test_it_prints_draws_and_says_what_it_did(ended: tuple[Outcome, list[Metric], Path]) -> None:
    outcome, kept, folder = ended
    assert sorted(p.name for p in folder.iterdir()) == ["theorem2_sine.png"]
    assert len(outcome.verdicts) == 8 and all(v.holds for v in outcome.verdicts)
    assert [v.control_fails for v in outcome.verdicts] == [not row["agrees"] for row in outcome.rows[1::2]]
    first = outcome.verdicts[0]
    assert first.statement == "mean of K models = Theorem 2's limit" and "width 64, 60 rounds" in first.sizes
    assert any("seed 0 alone" in line for line in outcome.remarks)
    assert any("changes the variance by" in line for line in outcome.remarks)
    assert {m.seed for m in kept} == {0} and all(m.uplink_bytes > 0 for m in kept)


@pytest.mark.slow
@pytest.mark.theory
def test_a_real_run_agrees_with_its_law(tmp_path: Path) -> None:
    outcome, _ = performed("fed_ensemble.theorem2", ("num_models=20", "widths=128,512"), tmp_path, (1,), "sine")
    assert all(row["agrees"] for row in outcome.rows if not row["is_control"])
    assert not any(
        row["agrees"] for row in outcome.rows if row["statistic"] in ("mean", "variance") and row["is_control"]
    )
