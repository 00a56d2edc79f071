"""Partitions and schedules by name, as ``train`` builds them from its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedtangent.cli.options import TrainOptions
from fedtangent.cli.parse import parse_graph
from fedtangent.data import Dataset, partition
from fedtangent.federated import faults, schedule
from fedtangent.types import Partition, Schedule


class PartitionEntry(NamedTuple):
    """A partitioner: what it is and how to build it."""

    description: str
    build: Callable[[TrainOptions, Dataset], Partition]


class ScheduleEntry(NamedTuple):
    """A schedule: what it is and how to build it over N clients."""

    description: str
    build: Callable[[TrainOptions, int], Schedule]


def choose(what: str, name: str, entries: dict[str, NamedTuple]) -> NamedTuple:
    """The entry called ``name``; raises ``ValueError`` with the allowed names."""
    if name not in entries:
        raise ValueError(f"{what}: got {name!r}, allowed are {', '.join(entries)}")
    return entries[name]


def faulty(
    plan: Schedule, sizes: np.ndarray, dropout: float, keep_first: int | None, completion_time: str, spread: float
) -> Schedule:
    """``plan`` whose clients drop out, and of which the first ``keep_first`` to answer make the round.

    A client's expected completion time is in proportion to its examples, ``sizes`` [N]. Raises ``ValueError``.
    """
    if dropout != 0:
        plan = faults.dropout(plan, dropout)
    if keep_first is None:
        return plan
    return faults.stragglers(plan, keep_first, np.maximum(sizes, 1) / max(np.mean(sizes), 1), completion_time, spread)


def _labels(o: TrainOptions, d: Dataset) -> np.ndarray:
    if d.num_classes == 0:
        raise ValueError(f"partition: {o.partition!r} needs class labels, but the data set {d.name} has none")
    return d.y_train


def _by_user(o: TrainOptions, d: Dataset) -> Partition:
    if d.user_train is None:
        raise ValueError(f"partition: 'by_user' needs users, but the data set {d.name} has none")
    return partition.by_user(d.user_train)


PARTITIONS: dict[str, PartitionEntry] = {
    "iid": PartitionEntry(
        "examples dealt at random", lambda o, d: partition.iid(len(d.x_train), o.num_clients, o.seed)
    ),
    "shards": PartitionEntry(
        "sorted by label, --shards-per-client shards each",
        lambda o, d: partition.shards(_labels(o, d), o.num_clients, o.shards_per_client, o.seed),
    ),
    "classes": PartitionEntry(
        "exactly --classes-per-client classes a client",
        lambda o, d: partition.classes(_labels(o, d), o.num_clients, o.classes_per_client, o.seed),
    ),
    "dirichlet": PartitionEntry(
        "label shares from Dirichlet(--alpha)",
        lambda o, d: partition.dirichlet(_labels(o, d), o.num_clients, o.alpha, o.seed, o.min_client_size),
    ),
    "by_user": PartitionEntry("one client for each natural user (sine)", _by_user),
    "quantity_skew": PartitionEntry(
        "random examples, sizes from Dirichlet(--alpha)",
        lambda o, d: partition.quantity_skew(len(d.x_train), o.num_clients, o.alpha, o.seed, o.min_client_size),
    ),
}


SCHEDULES: dict[str, ScheduleEntry] = {
    "all": ScheduleEntry(
        "every client trains every model every round", lambda o, n: schedule.all_clients(n, o.num_models)
    ),
    "uniform": ScheduleEntry(
        "--clients-per-round clients drawn at random train the one model",
        lambda o, n: schedule.uniform_sampling(n, n if o.clients_per_round is None else o.clients_per_round),
    ),
    "permutations": ScheduleEntry(
        "every client trains the K models in its own random order (Fed-ensemble 2024, algorithm 1)",
        lambda o, n: schedule.per_client_permutations(n, o.num_models),
    ),
    "strata": ScheduleEntry(
        "--num-strata strata, --clients-per-stratum of each (Fed-ensemble 2021, algorithm 1)",
        lambda o, n: schedule.strata(n, o.num_models, o.num_strata, o.clients_per_stratum),
    ),
    "mixed": ScheduleEntry(
        "permutations for the first K clients, random models for the rest (the published code of Fed-ensemble)",
        lambda o, n: schedule.mixed_permutations(n, o.num_models),
    ),
    "poisson": ScheduleEntry(
        "every client by itself with probability --clients-per-round / N (differential privacy)",
        lambda o, n: schedule.poisson_sampling(n, (n if o.clients_per_round is None else o.clients_per_round) / n),
    ),
    "random_walk": ScheduleEntry(
        "K models walk over --graph (Fed-ensemble 2024, V-H)",
        lambda o, n: schedule.random_walk(parse_graph(o.graph, n, o.seed), o.num_models),
    ),
    "own": ScheduleEntry("every client trains a model of its own", lambda o, n: schedule.own_models(n)),
    "random": ScheduleEntry(
        "every client trains a model drawn at random (Fed-ensemble 2024, table VII)",
        lambda o, n: schedule.random_models(n, o.num_models),
    ),
}
