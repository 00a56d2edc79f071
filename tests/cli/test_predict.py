"""``fedtangent predict``, end to end: one run, several algorithms, what is repeated and what is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ..nightly import nightly
from .asking import asked

SIZES = {
    "num-train": 30,
    "num-test": 8,
    "num-clients": 4,
    "num-rounds": 3,
    "draws": 2,
    "batch-size": 0,
    "local-steps": 2,
}
TINY = [str(word) for name, value in SIZES.items() for word in (f"--{name}", value)]


def test_a_prediction_writes_its_files_and_ends_with_its_tables(run: Callable, folder: Path) -> None:
    ended = run("predict", *TINY, "--target", 1, "--output", "out")
    assert ended.code == 0
    for said in (
        "fed_avg at rate 1, round 3, predicted",
        "90 % of 2 starts",
        "best at round 3",
        "largest stable",
        "guaranteed stable below",
        "accuracy 1 is never reached in 3 rounds",
        "in the limit of many rounds it is",
    ):
        assert said in ended.out, said
    out = folder / "out"
    files = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
    assert files == ["config.json", "figures/predicted.png", "figures/rates.png", "metrics.csv", "result.json"]
    with (out / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert ",".join(rows[0]) == "round,algorithm,seed,split,metric,value,uplink_bytes,downlink_bytes,seconds"
    mine = [r for r in rows if (r["algorithm"], r["split"]) == ("fed_avg, predicted", "test")]
    assert {r["metric"] for r in mine} >= {"mse", "accuracy", "mse_p5", "mse_p95"}
    mse = {name: [float(r["value"]) for r in mine if r["metric"] == name] for name in ("mse", "mse_p5", "mse_p95")}
    assert len(mse["mse"]) == 4
    assert all(low <= mean <= high for low, mean, high in zip(mse["mse_p5"], mse["mse"], mse["mse_p95"], strict=True))
    result = json.loads((out / "result.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert [row["at"] for row in result] == ["given rate", "best rate"]
    assert result[0]["test_mse"] == pytest.approx(mse["mse"][-1], rel=1e-12) and result[0]["rounds_to_target"] is None
    assert result[1]["test_mse"] <= result[0]["test_mse"]


def test_several_algorithms_are_ranked_and_repeated(run: Callable, folder: Path) -> None:
    several = ("--algorithm", "fed_avg", "fed_prox", "fed_ensemble", "--mu", 2, "--num-models", 2)
    ended = run("predict", *TINY, *several, "--target", 0.01, "--figures", "pdf", "--output", "out")
    assert ended.code == 0
    assert {path.name for path in (folder / "out/figures").iterdir()} == {"predicted.pdf", "rates.pdf"}
    rows = json.loads((folder / "out" / "result.json").read_text())["rows"]
    best = [row for row in rows if row["at"] == "best rate"]
    assert {row["algorithm"] for row in best} == {"fed_avg", "fed_prox", "fed_ensemble"}
    losses = [row["test_mse"] for row in best]
    assert losses == sorted(losses) and len(set(losses)) == 3
    ranks = [ended.out.rindex(f"\n {row['algorithm']} ") for row in best]
    assert ranks == sorted(ranks)
    again = asked("predict", "--config", folder / "out" / "config.json", "--output", "again")
    described = again.arguments["described"].runs
    assert [d.algorithm.entry.name for d in described] == ["fed_avg", "fed_prox", "fed_ensemble"]
    assert described[1].algorithm.options.mu == 2 and described[2].schedule.options.num_models == 2
    assert described[0].schedule.entry.name == "uniform" and described[2].schedule.entry.name == "permutations"
    assert again.arguments["figures"].figures == "pdf" and again.arguments["options"].draws == 2
    assert all(d.run.num_rounds == 3 for d in described)
    one = asked("predict", "--config", folder / "out" / "config.json", "--algorithm", "fed_avg", "--output", "again")
    assert [d.algorithm.entry.name for d in one.arguments["described"].runs] == ["fed_avg"]


@pytest.mark.slow
def test_several_values_of_an_option_are_a_run_each(run: Callable, folder: Path) -> None:
    line = ["predict", *TINY, "--algorithm", "fed_prox", "fed_avg", "--mu", 0.5, 2, "--no-rates"]
    ended = run(*line, "--output", "out")
    assert ended.code == 0
    rows = json.loads((folder / "out" / "result.json").read_text())["rows"]
    found = {row["algorithm"]: row["test_mse"] for row in rows}
    assert found.keys() == {"fed_prox, mu 0.5", "fed_prox, mu 2.0", "fed_avg"} and len(set(found.values())) == 3
    alone = run("predict", *TINY, "--algorithm", "fed_prox", "--mu", 2, "--no-rates", "--output", "alone")
    assert alone.code == 0
    (row,) = json.loads((folder / "alone" / "result.json").read_text())["rows"]
    assert row["test_mse"] == found["fed_prox, mu 2.0"]
    again = asked("predict", "--config", folder / "out" / "config.json", "--output", "again").arguments["described"]
    repeated = [(d.algorithm.entry.name, getattr(d.algorithm.options, "mu", None)) for d in again.runs]
    assert repeated == [("fed_prox", 0.5), ("fed_prox", 2.0), ("fed_avg", None)]


def test_a_folder_that_holds_a_run_is_refused(run: Callable, folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "config.json").write_text(json.dumps({"command": "predict", "options": {}}))
    ended = run("predict", *TINY, "--output", "out")
    assert ended.code == 2 and "out holds a run: name another folder or --overwrite" in ended.err


@pytest.mark.parametrize(("rate", "steps"), nightly([("30", "2"), ("1e19", "8")], [("30", "2")]))
def test_a_run_that_is_predicted_to_diverge_is_said_to(run: Callable, folder: Path, rate: str, steps: str) -> None:
    ended = run("predict", *TINY[:-1], steps, "--no-rates", "--client-learning-rate", rate, "--output", "out")
    assert ended.code == 1 and "diverges at rate" in ended.err and "it is predicted" in ended.err
    (row,) = json.loads((folder / "out/result.json").read_text())["rows"]
    lost = [value is None for name, value in row.items() if name.startswith("test_")]
    assert all(lost) if steps == "8" else not any(lost)  # the accuracy of numbers that are none is none
