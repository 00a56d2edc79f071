"""Kernel blocks and the jittered Cholesky factor."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.kernels.gram import SingularKernelError, analytic, jittered_cholesky, kernel_blocks
from fedtangent._src.kernels.neural_tangents import stax
from fedtangent._src.types import Model


class Kernels(NamedTuple):
    nngp: jax.Array
    ntk: jax.Array


def linear_kernel(x1, x2=None):
    product = x1 @ (x1 if x2 is None else x2).T
    return Kernels(product, 3 * product + 1)


def spectrum(values) -> np.ndarray:
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((len(values), len(values))))[0]
    matrix = rotation * np.array(values) @ rotation.T
    return 0.5 * (matrix + matrix.T)


@pytest.mark.parametrize("global_switch", [True, False])
def test_blocks_are_float64_and_in_place(global_switch):
    rng = np.random.default_rng(1)
    train, test = rng.standard_normal((6, 3)), rng.standard_normal((4, 3))
    with jax.enable_x64(global_switch):
        k = kernel_blocks(linear_kernel, train, test)
    np.testing.assert_allclose(k.nngp_train, train @ train.T, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(k.nngp_test_train, test @ train.T, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(k.nngp_test, test @ test.T, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(k.ntk_train, 3 * train @ train.T + 1, rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(k.ntk_test_train, 3 * test @ train.T + 1, rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(k.ntk_test, 3 * test @ test.T + 1, rtol=1e-14, atol=1e-14)
    for block in k:
        assert isinstance(block, np.ndarray) and block.dtype == np.float64
    np.testing.assert_array_equal(k.ntk_train, k.ntk_train.T)


@pytest.mark.parametrize(
    ("kernel", "train", "test", "message"),
    [
        (
            linear_kernel,
            np.ones((3, 2)),
            np.ones((3, 4)),
            r"got \(3, 2\) and \(3, 4\), must hold examples of one shape",
        ),
        (
            linear_kernel,
            np.ones((0, 2)),
            np.ones((3, 2)),
            r"x_train: got shape \(0, 2\), must hold at least one",
        ),
        (
            linear_kernel,
            np.ones((3, 2)),
            np.full((3, 2), np.inf),
            r"x_test: got inf at entry \(0, 0\).*must be finite",
        ),
        (
            lambda a, b: Kernels(a, a),
            np.ones((3, 2)),
            np.ones((3, 2)),
            r"returned nngp as float64 \(3, 2\), must be float64 \(3, 3\)",
        ),
        (
            lambda a, b: linear_kernel(a.astype(jnp.float32)),
            np.ones((3, 2)),
            np.ones((3, 2)),
            r"returned nngp as float32 \(3, 3\), must be float64",
        ),
        (
            lambda a, b: linear_kernel(a / 0),
            np.ones((3, 2)),
            np.ones((3, 2)),
            r"kernel_fn's nngp: got inf at entry \(0, 0\) of shape \(3, 3\), must be finite",
        ),
    ],
)
def test_blocks_refuse(kernel, train, test, message):
    with pytest.raises(ValueError, match=message):
        kernel_blocks(kernel, train, test)


def test_factor_without_jitter():
    theta = spectrum([1e-6, 1e-3, 1.0, 2.0])
    factor = jittered_cholesky(theta)
    assert factor.jitter == 0
    np.testing.assert_allclose(factor.lower @ factor.lower.T, theta, rtol=0, atol=1e-15)
    np.testing.assert_array_equal(factor.lower, np.tril(factor.lower))


@pytest.mark.parametrize("smallest", [0.0, 1e-16, -1e-15])
def test_least_sufficient_jitter(smallest):
    theta = spectrum([smallest, 0.5, 1.0, 2.0])
    factor = jittered_cholesky(theta)
    relative = factor.jitter / np.mean(np.diag(theta))
    assert 1e-13 < relative < 1e-11  # condition 1e13 is accepted, ten times worse is not
    np.testing.assert_allclose(factor.lower @ factor.lower.T, theta + factor.jitter * np.eye(4), rtol=0, atol=1e-15)
    with pytest.raises(SingularKernelError, match="singular"):
        jittered_cholesky(theta, max_relative_jitter=0.05 * relative)


def test_indefinite_is_refused_with_its_spectrum():
    with pytest.raises(
        SingularKernelError, match=r"lambda_min = -0\.1, lambda_max = 3; the largest jitter tried was 1.5e-0"
    ):
        jittered_cholesky(spectrum([-0.1, 1.0, 2.1, 3.0]), max_relative_jitter=1e-8)


@pytest.mark.parametrize(
    ("theta", "jitter", "message"),
    [
        (np.ones((2, 3)), 0.0, r"theta: got shape \(2, 3\), must be a square matrix"),
        (np.ones((0, 0)), 0.0, r"theta: got shape \(0, 0\), must be a square matrix"),
        (
            np.array([[1.0, np.nan], [np.nan, 1.0]]),
            0.0,
            r"theta: got nan at entry \(0, 1\) of shape \(2, 2\), must be finite",
        ),
        (
            np.array([[1.0, 0.5], [0.4, 1.0]]),
            0.0,
            r"theta: got a matrix up to 0\.1 off its transpose, must be symmetric",
        ),
        (np.eye(2), -1.0, r"max_relative_jitter: got -1\.0, must be at least 0 and finite"),
        (np.eye(2), np.nan, "max_relative_jitter: got nan, must be at least 0 and finite"),
    ],
)
def test_factor_refuses(theta, jitter, message):
    with pytest.raises(ValueError, match=message):
        jittered_cholesky(theta, jitter)


def test_kernels_of_ones_own_may_be_plain_pairs():
    x, x_test = np.arange(3.0)[:, None], np.arange(2.0)[:, None]

    def own(x1, x2=None):
        x2 = x1 if x2 is None else x2
        return x1 @ x2.T + 1, 2 * (x1 @ x2.T) + 1

    found = kernel_blocks(own, x, x_test)
    np.testing.assert_array_equal(found.nngp_train, x @ x.T + 1)
    np.testing.assert_array_equal(found.ntk_test_train, 2 * x_test @ x.T + 1)
    with pytest.raises(ValueError, match=r"kernel_fn: returned .*, must return the pair"):
        kernel_blocks(lambda x1, x2: x1, x, x_test)
    with pytest.raises(ValueError, match="kernel_fn: got 3, must be a function"):
        kernel_blocks(3, x, x_test)


# ---- analytic ----

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
    with pytest.raises(ValueError, match="model: got 'resnet', must have an analytic kernel"):
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
