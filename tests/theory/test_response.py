"""The local operator's eigenvalues against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import jax
import numpy as np
import pytest

from fedtangent._src.theory.flow.clients import response

X = [0.0, 1e-300, -1e-18, 1e-15, 1e-9, 1e-3, 0.3, 0.4999, 0.5, 0.75, 1.0, 1.25, 1.999]


@pytest.mark.parametrize("steps", [1, 2, 7, 60])
def test_is_the_geometric_sum(steps):
    exact = [float(sum((1 - Fraction(x)) ** s for s in range(steps))) for x in X]
    # step size 1 and one example, so that the eigenvalue is x itself
    found = np.asarray(response(np.array(X), np.float64(1.0), np.float64(1.0), np.int64(steps)))
    np.testing.assert_allclose(found, exact, rtol=1e-13)
    assert np.max(np.abs(found / exact - 1)) < np.max(
        np.abs(np.asarray(response(np.array(X), np.float64(1.0), np.float64(1.0), np.int64(steps + 1))) / exact - 1)
    )


def test_scales_with_step_and_examples():
    found = response(np.array([0.7]), np.float64(0.2), np.float64(4.0), np.int64(3))
    step = 0.2 / 4
    np.testing.assert_allclose(found, step * sum((1 - step * 0.7) ** s for s in range(3)), rtol=1e-14)


def test_derivative_is_finite_everywhere():
    def term(x: Fraction, s: int) -> Fraction:  # d/d eta of eta (1 - eta x)^s at eta = 1
        return (1 - x) ** s - (s * x * (1 - x) ** (s - 1) if s else 0)

    slope = jax.jacobian(lambda rate: response(np.array(X), rate, np.float64(1.0), np.int64(5)))(1.0)
    exact = [float(sum(term(Fraction(x), s) for s in range(5))) for x in X]
    # below 1/2 the difference of two terms of order T / x loses digits, which the factor x gives back
    np.testing.assert_allclose(slope, exact, rtol=1e-12, atol=1e-12)
