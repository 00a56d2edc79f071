"""Devices and processes of a run: cores as devices, several machines, and a prediction of the memory it needs."""

from fedtangent._src.engine.processes import is_main, start, use_cores
from fedtangent._src.engine.run import resolve_mapping

__all__ = [
    "is_main",
    "resolve_mapping",
    "start",
    "use_cores",
]
