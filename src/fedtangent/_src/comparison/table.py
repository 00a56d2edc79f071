"""The rows of the comparison table: the same measurements for every method."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Float

from fedtangent._src.comparison.predicted import Predicted
from fedtangent._src.comparison.settings import Problem, Setting
from fedtangent._src.comparison.simulated import Simulated
from fedtangent._src.comparison.statistics import mean_difference_in_errors
from fedtangent._src.losses import targets_of

MEBIBYTE = 2**20


class MethodRow(NamedTuple):
    """Measurements of one method on one setting, a row of the table; None if one does not apply to the method.

    Attributes:
        setting, method: Names.
        test_mse, accuracy: Mean squared error (under cross entropy, of probabilities) and accuracy at the test points.
        nll: Negative log likelihood: Gaussian, per output; under cross entropy, of the mean probabilities.
        coverage: Share of targets in the predicted 95 % interval.
        mean_difference: Mean distance of the outputs' mean from the predicted mean, in standard errors.
        variance_ratio: Variance of the outputs over the predicted variance.
        flow_error: Mean relative distance of each network from the flow that starts at its initial function.
        rounds: Number of rounds.
        uplink_mib: MiB sent from clients to the server.
        seconds_a_run: Time of one run.
    """

    setting: str
    method: str
    test_mse: float
    accuracy: float | None
    nll: float | None
    coverage: float | None
    mean_difference: float | None = None
    variance_ratio: float | None = None
    flow_error: float | None = None
    rounds: int | None = None
    uplink_mib: float | None = None
    seconds_a_run: float | None = None


def scores(
    mean: Float[np.ndarray, "m C"], variance: Float[np.ndarray, "m C"], y: Float[np.ndarray, "m C"]
) -> tuple[float, float]:
    """Computes the Gaussian negative log likelihood (NLL) per output, and the coverage of the 95 % interval.

    Both add a noise variance to ``variance``. It is the mean of squared residual minus ``variance`` over every other
    test point, but at least 1e-6 times the mean square of ``y``. NLL and coverage are measured at the remaining points.

    Args:
        mean: Predicted mean, [m, C].
        variance: Predicted variance without noise, [m, C].
        y: Targets, [m, C].
    """
    even, odd = slice(0, None, 2), slice(1, None, 2)
    residual = (y - mean) ** 2
    noise = max(float(np.mean(residual[even] - variance[even])), 1e-6 * float(np.mean(y**2)))
    total = variance[odd] + noise
    nll = 0.5 * np.mean(np.log(2 * np.pi * total) + residual[odd] / total)
    return float(nll), float(np.mean(residual[odd] <= 1.959963985**2 * total))


def _scores(
    problem: Problem, mean: np.ndarray, draws: np.ndarray, variance: np.ndarray
) -> tuple[float | None, float | None]:
    """Returns negative log likelihood (NLL) and coverage of a prediction; None where the loss has no such number.

    Under the cross entropy the NLL is of the mean probabilities of ``draws`` [E, m, C], and there is no coverage. For
    numbers as targets both use ``mean`` and ``variance``.
    """
    if targets_of(problem.loss) == "numbers":
        return scores(mean, variance, problem.y_test)
    if targets_of(problem.loss) != "classes":
        return None, None
    log_probability = scipy.special.logsumexp(scipy.special.log_softmax(draws, axis=-1), axis=0) - math.log(len(draws))
    return float(-np.mean(np.sum(np.where(problem.y_test > 0, problem.y_test * log_probability, 0), axis=-1))), None


def _accuracy(problem: Problem, mean: Float[np.ndarray, "*draws m C"]) -> float | None:
    if problem.labels_test is None:
        return None
    return float(np.mean(problem.accuracy(mean)))


def outputs_row(
    setting: Setting, method: str, members: Float[np.ndarray, "K E m C"], ensembles: Float[np.ndarray, "E m C"]
) -> MethodRow:
    """Builds the table row of outputs at the test points after the last round.

    MSE and accuracy are of the ensemble of K, averaged over the draws. NLL and coverage use mean and variance over all
    networks, so a single network has neither. Under the cross entropy it has an NLL, of the networks' mean
    probabilities, and there is no coverage. Under other losses than these there is neither.

    Args:
        setting: The setting.
        method: Name in the table.
        members: Outputs of K models of E draws.
        ensembles: The algorithm's prediction from its K models, for each draw.
    """
    problem, draws = setting.problem, members.reshape(-1, *members.shape[2:])
    several = len(draws) > 1
    variance = draws.var(axis=0, ddof=1) if several else np.zeros(draws.shape[1:])
    nll, coverage = None, None
    if several or targets_of(problem.loss) == "classes":
        nll, coverage = _scores(problem, draws.mean(axis=0), draws, variance)
    accuracies = [_accuracy(problem, e) for e in ensembles]
    return MethodRow(
        setting=setting.name,
        method=method,
        test_mse=float(np.mean(problem.mse(ensembles))),
        accuracy=None if problem.labels_test is None else float(np.mean(np.array(accuracies, float))),
        nll=nll,
        coverage=coverage,
        rounds=setting.size.num_rounds,
    )


def networks_row(setting: Setting, networks: Simulated, error: float | None) -> MethodRow:
    """Builds the table row of a method that trains networks, from their outputs after the last round.

    Args:
        setting: The setting.
        networks: Networks of one width.
        error: Mean relative distance of the networks from their prediction; None for NTK-FL.
    """
    return outputs_row(
        setting, f"{networks.method}{networks.of_width}", networks.test[-1], networks.ensemble[-1]
    )._replace(
        flow_error=error,
        rounds=networks.rounds[-1],
        uplink_mib=networks.sent[-1].uplink_bytes / MEBIBYTE,
        seconds_a_run=networks.seconds,
    )


def simulated_row(theory: Predicted, networks: Simulated, flow_error: float | None) -> MethodRow:
    """Builds the table row of networks, with their distance from the predicted mean and variance (``reference``).

    NTK-FL is compared only with the limit of many rounds (Theorem 2 of FE-2024). The distances are left out if the
    predicted variance is 0, or for NTK-FL without this limit.

    Args:
        theory: The predictions.
        networks: Networks of one width.
        flow_error: Mean relative error of the networks to the flow; None for NTK-FL.
    """
    setting, row = theory.setting, networks_row(theory.setting, networks, flow_error)
    mean, cov = reference(theory)
    if not (np.trace(cov) > 0 and (flow_error is not None or (theory.limit is not None and setting.is_standard))):
        return row
    draws = networks.test[-1].reshape(-1, *networks.test.shape[3:])
    return row._replace(
        mean_difference=mean_difference_in_errors(draws, mean, np.diag(cov)),
        variance_ratio=float(np.sum(draws.var(axis=0, ddof=1).mean(axis=-1)) / np.trace(cov)),
    )


def reference(theory: Predicted) -> tuple[Float[np.ndarray, "m C"], Float[np.ndarray, "m m"]]:
    """Returns the predicted mean [m, C] and covariance [m, m] with which table rows are compared.

    For a standard case they are the limit of many rounds (Theorem 2 of FE-2024), if it exists. Otherwise they are the
    flow's mean and covariance at the last round, averaged over models.
    """
    if theory.limit is not None and theory.setting.is_standard:
        return np.asarray(theory.limit.mean), np.asarray(theory.limit.cov)
    last = theory.moments[-1]
    return last.mean.mean(axis=0), last.cov.mean(axis=0)


def theory_row(
    theory: Predicted, method: str, mean: Float[np.ndarray, "m C"], cov: Float[np.ndarray, "m m"], rounds: int | None
) -> MethodRow:
    """Builds the table row of a predicted Gaussian process.

    MSE and accuracy are the expected values for an ensemble of K independent draws, as the rows of networks should
    show. Under a loss other than the squared error the law is not Gaussian: the scores are measured on
    ``theory.sampled``, outputs at the last round; without a coverage under the cross entropy.

    Args:
        theory: The predictions.
        method: Name in the table.
        mean: Mean, [m, C].
        cov: Covariance of one draw, [m, m].
        rounds: Round of the prediction; None for the limit of many rounds.
    """
    setting, problem, num_models = theory.setting, theory.setting.problem, theory.setting.num_models
    variance = np.broadcast_to(np.maximum(np.diag(cov), 0)[:, None], mean.shape)
    nll: float | None
    coverage: float | None
    if theory.sampled is None:
        test_mse = float(np.mean((mean - problem.y_test) ** 2) + np.mean(np.diag(cov)) / num_models)
        nll, coverage = scores(mean, variance, problem.y_test)
    else:  # outputs depend on each other: draws, not moments
        test_mse = float(np.mean(problem.mse(problem.ensemble(theory.sampled.swapaxes(0, 1)))))
        nll, coverage = _scores(problem, mean, theory.sampled.reshape(-1, *mean.shape), variance)
    return MethodRow(
        setting=setting.name,
        method=method,
        test_mse=test_mse,
        accuracy=expected_accuracy(problem, mean, cov / num_models)
        if theory.sampled is None
        else _accuracy(problem, problem.ensemble(theory.sampled.swapaxes(0, 1))),
        nll=nll,
        coverage=coverage,
        variance_ratio=float(np.trace(cov) / spread) if (spread := np.trace(reference(theory)[1])) > 0 else None,
        rounds=rounds,
    )


def expected_accuracy(problem: Problem, mean: Float[np.ndarray, "m C"], cov: Float[np.ndarray, "m m"]) -> float | None:
    """Estimates the expected accuracy of predictions drawn from N(mean, cov) for each output; None without labels.

    It is the mean over 200 draws with a fixed seed (``draws_of``).

    Args:
        problem: The problem.
        mean: Mean at the test points, [m, C].
        cov: Covariance of one output, [m, m].
    """
    if problem.labels_test is None:
        return None
    return float(np.mean(np.argmax(draws_of(mean, cov), axis=-1) == problem.labels_test))


def draws_of(
    mean: Float[np.ndarray, "m C"], cov: Float[np.ndarray, "m m"], draws: int = 200
) -> Float[np.ndarray, "draws m C"]:
    """Draws functions from the normal distribution N(mean, cov), independently for each output, with a fixed seed.

    Args:
        mean: Mean, [m, C].
        cov: Covariance of one output, [m, m].
        draws: Number of draws.
    """
    eigenvalues, vectors = np.linalg.eigh(cov)
    root = vectors * np.sqrt(np.maximum(eigenvalues, 0))
    noise = np.random.default_rng(0).standard_normal((draws, *mean.shape))
    return np.asarray(mean + np.einsum("mq,dqc->dmc", root, noise, optimize=True))
