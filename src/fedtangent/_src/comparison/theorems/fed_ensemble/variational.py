"""The evidence lower bound of Fed-ensemble's mixture on a Bayesian linear model, whose evidence is known exactly.

Mixtures of K components are fitted by brute force: quadrature of the Kullback-Leibler divergence in the plane of two
weights, minimised over centres and scale by L-BFGS. A run of Fed-ensemble on the same model is measured every round.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy
from jaxtyping import Float64

import fedtangent as ft
from fedtangent._src.comparison.evidence import variational_diagnostics
from fedtangent._src.comparison.statistics import weighted_line
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.theory.fed_ensemble.variational import (
    EvidenceBound,
    GaussianMixture,
    LinearPosterior,
    evidence_bound,
    linear_posterior,
    separated_entropy,
)

SUBJECT = "FE-2021 (6)-(8), FE-2024 (5)-(8)"
NOISE, PRIOR_SCALE = 0.1, 1.0
CLIENTS, EXAMPLES, STEPS, ROUNDS, EVERY = 20, 40, 4, 240, 4
RUN_MODELS = 4
SAMPLES, RUN_SAMPLES = 10000, 200  # pairs of draws from each component: of a fitted mixture, and of a run's
ALLOWED = 4.0  # standard errors, for the largest of about a hundred estimates
REACH, POINTS = 10.0, 161  # of the quadrature's grid: standard deviations of the posterior, and points of an axis


class Fitted(NamedTuple):
    """The mixture of K components with the least divergence from the posterior, and its estimated bound."""

    mixture: GaussianMixture
    divergence: float  # by quadrature
    bound: EvidenceBound


class Measured(NamedTuple):
    """The exact posterior of a problem, fitted mixtures by K, and the evaluations of a run of ``RUN_MODELS`` models."""

    posterior: LinearPosterior
    fitted: dict[int, Fitted]
    collapsed: dict[int, Fitted]  # K equal models at the most probable weights, where (8) is least
    rounds: Float64[np.ndarray, "R"]
    bounds: Float64[np.ndarray, "R"]
    errors: Float64[np.ndarray, "R"]  # standard errors
    entropies: Float64[np.ndarray, "R"]

    def gaps(self, mixtures: dict[int, Fitted]) -> Float64[np.ndarray, "M"]:
        """Returns the evidence minus the estimated bound of each of M mixtures, in nats."""
        return np.array([self.posterior.log_evidence - float(one.bound.value) for one in mixtures.values()])

    @property
    def separated(self) -> float:
        """The entropy of the run's mixture by the papers' approximation."""
        return float(separated_entropy(self.fitted[RUN_MODELS].mixture))


def measure(num_models: tuple[int, ...], seed: int) -> Measured:
    """Fits a mixture for every number of models, and simulates a run. Needs JAX's 64-bit types.

    Args:
        num_models: Numbers of components, with ``RUN_MODELS`` among them.
        seed: Seed of data, schedule, initial models and draws.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((EXAMPLES, 2)) @ np.array([[1.0, 0.8], [0.0, 0.5]])
    y = x @ rng.standard_normal((2, 1)) + NOISE * rng.standard_normal((EXAMPLES, 1))
    posterior = linear_posterior(x, y, NOISE, PRIOR_SCALE)

    def log_likelihood(weights: jax.Array) -> jax.Array:
        square = jnp.sum((x @ weights - y[:, 0]) ** 2)
        return -square / (2 * NOISE**2) - EXAMPLES / 2 * np.log(2 * np.pi * NOISE**2)

    def bounded(mixture: GaussianMixture, divergence: float) -> Fitted:
        return Fitted(mixture, divergence, evidence_bound(log_likelihood, mixture, PRIOR_SCALE, SAMPLES, seed))

    fitted = {k: bounded(*fit(posterior, k)) for k in num_models}
    one = fitted[1]
    collapsed = {
        k: bounded(GaussianMixture(np.repeat(one.mixture.centres, k, axis=0), one.mixture.scale), one.divergence)
        for k in num_models
    }
    evaluations = _run(x, y, float(fitted[RUN_MODELS].mixture.scale), seed)
    names = "evidence_bound", "standard_error", "entropy"
    curves = (np.array([e.metrics[name] for e in evaluations]) for name in names)
    return Measured(posterior, fitted, collapsed, np.array([e.round for e in evaluations]), *curves)


