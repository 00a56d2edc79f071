"""Corollary 4.1 of FE-2021, eq. (5): a bound of a probability, by number and against Gaussian draws."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent._src.theory.fed_ensemble.limit import corollary_4_1
from fedtangent._src.types import Gaussian

LIMIT = Gaussian(np.array([[1.0], [2.0], [0.0]]), np.diag([4.0, 0.25, 0.0]), 0.0)


def test_by_number():
    np.testing.assert_allclose(corollary_4_1(LIMIT, 5, 2.0), [4 / 20, 0.25 / 20, 0], rtol=1e-15)
    np.testing.assert_allclose(corollary_4_1(LIMIT, 5, [4.0, 0.1, 1.0]), [4 / 80, 1, 0], rtol=1e-15)


def test_it_bounds_what_independent_models_do():
    rng, models, epsilon = np.random.default_rng(0), 4, 1.2
    draws = LIMIT.mean.T + rng.standard_normal((100_000, models, 3)) * np.sqrt(np.diag(LIMIT.cov))
    often = np.mean(np.abs(draws.mean(axis=1) - LIMIT.mean[:, 0]) >= epsilon, axis=0)
    bound = corollary_4_1(LIMIT, models, epsilon)
    assert np.all(often <= bound) and often[0] > 0.3 * bound[0]
    assert often[0] > corollary_4_1(LIMIT, models**2, epsilon)[0]


def test_refuses():
    for epsilon in (0.0, [1.0, 1.0], [1.0, 1.0, -1.0]):
        with pytest.raises(ValueError, match="epsilon: got shape"):
            corollary_4_1(LIMIT, 2, epsilon)
    with pytest.raises(ValueError, match="num_models: got 0"):
        corollary_4_1(LIMIT, 0, 1.0)
