"""Every command line of README, docs/ and what `compare` proposes, and one for each entry of `fedtangent list`.

They run with their defaults: they are prepared whole and write what they write, but nothing is trained. Behind ``slow``
those of the documents run whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedtangent._src import cli
from fedtangent._src.cli import check_theory, compare, experiment, main, predict
from fedtangent._src.comparison.forecast import Curve, Forecast, Plan, Rates
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.engine import processes
from fedtangent._src.entries import KINDS, catalogue
from fedtangent._src.experiments.lab import Outcome, Sheet
from fedtangent._src.models import convolutional
from fedtangent._src.output import style

from .. import documents
from ..nightly import nightly

EMBEDDED = ("digits", "sine")
NUMBERS = {"bits": "4"}  # what channels and graphs are written with; of the others 0.5


def meant(line: str) -> list[str]:
    """What a line of a document stands for: nothing that is optional, each of what there is to choose from."""
    parts = re.sub(r"\[.*?\]", "", line).split()
    if {"ID", "NAME", "..."} & set(parts) or (parts and parts[0] not in list(cli.summaries())):
        return []
    return [" ".join(words) for words in itertools.product(*(part.split("|") for part in parts))]


def lines_of_the_documents() -> list[str]:
    text = "\n".join([*documents.pages().values(), compare.NEXT])
    found = re.findall(r"^(?:- run: )?fedtangent (.*?)(?: {2,}#.*)?$", text, re.MULTILINE)
    found += re.findall(r"`fedtangent (.*?)`", text)
    return list(dict.fromkeys(line for one in found for line in meant(one)))


ASKED = {"graphs": "train --algorithm gossip --graph", "cases": "compare --case", "experiments": "experiment"}
ASKED |= {"theorems": "check-theory --only"}


def command_of(kind: str, name: str) -> str:
    """How an entry is asked for, with what it cannot do without."""
    entry, plain = catalogue(kind)[name], f"train --{kind.removesuffix('s')}"
    line = f"{ASKED.get(kind, plain)} {name}"
    if getattr(entry, "number", ""):
        line += f":{NUMBERS.get(entry.number, '0.5')}"
    reads_digits = kind != "models" or catalogue("datasets")["digits"].kind in entry.kinds
    return line if reads_digits and name != "by_user" else f"{line} --dataset sine"


def needs_files(kind: str, name: str) -> bool:
    """Whether its data do not come with the package."""
    kinds = [catalogue("datasets")[d].kind for d in EMBEDDED]
    return (
        (kind == "datasets" and name not in EMBEDDED)
        or name == "fashion_mnist"
        or (kind == "models" and not set(kinds) & set(catalogue("models")[name].kinds))
    )


ENTRIES = [command_of(kind, name) for kind in KINDS for name in catalogue(kind) if not needs_files(kind, name)]
# Those of `check` need a file of claims: by ``test_check.py``, and whole by ``test_own_project.py``. Those of `explore`
# serve a page until they are interrupted: by ``test_explore.py``.
ELSEWHERE = ("check", "explore")
LINES = [line for line in dict.fromkeys([*lines_of_the_documents(), *ENTRIES]) if line.split()[0] not in ELSEWHERE]
COMPARE = [line for line in LINES if line.startswith("compare") and "--help" not in line]  # by ``test_compare.py``
# By night alone: entries that no line of the documents names, which by day tests/engine/test_description.py builds and
# tests/experiments looks at; and the shorter of two predictions.
NIGHTLY = set(ENTRIES) - set(lines_of_the_documents()) | {"predict --algorithm fed_avg scaffold"}
DAILY = [line for line in LINES if line not in COMPARE and line not in NIGHTLY]
WHOLE = [line for line in lines_of_the_documents() if not re.search("^list|^check|^explore|--help|--distributed", line)]


def test_the_documents_have_lines_of_every_command() -> None:
    needs_files = {"data"}
    assert {line.split()[0] for line in lines_of_the_documents()} == set(cli.summaries()) - needs_files
    assert any("fedtangent data prepare NAME" in text for text in documents.pages().values())
    assert len(lines_of_the_documents()) > 25 and len(LINES) > 100


def foretold(plan: Plan) -> Forecast:
    """What could be predicted."""
    rounds = np.array(plan.setting.size.rounds)
    names = [(split, name) for split in ("train", "test") for name in dict.fromkeys((plan.loss, plan.main))]
    curve = Curve(plan.rate, rounds, {name: np.ones((2, len(rounds))) for name in names})
    rates = Rates(2 * plan.rate, None, plan.rate, False, plan.rate * np.array([0.5, 1.0]), np.ones(2))
    return Forecast(plan, curve, curve, rates, rounds, rounds, None)


@pytest.fixture
def nothing_is_trained(monkeypatch: pytest.MonkeyPatch, no_training: None) -> None:
    """Nor performed, checked or predicted: what is asked for is prepared whole, and what could come out is written.

    Figures are made, but their pixels are not drawn, which took half of the time; tests/output looks at them.
    """
    verdict = Verdict("A", "one is one", "1", "1", True, "one is two", "1", True)
    outcome, wanted = Outcome(rows=[{"a": 1}], sheets=(Sheet("t", ("a",), (("1",),)),)), check_theory.wanted

    def checks(only: tuple[str, ...], scale: str) -> dict[str, object]:
        return {
            n: dataclasses.replace(entry, build=lambda *given: [verdict]) for n, entry in wanted(only, scale).items()
        }

    monkeypatch.setattr(style, "finish", lambda figure, title="": None)
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: Path(path).touch())
    monkeypatch.setattr(experiment, "perform", lambda entry, study: outcome)
    monkeypatch.setattr(check_theory, "wanted", checks)
    monkeypatch.setattr(predict, "forecasts", lambda plans, **more: map(foretold, plans))
    monkeypatch.setattr(processes, "start", lambda *given: None)
    monkeypatch.setattr(convolutional, "choose_convolution", lambda *given: "lax")  # nor measured


def before(line: str) -> list[str]:
    """The line's words, once what it continues or repeats has run."""
    if "--config" in line or line.startswith("report"):
        ended(["train"])
    return line.split()


def ended(words: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main.main(words)
    assert left.value.code == 0, words


def check_what_was_written(line: str, folder: Path) -> None:
    if "--help" in line or line.startswith("list"):
        return
    written = sorted(folder.rglob("config.json"), key=lambda path: path.stat().st_mtime_ns)[-1].parent
    assert {"config.json", "result.json"} <= {path.name for path in written.iterdir()}


@pytest.mark.usefixtures("nothing_is_trained")
@pytest.mark.parametrize("line", nightly([line for line in LINES if line not in COMPARE], DAILY))
def test_every_command_runs_with_its_defaults(line: str, folder: Path) -> None:
    ended(before(line))
    check_what_was_written(line, folder)


@pytest.mark.slow
@pytest.mark.parametrize("line", WHOLE)
def test_every_run_with_its_defaults_to_its_end(line: str, folder: Path) -> None:
    ended(before(line))
    check_what_was_written(line, folder)
