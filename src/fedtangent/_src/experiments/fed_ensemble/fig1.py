"""An ensemble of three samples from the posterior: the Gaussian process of Theorem 2 beside models trained (FE-2024,
Fig. 1; FE-2021, Fig. 1).

The paper's figure is a drawing. Here the process is computed, and three models are trained by Fed-ensemble on the same
data: the linear model of FE-2024, section V-A, for which Theorem 2 is exact, and an erf network, for which it holds as
the width grows. It is tested whether the models are draws of the process. The control is the same models before
training, which must fail the test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import scipy

import fedtangent as ft
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab import sine
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.output.function_plots import PosteriorRow, posterior_samples
from fedtangent.types import Algorithm, Gaussian, Model, Verdict

MODELS = {"linear": "linear model, 100 RBFs", "network": "erf network"}
BEFORE, AFTER = "untrained", "trained"
DRAWS = "draws of the process"
LEAST_SD = 0.1  # of the largest deviation; where it is smaller, a standardised distance is rounding
SHARE_OF_VARIANCE = 0.99  # held by the leading directions
REFERENCE_DRAWS = 4000
OUTSIDE = 0.0027  # share of draws outside a range, that of three standard errors


@dataclass(frozen=True)
class PosteriorSettings:
    """Settings of fig. 1 of FE-2024: the data, the models and their training.

    Inputs are at least ``spacing`` apart, so that the kernel has full rank, as FE-2024's Theorem 2 assumes.
    """

    num_clients: int = 5
    points_per_client: int = 2
    spacing: float = within(0.1, at_least=0)
    num_models: int = 3
    width: int = 1024
    local_steps: int = 10
    num_rounds: int = 800


class Distance(NamedTuple):
    """Distances of K functions f from a Gaussian process with a given mean and standard deviation sd, [K] each.

    Attributes:
        largest: Largest ``|f - mean| / sd`` over the test points at which sd is at least a tenth of its maximum.
        inside: Share of these points at which f is in the 95 % band.
        squared: Squared Mahalanobis distance in the main directions of the covariance.
    """

    largest: np.ndarray
    inside: np.ndarray
    squared: np.ndarray


class Law(NamedTuple):
    """A Gaussian process at m points: mean, standard deviation, and main directions of the covariance.

    Attributes:
        mean, sd: Mean and standard deviation, [m].
        kept: Whether the standard deviation at a point is at least a tenth of the largest, [m].
        directions: Leading unit eigenvectors of the covariance, which have 99 % of the variance, [m, rank].
        variances: Their eigenvalues, [rank].
    """

    mean: np.ndarray
    sd: np.ndarray
    kept: np.ndarray
    directions: np.ndarray
    variances: np.ndarray

    @property
    def rank(self) -> int:
        """Effective rank: the least number of directions that have 99 % of the variance."""
        return len(self.variances)


class PosteriorCase(NamedTuple):
    """Trained models of one kind (linear or network) with one seed, and their distances from Theorem 2's process.

    Attributes:
        law: The Gaussian process of FE-2024's Theorem 2.
        distances: Distances of the models from this process, by "untrained" and "trained".
        to_limit: Largest relative distance, over models, of the mean that the flow predicts after the last round from
            the mean of this process.
    """

    seed: int
    data: sine.SineData
    law: Law
    trained: sine.TrainedOutputs
    distances: dict[str, Distance]
    to_limit: float


def law_of(process: Gaussian) -> Law:
    """Computes the mean, the standard deviations and the main directions of a Gaussian process of one output.

    The main directions are the eigenvectors of the covariance that have 99 % of the variance.
    """
    values, vectors = np.linalg.eigh(np.asarray(process.cov))
    values, vectors = np.maximum(values[::-1], 0), vectors[:, ::-1]
    rank = 1 + int(np.searchsorted(np.cumsum(values) / np.sum(values), SHARE_OF_VARIANCE))
    sd = np.sqrt(np.maximum(np.diag(process.cov), 0))
    return Law(np.asarray(process.mean)[:, 0], sd, sd >= LEAST_SD * np.max(sd), vectors[:, :rank], values[:rank])


def _distance(law: Law, functions: np.ndarray) -> Distance:
    """Computes how far functions [K, m] are from the Gaussian process ``law``, in three measures."""
    away = functions - law.mean
    z = np.abs(away[:, law.kept] / law.sd[law.kept])
    squared = np.sum((away @ law.directions) ** 2 / law.variances, axis=1)
    return Distance(np.max(z, axis=1), np.mean(z <= sine.NORMAL_95, axis=1), squared)


def _draws(law: Law, count: int, seed: int) -> np.ndarray:
    """Samples ``count`` functions [count, m] from the Gaussian process ``law``, along its main directions only."""
    normal = np.random.default_rng(seed).standard_normal((count, law.rank))
    return law.mean + (normal * np.sqrt(law.variances)) @ law.directions.T


def run(study: Study) -> lab.Outcome:
    """Trains a linear model and an erf network for every seed; tests whether they are draws of Theorem 2's process."""
    settings, cases, models = study.settings, dict[str, list[PosteriorCase]](), list[lab.Row]()
    schedule = ft.schedules.per_client_permutations(settings.num_clients, settings.num_models)
    for name, model in (("linear", sine.linear_model()), ("network", sine.network(settings.width))):
        algorithm = sine.algorithm(
            model, sine.of_study(study, study.seeds[0], gap=False), schedule, settings.local_steps
        )
        cases[name] = []
        study.say(MODELS[name])
        for seed in study.each_seed():
            case = _case(study, model, algorithm, seed)
            cases[name].append(case)
            for when, d in case.distances.items():
                round_ = 0 if when == BEFORE else settings.num_rounds
                for metric, values in d._asdict().items():
                    for k, value in enumerate(values):
                        study.keep(lab.metric_rows(f"{name} model={k}", seed, round_, {metric: value}, "test"))
                for k in range(settings.num_models):
                    row = {"model": name, "seed": seed, "member": k, "when": when, "rank": case.law.rank}
                    models.append(row | {metric: float(values[k]) for metric, values in d._asdict().items()})
    pools = [_pooled(name, when, cases[name]) for name in MODELS for when in (AFTER, BEFORE)]
    _draw(study, {name: of_seeds[0] for name, of_seeds in cases.items()})
    title = f"Are they samples of the posterior? {len(study.seeds)} seeds, ranges of draws at three standard errors"
    columns = "all seeds: {label}, {when} | models: {models} | squared distance / rank: {ratio:.3f} | "
    columns += "of draws: [{ratio_low:.3f}, {ratio_high:.3f}] | in the band: {inside:.1%} | "
    columns += "in it, of draws: [{inside_low:.1%}, {inside_high:.1%}] | largest |f - m| / sd: {largest:.2f} | "
    columns += "at most, of draws: {largest_high:.2f} | the models are: {verdict}"
    sheet = lab.table(title, [{**pool, "label": MODELS[pool["model"]]} for pool in pools], columns)
    farthest = {name: max(case.to_limit for case in of_seeds) for name, of_seeds in cases.items()}
    remarks = tuple(
        f"{MODELS[name]}: after {settings.num_rounds} rounds the exact mean is within {to_limit:.1e} of the limit's; "
        f"distances at points with a standard deviation of at least {LEAST_SD:g} of the largest"
        for name, to_limit in farthest.items()
    )
    verdicts, claim = _verdicts_of(pools), "all models are samples of the same posterior process"
    claims = tuple(
        lab.Claim(f"{claim}: {v.sizes}", v.measured, lab.SEEN if v.passed else lab.NOT_SEEN) for v in verdicts
    )
    return lab.Outcome((sheet,), pools, claims, {"models": models}, remarks, verdicts=verdicts)


