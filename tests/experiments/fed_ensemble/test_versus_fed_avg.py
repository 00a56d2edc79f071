"""Paired trials of classifiers: what both methods share, what is measured, the choice of rates, equal budgets."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedtangent import simulate
from fedtangent._src import data, pytrees
from fedtangent._src.data.federated import max_client_size
from fedtangent._src.engine import Devices, Evaluation
from fedtangent._src.engine.sweeps import single_device_engine
from fedtangent._src.engine.trials import run_trial, trial_program
from fedtangent._src.experiments.fed_ensemble import versus_fed_avg as experiment
from fedtangent._src.experiments.lab.harness import SCORES, Config, Method, Record, all_scores, choose
from fedtangent._src.experiments.lab.runner import Study
from fedtangent._src.experiments.lab.trials import Trial, draw
from fedtangent._src.measures import uncertainty
from fedtangent._src.models import convolutional
from fedtangent._src.types import Algorithm, Array, PyTree

from ...data.originals import write
from ..performed import performed, study_of

NAME = "fed_ensemble.versus_fed_avg"
TINY = ("num_clients=6", "num_models=3", "num_rounds=3", "evaluate_every=2", "local_epochs=1", "width=8",
        "num_train=120", "num_validation=60", "num_test=50", "learning_rates=0.1,0.5")  # fmt: skip


def divided(seed: int = 0, *changes: str) -> Trial:
    return experiment._divide(study_of(NAME, (*TINY, *changes)), seed)


def test_a_trial_depends_on_its_seed_and_on_nothing_else() -> None:
    a, b, c = divided(0), divided(0), divided(1)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)
    for part in (a.data.x, a.data.indices, a.splits["test"].x):
        assert not any(np.array_equal(part, z) for z in jax.tree.leaves(c))
    assert (len(a.data.x), len(a.splits["validation"].x), len(a.splits["test"].x)) == (120, 60, 50)


def test_no_example_is_both_trained_and_evaluated_on() -> None:
    trial = divided(0, "num_train=0", "num_test=0")
    sets = [{row.tobytes() for row in np.asarray(x)} for x in (trial.data.x, *(s.x for s in trial.splits.values()))]
    assert [len(s) for s in sets] == [1378, 60, 359]
    assert not (sets[0] & sets[1]) and not (sets[0] & sets[2]) and not (sets[1] & sets[2])
    labels, offsets = np.asarray(trial.data.y)[np.asarray(trial.data.indices)], np.asarray(trial.data.offsets)
    assert all(len(set(labels[a:b])) == 2 for a, b in itertools.pairwise(offsets))


def test_the_cnn_has_the_width_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of two convolutions is the faster is not measured: both have the same weights."""
    monkeypatch.setattr(convolutional, "choose_convolution", lambda *_: "lax")
    settings = study_of(NAME, (*TINY, "model=cnn", "width=32")).settings
    counts = [
        pytrees.num_bytes(jax.eval_shape(experiment.network(each, np.zeros((1, 784)), 10).init, jax.random.key(0))) // 4
        for each in (settings, dataclasses.replace(settings, width=8))
    ]
    assert counts[0] == 1_663_370 and counts[1] < counts[0] / 10


@pytest.mark.slow
@pytest.mark.parametrize("name", experiment.NAMES)
def test_a_run_is_that_of_simulate_and_trials_share_a_program(name: str) -> None:
    settings, trials = study_of(NAME, TINY).settings, [divided(4), divided(5)]
    methods = [experiment.methods(settings, trial)[name] for trial in trials]
    largest = max(max_client_size(trial.data) for trial in trials)
    engine = single_device_engine(trials[0].data, "scan")._replace(max_client_size=largest)
    numbers = {"steps": 0, "rate": 0.1}
    program = trial_program(methods[0].build, numbers, trials[0].data, engine, all_scores, 2)
    x, labels = trials[0].splits["test"]
    found = [run_trial(program, 4, {"steps": 0, "rate": rate}, trials[0].data, trials[0].splits, 3, 2)
             for rate in (0.1, 0.5)]  # fmt: skip
    for rate, run in zip((0.1, 0.5), found, strict=True):
        evaluations = run.history.evaluations
        assert [e.round for e in evaluations] == [0, 2, 3]
        algorithm, seen = methods[0].build(0, rate), list[Array]()

        def look(algorithm: Algorithm, state: PyTree, seen: list[Array] = seen) -> dict[str, Array]:
            seen.append(algorithm.predict(state, x).members)
            return {}

        whole = simulate(
            algorithm, trials[0].data, num_rounds=3, seed=4, evaluation=Evaluation(2, look), devices=Devices("scan")
        )
        for e, members in enumerate(seen):
            for metric, score in SCORES.items():
                np.testing.assert_allclose(
                    evaluations[e].metrics[f"test.{metric}"], score(members, labels), rtol=1e-4, atol=1e-6
                )
        reliability = uncertainty.reliability(seen[-1], labels)
        np.testing.assert_array_equal(evaluations[-1].metrics["bins.examples"], reliability.examples)
        ledger, own = (
            [(e.uplink_bytes, e.downlink_bytes) for e in rows] for rows in (whole.history.evaluations, evaluations)
        )
        assert own == ledger and ledger[-1][0] > 0
    first, second = (run.history.evaluations[-1].metrics["test.nll"] for run in found)
    assert abs(first - second) > 0.01
    other = run_trial(program, 5, numbers, trials[1].data, trials[1].splits, 3, 2)
    assert abs(other.history.evaluations[-1].metrics["test.nll"] - first) > 1e-3
    parts = program.begin, program.chunk, program.measure
    assert [part._cache_size() for part in parts] == [1, 1, 1]  # type: ignore[attr-defined]


