"""Table VIII and Fig. 8: what is left out to choose rates, what is measured, and the whole on embedded data."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent import simulate
from fedtangent._src import data
from fedtangent._src.engine import Devices
from fedtangent._src.experiments.fed_ensemble import table8, versus_fed_avg

from ..performed import performed, study_of

TINY = ("num_rounds=4", "tuning_rounds=3", "local_epochs=1", "width=8")


def test_rates_are_chosen_on_examples_that_their_runs_do_not_train_on() -> None:
    study = study_of("fed_ensemble.table8", TINY)
    measured, tuning = (table8._divide(study, seed) for seed in (0, study.settings.tuning_seed))
    loaded = data.load("sine", None, 0)
    assert len(measured.data.x) == len(loaded.x_train) == len(tuning.data.x) + len(tuning.splits["validation"].x)
    rows = {np.asarray(x).tobytes() for x in tuning.data.x}
    assert not rows & {np.asarray(x).tobytes() for x in tuning.splits["validation"].x}
    with pytest.raises(ValueError, match="tuning_seed: got 1, must not be among the seeds that are measured"):
        study_of("fed_ensemble.table8", ("tuning_seed=1",))


def test_of_the_printers_one_speed_is_left_out() -> None:
    speeds, user = np.tile(np.repeat(np.arange(11.0), 15), 6), np.repeat(np.arange(6), 165)
    found = table8._left_out(speeds[:, None], user)
    assert set(speeds[found]) == {4.0} and found.sum() == 6 * 15


@pytest.mark.slow
def test_the_table_is_that_of_the_runs(tmp_path: Path) -> None:
    outcome, kept = performed("fed_ensemble.table8", TINY, tmp_path)
    for row, name in zip(outcome.rows, versus_fed_avg.NAMES, strict=True):
        own = [m.value for m in kept if m.algorithm == f"{name} learning_rate={row['learning_rate']:g}"
               and (m.split, m.metric, m.seed) == ("test", "mse", 0)]  # fmt: skip
        assert np.mean(own[-3:]) == pytest.approx(row["by_seed"][0], rel=1e-6)
    study = study_of("fed_ensemble.table8", TINY)
    trial = table8._divide(study, 0)
    method = table8.methods(study.settings, trial)["fed_ensemble"]
    algorithm = method.build(0, outcome.rows[1]["learning_rate"])
    run = simulate(algorithm, method.data, num_rounds=4, seed=0, devices=Devices("scan"))
    test = trial.splits["test"]
    error = float(jnp.mean((algorithm.predict(run.state, test.x).mean - test.labels) ** 2))
    rate = f"{outcome.rows[1]['learning_rate']:g}"
    kinds = f"fed_ensemble learning_rate={rate}", "test", "mse", 0, 4
    last = [m.value for m in kept if (m.algorithm, m.split, m.metric, m.seed, m.round) == kinds]
    assert last == [pytest.approx(error, rel=1e-4)]
