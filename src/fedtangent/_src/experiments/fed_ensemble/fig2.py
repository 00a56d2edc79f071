"""What is known where there are no data: sine functions with a gap, FedAvg against Fed-ensemble (FE-2024, section V-B
and Fig. 2).

Clients hold data on [-1, -0.5] and [0.5, 1]. FedAvg's band is constant, from its residuals on the training data;
Fed-ensemble's is the variance of its models, as in the paper, and with the residuals' added. Beside them stand the
exact bands of an infinite ensemble after the same rounds, and of the process of Theorem 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedtangent._src.comparison.statistics import relative_distance
from fedtangent._src.comparison.theorems.fed_ensemble.repeated_runs import AMPLITUDE, NOISE
from fedtangent._src.comparison.verdicts import EXACT, Verdict, exact_verdict
from fedtangent._src.experiments.lab import sine
from fedtangent._src.experiments.lab.results import Claim, MeanInterval, Outcome, Sheet, disagreeing, interval
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.federated import schedule
from fedtangent._src.intervals import Interval
from fedtangent._src.kernels.gram import KernelBlocks, SingularKernelError
from fedtangent._src.measures import uncertainty
from fedtangent._src.output.files import Metric
from fedtangent._src.output.function_plots import BandPanel, bands_side_by_side
from fedtangent._src.output.style import METHODS, NEUTRAL, PREDICTED
from fedtangent._src.theory.fed_ensemble.limit import gp_limit
from fedtangent._src.types import Algorithm, Model

AVERAGE, ENSEMBLE, WITH_NOISE, FLOW, LIMIT = "fed_avg", "fed_ensemble", "fed_ensemble+residual", "flow", "limit"
LABELS = {
    AVERAGE: "FedAvg, residual variance",
    ENSEMBLE: "Fed-ensemble, variance of models",
    WITH_NOISE: "Fed-ensemble, models + residual",
    FLOW: "exact process, last round",
    LIMIT: "process of Theorem 2 (limit)",
}
EDGE = 0.5  # data lie in [-1, -0.5] and [0.5, 1]
REGIONS = ("data", "gap")
SHOWN = ("covers truth", "mean width", "NLL")
COLUMNS = tuple(f"{score}.{where}" for score in ("coverage", "width", "nll") for where in REGIONS)
COLOURS = {AVERAGE: METHODS[3], ENSEMBLE: METHODS[0], WITH_NOISE: METHODS[2], FLOW: PREDICTED, LIMIT: NEUTRAL}


@dataclass(frozen=True)
class GapSettings:
    """The paper's fifty clients of two points; the paper does not give the number of rounds."""

    num_clients: int = 50
    points_per_client: int = 2
    spacing: float = within(0.0, at_least=0)
    num_models: int = within(5, least=2)
    model: str = within("linear", of=("linear", "network"))
    width: int = 512
    local_steps: int = 10
    num_rounds: int = 200


class Band(NamedTuple):
    """A prediction with its standard deviation at m points."""

    mean: np.ndarray  # [m]
    sd: np.ndarray  # [m]
    members: np.ndarray  # [K, m]; K = 0 for a process


class GapCase(NamedTuple):
    """Results of one seed."""

    seed: int
    held: sine.SineData
    found: dict[str, Band]  # by method
    scores: dict[str, dict[str, float]]
    distance: float  # of Fed-ensemble's models from the flow's prediction of each, relative
    wrong: float  # of the models from the flow's mean, which ignores their initial functions
    trouble: str  # why the limit is unreliable; "" if it is not


def band_of_members(members: np.ndarray, noise_variance: float = 0.0) -> Band:
    """Computes the band of models [K, m, 1]: their mean, and their variance plus ``noise_variance``.

    The band is computed by ``uncertainty.predictive_interval``. With one model its width comes from ``noise_variance``
    only, and is constant over inputs.
    """
    found = uncertainty.predictive_interval(jnp.asarray(members), noise_variance=noise_variance)
    half = 0.5 * np.asarray(found.high - found.low)[:, 0]
    return Band(members.mean(axis=0)[:, 0], half / sine.NORMAL_95, members[:, :, 0])


def band_of_processes(means: np.ndarray, covariances: np.ndarray) -> Band:
    """Computes the band of a model drawn at random from K processes with means [K, m, 1], covariances [K, m, m]."""
    variance = np.diagonal(covariances, axis1=1, axis2=2).mean(axis=0) + means[:, :, 0].var(axis=0)
    return Band(means.mean(axis=0)[:, 0], np.sqrt(np.maximum(variance, 0)), np.zeros((0, means.shape[1])))


