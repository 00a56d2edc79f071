"""The synthetic data of the Local-GD paper, section 5: Gaussian inputs, a truth of each node's own."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedtangent import data as datasets
from fedtangent.types import FederatedData, Partition

TRUTH, NOISE = 2.0, 0.2  # standard deviations of the truths' entries, and of the noise


class GaussianNodes(NamedTuple):
    """Examples of M nodes, N of each, node after node."""

    x: np.ndarray  # [M N, d] float64
    y: np.ndarray  # [M N]
    partition: Partition
    truths: np.ndarray  # [M, d], w_i*

    def federated(self) -> FederatedData:
        """On the device, float64."""
        return datasets.federated_data(self.x, self.y[:, None], self.partition, jnp.float64)


def regression(
    seed: int, num_nodes: int, held: int, dimension: int, spread: float = TRUTH, common: bool = False
) -> GaussianNodes:
    """``y_ij = x_ij' w_i* + z_ij``: x ~ N(0, 1), z ~ N(0, .04), w_i* ~ N(0, spread^2) of each node alone.

    With ``common`` these are added to one truth ~ N(0, 4) of all nodes, which the paper's have not.
    """
    rng = np.random.default_rng([seed, dimension])
    x = rng.standard_normal((num_nodes, held, dimension))
    truths = spread * rng.standard_normal((num_nodes, dimension))
    if common:
        truths = truths + TRUTH * rng.standard_normal(dimension)
    return _of(x, np.einsum("nhd,nd->nh", x, truths) + NOISE * rng.standard_normal((num_nodes, held)), truths)


def classification(seed: int, num_nodes: int, held: int, dimension: int, spread: float) -> GaussianNodes:
    """``y_ij = sign(x_ij' (w* + z_i))``: x, w* ~ N(0, 1), z_i ~ N(0, spread^2), whose size the paper does not give."""
    rng = np.random.default_rng([seed, dimension])
    x = rng.standard_normal((num_nodes, held, dimension))
    truths = rng.standard_normal(dimension) + spread * rng.standard_normal((num_nodes, dimension))
    return _of(x, np.where(np.einsum("nhd,nd->nh", x, truths) >= 0, 1.0, -1.0), truths)


def _of(x: np.ndarray, y: np.ndarray, truths: np.ndarray) -> GaussianNodes:
    nodes, held, dimension = x.shape
    held_by = Partition(np.arange(nodes * held, dtype=np.int32), held * np.arange(nodes + 1, dtype=np.int32))
    return GaussianNodes(x.reshape(-1, dimension), y.reshape(-1), held_by, truths)
