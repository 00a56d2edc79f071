"""Data sets that need no files: scikit-learn's digits, and the sine toy of the Fed-ensemble paper."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedtangent import checks
from fedtangent.data.dataset import Dataset, SourceInfo, as_float, first


def load_digits(
    seed: int = 0,
    test_fraction: float = 0.2,
    flatten: bool = True,
    num_train: int | None = None,
    num_test: int | None = None,
    dtype: Any = "float64",
) -> Dataset:
    """The 1797 8 x 8 images bundled with scikit-learn, pixels in [0, 1], split by class.

    Args:
        seed: of the split and of the order of the examples, both random.
        test_fraction: share of the test set, in (0, 1); each class is divided in this proportion (to within one).
        flatten: x is [n, 64] rather than [n, 8, 8, 1].
        num_train, num_test: take the first so many examples only.
        dtype: of x, float32 or float64. Labels are int32.

    Raises:
        ValueError: an option out of range.
    """
    rng = np.random.Generator(np.random.PCG64(checks.whole("seed", seed, 0)))
    checks.number("test_fraction", test_fraction, above=0, below=1)
    flatten, dtype = checks.flag("flatten", flatten), as_float(dtype)
    from sklearn.datasets import load_digits as bundled

    images, labels = bundled(return_X_y=True)
    x = (images / 16).astype(dtype)
    x = x if flatten else x.reshape(-1, 8, 8, 1)
    train, test = _stratified(rng, labels, test_fraction)
    x_train, y_train = first("num_train", num_train, x[train], labels[train].astype(np.int32))
    x_test, y_test = first("num_test", num_test, x[test], labels[test].astype(np.int32))
    info = SourceInfo(
        "UCI optical recognition of handwritten digits, as bundled with scikit-learn", "CC BY 4.0", "embedded"
    )
    return Dataset("digits", x_train, y_train, x_test, y_test, 10, None, info)


def load_sine(
    seed: int = 0,
    num_clients: int = 50,
    points_per_client: int = 2,
    gap: bool = False,
    test_points: int = 200,
    dtype: Any = "float64",
) -> Dataset:
    """The toy of Fed-ensemble (IEEE TASE 2024), section V-A: noisy sine functions, one amplitude for each client.

    Client i holds ``y = a_i sin(2 pi x) + eps`` with ``a_i ~ N(1, 0.2^2)``, ``eps ~ N(0, 0.2^2)`` at points uniform in
    [-1, 1]; with ``gap``, uniform in [-1, -0.5] and [0.5, 1] (section V-B, Fig. 2). The test set is the
    expectation ``sin(2 pi x)``, without noise, on an even grid of [-1, 1].

    Args:
        seed: of amplitudes, points and noise.
        num_clients, points_per_client, gap: as above. ``user_train`` names each example's client.
        test_points: points of the grid, at least 2.
        dtype: of x [n, 1] and y [n, 1], float32 or float64.

    Raises:
        ValueError: an option out of range.
    """
    rng = np.random.Generator(np.random.PCG64(checks.whole("seed", seed, 0)))
    num_clients = checks.whole("num_clients", num_clients, 1)
    points = checks.whole("points_per_client", points_per_client, 1)
    test_points = checks.whole("test_points", test_points, 2)
    gap, dtype = checks.flag("gap", gap), as_float(dtype)
    amplitude = rng.normal(1.0, 0.2, (num_clients, 1))
    x = rng.uniform(-1.0, 1.0, (num_clients, points))
    if gap:  # the halves of [-1, 1], shrunk by two and moved outwards: uniform again
        x = np.copysign(0.5 + 0.5 * np.abs(x), x)
    y = amplitude * np.sin(2 * np.pi * x) + rng.normal(0.0, 0.2, (num_clients, points))
    grid = np.linspace(-1.0, 1.0, test_points)[:, None]
    return Dataset(
        name="sine",
        x_train=x.reshape(-1, 1).astype(dtype),
        y_train=y.reshape(-1, 1).astype(dtype),
        x_test=grid.astype(dtype),
        y_test=np.sin(2 * np.pi * grid).astype(dtype),
        num_classes=0,
        user_train=np.repeat(np.arange(num_clients, dtype=np.int32), points),
        info=SourceInfo("Fed-ensemble, IEEE TASE 2024, section V-A", "none needed", "generated"),
    )


def _stratified(rng: np.random.Generator, labels: np.ndarray, test_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Indices of a train and a test set, each class divided in the same proportion, each set in random order."""
    train, test = [], []
    for c in np.unique(labels):
        own = rng.permutation(np.flatnonzero(labels == c))
        cut = min(max(round(test_fraction * len(own)), 1), len(own) - 1)
        test.append(own[:cut])
        train.append(own[cut:])
    return rng.permutation(np.concatenate(train)), rng.permutation(np.concatenate(test))
