"""Federated fine-tuning beside its linearisation, small: what is exact, what is not, and that controls fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedtangent._src import data
from fedtangent._src.experiments.fine_tuning import regime

from ..performed import performed, study_of

SMALL = (
    *("width=8", "num_pre_train=100", "pre_steps=50", "num_train=30", "num_test=30"),
    *("num_rounds=3", "num_clients=4", "clients_per_round=2", "local_steps=3"),
)


@pytest.mark.slow
def test_a_small_run_counts(tmp_path: Path) -> None:
    outcome, metrics = performed("fine_tuning.regime", SMALL, tmp_path)
    assert outcome.failed == () and len(outcome.verdicts) == 6
    assert all(verdict.holds and verdict.control_fails for verdict in outcome.verdicts)
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"curves.png", "rates.png"}
    rows = {row["part"]: row for row in outcome.rows}
    assert rows["last layer"]["laziness"] < 1e-12 < 1e-3 < rows["whole network"]["laziness"]
    assert rows["last layer"]["close"] == 2 and rows["last layer"]["parameters"] == 8 * 5 + 5
    assert rows["LoRA 1"]["parameters"] == (64 + 8) + (8 + 8) + (8 + 5)
    assert len({row["start"] for row in outcome.rows}) == 1  # all begin with one function
    verdicts = {claim.claim: claim.verdict for claim in outcome.claims}
    assert verdicts["last layer: lazy, within 0.1 of its linearisation"] == "seen"
    first = {(m.algorithm, m.seed): m.value for m in metrics if m.round == 0}
    for part in rows:
        assert first[f"{part}, network", 0] == pytest.approx(first[f"{part}, predicted", 0], rel=1e-12)


def test_the_network_was_trained_on_the_other_classes() -> None:
    study = study_of("fine_tuning.regime", (*SMALL, "num_pre_train=400", "pre_steps=400", "width=16"))
    with regime.ENTRIES[0].arithmetic():
        task = regime._task_of(study, 0)
        loaded = data.load("digits", seed=0)
        old = loaded.y_test < 5
        x, y, x_test, y_test = task.data
        outputs, of_old = (np.asarray(task.network.apply(task.weights, part)) for part in (x_test, loaded.x_test[old]))
    assert set(y) | set(y_test) <= set(range(5)) and len(x) == 30 == task.clients.sizes.sum()
    assert (of_old.argmax(axis=1) == loaded.y_test[old]).mean() > 0.9
    assert (outputs.argmax(axis=1) == y_test).mean() < 0.5


def test_few_examples_do_not_take_classes_from_the_network() -> None:
    study = study_of("fine_tuning.regime", (*SMALL, "num_pre_train=2"))
    halves = regime._halves(study, 0)
    assert len(set(halves.old[1])) <= 2 and regime._pre_training(halves, study.settings).model.output_size == 5


@pytest.mark.slow
@pytest.mark.parametrize("part", ["last layer", "LoRA 1"])
def test_losses_of_networks_beside_those_predicted(part: str) -> None:
    """The last layer's is predicted to rounding; LoRA, which is not linear in its weights, leaves its linearisation."""
    study = study_of("fine_tuning.regime", SMALL)
    with regime.ENTRIES[0].arithmetic():
        task = regime._task_of(study, 0)
        tuned = regime._tune(task, part, regime._parts(task, study.settings)[part], study.settings, 0)
    best = int(np.argmin(np.abs(tuned.rates - tuned.predicted.best)))
    apart = abs(tuned.losses[best] / tuned.theory.loss - 1)
    assert (apart < 1e-6 and tuned.laziness < 1e-12) if part == "last layer" else (tuned.laziness > 1e-3), (
        apart,
        tuned,
    )
    assert tuned.side.verdicts[0].passed and tuned.rates[best] == pytest.approx(tuned.predicted.best, rel=1e-12)
    assert abs(tuned.losses[0] / tuned.theory.loss - 1) > 1e-3  # another rate has another loss
