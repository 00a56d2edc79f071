"""The parts of federated algorithms, and the algorithms made of them."""

from fedtangent.federated import (
    aggregate,
    algorithms,
    compose,
    distil,
    faults,
    graph,
    local,
    masks,
    personal,
    predict,
    rates,
    schedule,
    server,
    wire,
)

__all__ = [
    "aggregate",
    "algorithms",
    "compose",
    "distil",
    "faults",
    "graph",
    "local",
    "masks",
    "personal",
    "predict",
    "rates",
    "schedule",
    "server",
    "wire",
]
