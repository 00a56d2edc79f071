"""Measured once: answers kept in memory and on file, and what they depend on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedtangent._src import timings


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDTANGENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(timings, "_memory", {})
    return tmp_path / "cache"


def forget(folder: Path) -> None:
    timings._memory.clear()
    (folder / timings.FILE).unlink()


def counted(answer: dict[str, Any]) -> tuple[Any, list[int]]:
    calls: list[int] = []

    def measure() -> dict[str, Any]:
        calls.append(1)
        return answer

    return measure, calls


def test_measured_once_in_a_process_and_once_on_a_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, calls = counted({"seconds": 1.5})
    for _ in range(2):
        assert timings.cached({"what": "a"}, measure, ["seconds"]) == {"seconds": 1.5}
    monkeypatch.setattr(timings, "_memory", {})  # another process
    assert timings.cached({"what": "a"}, measure, ["seconds"]) == {"seconds": 1.5}
    assert len(calls) == 1
    timings.cached({"what": "b"}, measure, ["seconds"])
    assert len(calls) == 2
    assert len(timings.stored()) == 2
    assert [path.name for path in folder.iterdir()] == ["calibration.json"]


def test_another_machine_measures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    measure, calls = counted({})
    timings.cached({}, measure, [])
    other = {**timings.machine(), "device": "another"}
    monkeypatch.setattr(timings, "machine", lambda: other)
    timings.cached({}, measure, [])
    assert len(calls) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00", "[" * 100_000, "null", '{"a": 1}'])
def test_a_broken_file_is_made_again(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "calibration.json").write_text(content)
    measure, calls = counted({"x": 1})
    assert timings.cached({}, measure, ["x"]) == {"x": 1}
    assert len(calls) == 1
    assert list(json.loads((folder / "calibration.json").read_text()).values())[-1] == {"x": 1}


@pytest.mark.parametrize("answer", [3, None, [], {}, {"y": 1}, {"x": 1, "y": 1}, {"x": "1"}, {"x": -1}, {"x": 1e999}])
def test_an_answer_of_another_shape_is_measured_again(
    folder: Path, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for on_file, expected in ((answer, 1), ({"x": 2.5}, 2.5)):  # and the control, which is not
        measure, calls = counted({"x": 1})
        timings.cached({}, measure, ["x"])
        file = folder / "calibration.json"
        (key,) = json.loads(file.read_text())
        file.write_text(json.dumps({key: on_file}))
        monkeypatch.setattr(timings, "_memory", {})
        assert timings.cached({}, measure, ["x"]) == {"x": expected}
        assert len(calls) == (2 if expected == 1 else 1)
        forget(folder)


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.write_text("a file, no folder")
    measure, calls = counted({"x": 1})
    for _ in range(2):
        assert timings.cached({}, measure, ["x"]) == {"x": 1}
    assert len(calls) == 1
