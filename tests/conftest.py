"""Settings of the whole test suite: float64, exact products, strict shapes, quick compilation, repeatable draws."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

# Before jax is imported, and as variables of the environment, so that every process that a test starts has them too.
# Each computes on one thread, so that parallel processes do not fight for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("NPROC", "1")  # the size of XLA's own thread pool on a CPU
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# Most of the suite's time is compilation, of programs that run once. It takes half the time without the compiler's own
# optimisations and, where it can still be asked for, with its older emitter of fused loops; make check-theory asks for
# what users have. A program in one part takes a quarter less time than in the parts that threads would share.
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    quick = "--xla_backend_optimization_level=0"
    if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # an unknown flag ends the process
        quick += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}".strip()

os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.01")
if "FEDTANGENT_CACHE" not in os.environ:  # no kernel of an earlier run; the workers of this run share it
    os.environ["FEDTANGENT_CACHE"] = tempfile.mkdtemp(prefix="fedtangent-cache-")
    atexit.register(shutil.rmtree, os.environ["FEDTANGENT_CACHE"], ignore_errors=True)

import hypothesis
import jax
import pytest

if __package__:  # not in a process that a test starts
    from . import contracts

    contracts.install("fedtangent")  # before any of its modules is imported

# Compiled programs are shared by all processes of a run and kept for the next one.
from fedtangent._src import programs

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "fedtangent"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs.folder_of_machine(cache / "tests"))
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# Tracing makes many objects that live on: looking through them all for garbage again and again would cost a tenth.
gc.freeze()
gc.set_threshold(100_000, 20, 50)

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")

PROGRAMS_BYTES = 2 * 2**30
MOST_MAPS = 45_000
MOST_BYTES, MORE_BYTES = 2500 * 2**20, 500 * 2**20
_TESTED = pytest.StashKey[dict[str, int]]()


def pytest_configure(config: pytest.Config) -> None:
    """Bound the kept programs, once a run: in the process that has no controller above it."""
    folder = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    if folder.parts[-3:-1] == ("fedtangent", "tests") and not hasattr(config, "workerinput"):
        programs.tidy(folder, PROGRAMS_BYTES)


def _memory_maps() -> int:
    """Memory mappings of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _forget_programs() -> None:
    """Forget compiled programs, and give their memory back to the system where it can be asked to take it."""
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def _few_compiled_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget compiled programs before the process has too much memory, or runs out of memory mappings.

    Linux allows 65530 of them to a process, and each program takes about ten; XLA aborts when it gets no more. They
    are read again from the folder of compiled programs.
    """
    yield
    state = request.session.config.stash.setdefault(_TESTED, {"tests": 0, "most": MOST_BYTES})
    state["tests"] += 1
    if _resident_bytes() > state["most"] or (state["tests"] % 10 == 0 and _memory_maps() > MOST_MAPS):
        _forget_programs()
        state["most"] = max(MOST_BYTES, _resident_bytes() + MORE_BYTES)  # what stays is not programs
