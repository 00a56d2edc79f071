"""Predicts one model at every round, and bounds a network's distance from the prediction, for the residual ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int

from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.theory.flow import Rule, federated_flow
from fedtangent._src.theory.flow.clients import client_rows
from fedtangent._src.types import ArrayLike, Cohort, Partition

ROUNDING = 8.0  # standard deviations, about, of a sum of independent roundings
PER_ROUND = ("learning_rate", "server_learning_rate")  # fields of a rule that may be one number a round


class Federation(NamedTuple):
    """The parts of a run that all models share: targets, clients, cohorts and the rule.

    ``outputs`` is "shared" if all outputs have one kernel [n, n], "full" if the kernel [n C, n C] couples them.
    """

    y: Float64[np.ndarray, "n C"]
    partition: Partition
    cohorts: Cohort  # S clients in each of R rounds, [R, S], with the run's weights
    num_models: int
    outputs: str  # "shared" or "full", as for ``federated_flow``
    rule: Rule  # of clients and server, for the theory

    @property
    def num_rounds(self) -> int:
        """The number of rounds R of the prediction."""
        return len(np.asarray(self.cohorts.client))

    def rows(self, client: int) -> Int[np.ndarray, "rows"]:
        """Returns the row numbers of the kernel that belong to the examples of ``client``."""
        return np.unique(client_rows(self.partition, client, 1 if self.outputs == "shared" else self.y.shape[1]))

    def predict(
        self,
        model: int,
        theta: Float64[np.ndarray, "q q"],
        y: Float64[np.ndarray, "n C"],
        start: Float64[np.ndarray, "n C"],
        along: Float64[np.ndarray, "n C"] | None,
        skip: int = 0,
    ) -> tuple[Float64[np.ndarray, "rounds q D"], Float64[np.ndarray, "rounds n C"]]:
        """Predicts the outputs of ``model`` at the training points from round ``skip`` on, by the flow.

        The first ``skip`` rounds are left out, and as many rounds without clients are added at the end, so that all
        predictions share one compiled program. Server momentum and the like start at 0. q is n, and D is C, if all
        outputs share one kernel; otherwise q is n C, and D is 1.

        Args:
            model: Number of the model.
            theta: Kernel at the training points, [q, q].
            y: Targets, [n, C].
            start: Function at the training points after ``skip`` rounds, [n, C].
            along: Jacobian times the weights after ``skip`` rounds, ``J(X) w`` [n, C], for weight decay; None without.
            skip: Number of first rounds to leave out.

        Returns:
            Coefficients c [R + 1, q, D] and outputs [R + 1, n, C], after ``skip`` rounds and after each later one; the
            last ``skip`` entries are of rounds without clients. Outputs move by ``theta @ c``, and by weight decay.
        """
        cohorts = Cohort(*(_later(np.asarray(leaf), skip, 0) for leaf in self.cohorts))  # type: ignore[arg-type]
        rates = {name: np.asarray(getattr(self.rule, name)) for name in PER_ROUND}
        later: dict[str, Any] = {name: _later(rate, skip, rate[-1]) for name, rate in rates.items() if rate.ndim == 1}
        size, zeros = len(theta), np.zeros_like(start)
        flow = federated_flow(
            KernelBlocks(theta, np.concatenate([np.eye(size), theta])),
            y,
            self.partition,
            cohorts,
            replace(self.rule, **later),
            num_models=self.num_models,
            outputs=self.outputs,
        )
        decay = {} if along is None else {"along_train": along, "along_test": np.concatenate([zeros, along])}
        every = list(range(self.num_rounds + 1))
        both = np.asarray(flow.predict(start, np.concatenate([zeros, start]), every, model, **decay))
        coefficients, outputs = np.split(both, 2, axis=1)
        return coefficients.reshape(len(every), size, -1), outputs


def _later(values: np.ndarray, skip: int, fill: ArrayLike) -> np.ndarray:
    """Returns ``values`` [R, ...] from row ``skip`` on, padded with ``fill`` to R rows."""
    return np.concatenate([values[skip:], np.full_like(values[:skip], fill)])


class Path(NamedTuple):
    """The prediction of one model at every round, from its initial function and its tangent kernel at the start.

    q and D are n and C, or n C and 1 if the kernel couples outputs.

    Attributes:
        outputs: Predicted outputs at the training points.
        coefficients: Coefficients c; outputs are the initial function, less what weight decay removes, plus
            ``theta @ c``.
        local_moves: Largest distance of a client's weights from the server's in each round.
        propagate: Takes a round r and a gap [q, D]; returns how the gap evolves from round r on, [R + 1 - r, q, D].
    """

    outputs: Float64[np.ndarray, "R+1 n C"]
    coefficients: Float64[np.ndarray, "R+1 q D"]
    local_moves: Float64[np.ndarray, "R"]
    propagate: Callable[[int, np.ndarray], np.ndarray]

    def gap(self, round_: int, outputs: Float64[np.ndarray, "n C"]) -> Float64[np.ndarray, "q D"]:
        """Returns ``outputs`` minus the predicted outputs of a round, in the shape [q, D] of the coefficients.

        Args:
            round_: The round.
            outputs: Outputs [n, C] of the network after it.
        """
        gap: np.ndarray = (outputs - self.outputs[round_]).reshape(self.coefficients.shape[1:])
        return gap


def predict_path(
    of: Federation,
    model: int,
    theta: Float64[np.ndarray, "q q"],
    start: Float64[np.ndarray, "n C"],
    along: Float64[np.ndarray, "n C"] | None,
) -> Path:
    """Predicts one model at every round by the flow.

    Args:
        of: Targets, clients, cohorts and rule of the run.
        model: Number of the model.
        theta: Kernel of the model at the start, [q, q].
        start: Initial function, [n, C].
        along: Jacobian times initial weights, ``J(X) w_0`` [n, C], for weight decay; None without.
    """
    coefficients, outputs = of.predict(model, theta, of.y, start, along)

    def propagate(round_: int, values: Float64[np.ndarray, "q D"]) -> Float64[np.ndarray, "rounds q D"]:
        if not np.isfinite(values).all():  # of a network that has diverged
            return np.full((of.num_rounds + 1 - round_, *values.shape), np.nan)
        begin = values.reshape(start.shape)
        later = of.predict(model, theta, np.zeros_like(of.y), begin, None if along is None else begin, round_)[1]
        return later[: of.num_rounds + 1 - round_].reshape(-1, *values.shape)

    return Path(outputs, coefficients, _local_moves(of, model, theta, np.diff(coefficients, axis=0)), propagate)


def _local_moves(
    of: Federation, model: int, theta: Float64[np.ndarray, "q q"], steps: np.ndarray
) -> Float64[np.ndarray, "R"]:
    """Computes how far local training moves a client's weights from the server's: the farthest client of each round.

    The flow writes the outputs as the initial function, less what weight decay removes, plus ``theta @ a`` with
    coefficients a [q, D]. If a round changes the rows of a that belong to client i by c_i, then that client moved its
    weights by ``J_i' c_i / (p_i eta)``. J_i is its Jacobian, p_i its share in the round's average, and eta
    the server's learning rate.

    Args:
        of: Targets, clients, cohorts and rule of the run.
        model: Number of the model.
        theta: Tangent kernel of the model at the start, [q, q].
        steps: Change of the coefficients in each round, [R, q, D].

    Returns:
        ``max_i |w_i - w|`` of every round, [R]; 0 in a round in which nobody trains the model.
    """
    client, trained = np.asarray(of.cohorts.client), np.asarray(of.cohorts.model)
    weight = np.where(trained == model, np.asarray(of.cohorts.weight, np.float64), 0.0)
    rates = np.broadcast_to(np.asarray(of.rule.server_learning_rate, np.float64), (of.num_rounds,))
    moves = np.zeros(of.num_rounds)
    for r, slot in zip(*np.nonzero(weight), strict=True):
        rows = of.rows(int(client[r, slot]))
        coefficients = steps[r, rows] * weight[r].sum() / (weight[r, slot] * rates[r])
        squared = float(np.sum(coefficients * (theta[np.ix_(rows, rows)] @ coefficients)))
        moves[r] = max(moves[r], np.sqrt(max(squared, 0.0)))
    return moves


class Source(NamedTuple):
    """The gap that the kernel's change in one interval between evaluations adds, and its size at every later round.

    Attributes:
        round: Last round of the interval.
        later: The gap from that round on, as it evolves by the flow, [R + 1 - round, q, D].
        sizes: Bound on the root mean square of the gap at each client's examples in the last round of the interval. The
            root mean squares of what each client adds are summed, so that nothing cancels.
        remaining: Norm of the gap at each later round, relative to the norm in the last round of the interval.
        local: Share by which the weights' moves within a round may increase the gap.
    """

    round: int
    later: np.ndarray
    sizes: Float64[np.ndarray, "N"]
    remaining: Float64[np.ndarray, "rounds"]
    local: float


def source(
    of: Federation, path: Path, change: Float64[np.ndarray, "q q"], begin: int, end: int, travelled: float
) -> Source:
    """Computes the gap that the kernel's change from round ``begin`` to ``end`` opens, to first order.

    The gap is between the network's outputs and the predicted ones. ``residual_ledger`` explains how these gaps enter
    the tolerance.

    Args:
        of: Targets, clients, cohorts and rule of the run.
        path: Prediction of the model.
        change: Change of the kernel from the start to round ``end``, [q, q].
        begin: Number of finished rounds at the start of the interval.
        end: Number of finished rounds at its end.
        travelled: Distance ``|w - w_0|`` of the weights at round ``end``.
    """
    steps = path.coefficients[end] - path.coefficients[begin]
    later = path.propagate(end, change @ steps)
    rows = [of.rows(i) for i in range(of.partition.num_clients)]
    sizes = np.zeros(len(rows))
    for adds in rows:  # a client that holds nothing has no rows, and adds nothing
        added = np.sum((change[:, adds] @ steps[adds]) ** 2, axis=1)
        sizes += [np.sqrt(np.sum(added[of_client]) / max(len(of_client) * steps.shape[1], 1)) for of_client in rows]
    # A client's block of the kernel may change and come back within the interval, so no client's size is below the root
    # mean square of all clients.
    counts = np.array([len(of_client) for of_client in rows])
    sizes = np.maximum(sizes, np.sqrt(np.sum(counts * sizes**2) / np.sum(counts)))
    whole = np.sqrt(np.sum(later**2, axis=(1, 2)))
    local = float(np.max(path.local_moves[begin:end], initial=0.0))
    remaining = whole / whole[0] if whole[0] > 0 else np.zeros_like(whole)
    return Source(end, later, sizes, remaining, local / travelled if local > 0 else 0.0)


def first_order(sources: list[Source], round_: int, client: int, rows: np.ndarray) -> float:
    """Bounds the root mean square gap at one client's examples that the kernel's change causes by ``round_``.

    A source is the gap that one interval adds. Its bound is the larger of two numbers: the source as it has evolved at
    these rows, and its size when it was added (``Source.sizes``) times the share of the whole source that remains. The
    bounds of all sources are added.

    Args:
        sources: Gaps added in each interval until ``round_``.
        round_: Round of the evaluation.
        client: Number of the client.
        rows: The client's rows of the kernel.
    """
    bound = 0.0
    for source in sources:
        after = round_ - source.round
        unchanged = source.sizes[client] * source.remaining[after]
        bound += (1 + source.local) * max(rms(source.later[after][rows]), unchanged)
    return float(bound)


def rounding(unit: float, steps: float, operations: int, largest: float, weights: float) -> float:
    """Bounds the rounding error of an output after ``steps`` local steps, by about eight standard deviations.

    Local steps on squared loss (of a stable size) and averages do not expand errors of the weights, so roundings add
    up. Each is at most ``unit * largest * weights``, and sums of independent roundings grow as the root of their number
    (Higham and Mary, 2019).

    Args:
        unit: Rounding unit of the run's arithmetic.
        steps: Number of local steps.
        operations: Number of terms in an inner product.
        largest: Largest norm of a feature vector.
        weights: Largest norm of the weights.
    """
    return float(ROUNDING * unit * np.sqrt((1 + steps) * operations) * largest * weights)


def rms(values: Float[np.ndarray, "..."]) -> float:
    """Returns the root mean square of ``values``."""
    return float(np.sqrt(np.mean(values**2)))
