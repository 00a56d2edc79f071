"""Losses against NumPy; padding counts neither in the value nor in the gradient."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent.losses import LOSSES, cross_entropy, get_loss, squared_error
from fedtangent.types import Array

MASK = np.array([True, False, True, True, False])
REAL = np.flatnonzero(MASK)


def outputs() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(5, 3))


def regression() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(5, 3))


LABELS = np.array([2, 0, 1, 1, 2])


def squared_error_by_hand(f: np.ndarray, y: np.ndarray) -> float:
    return sum(0.5 * sum((a - b) ** 2 for a, b in zip(*row, strict=True)) for row in zip(f, y, strict=True)) / len(f)


def cross_entropy_by_hand(f: np.ndarray, y: np.ndarray) -> float:
    return float(np.mean([np.log(np.sum(np.exp(row))) - row[label] for row, label in zip(f, y, strict=True)]))


CASES = {
    "squared_error": (squared_error, squared_error_by_hand, regression()),
    "cross_entropy": (cross_entropy, cross_entropy_by_hand, LABELS),
}


def test_every_loss_has_a_case() -> None:
    assert set(CASES) == set(LOSSES)
    assert all(get_loss(name) is case[0] for name, case in CASES.items())


@pytest.mark.parametrize("name", CASES)
def test_mean_over_real_examples(name: str) -> None:
    loss, by_hand, targets = CASES[name]
    value = loss(jnp.asarray(outputs()), jnp.asarray(targets), jnp.asarray(MASK))
    assert value.shape == ()
    np.testing.assert_allclose(value, by_hand(outputs()[REAL], targets[REAL]), rtol=1e-14)
    assert abs(value - by_hand(outputs(), targets)) > 1e-3  # negative control: padding counted


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_that_of_the_real_examples(name: str) -> None:
    loss, by_hand, targets = CASES[name]
    gradient = np.asarray(jax.grad(loss)(jnp.asarray(outputs()), jnp.asarray(targets), jnp.asarray(MASK)))
    assert np.all(gradient[~MASK] == 0)
    for j, c in np.ndindex(5, 3):
        up, down = outputs(), outputs()
        up[j, c] += 1e-6
        down[j, c] -= 1e-6
        slope = (by_hand(up[REAL], targets[REAL]) - by_hand(down[REAL], targets[REAL])) / 2e-6
        assert abs(gradient[j, c] - slope) < 1e-9  # central differences: step^2 and eps / step


@pytest.mark.parametrize("name", CASES)
def test_nothing_real_is_zero_and_padding_may_be_nan(name: str) -> None:
    loss, _, targets = CASES[name]
    f = jnp.where(jnp.asarray(MASK)[:, None], jnp.asarray(outputs()), jnp.nan)
    assert np.isfinite(loss(f, jnp.asarray(targets), jnp.asarray(MASK)))
    assert float(loss(f, jnp.asarray(targets), jnp.zeros(5, bool))) == 0


def test_cross_entropy_of_confident_outputs_is_finite() -> None:
    f, labels, mask = jnp.array([[1e4, 0.0], [1e4, 0.0]]), jnp.array([0, 1]), jnp.ones(2, bool)
    assert float(cross_entropy(f, labels, mask)) == pytest.approx(5e3)
    assert np.all(np.isfinite(jax.grad(cross_entropy)(f, labels, mask)))


@pytest.mark.parametrize("loss", [squared_error, cross_entropy])
def test_float32_stays_float32(loss: Callable[..., Array]) -> None:
    targets = regression().astype(np.float32) if loss is squared_error else LABELS
    assert loss(jnp.asarray(outputs(), jnp.float32), jnp.asarray(targets), jnp.asarray(MASK)).dtype == jnp.float32


@pytest.mark.parametrize("shape", [(5, 1), (1, 3), (5,)])
def test_targets_of_another_shape_are_not_broadcast(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"targets: got .*, must be \(5, 3\), the shape of the outputs"):
        squared_error(jnp.asarray(outputs()), jnp.zeros(shape), jnp.asarray(MASK))


def test_unknown_loss() -> None:
    with pytest.raises(ValueError, match="loss: got 'hinge', allowed are squared_error, cross_entropy"):
        get_loss("hinge")
