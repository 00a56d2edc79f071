"""Several processes and machines, and all cores of this one, as devices of one run."""

from fedtangent._src.engine.processes import is_main, start, use_cores

__all__ = [
    "is_main",
    "start",
    "use_cores",
]
