"""The experiment on Theorem 2: its table is the checks' own, a wrong theory stands beside every row."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtangent._src.comparison.settings import Setting
from fedtangent._src.comparison.theorems.fed_ensemble.limit import Theorem2
from fedtangent._src.experiments.fed_ensemble import theorem2 as experiment
from fedtangent._src.experiments.lab import Outcome, disagreeing
from fedtangent._src.output.files import Metric

from ...comparison.drawn import drawn_for
from ..performed import performed

TINY = ("num_models=30", "widths=64,256", "sine_rounds=60", "digits_rounds=10")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[Metric], Path]:
    folder = tmp_path_factory.mktemp("theorem2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "compare", lambda setting, say: drawn_for(setting))
        return *performed("fed_ensemble.theorem2", TINY, folder, (0, 1), "sine"), folder / "figures"


def test_every_statistic_stands_beside_its_prediction(ended: tuple[Outcome, list[Metric], Path]) -> None:
    outcome, _, _ = ended
    assert len(outcome.rows) == 2 * 4
    assert {row["dataset"] for row in outcome.rows} == {"sine"} and {row["width"] for row in outcome.rows} == {64, 256}
    assert all(row["theory"] == "Theorem 2's limit" for row in outcome.rows)
    for row in outcome.rows:
        if row["statistic"] in ("variance", "coverage of 95 % intervals"):
            assert row["measured"] == pytest.approx(row["predicted"], rel=0.5)


def test_it_prints_draws_and_says_what_it_did(ended: tuple[Outcome, list[Metric], Path]) -> None:
    outcome, kept, folder = ended
    assert sorted(p.name for p in folder.iterdir()) == ["theorem2_sine.png"]
    assert len(outcome.verdicts) == 4 and all(v.holds is not False for v in outcome.verdicts) and not outcome.failed
    assert (
        "Theorem 2's limit" in outcome.verdicts[1].statement
        and "widths 64, 256, 60 rounds" in outcome.verdicts[1].sizes
    )
    assert any("seed 0 alone" in line for line in outcome.remarks)
    assert any("changes the variance by" in line for line in outcome.remarks)
    assert {m.seed for m in kept} == {0} and all(m.uplink_bytes > 0 for m in kept)


def test_networks_of_another_law_fail_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spread(setting: Setting, say: object) -> Theorem2:
        result = drawn_for(setting)
        return result._replace(trained=tuple(t._replace(samples=3 * t.samples) for t in result.trained))

    monkeypatch.setattr(experiment, "compare", spread)
    outcome, _ = performed("fed_ensemble.theorem2", TINY, tmp_path, (0, 1), "sine")
    wrong = disagreeing([v for v in outcome.verdicts if v.holds is False])
    assert wrong and set(wrong) <= set(outcome.failed)


@pytest.mark.slow
@pytest.mark.theory
def test_a_real_run_agrees_with_its_law(tmp_path: Path) -> None:
    outcome, _ = performed("fed_ensemble.theorem2", ("num_models=20", "widths=128,512"), tmp_path, (1,), "sine")
    assert all(v.holds is not False for v in outcome.verdicts)  # of 20 models little is decided
