"""``fedtangent train``, end to end, on small runs."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedtangent.cli import measures, train
from fedtangent.cli.job import Split
from fedtangent.cli.options import TrainOptions
from fedtangent.measures import uncertainty
from fedtangent.types import Prediction

COLUMNS = "round,algorithm,seed,split,metric,value,uplink_bytes,downlink_bytes"
DIGITS = ["--num-train", "300", "--num-clients", "5", "--widths", "16", "--num-rounds", "4", "--evaluate-every", "2"]
RUNS = {
    "fed_avg": [*DIGITS, "--algorithm", "fed_avg"],
    "fed_ensemble": [*DIGITS, "--algorithm", "fed_ensemble", "--num-models", "2"],
    "cross_entropy": [*DIGITS, "--algorithm", "fed_ensemble", "--num-models", "2", "--loss", "cross_entropy"],
    "ntk_fl": [*DIGITS, "--algorithm", "ntk_fl", "--ntk-times", "100", "1000"],
    "sine": ["--dataset", "sine", "--partition", "by_user", "--model", "rbf_linear", "--num-rounds", "4"]
    + ["--evaluate-every", "3", "--algorithm", "fed_ensemble", "--num-models", "2", "--batch-size", "0"]
    + ["--client-learning-rate", "0.1"],
}


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_writes_its_files_and_prints_its_table(run: Callable, folder: Path, name: str) -> None:
    ended = run("train", *RUNS[name], "--output", "out")
    assert ended.code == 0, ended
    out = folder / "out"
    curve = "mse.png" if name == "sine" else "accuracy.png"
    saved = out / "checkpoints"
    assert sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file() and saved not in p.parents) == [
        "config.json",
        f"figures/{curve}",
        *(["figures/reliability.png"] if name == "cross_entropy" else []),
        "metrics.csv",
        "result.json",
    ]
    assert (out / "metrics.csv").read_text().splitlines()[0] == COLUMNS
    rows = rows_of(out)
    rounds = [0, 3, 4] if name == "sine" else [0, 2, 4]
    metrics = ["nll" if name == "cross_entropy" else "mse"]
    metrics += [] if name == "sine" else ["accuracy", "accuracy_of_members"]
    metrics += ["ece", "brier", "predictive_entropy", "mutual_information"] if name == "cross_entropy" else []
    metrics += ["knowledge_variance"] if name in ("fed_ensemble", "cross_entropy", "sine") else []
    found = [(int(r["round"]), r["split"], r["metric"]) for r in rows]
    assert sorted(found) == sorted((r, s, m) for r in rounds for s in ("train", "test") for m in metrics)
    sent = {int(r["round"]): (int(r["uplink_bytes"]), int(r["downlink_bytes"])) for r in rows}
    assert sent[0] == (0, 0)
    assert sent[rounds[1]][0] < sent[4][0]
    assert all(np.isfinite(float(r["value"])) for r in rows)
    result = json.loads((out / "result.json").read_text())
    last = {(r["split"], r["metric"]): float(r["value"]) for r in rows if r["round"] == "4"}
    assert {(r["split"], r["metric"]): r["value"] for r in result["rows"]} == last
    assert (result["rounds"], result["uplink_bytes"], result["downlink_bytes"]) == (4, *sent[4])
    assert "round 4" in ended.out
    start = {(r["split"], r["metric"]): float(r["value"]) for r in rows if r["round"] == "0"}
    if name == "sine":
        assert last["train", "mse"] < 0.7 * start["train", "mse"]
    else:  # 360 test examples: chance is 0.1 +- 0.016
        assert last["test", "accuracy"] > 0.4


def test_bytes_on_the_wire_are_the_models(run: Callable, folder: Path) -> None:
    run("train", *RUNS["fed_avg"], "--output", "out")
    parameters = 64 * 16 + 16 + 16 * 10 + 10
    assert {int(r["uplink_bytes"]) for r in rows_of(folder / "out")} == {r * 5 * 4 * parameters for r in (0, 2, 4)}


def test_a_seed_and_a_configuration_repeat_a_run(run: Callable, folder: Path) -> None:
    for output, seed in (("a", 3), ("b", 4)):
        assert run("train", *RUNS["fed_ensemble"], "--seed", seed, "--output", output).code == 0
    config = json.loads((folder / "a" / "config.json").read_text())
    assert config["command"] == "train"
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in config["options"].items()}
    again = TrainOptions(**{**options, "output": folder / "c"})
    assert again.local_epochs == 5  # a default that depends on others is written as it was used
    assert train.run_job(train.prepare(again)) == 0
    first, other, repeated = ((folder / name / "metrics.csv").read_bytes() for name in "abc")
    assert first == repeated
    values = [[r["value"] for r in rows_of(folder / name)] for name in "ab"]
    assert values[0] != values[1]
    assert first != other


def test_a_run_that_diverges_ends_at_its_last_good_round(run: Callable, folder: Path) -> None:
    ended = run("train", *RUNS["fed_avg"], "--client-learning-rate", "1e12", "--output", "out")
    assert ended.code == 1
    assert ended.err.startswith("fedtangent: diverged at round ")
    assert ended.err.count("\n") == 1
    result = json.loads((folder / "out" / "result.json").read_text(), parse_constant=pytest.fail)
    assert result["status"].startswith("diverged at round ")
    assert result["rounds"] == int(result["status"].split()[-1]) - 1 < 4
    assert max(int(row["round"]) for row in rows_of(folder / "out")) == result["rounds"]


def test_a_run_that_diverges_can_be_let_run(run: Callable, folder: Path) -> None:
    given = ["--client-learning-rate", "1e12", "--no-stop-on-divergence", "--output", "out"]
    ended = run("train", *RUNS["fed_avg"], *given)
    assert ended.code == 1
    assert "diverged" in ended.err
    result = json.loads((folder / "out" / "result.json").read_text(), parse_constant=pytest.fail)
    assert result["rounds"] == 4
    assert any(row["value"] is None for row in result["rows"])


def test_the_config_says_what_the_options_stood_for(
    run: Callable, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDTANGENT_DATA", str(tmp_path))
    run("train", *RUNS["fed_ensemble"], "--host-devices", "1", "--output", "out")
    config = json.loads((folder / "out" / "config.json").read_text())
    wanted = {"schedule": "permutations", "mapping": "scan", "seconds_a_round": {}, "data_dir": str(tmp_path)}
    assert config["resolved"] == wanted
    assert set(config["environment"]) == {"fedtangent", "jax", "jaxlib", "numpy", "python", "device"}
    assert config["environment"]["numpy"] == np.__version__


@pytest.mark.parametrize(("loss", "metric"), [("cross_entropy", "nll"), ("squared_error", "mse")])
def test_measures_against_plain_formulas(loss: str, metric: str) -> None:
    rng = np.random.default_rng(0)
    members, labels = rng.standard_normal((3, 20, 4)), rng.integers(0, 4, 20)
    targets = np.eye(4)[labels] - 0.25
    found = measures.measure(
        Prediction(members.mean(axis=0), members),  # type: ignore[arg-type]
        Split(np.zeros((20, 1)), targets, labels),  # type: ignore[arg-type]
        loss,
    )
    probability = np.exp(members) / np.exp(members).sum(axis=-1, keepdims=True)
    mean = probability.mean(axis=0) if loss == "cross_entropy" else members.mean(axis=0)
    nll = -np.mean(np.log(mean[np.arange(20), labels])) if loss == "cross_entropy" else np.mean((mean - targets) ** 2)
    assert found[metric] == pytest.approx(nll, rel=1e-12)
    assert found["accuracy"] == np.mean(mean.argmax(axis=-1) == labels)
    assert found["accuracy_of_members"] == pytest.approx(np.mean(members.argmax(axis=-1) == labels), rel=1e-12)
    assert found["knowledge_variance"] == pytest.approx(np.mean(members.var(axis=0)), rel=1e-12)
    assert list(found) == [m for m in measures.METRICS if m in found]
    if loss == "cross_entropy":
        entropy = -np.sum(mean * np.log(mean), axis=-1)
        own = -np.sum(probability * np.log(probability), axis=-1).mean(axis=0)
        assert found["predictive_entropy"] == pytest.approx(entropy.mean(), rel=1e-12)
        assert found["mutual_information"] == pytest.approx((entropy - own).mean(), rel=1e-10)
        assert found["brier"] == pytest.approx(np.mean(np.sum((mean - np.eye(4)[labels]) ** 2, axis=-1)), rel=1e-12)
        assert 0 < found["ece"] < 1


def test_a_single_model_has_nothing_to_disagree_about() -> None:
    members, labels = np.random.default_rng(0).standard_normal((1, 20, 4)), np.zeros(20, int)
    split = Split(np.zeros((20, 1)), np.eye(4)[labels], labels)  # type: ignore[arg-type]
    found = measures.measure(Prediction(members[0], members), split, "cross_entropy")  # type: ignore[arg-type]
    assert set(found) == set(measures.METRICS) - {"mse", "mutual_information", "knowledge_variance"}


def test_the_reliability_diagram_pools_the_seeds(run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedtangent.output import run_plots

    drawn: list[dict[str, list[uncertainty.Reliability]]] = []
    monkeypatch.setattr(run_plots, "reliability_diagram", lambda methods, *rest: drawn.append(methods))
    given = [*RUNS["fed_avg"], "--loss", "cross_entropy", "--client-learning-rate", "0.1", "--seeds", "0,1"]
    assert run("train", *given, "--output", "out").code == 0
    rows = [r for r in rows_of(folder / "out") if (r["round"], r["split"], r["metric"]) == ("4", "test", "ece")]
    assert len(drawn) == 1 and len(drawn[0]["fed_avg"]) == len(rows) == 2
    for row, bins in zip(rows, drawn[0]["fed_avg"], strict=True):  # in the order of the seeds
        assert float(row["value"]) == pytest.approx(float(uncertainty.calibration_error(bins)), rel=1e-6)
