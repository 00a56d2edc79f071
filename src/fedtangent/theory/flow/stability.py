"""Which step sizes let a federated kernel flow converge."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedtangent.theory.flow.clients import Clients
from fedtangent.theory.flow.rounds import Rounds
from fedtangent.theory.flow.rules import Rule
from fedtangent.types import Partition


class Stability(NamedTuple):
    """Sufficient condition for every round of FedAvg to be a non-expansion, whatever the cohort.

    Client i contracts its own residual when ``0 < eta (lambda_max(Theta_ii) / n_i + prox + decay) < 2`` (of each of its
    minibatches, where it has them); an average of such clients (weights summing to 1), scaled by the server's step s,
    is a non-expansion in the norm of Theta^-1 when moreover ``s (1 - (1 - x)^T) < 2`` for each eigenvalue x of
    ``eta Theta_ii / n_i``. Averaging with other clients may keep an unstable client in check, so ``stable = False``
    means "not guaranteed", not "diverges".
    """

    stable: bool
    max_stable_learning_rate: float  # the least of the clients' bounds
    client_bounds: np.ndarray  # [N] largest stable step of each client that trains; inf for one that never does


def stability(
    clients: Clients,
    partition: Partition,
    local_steps: np.ndarray,
    trains: np.ndarray,
    rounds: Rounds,
    rule: Rule,
) -> Stability:
    """Compares the largest step of a run with the bound of every client that ``trains`` [N]."""
    sizes, server = np.asarray(partition.sizes), float(np.max(rounds.server_rate))
    nu = float(rule.numbers.prox + rule.numbers.weight_decay)
    largest = float(np.max(rule.numbers.step_weights))
    bounds = np.full(len(sizes), np.inf)
    for i in np.flatnonzero(trains):
        stiffness = _stiffness(clients, sizes, rule, int(i))
        if stiffness + nu > 0:
            bounds[i] = _largest_x(rule, server, int(local_steps[i])) / (stiffness + nu) / largest
    bound = float(bounds.min(initial=np.inf))
    return Stability(bool(np.max(rounds.learning_rate, initial=0.0) < bound), bound, bounds)


def _stiffness(clients: Clients, sizes: np.ndarray, rule: Rule, i: int) -> float:
    """``lambda_max(Theta_ii) / n_i``, or the largest such number of client i's minibatches."""
    if not rule.kind.minibatches:
        return float(clients.largest_eigenvalue[i] / sizes[i])
    bucket, place = clients.buckets[clients.bucket_of[i]], clients.place_in_bucket[i]
    assert bucket.block is not None and bucket.shares is not None
    block, worst = np.asarray(bucket.block[place]), 0.0
    for share in np.asarray(bucket.shares[place]):
        root = np.sqrt(share)
        worst = max(worst, float(np.linalg.eigvalsh(root[:, None] * block * root)[-1]))
    return worst


def _largest_x(rule: Rule, server: float, steps: int) -> float:
    """The supremum x* such that ``server * (1 - (1 - x)^steps) < 2`` for all x in (0, x*), and x* <= 2 but for a flow.

    Where the steps are not all alike only a server that does not extrapolate is known to be safe.
    """
    if rule.kind.dynamics == "gradient_flow":
        return np.inf if server <= 2 else float(-np.log(1 - 2 / server) / steps)
    if rule.kind.minibatches or rule.kind.weighs_steps:
        return 2.0 if server <= 1 else 0.0
    if server >= 2:
        return float(1 - (1 - 2 / server) ** (1 / steps))
    if server > 1 and steps % 2:
        return float(1 + (2 / server - 1) ** (1 / steps))
    return 2.0
