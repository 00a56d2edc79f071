"""neural-tangents' predictions against matrix exponentials and solves of SciPy, under jit and out of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from fedtangent._src.kernels.neural_tangents import nt, predict, stax

pytestmark = pytest.mark.versions  # neural-tangents' own numbers, not ours

NET = stax.serial(stax.Dense(8, 1.4, 0.3), stax.Relu(), stax.Dense(1, 1.4, 0.3))
RNG = np.random.default_rng(0)
X, X_TEST = jnp.asarray(RNG.normal(size=(6, 4))), jnp.asarray(RNG.normal(size=(3, 4)))
Y, F0, F0_TEST = (jnp.asarray(RNG.normal(size=(n, 2))) for n in (6, 6, 3))
TRAIN = np.asarray(NET[2](X, None, "ntk"))
TEST = np.asarray(NET[2](X_TEST, X, "ntk"))
TIMES = (0.0, 0.7, 30.0, 1e4)


def flow(t: float, train: np.ndarray = TRAIN) -> tuple[np.ndarray, np.ndarray]:
    """Training and test outputs of gradient flow on the mean of the squared errors, halved, after time ``t``."""
    decay = scipy.linalg.expm(-train * t / Y.size)
    residual = np.asarray(F0 - Y)
    return Y + decay @ residual, F0_TEST - TEST @ np.linalg.solve(train, (np.eye(len(Y)) - decay) @ residual)


@pytest.mark.parametrize("t", TIMES)
def test_gradient_descent_mse_is_the_matrix_exponential(t: float):
    ours = predict.gradient_descent_mse(jnp.asarray(TRAIN), Y)(t, F0, F0_TEST, jnp.asarray(TEST))
    for got, right in zip(ours, flow(t), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-9, atol=1e-9)
    if t > 0:
        wrong = flow(t, TRAIN + 1e-4 * np.eye(len(TRAIN)))
        assert np.abs(ours[1] - wrong[1]).max() > 1e-8


def test_gradient_descent_mse_with_learning_rate_ridge_and_infinite_time():
    fn = predict.gradient_descent_mse(jnp.asarray(TRAIN), Y, learning_rate=0.5)
    np.testing.assert_allclose(fn(2.0, F0, F0_TEST, jnp.asarray(TEST))[1], flow(1.0)[1], rtol=1e-9)
    ridge = predict.gradient_descent_mse(jnp.asarray(TRAIN), Y, diag_reg=0.1, diag_reg_absolute_scale=True)
    solved = F0_TEST + TEST @ np.linalg.solve(TRAIN + 0.1 * np.eye(len(TRAIN)), Y - F0)
    np.testing.assert_allclose(ridge(None, F0, F0_TEST, jnp.asarray(TEST))[1], solved, rtol=1e-9)


def test_gradient_descent_mse_of_a_kernel_that_is_traced():
    def loss(scale: Any, t: float | None) -> jax.Array:
        fn = predict.gradient_descent_mse(scale * jnp.asarray(TRAIN), Y)
        return jnp.sum(fn(t, F0, F0_TEST, scale * jnp.asarray(TEST))[1])

    for t in (0.7, None):
        compiled = jax.jit(loss, static_argnums=1)
        np.testing.assert_allclose(compiled(1.3, t), loss(1.3, t), rtol=1e-10)
        step = 1e-5
        difference = (loss(1.3 + step, t) - loss(1.3 - step, t)) / (2 * step)
        np.testing.assert_allclose(jax.jit(jax.grad(loss), static_argnums=1)(1.3, t), difference, rtol=1e-6, atol=1e-7)


def test_gradient_descent_mse_used_under_jit_first():
    fn = predict.gradient_descent_mse(jnp.asarray(TRAIN), Y)
    compiled = jax.jit(lambda t: fn(t, F0, F0_TEST, jnp.asarray(TEST))[1])(0.7)
    np.testing.assert_allclose(compiled, flow(0.7)[1], rtol=1e-9)
    np.testing.assert_allclose(fn(0.7, F0, F0_TEST, jnp.asarray(TEST))[1], compiled, rtol=1e-9)


def test_gradient_descent_of_the_squared_loss_is_the_matrix_exponential():
    fn = predict.gradient_descent(lambda f, y: 0.5 * jnp.mean((f - y) ** 2), jnp.asarray(TRAIN), Y)
    for t in (0.7, 30.0):
        for got, right in zip(fn(t, F0, F0_TEST, jnp.asarray(TEST)), flow(t), strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-6, atol=1e-6)  # the ODE solver's tolerance is 1e-8 a step


def test_gradient_descent_with_momentum_is_the_second_order_equation():
    momentum, t = 0.9, 8.0
    fn = predict.gradient_descent(lambda f, y: 0.5 * jnp.mean((f - y) ** 2), jnp.asarray(TRAIN), Y, 1.0, momentum)
    ours = fn(t, F0)
    # dt = sqrt(learning rate); q' = -(1 - momentum) / dt q - Theta (f - y) / size, f' = q (heavy ball, Qian 1999)
    zero, one = np.zeros_like(TRAIN), np.eye(len(TRAIN))
    system = np.block([[zero, one], [-TRAIN / Y.size, -(1 - momentum) * one]])
    right = Y + (scipy.linalg.expm(system * t) @ np.concatenate([F0 - Y, np.zeros_like(Y)]))[: len(Y)]
    np.testing.assert_allclose(ours, right, rtol=1e-6, atol=1e-6)
    assert np.abs(ours - flow(t)[0]).max() > 1e-3


def ensemble(t: float | None) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Mean and covariance at the test points of infinitely many networks, trained fully ("ntk") or last layer only."""

    def block(get: str, x1: jax.Array, x2: jax.Array) -> np.ndarray:
        return np.asarray(NET[2](x1, x2, get))

    results = {}
    prior, cross, prior_test = block("nngp", X, X), block("nngp", X_TEST, X), block("nngp", X_TEST, X_TEST)
    for get in ("nngp", "ntk"):
        train, test = block(get, X, X), block(get, X_TEST, X)
        decay = 0.0 if t is None else scipy.linalg.expm(-train * t / Y.size)
        operator = test @ np.linalg.solve(train, np.eye(len(train)) - decay)
        covariance = prior_test + operator @ prior @ operator.T - operator @ cross.T - cross @ operator.T
        results[get] = (operator @ np.asarray(Y), covariance)
    return results


