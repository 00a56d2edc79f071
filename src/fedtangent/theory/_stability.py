"""Which step sizes let a federated kernel flow converge."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedtangent.types import Partition


class Stability(NamedTuple):
    """Sufficient condition for every round to be a non-expansion, whatever the cohort.

    Client i contracts its own residual when ``0 < eta lambda_max(Theta_ii) / n_i < 2``; an average of such clients
    (weights summing to 1), scaled by the server's step s, is a non-expansion in the norm of Theta^-1 when moreover
    ``s (1 - (1 - x)^T) < 2`` for each eigenvalue x of ``eta Theta_ii / n_i``. Averaging with other clients may keep an
    unstable client in check, so ``stable = False`` means "not guaranteed", not "diverges".
    """

    stable: bool
    max_stable_learning_rate: float  # the least of the clients' bounds
    client_bounds: np.ndarray  # [N] largest stable step of each client that trains; inf for one that never does


def stability(
    largest_eigenvalue: np.ndarray,
    partition: Partition,
    local_steps: np.ndarray,
    trains: np.ndarray,
    learning_rate: np.ndarray,
    server_learning_rate: float,
) -> Stability:
    """Compares the largest step of a run with every training client's bound."""
    sizes = np.asarray(partition.sizes)
    bounds = np.full(len(sizes), np.inf)
    for i in np.flatnonzero(trains & (largest_eigenvalue > 0)):
        bounds[i] = _largest_x(server_learning_rate, int(local_steps[i])) * sizes[i] / largest_eigenvalue[i]
    bound = float(bounds.min(initial=np.inf))
    return Stability(bool(np.max(learning_rate, initial=0.0) < bound), bound, bounds)


def _largest_x(server: float, steps: int) -> float:
    """The supremum x* <= 2 such that ``server * (1 - (1 - x)^steps) < 2`` for all x in (0, x*)."""
    if server >= 2:
        return float(1 - (1 - 2 / server) ** (1 / steps))
    if server > 1 and steps % 2:
        return float(1 + (2 / server - 1) ** (1 / steps))
    return 2.0
