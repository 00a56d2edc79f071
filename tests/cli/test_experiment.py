"""``fedtangent experiment``, end to end, on tiny settings; bad input ends before any work."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedtangent import experiments
from fedtangent.cli import experiment
from fedtangent.experiments.lab import trials
from fedtangent.experiments.lab.contract import Sheet
from fedtangent.output.files import Metric

NAME = "fed_ensemble.versus_fed_avg"
TINY = ["--set", "num_clients=6", "num_models=2", "num_rounds=3", "evaluate_every=2", "local_epochs=1", "width=8"]
TINY += ["learning_rates=0.1,0.3", "num_train=120", "num_validation=60", "num_test=80"]


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: object, **options: object) -> None:
        pytest.fail("the work has started")

    monkeypatch.setattr(trials, "runner", started)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_an_experiment_writes_its_files_and_prints_its_tables(run: Callable, folder: Path) -> None:
    ended = run("experiment", NAME, *TINY, "--seeds", "3,5", "--output", "out")
    assert ended.code == 0, ended
    out = folder / "out"
    files = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
    assert files == ["config.json", "figures/by_round.png", "figures/reliability.png", "metrics.csv", "result.json"]
    rows = rows_of(out)
    assert tuple(rows[0]) == Metric._fields
    assert {int(r["seed"]) for r in rows} == {3, 5}
    assert {int(r["round"]) for r in rows} == {0, 2, 3}
    assert {r["algorithm"] for r in rows} == {
        f"{m} learning_rate={r}" for m in ("fed_avg", "fed_ensemble") for r in (0.1, 0.3)
    }
    parameters = 64 * 8 + 8 + 8 * 10 + 10
    for r in rows:  # the same bytes for both methods at every round: 6 models of float32 each way
        assert int(r["uplink_bytes"]) == int(r["downlink_bytes"]) == int(r["round"]) * 6 * 4 * parameters
    config = json.loads((out / "config.json").read_text())
    assert (config["command"], config["options"]["name"]) == ("experiment", NAME)
    assert config["resolved"]["seeds"] == [3, 5]
    assert config["resolved"]["settings"]["num_rounds"] == 3
    result = json.loads((out / "result.json").read_text())
    assert result["bytes_equal"] is True and result["failed"] == []
    assert len(result["rows"]) == 2 * 4 and len(result["grid"]) == 4
    for word in ("Fed-ensemble (K = 2) against FedAvg on digits", "95 % interval", "NLL", "ECE", "Brier", "uplink"):
        assert word in ended.out


@pytest.mark.slow
def test_the_table_is_that_of_the_t_test_on_metrics_csv(run: Callable, folder: Path) -> None:
    run("experiment", NAME, *TINY, "--seeds", "0:3", "--output", "out")
    rows = rows_of(folder / "out")

    def values(method: str, rate: float, split: str, metric: str) -> np.ndarray:
        wanted = (f"{method} learning_rate={rate:g}", split, metric, "3")
        found = {
            int(r["seed"]): r["value"] for r in rows if (r["algorithm"], r["split"], r["metric"], r["round"]) == wanted
        }
        return np.array([float(found[seed]) for seed in (0, 1, 2)])

    for row in json.loads((folder / "out" / "result.json").read_text())["rows"]:
        criterion = row["rates_chosen_by"].split()[-1]
        sign = 1 if criterion == "accuracy" else -1
        for method in ("fed_avg", "fed_ensemble"):  # each method by the same rule, on validation examples
            own = {rate: sign * values(method, rate, "validation", criterion).mean() for rate in (0.1, 0.3)}
            assert own[row[f"learning_rate_{method}"]] == max(own.values())
            test = values(method, row[f"learning_rate_{method}"], "test", row["metric"])
            assert row[method] == pytest.approx(test.mean(), rel=1e-6)
        pair = [values(m, row[f"learning_rate_{m}"], "test", row["metric"]) for m in ("fed_ensemble", "fed_avg")]
        interval = stats.ttest_rel(*pair).confidence_interval(0.95)
        ends = [row["difference"], row["low_95"], row["high_95"]]
        np.testing.assert_allclose(
            ends, [np.mean(pair[0] - pair[1]), interval.low, interval.high], rtol=1e-5, atol=1e-7
        )


def test_experiments_are_listed(run: Callable, folder: Path) -> None:
    ended = run("list", "experiments")
    assert ended.code == 0
    for name, description in experiments.available().items():
        assert name in ended.out and description.split(":")[0] in " ".join(ended.out.split())
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_unequal_bytes_make_the_experiment_fail(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = trials.bytes_on_the_wire

    def cheating(algorithm, *rest):  # type: ignore[no-untyped-def]
        return honest(algorithm, *rest) * (2 if algorithm.name == "fed_ensemble" else 1)

    monkeypatch.setattr(trials, "bytes_on_the_wire", cheating)
    ended = run("experiment", NAME, *TINY, "--seeds", "0,1", "--output", "out")
    assert ended.code == 1
    assert "does not count: the two methods did not send the same bytes" in ended.out


@pytest.mark.slow
def test_a_diverged_grid_makes_the_experiment_fail(run: Callable) -> None:
    ended = run("experiment", NAME, *TINY, "learning_rates=1e12", "--seeds", "0,1", "--output", "out")
    assert ended.code == 1
    assert "FedAvg: no learning rate of the grid gives finite numbers" in ended.out


BAD = {
    "name": (["x"], f"experiment: got 'x', allowed are {', '.join(experiments.NAMES)}"),
    "scale": ([NAME, "--scale", "huge"], "scale: got 'huge', allowed are smoke, paper"),
    "dataset": ([NAME, "--dataset", "sine"], "dataset: got 'sine', allowed are digits, fashion_mnist, mnist"),
    "one seed": ([NAME, "--seeds", "3"], "seeds: got 1, an interval needs at least 2"),
    "seeds": ([NAME, "--seeds", "a"], "seeds: got 'a'"),
    "seed twice": ([NAME, "--seeds", "0:3", "--seed", "2"], "seed: is used without seeds only"),
    "seed": ([NAME, "--seed", "-1"], "seed: got -1, must be from 0"),
    "setting": ([NAME, "--set", "rounds=3"], "set: got 'rounds', allowed are num_clients"),
    "no value": ([NAME, "--set", "num_rounds"], "set: got 'num_rounds', must be name=value"),
    "value": ([NAME, "--set", "num_rounds=x"], "set: num_rounds got 'x', must be a number like"),
    "values": ([NAME, "--set", "learning_rates=0.1,x"], "set: learning_rates got '0.1,x', must be numbers like"),
    "rounds": ([NAME, "--set", "num_rounds=0"], "num_rounds: got 0"),
    "K": ([NAME, "--set", "num_models=1"], "num_models: got 1, must be a whole number of at least 2"),
    "clients": ([NAME, "--set", "num_clients=0"], "num_clients: got 0"),
    "rate": ([NAME, "--set", "learning_rates=0.1,-1"], "got -1.0, must be positive and finite"),
    "model": ([NAME, "--set", "model=x"], "model: got 'x', allowed are mlp, cnn"),
    "classes": ([NAME, "--set", "classes_per_client=11"], "from 1 to 10"),
    "examples": ([NAME, "--set", "num_train=9999"], "num_train: got 9999, must be from 1 to 1150"),
    "validation": ([NAME, "--set", "num_validation=0"], "num_validation: got 0, must be from 1 to 1437"),
    "decay": ([NAME, "--set", "decay=2"], "factor: got 2.0"),
    "weight decay": ([NAME, "--set", "weight_decay=-1"], "weight_decay: got -1.0"),
    "no folder": ([NAME, "--dataset", "mnist", "--data-dir", "nowhere"], "nowhere is not a directory"),
}


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_before_any_work(run: Callable, folder: Path, name: str) -> None:
    arguments, says = BAD[name]
    ended = run("experiment", *arguments, "--output", "out")
    assert ended.code == 2, ended
    assert ended.err.startswith("fedtangent: error: ") and ended.err.count("\n") == 1, ended.err
    assert says in ended.err
    assert ended.out == ""
    assert list(folder.iterdir()) == []


def test_columns_of_words_stand_to_the_left():
    table = experiment._table(Sheet("t", ("a", "b", "c"), (("x", "1.5 +- .1", "holds"), ("y", "", "2 of 3"))))
    assert [column.justify for column in table.columns] == ["left", "right", "left"]