def record(validation: float, test: float, up: int = 7) -> Record:
    metrics = {f"{split}.{score}": np.array([value if score == "accuracy" else -value])
               for split, value in (("validation", validation), ("test", test))
               for score in (*SCORES, "accuracy_of_members")}  # fmt: skip
    return Record(np.array([5]), metrics, np.array([[up, up]]), np.zeros(5), 1.0)


def concluded(found: experiment.GridRuns, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(experiment, "_draw", lambda *_: None)
    rates = tuple(dict.fromkeys(config.rate for config in found))
    of = {name: Method(label, rates, (0,), None, None, {}) for name, label in experiment.NAMES.items()}  # type: ignore[arg-type]
    return experiment._conclude(Study(experiment.DIGITS, "digits", (0, 1, 2)), of, found)


def grid(validation: dict[str, list[float]], test: dict[str, list[float]]) -> experiment.GridRuns:
    """Three seeds of three rates of both methods, from mean accuracies."""
    return {
        Config(name, rate): [record(validation[name][i], test[name][i] + noise) for noise in (0.0, 0.01, 0.02)]
        for name in experiment.NAMES for i, rate in enumerate((0.1, 0.3, 1.0))
    }  # fmt: skip


def test_each_method_takes_its_own_best_rate_on_validation_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    validation = {"fed_avg": [0.5, 0.9, 0.1], "fed_ensemble": [0.2, 0.3, np.nan]}
    test = {"fed_avg": [0.99, 0.4, 0.0], "fed_ensemble": [0.99, 0.8, 0.99]}
    found = concluded(grid(validation, test), monkeypatch)
    assert found.failed == ()
    for row in found.rows:  # not the best on test examples, never a rate that is not finite
        assert (row["learning_rate_fed_avg"], row["learning_rate_fed_ensemble"]) == (0.3, 0.3)
        assert row["verdict"] == "better" and abs(row["difference"]) == pytest.approx(0.4)
    assert found.claims[0].verdict == "seen"
    assert not any("at the edge" in line for line in found.remarks)
    turned = concluded(grid(validation, {name: test[other] for name, other in zip(test, reversed(test), strict=True)}),
                       monkeypatch)  # fmt: skip
    assert {row["verdict"] for row in turned.rows} == {"worse"} and turned.claims[0].verdict == "not seen"
    lost = concluded(grid(dict.fromkeys(test, [np.nan] * 3), test), monkeypatch)
    assert "FedAvg: no learning rate of the grid gives finite numbers" in lost.failed


def test_unequal_bytes_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    fair = {Config(name, 0.1): [record(0.5, 0.5 + e) for e in (0, 0.1, 0.2)] for name in experiment.NAMES}
    assert concluded(fair, monkeypatch).failed == ()
    unfair = fair | {Config("fed_ensemble", 0.1): [record(0.5, 0.5, 8)] * 3}
    assert concluded(unfair, monkeypatch).failed == ("the two methods did not send the same bytes",)


def test_the_edge_of_a_grid_is_named() -> None:
    method = Method("m", (0.1, 0.3, 1.0), (2, 4), None, None, {})  # type: ignore[arg-type]
    scores = {Config("m", rate, steps): 10 * rate + steps for rate in method.rates for steps in method.steps}
    found = choose(method, scores)
    assert (found.config, found.score, found.at_edge) == (Config("m", 1.0, 4), 14.0, ("rate", "steps"))


@pytest.mark.slow
def test_the_table_is_that_of_the_t_test_on_what_is_kept(tmp_path: Path) -> None:
    outcome, kept = performed(NAME, TINY, tmp_path, (0, 1, 2))
    assert outcome.failed == ()

    def values(method: str, rate: float, metric: str) -> np.ndarray:
        found = [m.value for m in kept if (m.algorithm, m.split, m.metric, m.round) == (
            f"{method} learning_rate={rate:g}", "test", metric, 3)]  # fmt: skip
        return np.array(found)

    for row in outcome.rows:
        pair = [values(m, row[f"learning_rate_{m}"], row["metric"]) for m in ("fed_ensemble", "fed_avg")]
        ends = stats.ttest_rel(*pair).confidence_interval(0.95)
        np.testing.assert_allclose(
            [row["difference"], row["low_95"], row["high_95"]], [np.mean(pair[0] - pair[1]), ends.low, ends.high],
            rtol=1e-5, atol=1e-7,
        )  # fmt: skip


def test_a_fashion_mnist_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("fashion_mnist", tmp_path / "fashion_mnist", monkeypatch)
    trial = draw(data.load("fashion_mnist", data_dir=tmp_path, seed=0), 0, 6, 3, 2)
    assert trial.x["train"].shape == (6, 28, 28, 1) and jnp.asarray(trial.x["train"]).dtype == jnp.float32
