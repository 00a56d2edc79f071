"""One measurement is one process: run it, watch the memory of its whole tree, and take the line of JSON it prints."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.2


class MeasurementError(Exception):
    """A measurement that gave no result; the message is one line."""


def _parents() -> dict[int, list[int]]:
    """Children by parent, from /proc; empty where there is none."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    return children


def tree(root: int) -> list[int]:
    """The process ``root`` and everything it started that still has it as an ancestor."""
    children, found = _parents(), [root]
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def resident_mib(pids: Sequence[int]) -> float:
    """Resident memory of ``pids`` together, MiB; pages they share are counted in each. 0 where there is no /proc."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return total * os.sysconf("SC_PAGE_SIZE") / 2**20


def _stop(root: int) -> None:
    for pid in reversed(tree(root)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def last_json(text: str) -> dict[str, Any] | None:
    """The last line of ``text`` that is a JSON object."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                return dict(json.loads(line))
    return None


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["no output"])[-1]


def measure(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> dict[str, Any]:
    """Run ``command``; the object it prints, with ``peak_mib`` (its tree) and ``process_seconds`` (start-up and all).

    Raises ``MeasurementError`` if it fails, prints none, or takes longer than ``timeout`` (its tree is then killed).
    """
    began, peak = time.perf_counter(), 0.0
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(list(command), env=dict(environment), stdout=out, stderr=err)
        try:
            while process.poll() is None:
                peak = max(peak, resident_mib(tree(process.pid)))
                if time.perf_counter() - began > timeout:
                    raise MeasurementError(f"took longer than {timeout:.0f} s")
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                _stop(process.pid)
                process.wait()
        out.seek(0), err.seek(0)
        text, complaint = out.read(), err.read()
    found = last_json(text) if process.returncode == 0 else None
    if found is None:
        raise MeasurementError(f"exit code {process.returncode}: {_reason(complaint or text)}")
    return found | {"peak_mib": peak, "process_seconds": time.perf_counter() - began}
