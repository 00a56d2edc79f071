"""Fed-ensemble as variational inference: K models are the centres of a mixture that approximates the posterior.

Section 3.2 and appendix 8 of FE-2021, section III-C of FE-2024. The mixture is ``q = 1/K sum_k N(w_k, sigma^2 I)``. The
evidence lower bound is ``E_q[ln p(D | w) + ln p(w)] + H[q] = ln p(D) - KL[q || p(w | D)]``, with the entropy H. The
papers neglect that components overlap; here the overlap is estimated. With ``w = w_k + sigma e`` and ``e ~ N(0, I)``,

    H[q] = d/2 (1 + ln(2 pi sigma^2)) + ln K - 1/K sum_k E[ln sum_j N(w; w_j) / N(w; w_k)],

where the last term is between 0 (separated components) and ln K (equal ones).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.scipy.special import logsumexp
from jaxtyping import Float, Float64

from fedtangent._src import streams
from fedtangent._src.checks import number, whole
from fedtangent._src.theory.checks import check_rows
from fedtangent._src.types import AnyArray, Array, ArrayLike, Key

LogDensity: TypeAlias = Callable[[Float[Array, "d"]], Float[Array, ""]]  # of all weights of one model


class GaussianMixture(NamedTuple):
    """The mixture ``1/K sum_k N(w_k, sigma^2 I)`` over a model's weights; ``centres`` are w_k, ``scale`` is sigma."""

    centres: Float[AnyArray, "K d"]  # w_k
    scale: float | Float[Array, ""]  # sigma


class Estimate(NamedTuple):
    """A Monte Carlo estimate and its standard error."""

    value: Float[Array, ""]
    standard_error: Float[Array, ""]


class EvidenceBound(NamedTuple):
    """The evidence lower bound in nats: the sum of its three terms, and the standard error of the sum."""

    value: Float[Array, ""]
    standard_error: Float[Array, ""]
    log_likelihood: Float[Array, ""]  # E_q[ln p(D | w)]
    log_prior: Float[Array, ""]  # E_q[ln p(w)], exact
    entropy: Float[Array, ""]  # H[q]


class LinearPosterior(NamedTuple):
    """The exact posterior ``N(mean, cov)`` of each output's weights in a Bayesian linear model, and ln p(D)."""

    mean: Float64[np.ndarray, "d C"]
    cov: Float64[np.ndarray, "d d"]  # shared by the outputs
    log_evidence: float


def evidence_bound(
    log_likelihood: LogDensity,
    mixture: GaussianMixture,
    prior_scale: float = 1.0,
    num_samples: int = 100,
    seed: int | Key = 0,
) -> EvidenceBound:
    """Estimates the evidence lower bound of ln p(D) for a Gaussian mixture of K models' weights.

    Its maximum is the minimum of the mixture's KL divergence from the posterior, eq. (2) of FE-2021 and (5) of FE-2024.
    Draws come in pairs ``w_k + sigma e`` and ``w_k - sigma e``, in which the first-order term of the papers' Taylor
    expansion cancels. The prior is ``N(0, prior_scale^2 I)``. The results have the dtype of the centres.

    Args:
        log_likelihood: Function from weights [d] to ln p(D | w), traceable by JAX.
        mixture: Centres [K, d] and scale.
        prior_scale: Standard deviation of a weight under the prior.
        num_samples: Number of pairs drawn from each of the K components, at least 2.
        seed: Seed or key of the draws.
    """
    centres, scale = _checked(mixture)
    prior_scale = number("prior_scale", prior_scale, above=0)
    likelihood, overlap = _draws(log_likelihood, mixture, num_samples, seed)
    square = jnp.mean(jnp.sum(centres**2, axis=1)) / centres.shape[1] + scale**2  # of one weight
    log_prior = -centres.shape[1] / 2 * (square / prior_scale**2 + jnp.log(2 * jnp.pi * prior_scale**2))
    entropy = separated_entropy(mixture) - jnp.mean(overlap)
    sampled = _estimate(likelihood - overlap)
    value = jnp.mean(likelihood) + log_prior + entropy
    return EvidenceBound(value, sampled.standard_error, jnp.mean(likelihood), log_prior, entropy)


