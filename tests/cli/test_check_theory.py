"""``fedtangent check-theory`` on tiny checks: the table, result.json, and when it exits with 1."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from fedtangent._src import entries
from fedtangent._src.comparison.verdicts import Verdict

RIGHT = Verdict("A 1", "one is one", "1.000", "1 +- 0", True, "one is two", "1.000", True)
FAILING = RIGHT._replace(statement="one is two", holds=False)
INCONCLUSIVE = RIGHT._replace(statement="[0, 1] holds one", control_fails=False)
NAMES = tuple(entries.catalogue("theorems"))


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Verdict] | Exception]:
    """What each check gives; every one is RIGHT until changed."""
    found: dict[str, list[Verdict] | Exception] = {name: [RIGHT] for name in NAMES}

    def instead_of(name: str) -> Callable[[str, int], list[Verdict]]:
        def build(scale: str, seed: int) -> list[Verdict]:
            given = found[name]
            if isinstance(given, Exception):
                raise given
            return [v._replace(sizes=f"{scale} {seed}") for v in given]

        return build

    for name, entry in entries.catalogue("theorems").items():
        tiny = dataclasses.replace(entry, build=instead_of(name))
        monkeypatch.setitem(entries.catalogue("theorems"), name, tiny)  # type: ignore[arg-type]
    return found


def test_everything_right_ends_with_0_and_the_table_is_last(run: Callable, folder: Path, groups: dict) -> None:
    ended = run("check-theory", "--seed", 7, "--output", "out")
    assert ended.code == 0, ended
    lines = [line for line in ended.out.splitlines() if line.strip()]
    assert lines[-1] == f"Simulation and theory agree in all {len(NAMES)} comparisons, and every wrong theory fails"
    header = next(line for line in lines if "what is compared" in line)
    for column in ("of", "sizes", "measured", "expected", "verdict", "negative control"):
        assert column in header
    assert "default 7" in ended.out and "fails, as it must" in ended.out
    result = json.loads((folder / "out" / "result.json").read_text())
    assert result["passed"] is True
    assert [row["check"] for row in result["rows"]] == list(NAMES)
    assert json.loads((folder / "out" / "config.json").read_text())["command"] == "check-theory"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([RIGHT, FAILING], "FAILS"),
        ([INCONCLUSIVE], "PASSES TOO"),
        ([], "returned no verdict"),
        (RuntimeError("the kernel is [gone]"), "RuntimeError: the kernel is [gone]"),
    ],
)
def test_anything_else_ends_with_1(run: Callable, folder: Path, groups: dict, given: object, said: str) -> None:
    groups["ntk_fl.convergence"] = given
    ended = run("check-theory", "--output", "out")
    assert ended.code == 1
    assert said in " ".join(ended.out.split())
    result = json.loads((folder / "out" / "result.json").read_text())
    assert result["passed"] is False
    assert {row["check"] for row in result["rows"]} == set(NAMES)  # the other groups still ran


def test_some_groups_alone_at_another_scale(run: Callable, folder: Path, groups: dict) -> None:
    groups["flow.exact"] = [FAILING]
    ended = run("check-theory", "--only", "flow.ledger", "ntk_fl", "flow.ledger", "--scale", "paper", "--output", "out")
    assert ended.code == 0
    rows = json.loads((folder / "out" / "result.json").read_text())["rows"]
    found = [(row["check"], row["sizes"]) for row in rows]
    assert found == [(name, "paper 0") for name in ("flow.ledger", *(n for n in NAMES if n.startswith("ntk_fl.")))]


def test_scale_smoke_has_quick_checks_of_every_group(run: Callable, folder: Path, groups: dict) -> None:
    assert run("check-theory", "--scale", "smoke", "--output", "out", "--junit", "out/theory.xml").code == 0
    found = {row["check"] for row in json.loads((folder / "out" / "result.json").read_text())["rows"]}
    assert {name.split(".")[0] for name in found} == {name.split(".")[0] for name in NAMES} and found < set(NAMES)
    suites = ElementTree.parse(folder / "out" / "theory.xml").getroot()
    assert {suite.get("name") for suite in suites} == found and suites.get("tests") == str(len(found))
    ended = run("check-theory", "--scale", "smoke", "--only", "flow.exact", "--output", "exact")
    assert ended.code == 2 and "only: got 'flow.exact', allowed are conformal.coverage, " in ended.err


@pytest.mark.parametrize(("strict", "code"), [((), 0), (("--strict",), 3)])
def test_an_undecided_verdict_is_named_in_the_last_line(
    run: Callable, folder: Path, groups: dict, strict: tuple[str, ...], code: int
) -> None:
    groups["flow.exact"] = [RIGHT._replace(statement="half is one", holds=None), RIGHT]
    ended = run("check-theory", *strict, "--output", "out")
    assert ended.code == code
    last = (ended.err if strict else ended.out).strip().splitlines()[-1]
    assert last.removeprefix("fedtangent: ") == "undecided: half is one [A 1]"
    result = json.loads((folder / "out" / "result.json").read_text())
    assert result["passed"] is True and result["exit_code"] == code
    groups["flow.ledger"] = [FAILING]  # a failure comes first, and its line names both
    ended = run("check-theory", *strict, "--output", "out", "--overwrite")
    assert ended.code == 1 and "DISAGREE in 1 of" in ended.err
    assert ended.err.strip().endswith("undecided: half is one [A 1]")


def test_strict_without_anything_undecided_ends_with_0(run: Callable, folder: Path, groups: dict) -> None:
    ended = run("check-theory", "--strict", "--output", "out")
    assert ended.code == 0 and "undecided:" not in ended.out.splitlines()[-1]
