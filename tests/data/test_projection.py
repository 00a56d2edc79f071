"""Random projections: the law of their numbers, the secrecy of their seed, and what they do to a data set."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedtangent._src.data import load
from fedtangent._src.data.dataset import projected, projection_matrix


def test_projection_is_standard_normal_and_the_seed_s_alone() -> None:
    matrix = projection_matrix(300, 100, 7, scale="none")
    count = matrix.size
    assert abs(matrix.mean()) < 4 / math.sqrt(count)
    assert abs(matrix.var() - 1) < 4 * math.sqrt(2 / count)
    assert abs((matrix**4).mean() - 3) < 4 * math.sqrt(96 / count)  # of another law it is not 3
    np.testing.assert_array_equal(matrix, projection_matrix(300, 100, (7).to_bytes(32, "big"), scale="none"))
    assert abs(np.corrcoef(matrix.ravel(), projection_matrix(300, 100, 8).ravel())[0, 1]) < 4 / math.sqrt(count)
    np.testing.assert_allclose(projection_matrix(300, 100, 7), matrix / math.sqrt(300))
    np.testing.assert_allclose(projection_matrix(300, 100, 7, scale="lengths"), matrix / 10)


def test_every_example_is_projected_with_the_same_matrix_and_keeps_its_size() -> None:
    digits = load("digits")
    found = projected(digits, 16, 3)
    matrix = projection_matrix(64, 16, 3)
    for before, after in ((digits.x_train, found.x_train), (digits.x_test, found.x_test)):
        assert after.dtype == before.dtype and after.shape == (len(before), 16)
        np.testing.assert_allclose(after, before.reshape(-1, 64).astype(float) @ matrix, rtol=0, atol=1e-6)
    # a coordinate's mean square is kept on average over matrices: 40 of them, by their own standard error
    x = digits.x_train[:50].reshape(50, -1).astype(float)
    ratios = [np.mean((x @ projection_matrix(64, 16, s)) ** 2) / np.mean(x**2) for s in range(40)]
    assert abs(np.mean(ratios) - 1) < 4 * np.std(ratios, ddof=1) / math.sqrt(40) < 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((64, 65, 0), "dimension: got 65, must be a whole number from 1 to 64"),
        ((64, 0, 0), "dimension: got 0, must be a whole number from 1 to 64"),
        ((64, 2.5, 0), "dimension: got 2.5"),
        ((64, 8, -1), r"^seed: must be a whole number of at least 0, or bytes \(it is secret and not shown\)$"),
        ((64, 8, 0, "unit"), "scale: got 'unit', allowed are coordinates, lengths, none"),
    ],
)
def test_what_a_projection_refuses(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        projection_matrix(*arguments)


def test_whole_numbers_are_not_projected() -> None:
    digits = load("digits", num_train=4, num_test=4)
    whole = digits._replace(x_train=digits.x_train.astype(np.int32), x_test=digits.x_test.astype(np.int32))
    with pytest.raises(ValueError, match="dataset: got"):
        projected(whole, 8, 0)
