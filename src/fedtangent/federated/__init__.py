"""The parts of federated algorithms, and the recipes made of them."""

from fedtangent.federated import (
    aggregate,
    channel,
    compose,
    distil,
    faults,
    graph,
    local,
    masks,
    personal,
    predict,
    rates,
    recipes,
    schedule,
    server,
    walks,
)

__all__ = [
    "aggregate",
    "channel",
    "compose",
    "distil",
    "faults",
    "graph",
    "local",
    "masks",
    "personal",
    "predict",
    "rates",
    "recipes",
    "schedule",
    "server",
    "walks",
]
