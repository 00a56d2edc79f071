"""The page of a report: whole, of nothing but itself, and true to what the runs wrote; then in a browser."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imsave

from fedtangent._src.output import files, report, style
from fedtangent._src.output.files import (
    Ended,
    Metric,
    output_folder,
    write_config,
    write_end,
    write_metrics,
    write_result,
)

from .pages import Page

HOSTILE = "<script>alert('\"&amp;')</script>"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def verdict(holds: bool | None) -> dict[str, object]:
    told = {"subject": "A", "statement": HOSTILE, "sizes": "", "holds": holds, "control_fails": holds}
    return {**told, "passed": holds}


def write_run(folder: Path, command: str = "train", figures: int = 2, code: int | None = 0) -> Path:
    """A run of ``train`` that has been told ``HOSTILE`` things; with no exit code one that is under way."""
    output_folder(folder)
    write_config(folder, command, {"algorithm": "fed_avg", "dataset": "digits", "model": HOSTILE, "widths": (8, 9)})
    told = [Metric(r, "fed_avg", 0, "test", "accuracy", r / 8, 10 * r, 20 * r, 0.5 * r) for r in (0, 4)]
    write_metrics(folder, told)
    (folder / "figures").mkdir(exist_ok=True)
    for i in range(figures):
        imsave(folder / "figures" / f"of_{i}.png", np.random.default_rng(i).uniform(size=(40, 60 + 1500 * i, 3)))
    if code is not None:
        rows = [{"split": "test", "metric": "accuracy", "value": 0.25}, {"split": HOSTILE, "value": 1e-9, "more": 3}]
        write_result(folder, rows, rounds=4, verdicts=[verdict(True), verdict(None)])
        write_end(folder, Ended("finished" if code == 0 else "diverged at round 5", code))
    return folder


def page_of(*folders: Path) -> str:
    runs = [report.read_run(folder) for folder in folders]
    return report.page(runs, [f"fedtangent train --model '{HOSTILE}'"] * len(runs), "0.0")


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    text = page_of(write_run(tmp_path / "a"), write_run(tmp_path / "<b>&"))
    page = Page(text)
    assert page.faults == []
    assert [set(script) for script in page.scripts] == [set()]
    assert page.text.count(f"fedtangent train --model '{HOSTILE}'") == 2
    assert "<b>&" in page.text and HOSTILE not in text
    sources = [path.read_bytes() for folder in ("a", "<b>&") for path in sorted((tmp_path / folder).rglob("*.png"))]
    assert [base64.b64decode(image["src"].partition(",")[2]) for image in page.images] == sources
    assert {image["alt"] for image in page.images} == {f"of {i} of train in {n}" for i in (0, 1) for n in ("a", "<b>&")}


def test_a_page_that_is_not_whole_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "a")
    text = page_of(folder)
    for right, wrong in (
        ("</table>", ""),
        ("</td></tr>", "</td><td></td></tr>"),
        ("data:image/png;base64,", "figures/"),
        ('href="#run-1"', 'href="#run-2"'),
        ("<script>", '<script src="https://example.org/a.js">'),
    ):
        assert right in text and Page(text.replace(right, wrong, 1)).faults != [], right
    monkeypatch.setattr(report.ENVIRONMENT, "autoescape", False)
    assert HOSTILE in page_of(folder) and len(Page(page_of(folder)).scripts) > 1


def test_tables_hold_what_the_run_wrote(tmp_path: Path) -> None:
    overview, results, verdicts, options, versions = Page(page_of(write_run(tmp_path / "a"))).tables
    assert overview[0] == ["run", "command", "of", "ended", "in short"]
    assert overview[1][1:] == [
        "train",
        f"fed_avg, digits, {HOSTILE}",
        "finished",
        "verdicts: 1 as they must be, 1 undecided",
    ]
    assert results == [
        ["split", "metric", "value", "more"],
        ["test", "accuracy", "0.25", "-"],
        [HOSTILE, "-", "1e-09", "3"],
    ]
    assert verdicts == [
        ["subject", "statement", "holds", "control fails"],
        ["A", HOSTILE, "holds", "fails, as it must"],
        ["A", HOSTILE, "undecided", "undecided"],
    ]
    assert options[1:] == [["algorithm", "fed_avg"], ["dataset", "digits"], ["model", HOSTILE], ["widths", "[8, 9]"]]
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert versions[1:] == [[name, str(value)] for name, value in config["environment"].items()]


@pytest.mark.parametrize(
    ("code", "says"), [(None, "unfinished, at round 4"), (0, "finished"), (1, "diverged at round 5")]
)
def test_how_a_run_ended_is_said(tmp_path: Path, code: int | None, says: str) -> None:
    page = Page(page_of(write_run(tmp_path / "a", "compare", code=code)))
    assert says in page.tables[0][1][3]
    if code is None:
        assert page.tables[1][1][:6] == ["4", "fed_avg", "0", "test", "accuracy", "0.5"]
        assert page.tables[0][1][4] == "test accuracy 0.5"


def test_figures_of_every_format_are_within_the_page(tmp_path: Path) -> None:
    """A browser shows a PNG and an SVG; a PDF is there to be taken out of the page."""
    folder = write_run(tmp_path / "a", figures=0)
    for name in files.FORMATS:
        figure, _ = style.canvas(1)
        style.save(figure, folder / f"figures/f.{name}")
    page = Page(page_of(folder))
    assert page.faults == []
    shown = [image["src"].partition(";")[0] for image in page.images]
    assert shown == ["data:image/png", "data:image/svg+xml"]
    assert base64.b64decode(page.downloads["f.pdf"].partition(",")[2]) == (folder / "figures/f.pdf").read_bytes()
    for name in files.FORMATS:
        path = folder / f"figures/f.{name}"
        path.write_bytes(path.read_bytes()[:-2])
    page = Page(page_of(folder))
    assert page.images == [] and page.downloads == {}


def test_half_a_figure_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    whole = (folder / "figures/of_0.png").read_bytes()
    for content, count in ((whole, 2), (whole[:-1], 1), (b"GIF89a" + whole[6:], 1), (whole[:8] + whole[-8:], 1)):
        (folder / "figures/of_0.png").write_bytes(content)
        assert len(Page(page_of(folder)).images) == count


def test_a_figure_that_is_drawn_anew_meanwhile_is_shown_as_it_was_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    run = report.read_run(folder)
    before = (folder / "figures/of_0.png").read_bytes()
    (folder / "figures/of_0.png").write_bytes(b"")
    image = Page(report.page([run], ["fedtangent train"], "0.0")).images[0]
    assert base64.b64decode(image["src"].partition(",")[2]) == before


def test_what_utf_8_has_no_letter_for_is_escaped(tmp_path: Path) -> None:
    text = page_of(write_run(tmp_path / "\udcff" / "a"))
    assert "\\udcff/a" in Page(text.encode().decode()).text


def test_rows_that_are_no_verdicts_are_shown_as_they_are(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    rows = [{"holds": "x", "control_fails": [1], "passed": 5}, {"holds": True, "passed": True}, {"split": "test"}, 7]
    write_result(folder, rows, verdicts=rows[:2])
    overview, results, verdicts, *_ = Page(page_of(folder)).tables
    assert not any("must be" in cell for cell in overview[1])
    assert results[1][:3] == ["x", "[1]", "5"] and results[4][-1] == "7"
    assert verdicts[1:] == [["x", "[1]", "5"], ["yes", "-", "yes"]]


def test_runs_are_found_below_a_folder(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name, figures=0) for name in ("a", "b/c", "b/c/runs/inner", "z")]
    write_run(tmp_path / "report", "report", figures=0)
    (tmp_path / "empty").mkdir()
    assert report.runs_below(tmp_path) == [paths[0], paths[1], paths[3]]
    assert report.runs_below(paths[1]) == [paths[1]]
    for name, says in (
        ("none", "must be a folder"),
        ("empty", "must be the folder of a run"),
        ("report", "have folders of runs"),
    ):
        with pytest.raises(ValueError, match=f"runs: got .*{name}, .*{says}"):
            report.runs_below(tmp_path / name)


WRONG = [
    *((name, text, says) for name in ("config.json", "result.json")
      for text, says in (("{", "cannot be read"), ("[]", "not a JSON file"), ("[" * 100_000, "cannot be read"))),
    *(("config.json", json.dumps({"command": "train", "options": {}, name: 5}), f"not .*: {name} is a int")
      for name in ("command", "options", "resolved", "environment")),
    ("config.json", '{"command": "train"}', "is not the configuration of a run"),
    *(("result.json", json.dumps({name: True}), f"not a file .*: {name} is a bool")
      for name in ("rows", "verdicts", "failed")),
    ("metrics.csv", "round\n" + "9" * 5000, "not the table"),
    ("metrics.csv", "round,split\n1," + "x" * 200_000, "not the table"),
    ("metrics.csv", "round,split\n1,\udcff", "not the table"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "says"), WRONG)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    folder = write_run(tmp_path / "a", figures=0)
    (folder / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=f"^runs: .*{name} is {says}|^runs: .*{name} {says}") as refused:
        report.read_run(folder)
    assert type(refused.value) is ValueError


PROBE = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => errors.push(event.blockedURI));
addEventListener("load", () => setTimeout(() => {
  document.querySelectorAll("details").forEach((one) => { one.open = true; });
  const body = document.querySelectorAll("table")[1].tBodies[0];
  const column = () => [...body.rows].map((row) => row.cells[2].textContent);
  const orders = [column()];
  const button = body.parentNode.querySelectorAll("th button")[2];
  for (let i = 0; i < 2; i++) { button.click(); orders.push(column()); }
  parent.postMessage(JSON.stringify({
    errors, orders, width: innerWidth, page: document.documentElement.scrollWidth,
    images: [...document.images].map((image) => image.naturalWidth),
    boxes: [...document.querySelectorAll("pre, table")].every((one) => one.closest(".scroll").tabIndex === 0),
  }), "*");
}));
</script>"""


