"""Theorem 2 on trained networks: K models of Fed-ensemble at two widths, on sine and on digits, beside their law.

The prediction is Theorem 2's limit where the exact flow, at the last round, is so near to it that K models cannot tell
the two apart; the flow's own law of that round where it is not. Either assumes infinite width. What a finite width
adds is measured apart, for every network against the flow from its own initial function, where sampling error all but
cancels: that difference, ``bias``, is no sampling error and falls with the width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedtangent import data as datasets
from fedtangent.compare import cases
from fedtangent.compare.predicted import ModelLaw, Predicted, networks, predict
from fedtangent.compare.settings import Scale, Setting
from fedtangent.compare.simulated import cohorts, fed_ensemble
from fedtangent.compare.statistics import NUM_STANDARD_ERRORS
from fedtangent.compare.theorems import TheoremEntry, of_scale
from fedtangent.compare.theorems.fed_ensemble.ensemble_law import (
    PARTS,
    Judged,
    Null,
    coverage,
    entries,
    judge,
    judge_coverage,
    null,
)
from fedtangent.compare.verdicts import Verdict
from fedtangent.data import partition
from fedtangent.federated import schedule
from fedtangent.models.dense import mlp
from fedtangent.theory import Flow
from fedtangent.theory.fed_ensemble.limit import covariance_terms
from fedtangent.types import Gaussian, Model

NUM_MODELS = 50
NUM_POINTS = 30  # test points of digits
SPACING = 0.08  # least distance of two training inputs of the sine
AWAY = 0.02  # least distance of a test input of the sine from a training input
REACHED = 0.5  # of a standard error: how far the last round's law may be from the limit to be judged by the limit
THEOREM = "FE-2024 Theorem 2 (FE-2021 4.2)"
NAMES = {"mean": "mean", "variance": "variance", "covariance": "off-diagonal covariance"}
SIZES = (
    {"sine": Scale((256, 1024), NUM_MODELS, 1000), "digits": Scale((256, 1024), NUM_MODELS, 1000)},
    {"sine": Scale((1024, 4096), NUM_MODELS, 2000), "digits": Scale((512, 2048), NUM_MODELS, 1500)},
)


class LawDistance(NamedTuple):
    """Distance of the last round's law from the limit, in standard errors of K models, the largest of all points."""

    mean: float
    variance: float

    @property
    def reached(self) -> bool:
        """Whether K models cannot tell the last round from the limit."""
        return max(self.mean, self.variance) <= REACHED


class TrainedEnsemble(NamedTuple):
    """K networks of one width at the last round, and what the flow makes of their own initial functions."""

    width: int
    start: np.ndarray  # [K, m, C]
    samples: np.ndarray  # [K, m, C]
    own_flow: np.ndarray  # [K, m, C]
    uplink_bytes: int
    downlink_bytes: int


class Theorem2(NamedTuple):
    """Everything about one data set."""

    theory: Predicted
    gap: LawDistance  # of the last round
    early: LawDistance  # of the first tenth of the rounds
    law: ModelLaw
    of: str  # what the law is: "Theorem 2's limit" or "the flow's law at round R"
    null: Null
    trained: tuple[TrainedEnsemble, ...]

    @property
    def setting(self) -> Setting:
        """What was compared."""
        return self.theory.setting


def sine(seed: int, num_models: int, widths: tuple[int, ...], num_rounds: int) -> Setting:
    """The papers' sine with a gap (FE-2024, section V-B): inputs at least ``SPACING`` apart on 4 unequal clients.

    The network has one hidden layer of cosines, whose kernel on these inputs has condition number of about 20: that of
    erf or ReLU networks is so large on a scalar input (1e3 to 1e14) that no run reaches the limit. Test inputs are at
    least ``AWAY`` from the training inputs: nearer, the predicted variance all but vanishes, and what the network's
    finite width and the last of training leave there, though small, is many times the prediction.
    """
    toy = datasets.load("sine", seed=seed, gap=True, test_points=61)
    chosen: list[int] = []
    for i, x in enumerate(toy.x_train[:, 0]):
        if all(abs(x - toy.x_train[j, 0]) >= SPACING for j in chosen):
            chosen.append(i)
    x_train, y_train = toy.x_train[chosen], toy.y_train[chosen]
    away = np.min(np.abs(toy.x_test - x_train.T), axis=1) >= AWAY
    clients = partition.quantity_skew(len(chosen), 4, alpha=2.0, seed=seed, min_client_size=1)

    def model(width: int) -> Model:
        return mlp(1, 1, widths=(width,), activation="cos", w_std=12.0, b_std=2.0, last_w_std=1.0, dtype=jnp.float64)

    return Setting(
        name="sine",
        title=f"Sine with a gap, {len(chosen)} examples on 4 clients: network of one hidden layer of cosines",
        x_train=x_train,
        y_train=y_train,
        x_test=toy.x_test[away],
        y_test=toy.y_test[away],
        partition=clients,
        schedule=schedule.per_client_permutations(4, num_models),
        model=model,
        widths=widths,
        local_steps=20,
        num_rounds=num_rounds,
        seed=seed,
    )


