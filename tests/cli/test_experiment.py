"""``fedtangent experiment``, end to end, on tiny settings; bad input ends before any work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedtangent._src import entries
from fedtangent._src.cli import commands, experiment, main
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import changed
from fedtangent._src.output.files import Metric

from ..metrics_file import rows_of

NAME = "fed_ensemble.versus_fed_avg"
TINY = ["--scale", "smoke", "--set", "num_clients=6", "num_models=2", "num_rounds=3", "evaluate_every=2"]
TINY += ["local_epochs=1", "width=8", "learning_rates=0.1,0.3", "num_train=120", "num_validation=60", "num_test=80"]


def test_an_experiment_writes_its_files_and_prints_its_tables(run: Callable, folder: Path) -> None:
    ended = run("experiment", NAME, *TINY, "--seeds", "3,5", "--figures", "pdf")
    assert ended.code == 0, ended
    out = folder / "results" / "experiment" / NAME  # where it goes by itself
    files = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file() and p.parent.name != "runs")
    assert len(list((out / "runs").iterdir())) == 2 * 2 * 2
    assert files == [
        "config.json",
        "figures/by_round.pdf",
        "figures/reliability.pdf",
        "metrics.csv",
        "result.json",
    ]
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
    assert config["options"]["figures"] == "pdf"
    assert config["resolved"]["seeds"] == [3, 5]
    assert config["resolved"]["settings"]["num_rounds"] == 3
    result = json.loads((out / "result.json").read_text())
    assert result["bytes_equal"] is True and result["failed"] == []
    assert len(result["rows"]) == 2 * 4 and len(result["grid"]) == 4
    for word in ("Fed-ensemble (K = 2) against FedAvg on digits", "95 % interval", "NLL", "ECE", "Brier", "uplink"):
        assert word in ended.out


@pytest.mark.parametrize(
    ("verdict", "strict", "code"), [("undecided", False, 0), ("undecided", True, 3), ("seen", True, 0)]
)
def test_an_undecided_claim_is_named_in_the_last_line(
    run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch, verdict: str, strict: bool, code: int
) -> None:
    found = lab.Outcome((), [], (lab.Claim("more is better", "0.1 [-1, 1.2]", verdict),))
    monkeypatch.setattr(experiment, "perform", lambda entry, study: found)
    ended = run("experiment", NAME, *TINY, "--seeds", "3,5", *["--strict"] * strict)
    assert ended.code == code == (3 if strict and found.undecided else 0)
    last = (ended.err if code else ended.out).strip().splitlines()[-1].removeprefix("fedtangent: ")
    assert (last == "undecided: more is better") == (verdict == "undecided")


def test_experiments_are_listed(run: Callable, folder: Path) -> None:
    ended = run("list", "experiments")
    assert ended.code == 0
    for name, entry in entries.catalogue("experiments").items():
        assert name in ended.out and entry.summary.split(":")[0] in " ".join(ended.out.split())
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", entries.catalogue("experiments"))
def test_the_help_of_an_experiment_names_its_own_data_sets(name: str) -> None:
    page = main.help_page(commands.find("experiment"), [name])
    said = " ".join(page[page.index("  --dataset") : page.index("  --set")].split())
    scales = entries.catalogue("experiments")[name].scales
    assert said.endswith(f": {', '.join(scales)}")
    for scale in ("smoke", "default"):
        page = main.help_page(commands.find("experiment"), [name, "--scale", scale])
        settings = next(iter(scales.values()))[scale]
        shown = dict(word.strip(",.").split("=") for word in page.partition("  --set")[2].split() if "=" in word)
        changes = [f"{field}={value}" for field, value in shown.items() if field in vars(settings)]
        assert changed(settings, changes) == settings and len(changes) == len(vars(settings))
