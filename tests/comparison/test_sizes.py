"""What kernels take, before they are computed: in float64, in float32, in memory or in a file, or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedtangent._src import liveness
from fedtangent._src.cli.main import run
from fedtangent._src.comparison import forecast, predicted
from fedtangent._src.comparison.forecast import forecasts
from fedtangent._src.comparison.predicted import prior_starts
from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.kernels.large import LargeKernel

from . import runs
from .runs import MINIBATCHES, SMALL

OPTIONS = {**SMALL, **MINIBATCHES}
LINE = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicted, "MOST_EXACT", 10)


def planned(tmp_path: Path, **more: object) -> predicted.KernelPlan:
    plan = runs.planned(2, every=5, **{**OPTIONS, **more})  # type: ignore[arg-type]
    return predicted.plan_kernels(plan.setting, plan.at_once, tmp_path)


def room(monkeypatch: pytest.MonkeyPatch, of_memory: float, of_disk: float = 1e15) -> None:
    monkeypatch.setattr(liveness, "memory_limit", lambda: int(of_memory))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=int(of_disk)))


def test_few_points_are_float64_blocks(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert not plan.is_large and plan.folder is None and str(plan).startswith("memory: ")
    setting = runs.planned(2, every=5, **OPTIONS).setting
    n, m = len(setting.problem.x_train), len(setting.problem.x_test)
    assert plan.kernel == 16 * (n + m) ** 2
    assert isinstance(predicted.planned_kernels(setting, plan), KernelBlocks)


def test_many_are_one_of_float32_in_memory_or_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: None
) -> None:
    plan = planned(tmp_path)
    assert plan.is_large and plan.folder is None
    setting = runs.planned(2, every=5, **OPTIONS).setting
    assert plan.kernel == 4 * len(setting.problem.x_train) ** 2
    assert isinstance(predicted.planned_kernels(setting, plan), LargeKernel) and not list(tmp_path.iterdir())
    room(monkeypatch, (plan.total - plan.kernel / 2) / liveness.USABLE)
    filed = planned(tmp_path)
    assert filed.folder == tmp_path and filed.total == plan.total - plan.kernel
    predicted.planned_kernels(setting, filed)
    assert len(list(tmp_path.glob("*.npy"))) == 1


@pytest.mark.parametrize(("of_memory", "of_disk"), [(1e6, 1e15), ("half", 10)])
def test_no_room_is_said_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: None, capsys: pytest.CaptureFixture[str],
    of_memory: float | str, of_disk: float,
) -> None:  # fmt: skip
    plan = planned(tmp_path)
    half = (plan.total - plan.kernel / 2) / liveness.USABLE
    room(monkeypatch, half if of_memory == "half" else float(of_memory), of_disk)
    monkeypatch.chdir(tmp_path)
    assert run(["predict", *LINE, "--draws", "2", "--evaluate-every", "5", "--output", "out"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fedtangent: error: data: got ") and said.count("\n") == 1 and "whose kernel needs" in said
    assert not Path("out").exists()


@pytest.mark.slow
def test_a_changed_file_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: None, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(tmp_path)
    room(monkeypatch, (plan.total - plan.kernel / 2) / liveness.USABLE)
    monkeypatch.chdir(tmp_path)
    line = ["predict", *LINE, "--draws", "2", "--no-rates", "--evaluate-every", "5", "--kernel-dir", "kernels"]
    assert run([*line, "--output", "first"]) == 0
    (path,) = Path("kernels").glob("*.npy")
    with path.open("r+b") as file:
        file.seek(500)
        file.write(b"\x07\x07")
    capsys.readouterr()
    assert run([*line, "--output", "second"]) == 2
    said = capsys.readouterr().err
    assert "was changed since it was written" in said and said.count("\n") == 1
    assert not Path("second").exists() and Path("first/metrics.csv").exists()


@pytest.mark.slow
def test_a_large_kernel_predicts_what_blocks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same starts to float32; of its own the starts are networks."""
    plan = runs.planned(2, rates=False, **OPTIONS)
    (right,) = forecasts([plan])
    monkeypatch.setattr(predicted, "MOST_EXACT", 10)
    (own,) = forecasts([plan])
    assert own.rates is None and own.best is own.given
    assert abs(own.given.mean("test", "mse")[0] / right.given.mean("test", "mse")[0] - 1) > 1e-3
    blocks = plan.setting.blocks()
    monkeypatch.setattr(forecast, "prior_starts", lambda setting, kernels, draws: prior_starts(setting, blocks, draws))
    (same,) = forecasts([plan])
    for key, values in right.given.values.items():
        assert np.allclose(same.given.values[key], values, rtol=1e-4, atol=1e-5), key
