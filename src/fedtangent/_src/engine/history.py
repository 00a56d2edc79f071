"""The history of a run: metrics at evaluated rounds, the infos of every round, and the bytes on the wire.

Infos are the numbers that each round reports, such as the cohort and the clients' losses.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int, Num

from fedtangent._src.progress import headline, is_number
from fedtangent._src.pytrees import num_bytes
from fedtangent._src.types import Cost, PyTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


FINISHED = "finished"  # the status of a run that did all its rounds without trouble


Metrics = dict[str, Any]  # metrics by name, or by split and name


class Measurement(NamedTuple):
    """Metrics of a run after ``round`` rounds (0 for the initial state), with the bytes and the seconds until then.

    ``metrics`` are by name, or by split and name. ``uplink_bytes`` and ``downlink_bytes`` are the bytes that all
    clients together have sent and received.

    ``seconds`` is the wall time since the initial state was drawn. It includes compilation, evaluation and saving. It
    excludes the reading of the data and the choice of a mapping of clients onto the device, for which ``auto`` compiles
    programs of its own. In a resumed run it also excludes the time between the last checkpoint and the resumption. All
    programs are compiled before the first evaluation after round 0, so the difference of two later ``seconds`` contains
    no compilation. Two runs with the same arguments differ in ``seconds`` only.
    """

    round: int
    metrics: Metrics
    uplink_bytes: int
    downlink_bytes: int
    seconds: float


class History(NamedTuple):
    """The history of a simulation, a forecast or a comparison: metrics at evaluated rounds, and numbers of every round.

    Attributes:
        evaluations: Metrics at the evaluated rounds, the first at round 0, before training.
        rounds: Infos, numbers that each of the R rounds reports, by name, NumPy arrays [R, ...]. "loss" [R, S] has one
            for each of the S slots (clients of a round). "cohort" is a ``Cohort`` of arrays [R, S]. Empty for a
            forecast.
        cost: Bytes of a message and of a broadcast.
        bands: 5th and 95th percentiles of metrics that are means over initialisations, by name such as "test.accuracy":
            arrays [r] each, over the r evaluated rounds.
        is_predicted: Whether theory predicted the history, without training a network.
        predicted: For a comparison, the history that theory predicts; otherwise None.
    """

    evaluations: list[Measurement]
    rounds: dict[str, PyTree]
    cost: Cost
    bands: Mapping[str, tuple[Float[np.ndarray, "r"], Float[np.ndarray, "r"]]] = MappingProxyType({})
    is_predicted: bool = False
    predicted: History | None = None

    def __repr__(self) -> str:
        """Returns a line with the numbers of rounds and evaluations, and a metric of the last evaluation."""
        last_round = self.evaluations[-1].round if self.evaluations else 0
        length = next((len(leaf) for leaf in jax.tree.leaves(self.rounds)), last_round)
        counts = f"{length} {'predicted ' * self.is_predicted}rounds, {len(self.evaluations)} evaluations"
        if not self.evaluations:
            return f"History({counts})"
        last = self.evaluations[-1]
        metric = headline(last.metrics)
        return f"History({counts}, the last at round {last.round}{': ' + metric if metric else ', without metrics'})"

    def _repr_html_(self) -> str:
        from fedtangent._src.output.history_plots import history_html

        return history_html(self)

    @property
    def evaluated(self) -> Int[np.ndarray, "r"]:
        """The rounds after which the metrics were measured, [r]."""
        return np.array([e.round for e in self.evaluations], int)

    def curves(self) -> dict[str, Num[np.ndarray, "r"]]:
        """Returns every metric that is a number at all evaluated rounds, [r] each, by names such as "test.accuracy"."""
        rows = [_flat(e.metrics) for e in self.evaluations]
        names = [name for name, value in (rows[0] if rows else {}).items() if is_number(value)]
        return {name: np.array([row[name] for row in rows], float) for name in names if all(name in r for r in rows)}

    def plot(self, *metrics: str) -> Figure:
        """Draws metrics along the rounds: simulation solid, theory dashed, bands over initialisations shaded.

        Args:
            metrics: Names such as "accuracy", a panel each; by default accuracy and loss.

        Returns:
            A matplotlib figure, which notebooks show; in a script save it by ``.savefig(path)``.

        Raises:
            ValueError: The history has no metric that is a number, or lacks one of the named metrics.
        """
        from fedtangent._src.output.history_plots import history_figure

        return history_figure(self, metrics)

    def to_pandas(self) -> DataFrame:
        """Returns a pandas DataFrame with a row for each evaluation: round, bytes, seconds, and metrics by name.

        Names are such as "test.accuracy". The 5th and 95th percentiles in ``bands`` are called "test.accuracy_p5" and
        "test.accuracy_p95", and theory's predictions in a comparison "predicted.test.accuracy". A metric that is an
        array is one cell.

        Raises:
            ImportError: pandas is not installed.
        """
        theory = {} if self.predicted is None else self.predicted.curves()
        bands = {f"{name}_p{end}": values[at] for name, values in self.bands.items() for at, end in enumerate((5, 95))}
        more = bands | {f"predicted.{name}": values for name, values in theory.items()}
        return data_frame(
            [
                {
                    "round": e.round,
                    "uplink_bytes": e.uplink_bytes,
                    "downlink_bytes": e.downlink_bytes,
                    "seconds": e.seconds,
                    **_flat(e.metrics),
                    **{name: values[i] for name, values in more.items()},
                }
                for i, e in enumerate(self.evaluations)
            ]
        )


class Run(NamedTuple):
    """The result of a simulation: final state, history and status.

    ``status`` is one of these texts:

    - "finished";
    - "diverged at round r": state and history end with the last good round;
    - "diverged by round r" (without ``stop_on_divergence``): numbers are no longer finite;
    - "unstable at round r: ..": a server refused a learning rate and kept its model, or its loss was infinite after
      each candidate number of steps (NTK-FL); with ``stop_on_divergence`` the run ends before that round;
    - "stopped by SIGTERM at round r"; ``signal`` is then the number of the signal, else 0.
    """

    state: PyTree
    history: History
    status: str = FINISHED
    signal: int = 0

    def __repr__(self) -> str:
        """Returns a line with the status, the sentences of ``lost``, a summary of the history, and the state's size."""
        arrays = [leaf for leaf in jax.tree.leaves(self.state) if hasattr(leaf, "dtype")]
        size = num_bytes(arrays) / 2**20
        status = "; ".join([self.status, *lost(self.history.rounds)])
        return f"Run({status}, {self.history!r}, state of {len(arrays)} arrays, {size:.3g} MiB)"

    def _repr_html_(self) -> str:
        return html_of(self)