def fit(posterior: LinearPosterior, num_models: int) -> tuple[GaussianMixture, float]:
    """Fits centres and scale to a posterior of two weights; returns the mixture and its divergence in nats.

    The centres start at quantiles along the posterior's long axis. Random starts end at the same divergence, later.

    Args:
        posterior: The exact posterior.
        num_models: Number K of components.
    """
    variances, axes = np.linalg.eigh(posterior.cov)
    deviations, line = np.sqrt(variances), np.linspace(-REACH, REACH, POINTS)
    grid = np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2) * deviations
    cell, volume = np.prod(deviations) * (line[1] - line[0]) ** 2, np.prod(deviations) * 2 * np.pi
    log_posterior = -0.5 * np.sum((grid / deviations) ** 2, axis=1) - np.log(volume)

    @jax.jit
    @jax.value_and_grad
    def divergence(numbers: jax.Array) -> jax.Array:
        centres, scale = numbers[:-1].reshape(-1, 2) * deviations[None], jnp.exp(numbers[-1])
        squares = jnp.sum((grid[:, None] - centres[None]) ** 2, axis=-1) / scale**2
        log_q = jax.scipy.special.logsumexp(-0.5 * squares, axis=1) - jnp.log(num_models * 2 * jnp.pi * scale**2)
        return cell * jnp.sum(jnp.exp(log_q) * (log_q - log_posterior))

    quantiles = scipy.stats.norm.ppf((np.arange(num_models) + 0.5) / num_models)
    start = np.append(np.stack([np.zeros(num_models), quantiles], axis=1), np.log(deviations[0]))
    tight = {"maxiter": 2000, "ftol": 1e-13, "gtol": 1e-8}
    end = scipy.optimize.minimize(
        lambda numbers: tuple(map(np.asarray, divergence(numbers))), start, jac=True, method="L-BFGS-B", options=tight
    )
    centres = posterior.mean[:, 0] + end.x[:-1].reshape(-1, 2) * deviations @ axes.T
    return GaussianMixture(centres, float(np.exp(end.x[-1]))), float(end.fun)


def _run(x: np.ndarray, y: np.ndarray, scale: float, seed: int) -> list[ft.types.Measurement]:
    """Trains models from draws of the prior on the objective (8), and returns the evaluation of every round."""
    clients = ft.partition.iid(EXAMPLES, CLIENTS, seed=seed)
    data = ft.data.federated_data(x, y, clients, dtype=jnp.float64)
    model = ft.models.linear(2, sigma=PRIOR_SCALE, dtype=jnp.float64)
    curvatures = [
        np.linalg.eigvalsh(x[rows].T @ x[rows] / len(rows)).max() for rows in map(clients.client, range(CLIENTS))
    ]
    decay = optax.add_decayed_weights(NOISE**2 / (EXAMPLES * PRIOR_SCALE**2))
    algorithm = ft.fed_ensemble(
        model,
        ft.schedules.per_client_permutations(CLIENTS, RUN_MODELS),
        client_optimizer=optax.chain(decay, optax.sgd(0.5 / max(curvatures))),
        work=ft.Work(steps=STEPS, batch_size=None),
    )
    look = variational_diagnostics(algorithm, data, scale, PRIOR_SCALE, NOISE, RUN_SAMPLES, seed)
    return ft.simulate(
        algorithm, data, num_rounds=ROUNDS, seed=seed, evaluation=ft.Evaluation(EVERY, look), devices=ft.Devices("scan")
    ).history.evaluations


def verdicts(measured: Measured) -> list[Verdict]:
    """Compares the bounds with the exact evidence, each beside a wrong theory.

    Args:
        measured: Fitted mixtures, and a run.
    """
    return [_divergences(measured), _below(measured), _slope(measured)]