def _case(study: Study, model: Model, algorithm: Algorithm, seed: int) -> PosteriorCase:
    settings, data = study.settings, sine.of_study(study, seed, gap=False)
    trained = sine.train(data, algorithm, settings.num_rounds, seed)
    flow, blocks = sine.flow(data, model, algorithm.schedule, settings.local_steps, settings.num_rounds, seed)
    limit = ft.theory.gp_limit(blocks, data.y)
    law = law_of(limit)
    to_limit = max(flow.limit_distance(settings.num_rounds, k, limit).mean for k in range(settings.num_models))
    distances = {when: _distance(law, f[:, :, 0]) for when, f in ((BEFORE, trained.start), (AFTER, trained.test))}
    return PosteriorCase(seed, data, law, trained, distances, to_limit)


def _pooled(name: str, when: str, cases: Sequence[PosteriorCase]) -> lab.Row:
    """Builds a row: the models' distances from the Gaussian process over all seeds, with the ranges of true draws.

    ``name`` is the kind of model, ``when`` "untrained" or "trained". The row's verdict is by "ratio", the squared
    distance over the rank.
    """
    # The ratio is expected to be 1. Its range is a chi-square variable's at the level of three standard errors. The
    # ranges of the share in the band and of the largest distance are at the same level, by draws of the processes.
    distances = [case.distances[when] for case in cases]
    freedom = sum(case.law.rank * len(d.squared) for case, d in zip(cases, distances, strict=True))
    ratio = float(sum(np.sum(d.squared) for d in distances)) / freedom
    low, high = (float(scipy.stats.chi2.ppf(q, freedom)) / freedom for q in (OUTSIDE / 2, 1 - OUTSIDE / 2))
    shares, largest = _reference(cases, len(distances[0].squared))
    return {
        "model": name,
        "when": when,
        "models": sum(len(d.squared) for d in distances),
        "degrees": freedom,
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "inside": float(np.mean([d.inside for d in distances])),
        "inside_low": shares[0],
        "inside_high": shares[1],
        "largest": float(np.max([d.largest for d in distances])),
        "largest_high": largest,
        "verdict": DRAWS if low <= ratio <= high else "no draws of it",
    }


