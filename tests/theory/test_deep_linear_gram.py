"""Eq. (14) and (15) of DeepLin: operators beside Jacobians and Kronecker products, and the ends of the spectrum."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedtangent._src.theory.deep_linear import gram


def weights_of(seed: int, *sizes: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((b, a)) for a, b in itertools.pairwise(sizes)]


def jacobian(weights: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    """Of all outputs [n C] by all weights, by differences: the network is linear in each layer."""
    scale = (weights[0].shape[0] ** (len(weights) - 1) * weights[-1].shape[0]) ** -0.5
    columns = []
    for i, w in enumerate(weights):
        for place in np.ndindex(*w.shape):
            one = np.zeros_like(w)
            one[place] = 1.0
            product = np.eye(x.shape[1])
            for layer in [*weights[:i], one, *weights[i + 1 :]]:
                product = layer @ product
            columns.append(scale * (x @ product.T).ravel())
    return np.stack(columns, axis=1)


def test_it_is_the_tangent_kernel_and_between_two_networks_their_product():
    x, weights = np.random.default_rng(1).standard_normal((7, 4)), weights_of(0, 4, 6, 6, 3)
    local = [w + 0.1 * other for w, other in zip(weights, weights_of(1, 4, 6, 6, 3), strict=True)]
    of, own = gram.products(weights, x), gram.products(local, x[:3])
    both = jacobian(weights, x), jacobian(local, x[:3])
    np.testing.assert_allclose(gram.dense(of), both[0] @ both[0].T, atol=1e-12)
    np.testing.assert_allclose(gram.dense(of, own), both[0] @ both[1].T, atol=1e-12)
    residuals = np.random.default_rng(2).standard_normal((3, 3))
    expected = (both[0] @ both[1].T @ residuals.ravel()).reshape(7, 3)
    np.testing.assert_allclose(gram.applied(of, residuals, own), expected, atol=1e-12)
    assert not np.allclose(gram.applied(of, np.pad(residuals, ((0, 4), (0, 0)))), expected, atol=1e-2)


@pytest.mark.parametrize("sizes", [(4, 8, 8, 3), (40, 60, 60, 10)])
def test_the_ends_of_the_spectrum_on_the_range_of_the_inputs(sizes):
    x = np.random.default_rng(3).standard_normal((70, sizes[0])) * np.logspace(0, -2, sizes[0])
    x[:, -1] = x[:, 0]  # a rank below d
    weights = weights_of(4, *sizes)
    least, largest = gram.spectrum(weights, x)
    values = np.linalg.eigvalsh(gram.dense(gram.products(weights, x)))
    inside = values[-(sizes[0] - 1) * sizes[-1] :]
    assert least == pytest.approx(inside[0], rel=1e-6)
    assert largest == pytest.approx(inside[-1], rel=1e-9)
    assert abs(values[-(sizes[0] - 1) * sizes[-1] - 1]) < 1e-9 * largest  # beyond the range there is nothing
    assert abs(inside[1] / inside[0] - 1) > 1e-3  # the next one is told apart


@pytest.mark.parametrize(
    ("weights", "x", "message"),
    [
        ([], np.ones((2, 3)), "weights: got none"),
        (None, np.ones((2, 3)), "weights: got None, must be a list"),
        (np.ones((2, 2, 3)), np.ones((2, 3)), "weights: got array"),
        ([np.ones((0, 3)), np.ones((2, 0))], np.ones((2, 3)), r"weights: got shape \(0, 3\) of layer 1"),
        ([np.ones((2, 4))], np.ones((2, 3)), r"weights: got shape \(2, 4\) of layer 1, must be \[fan_out, 3\]"),
        ([np.ones((2, 3))], np.ones(3), r"x: got shape \(3,\), must be \[n, d\]"),
        ([np.full((2, 3), np.nan)], np.ones((2, 3)), "weights: got nan"),
    ],
)
def test_bad_input_is_refused(weights, x, message):
    for made in (gram.products, gram.spectrum):
        with pytest.raises(ValueError, match=message):
            made(weights, x)


def test_a_spectrum_of_no_inputs_is_refused():
    with pytest.raises(ValueError, match="x: got zeros only"):
        gram.spectrum([np.ones((2, 3))], np.zeros((4, 3)))


@pytest.mark.parametrize("sizes", [(4, 2, 2, 3), (40, 2, 2, 10)])
def test_a_network_narrower_than_both_its_ends_has_eigenvalue_0(sizes):
    """Dense and by Lanczos; of the width of one end it has none."""
    x, outputs = np.random.default_rng(6).standard_normal((50, sizes[0])), sizes[-1]
    least, largest = gram.spectrum(weights_of(5, *sizes), x)
    values = np.linalg.eigvalsh(gram.dense(gram.products(weights_of(5, *sizes), x)))[-outputs * sizes[0] :]
    assert least == 0 and abs(values[0]) < 1e-12 * values[-1]
    assert largest == pytest.approx(values[-1], rel=1e-9)
    assert gram.spectrum(weights_of(5, sizes[0], *[outputs] * 2, outputs), x)[0] > 0
