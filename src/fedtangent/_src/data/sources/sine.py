"""The sine example of the Fed-ensemble paper (IEEE TASE 2024, section V-A), which needs no files.

User i holds ``y = a_i sin(2 pi x) + eps`` with ``a_i ~ N(1, 0.2^2)``, ``eps ~ N(0, 0.2^2)`` at points uniform in [-1,
1]; with ``gap``, uniform in [-1, -0.5] and [0.5, 1]. The test set is ``sin(2 pi x)``, without noise, on an even grid of
[-1, 1]. ``x`` is [n, 1] and ``y`` [n, 1].
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from fedtangent._src import checks
from fedtangent._src.data.dataset import Dataset, DatasetEntry, SourceInfo
from fedtangent._src.data.partition.drawn import generator


@dataclasses.dataclass(frozen=True)
class SineOptions:
    """Options of the data set ``sine``: numbers of users and points, the gap in the training inputs, and the dtype."""

    num_users: int = 50
    """Number of users, each with another amplitude."""
    points_per_user: int = 2
    """Training points of each user."""
    gap: bool = False
    """No points between -0.5 and 0.5 (section V-B, Fig. 2)."""
    test_points: int = 200
    """Points of the test set, an even grid of [-1, 1]."""
    dtype: str = "float64"
    """Dtype of inputs and targets: float32 or float64."""


def _load(options: SineOptions, data_dir: Path | None, seed: int) -> Dataset:
    """Draws noisy values of a sine function, whose amplitude differs from user to user; ``data_dir`` is unused."""
    rng = generator(seed)
    num_users = checks.whole("num_users", options.num_users)
    points = checks.whole("points_per_user", options.points_per_user)
    test_points = checks.whole("test_points", options.test_points, 2)
    gap, dtype = checks.flag("gap", options.gap), checks.dtype(options.dtype, "float32", "float64")
    amplitude = rng.normal(1.0, 0.2, (num_users, 1))
    x = rng.uniform(-1.0, 1.0, (num_users, points))
    if gap:  # the halves of [-1, 1], shrunk by two and moved outwards: uniform again
        x = np.copysign(0.5 + 0.5 * np.abs(x), x)
    y = amplitude * np.sin(2 * np.pi * x) + rng.normal(0.0, 0.2, (num_users, points))
    grid = np.linspace(-1.0, 1.0, test_points)[:, None]
    return Dataset(
        name="sine",
        x_train=x.reshape(-1, 1).astype(dtype),
        y_train=y.reshape(-1, 1).astype(dtype),
        x_test=grid.astype(dtype),
        y_test=np.sin(2 * np.pi * grid).astype(dtype),
        num_classes=0,
        user_train=np.repeat(np.arange(num_users, dtype=np.int32), points),
        info=SourceInfo("Fed-ensemble, IEEE TASE 2024, section V-A", "none needed", "generated"),
    )


ENTRIES = (
    DatasetEntry(
        "sine",
        "noisy sine functions, 50 users of 2 points, generated",
        _load,
        SineOptions,
        ("shi2024",),
        partition="by_user",
        is_regression=True,
    ),
)