def _reference(cases: Sequence[PosteriorCase], num_models: int) -> tuple[tuple[float, float], float]:
    """Computes the distances that true draws have, by sampling ``num_models`` functions from each process 4000 times.

    Returns the range of the share of points in the 95 % band, and the upper limit of the largest distance. A share of
    0.0027 of the samples is outside the range, and as large a share above the limit.
    """
    inside, largest, shape = np.zeros(REFERENCE_DRAWS), np.zeros(REFERENCE_DRAWS), (REFERENCE_DRAWS, num_models)
    for i, case in enumerate(cases):
        d = _distance(case.law, _draws(case.law, REFERENCE_DRAWS * num_models, i))
        inside += d.inside.reshape(shape).mean(axis=1) / len(cases)
        largest = np.maximum(largest, d.largest.reshape(shape).max(axis=1))
    low, high = np.quantile(inside, [OUTSIDE / 2, 1 - OUTSIDE / 2])
    return (float(low), float(high)), float(np.quantile(largest, 1 - OUTSIDE))


def _verdicts_of(pools: list[lab.Row]) -> tuple[Verdict, ...]:
    """Judges whether the trained models of all seeds are draws of the Gaussian process (FE-2024, Remark 4).

    It does so by the squared distance over the rank, for each kind of model. The control are the untrained models. A
    verdict that does not hold is a claim that is not seen, and does not fail the experiment.
    """
    verdicts = []
    for name, label in MODELS.items():
        before, after = (next(p for p in pools if (p["model"], p["when"]) == (name, w)) for w in (BEFORE, AFTER))
        expected = f"[{after['ratio_low']:.3f}, {after['ratio_high']:.3f}]"
        right = f"{after['ratio']:.3f}", expected, after["verdict"] == DRAWS
        wrong = "untrained", f"{before['ratio']:.3f}", before["verdict"] != DRAWS
        verdicts.append(Verdict.of("FE-2024 Remark 4", "squared distance from the process / rank", label, right, wrong))
    return tuple(verdicts)


def _draw(study: Study, cases: dict[str, PosteriorCase]) -> None:
    settings, rows = study.settings, []
    for name, case in cases.items():
        label = MODELS[name] + (f", width {settings.width}" if name == "network" else "")
        (x, y, _, x_test, _) = case.data
        samples = _draws(case.law, settings.num_models, case.seed)
        functions = samples, case.trained.test[:, :, 0], case.trained.start[:, :, 0]
        rows.append(PosteriorRow(label, x[:, 0], y[:, 0], x_test[:, 0], case.law.mean, case.law.sd, *functions))
    posterior_samples(rows, settings.num_rounds, study.figures.path("posterior_samples"))


CHECK = partial(sine.check, gap=False)
DEFAULT, PAPER = PosteriorSettings(width=2048, num_rounds=1500), PosteriorSettings(width=8192, num_rounds=3000)
SCALES = {"sine": by_scale(PosteriorSettings(), DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), check=CHECK, exact=True),)
