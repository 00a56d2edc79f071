"""``fedtangent explore`` serves its page on the loopback address until it is interrupted."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest

from fedtangent._src.cli import explore

from .asking import asked
from .test_commands import lines_of_the_documents

bokeh = pytest.importorskip("bokeh", reason="the extra explore is not installed")
TINY = ("--num-clients", "4", "--num-rounds", "2", "--port", "0", "--no-browser")


def test_the_page_is_served_until_it_is_interrupted(folder: Path) -> None:
    command = [sys.executable, "-m", "fedtangent", "explore", *TINY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            address, _, told = process.stdout.readline().partition(" ")
            assert told == "shows the page; Ctrl-C ends it\n"
            assert address.startswith("http://localhost:")
            with urlopen(address, timeout=60) as answer:
                text = answer.read().decode()
            assert "fedtangent explore" in text and "viewport" in text and "cdn." not in text
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()
    assert list(folder.iterdir()) == []


def test_every_line_of_the_documents_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line.split() for line in lines_of_the_documents() if line.startswith("explore")]
    assert lines
    monkeypatch.setattr(explore, "server", lambda run, port: (run, port))
    for _, *words in lines:
        (run, port), in_browser = explore.prepare(**asked("explore", *words).arguments)
        assert run.data.name in words or run.data.name == "sine"
        assert port == 5006 and in_browser


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dataset", "nothing"), "dataset: got 'nothing', allowed are"),
        (("--port", "70000"), "port: got 70000, must be a whole number from 0 to 65535"),
        (("--num-clients", "200"), "num_clients: got 200, must be a whole number from 1 to 100"),
    ],
)
def test_bad_options_are_refused_in_one_line(run: Callable, words: tuple[str, ...], message: str) -> None:
    ended = run("explore", *words)
    assert ended.code == 2 and ended.err.startswith(f"fedtangent: error: {message}") and ended.err.count("\n") == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Tornado leaves the socket to Python
def test_a_port_in_use_is_refused_in_one_line(run: Callable) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("explore", *TINY[:4], "--port", port, "--no-browser")
    assert ended.code == 2 and f"port: got {port}, which cannot be used" in ended.err and ended.err.count("\n") == 1


def test_without_its_packages_one_line_says_what_to_install(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ended = run("explore")
    assert ended.code == 2
    assert ended.err == "fedtangent: error: explore: bokeh is not installed: pip install 'fedtangent[explore]'\n"
