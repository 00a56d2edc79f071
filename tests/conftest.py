"""Settings of the whole test suite: float64, exact products, strict shapes, few threads, repeatable random tests."""

from __future__ import annotations

import os
from pathlib import Path

# Before jax is imported: each test process computes on one thread, so that parallel processes do not fight for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("NPROC", "1")  # the size of XLA's own thread pool on a CPU
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")

DATA = "FEDTANGENT_DATA"


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


@pytest.fixture
def data_dir() -> Path:
    """The folder of real data named by FEDTANGENT_DATA."""
    folder = _data_folder()
    assert folder is not None, f"{DATA} is not set"
    return folder
