"""Results of short timing measurements, kept in memory and in a small file, so that each machine measures once.

The file is ``calibration.json`` in the folder of ``cache_directory()``. It can be removed at any time.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Collection, Mapping

import jax
import jaxlib

from fedtangent._src.programs import usable_cores
from fedtangent._src.storage import cache_directory, write_atomically

FILE = "calibration.json"
_memory: dict[str, dict[str, float]] = {}


def machine() -> dict[str, object]:
    """Returns the platform, devices, cores and versions of JAX, which identify this machine in stored timings."""
    devices = jax.local_devices()
    return {
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": jax.device_count(),
        "cores": usable_cores(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }


def stored() -> dict[str, object]:
    """Reads all stored timings; the keys are JSON texts of measurement and machine. {} if the file cannot be read."""
    path, content = cache_directory() / FILE, None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_bytes()) if path.is_file() else None
    return content if isinstance(content, dict) else {}


def cached(
    question: Mapping[str, object], measure: Callable[[], dict[str, float]], names: Collection[str]
) -> dict[str, float]:
    """Returns the seconds that ``measure`` found on this machine; calls it only if no earlier result is stored.

    Results are in memory and in the file. A result with other names than ``names`` is measured again. If the cache
    folder cannot be written, new results stay in memory.

    Args:
        question: Description of the measurement, as valid JSON, by which the result is stored.
        measure: Function that returns seconds, above 0, for each of ``names``.
        names: Names of the seconds in the result.
    """
    key = json.dumps({"question": question, "machine": machine()}, sort_keys=True)
    if key not in _memory:
        answer = stored().get(key)
        if isinstance(answer, dict) and answer.keys() == set(names) and all(map(_is_seconds, answer.values())):
            _memory[key] = answer
        else:
            _memory[key] = measure()
            _store(key, _memory[key])
    return _memory[key]


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _store(key: str, answer: dict[str, float]) -> None:
    folder = cache_directory()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / FILE, json.dumps({**stored(), key: answer}, indent=1, sort_keys=True))
