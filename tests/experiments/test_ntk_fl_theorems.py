"""The experiments on NTK-FL's theorems and its Fig. 9, small: numbers, controls, figures, and what they refuse."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from fedtangent.experiments.lab.contract import Request

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


def module(name: str):
    return importlib.import_module(f"fedtangent.experiments.ntk_fl.{name}")


def run(name: str, dataset: str, folder):
    metrics, lines = [], []
    job = module(name).prepare(Request("smoke", (0,), dataset, None, SMALL[name]))
    outcome = job.run(lines.append, metrics.extend, folder)
    assert lines and all(len(row) == len(sheet.columns) for sheet in outcome.sheets for row in sheet.rows)
    assert (folder / f"{name}.png").stat().st_size > 10_000
    return outcome, metrics


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


def test_a_control_that_is_not_broken_does_not_count(tmp_path, monkeypatch):
    """A residual that vanishes at once is under every bound."""
    theorem2 = module("theorem2")
    from fedtangent.theory.ntk_fl.convergence import TwoLayerStart, ntk_theorem_2
    from fedtangent.types import Partition

    part = Partition(np.array([0, 1], np.int32), np.array([0, 1, 2], np.int32))
    theorem = ntk_theorem_2(np.eye(2), np.ones(2), part, TwoLayerStart(8), learning_rate=0.1, local_steps=1)
    rounds = np.arange(5)
    gone = theorem2.Followed(0, 8, 0.5, theorem, np.eye(2), rounds, np.array([2.0, 0, 0, 0, 0]), 10, 0.1, 40)
    monkeypatch.setattr(theorem2, "draw", lambda *_: None)
    settings = theorem2.Settings(widths=(8,), step_factors=(0.5,), local_steps=(1,), num_rounds=4)
    failed = theorem2._conclude("sphere", settings, [gone], tmp_path).failed
    assert len(failed) == 1 and failed[0].startswith("the control's rate was not broken in 1 of 1 runs")
    broken = gone._replace(squared=np.array([2.0, np.nan, 0, 0, 0]))
    assert "networks diverged" in theorem2._conclude("sphere", settings, [broken], tmp_path).failed


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("theorem1", {"dataset": "sine"}, "dataset: got 'sine', allowed are digits, sphere, fashion_mnist"),
        ("theorem1", {"changes": ("num_examples=9",)}, "num_examples: got 9, must be a multiple of num_clients, 4"),
        ("theorem1", {"changes": ("step_factors=0.5,1.5",)}, r"step_factors: got \(0.5, 1.5\), must be different"),
        ("theorem1", {"changes": ("last_time=5",)}, "last_time: got 5, must be at least 10"),
        ("theorem1", {"changes": ("delta=1",)}, "delta: got 1.0, must lie between 0 and 1"),
        ("theorem2", {"changes": ("local_steps=0,2",)}, r"local_steps: got \(0, 2\), must be different whole"),
        ("theorem2", {"changes": ("widths=8,8",)}, r"widths: got \(8, 8\), must be different whole"),
        ("fig9", {"changes": ("num_clients=80",)}, "num_clients: got 80, must be at most total_clients, 60"),
        ("fig9", {"changes": ("alpha=nan",)}, "alpha: got nan, must be finite and positive"),
        ("fig9", {"changes": ("step_factor=1.0",)}, "step_factor: got 1.0, must lie between 0 and 1"),
        ("fig9", {"scale": "huge"}, "scale: got 'huge'"),
    ],
)
def test_refuses(name, change, message):
    request = Request("smoke", (0,), None, None, ())._replace(**change)
    with pytest.raises(ValueError, match=message):
        module(name).prepare(request)
