"""Theorem 2 of FE-2024 on trained networks: the mean and covariance of K models of Fed-ensemble at two widths.

The prediction is the Gaussian process of Theorem 2, the limit of many rounds, if the federated flow is close to it at
the last round, far closer than the verdicts' margins. Otherwise it is the flow's mean and covariance at that round.
Both assume infinite width, and are off by some percent at a finite width. So the networks' mean, variance, covariances
and coverage are extrapolated from two widths to infinity, with the flow from the same initial functions as a control
variate (``comparison/statistics.py``).

Figures and tables show single entries (a point and an output, or two points and an output). Verdicts judge sums over
entries: a finite width shifts every entry a little, and hundreds of correlated entries say less than their sum.

All arrays are float64 NumPy. Samples are outputs of K models at m points, C outputs each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as bound
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Float

import fedtangent as ft
from fedtangent._src.comparison import cases
from fedtangent._src.comparison.predicted import ModelLaw, Predicted, networks, predict
from fedtangent._src.comparison.settings import Problem, Scale, Setting
from fedtangent._src.comparison.simulated import cohorts, trained_networks
from fedtangent._src.comparison.statistics import Interval, Pair, combined, mean_error
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.verdicts import Rival, Verdict, judged
from fedtangent._src.data.partition.given import consecutive

COVERED = 0.95
Samples = Float[np.ndarray, "K m C"]


class Entries(NamedTuple):
    """One statistic, such as the mean, at all its E entries: measured, predicted, and the predicted standard error.

    An entry is a point and an output, or for a covariance two points and an output.
    """

    measured: Float[np.ndarray, "E"]
    predicted: Float[np.ndarray, "E"]
    standard_error: Float[np.ndarray, "E"]

    @property
    def farthest(self) -> float:
        """The largest distance of an entry from its prediction, in standard errors of that entry."""
        return float(np.max(np.abs(self.measured - self.predicted) / self.standard_error))


def entries(samples: Samples, law: ModelLaw) -> dict[str, Entries]:
    """Computes mean, variance and off-diagonal covariance of K models, measured and predicted, entry by entry.

    There are m C means, m C variances and m (m - 1) / 2 C covariances. Variances and covariances are of the models'
    deviations from their predicted means, with the divisor K - 1. Standard errors are predicted: ``sqrt(S_ii / K)`` for
    a mean, ``sqrt((S_ii S_jj + S_ij^2) / (K - 1))`` for a covariance (a Wishart entry), where S is the average
    covariance of the models.

    Args:
        samples: Outputs of K models, [K, m, C], K and m at least 2.
        law: Predicted mean and covariance of each model.

    Returns:
        The entries of "mean", "variance" and "covariance".
    """
    _check(samples, law)
    count, points, outputs = samples.shape
    residual, cov = samples - law.mean, law.average_cov
    variance = np.diag(cov)
    above = np.triu_indices(points, 1)
    mean, covariance = _moments(residual)
    error = np.sqrt((np.outer(variance, variance) + cov**2) / (count - 1))

    def spread(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, outputs)

    average = law.mean.mean(axis=0)
    return {
        "mean": Entries((average + mean).ravel(), average.ravel(), spread(np.sqrt(variance / count))),
        "variance": Entries(np.diagonal(covariance).T.ravel(), spread(variance), spread(np.diag(error))),
        "covariance": Entries(covariance[above].ravel(), spread(cov[above]), spread(error[above])),
    }


def _moments(residual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns average [m, C] and sample covariance [m, m, C] of residuals [K, m, C]."""
    mean = residual.mean(axis=0)
    centred = (residual - mean).transpose(2, 1, 0)  # [C, m, K]
    return mean, (centred @ centred.swapaxes(1, 2)).transpose(1, 2, 0) / (len(residual) - 1)


