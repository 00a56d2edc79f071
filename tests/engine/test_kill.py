"""SIGKILL at random instants, during checkpoints too: every resume ends bit for bit as the uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..metrics_file import alike
from . import stateful

TESTS = Path(__file__).parent
SECONDS = 300
# What is killed may be writing a compiled program: it reads those of the uninterrupted run, and keeps none.
KEEPS_NO_PROGRAM = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}
ROUNDS = 120
SMALL = ["--num-train", "200", "--num-clients", "4", "--widths", "8", "--num-rounds", ROUNDS, "--evaluate-every", "7"]
RUNS = {  # what has a state of its own kind
    "fed_ensemble": ["--num-models", "2"],
    "fed_ensemble --base scaffold": ["--num-models", "2", "--local-steps", "3"],
    "fed_be": ["--num-samples", "3", "--server-examples", "20", "--local-steps", "3"],
    "fed_avg --error-feedback": ["--channel", "top_k:0.1"],
    "ntk_fl --ntk-choose validation": ["--server-examples", "20", "--ntk-times", "10", "20", "50"],
}


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


def killed(process: subprocess.Popen[str], is_there: Callable[[], bool], delay: float) -> bool:
    """Kill the process ``delay`` seconds after something ``is_there``; False if it had ended before."""
    limit = time.monotonic() + SECONDS
    while not is_there() and process.poll() is None:
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


def kills(folder: Path, count: int, rounds: int, command: list[object], resume_by: str = "resume") -> list[bool]:
    """Kill a run ``count`` times at drawn instants spread over its rounds; which of them hit a checkpoint."""
    draw, middle = random.Random(0), []
    for i in range(count):
        resume = [resume_by] if newest(folder) else []
        aim = max(int((i + draw.random()) * rounds / (count + 1)), newest(folder) + 1)
        process = started(*command, *resume, **KEEPS_NO_PROGRAM)
        assert killed(process, lambda aim=aim: newest(folder) >= aim, draw.random() * 0.05), f"kill {i} came too late"
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


def kept(folder: Path) -> tuple[Any, dict[int, Any]]:
    """The state of the newest checkpoint, and what is kept of each round: bit for bit, seconds aside."""
    import orbax.checkpoint as ocp

    (run,) = folder.glob("run-*")
    with ocp.StandardCheckpointer() as reader:
        state = reader.restore((run / f"round-{newest(folder):08d}" / "state").absolute())
    rounds = {}
    for path in run.glob("history/*.npz"):
        arrays = dict(np.load(path))
        header = json.loads(arrays.pop("header").tobytes())
        told = [evaluation[:-1] for evaluation in header["evaluations"]]
        rounds[header["start"]] = header["stop"], told, stateful.plain(arrays)
    return stateful.plain(state), rounds


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_kill_9_of_the_command(name: str, tmp_path: Path) -> None:
    """Three times: checkpoint, metrics.csv and result.json are the uninterrupted run's to the letter, seconds aside."""
    train = ["-m", "fedtangent", "train", "--algorithm", *name.split(), *RUNS[name], *SMALL]
    train += ["--checkpoint-every", "1", "--output"]
    finished(started(*train, tmp_path / "whole"))
    out = tmp_path / "out"
    kills(out / "checkpoints", 3, ROUNDS, [*train, out], "--resume")
    finished(started(*train, out, "--resume"))
    assert alike(out) == alike(tmp_path / "whole")
    whole, resumed = kept(tmp_path / "whole" / "checkpoints"), kept(out / "checkpoints")
    assert resumed == whole
    assert sorted(whole[1]) == list(range(ROUNDS))


@pytest.mark.slow
def test_kill_9_of_an_experiment(tmp_path: Path) -> None:
    """Five times, each later: the runs that it had finished are used again, and nothing of the others stays."""
    table = ["-m", "fedtangent", "experiment", "fed_ensemble.table5", "--scale", "smoke", "--seeds", "0:3", "--output"]
    finished(started(*table, tmp_path / "whole"))
    out, draw = tmp_path / "out", random.Random(0)
    runs = len(list((tmp_path / "whole").glob("runs/*.npz")))
    assert runs >= 10
    for i in range(5):
        process, aim = started(*table, out, **KEEPS_NO_PROGRAM), i * runs // 6 + 1
        assert killed(process, lambda aim=aim: len(list(out.glob("runs/*.npz"))) >= aim, draw.random() * 0.3)
    finished(started(*table, out))
    assert alike(out) == alike(tmp_path / "whole")
    assert not list(out.rglob("*.part"))


@pytest.mark.slow
def test_kill_9_of_a_comparison(tmp_path: Path) -> None:
    """Five times, anywhere after its beginning: begun anew, it ends as one that was not killed."""
    compare = ["-m", "fedtangent", "compare", "--algorithm", "fed_avg", "--num-train", "30", "--num-clients", "3"]
    compare += ["--num-rounds", "20", "--widths", "8", "16", "32", "--draws", "20", "--output"]
    begun = time.monotonic()
    finished(started(*compare, tmp_path / "whole"))
    seconds, out, draw = time.monotonic() - begun, tmp_path / "out", random.Random(0)
    for _ in range(5):
        process = started(*compare, out, "--overwrite", **KEEPS_NO_PROGRAM)
        assert killed(process, (out / "config.json").exists, seconds * draw.uniform(0, 0.5))
    assert not (out / "result.json").exists() or json.loads((out / "result.json").read_text())["status"] != "finished"
    finished(started(*compare, out, "--overwrite"))
    assert alike(out) == alike(tmp_path / "whole")
    assert not list(out.rglob("*.part"))


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
