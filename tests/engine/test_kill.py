"""SIGKILL at random instants, during checkpoints too: every resume ends bit for bit as the uninterrupted run."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..metrics_file import alike
from . import stateful

TESTS = Path(__file__).parent
SECONDS = 300
# What is killed may be writing a compiled program: it reads those of the uninterrupted run, and keeps none.
KEEPS_NO_PROGRAM = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}
SMALL = ["--num-train", "200", "--num-clients", "4", "--widths", "8", "--num-rounds", "120", "--evaluate-every", "7"]
SMALL += ["--algorithm", "fed_ensemble", "--num-models", "2"]


def started(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parents[1] / "src"), **variables}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finished(process: subprocess.Popen[str]) -> str:
    out, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, error
    return out


def newest(folder: Path) -> int:
    """The round of the newest checkpoint, or 0."""
    return max((int(p.name[6:]) for p in folder.glob("run-*/round-*") if p.name[6:].isdigit()), default=0)


def killed(process: subprocess.Popen[str], folder: Path, round_: int, delay: float) -> bool:
    """Kill the process ``delay`` seconds after its checkpoint of ``round_``; False if it had ended before."""
    limit = time.monotonic() + SECONDS
    while newest(folder) < round_ and process.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.002)
    time.sleep(delay)
    alive = process.poll() is None
    process.kill()
    process.communicate(timeout=SECONDS)
    return alive


def in_the_middle(folder: Path) -> bool:
    """Whether a kill left something half done: a part of a round, of a segment, or of a removal."""
    halves = [*folder.rglob("*.part"), *folder.rglob("*.gone")]
    segments = max((int(p.stem[9:]) for p in folder.glob("run-*/history/*.npz")), default=0)
    return bool(halves) or segments > newest(folder)


def kills(folder: Path, count: int, rounds: int, command: list[object]) -> list[bool]:
    """Kill a run ``count`` times at drawn instants spread over its rounds; which of them hit a checkpoint."""
    draw, middle = random.Random(0), []
    for i in range(count):
        resume = ["resume"] if newest(folder) else []
        aim = max(int((i + draw.random()) * rounds / (count + 1)), newest(folder) + 1)
        process = started(*command, *resume, **KEEPS_NO_PROGRAM)
        assert killed(process, folder, aim, draw.random() * 0.05), f"kill {i} came too late"
        assert newest(folder) >= aim
        middle.append(in_the_middle(folder))
    return middle


@pytest.mark.parametrize(("count", "rounds"), [(2, 30), pytest.param(10, 120, marks=pytest.mark.slow)])
def test_kill_9(tmp_path: Path, count: int, rounds: int) -> None:
    script = TESTS / "killed_run.py"
    whole = stateful.summary(stateful.run(rounds))
    middle = kills(tmp_path, count, rounds, [script, rounds, tmp_path, 1])
    ended = finished(started(script, rounds, tmp_path, 1, "resume"))
    assert ended.strip() == whole
    assert ended.split()[1:] == ["finished", str(rounds)]
    print(f"{sum(middle)} of {count} kills hit a checkpoint being written")
    assert count < 10 or sum(middle) >= 2


@pytest.mark.slow
def test_kill_9_of_the_command(tmp_path: Path) -> None:
    """Twice, then resumed: metrics.csv and result.json are the uninterrupted run's to the letter, seconds aside."""
    train = ["-m", "fedtangent", "train", *SMALL, "--checkpoint-every", "1", "--output"]
    finished(started(*train, tmp_path / "whole"))
    out = tmp_path / "out"
    for i, (aim, resume) in enumerate(((20, []), (70, ["--resume"]))):
        process = started(*train, out, *resume, **KEEPS_NO_PROGRAM)
        assert killed(process, out / "checkpoints", aim, 0.03), f"kill {i} came too late"
    finished(started(*train, out, "--resume"))
    assert alike(out) == alike(tmp_path / "whole")


def several(*arguments: object, **variables: str) -> list[str]:
    """What each of two processes printed that run together, each with two devices."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    variables |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    variables |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    together = [started(*arguments, **variables, JAX_PROCESS_ID=str(i)) for i in range(2)]
    return [finished(process).splitlines()[-1] for process in together]


@pytest.mark.slow
def test_two_processes_stop_together_and_resume(tmp_path: Path) -> None:
    """A SIGTERM to one of them stops both; resumed, they end as if they had not been stopped."""
    script = TESTS / "killed_run.py"
    stopped = several(script, 11, tmp_path, 2, STOP_AT="6")
    assert stopped[0] == stopped[1]
    assert "stopped by SIGTERM at round" in stopped[0]
    resumed = several(script, 11, tmp_path, 2, "resume")
    assert resumed == several(script, 11)
    assert resumed[0].split()[1:] == ["finished", "11"]
    assert resumed[0].split()[0] != stopped[0].split()[0]
