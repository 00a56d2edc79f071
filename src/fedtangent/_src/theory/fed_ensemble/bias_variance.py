"""Bias and variance of an ensemble's prediction, measured and in closed form: FE-2021 eq. (3), FE-2024 eq. (10).

    E (y - h)^2 = E_x (y - ybar)^2 + E_x (ybar - hbar)^2 + E_x (h - hbar)^2

Here h is the average of K models, hbar its expectation over all random draws of a run, and ybar(x) = E[y | x]. The
second term has hbar, as in FE-2021 (erratum `fe2024.10`). A run has two random parts: the initial functions, and the
schedule (who trains which model when), so by the law of total variance

    E_x (h - hbar)^2 = E_schedules[ sum_k k_k(x, x) / K^2 ] + Var_schedules[ mean of h given the schedule ],

where k_k(x, x) is the variance of model k over initial functions. The first part is the variance from the K independent
initial functions, the second the variance from the schedules; at the fixed point of FE-2024's Theorem 2 the schedule no
longer matters, and only k(x, x)/K of Corollary 1 of FE-2024 remains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from fedtangent._src.checks import finite, instance, number, real_array, whole
from fedtangent._src.kernels.gram import KernelBlocks, SingularKernelError, joined
from fedtangent._src.theory import checks
from fedtangent._src.theory.checks import Assumption, assumption, in_float64
from fedtangent._src.theory.fed_ensemble.limit import gp_limit
from fedtangent._src.theory.flow.build import federated_flow
from fedtangent._src.theory.flow.flow import Flow
from fedtangent._src.theory.flow.rules import Rule
from fedtangent._src.theory.prior import prior_blocks
from fedtangent._src.types import ArrayLike, Cohort, Partition

# Directions of the initial function with less than this share of the largest variance are rounding errors.
NEGLIGIBLE = 1e-13
# Models that share a pass: 100 training points and 50 columns of each are 40 MB.
MODELS_AT_ONCE = 1024
Variance = Float64[np.ndarray, "m"] | Float64[np.ndarray, "m C"]  # [m, C] if outputs differ


class Estimate(NamedTuple):
    """A number and its standard error (0 for an exact number, nan if the standard error is unknown)."""

    value: float
    standard_error: float


class Decomposition(NamedTuple):
    """Terms of an ensemble's mean squared error (FE-2024, eq. 10): ``total = noise + bias + variance``.

    All are averages over points and outputs. ``noise`` is the variance of the targets, ``bias`` the squared bias, and
    ``total`` the mean squared error.
    ``variance`` is ``initialisation``, its part from the initial functions, plus ``schedules``, its part from the
    schedules.
    """

    noise: float  # data uncertainty, E_x Var[y | x]
    bias: Estimate  # squared, E_x (ybar - hbar)^2
    initialisation: Estimate  # part of the variance from initial functions
    schedules: Estimate  # part of the variance from schedules
    variance: Estimate  # knowledge uncertainty, initialisation + schedules
    total: Estimate


class EnsembleLaw(NamedTuple):
    """Mean and variance, over initial functions, of K models' average at m points after some rounds of one schedule.

    The variance is [m] if the outputs share a kernel, otherwise [m, C].
    """

    mean: Float64[np.ndarray, "m C"]
    variance: Variance  # sum_k k_k(x, x) / K^2


class Corollary1(NamedTuple):
    """Expected squared distance of an ensemble of K models from the mean of ``gp_limit`` (FE-2024, Corollary 1).

    Attributes:
        mean: Mean m(x) of ``gp_limit`` at m test points; None if the tangent kernel Theta has no inverse in float64.
        limit: The value k(x, x) / K after many rounds, with the covariance k of ``gp_limit``; None without a mean.
        at_round: E (1/K sum_k f_k - m)^2 after a requested number of rounds, exact; None without a flow or a mean.
        variance: The ensemble's variance after these rounds; None without a flow.
        assumptions: The corollary's assumptions, and whether each holds.
    """

    mean: Float64[np.ndarray, "m C"] | None
    limit: Float64[np.ndarray, "m"] | None
    at_round: Float64[np.ndarray, "m C"] | None
    variance: Variance | None
    assumptions: tuple[Assumption, ...]


def decompose_runs(runs: ArrayLike, expected: ArrayLike, noise_variance: float = 0.0) -> Decomposition:
    """Estimates noise, bias and variance of an ensemble from repeated runs, with jackknife standard errors.

    All estimates are unbiased. The squared bias is corrected for the sampling variance of the mean, and the part of the
    variance from schedules for the variance from initialisations, so both may be below 0. The jackknife leaves out one
    schedule, or one run, at a time; with only two of them the standard errors are nan.

    Args:
        runs: Predictions of the ensemble. Either [S, J, m, C]: S >= 2 independently drawn schedules, and for each of
            them J >= 2 independent initialisations (an analysis of variance separates the two parts); or [E, m, C]:
            E >= 2 independent runs that differ in both, which determine only the sum of the parts (the parts are nan).
        expected: Expected targets E[y | x] [m, C] at the m points x.
        noise_variance: Variance of the targets, the mean of Var[y | x] over points.
    """
    runs, expected = real_array("runs", runs), real_array("expected", expected)
    if runs.ndim not in (3, 4) or runs.shape[0] < 2 or (runs.ndim == 4 and runs.shape[1] < 2):
        raise ValueError(f"runs: got shape {runs.shape}, must be [E, m, C] with E >= 2 or [S, J, m, C] with S, J >= 2")
    checks.check_shape("expected", expected, runs.shape[-2:])
    finite("runs", runs)
    finite("expected", expected)
    noise = number("noise_variance", noise_variance, at_least=0)
    if runs.ndim == 4:
        within = runs.var(axis=1, ddof=1).mean(axis=(1, 2))
        return _combined(runs.mean(axis=1), within, 1 / runs.shape[1], expected, noise)
    unknown = Estimate(float("nan"), float("nan"))
    terms = _combined(runs, np.zeros(len(runs)), 0.0, expected, noise)
    return terms._replace(initialisation=unknown, schedules=unknown)


def ensemble_law(flow: Flow, r: int) -> EnsembleLaw:
    """Computes the exact mean and variance of the average of a flow's K models after round ``r``, for its schedule.

    The random part is the initial functions. They are independent, so the models' variances k_k(x, x) add up to
    ``sum_k k_k(x, x) / K^2``. The cost is one backward pass through the rounds for each model.

    Args:
        flow: Flow of K models. The variance is [m] if the outputs share a kernel, otherwise [m, C].
        r: Number of finished rounds.

    Raises:
        ValueError: The flow has no closed-form mean and variance: its loss is not the squared error, or its kernels
            have no nngp blocks.
        FloatingPointError: The run is unstable and leaves the range of float64.
    """
    variance = np.diag(np.asarray(flow.ensemble_cov(r)))
    mean = np.asarray(flow.ensemble_mean(r))
    return EnsembleLaw(mean, variance if len(variance) == len(mean) else variance.reshape(mean.shape))


@in_float64
def ensemble_laws(
    kernels: KernelBlocks,
    y_train: ArrayLike,
    partition: Partition,
    cohorts: Sequence[Cohort],
    rule: Rule,
    rounds: Sequence[int],
    num_models: int,
) -> list[tuple[EnsembleLaw, ...]]:
    """Computes ``ensemble_law`` for several schedules and rounds in few passes: for each schedule a tuple over rounds.

    The covariance of the initial function at all points is ``G G'``, with q columns in G. Each column goes through the
    flow as an initial function with targets 0, beside the C outputs that give the mean. So one forward pass with C + q
    outputs serves all rounds. The models of many schedules go through one pass together, as if they were one ensemble.

    Args:
        kernels, y_train, partition, rule: As for ``federated_flow``, with outputs that share a kernel. The rule must
            have the squared error as its loss.
        cohorts: Cohorts of each schedule, arrays [R, S] of equal shapes.
        rounds: Numbers of finished rounds, from 0 to R.
        num_models: Number K of models of each schedule.

    Raises:
        ValueError: There are no cohorts, or of several shapes; the kernels have no nngp blocks; or another loss.
        FloatingPointError: A run is unstable and leaves the range of float64.
    """
    if not cohorts or len({np.shape(c.client) for c in cohorts}) > 1:
        raise ValueError(
            f"cohorts: got shapes {[np.shape(c.client) for c in cohorts]}, must be one or more of one shape"
        )
    instance("rule", rule, Rule)
    if rule.loss != "squared_error":
        raise ValueError(f"rule: got one with the loss {rule.loss!r}, must have 'squared_error'")
    targets, factor = checks.check_rows("y_train", y_train, "n, C"), _factor(kernels)
    outputs, q = targets.shape[1], factor.shape[1]
    start = np.concatenate([np.zeros((len(factor), outputs)), factor], axis=1)
    padded = np.concatenate([targets, np.zeros((len(targets), q))], axis=1)
    laws: list[tuple[EnsembleLaw, ...]] = []
    passes = -(-len(cohorts) * num_models // MODELS_AT_ONCE)
    for part in np.array_split(np.arange(len(cohorts)), min(passes, len(cohorts))):
        joined = _side_by_side([cohorts[i] for i in part], num_models)
        flow = federated_flow(kernels, padded, partition, joined, rule, num_models=len(part) * num_models)
        models = (flow.num_models, 1, 1)
        first, others = np.tile(start[: len(targets)], models), np.tile(start[len(targets) :], models)
        after = np.asarray(flow.predict(first, others, tuple(rounds)))
        after = after.reshape(len(rounds), len(part), num_models, *after.shape[2:])  # [r, schedule, K, m, C + q]
        mean = after[..., :outputs].mean(axis=2)
        variance = np.einsum("eskmq,eskmq->esm", after[..., outputs:], after[..., outputs:]) / num_models**2
        laws += [tuple(map(EnsembleLaw, mean[:, i], variance[:, i])) for i in range(len(part))]
    return laws


def _side_by_side(cohorts: Sequence[Cohort], num_models: int) -> Cohort:
    """Joins schedules of ``num_models`` models each into one schedule, which trains the models of all of them."""
    client, weight = (np.concatenate([np.asarray(c[i]) for c in cohorts], axis=1) for i in (0, 2))
    model = np.concatenate([np.asarray(c.model) + i * num_models for i, c in enumerate(cohorts)], axis=1)
    return Cohort(client, model, weight)  # type: ignore[arg-type]


def decompose_laws(laws: Sequence[EnsembleLaw], expected: ArrayLike, noise_variance: float = 0.0) -> Decomposition:
    """Computes noise, bias and variance of an ensemble in closed form, for one or several drawn schedules.

    Args:
        laws: Means and variances for S independently drawn schedules, from ``ensemble_law``. With S = 1 the schedule is
            fixed: its part of the variance is 0, and all terms are exact. With S > 1 the terms are unbiased estimates
            (the squared bias may be below 0), whose standard errors come from the draw of schedules and are nan for
            S = 2.
        expected: Expected targets E[y | x] [m, C] at the m points x.
        noise_variance: Variance of the targets, the mean of Var[y | x] over points.
    """
    if not laws or len({law.mean.shape for law in laws}) > 1:
        raise ValueError(
            f"laws: got means of shapes {[law.mean.shape for law in laws]}, must be one or more of one shape"
        )
    expected = real_array("expected", expected)
    checks.check_shape("expected", expected, laws[0].mean.shape)
    noise = number("noise_variance", noise_variance, at_least=0)
    within = np.array([law.variance.mean() for law in laws])
    if len(laws) == 1:
        bias, exact = float(np.mean((laws[0].mean - expected) ** 2)), float(within[0])
        parts = [Estimate(v, 0.0) for v in (bias, exact, 0.0, exact, noise + bias + exact)]
        return Decomposition(noise, *parts)
    return _combined(np.stack([law.mean for law in laws]), within, 0.0, expected, noise)


def corollary_1(
    kernels: KernelBlocks,
    y_train: ArrayLike,
    num_models: int,
    flow: Flow | None = None,
    r: int | None = None,
    max_relative_jitter: float = 1e-10,
) -> Corollary1:
    """Computes the expected squared distance of an ensemble of K models from the limit's mean (FE-2024, Corollary 1).

    After training to convergence it is k(x, x)/K; with a ``flow`` it is also computed after ``r`` rounds. The corollary
    (eq. 11 of FE-2024, Corollary 4.1 of FE-2021) is ``E (1/K sum_k f_k(x) - m(x))^2 = k(x, x)/K + o(eta_0^2)``. It
    holds for sufficiently many rounds; eta_0 is the step size, and ``gp_limit`` computes m and k.

    Assumes that the kernel Theta has full rank (assumption 1 of FE-2024's Theorem 1; checked as: Theta needs no jitter
    to invert in float64), and a step size below a threshold (checked with a flow only). A singular Theta is reported in
    ``assumptions`` and does not raise; the result has no ``mean``, ``limit`` and ``at_round`` if
    ``max_relative_jitter`` is not enough to invert it.

    Args:
        kernels: Kernel blocks with the nngp parts.
        y_train: Targets [n, C].
        num_models: Number K of models.
        flow: Flow of K models that are trained by plain FedAvg; None for the limit only.
        r: Number of finished rounds; by default all rounds of the flow.
        max_relative_jitter: Largest jitter, relative to Theta's mean diagonal.

    Returns:
        The record with ``mean`` m(x) and ``limit`` k(x, x)/K. With a ``flow`` it also has ``variance``, the ensemble's
        variance after ``r`` rounds, ``sum_k k_k(x, x)/K^2`` with the models' variances k_k; and ``at_round``, the exact
        left-hand side, which is ``variance`` plus the squared distance of the flow's mean from m.

    Raises:
        ValueError: ``num_models`` is not the flow's, or the flow is not of plain FedAvg with the squared error.
    """
    whole("num_models", num_models)
    if flow is not None and flow.num_models != num_models:
        raise ValueError(f"num_models: got {num_models}, must be that of the flow, {flow.num_models}")
    limit = None
    try:
        limit = gp_limit(kernels, y_train, max_relative_jitter=max_relative_jitter)
        text = "Theta has full rank: jitter added to its diagonal"
    except SingularKernelError as error:
        text = f"Theta has full rank: {error}"
    looked = [assumption("full_rank", text, np.inf if limit is None else limit.jitter, "<=", 0.0)]
    mean = None if limit is None else np.asarray(limit.mean)
    shares = None if limit is None else np.diag(limit.cov) / num_models
    if flow is None:
        return Corollary1(mean, shares, None, None, tuple(looked))
    looked.append(flow.stability().condition)
    law = ensemble_law(flow, flow.num_rounds if r is None else r)
    variance = law.variance if law.variance.ndim == 2 else law.variance[:, None]
    distance = None if mean is None else variance + (law.mean - mean) ** 2
    return Corollary1(mean, shares, distance, law.variance, tuple(looked))


def _combined(
    means: Float64[np.ndarray, "S m C"],
    within: Float64[np.ndarray, "S"],
    share: float,
    expected: Float64[np.ndarray, "m C"],
    noise: float,
) -> Decomposition:
    """Computes the decomposition from the means of S groups of runs and the variances ``within`` the groups.

    Args:
        means: Mean prediction of each group at m points.
        within: Variance inside each group, averaged over points and outputs.
        share: 1 / J for means of J runs: this share of ``within`` is part of the variance of a group's mean.
        expected: Expected targets.
        noise: Variance of the targets.
    """

    def terms(means: np.ndarray, within: np.ndarray) -> np.ndarray:
        between = means.var(axis=0, ddof=1).mean()
        initialisation = within.mean()
        schedules = between - share * initialisation
        bias = np.mean((means.mean(axis=0) - expected) ** 2) - between / len(means)
        variance = initialisation + schedules
        return np.array([bias, initialisation, schedules, variance, noise + bias + variance])

    values = terms(means, within)
    errors = _jackknife(lambda keep: terms(means[keep], within[keep]), len(means))
    return Decomposition(noise, *(Estimate(float(v), float(e)) for v, e in zip(values, errors, strict=True)))


def _jackknife(statistic: Callable[[np.ndarray], np.ndarray], count: int) -> np.ndarray:
    """Computes standard errors of a statistic of ``count`` independent groups by the jackknife; nan for two groups.

    ``statistic`` takes the indices of the groups to use and returns one or several numbers.
    """
    if count < 3:
        return np.full_like(statistic(np.arange(count)), np.nan)
    left_out = np.stack([statistic(np.delete(np.arange(count), i)) for i in range(count)])
    return np.sqrt((count - 1) * left_out.var(axis=0))


def _factor(kernels: KernelBlocks) -> Float64[np.ndarray, "points q"]:
    """Computes ``G`` [n + m, q] with ``G G'`` the covariance of the initial function at training and test points."""
    eigenvalues, vectors = np.linalg.eigh(joined(*prior_blocks(kernels)))
    rank = int(np.sum(eigenvalues > NEGLIGIBLE * eigenvalues[-1]))
    # Rounded up, so that kernels of similar rank share a compiled program; the further columns are zero to rounding.
    q = min(-(-rank // 16) * 16, len(eigenvalues))
    largest = slice(len(eigenvalues) - q, None)
    return np.asarray(vectors[:, largest] * np.sqrt(np.maximum(eigenvalues[largest], 0)))
