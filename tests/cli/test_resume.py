"""``fedtangent train --resume``: the same files as an uninterrupted run, or one clear line."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedtangent._src.cli import train
from fedtangent._src.engine import Evaluation, Measurement

from ..metrics_file import alike

RUN = ["train", "--algorithm", "fed_ensemble", "--num-models", "2", "--num-train", "200", "--num-clients", "4"]
RUN += ["--widths", "8", "--num-rounds", "9", "--evaluate-every", "4", "--checkpoint-every", "2"]


def but(**changes: int) -> list[str]:
    """``RUN`` with other numbers: an option is given once."""
    words = list(RUN)
    for name, value in changes.items():
        words[words.index(f"--{name.replace('_', '-')}") + 1] = str(value)
    return words


pytestmark = pytest.mark.usefixtures("kept_builds")


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """``stopped(4)``: runs get a SIGTERM at the evaluation of round 4; ``stopped(None)``: no longer."""
    simulate = train.simulate_rounds

    def at(round_: int | None) -> None:
        def interrupted(*arguments: Any, evaluation: Evaluation, **options: Any) -> Any:
            def then(row: Measurement) -> None:
                evaluation.report(row)  # type: ignore[misc]
                if row.round == round_:
                    os.kill(os.getpid(), signal.SIGTERM)

            return simulate(*arguments, evaluation=dataclasses.replace(evaluation, report=then), **options)

        monkeypatch.setattr(train, "simulate_rounds", interrupted)

    return at


def test_a_stopped_run_ends_as_if_it_had_not_been(run: Callable, folder: Path, stopped: Callable) -> None:
    assert run(*RUN, "--output", "whole").code == 0
    stopped(4)
    ended = run(*RUN, "--output", "out")
    assert ended.code == 128 + signal.SIGTERM
    assert ended.err.startswith("fedtangent: stopped by SIGTERM at round ")
    assert ended.err.endswith(": continue with the same options and --resume\n")
    assert ended.err.count("\n") == 1
    assert not (folder / "out" / "result.json").exists()
    stopped(None)
    ended = run(*RUN, "--output", "out", "--resume")
    assert (ended.code, ended.err) == (0, "")
    assert alike(folder / "out") == alike(folder / "whole")


def test_a_finished_run_is_extended_and_may_move(run: Callable, folder: Path) -> None:
    assert run(*RUN, "--output", "whole").code == 0
    assert run(*but(num_rounds=5), "--output", "short").code == 0
    assert alike(folder / "short") != alike(folder / "whole")
    (folder / "short").rename(folder / "moved")
    assert run(*but(checkpoint_every=3), "--output", "moved", "--resume").code == 0
    assert alike(folder / "moved") == alike(folder / "whole")
    options = json.loads((folder / "moved" / "config.json").read_text())["options"]
    assert (options["num_rounds"], options["resume"]) == (9, True)


@pytest.mark.slow
def test_several_seeds_continue_where_one_was_stopped(run: Callable, folder: Path, stopped: Callable) -> None:
    assert run(*RUN, "--seeds", "0,3", "--output", "whole").code == 0
    stopped(4)
    assert run(*RUN, "--seeds", "0,3", "--output", "out").code == 128 + signal.SIGTERM
    stopped(None)
    ended = run(*RUN, "--seeds", "0,3", "--output", "out", "--resume")
    assert (ended.code, ended.err) == (0, "")
    assert alike(folder / "out") == alike(folder / "whole")
    seeds = {line.split(",")[2] for line in (folder / "out" / "metrics.csv").read_text().splitlines()[1:]}
    assert seeds == {"0", "3"}


@pytest.mark.slow
def test_of_several_seeds_one_may_have_no_checkpoint_yet(run: Callable, folder: Path) -> None:
    several = (*RUN, "--seeds", "0,3", "--output", "out")
    assert run(*several).code == 0
    before = alike(folder / "out")
    shutil.rmtree(folder / "out/checkpoints/seed-3/run-0001")
    assert run(*several, "--resume").code == 0
    assert alike(folder / "out") == before
    for seed in (0, 3):
        shutil.rmtree(folder / f"out/checkpoints/seed-{seed}/run-0001")
    ended = run(*several, "--resume")
    assert ended.code == 0 and "there is no checkpoint in out/checkpoints/seed-0: starting" in ended.err
    assert alike(folder / "out") == before


def test_a_full_disk_is_one_line(run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("fedtangent._src.output.files.write_atomically", full)
    ended = run(*RUN, "--output", "out")
    assert ended.code == 1
    assert ended.err == "fedtangent: error: No space left on device: out/config.json\n"


def tree(folder: Path) -> dict[Path, int]:
    """What there is, files with the time they were written; a folder's own is also that of its lock."""
    return {path: path.stat().st_mtime_ns if path.is_file() else 0 for path in folder.rglob("*")}


def refused(ended: Any, says: str) -> None:
    assert ended.code == 2, ended
    assert ended.err.startswith("fedtangent: error: ")
    assert ended.err.count("\n") == 1
    assert says in ended.err
    assert ended.out == ""


def test_what_cannot_be_resumed_is_one_line(run: Callable, folder: Path) -> None:
    ended = run(*RUN, "--output", "out", "--resume")  # where nothing was saved yet
    assert ended.code == 0
    assert ended.err == "fedtangent: there is no checkpoint in out/checkpoints: starting from the beginning\n"
    before = tree(folder)
    wider = ["9" if word == "8" else word for word in RUN]
    other = run(*wider, "--output", "out", "--resume", "--seed", "1", "--alpha", "0.6")
    refused(
        other, "with other options, seed (0 there, 1 here), alpha (0.5 there, 0.6 here), widths ([8] there, [9] here)"
    )
    refused(run(*but(num_rounds=8), "--output", "out", "--resume"), "num_rounds: got 8, must be at least")
    refused(run(*but(checkpoint_every=0), "--output", "out", "--resume"), "checkpoint_every: got 0")
    for record in folder.glob("out/checkpoints/run-*/round-*/record.json"):
        record.write_text("{")
        before[record] = record.stat().st_mtime_ns
    refused(run(*RUN, "--output", "out", "--resume"), "no good checkpoint in out/checkpoints/run-0001")
    assert tree(folder) == before


def test_damage_is_told_and_got_around(run: Callable, folder: Path) -> None:
    assert run(*RUN, "--output", "out").code == 0
    before = alike(folder / "out")
    (folder / "out/checkpoints/run-0001/round-00000009/record.json").write_text("{")
    ended = run(*RUN, "--output", "out", "--resume")
    assert ended.code == 0
    assert ended.err.startswith("fedtangent: the checkpoint of round 9 is damaged (record.json cannot be read)")
    assert ended.err.endswith("; going back to round 8\n")
    assert alike(folder / "out") == before


def test_no_checkpoints_if_none_are_wanted(run: Callable, folder: Path) -> None:
    assert run(*but(num_rounds=2, checkpoint_every=0), "--output", "out").code == 0
    assert not (folder / "out" / "checkpoints").exists()
