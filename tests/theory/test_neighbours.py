"""A round of NTK-DFL as a matrix: beside descent step by step, and when all models agree in the end."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.federated.graph import complete, from_adjacency, metropolis_weights, ring
from fedtangent._src.theory.ntk_fl.neighbours import neighbourhood_round

CLIENTS = consecutive((2, 3, 1, 2))  # of nine points, the last of which is a test point
RATE, TIME = 0.8, 4
PATH = from_adjacency(np.array([[0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 0]]))


def kernel(seed: int = 0, rank: int = 12) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=(9, rank)) / np.sqrt(rank)
    return np.asarray(x @ x.T)


def by_steps(theta: np.ndarray, mixing: np.ndarray, residuals: np.ndarray) -> np.ndarray:
    """A round, [N, n, C]: mix, then take the steps one by one on the examples of the neighbourhood."""
    after = []
    for shares in mixing:
        residual = sum(share * other for share, other in zip(shares, residuals, strict=True))
        rows = [row for j in range(4) if shares[j] > 0 for row in CLIENTS.client(j)]
        for _ in range(TIME):
            residual = residual - RATE / len(rows) * theta[:, rows] @ residual[rows]
        after.append(residual)
    return np.stack(after)


@pytest.mark.parametrize("rank", [12, 3])  # the second kernel is singular
def test_the_matrix_is_a_round_of_descent(rank: int) -> None:
    theta, mixing = kernel(1, rank), metropolis_weights(PATH)
    mixing[0] = [0.2, 0.8, 0, 0]  # a mean need not be symmetric
    start = np.random.default_rng(2).normal(size=(4, 9, 2))
    matrix = neighbourhood_round(theta, CLIENTS, mixing, RATE, TIME)
    predicted, expected = (matrix @ start.reshape(-1, 2)).reshape(4, 9, 2), by_steps(theta, mixing, start)
    np.testing.assert_allclose(predicted, expected, rtol=0, atol=1e-13)
    for wrong in (metropolis_weights(complete(4)), np.eye(4)):
        assert np.abs(by_steps(theta, wrong, start) - predicted).max() > 0.05


def test_all_models_agree_in_the_end_on_a_connected_graph_only() -> None:
    theta = kernel()[:8, :8]  # examples only

    def radius(mixing: np.ndarray) -> float:
        return float(np.abs(np.linalg.eigvals(neighbourhood_round(theta, CLIENTS, mixing, RATE, TIME))).max())

    apart = np.kron(np.eye(2), np.full((2, 2), 0.5))
    radii = [radius(metropolis_weights(graph)) for graph in (complete(4), ring(4), PATH)]
    assert 0 < radii[0] < radii[1] < radii[2] < 1 - 1e-3
    assert radius(apart) == pytest.approx(1, abs=1e-12) == radius(np.eye(4))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"mixing: got shape \(3, 3\), must be \(4, 4\)"):
        neighbourhood_round(kernel(), CLIENTS, np.eye(3), RATE, TIME)
    with pytest.raises(ValueError, match=r"step: got .*, must be above 0 and at most"):
        neighbourhood_round(kernel(), CLIENTS, np.eye(4), 50.0, TIME)
    with pytest.raises(ValueError, match="learning_rate: got 0"):
        neighbourhood_round(kernel(), CLIENTS, np.eye(4), 0.0, TIME)
