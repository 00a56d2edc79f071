"""The data of DeepLin's figures, in the principal directions of their inputs, where a loss is a sum over modes.

Inputs are divided by their lengths: the paper does not say how it scales them, and at pixels in [0, 1] its rate is
above the stability limit of most of its settings. Targets are one-hot, of which it says nothing either. Bases of the
row space change neither inner products nor the law of Gaussian first weights, so a run in ``rank(X)`` coordinates is
the run in d of them; in those of the singular value decomposition ``X'X`` is diagonal, and what a linear model ``M``
loses beyond least squares is ``1/2 |S (M - W*)|^2``, a sum of squares in which nothing cancels.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedtangent import data
from fedtangent.data.dataset import Dataset


class Problem(NamedTuple):
    """Examples in principal directions, float64."""

    x: np.ndarray  # [n, r], X'X diagonal
    y: np.ndarray  # [n, C]
    labels: np.ndarray  # [n]
    singular: np.ndarray  # [r], falling
    best: np.ndarray  # [r, C], W*: least squares
    rank: int  # of all inputs; r is less where directions are left out
    dimension: int  # d of the inputs as they come

    @property
    def floor(self) -> float:
        """Loss an example of least squares: labels are no linear functions of the inputs."""
        return float(np.sum((self.x @ self.best - self.y) ** 2) / (2 * len(self.y)))

    def excess(self, models: Any) -> np.ndarray:
        """Loss an example, less ``floor``, of models [.., r, C]: [..]; not finite where a model has diverged."""
        with np.errstate(over="ignore", invalid="ignore"):
            away = self.singular[:, None] * (np.asarray(models, np.float64) - self.best)
            return np.asarray(np.sum(away**2, axis=(-2, -1)) / (2 * len(self.y)))


def problem_of(loaded: Dataset, directions: int = 0, centred: bool = False) -> Problem:
    """Of a data set's training examples, in the first ``directions`` of their row space; 0: in all, which is exact.

    Raises ``ValueError`` for more directions than the rank.
    """
    flat = loaded.x_train.reshape(len(loaded.x_train), -1).astype(np.float64)
    lengths = np.linalg.norm(flat, axis=1, keepdims=True)
    flat /= np.where(lengths > 0, lengths, 1.0)
    basis = principal_directions(flat)
    rank = basis.shape[1]
    if directions > rank:
        raise ValueError(f"directions: got {directions}, must be at most {rank}, the rank of the inputs")
    x = flat @ basis[:, : directions or rank]
    y = data.classification_targets(loaded.y_train, loaded.num_classes, centred)
    singular = np.linalg.norm(x, axis=0)
    return Problem(x, y, loaded.y_train, singular, x.T @ y / singular[:, None] ** 2, rank, flat.shape[1])


def principal_directions(x: np.ndarray) -> np.ndarray:
    """Right singular vectors of x [n, d] as columns [d, r], by the triangle of a QR decomposition: no n x n matrix."""
    _, singular, right = np.linalg.svd(np.linalg.qr(x, mode="r"), full_matrices=False)
    known = singular > max(x.shape) * np.finfo(float).eps * singular[0]
    return np.asarray(right[known].T)


@functools.lru_cache(maxsize=2)
def load(dataset: str, folder: Path | None, seed: int, num_train: int, directions: int, centred: bool) -> Problem:
    """The problem of a data set by name; ``num_train`` 0: all."""
    given = {"num_train": num_train} if num_train else {}
    return problem_of(data.load(dataset, folder, seed, **given), directions, centred)