def kl_divergence(
    log_posterior: LogDensity, mixture: GaussianMixture, num_samples: int = 100, seed: int | Key = 0
) -> Estimate:
    """Estimates the divergence ``KL[q || p(w | D)]`` of a mixture q from the posterior.

    It is ``E_q[ln q(w) - ln p(w | D)]``, eq. (2) and (6) of FE-2021, (5) of FE-2024. The sum over k that follows in
    both papers leaves out ln p(w) - ln p(D) (erratum `fe2021.6`).

    Args:
        log_posterior: Function from weights [d] to ln p(w | D), normalised and traceable by JAX.
        mixture, num_samples, seed: As in ``evidence_bound``.
    """
    posterior, overlap = _draws(log_posterior, mixture, num_samples, seed)
    sampled = _estimate(overlap - posterior)
    return sampled._replace(value=sampled.value - separated_entropy(mixture))


def mixture_entropy(mixture: GaussianMixture, num_samples: int = 100, seed: int | Key = 0) -> Estimate:
    """Estimates the entropy ``H[q] = -E_q[ln q(w)]`` of a mixture in nats; components may overlap.

    Args:
        mixture, num_samples, seed: As in ``evidence_bound``.
    """
    sampled = _estimate(-_draws(lambda weights: jnp.zeros((), weights.dtype), mixture, num_samples, seed)[1])
    return sampled._replace(value=sampled.value + separated_entropy(mixture))


def separated_entropy(mixture: GaussianMixture) -> Float[Array, ""]:
    """Computes a mixture's entropy as if its components did not overlap, ``d/2 (1 + ln(2 pi sigma^2)) + ln K``.

    Sources: eq. (7) of FE-2021, (6) of FE-2024. Where components overlap, the entropy is up to ln K smaller, so with
    this entropy the "lower bound" can exceed ln p(D) (errata `fe2024.6` and `fe2021.7`).

    Args:
        mixture: Centres [K, d] and scale.
    """
    centres, scale = _checked(mixture)
    num_models, dimension = centres.shape
    return dimension / 2 * (1 + jnp.log(2 * jnp.pi * scale**2)) + np.log(num_models)


def mode_objective(
    log_likelihood: LogDensity, centres: Float[AnyArray, "K d"], prior_scale: float = 1.0
) -> Float[Array, ""]:
    """Computes ``1/K sum_k (-ln p(w_k) - ln p(D | w_k))``, eq. (8) of FE-2021 and FE-2024 without its constant C'.

    For n examples it is n / K times the papers' objective, eq. (1), with ``p_i = n_i / n`` and the loss
    ``l_i(w) = -ln p(D_i | w) / n_i - ln p(w) / n``.

    It is least where all K models equal the most probable one, and C' is not constant (errata `fe2024.8` and
    `fe2024.8loss`).

    Args:
        log_likelihood: Function from weights [d] to ln p(D | w), traceable by JAX.
        centres: Weights w_k of the K models.
        prior_scale: Standard deviation of a weight under the prior.
    """
    centres, _ = _checked(GaussianMixture(centres, 1.0))
    variance = number("prior_scale", prior_scale, above=0) ** 2
    square = jnp.mean(jnp.sum(centres**2, axis=1))
    log_prior = -square / (2 * variance) - centres.shape[1] / 2 * jnp.log(2 * jnp.pi * variance)
    return -jnp.mean(jax.lax.map(log_likelihood, centres)) - log_prior


