"""Settings of the whole test suite: float64, exact products, strict shapes, quick compilation, repeatable draws."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before jax is imported: each test process computes on one thread, so that parallel processes do not fight for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("NPROC", "1")  # the size of XLA's own thread pool on a CPU
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# Most of the suite's time is compilation, of programs that run once: 0.7 of the time without the compiler's own
# optimisations. make check-theory asks for all of them.
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()

import hypothesis
import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# Many tests compile the same program again: a cache for this process alone, empty at its start and removed at its end.
_PROGRAMS = tempfile.mkdtemp(prefix="fedtangent-tests-")
atexit.register(shutil.rmtree, _PROGRAMS, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", _PROGRAMS)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")

DATA = "FEDTANGENT_DATA"
MOST_MAPS = 25_000
_TESTED = pytest.StashKey[list[int]]()


def _data_folder() -> Path | None:
    """The folder of real data that the environment names, or None; a name that is no folder ends the run."""
    name = os.environ.get(DATA)
    if not name:
        return None
    if not Path(name).is_dir():
        raise pytest.UsageError(f"{DATA} is {name!r}, which is not a folder; unset it or name a folder with data")
    return Path(name).resolve()


def pytest_report_header(config: pytest.Config) -> str:
    """Say whether the tests on real data run."""
    return f"real data: {_data_folder() or f'none, tests that read it are deselected; name its folder with {DATA}'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, and count as deselected, the tests that need real data where there is none."""
    if _data_folder() is not None:
        return
    needy = [item for item in items if "data_dir" in getattr(item, "fixturenames", ())]
    if needy:
        config.hook.pytest_deselected(items=needy)
        items[:] = [item for item in items if item not in needy]


def _memory_maps() -> int:
    """Memory mappings of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


@pytest.fixture(autouse=True)
def _few_compiled_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget compiled programs before the process runs out of memory mappings, of which each takes about ten.

    Linux allows 65530 of them to a process; XLA aborts when it gets no more.
    """
    yield
    tested = request.session.config.stash.setdefault(_TESTED, [0])
    tested[0] += 1
    if tested[0] % 10 == 0 and _memory_maps() > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def data_dir() -> Path:
    """The folder of real data named by FEDTANGENT_DATA."""
    folder = _data_folder()
    assert folder is not None, f"{DATA} is not set"
    return folder
