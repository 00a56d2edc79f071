"""Gaussian projection of inputs, by a seed that the clients share and the server does not know (CP-NTK-FL).

Data are projected once, before a run, training and test examples alike: a client of Yue et al. (ICML 2022, section 4.2)
computes on ``Z = X P`` only.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Num

from fedtangent._src import checks
from fedtangent._src.data.dataset import VECTOR, Dataset

SCALES = ("coordinates", "lengths", "none")


def projection_matrix(
    input_size: int, dimension: int, seed: int | bytes, scale: str = "coordinates", dtype: type = np.float64
) -> Float[np.ndarray, "input_size dimension"]:
    """Draws P [input_size, dimension] with i.i.d. Gaussian entries (Yue et al., ICML 2022, section 4.2).

    Args:
        input_size: Numbers of an example.
        dimension: Numbers of a projected example, at most ``input_size``.
        seed: A whole number of any size, not negative, or the bytes of one (from a key server). The entries are NumPy's
            Philox stream of this seed, drawn in float64.
        scale: ``"none"``: entries N(0, 1), as in the paper, which makes inputs about ``sqrt(dimension)`` times as long.
            ``"coordinates"``: divided by ``sqrt(input_size)``, so that a projected coordinate has on average the mean
            square of an original one, and the same step sizes fit. ``"lengths"``: divided by ``sqrt(dimension)``, which
            keeps lengths and inner products on average (Johnson and Lindenstrauss).
        dtype: Type of the result.

    Raises:
        ValueError: The dimension is below 1 or above ``input_size``, the seed is negative, or the scale is unknown.
    """
    checks.whole("dimension", dimension, 1, input_size)
    checks.choice("scale", scale, SCALES)
    entropy = int.from_bytes(seed, "big") if isinstance(seed, bytes) else seed
    if not isinstance(entropy, int | np.integer) or entropy < 0:  # the seed is a secret: it is not shown
        raise ValueError("seed: must be a whole number of at least 0, or bytes (it is secret and not shown)")
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(int(entropy))))
    factor = {"coordinates": input_size, "lengths": dimension, "none": 1}[scale] ** -0.5
    return (factor * generator.standard_normal((input_size, dimension))).astype(dtype)


def projected(dataset: Dataset, dimension: int, seed: int | bytes, scale: str = "coordinates") -> Dataset:
    """Returns ``dataset`` with every example flattened and projected to ``dimension`` numbers, training and test alike.

    Inputs keep their dtype; the products are computed in float64.

    Args:
        dataset: Data with inputs of any shape.
        dimension: Numbers of a projected example.
        seed: Seed of the matrix, as in ``projection_matrix``.
        scale: Scale of the matrix, as in ``projection_matrix``.

    Raises:
        ValueError: As in ``projection_matrix``.
    """
    shape = dataset.x_train.shape[1:]
    matrix = projection_matrix(math.prod(shape), dimension, seed, scale)
    train, test = (_project(x, matrix) for x in (dataset.x_train, dataset.x_test))
    return dataset._replace(x_train=train, x_test=test, kind=VECTOR)


def _project(
    x: Num[np.ndarray, "n ..."], matrix: Float[np.ndarray, "input_size dimension"]
) -> Float[np.ndarray, "n dimension"]:
    flat = x.reshape(len(x), -1)
    rows = max(1, 2**24 // max(1, matrix.shape[0]))  # so that no float64 copy of a large data set is made
    parts = [flat[i : i + rows].astype(np.float64) @ matrix for i in range(0, len(flat), rows)]
    whole = np.concatenate(parts) if parts else np.zeros((0, matrix.shape[1]))
    return whole.astype(x.dtype)