def linear_posterior(x: ArrayLike, y: ArrayLike, noise: float, prior_scale: float = 1.0) -> LinearPosterior:
    """Computes posterior and evidence of a Bayesian linear model in NumPy float64.

    The model is ``y = x W + noise e`` with ``W ~ N(0, prior_scale^2)`` and ``e ~ N(0, 1)``. The posterior mean is the
    ridge regression whose weight decay is ``noise^2 / (n prior_scale^2)`` under the loss ``|f - y|^2 / (2 n)``; ln p(D)
    is summed over the C independent outputs.

    Args:
        x: Inputs [n, d].
        y: Targets [n, C].
        noise: Standard deviation of a target given the weights.
        prior_scale: Standard deviation of a weight under the prior.
    """
    inputs, targets = check_rows("x", x, "n, d"), check_rows("y", y, "n, C")
    (n, dimension), outputs = inputs.shape, targets.shape[1]
    if len(targets) != n:
        raise ValueError(f"y: got {len(targets)} rows, must be {n}, the rows of x")
    noise, prior_scale = (number(k, v, above=0) for k, v in (("noise", noise), ("prior_scale", prior_scale)))
    precision = inputs.T @ inputs / noise**2 + np.eye(dimension) / prior_scale**2
    factor = scipy.linalg.cho_factor(precision, lower=True)
    mean = scipy.linalg.cho_solve(factor, inputs.T @ targets) / noise**2
    squares = np.sum((targets - inputs @ mean) ** 2) / noise**2 + np.sum(mean**2) / prior_scale**2
    volume = n * np.log(2 * np.pi * noise**2) + 2 * dimension * np.log(prior_scale)
    volume += 2 * np.sum(np.log(np.diag(factor[0])))
    cov = scipy.linalg.cho_solve(factor, np.eye(dimension))
    return LinearPosterior(mean, 0.5 * (cov + cov.T), float(-0.5 * (squares + outputs * volume)))


def _checked(mixture: GaussianMixture) -> tuple[Float[Array, "K d"], float | Float[Array, ""]]:
    """Returns the mixture's centres and scale for JAX; raises ``ValueError`` for a wrong shape or a scale <= 0."""
    centres = jnp.asarray(mixture.centres, jnp.result_type(mixture.centres, jnp.float32))
    if centres.ndim != 2 or 0 in centres.shape:
        raise ValueError(f"mixture.centres: got shape {centres.shape}, must be [K, d] with K, d >= 1")
    return centres, number("mixture.scale", mixture.scale, above=0)


def _draws(
    function: LogDensity, mixture: GaussianMixture, num_samples: int, seed: int | Key
) -> tuple[Float[Array, "K S"], Float[Array, "K S"]]:
    """Draws weights w from each component k and returns averages over each of S pairs of draws, [K, S].

    The first result averages ``function`` at w, the second the overlap ``ln sum_j N(w; w_j) / N(w; w_k)``.
    """
    centres, scale = _checked(mixture)
    whole("num_samples", num_samples, 2)
    key = streams.apart(streams.keys(seed).init, streams.MIXTURE)  # independent of the initial models of a run
    keys = jax.random.split(key, (len(centres), num_samples))

    def of_component(component: tuple[Array, Key]) -> tuple[Array, Array]:
        centre, keys = component
        away = centre[None] - centres
        squares = jnp.sum(away**2, axis=1)

        def of_pair(key: Key) -> tuple[Array, Array]:
            step = scale * jax.random.normal(key, centre.shape, centre.dtype)
            across = 2 * jnp.sum(away * step[None], axis=1)
            values = [function(centre + step), function(centre - step)]
            overlaps = [logsumexp(-(squares + side) / (2 * scale**2)) for side in (across, -across)]
            return (values[0] + values[1]) / 2, (overlaps[0] + overlaps[1]) / 2

        pairs: tuple[Array, Array] = jax.lax.map(of_pair, keys)
        return pairs

    draws: tuple[Array, Array] = jax.lax.map(of_component, (centres, keys))
    return draws


def _estimate(draws: Float[Array, "K S"]) -> Estimate:
    """Returns the mean of S draws from each of the K components, and its standard error."""
    variance = jnp.mean(jnp.var(draws, axis=1, ddof=1)) / draws.size
    return Estimate(jnp.mean(draws), jnp.sqrt(variance))
