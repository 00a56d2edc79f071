"""An output folder has one owner: of two runs in it one is refused, or comes after the other, and nothing is mixed."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedtangent._src.engine.checkpoints import CheckpointError
from fedtangent._src.engine.checkpoints.files import locked

SCRIPT = Path(__file__).parent / "two_runs.py"
HOLDS = """
import sys, pathlib
from fedtangent._src.engine.checkpoints.files import locked
with locked(pathlib.Path(sys.argv[1]), "output"):
    print("held", flush=True)
    sys.stdin.read()
"""


def trials(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(folder), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=7200)


def test_nothing_is_mixed(tmp_path: Path) -> None:
    found = trials(tmp_path, 1, "train", "train anew")
    assert found.returncode == 0 and len(found.stdout.splitlines()) == 3, found.stdout + found.stderr


@pytest.mark.slow
def test_nothing_is_mixed_by_any_pair_of_commands(tmp_path: Path) -> None:
    found = trials(tmp_path, 5)
    assert found.returncode == 0 and len(found.stdout.splitlines()) == 55, found.stdout + found.stderr
    assert "in use" in found.stdout and "holds a run" in found.stdout and "one after the other" in found.stdout


@pytest.mark.slow
def test_nothing_is_mixed_by_what_commands_really_write(tmp_path: Path) -> None:
    found = trials(tmp_path, 2, "real", "train", "train of seeds", "train with checkpoints", "predict")
    assert found.returncode == 0 and len(found.stdout.splitlines()) == 10, found.stdout + found.stderr


@pytest.mark.slow
def test_without_an_owner_the_same_trials_fail(tmp_path: Path) -> None:
    found = trials(tmp_path, 40, "unlocked", "train anew")
    assert found.returncode == 1 and "both ran at once" in found.stdout


def test_a_killed_owner_holds_nothing(folder: Path) -> None:
    folder = folder / "yet" / "to be made"
    owner = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdin=-1, stdout=-1, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "held\n"
    with pytest.raises(CheckpointError, match=r"^output: .*to be made is in use by another run; name another folder$"):
        locked(folder, "output").__enter__()
    assert [path.name for path in folder.iterdir()] == [".lock"]
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    with locked(folder, "output"):
        (folder / "written").touch()
    assert [path.name for path in folder.iterdir()] == ["written"]


def test_what_was_made_to_hold_it_goes(folder: Path) -> None:
    for made in ("a/b", "a/b/../c", "a/.."):
        with pytest.raises(ValueError, match="refused"), locked(folder / made, "output"):
            raise ValueError("refused")
        assert not list(folder.iterdir()), made
    (folder / "file").touch()
    for place in (folder / "file", folder / "file" / "below", Path("/proc/none")):
        with pytest.raises(CheckpointError, match=f"^output: cannot write in {place}: "):
            locked(place, "output").__enter__()
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_the_next_owner_does_not_get_the_file_of_the_one_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who opened the file before its owner removed it must not hold that one: a third would hold a new one."""
    before, opened = locked(folder, "output"), 0
    before.__enter__()

    def flock(file: object, how: int) -> None:
        nonlocal opened
        opened += 1
        if opened == 1:
            before.__exit__(None, None, None)
        real(file, how)

    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(folder, "output"):
        assert opened == 2
        with pytest.raises(CheckpointError, match="in use"):
            locked(folder, "output").__enter__()


def test_a_file_system_without_locks_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    told: list[str] = []
    with locked(folder, "output", told.append):
        pass
    assert told == [f"output: {folder} is on a file system without locks: nothing keeps another run out of it"]
    assert not list(folder.iterdir())
