"""Runs the command line in this process, in an empty folder, cut off from the user's data and caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from fedtangent.cli import main


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The empty working folder."""
    work = tmp_path / "work"
    work.mkdir()
    jax.devices()  # in use from here on, so that no test makes the machine's cores devices of their own
    monkeypatch.chdir(work)
    monkeypatch.delenv("FEDTANGENT_DATA", raising=False)
    monkeypatch.setenv("FEDTANGENT_CACHE", str(tmp_path / "cache"))
    yield work
    jax.config.update("jax_enable_x64", True)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """``run("train", "--num-rounds", "1")`` -> exit code and what was printed."""

    def ended_with(*arguments: object) -> Ended:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main([str(a) for a in arguments])
        return Ended(ended.value.code, *capsys.readouterr())

    return ended_with
