"""Kernels and lemmas of NTK-FL's two-layer network against plain NumPy, Monte Carlo and brute force."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.models.two_layer import output_signs, two_layer_relu
from fedtangent._src.theory.ntk_fl import lemmas as theory

from .two_layer_reference import Network, draw, sphere

SIGMA = np.array([[2.0, 0.6, 0.0], [0.6, 0.5, 0.1], [0.0, 0.1, 1.0]])


def model_and_network(width: int, dim: int, seed: int = 0):
    model = two_layer_relu(dim, width, seed=seed, dtype=jnp.float64)
    params = jax.jit(model.init)(jax.random.key(seed))
    return model, params, Network(np.asarray(params["v"]), output_signs(width, seed))


def test_the_model_is_eq_12():
    model, params, net = model_and_network(50, 4)
    x = sphere(1, 7, 4)
    np.testing.assert_allclose(jax.jit(model.apply)(params, jnp.asarray(x))[:, 0], net.outputs(x), rtol=1e-13)
    assert set(net.c) == {-1.0, 1.0}


def test_the_kernel_below_eq_12_needs_the_factor_root_n():
    model, params, net = model_and_network(300, 5)
    x = sphere(2, 9, 5)
    j = net.jacobian(x)
    found = theory.empirical_kernel(x, net.v)
    np.testing.assert_allclose(found, j @ j.T, rtol=1e-12, atol=1e-15)
    traced = jax.jit(jax.jacrev(lambda p: model.apply(p, jnp.asarray(x))[:, 0]))(params)["v"].reshape(9, -1)
    np.testing.assert_allclose(traced @ traced.T, found, rtol=1e-12, atol=1e-15)
    with_one_over_n = j @ j.T / 300  # f = 1/n sum: the Jacobian is n^-1/2 times this one
    assert np.linalg.norm(with_one_over_n - found) > 0.99 * np.linalg.norm(found)


def monte_carlo(x: np.ndarray, sigma: np.ndarray, draws: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Mean and standard error of both kernels over Gaussian neurons."""
    v = np.random.default_rng(0).multivariate_normal(np.zeros(len(sigma)), sigma, draws)
    z = v @ x.T
    found = {}
    for name, a in (("nngp", np.maximum(z, 0)), ("ntk", (z >= 0).astype(float))):
        each = a[:, :, None] * a[:, None, :]
        error = each.std(axis=0, ddof=1) / np.sqrt(draws)
        gram = x @ x.T if name == "ntk" else np.ones((len(x), len(x)))
        found[name] = gram * each.mean(axis=0), np.abs(gram) * error
    return found


def test_eq_13_against_monte_carlo():
    x = sphere(3, 6, 3)
    model = two_layer_relu(3, 8, covariance=SIGMA, dtype=jnp.float64)
    blocks = jax.jit(model.kernel)(jnp.asarray(x))
    np.testing.assert_allclose(theory.expected_kernel(x, SIGMA), blocks.ntk, rtol=1e-13, atol=1e-15)
    found = monte_carlo(x, SIGMA, 100_000)
    for name in ("nngp", "ntk"):
        mean, error = found[name]
        z = np.abs(mean - getattr(blocks, name)) / np.maximum(error, 1e-12)
        assert z.max() < 4.5, (name, z.max())
    wrong = np.abs(found["ntk"][0] - theory.expected_kernel(x)) / np.maximum(found["ntk"][1], 1e-12)
    assert wrong.max() > 20  # the isotropic kernel
    drawn = two_layer_relu(3, 100_000, covariance=SIGMA, dtype=jnp.float64)
    drawn = np.asarray(jax.jit(drawn.init)(jax.random.key(1))["v"])
    np.testing.assert_allclose(np.cov(drawn.T), SIGMA, atol=0.03)


def test_orthonormal_inputs_have_half_the_identity():
    np.testing.assert_allclose(theory.expected_kernel(np.eye(4)), np.eye(4) / 2, atol=1e-16)


