"""The clients of a partition in plain Python."""

from __future__ import annotations

from fedtangent._src.types import Partition


def lists(p: Partition) -> list[list[int]]:
    """The examples of each client."""
    return [p.client(i).tolist() for i in range(p.num_clients)]
