"""The history of a run: evaluations, the infos of every round, bytes on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from fedtangent.progress import headline
from fedtangent.pytrees import num_bytes
from fedtangent.types import Cost, PyTree

if TYPE_CHECKING:
    from pandas import DataFrame


FINISHED = "finished"  # the status of a run that did all its rounds without trouble


class Measurement(NamedTuple):
    """The metrics after ``round`` rounds (0 is the initial state).

    ``seconds`` is wall time since the run began, compiling, evaluating and saving included; for a resumed run the time
    between its last checkpoint and its resumption is left out. Two equal runs differ in ``seconds`` only.
    """

    round: int
    metrics: dict[str, Any]
    uplink_bytes: int
    downlink_bytes: int
    seconds: float


class History(NamedTuple):
    """A run's evaluations, and the infos of every round stacked along a leading axis R."""

    evaluations: list[Measurement]
    rounds: dict[str, Any]  # NumPy arrays [R, ...]; "cohort" is a Cohort of arrays [R, S]
    cost: Cost

    def __repr__(self) -> str:
        """How long it is, and where it ended."""
        length = next((len(leaf) for leaf in jax.tree.leaves(self.rounds)), 0)
        said = f"{length} rounds, {len(self.evaluations)} evaluations"
        if not self.evaluations:
            return f"History({said})"
        last = self.evaluations[-1]
        metric = headline(last.metrics)
        return f"History({said}, the last at round {last.round}{': ' + metric if metric else ', without metrics'})"

    def to_pandas(self) -> DataFrame:
        """A row for each evaluation: round, bytes, seconds, and the metrics, those of splits as ``test.accuracy``.

        What is no number stays as it is, an array too. Raises ``ImportError`` where pandas is not installed.
        """
        return data_frame(
            [
                {
                    "round": e.round,
                    "uplink_bytes": e.uplink_bytes,
                    "downlink_bytes": e.downlink_bytes,
                    "seconds": e.seconds,
                    **_flat(e.metrics),
                }
                for e in self.evaluations
            ]
        )


class Run(NamedTuple):
    """The final state and the history of a run.

    ``status`` is ``"finished"``, ``"diverged at round r"`` (state and history are then those of the last good round),
    ``"diverged by round r"`` (without ``stop_on_divergence``: numbers are no longer finite), ``"unstable at round r:
    .."`` (a server could not make a step and kept its model; with ``stop_on_divergence`` the run ends before it) or
    ``"stopped by SIGTERM at round r"``, of which ``signal`` is the number.
    """

    state: PyTree
    history: History
    status: str = FINISHED
    signal: int = 0

    def __repr__(self) -> str:
        """How it ended, its history in short, and the size of its state."""
        arrays = [leaf for leaf in jax.tree.leaves(self.state) if hasattr(leaf, "dtype")]
        size = num_bytes(arrays) / 2**20
        return f"Run({self.status}, {self.history!r}, state of {len(arrays)} arrays, {size:.3g} MiB)"


def data_frame(rows: Any) -> DataFrame:
    """What pandas makes of ``rows``; raises ``ImportError`` in one line where it is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("pandas: is not installed, must be there: pip install 'fedtangent[notebooks]'") from error
    return pandas.DataFrame(rows)


def _flat(metrics: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Metrics by their full names, such as ``test.accuracy``; JAX's arrays as NumPy's."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{before}{name}.")
        else:
            found[before + name] = np.asarray(value)[()] if isinstance(value, jax.Array | np.ndarray) else value
    return found


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
    """Bytes up and down of the rounds in ``infos``; a client that drops out has received a model and sends nothing."""
    active = int(np.sum(infos["cohort"].weight > 0))
    contacted = int(np.sum(infos["contacted"], dtype=np.int64))
    examples = int(np.sum(infos["examples"], dtype=np.int64))
    return cost.uplink * active + cost.uplink_per_example * examples, cost.downlink * contacted