def _sizes(measured: Measured) -> str:
    return f"2 weights, {EXAMPLES} examples, K = {', '.join(map(str, measured.fitted))}"


def _divergences(measured: Measured) -> Verdict:
    """Checks that the evidence minus the bound is the divergence by quadrature; control: separated components."""
    every = (*measured.fitted.values(), *measured.collapsed.values())
    gaps = np.append(measured.gaps(measured.fitted), measured.gaps(measured.collapsed))
    gaps -= [one.divergence for one in every]
    errors = [float(one.bound.standard_error) for one in every]
    added = [float(separated_entropy(one.mixture) - one.bound.entropy) for one in every]
    right, wrong = (
        max(abs(gap - more) / error for gap, more, error in zip(gaps, extra, errors, strict=True))
        for extra in (np.zeros(len(gaps)), added)
    )
    return Claim(SUBJECT, "ln p(D) - bound = divergence by quadrature", _sizes(measured)).judged(
        (f"{right:.1f} SE at most", f"<= {ALLOWED:g} SE", right <= ALLOWED),
        ("components taken as separated, (7) as printed", f"{wrong:.0f} SE", wrong > ALLOWED),
        f"{ALLOWED * max(errors):.2g} nats",
    )


def _below(measured: Measured) -> Verdict:
    """Checks that no bound is above the evidence; control: the entropy with the wrong sign."""
    every = [one.bound for one in measured.fitted.values()]
    bounds = np.append([float(bound.value) for bound in every], measured.bounds)
    errors = np.append([float(bound.standard_error) for bound in every], measured.errors)
    entropies = np.append([float(bound.entropy) for bound in every], measured.entropies)
    above = float(np.max((bounds - measured.posterior.log_evidence) / errors))
    wrong = float(np.max((bounds - 2 * entropies - measured.posterior.log_evidence) / errors))
    statement = f"bound <= ln p(D) for fitted mixtures, and in every round of a run of K = {RUN_MODELS}"
    return Claim(SUBJECT, statement, f"{_sizes(measured)}, {ROUNDS} rounds").judged(
        (f"{above:+.1f} SE above at most", f"<= {ALLOWED:g} SE", above <= ALLOWED),
        ("entropy with the wrong sign", f"{wrong:+.0f} SE above", wrong > ALLOWED),
        f"{ALLOWED * errors.min():.2g} nats",
    )


def _slope(measured: Measured) -> Verdict:
    """Checks that the gap of fitted mixtures falls faster than 1/K; control: K equal models, which minimise (8)."""
    every = (
        (
            np.log(list(fitted)),
            measured.gaps(fitted),
            np.array([float(one.bound.standard_error) for one in fitted.values()]),
        )
        for fitted in (measured.fitted, measured.collapsed)
    )
    right, wrong = (weighted_line(x, np.log(gaps), (gaps / errors) ** 2) for x, gaps, errors in every)
    least, most = right.slope + ALLOWED * right.standard_error, wrong.slope - ALLOWED * wrong.standard_error
    statement = "ln p(D) - bound falls faster than 1/K: slope of its logarithm in ln K, fitted mixtures"
    return Claim(SUBJECT, statement, _sizes(measured)).judged(
        (f"{right.slope:.2f} +- {right.standard_error:.2f}", f"<= -1 by {ALLOWED:g} SE", least <= -1),
        ("K equal models, which minimise (8)", f"{wrong.slope:.2f} +- {wrong.standard_error:.2f}", most > -1),
        f"a slope of {-1 - ALLOWED * right.standard_error:.2f}",
    )


def _check(scale: str, seed: int) -> list[Verdict]:
    return verdicts(measure(of_scale(scale, (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32)), seed))


ENTRIES = (
    TheoremEntry(
        "fed_ensemble.variational",
        "the evidence lower bound of mixtures and of a run, on a Bayesian linear model",
        _check,
        papers=("shi2021", "shi2024"),
        statement="eq. (2), (6)-(8) of FE-2021, (5)-(8) of FE-2024",
        functions=(evidence_bound, linear_posterior, separated_entropy),
        figures=("fed_ensemble.variational",),
    ),
)
