"""``fedtangent check-theory`` on tiny checks: the table, result.json, and when it exits with 1."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedtangent.compare import theorems
from fedtangent.compare.theorems import TheoremCheck

RIGHT = TheoremCheck("A 1", "one is one", "n = 1", "1.000", "1 +- 0", True, "one is two, 1.000", True)
FAILING = RIGHT._replace(statement="one is two", passed=False)
INCONCLUSIVE = RIGHT._replace(statement="[0, 1] holds one", control_failed=False)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[TheoremCheck] | Exception]:
    """What each group gives; every one is RIGHT until changed."""
    found: dict[str, list[TheoremCheck] | Exception] = {name: [RIGHT] for name in theorems.MODULES}

    def load(name: str) -> theorems.Checks:
        if name not in found:
            raise ValueError(f"only: got {name!r}")

        def checks(scale: str, seed: int) -> list[TheoremCheck]:
            given = found[name]
            if isinstance(given, Exception):
                raise given
            return [c._replace(sizes=f"{scale} {seed}") for c in given]

        return checks

    monkeypatch.setattr(theorems, "load", load)
    return found


def test_everything_right_ends_with_0_and_the_table_is_last(run: Callable, folder: Path, groups: dict) -> None:
    ended = run("check-theory", "--seed", 7, "--output", "out")
    assert ended.code == 0, ended
    lines = [line for line in ended.out.splitlines() if line.strip()]
    assert lines[-1] == "All 6 checks hold, and every wrong theory fails its own."
    header = next(line for line in lines if "statement checked" in line)
    for column in ("theorem", "sizes", "measured", "predicted", "verdict", "negative control"):
        assert column in header
    assert "default 7" in ended.out and "fails, as it must" in ended.out
    result = json.loads((folder / "out" / "result.json").read_text())
    assert result["passed"] is True
    assert [row["group"] for row in result["rows"]] == list(theorems.MODULES)
    assert json.loads((folder / "out" / "config.json").read_text())["command"] == "check-theory"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([RIGHT, FAILING], "FAILS"),
        ([INCONCLUSIVE], "PASSES TOO"),
        ([], "returned no check"),
        (RuntimeError("the kernel is [gone]"), "RuntimeError: the kernel is [gone]"),
    ],
)
def test_anything_else_ends_with_1(run: Callable, folder: Path, groups: dict, given: object, said: str) -> None:
    groups["convergence"] = given
    ended = run("check-theory", "--output", "out")
    assert ended.code == 1
    assert said in " ".join(ended.out.split())
    result = json.loads((folder / "out" / "result.json").read_text())
    assert result["passed"] is False
    assert {row["group"] for row in result["rows"]} == set(theorems.MODULES)  # the other groups still ran


def test_some_groups_alone_at_another_scale(run: Callable, folder: Path, groups: dict) -> None:
    groups["flow"] = [FAILING]
    ended = run("check-theory", "--only", "ledger", "gp_limit", "ledger", "--scale", "large", "--output", "out")
    assert ended.code == 0
    rows = json.loads((folder / "out" / "result.json").read_text())["rows"]
    assert [(row["group"], row["sizes"]) for row in rows] == [("ledger", "large 0"), ("gp_limit", "large 0")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--scale", "huge"), "scale: got 'huge', allowed are default, large"),
        (("--only", "gp"), "only: got 'gp', allowed are flow, convergence, gp_limit, bias_variance, ledger, ntk_fl"),
        (("--seed", "-1"), "seed: got -1, must be from 0 to 2**32 - 1"),
    ],
)
def test_bad_input_is_one_line_before_any_work(run: Callable, folder: Path, arguments: tuple, said: str) -> None:
    ended = run("check-theory", *arguments)
    assert (ended.code, ended.err, ended.out) == (2, f"fedtangent: error: {said}\n", "")
    assert list(folder.iterdir()) == []
