"""Faults: clients that drop out or come late, and messages that the server does not count."""

from fedtangent._src.federated.faults import delay_probabilities, dropout, finite, round_times, stragglers

__all__ = [
    "delay_probabilities",
    "dropout",
    "finite",
    "round_times",
    "stragglers",
]
