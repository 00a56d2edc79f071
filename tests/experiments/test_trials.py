"""Paired trials: what both methods share, what is measured, and that a run is the engine's own run."""

from __future__ import annotations

import itertools
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent import experiments, models, simulate
from fedtangent.engine.sweeps import Sweep, single_device_engine
from fedtangent.experiments.fed_ensemble import versus_fed_avg as experiment
from fedtangent.experiments.lab import choice, contract, trials
from fedtangent.federated import algorithms, schedule
from fedtangent.federated.local import Work
from fedtangent.measures import uncertainty
from fedtangent.types import Algorithm, Array, PyTree

SIZES = {"num_clients": 6, "classes_per_client": 2, "num_train": 120, "num_validation": 60, "num_test": 50}
SETTINGS = contract.changed(
    experiment.DIGITS,
    ["num_clients=6", "num_models=3", "num_rounds=3", "evaluate_every=2", "local_epochs=1", "width=8"],
)


def divided(seed: int = 0, **changes: int) -> trials.Trial:
    return trials.divide("digits", None, seed, **{**SIZES, **changes})


def test_a_trial_depends_on_its_seed_and_on_nothing_else() -> None:
    a, b, c = divided(0), divided(0), divided(1)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)
    for part in (a.data.x, a.data.indices, a.splits["test"].x):
        assert not any(np.array_equal(part, z) for z in jax.tree.leaves(c))
    assert (len(a.data.x), len(a.splits["validation"].x), len(a.splits["test"].x)) == (120, 60, 50)
    everything = divided(num_train=0, num_test=0)
    assert (len(everything.data.x), len(everything.splits["test"].x)) == (1438 - 60, 359)


def test_no_example_is_both_trained_and_evaluated_on() -> None:
    trial = divided(num_train=0, num_test=0)
    sets = [{row.tobytes() for row in np.asarray(x)} for x in (trial.data.x, *(s.x for s in trial.splits.values()))]
    assert [len(s) for s in sets] == [1378, 60, 359]
    assert not (sets[0] & sets[1]) and not (sets[0] & sets[2]) and not (sets[1] & sets[2])
    labels, offsets = np.asarray(trial.data.y)[np.asarray(trial.data.indices)], np.asarray(trial.data.offsets)
    assert all(len(set(labels[a:b])) == 2 for a, b in itertools.pairwise(offsets))


@pytest.mark.parametrize("name", experiment.NAMES)
@pytest.mark.slow
def test_a_run_is_that_of_simulate(name: str) -> None:
    trial = divided(4)
    engine = single_device_engine(trial.data, "scan")
    build = experiment.builders(SETTINGS, trial)[name]
    found = trials.runner(build, engine, 3, 2)(trial, (0.1, 0.5))
    assert list(found.rounds) == [0, 2, 3]
    x, labels = trial.splits["test"]
    for i, rate in enumerate((0.1, 0.5)):
        algorithm, seen = build(learning_rate=rate), list[Array]()

        def look(state: PyTree, algorithm: Algorithm = algorithm, seen: list[Array] = seen) -> dict[str, Array]:
            seen.append(algorithm.predict(state, x).members)
            return {}

        run = simulate(algorithm, trial.data, 3, seed=4, mapping="scan", evaluate_every=2, evaluate=look)
        for e, members in enumerate(seen):
            for metric, score in trials.SCORES.items():
                value = score(members, labels)
                np.testing.assert_allclose(found.metrics[f"test.{metric}"][0, i, e], value, rtol=1e-4, atol=1e-6)
        bins = trials.bins_of(found.metrics, (0, i, -1))
        np.testing.assert_array_equal(bins.examples, uncertainty.reliability(seen[-1], labels).examples)
        sent = trials.bytes_on_the_wire(algorithm, trial.data, 4, found.rounds)
        ledger = [(e.uplink_bytes, e.downlink_bytes) for e in run.history.evaluations]
        assert sent.tolist() == [list(row) for row in ledger]
    assert abs(found.metrics["test.nll"][0, 0, -1] - found.metrics["test.nll"][0, 1, -1]) > 0.01
    other = trials.runner(build, engine, 3, 2)(divided(5), (0.1,))
    assert abs(other.metrics["test.nll"][0, 0, -1] - found.metrics["test.nll"][0, 0, -1]) > 1e-3


