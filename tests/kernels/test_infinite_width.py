"""What ``analytic`` accepts, refuses and returns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent.kernels import analytic
from fedtangent.kernels.neural_tangents import stax
from fedtangent.types import Model

NET = stax.serial(stax.Dense(8, 1.3, 0.2), stax.Relu(), stax.Dense(1, 1.3, 0.2))
MODEL = Model("net", init=lambda key: NET[0](key, (-1, 3))[1], apply=NET[1], kernel=NET[2], output_size=1)
X1, X2 = jax.random.normal(jax.random.key(0), (5, 3)), jax.random.normal(jax.random.key(1), (4, 3))


def test_one_name_gives_the_block_and_several_a_named_tuple():
    both = analytic(MODEL, X1, X2)
    assert both.nngp.shape == both.ntk.shape == (5, 4)
    for get in ("nngp", "ntk"):
        np.testing.assert_array_equal(analytic(MODEL, X1, X2, get), getattr(both, get))
        np.testing.assert_array_equal(getattr(analytic(MODEL, X1, X2, (get,)), get), getattr(both, get))
    assert not np.allclose(both.nngp, both.ntk)


def test_second_inputs_default_to_the_first():
    kernels = analytic(MODEL, X1)
    assert kernels.ntk.shape == (5, 5)
    np.testing.assert_allclose(kernels.ntk, kernels.ntk.T, rtol=1e-12)
    # a ReLU kernel of a point with itself is exact only to the square root of a rounding error
    np.testing.assert_allclose(kernels.ntk, analytic(MODEL, X1, X1 + 0.0).ntk, rtol=1e-7)


def test_it_can_be_compiled():
    compiled = jax.jit(lambda x1, x2: analytic(MODEL, x1, x2, "ntk"))(X1, X2)
    np.testing.assert_allclose(compiled, analytic(MODEL, X1, X2, "ntk"), rtol=1e-12)


def test_a_model_without_an_analytic_kernel_is_refused():
    with pytest.raises(ValueError, match="'resnet' has no analytic kernel"):
        analytic(MODEL._replace(name="resnet", kernel=None), X1)


@pytest.mark.parametrize("get", ["ntkk", "", (), ("nngp", "cov"), ("ntk", "ntk"), None, 3])
def test_a_wrong_get_is_refused(get: Any):
    with pytest.raises(ValueError, match=r"get: got .* allowed are 'nngp', 'ntk'"):
        analytic(MODEL, X1, X2, get)


@pytest.mark.parametrize(("shape1", "shape2"), [((5, 3), (4, 2)), ((5, 3), (3,)), ((3,), (4, 3)), ((5, 2, 3), (4, 3))])
def test_shapes_that_do_not_fit_are_both_named(shape1: tuple[int, ...], shape2: tuple[int, ...]):
    with pytest.raises(ValueError) as error:
        analytic(MODEL, jnp.zeros(shape1), jnp.zeros(shape2))
    assert str(shape1) in str(error.value) and str(shape2) in str(error.value)
