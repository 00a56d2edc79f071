"""``fedtangent check``: claims of a file, exit statuses for each outcome, and JUnit XML."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedtangent._src import cli
from fedtangent._src.cli import check, commands, main
from fedtangent._src.comparison.settings import Setting
from fedtangent._src.comparison.side_by_side import Comparison
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.output.junit import write_junit

from ..stand_ins import stand_in

CLAIM_OF: dict[str, Any] = {}  # by its table: read once for all outcomes
RIGHT = Verdict("S", "slope against width", "1", "1 +- 0", True, "one is two", "2", True)
WRONG = RIGHT._replace(statement="mean = flow", holds=False)
UNCLEAR = RIGHT._replace(statement="variance = flow", holds=None)
CLAIMS = """
[plain]
num-train = 20
num_clients = 2
num_rounds = 2
widths = [8, 16, 32]
draws = 5

[other]
algorithm = "fed_prox"
mu = 0.5
num_train = 20
num_clients = 2
num_rounds = 2
agree = ["slope", "mean"]
"""


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each claim's comparison gives, in order: verdicts, or an error."""
    found: list[Any] = []

    def instead(setting: Setting, **more: object) -> object:
        outcome = found.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return stand_in(Comparison, verdicts=outcome, times={"networks": 0.0}, simulated=(), gaps=(), notes=())

    read = check._claim

    def once(table: dict[str, Any]) -> check.ClaimedRuns:
        if (name := repr(table)) not in CLAIM_OF:
            CLAIM_OF[name] = read(table)
        return CLAIM_OF[name]

    monkeypatch.setattr(check, "compared", instead)
    monkeypatch.setattr(check, "_claim", once)
    return found


@pytest.mark.parametrize(
    ("given", "options", "code", "last"),
    [
        ([(RIGHT,), (RIGHT, WRONG._replace(holds=True))], ["--strict"], 0, "Simulation and theory agree in all 3"),
        ([(RIGHT,), (RIGHT, WRONG)], ["--strict"], 1, "other: Simulation and theory DISAGREE in 1 of 2"),
        ([(RIGHT, UNCLEAR), (RIGHT, WRONG._replace(holds=True))], [], 0, "undecided: variance = flow [plain]"),
        (
            [(RIGHT, UNCLEAR), (RIGHT, WRONG._replace(holds=True))],
            ["--strict"],
            3,
            "undecided: variance = flow [plain]",
        ),
        ([KeyError("gone"), (RIGHT, WRONG._replace(holds=True))], [], 2, "plain: KeyError: 'gone'"),
        ([KeyError("gone"), (RIGHT, WRONG)], [], 1, "plain: KeyError: 'gone'"),
        (
            [(RIGHT,), (RIGHT,)],
            [],
            2,
            "other: ValueError: agree: got 'mean', must be words of a verdict: slope",
        ),
    ],
    ids=["agree", "disagree", "undecided", "strict", "error", "error and disagree", "no such verdict"],
)
def test_each_outcome_has_its_exit_status_and_its_test_cases(
    run: Callable, folder: Path, outcomes: list[Any], given: list[Any], options: list[str], code: int, last: str
) -> None:
    (folder / "claims.toml").write_text(CLAIMS)
    outcomes += given
    ended = run("check", *options, "--junit", "reports/check.xml")
    assert ended.code == code, ended
    assert last in (ended.err if code else ended.out)
    root = ElementTree.parse(folder / "reports" / "check.xml").getroot()
    assert [suite.get("name") for suite in root] == ["plain", "other"]
    failing = sum(int(root.get(name, "")) for name in ("failures", "errors"))
    assert (failing > 0) == (code != 0)
    assert int(root.get("skipped", "")) == ("undecided" in last and not options)
    assert int(root.get("tests", "")) == len(root.findall("./testsuite/testcase"))
    if code == 1:
        (failure,) = root.iter("failure")
        assert (
            failure.get("message")
            == "disagreement: measured 1, expected 1 +- 0; control: one is two: 2, fails, as it must"
        )
        assert "fedtangent compare --algorithm fed_prox --mu 0.5" in ended.err


