"""The files of an output folder: whole or not at all, and readable by other programs."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from fedtangent._src import storage
from fedtangent._src.output import files


class Pair(NamedTuple):
    a: object
    b: object


@dataclass(frozen=True)
class Options:
    path: Path
    widths: tuple[int, ...]
    pair: Pair


def test_what_json_knows(tmp_path: Path) -> None:
    value = {
        "options": Options(Path("a/b"), (1, 2), Pair(np.float32(0.5), np.int64(3))),
        "nan": [float("nan"), float("inf"), np.float64("nan"), np.array([1.0, np.nan])],
        "flags": [True, np.bool_(False), None],
        3: "three",
    }
    files.write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "options": {"path": "a/b", "widths": [1, 2], "pair": {"a": 0.5, "b": 3}},
        "nan": [None, None, None, [1.0, None]],
        "flags": [True, False, None],
        "3": "three",
    }
    assert text.endswith("\n")


def test_a_failing_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    files.write_json(path, {"old": 1})

    def killed(source: object, target: object) -> None:
        raise OSError("killed between writing and renaming")

    monkeypatch.setattr(storage.os, "replace", killed)
    with pytest.raises(OSError, match="killed"):
        files.write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}


def metric(round_: int) -> files.Metric:
    return files.Metric(round_, "fed_avg", 0, "test", "mse", 0.5, 10, 20)


def test_metrics_that_fail_half_way_leave_the_old_file(tmp_path: Path) -> None:
    files.write_metrics(tmp_path, [metric(0)])
    before = (tmp_path / "metrics.csv").read_bytes()

    def broken() -> Iterator[files.Metric]:
        yield metric(1)
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        files.write_metrics(tmp_path, broken())
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_metrics_have_the_promised_columns(tmp_path: Path) -> None:
    files.write_metrics(tmp_path, [metric(0), metric(5)._replace(seconds=1.5)])
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    of_run = ["round", "algorithm", "seed", "split", "metric", "value", "uplink_bytes", "downlink_bytes"]
    assert rows[0] == [*of_run, "seconds"]
    assert rows[1] == ["0", "fed_avg", "0", "test", "mse", "0.5", "10", "20", ""]
    assert rows[2] == ["5", "fed_avg", "0", "test", "mse", "0.5", "10", "20", "1.5"]
    assert len(rows) == 3


def test_a_result_is_its_rows_and_more(tmp_path: Path) -> None:
    files.write_result(tmp_path, (p for p in [Pair(1, 2.0)]), seconds=3)
    assert json.loads((tmp_path / "result.json").read_text()) == {"rows": [{"a": 1, "b": 2.0}], "seconds": 3}


def test_a_configuration_names_command_options_and_environment(tmp_path: Path) -> None:
    files.write_config(tmp_path, "train", Options(tmp_path, (4,), Pair(1, 2)))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["command"] == "train"
    assert config["options"]["widths"] == [4]
    assert {"fedtangent", "jax", "python", "device"} <= set(config["environment"])


def test_an_output_folder_is_made_or_refused_in_one_line(tmp_path: Path) -> None:
    folder = files.output_folder(tmp_path / "a" / "b")
    assert folder.is_dir() and list(folder.iterdir()) == []
    assert files.output_folder(folder) == folder
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="output: cannot make the folder"):
        files.output_folder(tmp_path / "file")
    for make in (lambda path: path.write_text(""), lambda path: path.symlink_to(tmp_path / "nowhere")):
        make(folder / "figures")  # where figures are to go, when the work is done
        with pytest.raises(ValueError, match=r"output: got .*b, in which figures is not a folder: name another"):
            files.output_folder(folder)
        (folder / "figures").unlink()


def test_a_folder_that_holds_a_run_is_taken_only_by_what_goes_on_with_it(tmp_path: Path) -> None:
    options = {"seed": 0, "widths": (4,)}
    files.check_free(tmp_path / "none", "train", options, goes_on=False, can_go_on=True)
    files.write_config(tmp_path, "train", {**options, "num_rounds": 3})
    files.check_free(tmp_path, "train", options, goes_on=True, can_go_on=True)
    for command, more, goes_on, says in (
        ("train", {}, False, "holds a run: name another folder, --resume to continue it or --overwrite to replace it"),
        ("train", {"seed": 1}, True, r"holds a run with other options, seed \(0 there, 1 here\)"),
        ("compare", {}, True, "holds a run of fedtangent train: name another folder"),
    ):
        with pytest.raises(ValueError, match=says):
            files.check_free(tmp_path, command, options | more, goes_on, can_go_on=True)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="holds a run"):
        files.check_free(tmp_path, "train", options, goes_on=True, can_go_on=True)


WROTE = ("config.json", "metrics.csv", "metrics.csv.0a1b2c3d.part", "result.json", "report.html")
WROTE += ("figures/a.png", "checkpoints/x", "runs/a.npz", "tensorboard/seed-0/events")


def test_a_result_is_of_the_run_that_was_begun_last(tmp_path: Path) -> None:
    files.write_config(tmp_path, "train", {"seed": 0})
    files.write_end(tmp_path, files.Ended())  # stopped before it had a result
    assert not (tmp_path / "result.json").exists()
    files.write_result(tmp_path, [{"a": 1}], seconds=float("nan"))
    files.write_end(tmp_path, files.ended(["it broke", "twice"]))
    expected = {"rows": [{"a": 1}], "seconds": None, "status": "it broke; twice", "exit_code": 1}
    assert json.loads((tmp_path / "result.json").read_text()) == expected
    (tmp_path / "figures").mkdir()
    for name in ("a.png", "b.svg", "mine.txt"):
        (tmp_path / "figures" / name).write_text("old")
    files.write_config(tmp_path, "train", {"seed": 0})
    assert not (tmp_path / "result.json").exists()
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["mine.txt"]


def test_what_a_run_wrote_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    def fill() -> None:
        for name in (*WROTE, "mine.txt"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("{}")

    fill()
    files.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    fill()
    (tmp_path / "config.json").unlink()  # no run: nothing is touched
    files.clear(tmp_path)
    assert (tmp_path / "figures/a.png").exists()