def _check(samples: Samples, law: ModelLaw) -> None:
    if samples.ndim != 3 or samples.shape[0] < 2 or samples.shape[1] < 2:
        raise ValueError(f"samples: got shape {samples.shape}, must be [K, m, C] with K and m of at least 2")
    count, points, _ = samples.shape
    if (got := (law.mean.shape, law.cov.shape)) != (must := (samples.shape, (count, points, points))):
        raise ValueError(f"law: got mean and cov of shapes {got}, must be {must}")


def covered(samples: Samples, law: ModelLaw, level: float = COVERED) -> Float[np.ndarray, "K"]:
    """Computes the share of each model's outputs in its predicted central intervals, ``mean_k +- z sd_k``.

    z is the normal quantile of (1 + ``level``) / 2, and sd_k the predicted standard deviation.

    Args:
        samples: Outputs of K models, [K, m, C].
        law: Predicted mean and covariance of each model.
        level: Probability of an interval.
    """
    _check(samples, law)
    variance = np.diagonal(law.cov, axis1=1, axis2=2)[:, :, None]
    within = np.abs(samples - law.mean) <= scipy.stats.norm.ppf((1 + level) / 2) * np.sqrt(variance)
    return np.asarray(within.mean(axis=(1, 2)))


def expected_cover(right: ModelLaw, law: ModelLaw) -> float:
    """Computes the share of draws from ``right`` in the 95 % intervals of ``law``: 0.95 if both are the same.

    Args:
        right: Mean and covariance of the draws.
        law: Mean and covariance from which the intervals are computed.
    """
    true_sd, sd = (np.sqrt(np.diagonal(one.cov, axis1=1, axis2=2))[:, :, None] for one in (right, law))
    reach, off = scipy.stats.norm.ppf((1 + COVERED) / 2) * sd / true_sd, (law.mean - right.mean) / true_sd
    return float(np.mean(scipy.stats.norm.cdf(off + reach) - scipy.stats.norm.cdf(off - reach)))


class Sampled(NamedTuple):
    """Outputs of K trained networks of one width, and the infinite-width flow from the initial function of each.

    With one hidden layer, mean and covariance of the predictions are known at every width, so the predictions serve as
    control variates of the networks.
    """

    width: int
    networks: Samples
    predicted: Samples


class Ensembles(NamedTuple):
    """The networks of every width with their predictions, and the mean and covariance of these predictions."""

    sampled: tuple[Sampled, ...]
    exact: ModelLaw

    def cover(self, law: ModelLaw) -> Interval:
        """Estimates the share of the networks' outputs in the 95 % intervals of ``law``, at infinite width."""
        expected = expected_cover(self.exact, law)
        values = [covered(one.networks, law) - covered(one.predicted, law) + expected for one in self.sampled]
        return combined([one.width for one in self.sampled], values, by_width=True)

    def variance_ratio(self, law: ModelLaw) -> Interval:
        """Estimates the networks' variance at infinite width over the variance of ``law``, both summed over points."""
        return self._ratio(np.eye(len(law.average_cov)) / np.trace(law.average_cov))

    def covariance_ratio(self, law: ModelLaw) -> Interval:
        """Estimates the networks' off-diagonal covariances at infinite width over the covariances of ``law``.

        It is a regression of the sample covariance S on the covariance L of ``law``, ``sum_i<j S_ij L_ij / sum_i<j
        L_ij^2``.
        """
        return self._ratio(_off_diagonal(law))

    def _ratio(self, weights: np.ndarray) -> Interval:
        """Estimates ``sum_ij weights_ij S_ij`` for the networks' covariance S [m, m], extrapolated to infinite width.

        The predictions are control variates. With ``weights`` [m, m] made from a law's covariance, the sum is a ratio
        of S to that covariance.
        """
        exact, values = self.exact, []
        expected = float(np.sum(weights * exact.average_cov))
        for _, trained, predicted in self.sampled:
            change = _products(trained - exact.mean, weights) - _products(predicted - exact.mean, weights)
            values.append(len(trained) / (len(trained) - 1) * change + expected)
        return combined([one.width for one in self.sampled], values, by_width=True)


