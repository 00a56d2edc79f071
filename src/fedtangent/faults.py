"""Faults: clients that drop out or answer late, and checks by which the server rejects messages."""

from fedtangent._src.federated.faults import delay_probabilities, dropout, finite, round_times, stragglers

__all__ = [
    "delay_probabilities",
    "dropout",
    "finite",
    "round_times",
    "stragglers",
]
