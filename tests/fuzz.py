"""Random command lines and calls, drawn from what the entries offer: each ends well, or is refused in one line.

``python tests/fuzz.py`` draws command lines from the commands' own options and calls from the public functions' own
parameters: edges, wrong types, huge numbers, NaN, other alphabets, files of every kind. Each runs in a forked process
with a folder, a home and limits of its own. Printed, and counted as failures, are tracebacks, warnings, hangs, ends by
a signal, exit codes other than 0, 1, 2 and 128 + signal, refusals of more than a line or that wrote something, and
files outside of the output folder. What is still at work after ``SECONDS`` is interrupted, and must then end as a user
expects of Ctrl-C.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import inspect
import multiprocessing
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
import typing
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import conftest  # noqa: F401  quick compilation, as in the tests

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import fedtangent
from fedtangent import entries
from fedtangent.cli import main
from fedtangent.cli.arguments import Option
from fedtangent.engine import description

SECONDS, GRACE = 20.0, 120.0  # until a case is interrupted, and until it then is a hang
BYTES = 12 * 2**30  # of address space for numbers, a case's
REFUSED, INTERRUPTED = 2, 130
ALLOWED = (0, 1, REFUSED, INTERRUPTED, 128 + signal.SIGPIPE, 128 + signal.SIGTERM)

WHOLE = ("0", "1", "2", "3", "-1", "7", "100", "2147483647", "2147483648", "1" + 30 * "0", "1.5", "nan")
REAL = ("0", "-0.0", "0.1", "0.5", "1", "2", "1e-320", "1e308", "-1", "inf", "-inf", "nan", "1e400")
WORDS = (
    "",
    " ",
    "x",
    "None",
    "1_0",
    "0x10",
    "१२",
    "naïve",
    "🦆",
    "a b",
    "--",
    "-",
    "../x",
    "%s",
    "{}",
    "qsgd:8",
    "qsgd:inf",
)
SMALL = {  # of a run that is to end soon
    "num_rounds": "2", "num_train": "80", "num_test": "20", "num_clients": "4", "clients_per_round": "2", "widths": "6",
    "width": "4", "depth": "1", "channels": "2", "scale": "smoke",
}  # fmt: skip


class Case(NamedTuple):
    """What is tried: its name, and what to run in the forked process."""

    name: str
    run: Callable[[], int]
    is_line: bool = True


# ---- files of every kind ------------------------------------------------------------------------------------------


def write_inputs(folder: Path) -> None:
    """Files that someone may name: one that is right, and what goes wrong with files."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)).astype(np.float32), rng.integers(0, 3, 60)
    np.savez_compressed(folder / "right.npz", x=x, y=y, users=np.arange(60) % 4, x_test=x[:9], y_test=y[:9])
    np.savez(folder / "short.npz", x=x, y=y[:-1])
    np.savez(folder / "nan.npz", x=np.where(x > 2, np.nan, x), y=y)
    np.savez(folder / "objects.npz", x=np.array([{}, []], object), y=y[:2])
    np.save(folder / "array.npy", x)
    shutil.copy(folder / "array.npy", folder / "array.npz")
    right = bytearray((folder / "right.npz").read_bytes())
    (folder / "half.npz").write_bytes(right[: len(right) // 2])
    right[len(right) // 3] ^= 0x40
    (folder / "flipped.npz").write_bytes(right)
    (folder / "empty.npz").touch()
    (folder / "text.npz").write_text("x,y\n1,2\n")
    with zipfile.ZipFile(folder / "members.npz", "w") as packed:
        packed.writestr("x.npy", "no array")
    os.mkfifo(folder / "pipe.npz")
    (folder / "folder.npz").mkdir()
    (folder / "config.json").write_text('{"command": "train", "options": {"algorithm": "fed_avg", "num_rounds": "?"}}')
    (folder / "list.json").write_text("[]")


# ---- command lines ------------------------------------------------------------------------------------------------


def texts(one: Option, files: list[str]) -> st.SearchStrategy[str]:
    """A value of an option as it is written, more often than not of its kind."""
    kinds = {*typing.get_args(one.type), one.type}
    own: tuple[str, ...] = WORDS
    if one.name in description.CHOICES:
        own = tuple(entries.catalogue(description.CHOICES[one.name]))
        own += tuple(files) if one.name == "dataset" else ()
    elif int in kinds:
        own = WHOLE
    elif float in kinds:
        own = REAL
    elif Path in kinds:
        own = (*files, "new", "new/folder", "/dev/null", "/proc/none", "~nobody/x")
    elif isinstance(one.default, str) and one.default:
        own = (one.default,) * 3 + WORDS
    return st.one_of(*3 * [st.sampled_from(own)], st.sampled_from(WORDS + WHOLE + REAL), st.text(max_size=6))


@st.composite
def command_lines(draw: Any, files: list[str]) -> list[str]:
    """A command and some of its options, small where nothing else is drawn."""
    rarely = st.integers(0, 19).map(lambda n: n == 0)
    name = draw(st.sampled_from(["train"] * 8 + ["predict"] * 4 + ["compare"] * 3 + main.names()))
    if draw(rarely):
        return draw(st.lists(st.sampled_from([name, *WORDS, "--help", "--version", "--seed"]), max_size=4))
    chosen = {}
    for what, kind in description.CHOICES.items():
        if what != "base" and draw(st.integers(0, 3)) == 0:
            chosen[what] = draw(st.sampled_from(tuple(entries.catalogue(kind))))
    if name == "compare" and draw(st.integers(0, 9)):
        chosen.setdefault("algorithm", "fed_avg")
    command = main.find(name, *(f"--{what}" for what in chosen))
    if not command.describes:
        chosen = {}
    try:
        options = main.options_by_name(main.groups_of(command, chosen))
    except ValueError:
        options = main.options_by_name(main.groups_of(command, {}))
    found = dict.fromkeys(option for option in SMALL if option in options)
    given_ = {f"--{option}": [SMALL[option]] for option in found} | {f"--{what}": [v] for what, v in chosen.items()}
    positional: list[str] = []
    for one in draw(st.lists(st.sampled_from(list(options.values())), max_size=4, unique_by=lambda one: one.name)):
        values = draw(st.lists(texts(one, files), min_size=1, max_size=3 if one.several else 1))
        if one.positional:
            positional += values
        elif one.type is bool:
            given_[draw(st.sampled_from([f"--{one.name}", f"--no-{one.name}"]))] = []
        else:
            given_[f"--{one.name}"] = values
    if any(one.positional for one in options.values()) and not positional and not draw(rarely):
        kind = next(one.name for one in options.values() if one.positional)
        positional = [draw(st.sampled_from(_positional(kind, files)))]
    words = [word for option, values in given_.items() for word in (option.replace("_", "-"), *values)]
    return [name, *positional, *words]


def _positional(kind: str, files: list[str]) -> tuple[str, ...]:
    known = {"experiment": "experiments", "id": "experiments", "name": "datasets"}
    return tuple(entries.catalogue(known[kind])) if kind in known else (*entries.KINDS, *files)


# ---- calls ----------------------------------------------------------------------------------------------------------


def pool() -> dict[str, Any]:
    """A value that is right for each name of a parameter; what has a parameter of another name is not called."""
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(24, 5)), rng.integers(0, 3, 24)
    model = fedtangent.models.mlp(5, 3, (6,))
    clients = fedtangent.partition.iid(24, 4, 0)
    data = fedtangent.data.federated_data(x, labels, clients)
    gram = x @ x.T + np.eye(24)
    kernels = fedtangent.kernels.gram.KernelBlocks(gram, gram[:4], gram, gram[:4], gram[:4, :4])
    schedule = fedtangent.federated.schedule.uniform_sampling(4, 2)
    work = fedtangent.federated.local.Work(steps=2, batch_size=4)
    algorithm = fedtangent.federated.algorithms.fed_avg(model, schedule, client_learning_rate=0.1, work=work)
    cohorts = fedtangent.types.Cohort(*(np.zeros((2, 1), kind) for kind in (int, int, float)))
    return {
        "model": model,
        "schedule": schedule,
        "work": work,
        "algorithm": algorithm,
        "data": data,
        "x": x,
        "y": labels,
        "client_learning_rate": 0.1,
        "learning_rate": 0.1,
        "num_clients": 4,
        "seed": 0,
        "labels": labels,
        "partition": clients,
        "num_rounds": 2,
        "members": rng.normal(size=(2, 24, 3)),
        "targets": labels,
        "loss": "cross_entropy",
        "output_size": 3,
        "input_size": 5,
        "num_models": 2,
        "bits": 8,
        "kernels": kernels,
        "mu": 0.1,
        "y_train": rng.normal(size=(24, 2)),
        "theta": gram,
        "matrix": gram,
        "values": x[:, 0],
        "sparsity": 0.5,
        "num_nodes": 4,
        "rate": 0.1,
        "num_examples": 24,
        "rule": fedtangent.theory.Rule(2, 0.1),
        "gamma": 1.0,
        "local_steps": 2,
        "num_classes": 3,
        "dimension": 2,
        "noise_multiplier": 1.0,
        "clip_norm": 1.0,
        "alpha": 0.5,
        "probability": 0.2,
        "text": "ring",
        "rows": 2,
        "cols": 2,
        "initial": 0.1,
        "clients_per_round": 2,
        "x1": x,
        "x_train": x,
        "x_test": x[:4],
        "kernel_fn": model.kernel,
        "input_shape": (5,),
        "lambda_min": 0.5,
        "width": 8,
        "name": "digits",
        "cohorts": cohorts,
        "seeds": (0, 1),
        "losses": x[0] ** 2,
        "predictions": x,
        "epochs": 1,
        "users": np.arange(24) % 4,
        "num_shards": 2,
        "shards_per_client": 2,
        "classes_per_client": 2,
        "beta": 0.5,
        "delta": 1e-5,
        "sizes": (5,),
        "level": 0.9,
        "params": None,
        "keep": 1,
        "graph": fedtangent.federated.graph.ring(4),
        "norm": 1.0,
        "k": 1,
    }


ODD = (
    *(None, "", "x", True, 0, 1, 2, 3, -1, 7, 2**31, 2**63, 10**30, 0.0, -0.0, 0.5, 1.5, 1e308, 1e-308, 5e-324, -1.0),
    *(float("nan"), float("inf"), -float("inf"), 1j, (), [], {}, object(), "3", b"x", (1, 2), [[1], [1, 2]]),
)
ARRAYS: dict[str, Callable[[np.ndarray], Any]] = {
    "empty": lambda a: a[:0],
    "a row less": lambda a: a[:-1],
    "one": lambda a: a[:1],
    "flat": np.ravel,
    "another axis": lambda a: a[None],
    "complex": lambda a: a + 1j,
    "text": lambda a: a.astype(str),
    "minus": lambda a: -a,
    "bool": lambda a: a > 0,
    "zero": np.zeros_like,
    "nan": lambda a: np.where(a == a.flat[-1], np.nan, a),
    "huge": lambda a: a * 1e300,
    "large": lambda a: a.astype(np.int64) + 2**32,
    "tiny": lambda a: a * 1e-300,
    "objects": lambda a: a.astype(object),
    "half": lambda a: a.astype(np.float16),
    "list": np.ndarray.tolist,
    "scalar": lambda a: a.ravel()[0],
    "transposed": lambda a: a.T,
}


def functions() -> dict[str, tuple[Callable[..., Any], list[str]]]:
    """The public functions whose needed parameters are all in the pool, with the names of those."""
    known, found, seen = set(pool()), dict[str, tuple[Callable[..., Any], list[str]]](), set()
    rooms, done = [("fedtangent", fedtangent)], set()
    while rooms:
        path, room = rooms.pop()
        for name in sorted(set(dir(room))):
            value = getattr(room, name)
            if inspect.ismodule(value) and value.__name__.startswith("fedtangent") and value not in done:
                done.add(value)
                rooms.append((f"{path}.{name}", value))
            elif inspect.isfunction(value) and value.__module__.startswith("fedtangent") and value not in seen:
                seen.add(value)
                parameters = inspect.signature(value).parameters.values()
                named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
                if named and all(p.name in known or p.default is not p.empty for p in named):
                    found[f"{path}.{name}"] = value, [p.name for p in named if p.default is p.empty or p.name in known]
    return found


@st.composite
def calls(draw: Any, of: dict[str, tuple[Callable[..., Any], list[str]]]) -> tuple[str, list[tuple[str, Any]]]:
    """A function's name, and one or two of its parameters with what they are given, a value or an array's change."""
    name = draw(st.sampled_from(sorted(of)))
    names = draw(st.lists(st.sampled_from(of[name][1]), min_size=1, max_size=2, unique=True))
    return name, [(one, draw(st.sampled_from([*ARRAYS, *range(len(ODD))]))) for one in names]


def _call(name: str, changes: list[tuple[str, Any]]) -> int:
    function, names = functions()[name]
    right = pool()
    given_ = {one: right[one] for one in names if one in inspect.signature(function).parameters}
    for one, change in changes:
        if isinstance(change, int):
            given_[one] = ODD[change]
        elif isinstance(right[one], np.ndarray):
            with contextlib.suppress(ValueError, TypeError, IndexError):  # no such change of this array
                given_[one] = ARRAYS[change](right[one])
    try:
        function(**given_)
    except ValueError as error:
        print("refused:", error)
    return 0


# ---- one case in a process of its own -----------------------------------------------------------------------------


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
        warnings.simplefilter("default")
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


def _line(words: list[str]) -> int:
    main.main(words)
    return 0


# ---- all of them --------------------------------------------------------------------------------------------------


def drawn(strategy: st.SearchStrategy[Any], number: int, start: int) -> Iterator[Any]:
    """``number`` draws of a strategy, the same for the same ``start``."""
    found: list[Any] = []

    @seed(start)
    @settings(
        max_examples=number, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return iter(found)


def lines(number: int, start: int, inputs: Path) -> list[Case]:
    """Cases of so many command lines."""
    files = sorted(str(path) for path in inputs.iterdir())
    words = drawn(command_lines(files), number, start)
    return [Case(shlex.join(line), lambda line=line: _line(line)) for line in words if not _has_null(line)]


def some_calls(number: int, start: int) -> list[Case]:
    """Cases of so many calls."""
    found = drawn(calls(functions()), number, start)
    return [
        Case(
            f"{name}({', '.join(f'{n}={_shown(c)}' for n, c in changes)})",
            functools.partial(_call, name, changes),
            False,
        )
        for name, changes in found
    ]


def _shown(change: Any) -> str:
    return f"<{change}>" if isinstance(change, str) else repr(ODD[change])


def _has_null(line: list[str]) -> bool:  # which no command line can have
    return any("\0" in word or any(0xD800 <= ord(c) <= 0xDFFF for c in word) for word in line)


def _try(at: int) -> tuple[int, str, float]:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz", ignore_cleanup_errors=True) as folder:
        return at, tried(CASES[at], Path(folder)), time.monotonic() - begun


CASES: list[Case] = []


def run(cases: list[Case], processes: int) -> collections.Counter[str]:
    """Try all cases; prints each failure with what repeats it. Returns how many ended how."""
    CASES[:] = cases
    found, begun = collections.Counter[str](), time.monotonic()
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for done, (at, wrong, _) in enumerate(pool.imap_unordered(_try, range(len(cases))), start=1):
            found[wrong.partition(":")[0] or "well"] += 1
            if wrong:
                print(f"{wrong}\n    {cases[at].name}", flush=True)
            if done % 100 == 0:
                print(f"{done} of {len(cases)} in {time.monotonic() - begun:.0f} s: {dict(found)}", flush=True)
    return found


def main_() -> int:
    """Fuzz as the command line says; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=int, default=3000, help="command lines to try (default: 3000)")
    parser.add_argument("--calls", type=int, default=1000, help="calls to try (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--processes", type=int, default=2, help="side by side (default: 2)")
    given_ = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-inputs") as folder:
        write_inputs(Path(folder))
        cases = lines(given_.lines, given_.seed, Path(folder)) if given_.lines else []
        cases += some_calls(given_.calls, given_.seed) if given_.calls else []
        found = run(cases, given_.processes)
    print(f"{sum(found.values())} cases: {dict(found)}")
    return int(set(found) != {"well"})


if __name__ == "__main__":
    sys.exit(main_())