def digits(seed: int, num_models: int, widths: tuple[int, ...], num_rounds: int) -> Setting:
    """The digits of ``fedtangent compare``: 100 examples, 10 outputs, 10 unequal clients; a ReLU network."""
    whole = cases.digits(None, "smoke", seed)
    return dataclasses.replace(
        whole,
        x_test=whole.x_test[:NUM_POINTS],
        y_test=whole.y_test[:NUM_POINTS],
        labels_test=None,
        schedule=schedule.per_client_permutations(whole.partition.num_clients, num_models),
        widths=widths,
        draws=1,
        num_rounds=num_rounds,
        evaluate_every=0,
    )


SETTINGS: dict[str, Callable[[int, int, tuple[int, ...], int], Setting]] = {"sine": sine, "digits": digits}


def compare(setting: Setting, say: Callable[[str], None] = lambda line: None) -> Theorem2:
    """Train the K networks of every width, predict their law, and draw from it what chance alone would show."""
    say(f"{setting.name}: law of round {setting.num_rounds}")
    theory = predict(setting, cohorts(setting))
    law, limit, of = theory.moments[-1], theory.limit, f"the flow's law at round {setting.num_rounds}"
    sooner = setting.num_rounds // 10
    early = ModelLaw(np.asarray(theory.flow.mean(sooner)), np.asarray(theory.flow.cov(sooner)))
    gaps = _gap(law, limit), _gap(early, limit)
    if limit is not None and gaps[0].reached:
        law = ModelLaw(np.broadcast_to(limit.mean, law.mean.shape), np.broadcast_to(limit.cov, law.cov.shape))
        of = "Theorem 2's limit"
    trained = []
    for width in setting.widths:
        say(f"{setting.name}: {setting.schedule.num_models} networks of width {width}, {setting.num_rounds} rounds")
        trained.append(train(setting, theory.flow, width))
    return Theorem2(theory, *gaps, law, of, null(law, seed=setting.seed), tuple(trained))


def train(setting: Setting, flow: Flow, width: int) -> TrainedEnsemble:
    """K networks of ``width`` by Fed-ensemble, and the flow from the initial function of each."""
    seen = fed_ensemble(setting, width)
    own = networks(flow, [seen], (setting.num_rounds,))[0][0]
    outputs = seen.test[0][:, 0], seen.test[-1][:, 0], own[:, 0]
    return TrainedEnsemble(width, *outputs, seen.uplink_bytes, seen.downlink_bytes)


def _gap(law: ModelLaw, limit: Gaussian | None) -> LawDistance:
    if limit is None:
        return LawDistance(np.inf, np.inf)
    count, variance = len(law.mean), np.diag(limit.cov)
    mean = np.abs(law.mean.mean(axis=0) - limit.mean) / np.sqrt(variance / count)[:, None]
    ratio = np.abs(np.diag(law.average_cov) / variance - 1) / np.sqrt(2 / (count - 1))
    return LawDistance(float(np.max(mean)), float(np.max(ratio)))


class VarianceBias(NamedTuple):
    """Relative bias of the variance at one width, averaged over points and outputs: networks less the flow."""

    each: np.ndarray  # [K], of each model

    @property
    def value(self) -> float:
        """Over all models."""
        return float(self.each.mean())

    @property
    def standard_error(self) -> float:
        """Of the value, from the scatter of the models."""
        return float(self.each.std(ddof=1) / np.sqrt(len(self.each)))


def variance_bias(trained: TrainedEnsemble, law: ModelLaw) -> VarianceBias:
    """What the finite width adds to the variance, relative to the law's.

    The variance of the networks minus that of the flow from the same initial functions, about the law's mean: the
    sampling error, common to both, all but cancels.
    """
    variance = np.diag(law.average_cov)[None, :, None]
    squares = ((trained.samples - law.mean) ** 2 - (trained.own_flow - law.mean) ** 2) / variance
    return VarianceBias(squares.mean(axis=(1, 2)))


def mean_bias(trained: TrainedEnsemble, law: ModelLaw) -> float:
    """Root mean square over entries of what the finite width adds to the mean, in standard errors of K models."""
    error = np.sqrt(np.diag(law.average_cov) / len(trained.samples))[:, None]
    return float(np.sqrt(np.mean(((trained.samples - trained.own_flow).mean(axis=0) / error) ** 2)))


