"""Ages of Fed-ensemble carried out client by client: what the expansions of FE-2021 section 9.2 are compared with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.linalg import expm

from fedtangent.theory.fed_ensemble.second_order import Age, age_operators
from fedtangent.types import Cohort, Partition


class Toy(NamedTuple):
    """A random federation: kernel, clients of unequal sizes and steps, and the models that each trains in an age."""

    theta: np.ndarray  # [n, n]
    rows: tuple[np.ndarray, ...]  # of each client
    model: np.ndarray  # [K, N], which model client i trains in round r
    steps: np.ndarray  # [N]

    @property
    def partition(self) -> Partition:
        """The clients' rows as the theory takes them."""
        offsets = np.cumsum([0] + [len(r) for r in self.rows]).astype(np.int32)
        return Partition(np.concatenate(self.rows).astype(np.int32), offsets)

    @property
    def cohorts(self) -> Cohort:
        """All clients in every round, weighted by examples."""
        sizes = np.array([len(r) for r in self.rows], float)
        client = np.broadcast_to(np.arange(len(self.rows)), self.model.shape)
        return Cohort(client, self.model, np.broadcast_to(sizes, self.model.shape))  # type: ignore[arg-type]

    def age(self, rate: float) -> Age:
        """The theory's operators of model 0."""
        return age_operators(self.theta, self.partition, self.cohorts, self.steps, rate)

    def true_age(self, rate: float, dynamics: str) -> np.ndarray:
        """What one age does to model 0's residual, [n, n], client by client: no expansion, nothing of the theory's."""
        n = len(self.theta)
        product = np.eye(n)
        for models in self.model:
            mine = [i for i, k in enumerate(models) if k == 0]
            total = sum(len(self.rows[i]) for i in mine)
            round_ = np.zeros((n, n)) if mine else np.eye(n)
            for i in mine:
                gram = np.zeros((n, n))
                gram[:, self.rows[i]] = self.theta[:, self.rows[i]] / len(self.rows[i])
                tau = int(self.steps[i])
                if dynamics == "gradient_flow":
                    trained = expm(-rate * tau * gram)
                else:
                    trained = np.linalg.matrix_power(np.eye(n) - rate * gram, tau)
                round_ += len(self.rows[i]) / total * trained
            product = round_ @ product
        return product


def toy(seed: int, sizes: tuple[int, ...], num_models: int, num_features: int = 40) -> Toy:
    """A federation of ``sum(sizes)`` points with random features."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    features = rng.standard_normal((n, num_features)) / np.sqrt(num_features)
    rows = tuple(np.split(rng.permutation(n), np.cumsum(sizes)[:-1]))
    orders = np.array([rng.permutation(num_models) for _ in sizes])
    return Toy(features @ features.T, rows, orders.T, rng.integers(2, 6, len(sizes)))


def slope(steps: np.ndarray, errors: list[float]) -> float:
    """Least-squares slope of log error against log step."""
    return float(np.polyfit(np.log(steps), np.log(errors), 1)[0])