def scores(band: Band, x: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Computes the coverage of the true function [m, 1], mean width, and mean NLL of an observation, in each region.

    The NLL is the exact expectation of ``-log N(y; mean, sd^2)`` in nats over an observation y of a new client, ``a
    sin(2 pi x) + eps`` with ``a ~ N(1, 0.2^2)`` and ``eps ~ N(0, 0.2^2)`` (FE-2024, section V-A). It is infinite if the
    band has no width at some point of the region.
    """
    found, outside = {}, np.abs(x[:, 0]) >= EDGE - 1e-9
    low, high = (band.mean + sign * sine.NORMAL_95 * band.sd for sign in (-1, 1))
    for name in REGIONS:
        at = outside if name == "data" else ~outside
        ends = Interval(*(jnp.asarray(values[at]) for values in (band.mean, low, high)))
        found[f"coverage.{name}"] = float(uncertainty.coverage(ends, jnp.asarray(truth[at, 0])))
        found[f"width.{name}"] = float(np.mean(high[at] - low[at]))
        missed = (band.mean - truth[:, 0])[at] ** 2 + (AMPLITUDE * truth[at, 0] ** 2 + NOISE)
        variance = band.sd[at] ** 2
        found[f"nll.{name}"] = np.inf
        if np.all(variance > 0):
            found[f"nll.{name}"] = float(np.mean(0.5 * np.log(2 * np.pi * variance) + missed / (2 * variance)))
    found["ratio"] = found["width.gap"] / found["width.data"] if found["width.data"] > 0 else np.inf
    return found


def summary(name: str, values: Any) -> MeanInterval:
    """Computes the mean over seeds with Student's interval; Wilson's for a coverage, the geometric mean's for a ratio.

    Wilson's interval counts each seed as one point, as the points of one seed share its models.
    """
    values = np.asarray(values, np.float64)
    mean = float(np.mean(values))
    if name.startswith("coverage"):
        ends = uncertainty.coverage_interval(mean, len(values))
        return MeanInterval(mean, float(ends.low), float(ends.high))
    if not np.all(np.isfinite(values)):
        return MeanInterval(mean, np.nan, np.nan)
    if name == "ratio":
        return MeanInterval(*(float(np.exp(v)) for v in interval(np.log(values))))
    return interval(values)


def run(study: Study) -> Outcome:
    """Computes the bands of both methods, the flow and the limit on every seed's data."""
    s, cases = study.settings, list[GapCase]()
    model = sine.linear_model() if s.model == "linear" else sine.network(s.width)
    first = sine.of_study(study, study.seeds[0], gap=True)
    plans = schedule.all_clients(s.num_clients), schedule.per_client_permutations(s.num_clients, s.num_models)
    single, ensemble = (sine.algorithm(model, first, plan, s.local_steps) for plan in plans)
    for seed in study.each_seed():
        cases.append(_case(s, model, single, ensemble, sine.of_study(study, seed, gap=True), seed))
        study.keep([
            Metric(s.num_rounds, method, seed, "test", name, value, 0, 0)
            for method, of in cases[-1].scores.items() for name, value in of.items()
        ])  # fmt: skip
    _draw(study, cases[0])
    found = {  # a limit that some seed has not is left out
        m: {name: summary(name, [case.scores[m][name] for case in cases]) for name in (*COLUMNS, "ratio")}
        for m in cases[0].scores if all(m in case.scores for case in cases)
    }  # fmt: skip
    rows = [{"method": m, "score": score, **v.row("mean")} for m, of in found.items() for score, v in of.items()]
    shown = tuple((LABELS[m], *(format(v, ".0%" if name.startswith("coverage") else ".3g") for name, v in of.items()))
                  for m, of in found.items())  # fmt: skip
    columns = ("band", *(f"{what}: {where}" for what in SHOWN for where in REGIONS), "width gap / data (geometric)")
    sheet = Sheet("95 % bands where there are data and in the gap: means over seeds, 95 % intervals", columns, shown)
    remarks = [
        "NLL: expectation over an observation of a new client, in nats; bands without the residual's variance are of "
        "the function, not of observations. Coverage intervals count a seed as one point (Wilson)"
    ]
    trouble = [case for case in cases if case.trouble]
    if trouble:
        remarks.append(
            f"Theorem 2 assumes Theta to have full rank; in {len(trouble)} of {len(cases)} seeds it has not (seed "
            f"{trouble[0].seed}: {trouble[0].trouble}). Choose clients by --set num_clients=8 spacing=0.03 to see it"
        )
    verdicts = (exact(cases),) if s.model == "linear" else ()
    return Outcome((sheet,), rows, judge(found), {}, tuple(remarks), disagreeing(verdicts), verdicts)


def _case(
    s: GapSettings, model: Model, single: Algorithm, ensemble: Algorithm, held: sine.SineData, seed: int
) -> GapCase:
    one = sine.train(held, single, s.num_rounds, seed)
    several = sine.train(held, ensemble, s.num_rounds, seed)
    flow, blocks = sine.flow(held, model, ensemble.schedule, s.local_steps, s.num_rounds, seed)
    means, (limit, trouble) = np.asarray(flow.mean(s.num_rounds)), _limit(blocks, held)
    found = {
        AVERAGE: band_of_members(one.test, _residual(one, held)),
        ENSEMBLE: band_of_members(several.test),
        WITH_NOISE: band_of_members(several.test, _residual(several, held)),
        FLOW: band_of_processes(means, np.asarray(flow.cov(s.num_rounds))),
        **({} if limit is None else {LIMIT: limit}),
    }
    predicted = np.asarray(flow.predict(several.start_train, several.start, s.num_rounds))
    distance, wrong = relative_distance(predicted, several.test), relative_distance(means, several.test)
    by_method = {method: scores(band, held.x_test, held.y_test) for method, band in found.items()}
    return GapCase(seed, held, found, by_method, distance, wrong, trouble)


def _residual(trained: sine.TrainedOutputs, held: sine.SineData) -> float:
    """Computes the mean squared residual of the mean prediction on the training data: the paper's fitting error."""
    return float(np.mean((trained.train.mean(axis=0) - held.y) ** 2))


def _limit(blocks: KernelBlocks, held: sine.SineData) -> tuple[Band | None, str]:
    """Computes Theorem 2's band, None if Theta is singular, and a description of its numerical trouble, or ""."""
    try:
        limit = gp_limit(blocks, held.y)
    except SingularKernelError as error:
        return None, str(error)
    reach = float(np.max(np.abs(limit.mean)))
    trouble = f"Theta is singular in float64, inverted with jitter {limit.jitter:.1e}; the mean reaches {reach:.2g}"
    band = band_of_processes(np.asarray(limit.mean)[None], np.asarray(limit.cov)[None])
    return band, trouble if limit.jitter > 0 else ""


def judge(found: dict[str, dict[str, MeanInterval]]) -> tuple[Claim, ...]:
    """Judges the claims of section V-B: Fed-ensemble's band is wide in the gap without data."""
    ratio, own, single = found[ENSEMBLE]["ratio"], found[ENSEMBLE]["coverage.gap"], found[AVERAGE]["coverage.gap"]
    return (
        Claim("Fed-ensemble's band is wider in the gap than on the data",
              f"width ratio {ratio:.1f}, FedAvg's {found[AVERAGE]['ratio'].mean:.1f}", ratio.above(1)),
        Claim("Fed-ensemble's band covers the true function in the gap",
              f"coverage {own:.0%}, nominal 95 %", own.above(0.95)),
        Claim("FedAvg's band is overconfident in the gap", f"coverage {single:.0%}, nominal 95 %",
              single.below(0.95)),
    )  # fmt: skip


def exact(cases: Sequence[GapCase]) -> Verdict:
    """Checks that linear models end where the flow predicts; control: the flow's mean, without initial functions."""
    worst, wrong = max(case.distance for case in cases), min(case.wrong for case in cases)
    controls = {"its mean, without their start": wrong}
    found = exact_verdict("the exact flow", "linear models are where it puts them", worst, controls, EXACT)
    return found._replace(sizes=f"{len(cases)} seeds")


def _draw(study: Study, case: GapCase) -> None:
    s = study.settings
    titles = LABELS | ({LIMIT: f"{LABELS[LIMIT]}: singular"} if case.trouble else {})
    panels = [
        BandPanel(titles[m], b.mean, b.sd, b.members if len(b.members) > 1 else b.members[:0], COLOURS[m])
        for m, b in case.found.items()
    ]
    held, exact = case.held, case.found[FLOW]
    height = 1.05 * float(np.max(np.abs(exact.mean) + sine.NORMAL_95 * exact.sd))
    title = f"Sine functions with a gap, {s.num_clients} clients, {s.model} model, {s.num_rounds} rounds"
    bands_side_by_side(panels, (held.x[:, 0], held.y[:, 0]), (held.x_test[:, 0], held.y_test[:, 0]), EDGE, height,
                       title, study.figures.path("uncertainty"))  # fmt: skip


SCALES = {"sine": by_scale(GapSettings(), GapSettings(num_rounds=1000), GapSettings(num_rounds=5000))}
CHECK = partial(sine.check, gap=True)
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024",), check=CHECK, least_seeds=2, exact=True),)
