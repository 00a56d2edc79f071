"""The time left of a study comes from its finished cells: exact where every round takes the same time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from fedtangent._src.experiments.fed_ensemble import classifiers
from fedtangent._src.experiments.lab import harness, runner
from fedtangent._src.experiments.lab.harness import Config, Record, Tuned
from fedtangent._src.experiments.lab.runner import Study
from fedtangent._src.output.files import Figures
from fedtangent._src.progress import TimeLeft

from ..performed import study_of

CHANGES = ("num_clients=10", "num_rounds=9", "tuning_rounds=5", "local_epochs=1", "width=8", "num_train=80",
           "num_validation=60", "num_test=50", "learning_rates=0.1,0.5,1", "num_models=2")  # fmt: skip


def test_the_time_left_is_the_mean_time_of_finished_rounds_times_the_rounds_left() -> None:
    time_left = TimeLeft(planned=100)
    assert str(time_left) == "0 s left"  # nothing is known yet
    time_left.finish(10, 20.0)
    assert str(time_left) == "3 min left"
    time_left.finish(80, 70.0)
    assert str(time_left) == "10 s left"


def test_seeds_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watch:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    watch, lines = Watch(), list[str]()
    monkeypatch.setattr(runner, "time", watch)
    for seed in Study(None, "digits", (0, 4, 5), say=lines.append).each_seed():  # seed 0 is read from files
        watch.now += 10.0 * seed
    assert lines == ["seed 0: 0 s; 0 s left", "seed 4: 40 s; 40 s left", "seed 5: 50 s; 0 s left"]


def test_a_remark_names_the_rates_and_the_steps_at_an_edge() -> None:
    at_edge = {"A": ("steps",), "B": ("rate",), "C": (), "D": ("rate", "steps")}
    tuned = {label: Tuned(Config(label, 0.1), 0.5, names, {}) for label, names in at_edge.items()}
    (remark,) = harness.edges(tuned)
    parts = remark.split("; ")
    assert [("rate" in part, "steps" in part) for part in parts] == [(False, True), (True, False), (True, True)]
    assert harness.edges({"C": tuned["C"]}) == ()


def test_every_cell_of_a_comparison_is_counted_and_kept_ones_take_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, computed = list[str](), list[int]()

    def compute(bench: object, method: object, config: object, seed: int, num_rounds: int) -> Record:
        computed.append(num_rounds)
        names = ("accuracy", "largest", "least", "entropy")
        metrics = {
            f"{split}.{name}": np.full(num_rounds + 1, 0.5) for split in ("validation", "test") for name in names
        }
        sent = np.zeros((num_rounds + 1, 2), np.int64)
        return Record(np.arange(num_rounds + 1), metrics, sent, np.zeros(num_rounds, np.int32), 0.25 * num_rounds)

    monkeypatch.setattr(harness, "_compute", compute)
    study = study_of("fed_ensemble.table7", CHANGES, (0, 1, 2))
    study = dataclasses.replace(study, say=lines.append, figures=Figures(tmp_path / "figures"))
    classifiers.play_all({"": study})
    rounds = 2 * 2 * (3 * 5 + 3 * 9)  # classes, methods; rates by tuning rounds, seeds by rounds
    assert sum(computed) == rounds == study.time_left.planned == study.time_left.finished
    assert lines[0].endswith(f"; {0.25 * (rounds - 15):.0f} s left") and lines[-1].endswith("; 0 s left")
    again = dataclasses.replace(study, time_left=TimeLeft())
    classifiers.play_all({"": again})
    assert sum(computed) == rounds and again.time_left.planned == again.time_left.finished == 0