def expected_ratios(right: ModelLaw, law: ModelLaw) -> tuple[float, float]:
    """Computes the ratios of variances and covariances to ``law`` for networks that follow the law ``right``.

    ``Ensembles.variance_ratio`` and ``covariance_ratio`` estimate them: the ratio of the variances, summed over points,
    and the slope in a regression of the off-diagonal covariances of ``right`` on the covariances of ``law``.

    Args:
        right: Mean and covariance that the networks have.
        law: Mean and covariance that are tested.
    """
    cov = right.average_cov
    return float(np.trace(cov) / np.trace(law.average_cov)), float(np.sum(_off_diagonal(law) * cov))


def _off_diagonal(law: ModelLaw) -> np.ndarray:
    """Returns ``L / sum_ij L_ij^2`` for the off-diagonal part L [m, m] of ``law.average_cov``."""
    away = law.average_cov - np.diag(np.diag(law.average_cov))
    return np.asarray(away / np.sum(away**2))


def _products(residual: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns ``sum_ij weights_ij r_i r_j`` of each model, [K], averaged over outputs.

    r is ``residual`` [K, m, C] minus its mean over models, and i and j are test points.
    """
    centred = residual - residual.mean(axis=0)
    return np.asarray(np.mean(np.sum(centred * np.einsum("ij,kjc->kic", weights, centred), axis=1), axis=-1))


NUM_MODELS = 80
DIGITS, NUM_POINTS = (4, 8, 12), 20  # examples of each client, test points of digits
SPACING = 0.08  # least distance of two training inputs of the sine
AWAY = 0.02  # least distance of a test input of the sine from a training input
MEAN_MARGIN = 0.05  # of how far training moves the function
COVARIANCE_MARGIN = 0.1  # of the law's
COVER_MARGIN = 0.02
REACHED = 0.2  # how far, in margins, the last round's law may be from the limit for the limit to be the prediction
SOONER = 4  # the last round, over an earlier one at which the flow must not have reached the limit
THEOREM = "FE-2024 Theorem 2 (FE-2021 4.2)"
NAMES = {"mean": "mean", "variance": "variance", "covariance": "off-diagonal covariance"}
SIZES: tuple[dict[str, Scale], ...] = (
    {"digits": Scale((128, 512), NUM_MODELS, 900)},
    {"sine": Scale((1024, 4096), 2 * NUM_MODELS, 4000), "digits": Scale((512, 2048), NUM_MODELS, 1000)},
)


class LawDistance(NamedTuple):
    """Distance of predicted mean and variance at a round from Theorem 2's limit of many rounds, largest over models.

    Both are infinite if there is no limit.

    Attributes:
        mean: Distance of the means, as a share of how far training moves the function.
        variance: Difference of the variances, summed over points, as a share of the limit's variance.
    """

    mean: float  # relative to how far training moves the function
    variance: float  # summed over points, relative

    @property
    def reached(self) -> bool:
        """Whether both distances are at most a fifth (``REACHED``) of the verdicts' margins."""
        return self.mean <= REACHED * MEAN_MARGIN and self.variance <= REACHED * COVARIANCE_MARGIN

    def __str__(self) -> str:
        return f"mean {self.mean:.2g} of the movement, variance {self.variance:.1%}"


class TrainedEnsemble(NamedTuple):
    """K networks of one width at the start and the last round, and the flow from the same initial functions.

    ``start`` and ``samples`` are the networks' outputs before training and at the last round; ``own_flow`` is the flow
    of infinite width at the last round from each network's initial function. Bytes are totals of all rounds.
    """

    width: int
    start: Samples  # initial functions
    samples: Samples  # outputs at the last round
    own_flow: Samples  # the flow at the last round from each network's initial function
    uplink_bytes: int
    downlink_bytes: int


class Theorem2(NamedTuple):
    """Predictions for one data set, and the networks trained on it; built by ``compare``.

    Attributes:
        theory: The flow, and the limit of many rounds.
        gap, early: Distance of the flow from that limit, at the last round and at an earlier one.
        law: Mean and covariance with which networks are compared: the limit if the flow is near it, else the flow.
        of: Name of ``law`` in texts.
        movement: Root mean square norm of how far training moves a function, by theory.
        trained: Networks of each width.
    """

    theory: Predicted
    gap: LawDistance
    early: LawDistance
    law: ModelLaw
    of: str
    movement: float
    trained: tuple[TrainedEnsemble, ...]

    @property
    def setting(self) -> Setting:
        """The problem, algorithm and size of the comparison."""
        return self.theory.setting

    @property
    def ensembles(self) -> Ensembles:
        """The trained networks of every width, each with the flow from its initial function as its prediction.

        Predictions are shifted so that their mean is the mean of ``law``, not the flow's mean at the last round.
        """
        last = self.theory.moments[-1]
        away = self.law.mean - last.mean
        sampled = tuple(Sampled(t.width, t.samples, t.own_flow + away) for t in self.trained)
        return Ensembles(sampled, self.law._replace(cov=last.cov))


def _sine(seed: int, num_models: int, widths: tuple[int, ...], num_rounds: int) -> Setting:
    """Builds problem, algorithm and sizes for the sine data with a gap (FE-2024, section V-B), on 4 unequal clients."""
    # The network has one hidden layer of cosines. With inputs at least ``SPACING`` apart its kernel's condition number
    # is about 20; with erf or ReLU it is so large on scalar inputs (1e3 to 1e14) that no run reaches the limit. Test
    # inputs are at least ``AWAY`` from the training inputs, where the predicted variance does not nearly vanish.
    toy = ft.data.load("sine", seed=seed, gap=True, test_points=61)
    chosen: list[int] = []
    for i, x in enumerate(toy.x_train[:, 0]):
        if all(abs(x - toy.x_train[j, 0]) >= SPACING for j in chosen):
            chosen.append(i)
    x_train, y_train = toy.x_train[chosen], toy.y_train[chosen]
    away = np.min(np.abs(toy.x_test - x_train.T), axis=1) >= AWAY
    clients = ft.partition.quantity_skew(len(chosen), 4, alpha=2.0, seed=seed, min_client_size=1)

    problem = Problem(x_train, y_train, toy.x_test[away], toy.y_test[away], clients)
    model = ft.models.mlp(1, 1, widths[-1:], activation="cos", w_std=12.0, b_std=2.0, last_w_std=1.0, dtype=jnp.float64)
    algorithm = cases.ensemble(problem, model, ft.schedules.per_client_permutations(4, num_models), local_steps=20)
    title = f"Sine with a gap, {len(chosen)} examples on 4 clients: network of one hidden layer of cosines"
    return cases.standard_case("sine", title, problem, algorithm, Scale(widths, 1, num_rounds), seed)


def _digits(seed: int, num_models: int, widths: tuple[int, ...], num_rounds: int) -> Setting:
    """Builds problem, algorithm and sizes for a few digits on three unequal clients; the network is a ReLU network."""
    whole, examples = cases.digits(None, "smoke", seed), sum(DIGITS)
    x_train, y_train = whole.problem.x_train[:examples], whole.problem.y_train[:examples]
    x_test, y_test = whole.problem.x_test[:NUM_POINTS], whole.problem.y_test[:NUM_POINTS]
    problem = Problem(x_train, y_train, x_test, y_test, consecutive(DIGITS))
    plan = ft.schedules.per_client_permutations(len(DIGITS), num_models)
    algorithm = cases.ensemble(problem, whole.algorithm.model, plan)
    title = f"Digits, {examples} examples on {len(DIGITS)} clients: ReLU network of one hidden layer"
    return cases.standard_case(whole.name, title, problem, algorithm, Scale(widths, 1, num_rounds), seed)


SETTINGS: dict[str, Callable[[int, int, tuple[int, ...], int], Setting]] = {"sine": _sine, "digits": _digits}


def compare(setting: Setting, say: Callable[[str], None] = lambda line: None) -> Theorem2:
    """Trains the K networks of every width, and predicts their mean and covariance after the last round.

    The prediction ``law`` is Theorem 2's limit if the flow has reached it in the last round, else the flow's.

    Args:
        setting: Problem, algorithm and size, such as the result of ``SETTINGS["digits"](..)``.
        say: Called with a line of text for each step of the work.
    """
    say(f"{setting.name}: law of round {setting.size.num_rounds}")
    theory = predict(setting, cohorts(setting))
    law, limit, of = theory.moments[-1], theory.limit, f"the flow's law at round {setting.size.num_rounds}"
    sooner = setting.size.num_rounds // SOONER
    early = ModelLaw(np.asarray(theory.flow.mean(sooner)), np.asarray(theory.flow.cov(sooner)))
    b = [np.asarray(theory.flow.dependence(setting.size.num_rounds, k)[0][0]) for k in range(theory.flow.num_models)]
    moved = _movement(theory, law.mean, b)
    gaps = _gap(law, limit, moved), _gap(early, limit, moved)
    if limit is not None and gaps[0].reached:
        law = ModelLaw(np.broadcast_to(limit.mean, law.mean.shape), np.broadcast_to(limit.cov, law.cov.shape))
        of = "Theorem 2's limit"
    trained = []
    for width in setting.size.widths:
        say(f"{setting.name}: {setting.num_models} networks of width {width}, {setting.size.num_rounds} rounds")
        trained.append(_train(setting, theory.flow, width))
    return Theorem2(theory, *gaps, law, of, moved, tuple(trained))


def _movement(theory: Predicted, mean: np.ndarray, influences: list[np.ndarray]) -> float:
    """Returns the root mean square distance by which training moves a network's outputs at the test points.

    A network that starts at the random function f0 moves by ``mean - B f0(X)``. ``mean`` are the predicted means of
    the K models. ``influences`` are their matrices B [m, n], by which the initial outputs f0(X) at the training
    points change the trained outputs at the test points.
    """
    pulled = [float(np.trace(np.asarray(ft.theory.covariance_terms(theory.blocks, b).propagated))) for b in influences]
    return float(np.sqrt(np.mean(np.sum(mean**2, axis=(1, 2))) + mean.shape[-1] * np.mean(pulled)))


def _train(setting: Setting, flow: ft.theory.Flow, width: int) -> TrainedEnsemble:
    """Trains K networks of ``width`` by Fed-ensemble, and computes the flow from the initial function of each."""
    run = trained_networks(setting, width)
    predicted = networks(flow, [run], (setting.size.num_rounds,))[0][0]
    outputs = run.test[0][:, 0], run.test[-1][:, 0], predicted[:, 0]
    return TrainedEnsemble(width, *outputs, run.sent[-1].uplink_bytes, run.sent[-1].downlink_bytes)


def _gap(law: ModelLaw, limit: ft.types.Gaussian | None, movement: float) -> LawDistance:
    """Computes the distance of the K models' ``law`` from ``limit``, the largest over models; infinite without a limit.

    The distance of the means is divided by ``movement``, the distance by which training moves the function.
    """
    if limit is None:
        return LawDistance(np.inf, np.inf)
    mean = np.max(np.linalg.norm(law.mean - limit.mean, axis=(1, 2))) / movement
    ratios = np.trace(law.cov, axis1=1, axis2=2) / np.trace(limit.cov)
    return LawDistance(float(mean), float(np.max(np.abs(ratios - 1))))


def finite_width(trained: TrainedEnsemble, law: ModelLaw) -> tuple[float, float]:
    """Estimates by how much a finite width increases the variance, relative to the variance, with a standard error.

    It compares the squared deviations of networks from the predicted mean with the squared deviations of the flow from
    the same initial functions.

    Args:
        trained: Networks of one width.
        law: Mean and covariance at infinite width; the variance is the unit.

    Returns:
        The increase, averaged over models, points and outputs, and its standard error.
    """
    variance = np.diag(law.average_cov)[None, :, None]
    squares = ((trained.samples - law.mean) ** 2 - (trained.own_flow - law.mean) ** 2) / variance
    means = squares.mean(axis=(1, 2))
    return float(means.mean()), float(means.std(ddof=1) / np.sqrt(len(means)))


def _wrong_laws(result: Theorem2) -> dict[str, ModelLaw]:
    """Builds means and covariances of wrong theories, by name, as negative controls.

    The mistakes are: some clients are missing, the network is untrained, the prior kernel takes the place of the
    tangent kernel, or the cross terms of the covariance are scaled.
    """
    setting, k = result.setting, result.theory.blocks
    assert k.nngp_train is not None and k.nngp_test_train is not None
    laws, by_size = {}, np.argsort(setting.problem.partition.sizes, kind="stable")
    for count in range(1, setting.problem.partition.num_clients):
        missing = [setting.problem.partition.client(int(c)) for c in by_size[:count]]
        rows = np.setdiff1d(np.arange(len(setting.problem.x_train)), np.concatenate(missing))
        b = np.zeros(k.ntk_test_train.shape)
        b[:, rows] = np.linalg.solve(k.ntk_train[np.ix_(rows, rows)], k.ntk_test_train[:, rows].T).T
        laws[f"the {count} smallest clients missing"] = _law(result, b)
    laws["untrained"] = _law(result, np.zeros(k.ntk_test_train.shape))
    laws["prior kernel as tangent kernel"] = _law(result, np.linalg.solve(k.nngp_train, k.nngp_test_train.T).T)
    b = np.linalg.solve(k.ntk_train, k.ntk_test_train.T).T
    laws |= {f"cross terms x {by}": _law(result, b, by) for by in (0.9, 0.75, 0.5)}
    return laws


def _law(result: Theorem2, b: np.ndarray, cross: float = 1.0) -> ModelLaw:
    """Returns mean and covariance of ``B Y + f0(x) - B f0(X)``, for f0 drawn from the prior and targets Y.

    ``b`` is the matrix B [m, n]. A ``cross`` other than 1 multiplies the covariance's terms that join f0(x) and f0(X),
    which makes a wrong theory.
    """
    terms = ft.theory.covariance_terms(result.theory.blocks, b)
    cov = terms.prior + terms.propagated - cross * terms.cross
    return ModelLaw(
        np.broadcast_to(b @ result.setting.problem.y_train, result.law.mean.shape),
        np.broadcast_to(np.asarray(cov), result.law.cov.shape),
    )


def _checks(scale: str, seed: int) -> list[Verdict]:
    """Checks Theorem 2 of FE-2024: mean, covariance and coverage of trained networks, on each data set."""
    verdicts = []
    for name, size in of_scale(scale, *SIZES).items():
        verdicts += rows(compare(SETTINGS[name](seed, size.draws, size.widths, size.num_rounds)))
    return verdicts


def rows(result: Theorem2) -> list[Verdict]:
    """Computes the verdicts on Theorem 2 of FE-2024 for one data set, from the result of ``compare``."""
    verdicts = sampled_rows(result)
    if result.theory.limit is not None:
        verdicts.insert(0, _reached(result)._replace(sizes=verdicts[0].sizes))
    return verdicts


def sampled_rows(result: Theorem2) -> list[Verdict]:
    """Checks mean, variance, covariance and coverage of trained networks against ``result.law``, one verdict each."""
    setting, problem, widths = result.setting, result.setting.problem, ", ".join(str(t.width) for t in result.trained)
    sizes = (
        f"{setting.name}: K = {len(result.law.mean)}, widths {widths}, {setting.size.num_rounds} rounds, "
        f"n = {len(problem.x_train)} on {problem.partition.num_clients} clients, m = {len(problem.x_test)}, "
        f"C = {problem.y_train.shape[1]}"
    )
    wrong = _wrong_laws(result)
    verdicts = [_mean(result, wrong), *_ratios(result, wrong), _cover(result, wrong)]
    return [verdict._replace(sizes=sizes) for verdict in verdicts]


def _judged(
    result: Theorem2, quantity: str, target: float, margin: float, estimate: Interval, rivals: list[Rival]
) -> Verdict:
    statement = f"{quantity} at infinite width = {result.of}"
    return judged(THEOREM, statement, target, margin, [estimate], rivals)


def _mean(result: Theorem2, wrong: dict[str, ModelLaw]) -> Verdict:
    pairs = [Pair(width, outputs[None], predicted[None]) for width, outputs, predicted in result.ensembles.sampled]
    rivals = []
    for name, law in wrong.items():
        away = (law.mean - result.law.mean).mean(axis=0)
        far = float(np.linalg.norm(away)) / result.movement
        rivals.append(Rival(name, far, bound(mean_error, pairs, result.movement, away)))
    estimate = mean_error(pairs, result.movement)
    return _judged(result, "error of the mean, relative to the movement,", 0.0, MEAN_MARGIN, estimate, rivals)


def _ratios(result: Theorem2, wrong: dict[str, ModelLaw]) -> list[Verdict]:
    verdicts, ensembles = [], result.ensembles
    kinds = ("variance", ensembles.variance_ratio), ("off-diagonal covariance", ensembles.covariance_ratio)
    for place, (quantity, ratio) in enumerate(kinds):
        rivals = [
            Rival(name, abs(expected_ratios(result.law, law)[place] - 1), bound(ratio, law))
            for name, law in wrong.items()
        ]
        statement = f"{quantity} over the law's"
        verdicts.append(_judged(result, statement, 1.0, COVARIANCE_MARGIN, ratio(result.law), rivals))
    return verdicts


def _cover(result: Theorem2, wrong: dict[str, ModelLaw]) -> Verdict:
    """Checks that 95 % of the networks' outputs are in the predicted 95 % intervals; ``wrong`` has wrong theories."""
    cover = result.ensembles.cover
    rivals = [
        Rival(name, abs(expected_cover(result.law, law) - COVERED), bound(cover, law)) for name, law in wrong.items()
    ]
    return _judged(result, "coverage of 95 % intervals", COVERED, COVER_MARGIN, cover(result.law), rivals)


def _reached(result: Theorem2) -> Verdict:
    """Checks that the flow's mean and variance are Theorem 2's limit after the last round, but not after a quarter.

    They count as the limit if they are as near to it as ``LawDistance.reached`` requires.
    """

    rounds = result.setting.size.num_rounds
    margins = [f"{REACHED * MEAN_MARGIN:g}", f"{REACHED * COVARIANCE_MARGIN:.1%}"]
    return Claim(THEOREM, f"the flow's law at round {rounds} is the limit", "").judged(
        (str(result.gap), ", ".join(f"<= {margin}" for margin in margins), result.gap.reached),
        (f"round {rounds // SOONER} instead", str(result.early), not result.early.reached),
        ", ".join(margins),
    )


ENTRIES = (
    TheoremEntry(
        "fed_ensemble.limit",
        "the law of K trained networks: mean, covariance and coverage, on digits (and on sine)",
        _checks,
        papers=("shi2024", "shi2021"),
        statement="Theorem 2 of FE-2024 (4.2 and eq. 17 of FE-2021)",
        functions=(ft.theory.gp_limit, ft.theory.covariance_terms),
        figures=("fed_ensemble.theorem2", "fed_ensemble.fig1", "fed_ensemble.fig2"),
    ),
)
