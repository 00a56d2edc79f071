"""The parts of federated algorithms, and the algorithms made of them."""

from fedtangent._src.federated import (
    aggregate,
    algorithms,
    compose,
    faults,
    graph,
    local,
    predict,
    schedule,
    server,
    wire,
)

schedules = schedule  # as the package names it

__all__ = [
    "aggregate",
    "algorithms",
    "compose",
    "faults",
    "graph",
    "local",
    "predict",
    "schedule",
    "schedules",
    "server",
    "wire",
]
