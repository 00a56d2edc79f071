"""Points, kernels and flows of them that tests and the processes that they start have in common."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedtangent._src import models
from fedtangent._src.data import partition
from fedtangent._src.kernels.large import LargeKernel, large_kernel
from fedtangent._src.theory.flow import Flow, Rule, federated_flow
from fedtangent._src.types import Cohort

N, M, C, CLIENTS, ROUNDS = 301, 37, 3, 10, 6
MODEL = models.mlp(20, C, (64, 64))


def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Training points [N, 20], test points [M, 20], targets [N, C]."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N + M, 20)).astype(np.float32)
    return x[:N], x[N:], np.eye(C)[rng.integers(0, C, N)]


def starts(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Initial functions at the training and the test points."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, 1, N, C)), rng.standard_normal((2, 1, M, C))


def built(points: Any, **options: Any) -> LargeKernel:
    """The large kernel of the points."""
    return large_kernel(MODEL.kernel, points[0], points[1], **options)


def flow_of(kernels: Any, y: np.ndarray, size: int = 3, num_models: int = 1, **rule: Any) -> Flow:
    """A flow with ``size`` of the clients in a round."""
    rng = np.random.default_rng(2)
    held = partition.dirichlet(np.argmax(y, axis=1), CLIENTS, 0.3, seed=0)
    client = np.stack([rng.permutation(CLIENTS)[:size] for _ in range(ROUNDS)])
    weight = np.asarray(held.sizes)[client].astype(float)
    cohort: Any = Cohort(client, rng.integers(0, num_models, client.shape), weight)
    whole = Rule(**{"local_steps": 3, "learning_rate": 0.2, **rule})
    return federated_flow(kernels, y, held, cohort, whole, num_models=num_models)