def seen_in_a_browser(text: str, width: int, folder: Path) -> dict[str, object]:
    """What a script finds in the page, in a frame that is so wide (a window is never narrow); the console's lines."""
    assert BROWSER is not None
    inner, outer = escape(text.replace("</head>", f"{PROBE}</head>")), folder / "outer.html"
    listen = "onmessage = (event) => { document.documentElement.dataset.seen = event.data; };"
    frame = f'<iframe style="border:0" width="{width}" height="2000" srcdoc="{inner}"></iframe>'
    outer.write_text(f'<!DOCTYPE html><meta charset="utf-8"><script>{listen}</script>{frame}', encoding="utf-8")
    given = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={folder}/user"]
    given += ["--window-size=1800,2000", "--virtual-time-budget=5000", "--dump-dom", outer.as_uri()]
    done = subprocess.run([BROWSER, *given], capture_output=True, text=True, check=True, timeout=300)
    seen = unescape(done.stdout.partition('data-seen="')[2].partition('"')[0])
    return {**json.loads(seen), "console": [line for line in done.stderr.splitlines() if "CONSOLE" in line]}


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no browser")
@pytest.mark.parametrize("width", [400, 1600])
def test_in_a_browser(tmp_path: Path, width: int) -> None:
    folder = write_run(tmp_path / "a")
    rows = [{"split": "word " * 20, "metric": "m" * 60, "value": value, "more": "x"} for value in (10.0, 9.0, None)]
    write_result(folder, rows, long=[{f"column {i}": i for i in range(40)}], text="y" * 400)
    text = page_of(folder)
    seen = seen_in_a_browser(text, width, tmp_path)
    assert (seen["errors"], seen["console"], seen["images"]) == ([], [], [60, 1560])
    assert seen["width"] == width and seen["page"] <= width
    assert seen["orders"] == [["10", "9", "-"], ["9", "10", "-"], ["10", "9", "-"]]
    assert seen["boxes"] is True
    broken = text.replace("data:image/png;base64,", "https://example.org/", 1).replace(
        "overflow: auto", "overflow: visible"
    )
    wrong = seen_in_a_browser(broken, width, tmp_path)
    assert wrong["errors"] != [] and wrong["console"] != [] and wrong["images"] == [0, 1560]
    assert wrong["page"] > width
