"""Every experiment there is, by its name alone, at scale smoke: it ends, counts, and leaves its tables and figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedtangent._src import entries
from fedtangent._src.cli import main
from fedtangent._src.experiments.lab.runner import Request, prepare_study

FOUND = entries.catalogue("experiments")
EMBEDDED = ("digits", "sine", "sphere", "gaussian", "digits_and_sine")


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_an_experiment_is_prepared_at_every_scale(name: str) -> None:
    for dataset in FOUND[name].scales.keys() & set(EMBEDDED):
        for scale in FOUND[name].scales[dataset]:
            prepare_study(FOUND[name], Request(scale, range(FOUND[name].least_seeds), dataset))


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
