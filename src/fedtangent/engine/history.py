"""What a run remembers: evaluations, the infos of every round, bytes on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedtangent.checks import MAX_INDEX, whole
from fedtangent.types import Cost, PyTree


def check_rounds(num_rounds: int, evaluate_every: int | None) -> int:
    """Rounds between evaluations; raises ``ValueError`` for numbers that are not whole and at least 1."""
    for name, value in (("num_rounds", num_rounds), ("evaluate_every", evaluate_every)):
        if value is not None or name == "num_rounds":
            whole(name, value, 1, MAX_INDEX)
    return min(evaluate_every or num_rounds, num_rounds)


def check_options(function: str, options: Mapping[str, Any], kind: type) -> None:
    """Raise ``TypeError``, as Python does, for a keyword argument that ``kind``, a ``TypedDict``, does not have."""
    for name in options.keys() - kind.__annotations__.keys():
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


class Evaluation(NamedTuple):
    """What was seen after ``round`` rounds (0 is the initial state)."""

    round: int
    metrics: dict[str, Any]
    uplink_bytes: int
    downlink_bytes: int


class History(NamedTuple):
    """A run's evaluations, and the infos of every round stacked along a leading axis R."""

    evaluations: list[Evaluation]
    rounds: dict[str, Any]  # NumPy arrays [R, ...]; "cohort" is a Cohort of arrays [R, S]
    cost: Cost


class Run(NamedTuple):
    """The final state and the history of a run.

    ``status`` is ``"finished"``, ``"diverged at round r"`` (state and history are then those of the last good round),
    ``"unstable at round r: .."`` (a server refused that round's learning rate and kept its model; with
    ``stop_on_divergence`` the run ends before it) or ``"stopped by SIGTERM at round r"``, of which ``signal`` is the
    number.
    """

    state: PyTree
    history: History
    status: str = "finished"
    signal: int = 0


def first_rounds(infos: PyTree, rounds: int) -> PyTree:
    """The first ``rounds`` rows of a chunk's infos, as NumPy arrays."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:rounds], infos)


def stacked(shapes: PyTree, chunks: Sequence[PyTree]) -> PyTree:
    """Chunks of infos as one, arrays [R, ...]; ``shapes`` are those of one round, for a run of no rounds."""
    empty = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape), leaf.dtype), shapes)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), empty, *chunks)


def at_start(cost: Cost) -> tuple[int, int]:
    """Bytes up and down before the first round."""
    return cost.uplink_once, cost.downlink_once


def charge(cost: Cost, infos: dict[str, Any]) -> tuple[int, int]:
    """Bytes up and down of the rounds in ``infos``; a client that drops out has received, and sends nothing."""
    active = int(np.sum(infos["cohort"].weight > 0))
    contacted = int(np.sum(infos["contacted"], dtype=np.int64))
    examples = int(np.sum(infos["examples"], dtype=np.int64))
    return cost.uplink * active + cost.uplink_per_example * examples, cost.downlink * contacted
