"""Graphs between clients, for random walks and gossip."""

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
