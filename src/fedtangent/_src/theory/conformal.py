"""The coverage of federated conformal prediction: bounds that hold for every distribution of the clients' data."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedtangent._src.checks import number, real_array, shares
from fedtangent._src.types import ArrayLike


class CoverageBounds(NamedTuple):
    """Lower and upper bound of the probability that a conformal prediction set contains the true target.

    ``high`` may be above 1, where it says nothing.
    """

    low: float
    high: float


def conformal_coverage(sizes: ArrayLike, alpha: float, weights: ArrayLike | None = None) -> CoverageBounds:
    """Computes the bounds of a conformal set's coverage over a mixture of clients (Lu et al., ICML 2023).

    The test point comes from client k with probability w_k and is exchangeable with that client's n_k calibration
    points ("partial exchangeability"); distributions of different clients may differ in any way. The paper has
    ``w_k = (n_k + 1) / (N + K)``, for which the threshold is the ``ceil((1 - alpha)(N + K))``-th smallest of the N
    scores of K clients. For other weights it is the smallest score q with
    ``sum_k w_k m_k(q) / (n_k + 1) >= 1 - alpha``, where m_k(q) of client k's scores are at most q. In both cases

        1 - alpha  <=  P(target in set)  <  1 - alpha + sum_k w_k / (n_k + 1),

    and the last sum is ``K / (N + K)`` for the paper's weights. The upper bound assumes that no two scores are equal
    and that the threshold is finite.

    Proof. The test point is any of the n_k + 1 points of client k, each with the same probability. It is covered if and
    only if its score is at most q', the threshold of all N + 1 scores together. If M of the n_k + 1 points have scores
    of at most q', then m_k(q) is M or M - 1, and it is M - 1 only if q is not a score of client k. Hence
    ``E[m_k(q)] <= (n_k + 1) P_k(covered) <= E[m_k(q)] + P(q is not a score of client k)``. The bounds follow by summing
    over clients: ``1 - alpha <= sum_k w_k m_k(q) / (n_k + 1) < 1 - alpha + w_l / (n_l + 1)``, where q is a score of
    client l.

    Args:
        sizes: Numbers n_k of calibration examples of the K clients, [K], at least 0.
        alpha: Probability that a set misses its target, above 0 and below 1.
        weights: Weights w [K] of the mixture, at least 0, in any scale; None for the paper's.

    Returns:
        The two bounds; the upper one may be above 1.

    Raises:
        ValueError: An argument is out of range.

    Example; 99 examples of one client, then the same number on three clients:

        >>> import fedtangent as ft
        >>> [round(float(bound), 3) for bound in ft.theory.conformal_coverage([99], alpha=0.1)]
        [0.9, 0.91]
        >>> [round(float(bound), 3) for bound in ft.theory.conformal_coverage([9, 40, 50], alpha=0.1)]
        [0.9, 0.929]
    """
    number("alpha", alpha, above=0, below=1)
    counts = real_array("sizes", sizes)
    if counts.ndim != 1 or counts.size == 0 or np.any(counts < 0) or np.any(counts % 1 != 0):
        raise ValueError(f"sizes: got {sizes!r:.60}, must be whole numbers [K] of at least 0, K >= 1")
    mixture = shares("weights", counts + 1 if weights is None else weights, counts.size)
    return CoverageBounds(1 - alpha, 1 - alpha + float(np.sum(mixture / (counts + 1))))
