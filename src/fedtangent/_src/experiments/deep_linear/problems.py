"""The data of DeepLin's figures, in the principal directions of their inputs, where a loss is a sum over modes.

Inputs are scaled to length 1: the paper does not say how it scales them, and for pixels in [0, 1] its rate is above the
stability limit of most of its settings. Targets are one-hot, which the paper does not say either. An orthonormal basis
of the row space of the inputs X changes neither inner products nor the distribution of Gaussian first weights. So
training in ``rank(X)`` coordinates has the same distribution as in all input dimensions. In the basis of the singular
value decomposition ``X'X`` is ``S^2`` with a diagonal S. The loss of a linear model ``M`` above the loss of the
least-squares model W* is then ``1/2 |S (M - W*)|^2``, a sum of squares without cancellation.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fedtangent as ft


class Problem(NamedTuple):
    """Linear regression on n examples with C outputs; inputs are in r principal directions, float64.

    Attributes:
        x: Inputs [n, r], with a diagonal ``x' x``.
        y: One-hot targets [n, C], minus 1 / C if centred.
        labels: Class of each example, [n].
        singular: Singular values of the inputs, largest first, [r].
        best: Least-squares model W* [r, C].
        rank: Rank of the inputs before directions are left out, so at least r.
        dimension: Dimension of the inputs as loaded.
    """

    x: np.ndarray
    y: np.ndarray
    labels: np.ndarray  # [n]
    singular: np.ndarray
    best: np.ndarray
    rank: int
    dimension: int

    @property
    def floor(self) -> float:
        """Loss per example of the least-squares model; it is not 0, as labels are no linear functions of inputs."""
        return float(np.sum((self.x @ self.best - self.y) ** 2) / (2 * len(self.y)))

    def excess(self, models: Any) -> np.ndarray:
        """Computes the loss per example above ``floor`` of each of ``models`` [.., r, C]; not finite if it diverged."""
        with np.errstate(over="ignore", invalid="ignore"):
            away = self.singular[:, None] * (np.asarray(models, np.float64) - self.best)
            return np.asarray(np.sum(away**2, axis=(-2, -1)) / (2 * len(self.y)))


def _problem_of(loaded: ft.data.Dataset, directions: int = 0, centred: bool = False) -> Problem:
    """Builds the regression problem of a loaded data set.

    It scales every input to length 1, then keeps ``directions`` principal directions of the inputs, 0 for all. With
    ``centred`` it subtracts 1 / C from the one-hot targets. Raises ``ValueError`` if ``directions`` is above the rank.
    """
    flat = loaded.x_train.reshape(len(loaded.x_train), -1).astype(np.float64)
    lengths = np.linalg.norm(flat, axis=1, keepdims=True)
    flat /= np.where(lengths > 0, lengths, 1.0)
    basis = _principal_directions(flat)
    rank = basis.shape[1]
    if directions > rank:
        raise ValueError(f"directions: got {directions}, must be at most {rank}, the rank of the inputs")
    x = flat @ basis[:, : directions or rank]
    y = ft.data.classification_targets(loaded.y_train, loaded.num_classes, centred)
    singular = np.linalg.norm(x, axis=0)
    return Problem(x, y, loaded.y_train, singular, x.T @ y / singular[:, None] ** 2, rank, flat.shape[1])


def _principal_directions(x: np.ndarray) -> np.ndarray:
    """Computes right singular vectors of x [n, d] as columns [d, r]; r is the rank of x to rounding.

    It starts with a QR decomposition, to avoid an n x n matrix.
    """
    _, singular, right = np.linalg.svd(np.linalg.qr(x, mode="r"), full_matrices=False)
    is_significant = singular > max(x.shape) * np.finfo(float).eps * singular[0]
    return np.asarray(right[is_significant].T)


@functools.lru_cache(maxsize=2)
def load(dataset: str, folder: Path | None, seed: int, num_train: int, directions: int, centred: bool) -> Problem:
    """Loads a data set by name, scales every input to length 1, and builds its problem in principal directions.

    It keeps the last two problems in memory.

    Args:
        dataset: Name of the data set.
        folder: Folder with original files.
        seed: Seed of the data set, if its examples are drawn at random.
        num_train: Number of training examples; 0 for all.
        directions: Number of principal directions of the inputs that are kept; 0 keeps all.
        centred: Whether 1 / C is subtracted from the one-hot targets.

    Raises:
        ValueError: ``directions`` is above the rank of the inputs, or the data set cannot be loaded.
    """
    options = {"num_train": num_train} if num_train else {}
    return _problem_of(ft.data.load(dataset, folder, seed, **options), directions, centred)
