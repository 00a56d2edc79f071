"""What is told of long work where there is no terminal."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent._src.progress import TimeLeft, headline, progress_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def test_a_line_now_and_then_with_round_metric_and_time_left(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_of(20, "fed_avg") as bar:
        for done in range(1, 21):
            clock[0] += 2
            bar.update(1)
            metrics = {"train": {"mse": 0.1}, "test": {"mse": 0.25, "accuracy": 0.75 + done / 1000}}
            bar.set_postfix_str(headline(metrics), refresh=False)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "fed_avg: round 5 of 20, test accuracy 0.754, 00:30 left",
        "fed_avg: round 10 of 20, test accuracy 0.759, 00:20 left",
        "fed_avg: round 15 of 20, test accuracy 0.764, 00:10 left",
        "fed_avg: round 20 of 20, test accuracy 0.769, 00:00 left",
    ]


def test_the_time_left_follows_from_the_finished_cells() -> None:
    left = TimeLeft(16)
    left.finish(2, 10.0)
    assert str(left) == "70 s left"
    left.finish(6, 62.0)
    assert str(left) == "72 s left"
    left.planned += 10
    assert str(left) == "3 min left"


def test_lines_become_rarer_and_short_work_has_none(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress_of(3, "short") as bar:
        for _ in range(3):
            clock[0] += 3
            bar.update(1)
    assert capsys.readouterr().err == ""
    with progress_of(100_000, "long", "point") as bar:
        for _ in range(10_000):
            clock[0] += 1
            bar.update(10)
    lines = capsys.readouterr().err.splitlines()
    assert 80 < len(lines) < 200  # a line every ten seconds would be a thousand
    assert lines[0].startswith("long: point 100 of 100000, ") and lines[0].endswith(" left")


@pytest.mark.parametrize("terminal", [False, True])
def test_the_time_left_is_without_the_first_unit_which_compiles(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    with progress_of(20_000, "fed_avg", done=10) as bar:
        for seconds in (30, 15, 15):
            clock[0] += seconds
            bar.update(1)
    told = capsys.readouterr().err
    assert "11 of 20000, ? left" in told or "11/20000" in told
    assert "12 of 20000, 83:17:00 left" in told or "12/20000 [00:15<83:17:00" in told  # 19,988 times 15 s


def test_nothing_where_it_is_not_shown(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress_of(3, "silent", shown=False) as bar:
        for _ in range(3):
            clock[0] += 100
            bar.update(1)
    assert capsys.readouterr() == ("", "")


def test_the_number_that_is_told() -> None:
    assert headline({"accuracy": 0.5, "loss": 1.0}) == "accuracy 0.5"
    assert headline({"error_norm": 2.0, "curve": [1.0, 2.0]}) == "error norm 2"
    assert headline({"train": {"mse": 3.0}}) == "train mse 3"
    assert headline({}) == headline({"members": [[1.0]]}) == ""
    assert headline({"kind": "text", "model": object(), "loss": np.float32(1.0)}) == "loss 1"
