"""Devices of a run: cores of this machine, several machines, and the memory that a run needs."""

from fedtangent._src.engine.processes import is_main, start, use_cores
from fedtangent._src.engine.run import resolve_mapping

__all__ = [
    "is_main",
    "resolve_mapping",
    "start",
    "use_cores",
]
