"""The evidence bound of a mixture of Gaussians against quadrature by SciPy and exact linear algebra."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy
from scipy.stats import multivariate_normal, norm

import fedtangent as ft
from fedtangent.theory import GaussianMixture

SAMPLES = 4000
X, SIGNS = np.array([0.5, -1.0, 2.0, 1.5]), np.array([1.0, -1.0, 1.0, -1.0])
PRIOR = 1.7
NARROW = GaussianMixture(np.array([[-0.6], [0.1], [0.9]]), 0.5)  # components overlap


def log_likelihood(w: jax.Array) -> jax.Array:
    """Logistic regression of one weight: not quadratic."""
    return -jnp.sum(jax.nn.softplus(-SIGNS * X * w[0]))


def numpy_log_likelihood(w: float) -> float:
    return -float(np.sum(np.log1p(np.exp(-SIGNS * X * w))))


def density(w: float, mixture: GaussianMixture) -> float:
    return float(np.mean(norm.pdf(w, np.asarray(mixture.centres)[:, 0], mixture.scale)))


def integral(function: Callable[[float], float]) -> float:
    return float(scipy.integrate.quad(function, -9, 9, epsabs=1e-11, limit=400, points=[-0.6, 0.1, 0.9])[0])


def expected(function: Callable[[float], float], mixture: GaussianMixture) -> float:
    return integral(lambda w: density(w, mixture) * function(w))


def near(estimate: float, error: float, exact: float) -> bool:
    return bool(abs(estimate - exact) <= 4 * error)


def linear_problem(outputs: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((7, 3))
    return x, x @ rng.standard_normal((3, outputs)) + 0.2 * rng.standard_normal((7, outputs))


def test_entropy_of_overlapping_components_is_the_integral() -> None:
    exact = -expected(lambda w: np.log(density(w, NARROW)), NARROW)
    found = ft.theory.mixture_entropy(NARROW, SAMPLES, seed=1)
    assert found.standard_error < 0.01 and near(found.value, found.standard_error, exact)
    separated = float(ft.theory.separated_entropy(NARROW))
    assert not near(separated, found.standard_error, exact)  # control: as the papers approximate it


def test_entropy_is_exact_for_equal_and_for_separated_components() -> None:
    for dimension in (1, 5):
        one = multivariate_normal(np.zeros(dimension), 0.09 * np.eye(dimension)).entropy()
        equal = ft.theory.mixture_entropy(GaussianMixture(np.ones((4, dimension)), 0.3), 10)
        apart = GaussianMixture(100.0 * np.arange(4)[:, None] * np.ones(dimension), 0.3)
        assert equal.value == pytest.approx(one, abs=1e-12) and equal.standard_error < 1e-12
        assert ft.theory.mixture_entropy(apart, 10).value == pytest.approx(one + np.log(4), abs=1e-12)
        assert ft.theory.separated_entropy(apart) == pytest.approx(one + np.log(4), abs=1e-12)


def test_the_terms_of_the_bound_are_integrals() -> None:
    bound = ft.theory.evidence_bound(log_likelihood, NARROW, PRIOR, SAMPLES, seed=2)
    likelihood = expected(numpy_log_likelihood, NARROW)
    prior = expected(lambda w: float(norm.logpdf(w, 0, PRIOR)), NARROW)
    entropy = -expected(lambda w: np.log(density(w, NARROW)), NARROW)
    assert bound.standard_error < 0.01
    assert bound.log_prior == pytest.approx(prior, abs=1e-9)
    assert near(bound.value, bound.standard_error, likelihood + prior + entropy)
    assert bound.value == pytest.approx(float(bound.log_likelihood + bound.log_prior + bound.entropy), abs=1e-12)
    evidence = np.log(integral(lambda w: np.exp(numpy_log_likelihood(w)) * norm.pdf(w, 0, PRIOR)))
    assert bound.value + 4 * bound.standard_error < evidence
    kl = expected(
        lambda w: np.log(density(w, NARROW)) - numpy_log_likelihood(w) - norm.logpdf(w, 0, PRIOR) + evidence, NARROW
    )
    found = ft.theory.kl_divergence(
        lambda w: log_likelihood(w) + jax.scipy.stats.norm.logpdf(w[0], 0, PRIOR) - evidence, NARROW, SAMPLES, seed=3
    )
    assert near(found.value, found.standard_error, kl) and near(evidence - bound.value, bound.standard_error, kl)


def test_the_standard_error_is_the_spread_over_seeds() -> None:
    keys = jax.random.split(jax.random.key(7), 400)
    bounds = jax.jit(jax.vmap(lambda key: ft.theory.evidence_bound(log_likelihood, NARROW, PRIOR, 20, key)))(keys)
    spread, error = np.std(bounds.value, ddof=1), np.sqrt(np.mean(bounds.standard_error**2))
    assert 0.86 < spread / error < 1.14  # 400 draws tell a spread within 3.5 %


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_evidence_of_a_linear_model_is_the_density_of_its_targets(outputs: int) -> None:
    x, y = linear_problem(outputs)
    found = ft.theory.linear_posterior(x, y, 0.2, 0.8)
    marginal = multivariate_normal(np.zeros(7), 0.8**2 * x @ x.T + 0.2**2 * np.eye(7))
    assert found.log_evidence == pytest.approx(sum(marginal.logpdf(column) for column in y.T), abs=1e-9)
    gain = 0.8**2 * x.T @ np.linalg.inv(marginal.cov)  # by conditioning, where the code completes the square
    np.testing.assert_allclose(found.mean, gain @ y, atol=1e-12)
    np.testing.assert_allclose(found.cov, 0.8**2 * (np.eye(3) - gain @ x), atol=1e-12)


def test_the_bound_is_tight_at_the_posterior_and_the_papers_entropy_breaks_it() -> None:
    """Orthonormal inputs have an isotropic posterior; two models at its mean are one component, not two."""
    rng = np.random.default_rng(0)
    x = np.linalg.qr(rng.standard_normal((6, 2)))[0]
    y = x @ np.array([[0.3], [-0.5]]) + 0.1 * rng.standard_normal((6, 1))
    exact = ft.theory.linear_posterior(x, y, 0.1)
    mixture = GaussianMixture(np.repeat(exact.mean.T, 2, axis=0), exact.cov[0, 0] ** 0.5)
    bound = ft.theory.evidence_bound(
        lambda w: jax.scipy.stats.norm.logpdf(y[:, 0], x @ w, 0.1).sum(), mixture, num_samples=SAMPLES
    )
    assert near(bound.value, bound.standard_error, exact.log_evidence) and bound.standard_error < 0.02
    papers = bound.value - bound.entropy + ft.theory.separated_entropy(mixture)
    assert papers - exact.log_evidence == pytest.approx(np.log(2), abs=4 * float(bound.standard_error))
    wrong_sign = bound.value - 2 * bound.entropy
    assert wrong_sign > exact.log_evidence + 1


def test_objective_8_is_the_papers_objective_1_and_least_at_the_ridge_regression() -> None:
    x, y = linear_problem()
    noise, n = 0.2, len(x)

    def likelihood(w: jax.Array) -> jax.Array:
        return jax.scipy.stats.norm.logpdf(y[:, 0], x @ w, noise).sum()

    centres, log_p = np.random.default_rng(1).standard_normal((4, 3)), 0.0
    for i in (slice(0, 2), slice(2, 7)):  # two clients, weights p_i = n_i / n
        for w in centres:
            of_client = norm.logpdf(y[i, 0], x[i] @ w, noise)
            log_p += len(of_client) / n * (-of_client.mean() - norm.logpdf(w, 0, PRIOR).sum() / n)
    found = ft.theory.mode_objective(likelihood, centres, PRIOR)
    assert found == pytest.approx(n / len(centres) * log_p, rel=1e-12)
    best = ft.theory.linear_posterior(x, y, noise, PRIOR).mean.T
    slope = jax.grad(lambda w: ft.theory.mode_objective(likelihood, w, PRIOR))(jnp.asarray(np.repeat(best, 2, axis=0)))
    assert np.abs(slope).max() < 1e-9


def test_the_bound_can_be_compiled_and_differentiated() -> None:
    def value(scale: jax.Array) -> jax.Array:
        return ft.theory.evidence_bound(log_likelihood, NARROW._replace(scale=scale), PRIOR, 2000).value

    with_slope = jax.jit(jax.value_and_grad(value))
    (_, slope), (ahead, _), (behind, _) = (with_slope(jnp.asarray(scale)) for scale in (0.5, 0.501, 0.499))
    assert slope == pytest.approx(float(ahead - behind) / 0.002, rel=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ft.theory.separated_entropy(GaussianMixture(np.ones(3), 1.0)), r"centres: got shape \(3,\), must be"),
        (lambda: ft.theory.separated_entropy(GaussianMixture(np.ones((2, 0)), 1.0)), r"centres: got shape \(2, 0\)"),
        (lambda: ft.theory.mixture_entropy(NARROW._replace(scale=0.0)), "mixture.scale: got 0.0, must be above 0"),
        (lambda: ft.theory.mixture_entropy(NARROW, 1), "num_samples: got 1, must be"),
        (lambda: ft.theory.evidence_bound(log_likelihood, NARROW, -1.0), "prior_scale: got -1.0, must be above 0"),
        (lambda: ft.theory.mode_objective(log_likelihood, np.ones((1, 1)), 0.0), "prior_scale: got 0.0, must be"),
        (lambda: ft.theory.linear_posterior(np.ones((3, 2)), np.ones((2, 1)), 1.0), "y: got 2 rows, must be 3"),
        (lambda: ft.theory.linear_posterior(np.ones((3, 2)), np.ones((3, 1)), 0.0), "noise: got 0.0, must be above 0"),
    ],
)
def test_a_bad_argument_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
