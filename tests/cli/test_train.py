"""``fedtangent train``, end to end, on small runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedtangent._src.cli import train, trained
from fedtangent._src.engine.history import Run
from fedtangent._src.measures import uncertainty
from fedtangent._src.output.files import Ended

from ..metrics_file import alike, rows_of
from ..nightly import nightly
from ..stand_ins import stand_in
from .asking import prepared

COLUMNS = "round,algorithm,seed,split,metric,value,uplink_bytes,downlink_bytes,seconds"
DIGITS = ["--num-train", "300", "--num-clients", "5", "--widths", "16", "--num-rounds", "4", "--evaluate-every", "2"]
RUNS = {
    "fed_avg": [*DIGITS, "--algorithm", "fed_avg"],
    "ntk_fl": [*DIGITS, "--algorithm", "ntk_fl", "--ntk-times", "100", "1000"],
    "sine": ["--dataset", "sine", "--partition", "by_user", "--model", "rbf_linear", "--num-rounds", "4"]
    + ["--evaluate-every", "3", "--algorithm", "fed_ensemble", "--num-models", "2", "--batch-size", "0"]
    + ["--client-learning-rate", "0.1"],
}
SEVERAL = [*DIGITS, "--algorithm", "fed_ensemble", "--num-models", "2", "--loss", "cross_entropy", "--seeds", "0,1"]
SEVERAL += ["--batch-size", "0", "--local-steps", "5"]

pytestmark = pytest.mark.usefixtures("kept_builds")


@pytest.mark.parametrize("name", nightly(RUNS, ["fed_avg"]))
def test_a_run_writes_its_files_and_prints_its_table(run: Callable, folder: Path, name: str) -> None:
    """By day that whose program other tests run too."""
    ended = run("train", *RUNS[name], "--output", "out")
    assert ended.code == 0, ended
    out = folder / "out"
    saved = out / "checkpoints"
    assert sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file() and saved not in p.parents) == [
        "config.json",
        "figures/learning_curves.png",
        "metrics.csv",
        "result.json",
    ]
    assert (out / "metrics.csv").read_text().splitlines()[0] == COLUMNS
    rows = rows_of(out)
    rounds = [0, 3, 4] if name == "sine" else [0, 2, 4]
    metrics = ["mse", *(["knowledge_variance"] if name == "sine" else ["accuracy", "accuracy_of_members"])]
    found = [(int(r["round"]), r["split"], r["metric"]) for r in rows]
    assert sorted(found) == sorted((r, s, m) for r in rounds for s in ("train", "test") for m in metrics)
    sent = {int(r["round"]): (int(r["uplink_bytes"]), int(r["downlink_bytes"])) for r in rows}
    assert sent[0] == (0, 0)
    assert sent[rounds[1]][0] < sent[4][0]
    assert all(np.isfinite(float(r["value"])) for r in rows)
    seconds = [float(r["seconds"]) for r in rows]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]
    result = json.loads((out / "result.json").read_text())
    last = {(r["split"], r["metric"]): float(r["value"]) for r in rows if r["round"] == "4"}
    assert {(r["split"], r["metric"]): r["value"] for r in result["rows"]} == last
    assert (result["rounds"], result["uplink_bytes"], result["downlink_bytes"]) == (4, *sent[4])
    assert "round 4" in ended.out and "privacy:" not in ended.out
    assert re.search(r"\n\w+, \w+ on \d+ clients; squared error, client learning rate [\d.]+\n", ended.out)
    start = {(r["split"], r["metric"]): float(r["value"]) for r in rows if r["round"] == "0"}
    if name == "sine":
        assert last["train", "mse"] < 0.7 * start["train", "mse"]
    else:  # 360 test examples: chance is 0.1 +- 0.016
        assert last["test", "accuracy"] > 0.4


def test_bytes_on_the_wire_are_the_models(run: Callable, folder: Path) -> None:
    run("train", *RUNS["fed_avg"], "--output", "out")
    parameters = 64 * 16 + 16 + 16 * 10 + 10
    assert {int(r["uplink_bytes"]) for r in rows_of(folder / "out")} == {r * 5 * 4 * parameters for r in (0, 2, 4)}


def test_a_configuration_repeats_a_run(run: Callable, folder: Path) -> None:
    assert run("train", *RUNS["fed_avg"], "--output", "a").code == 0
    config = json.loads((folder / "a" / "config.json").read_text())
    assert config["command"] == "train"
    assert config["options"]["schedule"] == "uniform"
    assert train.run_job(prepared("train --config a/config.json --output c")) == Ended()
    assert alike(folder / "a")[1] == alike(folder / "c")[1]  # which did not come to the end of the command


def test_a_run_that_diverges_ends_at_its_last_good_round(run: Callable, folder: Path) -> None:
    ended = run("train", *RUNS["fed_avg"], "--client-learning-rate", "1e12", "--output", "out")
    assert ended.code == 1
    assert ended.err.startswith("fedtangent: diverged at round ")
    assert ended.err.count("\n") == 1
    result = json.loads((folder / "out" / "result.json").read_text(), parse_constant=pytest.fail)
    assert result["status"].startswith("diverged at round ")
    assert result["rounds"] == int(result["status"].split()[-1]) - 1 < 4
    assert max(int(row["round"]) for row in rows_of(folder / "out")) == result["rounds"]


def test_a_table_averages_the_seeds_that_finished() -> None:
    def ended(status: str, at: int, mse: float) -> Any:
        seen = [SimpleNamespace(round=r, metrics={"train": {"mse": value}}) for r, value in ((0, 1.0), (at, mse))]
        return stand_in(Run, status=status, history=SimpleNamespace(evaluations=seen))

    good = {seed: ended("finished", 20, 0.25 + 0.5 * seed) for seed in (0, 1)}
    bad = {2: ended("diverged at round 7", 6, 40.0)}
    assert trained.counted(good | bad) == good and trained.counted(bad) == bad
    (row,) = trained.rows_of(good)
    assert row["value"] == 0.5 and row["seeds"] == 2
    assert trained.whose(good | bad, good) == "round 20, 2 of 3 seeds: the others diverged"
    assert trained.whose(good, good) == "round 20, mean of 2 seeds"
    worse = bad | {3: ended("diverged at round 3", 2, 60.0)}
    assert trained.whose(worse, worse) == "the last good round of each, mean of 2 seeds"


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
    run("train", *RUNS["fed_avg"], "--host-devices", "1", "--output", "out")
    config = json.loads((folder / "out" / "config.json").read_text())
    wanted = {"mapping": "scan", "seconds_a_round": {}, "data_dir": str(tmp_path)}
    assert config["resolved"] == wanted
    assert set(config["environment"]) == {"fedtangent", "jax", "jaxlib", "numpy", "python", "device"}
    assert config["environment"]["numpy"] == np.__version__


def test_several_seeds_are_several_runs_whose_reliability_is_pooled(
    run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedtangent._src.output import run_plots

    drawn: list[dict[str, list[uncertainty.Reliability]]] = []
    draw = run_plots.reliability_diagram

    def spy(methods: dict[str, list[uncertainty.Reliability]], *rest: Any) -> Path:
        drawn.append(methods)
        return draw(methods, *rest)

    monkeypatch.setattr(run_plots, "reliability_diagram", spy)
    assert run("train", *SEVERAL, "--figures", "svg", "--output", "out").code == 0
    assert {path.name for path in (folder / "out/figures").iterdir()} == {"learning_curves.svg", "reliability.svg"}
    assert json.loads((folder / "out/config.json").read_text())["options"]["figures"] == "svg"
    rows = [r for r in rows_of(folder / "out") if (r["round"], r["split"]) == ("4", "test")]
    metrics = ["nll", "accuracy", "accuracy_of_members", "ece", "brier", "predictive_entropy", "mutual_information"]
    assert sorted(r["metric"] for r in rows if r["seed"] == "0") == sorted([*metrics, "knowledge_variance"])
    found = {(r["seed"], r["metric"]): float(r["value"]) for r in rows}
    assert all(found["0", name] != found["1", name] for name in ("nll", "brier"))  # another seed is another run
    result = json.loads((folder / "out" / "result.json").read_text())["rows"]
    shown = {row["metric"]: row["value"] for row in result if row["split"] == "test"}
    assert shown["nll"] == pytest.approx((found["0", "nll"] + found["1", "nll"]) / 2)
    assert len(drawn) == 1 and len(drawn[0]["fed_ensemble"]) == 2
    for seed, bins in enumerate(drawn[0]["fed_ensemble"]):  # in the order of the seeds
        assert found[str(seed), "ece"] == pytest.approx(float(uncertainty.calibration_error(bins)), rel=1e-6)


def test_clients_are_tested_on_their_own_examples(run: Callable, folder: Path) -> None:
    work = ["--batch-size", "0", "--local-steps", "5"]
    ended = run("train", *DIGITS, *work, "--algorithm", "ditto", "--client-test", "0.25", "--output", "out")
    assert ended.code == 0
    assert "accuracy over examples" in ended.out
    values = [
        float(r["value"]) for r in rows_of(folder / "out") if (r["split"], r["metric"]) == ("clients", "accuracy")
    ]
    assert len(values) == 3 and values[2] > values[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--mapping pmap", "mapping: got 'pmap', allowed are auto, scan, vmap"),
        ("--evaluate-every 0", "evaluate_every: got 0"),
        ("--checkpoint-every -1", "checkpoint_every: got -1"),
        ("--resume --checkpoint-every 0", "checkpoint_every: got 0, must be at least 1"),
        ("--seeds 0:4294967296", "seeds: got '0:4294967296', must be 1 to 100000"),
        ("--seeds 3:1", "seeds: got '3:1'"),
    ],
)
def test_what_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepared("train --num-train 40 --num-clients 2 --widths 4 " + line)


@pytest.mark.parametrize("name", nightly(["dp_fed_avg", "ntk_fl", "fed_be_no_distillation"], ["ntk_fl"]))
def test_the_last_line_the_result_and_the_exit_code_agree(run: Callable, folder: Path, name: str) -> None:
    more = ["--ntk-unstable", "allow"] if name == "ntk_fl" else []
    given = [
        "--algorithm",
        name,
        "--num-train",
        "40",
        "--num-clients",
        "4",
        "--num-rounds",
        "3",
        "--widths",
        "8",
        *more,
    ]
    ended = run("train", *given, "--client-learning-rate", "1e18", "--mapping", "scan", "--output", "out")
    result = json.loads((folder / "out" / "result.json").read_text())
    assert ended.code == result["exit_code"] == 1, ended
    assert ended.err.splitlines()[-1].startswith(f"fedtangent: {result['status']}: the results are those of round 0")
    assert re.match("(diverged|unstable) at round 1", result["status"]) and result["rounds"] == 0
