"""How long an experiment is said to take: exact where the time of a round is, whatever the device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest

from fedtangent._src import entries
from fedtangent._src.experiments.lab import league_report, runner, runs
from fedtangent._src.experiments.lab.results import Outcome
from fedtangent._src.experiments.lab.runner import Experiment, Request, Study, by_scale, expected_seconds, prepare_study
from fedtangent._src.experiments.lab.runs import Record
from fedtangent._src.types import FederatedData

from ..performed import study_of


@dataclass(frozen=True)
class Rounds:
    """Settings of an experiment that is no comparison of runs."""

    num_rounds: int = 400
    looks: int = 3


class Watch:
    """A clock that only work moves."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize("num_rounds", [400, 3, 1])
def test_rounds_are_counted_and_what_each_seed_begins_with(num_rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, done = Watch(), list[int]()
    monkeypatch.setattr(runner, "time", watch)

    def run(study: Study) -> Outcome:
        done.append(study.settings.num_rounds)
        watch.now += len(study.seeds) * (5 + 0.5 * study.settings.num_rounds)
        return Outcome((), [])

    entry = Experiment("tried", "tried", run, scales={"digits": by_scale(Rounds(num_rounds))}, least_seeds=2)
    study = prepare_study(entry, Request("paper", (0, 1, 2, 3)))
    assert expected_seconds(entry, study) == pytest.approx(4 * (5 + 0.5 * num_rounds))
    assert sum(done) <= max(num_rounds * 3 // runner.SHARE, 3)


def test_of_a_comparison_every_run_is_counted_and_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entries.choose("experiments", "fed_ensemble.table7")
    changes = ("num_clients=10", "num_rounds=9", "tuning_rounds=5", "local_epochs=1", "width=8", "num_train=80",
               "num_validation=60", "num_test=50", "learning_rates=0.1,0.5,1", "num_models=2")  # fmt: skip
    monkeypatch.setattr(league_report, "draw_rounds", lambda study, runs: None)
    made = list[int]()

    def timed(bench: object, method: runs.Method, config: object, seed: int, num_rounds: int) -> Record:
        data: FederatedData = method.data
        made.append(num_rounds)
        held, evaluations = int(data.offsets[-1]), num_rounds + 1
        metrics = {f"{split}.accuracy": np.full(evaluations, 0.5) for split in ("validation", "test")}
        metrics |= {f"test.{name}": np.full(evaluations, 0.5) for name in ("largest", "least", "entropy")}
        seconds = 7 + num_rounds * (0.25 + 0.01 * held)  # 7: once a run
        sent = np.zeros((evaluations, 2), np.int64)
        return Record(np.arange(evaluations), metrics, sent, np.zeros(num_rounds, np.int32), seconds)

    monkeypatch.setattr(runs, "_compute", timed)
    study = study_of("fed_ensemble.table7", changes, (0, 1, 2))
    rounds = 2 * 2 * (3 * 5 + 3 * 9)  # classes, methods; rates by tuning rounds, seeds by rounds
    assert expected_seconds(entry, study) == pytest.approx(rounds * (0.25 + 0.01 * 80))
    assert set(made) == set(runs.TIMED) and len(made) == 2 * 2 * 3  # methods, with one client and with three
    longer = dataclasses.replace(study, settings=dataclasses.replace(study.settings, num_rounds=18))
    assert expected_seconds(entry, longer) == pytest.approx((rounds + 2 * 2 * 3 * 9) * 1.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fed_ensemble.table2", "fed_ensemble.table8", "local_gd.fig1a", "ntk_fl.fig4b"])
def test_the_time_of_an_experiment_is_about_what_is_said(name: str) -> None:
    """Compilation apart, which small settings are mostly made of: it is above zero, and grows with the seeds."""
    entry = entries.choose("experiments", name)
    few, many = (expected_seconds(entry, study_of(name, (), seeds)) for seeds in ((0, 1), (0, 1, 2, 3, 4, 5)))
    assert 0 < few < many * 1.5
