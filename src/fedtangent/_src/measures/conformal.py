"""Federated conformal prediction: sets that cover the targets of a mixture of clients (Lu et al., ICML 2023).

Every client scores its calibration examples with the trained model; a high score is a poor prediction. The threshold is
a quantile of all scores, and the prediction set of a new input holds the targets whose score is at most the threshold.
Let N clients have n calibration examples, of which n_k are client k's. If the test point comes from client k with
probability ``(n_k + 1) / (n + N)`` and is exchangeable with that client's examples, the set covers the target with
probability at least ``1 - alpha``, for any model and however much clients differ (``theory.conformal_coverage`` has
both bounds).

Everything runs on the host in NumPy float64 and cannot be traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64, Int, Num

from fedtangent._src.checks import finite, number, real_array, shares, whole
from fedtangent._src.data.partition.given import Clients, of
from fedtangent._src.intervals import Interval
from fedtangent._src.measures.conformal_scores import CLASSIFICATION, centre_and_scale, class_scores, conformal_scores
from fedtangent._src.measures.uncertainty import Predicted, coverage_interval
from fedtangent._src.types import AnyArray, ArrayLike

NUMBER_BYTES = 8  # of a float64 score, and of an int64 count
ROUNDING = 1e-12  # relative, of sums of weights: 0.9 of ten examples are nine of them


class FederatedQuantile(NamedTuple):
    """The quantile of the conformal scores of all clients that is the threshold of prediction sets.

    Attributes:
        value: The quantile; infinite if there are too few scores for ``alpha``.
        weights: Weights of the clients, with sum 1.
        uplink_bytes: Bytes that all clients send for it: their scores in float64, and their number of scores.
    """

    value: float
    weights: Float64[np.ndarray, "N"]
    uplink_bytes: int


class Coverage(NamedTuple):
    """The share of targets that are in their prediction sets, with confidence intervals.

    Attributes:
        overall: The share over the mixture of clients.
        by_client: Each client's share; NaN for a client without examples.
    """

    overall: Interval
    by_client: Interval


class ConformalPredictor(NamedTuple):
    """A calibrated conformal predictor, which builds prediction sets; ``conformal_predictor`` returns it.

    Attributes:
        score: Name of the conformal score.
        quantile: The threshold, the weights of the clients, and the bytes that they sent.
    """

    score: str
    quantile: FederatedQuantile

    @property
    def threshold(self) -> float:
        """Threshold: a set holds all targets with at most this score; infinite if there were too few examples."""
        return self.quantile.value

    def sets(self, prediction: Predicted) -> Bool[np.ndarray, "n C"] | Interval:
        """Builds the prediction set of every input.

        Args:
            prediction: Prediction at n inputs, of the same kind as in the calibration.

        Returns:
            For a score of classes, bools [n, C] that tell which classes are in the set. For regression, an interval
            with arrays [n, C]: the set of an input is the box of its C intervals.

        Raises:
            ValueError: The score does not fit the prediction, or the prediction is not finite.
        """
        if self.score in CLASSIFICATION:
            return class_scores(prediction, self.score) <= self.threshold
        centre, scale = centre_and_scale(prediction, self.score)
        return Interval.about(centre, self.threshold * scale)

    def covers(self, prediction: Predicted, targets: Num[AnyArray, "n *C"]) -> Bool[np.ndarray, "n"]:
        """Tests for each input whether the prediction set holds the target, [n].

        Args:
            prediction: Prediction at n inputs.
            targets: Labels [n], or values [n, C].

        Raises:
            ValueError: The score does not fit the prediction or the targets, or a number is not finite.
        """
        return conformal_scores(prediction, targets, self.score) <= self.threshold

    def coverage(
        self, prediction: Predicted, targets: Num[AnyArray, "n *C"], clients: Clients, level: float = 0.95
    ) -> Coverage:
        """Measures the share of targets that are in their sets, for each client and over the mixture of clients.

        The confidence interval is for the sets of this calibration. Calibration on s other examples changes the
        coverage by about ``sqrt(alpha (1 - alpha) / s)``, with the calibration's ``alpha``. Only the mean over such
        calibrations is guaranteed.

        Args:
            prediction: Prediction at n test inputs.
            targets: Labels [n], or values [n, C].
            clients: The test examples of each client, in the order of the calibration's clients.
            level: Probability of the confidence intervals.

        Raises:
            ValueError: As for ``covers`` and ``coverage_by_client``.
        """
        return coverage_by_client(self.covers(prediction, targets), clients, self.quantile.weights, level)


def conformal_predictor(
    prediction: Predicted,
    targets: Num[AnyArray, "n *C"],
    clients: Clients,
    alpha: float = 0.1,
    *,
    score: str,
    weights: ArrayLike | None = None,
    summary_size: int | None = None,
) -> ConformalPredictor:
    """Calibrates prediction sets that miss the target with probability ``alpha`` at most (Lu et al., ICML 2023).

    Args:
        prediction: Prediction at n calibration inputs, which no model was trained on: ``algorithm.predict(run.state,
            x)``, a Gaussian (``theory.gp_limit``), or outputs [K, n, C] of an ensemble; logits for classification.
        targets: Labels [n] for classification, values [n, C] for regression.
        clients: The calibration examples of each client.
        alpha: Largest probability that a set misses its target, above 0 and below 1.
        score: "probability" or "adaptive" for classification, "residual" or "normalised" for regression;
            ``conformal_scores`` defines them.
        weights: Weights [N] of the clients in the mixture that test points come from; None for their numbers of
            examples plus 1. With weight 1 for one client and 0 for all others the sets are calibrated for that client
            only.
        summary_size: Largest number of scores that a client sends; None for all (``federated_quantile``).

    Returns:
        The predictor, with its threshold and the methods ``sets``, ``covers`` and ``coverage``.

    Raises:
        ValueError: An argument is out of range, has a wrong shape, or is not finite; the score does not fit the
            prediction; or a standard deviation that the score divides by is 0.

    Example:

        >>> import numpy as np, fedtangent as ft
        >>> rng = np.random.default_rng(0)
        >>> outputs, y = np.zeros((1, 99, 1)), rng.normal(size=(99, 1))
        >>> clients = ft.partition.iid(99, num_clients=3, seed=0)
        >>> conformal = ft.measures.conformal_predictor(outputs, y, clients, alpha=0.1, score="residual")
        >>> round(conformal.threshold, 2), conformal.quantile.uplink_bytes
        (1.69, 816)
    """
    scores = conformal_scores(prediction, targets, score)
    return ConformalPredictor(score, federated_quantile(scores, clients, alpha, weights, summary_size))


def federated_quantile(
    scores: Float[AnyArray, "n"],
    clients: Clients,
    alpha: float = 0.1,
    weights: ArrayLike | None = None,
    summary_size: int | None = None,
) -> FederatedQuantile:
    """Computes the conformal threshold of scores that are distributed over N clients (Lu et al., ICML 2023).

    It is the smallest score q with ``sum_k w_k m_k(q) / (n_k + 1) >= 1 - alpha``. Here client k has n_k scores, of
    which m_k(q) are at most q, and the weights w_k are scaled to sum 1. With the weights of Lu et al., ``w_k = (n_k +
    1) / (n + N)``, it is the ``ceil((1 - alpha)(n + N))``-th smallest of all n scores. It is infinite if there are too
    few scores for ``alpha``.

    Each client sends its scores in increasing order. With a ``summary_size`` of s it sends only the scores of ranks
    ``ceil(j n_k / s)``, j = 1 .. s, and the server replaces each score in between by the next larger one that was sent.
    So the threshold is never below the threshold of all scores, and coverage is never lost. The T-Digest of Lu et al.
    can err in both directions.

    Args:
        scores: Score of each calibration example [n], finite.
        clients: The calibration examples of each client.
        alpha: Largest probability that a set misses its target, above 0 and below 1.
        weights: Weights [N] of the clients, at least 0 and not all 0; only their ratios count. None for ``n_k + 1``.
        summary_size: Largest number of scores that a client sends; None for all.

    Returns:
        The threshold, the weights with sum 1, and the bytes that the clients send.

    Raises:
        ValueError: An argument has the wrong shape or range, or a score is not finite.
    """
    number("alpha", alpha, above=0, below=1)
    values = real_array("scores", scores)
    if values.ndim != 1:
        raise ValueError(f"scores: got shape {values.shape}, must be [n]")
    finite("scores", values)
    partition = of(clients, len(values), "clients")
    mixture = shares("weights", partition.sizes + 1 if weights is None else weights, partition.num_clients)
    sent, masses = list[np.ndarray](), list[np.ndarray]()
    for k, size in enumerate(partition.sizes):
        ranks = _ranks(int(size), summary_size)
        sent.append(np.sort(values[partition.client(k)])[ranks - 1])
        masses.append(np.diff(ranks, prepend=0) * mixture[k] / (size + 1))
    uplink_bytes = NUMBER_BYTES * (sum(map(len, sent)) + partition.num_clients)
    return FederatedQuantile(_weighted_quantile(sent, masses, 1 - alpha), mixture, uplink_bytes)


def coverage_by_client(
    covered: Bool[AnyArray, "n"], clients: Clients, weights: ArrayLike | None = None, level: float = 0.95
) -> Coverage:
    """Computes the share of covered targets of each client and over a mixture of clients, with confidence intervals.

    ``covered`` may come from any sets or intervals, for example from ``predictive_interval``. A client's confidence
    interval is Wilson's (1927). For the mixture, the distances between share and interval end of all clients, times
    their weights, are combined as the root of the sum of squares (MOVER, Zou and Donner, 2008).

    Args:
        covered: Whether each target is in its set, [n].
        clients: The examples of each client.
        weights: Weights [N] of the clients in the mixture, at least 0; None for the number of examples.
        level: Probability of the confidence intervals.

    Raises:
        ValueError: An argument has the wrong shape or range, or a client of positive weight has no examples.
    """
    inside = np.asarray(covered)
    if inside.ndim != 1 or inside.dtype != bool:
        raise ValueError(f"covered: got {inside.dtype} {inside.shape}, must be bools [n]")
    partition = of(clients, len(inside), "clients")
    mixture = shares("weights", partition.sizes if weights is None else weights, partition.num_clients)
    empty = np.flatnonzero((mixture > 0) & (partition.sizes == 0))
    if len(empty):
        raise ValueError(f"clients: client {empty[0]} has no examples, must have some where its weight is above 0")
    number("level", level, above=0, below=1)
    hits = np.array([inside[partition.client(k)].sum() for k in range(partition.num_clients)])
    ends = np.full((3, partition.num_clients), np.nan)
    for size in np.unique(partition.sizes[partition.sizes > 0]):
        which = partition.sizes == size
        ends[:, which] = coverage_interval(hits[which] / size, int(size), level)
        ends[0, which] = hits[which] / size  # in float64
    share, low, high = np.where(mixture > 0, ends, 0)
    value = float(mixture @ share)
    below, above = (float(np.linalg.norm(mixture * distance)) for distance in (share - low, high - share))
    return Coverage(Interval(value, value - below, value + above), Interval(*ends))


def _ranks(size: int, summary_size: int | None) -> Int[np.ndarray, "s"]:
    """Returns the ranks, from 1 on, of the scores that a client with ``size`` scores sends; the last one is ``size``.

    It sends at most ``summary_size`` scores; None for all scores.
    """
    sent = size if summary_size is None else min(size, whole("summary_size", summary_size))
    return -(-np.arange(1, sent + 1) * size // max(sent, 1))


def _weighted_quantile(
    values: Sequence[Float64[np.ndarray, "_"]], masses: Sequence[Float64[np.ndarray, "_"]], level: float
) -> float:
    """Returns the smallest value v for which the masses of all values up to v have a sum of ``level`` or more.

    Returns infinity if the sum of all masses is smaller. ``values`` and ``masses`` have an array for each client.
    """
    every, mass = np.concatenate(values), np.concatenate(masses)
    order = np.argsort(every, kind="stable")
    reached = np.flatnonzero(np.cumsum(mass[order]) >= level * (1 - ROUNDING))
    return float(every[order][reached[0]]) if len(reached) else float("inf")