def test_cross_kernel_of_two_sets():
    x = sphere(4, 5, 3)
    model = two_layer_relu(3, 8, alpha=0.3, dtype=jnp.float64)
    whole = np.asarray(jax.jit(lambda a: model.kernel(a, get="ntk"))(x))
    cross = np.asarray(jax.jit(lambda a, b: model.kernel(a, b, get="ntk"))(x[:2], x[2:]))
    np.testing.assert_allclose(cross, whole[:2, 2:], rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(whole, theory.expected_kernel(x, 0.09), rtol=1e-12, atol=1e-15)


def failures(width: int, num: int, radius: float, delta: float, form: str, draws: int = 4000) -> tuple[float, float]:
    """How often Lemma 1 fails for the first example, and for any: orthonormal inputs, so that they are independent."""
    z = np.abs(np.random.default_rng(1).standard_normal((draws, width, num)))
    counts = np.sum(z <= radius, axis=1)
    bound = theory.undecided_bound(radius, 1.0, delta, width, num, form)
    return float(np.mean(counts[:, 0] > bound)), float(np.mean(counts.max(axis=1) > bound))


@pytest.mark.parametrize(("width", "radius"), [(1, 0.05), (4, 0.012)])
def test_lemma_1_as_printed_holds_for_one_example_and_not_for_all(width, radius):
    delta, sd = 0.1, np.sqrt(0.1 * 0.9 / 4000)
    one, every = failures(width, 20, radius, delta, "printed")
    assert one <= delta + 3 * sd
    assert every > delta + 10 * sd, every  # "with probability at least 1 - delta, for all i"
    for form in ("union", "concentration"):
        assert failures(width, 20, radius, delta, form)[1] <= delta + 3 * sd


def test_lemma_3_and_4():
    """The worst moves that the radius allows, and the distance to (13): within the bounds, and not far below them."""
    x, width, radius, delta = sphere(10, 8, 5), 2000, 0.05, 0.1
    worst, apart = [], []
    for seed in range(20):
        net = draw(seed, width, 5)
        start, moved = theory.empirical_kernel(x, net.v), net.v.copy()
        nearest = np.argmin(np.abs(net.v @ x.T), axis=1)
        across = np.take_along_axis(net.v @ x.T, nearest[:, None], 1)
        moved += np.where((-radius < across) & (across < 0), radius, 0) * x[nearest]  # on, none off: nothing cancels
        assert np.linalg.norm(moved - net.v, axis=1).max() <= radius * (1 + 1e-12)
        worst.append(np.linalg.norm(theory.empirical_kernel(x, moved) - start, 2))
        apart.append(np.linalg.norm(start - theory.expected_kernel(x), 2))
    drift = theory.drift_bound(radius, 1.0, delta, width, 8, "concentration")
    assert max(worst) <= drift < theory.drift_bound(radius, 1.0, delta, width, 8, "printed")
    assert theory.drift_bound(radius, 1.0, delta, width, 8, "union") == pytest.approx(
        8 * theory.drift_bound(radius, 1.0, delta, width, 8)
    )
    assert max(worst) > 0.3 * 0.5 * 8 * np.sqrt(2 / np.pi) * radius  # one-sided, of the mean that the bound starts from
    sampling = theory.sampling_bound(width, 8, delta)
    assert np.mean(np.array(apart) > sampling) <= delta
    assert max(apart) > sampling / 10


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.expected_kernel(np.ones(3)), r"x: got shape \(3,\), must be \[N, d\]"),
        (
            lambda: theory.expected_kernel(np.eye(2), -np.eye(2)),
            "covariance: got a least eigenvalue of -1, must be positive",
        ),
        (lambda: theory.expected_kernel(np.eye(2), 0.0), "covariance: got 0.0, must be above 0"),
        (lambda: theory.empirical_kernel(np.eye(2), np.ones((4, 3))), r"v: got shape \(4, 3\), must be \[n, 2\]"),
        (lambda: theory.undecided_bound(0.1, 1.0, 1.5, 10), "delta: got 1.5, must be above 0 and below 1"),
        (lambda: theory.undecided_bound(-0.1, 1.0, 0.5, 10), "radius: got -0.1, must be at least 0"),
        (lambda: theory.drift_bound(0.1, 1.0, 0.5, 10, 3, "best"), "form: got 'best', allowed are printed"),
        (lambda: two_layer_relu(2, 0), "width: got 0, must be a whole number of at least 1"),
        (lambda: two_layer_relu(2, 3, alpha=0.0), "alpha: got 0.0, must be above 0"),
        (lambda: two_layer_relu(2, 3, alpha=2.0, covariance=np.eye(2)), "alpha: got 2.0, must be left out"),
        (lambda: two_layer_relu(2, 3, covariance=np.eye(3)), r"covariance: got shape \(3, 3\), must be \(2, 2\)"),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()
