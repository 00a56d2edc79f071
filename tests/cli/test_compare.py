"""``fedtangent compare``, end to end, and its exit code when theory and simulation disagree."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from fedtangent._src.cli import compare
from fedtangent._src.comparison import all_verdicts, predicted
from fedtangent._src.comparison.settings import Setting
from fedtangent._src.comparison.side_by_side import Comparison
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.output import style

from ..metrics_file import rows_of
from .conftest import tiny
from .test_commands import COMPARE


@functools.cache
def compared() -> Comparison:
    """The tiny case, compared once."""
    return compare.compared(tiny(None, "smoke", 0))


@pytest.fixture
def compared_once(monkeypatch: pytest.MonkeyPatch, tiny_case: None) -> None:
    found = compared()
    monkeypatch.setattr(compare, "compared", lambda setting, **more: found)


@pytest.fixture
def nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, but their pixels are not drawn: the test of the files of a comparison looks at them."""
    monkeypatch.setattr(style, "finish", lambda figure, title="": None)
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: Path(path).touch())


@pytest.mark.usefixtures("compared_once")
def test_a_comparison_writes_its_files_and_ends_with_its_verdict(run: Callable, folder: Path) -> None:
    ended = run("compare", "--case", "sine", "sine", "--figures", "pdf")
    out = folder / "results" / "compare"  # where it goes by itself
    files = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
    assert files == [
        "config.json",
        "figures/residual.pdf",
        "figures/sine_linear_bands.pdf",
        "metrics.csv",
        "result.json",
    ]
    result = json.loads((out / "result.json").read_text(), parse_constant=pytest.fail)
    methods = [row["method"] for row in result["rows"]]
    assert methods[:2] == ["Fed-ensemble, width 100", "NTK-FL, averaged kernel, width 100"]
    passed = [v["passed"] for v in result["verdicts"]]
    assert ended.code == (1 if False in passed else 0)
    assert ("Simulation and theory agree" in ended.out) == (False not in passed)
    for v in result["verdicts"]:
        if "simulation = flow" in v["statement"]:
            assert v["passed"]
    rows = rows_of(out)
    assert ",".join(rows[0]) == "round,algorithm,seed,split,metric,value,uplink_bytes,downlink_bytes,seconds"
    fed = [r for r in rows if r["algorithm"].startswith("Fed-ensemble") and r["split"] == "test"]
    assert [int(r["round"]) for r in fed] == [0, 5, 10]
    assert float(fed[-1]["value"]) == pytest.approx(result["rows"][0]["test_mse"], rel=1e-12)
    assert int(fed[-1]["uplink_bytes"]) == 10 * 6 * 100 * 8  # rounds, clients, weights, bytes
    config = json.loads((out / "config.json").read_text())
    assert config["command"] == "compare"
    assert config["options"]["case"] == ["sine", "sine"] and config["options"]["figures"] == "pdf"


@pytest.mark.usefixtures("tiny_case", "nothing_is_drawn")
@pytest.mark.parametrize("strict", [False, True])
def test_an_undecided_verdict_is_named_in_the_last_line(
    run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    right = Verdict("A", "one is one", "1", "1", True, "one is two", "1", True)
    found = compared()._replace(verdicts=(right, right._replace(statement="half is one", holds=None)))
    assert found.undecided == ("half is one [A]",)
    monkeypatch.setattr(compare, "compared", lambda setting, **more: found)
    ended = run("compare", "--case", "sine", *["--strict"] * strict)
    assert ended.code == (3 if strict else 0)
    last = (ended.err if strict else ended.out).strip().splitlines()[-1]
    assert last.removeprefix("fedtangent: ") == "undecided: half is one [A]"
    monkeypatch.setattr(compare, "compared", lambda setting, **more: found._replace(verdicts=(right,)))
    assert run("compare", "--case", "sine", "--strict", "--output", "decided").code == 0


@pytest.mark.usefixtures("tiny_case", "nothing_is_drawn")
def test_a_wrong_theory_ends_with_exit_code_1(run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = predicted.run_flow

    def mistaken(setting: Setting, *rest: object, **options: object) -> object:
        return right(setting, *rest, **{"local_steps": setting.followed.local_steps + 2, **options})

    monkeypatch.setattr(predicted, "run_flow", mistaken)
    monkeypatch.setattr(all_verdicts, "run_flow", mistaken)
    ended = run("compare", "--case", "sine", "--output", "out")
    assert ended.code == 1
    assert "DISAGREE" in ended.out
    verdicts = json.loads((folder / "out" / "result.json").read_text())["verdicts"]
    (exact,) = [v for v in verdicts if "simulation = flow" in v["statement"]]
    assert (exact["holds"], exact["control_fails"]) == (False, True)


@pytest.mark.usefixtures("trained_once", "nothing_is_drawn")
@pytest.mark.parametrize("line", COMPARE)
def test_every_command_runs_with_its_defaults(
    run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Its cases are prepared whole; in their place the tiny one is shown and written."""
    found = compared()
    right = found._replace(verdicts=tuple(v._replace(holds=True, control_fails=True) for v in found.verdicts))
    monkeypatch.setattr(compare, "compared", lambda setting, **more: right)
    ended = run(*line.split())
    assert (ended.code, ended.err) == (0, "")
    written = json.loads((folder / "results/compare/config.json").read_text())["options"]
    assert written.get("scale", "default") == "default" and (folder / "results/compare/result.json").exists()


COUNTED = """
import sys, jax
from fedtangent._src.cli.main import main
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *rest, **more: compiled.append(event) if event.endswith("backend_compile_duration") else None
)
try:
    main(["compare", "--scale", "smoke", "--programs", "off"])
except SystemExit as left:
    print(left.code, len(compiled))
"""


@pytest.mark.slow
def test_the_default_cases_compile_few_programs(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", COUNTED], cwd=tmp_path, capture_output=True, text=True, check=True)
    code, programs = map(int, ended.stdout.splitlines()[-1].split())
    assert code == 0 and programs <= 150, ended.stdout