LOST = {
    "rejected": "messages were rejected: not finite, or larger than allowed",
    "dropped": "messages were dropped: their model had no place for more clients in that round",
    "examples_dropped": "examples were dropped: the server's pool had no place for them",
    "clipped": "messages were clipped",
    "rate_cut": "learning rates were cut to a stable one",
    "unapplied": "gradients had not been applied by a client's optimiser when its round ended, and were dropped",
    "rounded_away": "numbers of messages were rounded to 0, too small beside the largest of their array",
}  # infos that count numbers which a run replaced, dropped or rounded away


def lost(rounds: Mapping[str, PyTree]) -> list[str]:
    """Returns a sentence for each kind of discarded or changed numbers (``LOST``), and for models that nobody trained.

    A count of 0 has no sentence.

    Args:
        rounds: Numbers that each round reported, arrays [R, ...] by name: "rejected" counts rejected messages.
    """
    counts = {name: int(np.sum(rounds.get(name, 0), dtype=np.int64)) for name in LOST}
    lines = [f"{count} {LOST[name]}" for name, count in counts.items() if count]
    weight = np.asarray(rounds.get("model_weight", np.ones((0, 1))))
    untrained = int(np.sum(~(weight > 0).any(axis=0))) if len(weight) else 0
    if untrained:
        lines.insert(0, f"{untrained} of {weight.shape[1]} models were never trained, and count in the average")
    return lines


def html_of(result: Any) -> str:
    """Returns the HTML by which notebooks show a result with a ``history``, such as a run or a comparison.

    It has the result's text, and the table and curves of its history.
    """
    return f"<p>{html.escape(repr(result))}</p>{result.history._repr_html_()}"


def data_frame(rows: object) -> DataFrame:
    """Returns ``rows`` as a pandas DataFrame; raises ``ImportError`` with advice if pandas is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("pandas: is not installed: pip install 'fedtangent[notebooks]'") from error
    return pandas.DataFrame(rows)


def _flat(metrics: Mapping[str, object], before: str = "") -> Metrics:
    """Returns nested metrics by full names, such as ``test.accuracy``, with JAX arrays as NumPy arrays.

    ``before`` is the beginning of each name, such as ``test.``.
    """
    flat: Metrics = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{before}{name}.")
        else:
            flat[before + name] = np.asarray(value)[()] if isinstance(value, jax.Array | np.ndarray) else value
    return flat


def first_rounds(infos: PyTree, rounds: int) -> PyTree:
    """Returns the infos (reported numbers) of the first rounds of a chunk as NumPy arrays.

    Args:
        infos: Infos of consecutive rounds, a chunk, in arrays [r, ...].
        rounds: Number of rounds, at most r.
    """
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:rounds], infos)


def stacked(shapes: PyTree, chunks: Sequence[PyTree]) -> PyTree:
    """Joins the infos (reported numbers) of consecutive chunks of rounds along the rounds, to arrays [R, ...].

    Args:
        shapes: Shapes of one round's infos, for a run of no rounds.
        chunks: Infos of consecutive rounds, arrays [r, ...].
    """
    empty = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape), leaf.dtype), shapes)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), empty, *chunks)


def at_start(cost: Cost) -> tuple[int, int]:
    """Returns the bytes that clients send to the server, and that they receive, before the first round."""
    return cost.uplink_once, cost.downlink_once


def charge(cost: Cost, infos: dict[str, PyTree]) -> tuple[int, int]:
    """Returns the bytes that clients send to the server, and that they receive, in some rounds.

    A client that drops out has received a model and sends nothing.

    Args:
        cost: Bytes of a message, of its part for each example, of a broadcast, and of a poll, in which the server asks
            a client about the models.
        infos: Numbers that the rounds reported, arrays [R, ...] by name, such as "cohort" and "contacted" (clients).
    """
    active = int(np.sum(infos["cohort"].weight > 0))
    contacted = int(np.sum(infos["contacted"], dtype=np.int64))
    examples = int(np.sum(infos["examples"], dtype=np.int64))
    polled = int(np.sum(infos.get("polled", 0), dtype=np.int64))
    uplink = cost.uplink * active + cost.uplink_per_example * examples + cost.uplink_per_poll * polled
    return uplink, cost.downlink * contacted + cost.downlink_per_poll * polled
