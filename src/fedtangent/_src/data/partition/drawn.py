"""Helpers of the partitions that are drawn: the seed's generator, the checks, and the options of the clients.

Randomness comes from ``numpy.random.Generator(PCG64(seed))`` alone, so that a seed gives the same partition on every
platform.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from fedtangent._src import checks
from fedtangent._src.data.dataset import Dataset
from fedtangent._src.types import Partition

ALPHA = {"at_least": 1e-9, "at_most": 1e9}  # of a Dirichlet distribution: outside, gamma variates underflow or overflow


@dataclasses.dataclass(frozen=True)
class ClientsOptions:
    """Options of partitions into any number of clients."""

    num_clients: int = 20
    """Clients N."""


@dataclasses.dataclass(frozen=True)
class SkewOptions(ClientsOptions):
    """Options of shares that are drawn from a Dirichlet distribution."""

    alpha: float = 0.5
    """Dirichlet concentration: smaller is more heterogeneous."""
    min_client_size: int = 1
    """Fewest examples of a client."""


def generator(seed: int) -> np.random.Generator:
    """Creates the random generator of ``seed``, from 0 to 2^32 - 1; raises ``ValueError`` for other seeds."""
    return np.random.Generator(np.random.PCG64(checks.seed(seed)))


def checked_clients(num_clients: int, num_examples: int) -> int:
    """Returns ``num_clients``; raises ``ValueError`` unless it is from 1 to the number of examples."""
    checks.whole("num_examples", num_examples)
    return checks.whole("num_clients", num_clients, 1, num_examples)


def assemble(parts: Sequence[Int[np.ndarray, "_"]]) -> Partition:
    """Builds the partition from each client's indices, which it sorts."""
    sizes = [len(p) for p in parts]
    indices = np.concatenate([np.sort(p) for p in parts]).astype(np.int32)
    return Partition(indices, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))


def apportion(total: int, shares: Float[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """Divides ``total`` into integers in proportion to ``shares`` (which sum to 1), by largest remainder."""
    exact = total * shares
    whole = np.floor(exact).astype(np.int64)
    rest = total - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:rest]] += 1
    return whole


def labels_of(dataset: Dataset) -> Int[np.ndarray, "n"]:
    """Returns the training labels [n]; raises ``ValueError`` for a data set without classes."""
    if dataset.num_classes == 0:
        raise ValueError(f"partition: got one by class labels, must be another: the data set {dataset.name} has none")
    return dataset.y_train