def test_the_times_add_up(run: Callable, folder: Path, outcomes: list[Any]) -> None:
    (folder / "claims.toml").write_text(CLAIMS)
    outcomes += [(RIGHT,), (RIGHT, WRONG)]
    lines = run("check").out.split("\nTime", 1)[1].splitlines()
    *parts, total = [float(cells[-1]) for line in lines if re.fullmatch(r"[\d.]+", (cells := line.split() or [""])[-1])]
    assert len(parts) == 3 and sum(parts) == pytest.approx(total, abs=0.05 * 4)
    assert 0.0 in parts  # the networks


def test_a_claim_describes_the_run_of_the_same_command_line(folder: Path) -> None:
    (folder / "claims.toml").write_text(CLAIMS)
    claims, _ = check.prepare(check.CheckOptions(), check.VerdictOptions())
    assert [(claim.agree, claim.within) for claim in claims.values()] == [(None, None), (["slope", "mean"], None)]
    (plain,), (other,) = claims["plain"].settings, claims["other"].settings
    assert (plain.size.widths, plain.size.draws, plain.size.num_rounds) == ((8, 16, 32), 5, 2)
    assert len(plain.problem.x_train) == 20 and other.algorithm.name == "fed_prox"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[a", "claims: claims.toml cannot be read: "),
        ("", "claims: got claims.toml, must have a table for each claim, such as [fed_avg], and nothing else"),
        ("algorithm = 'fed_avg'", "claims: got claims.toml, must have a table for each claim"),
        ("[a]\nnum_round = 3", "a: num_round: is no option of compare; did you mean num_rounds?"),
        ("[a]\nnum_train = 40\nnum-train = 50", "a: an option is given twice, once with - and once with _ in its name"),
        ("\ufeff[a]\nnum_round = 3", "a: num_round: is no option of compare"),
        ("[a]\noutput = 'x'", "a: output: is no option of a claim"),
        ("[a]\nfigures = 'pdf'", "a: figures: is no option of a claim"),
        ("[a]\nagree = 'slope'", "a: agree: got 'slope', must be a list of texts"),
        ("[a]\nwithin = -1", "a: within: got -1, must be above 0"),
        ("[a]\nwithin = {}", "a: within: got none, must be a number for each width"),
        ("[a]\nwithin = {7 = 0.5}\nnum_train = 20", "a: within: got width 7, allowed are "),
        ("[a]\nagree = ['']", "a: agree: got [''], must be a list of texts"),
        ("[a]\nwithin = {wide = 1}", "a: within: got wide, must be a number for each width"),
        ("[a]\nwithin = {8 = 'x'}", "a: within: got 'x', must be a number"),
        ("[a]\nalgorithm = 'x'", "a: algorithm: got 'x', allowed are"),
    ],
)
def test_a_bad_claim_is_refused_in_one_line(run: Callable, folder: Path, text: str, says: str) -> None:
    (folder / "claims.toml").write_text(text)
    ended = run("check")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"fedtangent: error: {says}") and ended.err.count("\n") == 1


def test_a_report_that_cannot_be_written_is_refused(run: Callable, folder: Path) -> None:
    (folder / "claims.toml").write_text(CLAIMS)
    assert "junit: got the folder ., must be a file" in run("check", "--junit", ".").err
    assert run("check", "--junit", "claims.toml/x.xml").code == 2
    assert run("check", "nowhere.toml").err.startswith("fedtangent: error: claims: nowhere.toml cannot be read")


def test_any_text_becomes_valid_xml(tmp_path: Path) -> None:
    text = "a < b & \x1b[1m\x00\ud800\ufffe 'é'"
    verdict = RIGHT._replace(statement=text, measured=text, holds=False)
    write_junit(tmp_path / "a.xml", "check", {text: (verdict,), "b": text}, {text: 1.25, "b": 0.5})
    root = ElementTree.parse(tmp_path / "a.xml").getroot()
    assert root.get("time") == "1.750" and root[0].get("name") == "a < b & ?[1m??? 'é'"
    assert [root.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["2", "1", "1", "0"]


def test_the_page_of_help_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = main.help_page(commands.find("check"), [])
    assert len(page.splitlines()) < 20 and "--junit PATH" in page and "CLAIMS" in page
    assert cli.summaries()["check"].startswith("the claims of a file")
