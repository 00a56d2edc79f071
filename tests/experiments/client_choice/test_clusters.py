"""IFCA on rotated images, small: rotations, the accuracy of clients' models, and the clusters that are found."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import fedtangent as ft
from fedtangent._src.experiments.client_choice import clusters
from fedtangent._src.experiments.client_choice.clusters import ALIKE, GLOBAL, IFCA, OWN, PAIRS, ROTATED
from fedtangent._src.types import Algorithm, PyTree

from ..performed import performed, study_of

SMALL = (
    *("num_clusters=3", "clients_per_cluster=2", "num_rounds=2", "tuning_rounds=1", "width=8", "local_steps=2"),
    *("learning_rates=3", "num_train=30", "num_validation=20", "num_test=40"),
)


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    outcome, metrics = performed("client_choice.clusters", SMALL, tmp_path)
    assert outcome.failed == () and len(outcome.claims) == 4 and len(outcome.rows) == 6
    assert {row["clients"] for row in outcome.rows} == {ROTATED, ALIKE}
    pairs = {row["method"]: row["pairs"] for row in outcome.rows if row["clients"] == ROTATED}
    # 3 of the 15 pairs are in the same cluster
    assert pairs[clusters.LABELS[GLOBAL]] == pytest.approx(3 / 15)
    assert any(m.algorithm.endswith(ALIKE) for m in metrics)


def test_images_of_a_cluster_are_turned_and_its_clients_share_them() -> None:
    study = study_of("client_choice.clusters", SMALL)
    turned, alike = (clusters.divide(study, kind, 0) for kind in (ROTATED, ALIKE))
    for trial, turns in ((turned, (0, 1, 2)), (alike, (0, 0, 0))):
        images = np.asarray(trial.splits["test"].x).reshape(3, 40, 8, 8)
        for cluster, times in enumerate(turns):
            np.testing.assert_array_equal(images[cluster], np.rot90(images[0], times, axes=(1, 2)))
        offsets, rows = np.asarray(trial.data.offsets), np.asarray(trial.data.indices)
        for cluster in range(3):
            of_clients = rows[offsets[2 * cluster] : offsets[2 * cluster + 2]]
            assert sorted(of_clients) == list(range(30 * cluster, 30 * cluster + 30))
    assert not np.array_equal(np.asarray(turned.data.x), np.asarray(alike.data.x))


def by_loops(algorithm: Algorithm, state: PyTree, sets: clusters.EvaluationSets, per_cluster: int) -> dict[str, float]:
    """The metrics, one client and one pair of clients after the other."""
    train, test = sets["train"], sets["test"]
    members = np.asarray(algorithm.predict(state, train.x).members, np.float64)
    at_test = np.asarray(algorithm.predict(state, test.x).members)
    offsets, chosen, accuracies = np.asarray(train.offsets), [], []
    size = len(test.labels) // ((len(offsets) - 1) // per_cluster)
    for i in range(len(offsets) - 1):
        losses = []
        for outputs in members:
            loss = 0.0
            for row in np.asarray(train.indices)[offsets[i] : offsets[i + 1]]:
                loss += np.log(np.exp(outputs[row]).sum()) - outputs[row][int(train.y[row])]
            losses.append(loss)
        chosen.append(int(np.argmin(losses)))
        own = slice(i // per_cluster * size, (i // per_cluster + 1) * size)
        accuracies.append(np.mean(at_test[chosen[-1], own].argmax(axis=1) == np.asarray(test.labels)[own]))
    right = [
        (chosen[i] == chosen[j]) == (i // per_cluster == j // per_cluster) for i in range(len(chosen)) for j in range(i)
    ]
    return {PAIRS: float(np.mean(right)), "test.accuracy": float(np.mean(accuracies))}


@pytest.mark.parametrize("name", [GLOBAL, OWN, IFCA])
def test_the_metrics_are_those_of_plain_loops(name: str) -> None:
    study = study_of("client_choice.clusters", SMALL)
    trial = clusters.divide(study, ROTATED, 0)
    method = clusters.methods_of(study.settings, trial)[name]
    algorithm = method.build(0, 3.0)
    state = ft.simulate(algorithm, trial.data, num_rounds=2, seed=0, evaluation=ft.Evaluation(progress=False)).state
    measured = clusters.measure(3, algorithm, state, method.splits)
    for metric, value in by_loops(algorithm, state, method.splits, 2).items():
        assert float(measured[metric]) == pytest.approx(value, abs=1e-6), metric
    if name == OWN:
        wrong = clusters.measure(2, algorithm, state, method.splits)  # control: other clusters
        assert abs(float(wrong[PAIRS]) - float(measured[PAIRS])) > 0.05


def test_outputs_that_are_not_finite_are_wrong() -> None:
    study = study_of("client_choice.clusters", SMALL)
    trial = clusters.divide(study, ROTATED, 0)
    method = clusters.methods_of(study.settings, trial)[GLOBAL]
    algorithm = method.build(0, 3.0)
    broken = jax.tree.map(lambda leaf: leaf * np.nan if leaf.dtype == np.float32 else leaf, algorithm.init(0, 6))
    assert float(clusters.measure(3, algorithm, broken, method.splits)["test.accuracy"]) == 0


def test_bad_settings() -> None:
    for change, words in (
        ("tuning_seed=1", "tuning_seed: got 1, must not be among the seeds"),
        ("num_clusters=5", "num_clusters: got 5"),
        ("num_clusters=1", "num_clusters: got 1"),
        ("clients_per_cluster=31", "clients_per_cluster: got 31"),
    ):
        with pytest.raises(ValueError, match=words):
            study_of("client_choice.clusters", (*SMALL, change))