def test_trials_share_a_compiled_program() -> None:
    compiled: list[int] = []

    def build(learning_rate: object):  # type: ignore[no-untyped-def]
        compiled.append(1)
        model = models.build("mlp", 64, 10, widths=(4,))
        return algorithms.fed_avg(
            model, schedule.all_clients(6), client_learning_rate=learning_rate, work=Work(steps=1), loss="cross_entropy"
        )

    made = [divided(seed) for seed in range(3)]
    largest = max(int(np.max(np.diff(np.asarray(t.data.offsets)))) for t in made)
    engine = single_device_engine(made[0].data, "scan")._replace(max_client_size=largest)
    run = trials.runner(build, engine, 2, 1)
    run(made[0], (0.1, 0.2))
    once = len(compiled)
    for trial in made[1:]:
        run(trial, (0.1, 0.2))
    assert len(compiled) == once


def test_bytes_of_a_schedule_that_sends_twice_are_twice() -> None:
    trial = divided()
    model = models.build("mlp", 64, 10, widths=(4,))
    one, two = (
        algorithms.fed_avg(model, schedule.all_clients(6, k), client_learning_rate=0.1, work=Work(steps=1),
                        loss="cross_entropy")
        for k in (1, 2)
    )  # fmt: skip
    rounds = np.array([0, 2])
    a, b = (trials.bytes_on_the_wire(algorithm, trial.data, 0, rounds) for algorithm in (one, two))
    assert a[1, 0] > 0 and b.tolist() == (2 * a).tolist()


def made(validation: np.ndarray, test: np.ndarray) -> Sweep:
    """A sweep of two methods by three rates, from accuracies [seeds, 6]."""
    configs = tuple({"method": m, "learning_rate": r} for m in ("a", "b") for r in (0.1, 0.3, 1.0))
    metrics = {"validation.accuracy": validation[..., None], "test.accuracy": test[..., None]}
    metrics |= {"validation.nll": -validation[..., None], "test.nll": -test[..., None]}
    return Sweep(configs, tuple(range(len(validation))), np.array([5]), metrics)


def test_each_method_takes_its_own_best_rate_on_validation_examples() -> None:
    validation = np.array([[0.5, 0.9, 0.1, 0.2, 0.3, np.nan]] * 3)
    test = np.array([[0.99, 0.4, 0.0, 0.99, 0.8, 0.99]] * 3) + np.array([[0.0], [0.01], [0.02]])
    found = made(validation, test)
    for criterion in ("accuracy", "nll"):
        a, b = (choice.choose_rate(found, m, criterion) for m in "ab")
        assert (a.rate, a.place, a.at_edge) == (0.3, 1, False)  # not the best on test examples
        assert (b.rate, b.place, b.at_edge) == (0.3, 4, False)  # never a rate that is not finite
    assert choice.choose_rate(made(validation[:, ::-1], test), "a", "accuracy").rate == 0.3
    rising = made(np.array([[0.1, 0.2, 0.3, 0.3, 0.2, 0.1]] * 2), test[:2])
    assert [choice.choose_rate(rising, m, "accuracy")[::2] for m in "ab"] == [(1.0, True), (0.1, True)]
    pair = choice.pair(found, a, b, "accuracy", "accuracy")
    assert (pair.baseline, pair.method) == (pytest.approx(0.41), pytest.approx(0.81))
    assert pair.difference.mean == pytest.approx(0.4) and pair.verdict == "better"
    assert choice.pair(found, b, a, "accuracy", "accuracy").verdict == "worse"
    assert choice.pair(found, a, b, "nll", "nll").verdict == "better"  # lower is
    noisy = made(validation, np.random.default_rng(0).uniform(size=(3, 6)))
    assert choice.pair(noisy, a, b, "accuracy", "accuracy").verdict == "undecided"


def test_every_file_is_registered_and_says_what_it_is() -> None:
    found = {
        m.name.removeprefix("fedtangent.experiments.")
        for m in pkgutil.walk_packages(experiments.__path__, "fedtangent.experiments.")
        if m.name.count(".") == 3
    }
    assert found == set(experiments.NAMES)
    for name in experiments.NAMES:
        assert experiments.get(name).datasets[0] in ("digits", "sine", "digits_and_sine")  # none needs files
        assert len(experiments.get(name).description.split()) > 4
    for (dataset, scale), settings in experiment.SETTINGS.items():
        assert dataset in experiment.EXPERIMENT.datasets and scale in contract.SCALES
        assert settings.classes_per_client == 2 and settings.num_models == 5


def test_a_fashion_mnist_trial(data_dir) -> None:  # type: ignore[no-untyped-def]
    trial = trials.divide("fashion_mnist", data_dir, 0, **SIZES)
    assert trial.data.x.shape == (120, 784) and trial.data.x.dtype == jnp.float32
