"""The experiments on NTK-FL's theorems and its Fig. 9, small: numbers, controls, figures, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent._src.experiments.lab.runner import Study
from fedtangent._src.experiments.ntk_fl import fig9, theorem2

from ..performed import performed

SMALL = {
    "theorem1": ("widths=64", "num_examples=32", "num_clients=2", "last_time=600", "num_rounds=2"),
    "theorem2": (
        "widths=64",
        "num_examples=32",
        "num_clients=2",
        "num_rounds=100",
        "ntk_time=100",
        "local_steps=4",
        "step_factors=0.3,0.5",
    ),
    "fig9": ("hidden=8", "width=64", "num_clients=3", "examples_per_client=4", "total_clients=20", "last_step=60"),
}


def run(name: str, dataset: str, folder):
    return performed(f"ntk_fl.{name}", SMALL[name], folder, (0,), dataset)


@pytest.mark.slow
def test_theorem_1(tmp_path):
    found, metrics = run("theorem1", "sphere", tmp_path)
    assert found.failed == () and len(found.rows) == 2
    for row in found.rows:
        assert row["linear_under_its_own_rate"] <= 1 + 1e-9
        assert row["network_worst"] <= 1 < row["control_worst"]
    assert any(row["tangent_worst"] > 1 for row in found.rows)  # NTK-FL's own weights, long steps
    assert len(metrics) == 2 * 3 * 101
    assert [m.value for m in metrics if m.round == 0] == pytest.approx([1] * 6)


@pytest.mark.slow
def test_theorem_2(tmp_path):
    found, metrics = run("theorem2", "sphere", tmp_path)
    assert found.failed == () and len(found.rows) == 2
    for row in found.rows:
        assert row["worst"] <= 1 < row["control_worst"]
        assert row["first_broken"] is None and row["end"] < 1
        assert row["ratio_of_rates"] == row["ntk_time"] * 2 / row["local_steps"]
    last = [m for m in metrics if m.round == 100]
    assert all(m.uplink_bytes == 100 * 2 * 64 * 20 * 8 for m in last)


@pytest.mark.slow
def test_figure_9(tmp_path):
    found, metrics = run("fig9", "digits", tmp_path)
    assert found.failed == ()
    rows = {row["network"]: row for row in found.rows}
    assert set(rows) == {"averaged", "exact", "two_layer"}
    assert all(row["gap_end"] > row["gap_at_tenth"] > 0 for row in found.rows)
    own = rows["two_layer"]
    assert own["over_lemma_2"] < own["over_counted_and_left_out"] <= 1 < own["control"]
    assert rows["averaged"]["over_lemma_2"] is None
    assert {m.metric for m in metrics} == {"l1_gap", "figure_bound"}


def test_a_control_that_is_not_broken_does_not_count(monkeypatch):
    """A residual that vanishes at once is under every bound."""
    from fedtangent._src.theory.ntk_fl.convergence import TwoLayerStart, ntk_theorem_2
    from fedtangent._src.types import Partition

    part = Partition(np.array([0, 1], np.int32), np.array([0, 1, 2], np.int32))
    theorem = ntk_theorem_2(np.eye(2), np.ones(2), part, TwoLayerStart(8), learning_rate=0.1, local_steps=1)
    rounds = np.arange(5)
    gone = theorem2.FollowedRounds(0, 8, 0.5, theorem, rounds, np.array([2.0, 0, 0, 0, 0]), 10, 0.1, 40)
    monkeypatch.setattr(theorem2, "_draw", lambda *_: None)
    settings = theorem2.AveragingDecaySettings(widths=(8,), step_factors=(0.5,), local_steps=(1,), num_rounds=4)
    study = Study(settings, "sphere", (0,))
    (verdict,) = theorem2._conclude(study, [gone]).verdicts
    assert verdict.holds and not verdict.control_fails
    broken = gone._replace(squared=np.array([2.0, np.nan, 0, 0, 0]))
    assert "networks diverged" in theorem2._conclude(study, [broken]).failed


def test_figure_9_on_writers(monkeypatch):
    """Clients are the writers; the claims are the paper's, of its own network, and can fail."""
    from fedtangent._src.data import Dataset, SourceInfo

    x = np.arange(12, dtype=np.float32).reshape(12, 1, 1, 1)
    y, writers = np.zeros(12, np.int32), np.repeat([0, 1, 2], [5, 4, 3]).astype(np.int32)
    toy = Dataset("femnist_digits", x, y, x, y, 10, writers, SourceInfo("drawn here", "none", "generated"))
    monkeypatch.setattr(fig9.ft.data, "load", lambda *_, **__: toy)
    settings = fig9.WeightGapSettings(num_clients=2, examples_per_client=2, total_clients=3)
    inputs, _ = fig9._cohort(Study(settings, "femnist_digits", (0,)), 1)
    owners = writers[inputs[:, 0].astype(int)]
    assert len(owners) == 4 and sorted(np.bincount(owners, minlength=3)) == [0, 2, 2]
    other = fig9.WeightGapSettings(num_clients=2, total_clients=60)
    with pytest.raises(ValueError, match="total_clients: got 60, must be 3, the writers of femnist_digits"):
        fig9._cohort(Study(other, "femnist_digits", (0,)), 1)
    row = {"network": "averaged", "gap_at_tenth": 1.0}
    seen = [{**row, "gap_end": 3.0 + i, "over_figure_bound": 0.5 + i / 10} for i in range(3)]
    assert [c.verdict for c in fig9._claims(seen)] == ["seen", "seen"]
    broken = [{**row, "gap_end": 0.5 + i / 10, "over_figure_bound": 3.0 + i / 10} for i in range(3)]
    assert [c.verdict for c in fig9._claims(broken)] == ["not seen", "not seen"]