@pytest.mark.parametrize("t", [0.7, 50.0, None])
@pytest.mark.slow
def test_gradient_descent_mse_ensemble_is_the_gaussian_process(t: float | None):
    fn = predict.gradient_descent_mse_ensemble(NET[2], X, Y, diag_reg=0.0)
    ours = fn(t=t, x_test=X_TEST, get=("nngp", "ntk"), compute_cov=True)
    right = ensemble(t)
    for get in ("nngp", "ntk"):
        np.testing.assert_allclose(getattr(ours, get).mean, right[get][0], rtol=1e-7, atol=1e-7)
        np.testing.assert_allclose(getattr(ours, get).covariance, right[get][1], rtol=1e-7, atol=1e-7)
    assert np.abs(ours.ntk.covariance - right["nngp"][1]).max() > 1e-4


@pytest.mark.slow
def test_an_ensemble_first_used_under_jit_can_be_used_eagerly():
    fn = predict.gradient_descent_mse_ensemble(NET[2], X, Y)
    for t in (0.7, None):
        compiled = jax.jit(lambda x, t=t: fn(t=t, x_test=x, get="ntk", compute_cov=True))(X_TEST)
        eager = fn(t=t, x_test=X_TEST, get="ntk", compute_cov=True)
        np.testing.assert_allclose(compiled.mean, eager.mean, rtol=1e-10)
        np.testing.assert_allclose(compiled.covariance, eager.covariance, rtol=1e-8, atol=1e-12)


def test_gp_inference_is_the_solve():
    kernels, cross = (NET[2](a, b, ("nngp", "ntk")) for a, b in ((X, None), (X_TEST, X)))
    test = NET[2](X_TEST, None, "nngp")
    posterior = predict.gp_inference(kernels, Y, diag_reg=0.0)("nngp", cross, test)
    solved = np.linalg.solve(np.asarray(kernels.nngp), np.concatenate([Y, np.asarray(cross.nngp).T], axis=1))
    np.testing.assert_allclose(posterior.mean, cross.nngp @ solved[:, :2], rtol=1e-9)
    np.testing.assert_allclose(posterior.covariance, test - cross.nngp @ solved[:, 2:], rtol=1e-7, atol=1e-9)
    assert not np.allclose(posterior.mean, TEST @ np.linalg.solve(TRAIN, Y))


def test_max_learning_rate_is_twice_the_size_over_the_largest_eigenvalue():
    right = 2 * Y.size / np.linalg.eigvalsh(TRAIN)[-1]
    np.testing.assert_allclose(predict.max_learning_rate(jnp.asarray(TRAIN), Y.size, eps=0.0), right, rtol=1e-10)
    np.testing.assert_allclose(predict.max_learning_rate(TRAIN, Y.size, momentum=0.5, eps=0.0), 1.5 * right, rtol=1e-10)


def test_prediction_with_all_outputs_of_a_finite_network():
    params = NET[0](jax.random.key(0), X.shape)[1]
    fn = jax.jit(nt.empirical_ntk_fn(NET[1], trace_axes=(), vmap_axes=0, implementation=3))
    train, test, y = fn(X, None, params), fn(X_TEST, X, params), Y[:, :1]
    f0, f0_test = NET[1](params, X), NET[1](params, X_TEST)
    ours = predict.gradient_descent_mse(train, y, trace_axes=())(0.7, f0, f0_test, test)[1]
    flat = np.asarray(train)[:, :, 0, 0]
    operator = np.asarray(test)[:, :, 0, 0] @ np.linalg.solve(flat, np.eye(6) - scipy.linalg.expm(-flat * 0.7 / y.size))
    np.testing.assert_allclose(ours, f0_test + operator @ (y - f0), rtol=1e-8)
