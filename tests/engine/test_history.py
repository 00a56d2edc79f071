"""What is run is shown in a line, and read as a table."""

from __future__ import annotations

import sys

import jax
import numpy as np
import pytest

import fedtangent
from fedtangent._src.data import partition
from fedtangent._src.engine.history import LOST, lost
from fedtangent._src.engine.sweeps import Sweep

from . import stateful


def sweep() -> Sweep:
    """Two seeds, three configurations, evaluations after rounds 0 and 4; every number says where it stands."""
    configs = tuple({"mu": mu, "rule": rule} for mu, rule in ((0.1, "a"), (0.1, "b"), (0.5, "a")))
    places = np.arange(12).reshape(2, 3, 2)
    metrics = {"accuracy": places / 100, "each": np.stack([places, -places], axis=-1)}
    return Sweep(configs, (7, 9), np.array([0, 4]), metrics)


def test_data_are_shown_in_a_line() -> None:
    digits = fedtangent._src.data.load("digits")
    clients = partition.iid(len(digits.y_train), num_clients=7, seed=0)
    held = fedtangent._src.data.federated_data(digits.x_train, digits.y_train, clients, num_classes=10)
    for shown in (digits, clients, held, jax.tree.map(jax.numpy.shape, held), jax.tree.map(jax.numpy.shape, clients)):
        assert len(repr(shown)) < 300 and "\n" not in repr(shown)
    assert "x_train float" in repr(digits) and "(1438, 8, 8, 1)" in repr(digits) and "10 classes" in repr(digits)
    assert repr(clients) == "Partition(1438 examples on 7 clients of 205 to 206)"
    assert "y int32 (1438,), indices int32 (1438,), offsets int32 (8,)" in repr(held)
    jax.jit(lambda data: repr(data) and data.y.sum())(held)  # as it is traced, too


def test_what_runs_is_shown_in_a_line() -> None:
    model, algorithm = fedtangent._src.models.mlp(5, 3, (6,)), stateful.algorithm()
    assert repr(model) == "Model(mlp(5-6-3, relu, ntk), output_size=3)"
    assert repr(algorithm) == f"Algorithm(stateful, {algorithm.schedule!r})"
    assert repr(algorithm.schedule) == "Schedule(num_models=2, num_clients=7, num_slots=6)"


def test_a_run_is_shown_in_a_line() -> None:
    run = stateful.run()
    history = "History(11 rounds, 5 evaluations, the last at round 11: train norm "
    assert repr(run).startswith(f"Run(finished, {history}")
    assert repr(run.history).startswith(history)
    assert len(repr(run)) < 200 and "array(" not in repr(run) and "\n" not in repr(run)
    assert "array" in repr(run.history.evaluations[0])  # which have some to show
    empty = run.history._replace(evaluations=[])
    assert repr(empty) == "History(11 rounds, 0 evaluations)"
    bare = run.history._replace(evaluations=[e._replace(metrics={}) for e in run.history.evaluations])
    assert repr(bare) == "History(11 rounds, 5 evaluations, the last at round 11, without metrics)"
    assert repr(run._replace(state=None, history=empty)) == f"Run(finished, {empty!r}, state of 0 arrays, 0 MiB)"


def test_a_sweep_is_shown_in_a_line() -> None:
    found = "Sweep(3 configurations of mu, rule, 2 seeds, 2 evaluations up to round 4: accuracy, each)"
    assert repr(sweep()) == found


def test_a_history_as_a_table() -> None:
    history = stateful.run().history
    table = history.to_pandas()
    assert list(table.columns[:5]) == ["round", "uplink_bytes", "downlink_bytes", "seconds", "train.norm"]
    assert list(table["round"]) == [0, 3, 6, 9, 11]
    assert list(table["train.norm"]) == [e.metrics["train"]["norm"] for e in history.evaluations]
    assert table["train.norm"].dtype == np.float64 and table["scalar"].dtype == np.float32
    assert list(table["uplink_bytes"]) == [e.uplink_bytes for e in history.evaluations]
    np.testing.assert_array_equal(table["weights"][4], history.evaluations[4].metrics["weights"])
    history.evaluations[1].metrics["late"] = 5.0
    assert list(history.to_pandas()["late"].isna()) == [True, False, True, True, True]


def test_a_sweep_as_a_table() -> None:
    found = sweep()
    table = found.to_pandas()
    assert list(table.columns) == ["mu", "rule", "seed", "round", "accuracy", "each"]
    assert len(table) == 12
    for s, seed in enumerate(found.seeds):
        for c, config in enumerate(found.configs):
            for e, round_ in enumerate(found.rounds):
                place = (table["seed"] == seed) & (table["round"] == round_)
                place &= (table["mu"] == config["mu"]) & (table["rule"] == config["rule"])
                assert list(table[place]["accuracy"]) == [found.metrics["accuracy"][s, c, e]]
                np.testing.assert_array_equal(table[place]["each"].item(), found.metrics["each"][s, c, e])
    with pytest.raises(ValueError, match="metrics: got the name 'mu', must not be one of mu, rule, seed, round"):
        found._replace(metrics={"mu": found.metrics["accuracy"]}).to_pandas()


def test_without_pandas_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for table in (stateful.run().history.to_pandas, sweep().to_pandas):
        with pytest.raises(ImportError, match=r"^pandas: is not installed: pip install 'fedtangent\[notebooks\]'$"):
            table()


def test_what_a_run_drops_is_counted_in_words() -> None:
    rounds = {name: np.array([[2**31 - 1, 2], [0, 1]]) for name in LOST}  # more than int32 holds
    said = lost(rounds)
    assert len(said) == len(LOST) and all(line.startswith("2147483650 ") for line in said)
    assert lost({name: np.zeros((2, 2), bool) for name in LOST}) == lost({}) == []
    weight = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    assert lost({"model_weight": weight}) == ["1 of 3 models were never trained, and count in the average"]
    assert lost({"model_weight": weight[:0]}) == lost({"model_weight": weight + 1}) == []
