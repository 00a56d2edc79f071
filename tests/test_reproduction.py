"""The page of what was reproduced: nothing is missing there, and nothing is told that no run or page has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedtangent._src.entries import catalogue
from fedtangent._src.errata import ERRATA
from fedtangent._src.experiments.fed_ensemble import table1, table8, tables
from fedtangent._src.experiments.ntk_fl import fig8, figures

from .documents import ROOT, of_docs

# Every table and figure that the five papers number, counted in the papers.
ROMAN = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII")
NUMBERED = {
    "FE-2024": [*(f"Table {n}" for n in ROMAN), *(f"Figure {n}" for n in range(1, 9))],
    "FE-2021": [*(f"Table {n}" for n in range(1, 5)), *(f"Figure {n}" for n in (1, 2, 3, 4, 5, "6 (a)", "6 (b)"))],
    "NTK-FL": ["Table 1", *(f"Figure {n}" for n in (1, 2, 3, "4 (a)", "4 (b)", "4 (c)", 5, 6, 7, 8, 9))],
    "Local-GD": [*(f"Figure 1 ({part})" for part in "abcdefghi"), "Figure 2"],
    "DeepLin": ["Table I", *(f"Figure {n}" for n in range(1, 5))],
}


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    """docs/generated.py."""
    return of_docs("generated")


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """docs/reproduction.py."""
    return of_docs("reproduction")


def missing(text: str, names: Sequence[str]) -> list[str]:
    """The names that a page does not have in backticks."""
    return [name for name in names if f"`{name}`" not in text and f" {name}" not in text]


# ---- nothing is missing ----


def test_every_table_and_figure_of_the_papers_is_a_row(generated: ModuleType, page: ModuleType) -> None:
    items = page.listed()["item"]
    for paper, places in NUMBERED.items():
        assert [i["place"] for i in items if i["paper"] == paper] == places
        _, _, after = generated.reproduction().partition(f"## {paper}\n")
        part = after.partition("\n## ")[0]
        assert [place for place in places if f"\n| {place}: " not in part] == []
    assert {i["paper"] for i in items} == set(NUMBERED)


def test_every_experiment_and_every_erratum_is_there(
    generated: ModuleType, page: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiments, keys = tuple(catalogue("experiments")), [row.key for row in ERRATA]
    assert missing(generated.reproduction(), experiments) == []
    assert missing(generated.errata(), keys) == []
    monkeypatch.setattr(generated, "ERRATA", ERRATA[1:])
    assert missing(generated.errata(), keys) == [ERRATA[0].key]
    found = page.listed()
    found["item"] = [i for i in found["item"] if i["place"] != "Table VII"]
    monkeypatch.setattr(page, "listed", lambda: found)
    monkeypatch.setattr(page, "others", lambda _: [])
    gone = missing(generated.reproduction(), experiments)
    assert "fed_ensemble.table7" in gone and "fed_ensemble.table6" not in gone


def test_names_lead_somewhere(page: ModuleType) -> None:
    found, experiments = page.listed(), catalogue("experiments")
    names = [name for i in found["item"] for name in i.get("experiments", [])]
    assert set(names) <= set(experiments) and {q["experiment"] for q in found["quote"]} <= set(experiments)
    assert {path.stem for path in page.KEPT.glob("*")} <= set(experiments)
    places = {f"{i['paper']}, {i['place']}" for i in found["item"]}
    assert {i["same"] for i in found["item"] if "same" in i} <= places
    for item in found["item"]:
        assert len({"experiments", "same", "not_run"} & set(item)) >= 1, item["place"]


def test_published_numbers_are_those_of_the_experiments(page: ModuleType) -> None:
    told = {(i["paper"], i["place"]): i.get("published", "").replace(" .", " 0.") for i in page.listed()["item"]}
    expected: dict[tuple[str, str], list[str]] = {
        ("FE-2024", "Table I"): [f"{number:g}" for pair in table1.PUBLISHED.values() for number in pair],
        ("FE-2024", "Table IV"): [f"{v:.2f}" for v in tables.PUBLISHED_4["cifar10"].values()],
        ("FE-2024", "Table VIII"): [text.partition("e")[0] for text in table8.PUBLISHED.values()],
        ("FE-2024", "Table III"): [f"{v:.1f}" for v in tables.WRITERS.values()],
        ("NTK-FL", "Table 1"): [str(n) for pair in figures.PUBLISHED_TABLE1.values() for n in pair],
        ("NTK-FL", "Figure 8"): [f"{v:.2f}" for v in fig8.PUBLISHED.values()],
    }
    expected["FE-2024", "Table II"] = [f"{v:.2f}" for of_data in tables.PUBLISHED_2.values() for v in of_data.values()]
    for place, numbers in expected.items():
        assert [number for number in numbers if number not in told[place]] == [], place
    assert "0.0116" not in told["FE-2024", "Table I"]


# ---- nothing is told beyond what was measured ----


def test_quotations_are_word_for_word(page: ModuleType) -> None:
    for quote in page.listed()["quote"]:
        text = " ".join((page.PAGES / f"{quote['page']}.md").read_text().split())
        assert quote["text"] in text, quote["experiment"]
        assert f"fedtangent experiment {quote['experiment']}" in quote["command"]
        if "undecided" in quote["text"].rpartition(";")[2]:
            assert "undecided" in quote["verdict"], quote["experiment"]
        if "reproduced" in quote["verdict"] or "refuted" in quote["verdict"]:
            assert quote["how"], quote["experiment"]


def test_a_verdict_is_that_of_the_claim_and_names_scale_and_data(page: ModuleType) -> None:
    run = a_run()
    claims = [["more is better", "0.1 [0.05, 0.15]", "seen"], ["less is", "-1 [-2, -0.5]", "not seen"]]
    run["claims"] = [*claims, ["who knows", "0 [-1, 1]", "undecided"], ["ours: a law", "1", "seen"]]
    rows = list(page.rows_of_run(run, ()))
    assert [row[3] for row in rows] == [
        "reproduced at scale smoke on digits",
        "refuted at scale smoke on digits",
        "undecided at scale smoke on digits",
        "seen",
        "holds",
    ]
    assert rows[0][0] == "more is better: 0.1 [0.05, 0.15]" and rows[0][1:3] == ("smoke, digits", "2")
    assert rows[0][4] == "`fedtangent experiment a.b`, 3 s on 1 x cpu"
    assert [row[3] for row in page.rows_of_run(run, None)][:2] == ["seen", "not seen"]
    assert [row[3] for row in page.rows_of_run(run, ["less is"])][1] == "not seen"


def test_every_row_of_a_run_is_in_a_kept_file(page: ModuleType) -> None:
    kept = {path.stem: json.loads(path.read_text()) for path in page.KEPT.glob("*.json")}
    assert len(kept) > 20
    for name, runs in kept.items():
        assert len({run["command"] for run in runs}) == len(runs)
        for run in runs:
            assert run["name"] == name and run["seconds"] > 0 and run["seeds"]
            assert {verdict for *_, verdict in run["claims"]} <= set(page.VERDICTS)
            assert {verdict for *_, verdict in run["verdicts"]} <= set(page.HOLDS.values())
            experiment = catalogue("experiments")[name]
            assert set(run["settings"]) == set(vars(experiment.scales[run["dataset"]][run["scale"]]))
    assert "/" not in "".join(run["command"] for runs in kept.values() for run in runs)


def test_a_drawing_or_a_size_never_run_says_so(page: ModuleType) -> None:
    rows = [row for *_, rows in page.tables() for row in rows]
    assert all(row.verdict and row.ours for row in rows)
    for row in rows:
        assert (row.verdict == page.NOT_RUN) == row.ours.startswith(f"{page.NOT_RUN}: ")
        assert row.how or row.verdict in (page.NOT_RUN, "see there")


# ---- keeping ----


def a_run() -> dict[str, Any]:
    return {
        "name": "a.b", "command": "fedtangent experiment a.b", "scale": "smoke", "dataset": "digits", "seeds": [0, 1],
        "seconds": 3.0, "device": "1 x cpu", "settings": {}, "claims": [],
        "verdicts": [["A: it is", "1 (theory: 1)", "holds"]],
    }  # fmt: skip


def write_run(folder: Path, **changes: Any) -> Path:
    """Writes the files of a finished run, as the command does."""
    options = {"name": "a.b", "scale": "smoke", "dataset": "digits", "set": ["n=3"], "seeds": "0:2", "seed": 0}
    options |= {"data_dir": "/home/somebody/data", "output": "/home/somebody/out"}
    config = {"command": "experiment", "options": options, "resolved": {"seeds": [0, 1]}}
    verdict = {"subject": "A", "statement": "it is", "measured": "1", "expected": "1", "passed": None}
    result = {
        "rows": [], "settings": {"n": 3}, "dataset": "digits", "seconds": 12.34, "status": "finished", "failed": [],
        "claims": [{"claim": "c", "measured": "1 [0, 2]", "verdict": "undecided"}], "verdicts": [verdict],
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"environment": {"device": "1 x cpu"}}))
    (folder / "result.json").write_text(json.dumps(result | changes))
    return folder


def test_a_finished_run_is_kept_once_without_its_folders(page: ModuleType, tmp_path: Path) -> None:
    run, place = write_run(tmp_path / "run"), tmp_path / "kept"
    path = page.keep(run, place)
    text = path.read_text()
    assert path.name == "a.b.json" and "/home" not in text
    (found,) = json.loads(text)
    assert found["command"] == (
        "fedtangent experiment a.b --scale smoke --dataset digits --data-dir DIR --seeds 0:2 --set n=3"
    )
    assert found["claims"] == [["c", "1 [0, 2]", "undecided"]] and found["seconds"] == 12.3
    assert found["verdicts"] == [["A: it is", "1 (theory: 1)", "undecided"]]
    page.keep(write_run(run, seconds=20.0), place)
    assert [r["seconds"] for r in page.runs_of("a.b", place)] == [20.0]


@pytest.mark.parametrize("changes", [{"failed": ["a control passes"]}, {"status": None}])
def test_a_run_that_does_not_count_is_refused(page: ModuleType, tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must hold a finished run of fedtangent experiment that counts"):
        page.keep(write_run(tmp_path / "run", **changes), tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_the_pages_ask_for_the_tables() -> None:
    for name in ("errata", "reproduction"):
        assert f"\n<!-- {name} -->\n" in (ROOT / "docs" / f"{name}.md").read_text()
