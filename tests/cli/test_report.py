"""``fedtangent report``: the page of any runs, and for each the command line that means the same run."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedtangent._src.cli import main, report
from fedtangent._src.output.files import output_folder, write_config
from fedtangent._src.output.report import ReportedRun, read_run

from ..nightly import nightly
from ..output.pages import Page
from .asking import asked

LINES = [
    "train",
    "train --algorithm fed_prox --mu 0.5 --widths 8 9 --seeds 0:3 --data-dir 'a folder'",
    "train --algorithm fed_ensemble --base fed_dyn --mu 0.05 --num-models 2 --no-stop-on-divergence",
    "train --dataset sine --partition by_user --model rbf_linear --max-update-norm inf --keep-first 3",
    "predict --algorithm fed_avg scaffold --target 0.9",
    "predict --algorithm fed_avg fed_prox --mu 0.5",
    "compare --case sine --scale smoke",
    "compare --algorithm scaffold --loss cross_entropy --num-train 200",
    "experiment local_gd.fig1a --scale smoke --set num_rounds=3",
    "check-theory --only flow --seed 3",
]


def described(folder: Path, line: str) -> ReportedRun:
    """What a run of this line would say of itself."""
    command, *words = shlex.split(line)
    write_config(output_folder(folder), command, asked(command, *words).values)
    return read_run(folder)


@pytest.mark.parametrize("line", nightly(LINES, [LINES[i] for i in (1, 3, 5, 8)]))
def test_the_command_means_the_same_run(folder: Path, line: str) -> None:
    run = described(folder / "out", line)
    found = report.command_of(run)
    assert "--config" not in found and "--output" not in found
    program, command, *words = shlex.split(found)
    _, *given = shlex.split(line)
    assert (program, command) == ("fedtangent", run.command)
    again = asked(command, *words)
    assert again.identity == asked(command, *given).identity
    assert again.values.get("seeds") == asked(command, *given).values.get("seeds")
    assert len(words) <= len(given) + 2  # what was left to its default is not said
    if given:  # less of it is another run
        assert asked(command, *words[: 1 if command == "experiment" else 0]).identity != again.identity


def test_a_run_of_other_options_is_repeated_by_its_configuration(folder: Path) -> None:
    run = described(folder / "out", "train --mu 0.5 --algorithm fed_prox")
    run = run._replace(folder=Path("out folder"))
    config = json.loads((folder / "out/config.json").read_text())
    output_folder(Path("out folder"))
    config["options"]["an_option_of_long_ago"] = 1
    Path("out folder/config.json").write_text(json.dumps(config))
    assert report.command_of(run) == "fedtangent train --config 'out folder/config.json'"


@pytest.mark.usefixtures("no_training")
def test_runs_become_a_page(run: Callable, folder: Path) -> None:
    small = ["--num-train", "60", "--num-clients", "3", "--widths", "4", "--num-rounds", "2"]
    assert run("train", *small, "--output", "results/first").code == 0
    assert run("train", *small, "--seed", "3", "--output", "elsewhere").code == 0
    ended = run("report", "results", "elsewhere")
    assert ended.code == 0 and "2 runs, 2 figures in results/report/report.html" in ended.out, ended
    page = Page((folder / "results/report/report.html").read_text())
    assert page.faults == [] and len(page.images) == 2
    assert "fedtangent train --num-rounds 2 " in page.text and "--seed 3" in page.text
    before = (folder / "results/report/report.html").read_bytes()
    again = run("report", "results", "elsewhere")
    assert again.code == 2 and "output: results/report holds a run: name another folder or --overwrite" in again.err
    assert run("report", "--overwrite").code == 0  # results/, in which the report itself is no run
    assert (folder / "results/report/report.html").read_bytes() != before
    (folder / "results/first/result.json").unlink()
    (folder / "link").symlink_to("results/first")
    once = run("report", "results/first", "link", "results/../results/first", "--output", "other").out
    assert "unfinished" in once and "1 run, 1 figure in other/report.html" in once


def test_names_that_the_terminal_has_no_letters_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("\udcff", "日本", "<script>"):
        described(folder / "all" / name, "train")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with pytest.raises(SystemExit) as ended:
        main.main(["report", "all"])
    assert ended.value.code == 0
    assert all(f"all/{name} ".encode() in written.getvalue() for name in ("\\udcff", "\\u65e5\\u672c", "<script>"))
    assert Page((folder / "results/report/report.html").read_text(encoding="utf-8")).faults == []


@pytest.mark.usefixtures("no_training")
def test_what_is_refused(run: Callable, folder: Path) -> None:
    assert run("train", "--num-train", 60, "--num-clients", 3, "--widths", 4, "--output", "a").code == 0
    (folder / "empty").mkdir()
    (folder / "bad").mkdir()
    (folder / "bad" / "config.json").write_text("{")
    (folder / "odd" / "metrics.csv").mkdir(parents=True)
    write_config(folder / "odd", "train", {})
    for words, says in (
        (["odd"], "runs: cannot read odd/metrics.csv: Is a directory"),
        (["none"], "runs: got none, must be a folder"),
        ([], "runs: got results, must be the folder of a run"),
        (["a", "empty"], "runs: got empty, must be the folder of a run, or have folders of runs in it"),
        (["bad"], "runs: bad/config.json cannot be read: Expecting property name"),
        (["a", "--output", "a"], "output: got a, which is one of the runs"),
        (["a", "--output", "a", "--overwrite"], "output: got a, which is one of the runs"),
    ):
        before = sorted(folder.rglob("*"))
        ended = run("report", *words)
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
        assert ended.err.startswith(f"fedtangent: error: {says}"), ended.err
        assert sorted(folder.rglob("*")) == before
