"""Two recordings of one run are compared to the digit: what changed is found, times are not compared."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from fedtangent._src.entries import catalogue

from . import same_numbers

NAME = "algorithm.fed_avg"
COLUMNS = ("round", "algorithm", "seed", "split", "metric", "value", "uplink_bytes", "downlink_bytes", "seconds")
ROWS = [(0, "fed_avg", 0, "test", "mse", "0.5", 0, 0, "0.25"), (1, "fed_avg", 0, "test", "mse", "0.3", 8, 8, "0.5")]
RESULT = {"rows": [{"method": "limit", "mse": 0.25, "seconds": 1.5}], "verdicts": [{"measured": "9.7e-16 (0 to 1)"}]}
Row = tuple[Any, ...]


def write_recording(folder: Path, rows: list[Row] = ROWS, result: Any = RESULT, exit_code: int = 0) -> Path:
    """Writes the recording of one run, and returns its folder."""
    run = folder / NAME
    run.mkdir(parents=True)
    (run / "result.json").write_text(json.dumps(result))
    (run / same_numbers.RECORD).write_text(json.dumps({"exit_code": exit_code}))
    with (run / "metrics.csv").open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return folder


def compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Row] = ROWS, result: Any = RESULT, exit_code: int = 0
) -> tuple[int, str]:
    """Returns the exit code and the text of a comparison of the unchanged recording with another one."""
    before, after = write_recording(tmp_path / "before"), write_recording(tmp_path / "after", rows, result, exit_code)
    code = same_numbers.main(["compare", str(before), str(after), "--only", NAME])
    return code, capsys.readouterr().out


def replaced(value: object, column: str = "value") -> list[Row]:
    """Returns the rows with another value in the last one."""
    row = list(ROWS[1])
    row[COLUMNS.index(column)] = value
    return [ROWS[0], tuple(row)]


def with_result(**changes: object) -> dict[str, Any]:
    """Returns the result with other fields in its row."""
    return RESULT | {"rows": [RESULT["rows"][0] | changes]}


def test_every_algorithm_model_partition_and_schedule_is_listed() -> None:
    runs = set(same_numbers.listed_runs())
    for kind in ("algorithms", "models", "partitions", "schedules"):
        assert {f"{kind[:-1]}.{name}" for name in catalogue(kind)} <= runs
    assert {f"check-theory.{name}" for name in catalogue("theorems")} <= runs
    for group, kind in (("algorithm", "algorithms"), ("schedule", "schedules"), ("experiment", "experiments")):
        listed = {name.partition(".")[2] for name in runs if name.startswith(f"{group}.")}
        assert listed <= set(catalogue(kind))


def test_a_command_has_each_option_once_under_its_name_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_numbers, "RENAMED", {"--old": "--new", "sgd": "descent"})
    words = same_numbers.words_of("train --widths 16 --old 1 --widths 8 4 --optimizer sgd")
    assert words == ["train", "--widths", "8", "4", "--new", "1", "--optimizer", "descent"]


def test_equal_recordings_are_identical_whatever_their_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = compared(tmp_path, capsys, replaced("9.75", "seconds"), with_result(seconds=3.0))
    assert code == 0 and f"{NAME}: identical bit for bit" in out


@pytest.mark.parametrize(
    ("rows", "result", "found"),
    [
        (replaced("0.3000001"), RESULT, "metrics.csv: 1, fed_avg, 0, test, mse: value: 0.3 -> 0.3000001"),
        (replaced("0.3000000000006"), RESULT, "2.0e-12: metrics.csv"),
        (replaced("nan"), RESULT, "0.3 -> nan"),
        (replaced("1e-16"), RESULT, "1.0e+00: metrics.csv"),  # a number does not become a rounding error
        (replaced(16, "uplink_bytes"), RESULT, "uplink_bytes: 8 -> 16"),
        (replaced("accuracy", "metric"), RESULT, "mse: value: 0.3 -> missing"),
        (ROWS[:1], RESULT, "value: 0.3 -> missing"),
        (ROWS + [ROWS[1]], RESULT, "mse (2): value: missing -> 0.3"),
        (ROWS, with_result(mse=0.26), "result.json.rows[0].mse: 0.25 -> 0.26"),
        (ROWS, with_result(mse=None), "0.25 -> null"),
        (ROWS, with_result(method="flow"), '"limit" -> "flow"'),
        (ROWS, RESULT | {"rows": []}, "result.json.rows[0].mse: 0.25 -> missing"),
        (ROWS, RESULT | {"verdicts": [{"measured": "9.7e-16 (0 to 2)"}]}, "(0 to 1)"),
        (ROWS, RESULT | {"verdicts": [{"measured": "9.7e-10 (0 to 1)"}]}, "9.7e-16"),
    ],
)
def test_a_difference_is_found(
    rows: list[Row], result: Any, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = compared(tmp_path, capsys, rows, result)
    assert code == 1 and "DIFFER" in out and found in out


def test_another_exit_code_is_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = compared(tmp_path, capsys, exit_code=1)
    assert code == 1 and "exit code: 0 -> 1" in out


def test_a_missing_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write_recording(tmp_path / "before")
    assert same_numbers.main(["compare", str(before), str(tmp_path / "after"), "--only", NAME]) == 1
    assert f"{NAME}: MISSING in {tmp_path / 'after'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (replaced("0.30000000000001"), "the same to 3.3e-14"),
        (replaced("0.30"), "the same to 0.0e+00"),
        (ROWS[::-1], "order of rows or fields"),
    ],
)
def test_the_last_digits_and_the_order_are_said_but_allowed(
    rows: list[Row], found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = compared(tmp_path, capsys, rows)
    assert code == 0 and found in out and f"{NAME}: identical" not in out


def test_a_rounding_error_is_listed_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = compared(tmp_path, capsys, result=RESULT | {"verdicts": [{"measured": "3e-15 (0 to 1)"}]})
    assert code == 0 and "1 rounding errors differ" in out
    assert 'rounding error: result.json.verdicts[0].measured: "9.7e-16 (0 to 1)" -> "3e-15 (0 to 1)"' in out


def test_another_version_of_the_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recording(tmp_path)
    (tmp_path / NAME / same_numbers.RECORD).write_text(json.dumps({"source": "another", "seconds": 1.0}))
    with pytest.raises(SystemExit, match=r"folder: got .* another version"):
        same_numbers.main(["record", str(tmp_path), "--only", NAME])
