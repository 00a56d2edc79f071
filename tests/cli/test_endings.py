"""How the program ends where nothing can be said, or before it has begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedtangent._src.cli import main

SOURCE = Path(__file__).parents[2] / "src"
SLOW = "import time\nprint('now', flush=True)\ntime.sleep(60)\n"
STARTED = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # as it is in the foreground
runpy.run_module("fedtangent", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["jax", "tyro"])
def test_an_interrupt_while_the_program_loads_is_one_line(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text(SLOW)  # in the place of what takes its time to load
    with subprocess.Popen(
        [sys.executable, "-c", STARTED, "list", "algorithms"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(SOURCE)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdout is not None and started.stdout.readline() == "now\n"
        started.send_signal(signal.SIGINT)
        out, error = started.communicate(timeout=60)
    assert (started.returncode, out, error) == (130, "", "fedtangent: interrupted\n")


FULL = "fedtangent: error: cannot write to standard output: No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("stream", "place", "word", "code", "error"),
    [
        ("stdout", "/dev/full", "algorithms", 1, FULL),
        ("stdout", None, "algorithms", 0, ""),
        ("stderr", "/dev/full", "nonsense", 2, None),
        ("stderr", None, "nonsense", 2, None),
    ],
)
def test_a_full_or_closed_standard_stream(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    stream: str,
    place: str | None,
    word: str,
    code: int,
    error: str | None,
) -> None:
    with monkeypatch.context() as patched, open(place or os.devnull, "w") as file:
        patched.setattr(sys, "stdout", sys.__stdout__)  # main puts something else in the place of a closed one
        patched.setattr(sys, "stderr", sys.__stderr__)
        patched.setattr(sys, stream, None if place is None else file)
        with pytest.raises(SystemExit) as ended:
            main.main(["list", word])
        if place is None:
            getattr(sys, stream).close()  # what main put in the place of the closed one
    said = capfd.readouterr()
    assert ended.value.code == code
    assert (said.out == "") == (stream == "stdout" or word == "nonsense")
    if error is not None:
        assert said.err == error
    assert list(folder.iterdir()) == []
