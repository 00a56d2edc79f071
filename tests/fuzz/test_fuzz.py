"""A slice of ``make fuzz``, and that what goes wrong would be seen."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ..nightly import nightly

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def case() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_case", HERE / "case.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its annotations are looked up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_slice() -> None:
    numbers = ["--lines", "3", "--calls", "3", "--numbers", "2"]
    command = [sys.executable, HERE, *numbers, "--processes", "1", "--seed", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "cases: {'well': " in done.stdout, done.stdout + done.stderr


CHECKS = ("training", "uncertainty", "kernel", "limit", "flow", "partition", "channel", "privacy")


@pytest.mark.parametrize("name", nightly(CHECKS, ["limit", "partition", "privacy"]))
def test_a_wrong_number_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number that is computed twice agrees, and does not when the second way is off."""
    monkeypatch.syspath_prepend(str(HERE))
    checks = importlib.import_module("numbers_twice").CHECKS
    assert tuple(checks) == CHECKS
    checks[name](np.random.default_rng(1), 0.0)
    with pytest.raises(AssertionError):
        checks[name](np.random.default_rng(1), 1.0 if name == "privacy" else 0.01)


@pytest.mark.parametrize(
    ("code", "said", "wrong"),
    [
        (0, "", ""),
        (2, "fedtangent: error: alpha: got 0, must be above 0\n", ""),
        (130, "fedtangent: interrupted\n", ""),
        (2, "fedtangent: error: alpha\nand more\n", "a refusal of 2 lines"),
        (2, "", "a refusal of 0 lines"),
        (1, "Traceback (most recent call last):\n  ..\nKeyError: 1\n", "traceback: KeyError: 1"),
        (0, "x.py:1: RuntimeWarning: overflow\n", "warning: x.py:1: RuntimeWarning: overflow"),
        (3, "", "exit code 3"),
        (-11, "", "ended by signal 11"),
    ],
)
def test_what_is_wrong_with_an_end(case: ModuleType, code: int, said: str, wrong: str) -> None:
    assert case.judge(code, said, True).startswith(wrong) and bool(case.judge(code, said, True)) == bool(wrong)


def test_files_where_none_should_be(case: ModuleType, tmp_path: Path) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    (work / "results").mkdir(parents=True)
    (home / ".cache" / "fedtangent" / "a").mkdir(parents=True)
    assert case.strays(work, home, 0) == ""
    assert case.strays(work, home, 2) == "left work/results"
    (home / "elsewhere").touch()
    assert case.strays(work, home, 0) == "left home/elsewhere"
