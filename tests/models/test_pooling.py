"""``max_pool`` is flax's over windows that do not overlap, ties and both modes of differentiation included."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.models import max_pool


def pulled(pool, x):
    """What the pooling returns, and the gradient by ``x`` of a weighted sum of it."""
    value, pull = jax.vjp(pool, x)
    return value, pull(jnp.arange(1.0, value.size + 1).reshape(value.shape))[0]


@pytest.mark.parametrize(("shape", "window"), [((2, 6, 4, 3), (2, 2)), ((2, 7, 9, 3), (3, 2)), ((1, 3, 3, 2), (1, 1))])
def test_values_and_gradients_are_flaxs(shape, window):
    x = np.round(2 * np.random.default_rng(0).standard_normal(shape))  # whole numbers: many ties
    pools = (lambda x: max_pool(x, window), lambda x: nn.max_pool(x, window, strides=window))
    outputs, gradients = [], []
    for pool in pools:
        value, gradient = jax.jit(lambda x, pool=pool: pulled(pool, x))(x)
        outputs.append(value)
        gradients.append(gradient)
    np.testing.assert_array_equal(*outputs)
    np.testing.assert_array_equal(*gradients)
    if window == (2, 2):  # negative control: the last of equal entries
        backwards = jax.jit(lambda x: pulled(lambda x: max_pool(x[:, ::-1, ::-1], window)[:, ::-1, ::-1], x)[1])(x)
        assert np.any(np.asarray(backwards) != gradients[0])


def test_forward_mode_and_vmap():
    x, step = np.random.default_rng(0).standard_normal((3, 2, 4, 4, 2)), 1e-6
    one = np.asarray(jax.jit(jax.vmap(lambda x, t: jax.jvp(max_pool, (x,), (t,))[1]))(x, np.cos(x)))
    pool = jax.jit(jax.vmap(max_pool))
    numeric = (np.asarray(pool(x + step * np.cos(x))) - pool(x - step * np.cos(x))) / (2 * step)
    np.testing.assert_allclose(one, numeric, rtol=0, atol=1e-8)
    assert np.abs(one - pool(np.cos(x))).max() > 0.01  # negative control: the tangent's own maximum


def test_bad_input():
    with pytest.raises(ValueError, match="must have the axes"):
        max_pool(jnp.zeros((2, 4, 4)))
    with pytest.raises(ValueError, match="with a product of at most 127"):
        max_pool(jnp.zeros((2, 40, 40, 1)), (20, 20))
