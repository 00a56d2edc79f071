"""Graphs that connect clients, for algorithms in which models walk from client to client or neighbours average."""

from fedtangent._src.federated.graph import (
    Graph,
    complete,
    erdos_renyi,
    from_adjacency,
    metropolis_hastings,
    metropolis_weights,
    ring,
    spectral_gap,
    torus,
)

__all__ = [
    "Graph",
    "complete",
    "erdos_renyi",
    "from_adjacency",
    "metropolis_hastings",
    "metropolis_weights",
    "ring",
    "spectral_gap",
    "torus",
]
