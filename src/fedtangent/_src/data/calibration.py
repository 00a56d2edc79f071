"""Results of short timing measurements, kept in memory and in a small file, so that a machine makes each once.

The file is ``calibration.json`` in the cache folder ($FEDTANGENT_CACHE, or the user's). It can be removed at any time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import jaxlib

from fedtangent._src.data import files
from fedtangent._src.data.cache import cache_directory

FILE = "calibration.json"
_memory: dict[str, dict[str, float]] = {}


def machine() -> dict[str, Any]:
    """Returns the part of a stored key that identifies the machine: platform, devices, cores, versions of JAX."""
    devices = jax.local_devices()
    return {
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": jax.device_count(),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }


def stored() -> dict[str, Any]:
    """Reads every stored answer by its key (JSON text of question and machine); {} if the file is unreadable."""
    path = cache_directory() / FILE
    try:
        content = files.json_of("calibration", path)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def cached(
    question: dict[str, Any], measure: Callable[[], dict[str, float]], names: Collection[str]
) -> dict[str, float]:
    """Returns the answer to ``question`` on this machine: from memory, from the file, or by calling ``measure``.

    A stored answer of another form is measured again. If the cache folder cannot be written, the answer stays in
    memory.

    Args:
        question: Description of the measurement, as valid JSON.
        measure: Function that returns seconds, above 0, for each of ``names``.
        names: Keys of the answer.
    """
    key = json.dumps({"question": question, "machine": machine()}, sort_keys=True)
    if key not in _memory:
        found = stored().get(key)
        if isinstance(found, dict) and found.keys() == set(names) and all(map(_is_seconds, found.values())):
            _memory[key] = found
        else:
            _memory[key] = measure()
            _store(key, _memory[key])
    return _memory[key]


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def forget() -> None:
    """Removes every answer from memory and from the file."""
    _memory.clear()
    (cache_directory() / FILE).unlink(missing_ok=True)


def _store(key: str, answer: dict[str, float]) -> None:
    folder = cache_directory()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**stored(), key: answer}, indent=1, sort_keys=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=f".{FILE}.", delete=False) as file:
            file.write(text)
        Path(file.name).replace(folder / FILE)