def one_client_alone(result: Theorem2) -> ModelLaw:
    """The law with the mean that the largest client's data alone would give. A wrong theory."""
    setting, blocks = result.setting, result.theory.blocks
    own = setting.partition.client(int(np.argmax(setting.partition.sizes)))
    mean = blocks.ntk_test_train[:, own] @ np.linalg.solve(blocks.ntk_train[np.ix_(own, own)], setting.y_train[own])
    return result.law._replace(mean=np.broadcast_to(mean, result.law.mean.shape))


def without_cross_terms(result: Theorem2) -> ModelLaw:
    """The law with the prior and propagated terms of its covariance, but not the cross terms. A wrong theory."""
    blocks = result.theory.blocks
    terms = covariance_terms(blocks, np.linalg.solve(blocks.ntk_train, blocks.ntk_test_train.T).T)
    return result.law._replace(cov=np.broadcast_to(terms.prior + terms.propagated, result.law.cov.shape))


def checks(scale: str, seed: int) -> list[Verdict]:
    """Both data sets at both widths, the distance of the last round from the limit, and the finite-width bias."""
    found = []
    for name, size in of_scale(scale, *SIZES).items():
        result = compare(SETTINGS[name](seed, size.draws, size.widths, size.num_rounds))
        found += rows(result)
    return found


def rows(result: Theorem2) -> list[Verdict]:
    """Every check of one data set."""
    wrong = {"mean": ("the largest client alone", one_client_alone(result))}
    wrong |= dict.fromkeys(("variance", "covariance"), ("no cross terms", without_cross_terms(result)))
    found = [_distance(result)] if result.theory.limit is not None else []
    for trained in result.trained:
        found += [_entries(result, trained, part, *wrong[part]) for part in PARTS]
        found.append(_coverage(result, trained))
    return [*found, _bias(result)] if result.setting.y_train.shape[1] > 1 else found


def _row(statement: str, result: Theorem2, width: object, right: Judged, control: str, wrong: Judged) -> Verdict:
    s = result.setting
    sizes = f"{s.name}: K = {len(result.law.mean)}, width {width}, m = {len(s.x_test)}, C = {s.y_train.shape[1]}"
    return Verdict(THEOREM, statement, *right, control, wrong.measured, not wrong.holds, sizes)


def _entries(result: Theorem2, trained: TrainedEnsemble, part: str, control: str, wrong: ModelLaw) -> Verdict:
    right, other = (judge(entries(trained.samples, law)[part], part, result.null) for law in (result.law, wrong))
    return _row(f"{NAMES[part]} = {result.of}", result, trained.width, right, control, other)


def _coverage(result: Theorem2, trained: TrainedEnsemble) -> Verdict:
    """Of the trained networks, and of the same ones before training."""
    bias = variance_bias(trained, result.law).value
    right = judge_coverage(coverage(trained.samples, result.law), result.null, bias)
    wrong = judge_coverage(coverage(trained.start, result.law), result.null, bias)
    return _row("95 % intervals cover 95 %", result, trained.width, right, "untrained networks", wrong)


def _distance(result: Theorem2) -> Verdict:
    """Of the exact law at the last round from the limit; where it is too large, networks are judged by the former."""

    def outcome(gap: LawDistance) -> Judged:
        said = f"mean {gap.mean:.2g} SE, variance {gap.variance:.2g} SE"
        return Judged(said, f"<= {REACHED} SE of K models", gap.reached)

    rounds = result.setting.num_rounds
    statement = f"the flow's law at round {rounds} is the limit"
    return _row(
        statement, result, "infinite", outcome(result.gap), f"round {rounds // 10} instead", outcome(result.early)
    )


def _bias(result: Theorem2) -> Verdict:
    """What a finite width adds to the variance, times the width, is one number; without the factor it is not."""
    small, large = (variance_bias(t, result.law) for t in result.trained)
    widths = tuple(t.width for t in result.trained)

    def outcome(scale: tuple[float, float]) -> Judged:
        difference = VarianceBias(small.each * scale[0] - large.each * scale[1])
        value, error = difference.value, difference.standard_error
        said = f"{small.value * scale[0]:.3g} and {large.value * scale[1]:.3g} (difference {value:.2g})"
        return Judged(said, f"equal, +- 3 x {error:.2g}", bool(abs(value) <= NUM_STANDARD_ERRORS * error))

    right, wrong = outcome((widths[0], widths[1])), outcome((1.0, 1.0))
    statement = "relative bias of the variance x width is constant"
    return _row(statement, result, f"{widths[0]} and {widths[1]}", right, "constant bias", wrong)


ENTRIES = (
    TheoremEntry(
        "fed_ensemble.limit",
        "the law of K trained networks, entry by entry, on sine and on digits",
        checks,
        papers=("shi2024", "shi2021"),
        statement="Theorem 2 of FE-2024 (4.2 and eq. 17 of FE-2021)",
    ),
)
