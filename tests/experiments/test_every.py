"""Every experiment there is, by its name alone, at scale smoke: it ends, counts, and leaves its tables and figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedtangent._src import entries
from fedtangent._src.cli import main

FOUND = entries.catalogue("experiments")


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_an_experiment_at_scale_smoke(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main.run(["experiment", name, "--scale", "smoke", "--seeds", f"0:{FOUND[name].least_seeds}"])
    printed = capsys.readouterr()
    assert code == 0, printed.out[-2000:] + printed.err
    (folder,) = tmp_path.glob("results/experiment/*")
    result = json.loads((folder / "result.json").read_text())
    assert folder.name == name and result["rows"] and not result["failed"] and result["seconds"] > 0
    assert list((folder / "figures").glob("*.png"))
    assert any(line.strip().startswith("settings:") for line in printed.out.splitlines())
