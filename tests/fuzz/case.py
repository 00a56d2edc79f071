"""One case in a forked process with a folder, a home and limits of its own, and what is wrong with its end."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import sys
import time
import traceback
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

SECONDS, GRACE = 20.0, 600.0  # until a case is interrupted, and until it then is a hang
BYTES = 12 * 2**30  # of address space for numbers, a case's
REFUSED, INTERRUPTED = 2, 130
ALLOWED = (0, 1, REFUSED, INTERRUPTED, 128 + signal.SIGPIPE, 128 + signal.SIGTERM)


class Case(NamedTuple):
    """What is tried: its name, and what to run in the forked process."""

    name: str
    run: Callable[[], int]
    is_line: bool = True


def drawn(strategy: st.SearchStrategy[Any], number: int, start: int) -> Iterator[Any]:
    """``number`` draws of a strategy, the same for the same ``start``."""
    found: list[Any] = []

    checks, phases = list(HealthCheck), [Phase.generate]

    @seed(start)
    @settings(max_examples=number, deadline=None, database=None, phases=phases, suppress_health_check=checks)
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # modules that are first imported here may use random numbers
        collect()
    return iter(found)


def tried(case: Case, folder: Path) -> str:
    """What is wrong with how a case ended; nothing, if all is well."""
    work, home = folder / "work", folder / "home"
    work.mkdir(parents=True)
    home.mkdir()
    pid = os.fork()
    if pid == 0:
        _behave(case, folder)  # does not return
    begun, interrupted = time.monotonic(), False
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        waited = time.monotonic() - begun
        if waited > SECONDS and not interrupted:
            interrupted = True
            os.kill(pid, signal.SIGINT)
        if waited > SECONDS + GRACE:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hang"
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it started
    said = (folder / "stderr").read_text(errors="replace")
    wrong = judge(os.waitstatus_to_exitcode(status), said, case.is_line)
    return wrong or (strays(work, home, os.waitstatus_to_exitcode(status)) if case.is_line else "")


def judge(code: int, said: str, is_line: bool) -> str:
    """What is wrong with an exit code and with what went to standard error."""
    if code < 0:
        return f"ended by signal {-code}"
    if "Traceback (most recent call last)" in said:
        return "traceback: " + said.strip().splitlines()[-1]
    if found := re.search(r"^.*\b\w*Warning\b.*$", said, re.MULTILINE):
        return "warning: " + found[0]
    if code not in ALLOWED:
        return f"exit code {code}"
    lines = [line for line in said.splitlines() if line.strip()]
    if is_line and code == REFUSED and said.startswith("usage: "):
        return ""
    if is_line and code == REFUSED and (len(lines) != 1 or not lines[0].startswith("fedtangent: error: ")):
        return f"a refusal of {len(lines)} lines: {said[:300]!r}"
    return ""


def strays(work: Path, home: Path, code: int) -> str:
    """Files where none should be: anywhere after a refusal, in the home but for its cache."""
    kept = [path for path in (*work.rglob("*"), *home.rglob("*")) if not path.is_dir() or code == REFUSED]
    cache = home / ".cache" / "fedtangent"
    bad = [path for path in kept if home in path.parents and path != cache and cache not in path.parents]
    bad = [path for path in bad if path not in cache.parents]
    bad += [path for path in kept if code == REFUSED and work in path.parents]
    return f"left {', '.join(str(path.relative_to(work.parent)) for path in bad[:3])}" if bad else ""


def _behave(case: Case, folder: Path) -> typing.NoReturn:
    """The forked process: limits, a home and a folder of its own, and what it says into files."""
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o644), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ |= {"HOME": str(folder / "home"), "TMPDIR": str(folder), "COLUMNS": "100"}
        os.environ["MPLCONFIGDIR"] = str(folder)
        for name in ("FEDTANGENT_CACHE", "FEDTANGENT_DATA", "XDG_CACHE_HOME"):
            os.environ.pop(name, None)
        os.chdir(folder / "work")
        code = case.run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)
