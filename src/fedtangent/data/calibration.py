"""Answers of short measurements, kept in memory and in one small file, so that each is made once on a machine.

The file is ``calibration.json`` in the cache folder ($FEDTANGENT_CACHE, or the user's). It can be removed at any time.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib

from fedtangent.data.cache import cache_directory

FILE = "calibration.json"
_memory: dict[str, dict[str, Any]] = {}


def machine() -> dict[str, Any]:
    """What an answer depends on besides its question: platform, kind and number of devices, cores, versions."""
    devices = jax.local_devices()
    return {
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": jax.device_count(),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }


def stored() -> dict[str, dict[str, Any]]:
    """Every answer on file: question (JSON) to answer. An unreadable file holds none."""
    try:
        content = json.loads((cache_directory() / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def cached(question: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer to ``question`` on this machine: from memory, from the file, or by calling ``measure``.

    ``question`` and the answer hold what JSON can hold. Where the cache folder cannot be written the answer is kept in
    memory only.
    """
    key = json.dumps({"question": question, "machine": machine()}, sort_keys=True)
    if key not in _memory:
        found = stored().get(key)
        _memory[key] = measure() if found is None else found
        if found is None:
            _store(key, _memory[key])
    return _memory[key]


def forget() -> None:
    """Forget every answer, in memory and on file."""
    _memory.clear()
    (cache_directory() / FILE).unlink(missing_ok=True)


def _store(key: str, answer: dict[str, Any]) -> None:
    folder = cache_directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**stored(), key: answer}, indent=1, sort_keys=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=f".{FILE}.", delete=False) as file:
            file.write(text)
        Path(file.name).replace(folder / FILE)
    except OSError:
        return
