"""The evidence lower bound of Fed-ensemble's mixture, on a Bayesian linear model whose evidence is known exactly.

Mixtures of K components are fitted by brute force: quadrature of the Kullback-Leibler divergence in the plane of two
weights, minimised over centres and scale by L-BFGS. A run of Fed-ensemble on the same model is measured every few
rounds.
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
    """A mixture q of K components, fitted to the posterior p by the least Kullback-Leibler divergence KL(q || p).

    ``divergence`` is KL(q || p) in nats, by quadrature; ``bound`` is the evidence lower bound, estimated from draws
    of q.
    """

    mixture: GaussianMixture
    divergence: float
    bound: EvidenceBound


class Measured(NamedTuple):
    """The posterior of a linear model, mixtures of K components fitted to it, and evidence lower bounds along a run.

    The run is Fed-ensemble with 4 models (``RUN_MODELS``), evaluated at R rounds. ``fitted`` has the mixtures by K.
    ``bounds``, ``errors`` and ``entropies`` are the evidence lower bound at each of ``rounds``, its standard error and
    its entropy term, in nats.
    """

    posterior: LinearPosterior
    fitted: dict[int, Fitted]
    rounds: Float64[np.ndarray, "R"]
    bounds: Float64[np.ndarray, "R"]
    errors: Float64[np.ndarray, "R"]  # standard errors
    entropies: Float64[np.ndarray, "R"]

    def of_fitted(self, term: str) -> Float64[np.ndarray, "M"]:
        """Returns the field ``term`` of ``EvidenceBound``, such as "value", for each of the M fitted mixtures."""
        return np.array([float(getattr(one.bound, term)) for one in self.fitted.values()])

    @property
    def gaps(self) -> Float64[np.ndarray, "M"]:
        """The evidence minus the bound of each fitted mixture, in nats."""
        return self.posterior.log_evidence - self.of_fitted("value")

    @property
    def separated(self) -> float:
        """The entropy in nats of the fitted mixture of 4 components by the papers' formula, which ignores overlaps."""
        return float(separated_entropy(self.fitted[RUN_MODELS].mixture))


def measure(num_models: tuple[int, ...], seed: int) -> Measured:
    """Fits a mixture to the posterior for every number of models, and measures a run of Fed-ensemble.

    It needs JAX's 64-bit types.

    Args:
        num_models: Numbers of components; 4 (``RUN_MODELS``), the run's number of models, must be one of them.
        seed: Seed of data, schedule, initial models and draws.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((EXAMPLES, 2)) @ np.array([[1.0, 0.8], [0.0, 0.5]])
    y = x @ rng.standard_normal((2, 1)) + NOISE * rng.standard_normal((EXAMPLES, 1))
    posterior = linear_posterior(x, y, NOISE, PRIOR_SCALE)

    def log_likelihood(weights: jax.Array) -> jax.Array:
        square = jnp.sum((x @ weights - y[:, 0]) ** 2)
        return -square / (2 * NOISE**2) - EXAMPLES / 2 * np.log(2 * np.pi * NOISE**2)

    fitted = {}
    for k in num_models:
        mixture, divergence = fit(posterior, k)
        fitted[k] = Fitted(mixture, divergence, evidence_bound(log_likelihood, mixture, PRIOR_SCALE, SAMPLES, seed))
    evaluations = _run(x, y, float(fitted[RUN_MODELS].mixture.scale), seed)
    names = "evidence_bound", "standard_error", "entropy"
    curves = (np.array([e.metrics[name] for e in evaluations]) for name in names)
    return Measured(posterior, fitted, np.array([e.round for e in evaluations]), *curves)


def fit(posterior: LinearPosterior, num_models: int) -> tuple[GaussianMixture, float]:
    """Fits centres and scale of a mixture q to a posterior p of two weights; returns q and KL(q || p) in nats.

    The centres start at quantiles along the posterior's long axis. Random starts reach the same divergence, but
    later.

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
    """Trains models from draws of the prior by squared error with weight decay, the objective (8) of FE-2024.

    Returns the evaluations of the run. ``scale`` is the standard deviation of the mixture's component about each model.
    """
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
    """Compares evidence lower bounds with the exact evidence, in three verdicts with negative controls.

    Args:
        measured: Fitted mixtures, and a run.
    """
    return [_divergences(measured), _below(measured), _slope(measured)]


def _sizes(measured: Measured) -> str:
    return f"2 weights, {EXAMPLES} examples, K = {', '.join(map(str, measured.fitted))}"


def _divergences(measured: Measured) -> Verdict:
    """Checks for every fitted mixture that log evidence minus lower bound is its divergence from the posterior.

    The control takes the entropy of a mixture whose components do not overlap.
    """
    mixtures, errors = measured.fitted.values(), measured.of_fitted("standard_error")
    off = measured.gaps - [one.divergence for one in mixtures]
    added = np.array([float(separated_entropy(one.mixture)) for one in mixtures]) - measured.of_fitted("entropy")
    right, wrong = (float(np.max(np.abs(gap) / errors)) for gap in (off, off - added))
    return Claim(SUBJECT, "ln p(D) - bound = divergence by quadrature", _sizes(measured)).judged(
        (f"{right:.1f} SE at most", f"<= {ALLOWED:g} SE", right <= ALLOWED),
        ("components taken as separated", f"{wrong:.0f} SE", wrong > ALLOWED),
        f"{ALLOWED * errors.max():.2g} nats",
    )


def _below(measured: Measured) -> Verdict:
    """Checks that no lower bound, of fitted mixtures or along the run, is above the log evidence.

    The control takes the entropy with the wrong sign.
    """
    above = np.append(-measured.gaps, measured.bounds - measured.posterior.log_evidence)
    errors = np.append(measured.of_fitted("standard_error"), measured.errors)
    entropies = np.append(measured.of_fitted("entropy"), measured.entropies)
    right, wrong = (float(np.max(excess / errors)) for excess in (above, above - 2 * entropies))
    statement = f"bound <= ln p(D) for fitted mixtures, and along a run of K = {RUN_MODELS}"
    return Claim(SUBJECT, statement, f"{_sizes(measured)}, {ROUNDS} rounds").judged(
        (f"{right:+.1f} SE above at most", f"<= {ALLOWED:g} SE", right <= ALLOWED),
        ("entropy with the wrong sign", f"{wrong:+.0f} SE above", wrong > ALLOWED),
        f"{ALLOWED * errors.min():.2g} nats",
    )


def _slope(measured: Measured) -> Verdict:
    """Checks that log evidence minus lower bound of the fitted mixtures falls faster than 1/K.

    The control has the entropy's sign wrong.
    """
    gaps, errors = measured.gaps, measured.of_fitted("standard_error")
    line = weighted_line(np.log(list(measured.fitted)), np.log(gaps), (gaps / errors) ** 2)
    steepest = line.slope + ALLOWED * line.standard_error
    wrong = gaps + 2 * measured.of_fitted("entropy")
    statement = "ln p(D) - bound is above 0 and falls faster than 1/K: slope of its logarithm in ln K"
    return Claim(SUBJECT, statement, _sizes(measured)).judged(
        (f"{line.slope:.2f} +- {line.standard_error:.2f}", f"<= -1 by {ALLOWED:g} SE", steepest <= -1),
        ("entropy with the wrong sign", f"{wrong.min():.2f} nats, no logarithm", bool(np.any(wrong < 0))),
        f"a slope of {-1 - ALLOWED * line.standard_error:.2f}",
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
