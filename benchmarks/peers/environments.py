"""The peers' virtual environments: made on first use from the exact versions in requirements-<tool>.txt."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = ("flower", "pfl")
INHERITED = ("XLA_FLAGS", "NPROC", "PYTHONPATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def _fingerprint(requirements: Path) -> str:
    return hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()


def python_of(tool: str, folder: Path) -> Path:
    """The interpreter of ``tool``'s environment under ``folder``, which is made if it is missing or of other versions.

    Raises ``RuntimeError`` with pip's last line if the packages cannot be installed.
    """
    if tool not in PEERS:
        return Path(sys.executable)
    requirements, place = HERE / f"requirements-{tool}.txt", folder / tool
    python, stamp = place / "bin" / "python", place / ".installed"
    wanted = _fingerprint(requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {tool} into {place}", file=sys.stderr, flush=True)
    stamp.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run([*pip, "-r", str(requirements)], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise RuntimeError(f"{tool}: its packages cannot be installed: {last}")
    stamp.write_text(wanted)
    return python


def variables(tool: str, threads: int, workers: int, scratch: Path) -> dict[str, str]:
    """Environment of a measurement: the CPU only, ``threads`` threads, nobody's statistics collected."""
    found = {key: value for key, value in os.environ.items() if key not in INHERITED}
    found |= {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if tool == "fedtangent":
        found |= {"JAX_PLATFORMS": "cpu", "NPROC": str(threads)}  # NPROC: the size of XLA's thread pool
        if workers > 1:
            found["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={workers}"
    if tool == "flower":
        found |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(scratch / "flower"), "RAY_USAGE_STATS_ENABLED": "0"}
    if tool == "pfl":
        found["PFL_PYTORCH_DEVICE"] = "cpu"
    return found
