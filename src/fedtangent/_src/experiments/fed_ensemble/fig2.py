"""Uncertainty where there are no data: sine functions with a gap, FedAvg against Fed-ensemble (FE-2024, section V-B
and Fig. 2).

Clients have data on [-1, -0.5] and [0.5, 1]. FedAvg's band has a constant width, from its residuals on the training
data. Fed-ensemble's band has the variance of its models, as in the paper, or the sum of this variance and the variance
of the residuals. The bands are compared with the exact band of an infinite ensemble after the same rounds, and with the
Gaussian process of Theorem 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src.comparison.statistics import relative_distance
from fedtangent._src.comparison.theorems.fed_ensemble.bias_variance import AMPLITUDE, NOISE
from fedtangent._src.comparison.verdicts import EXACT, Verdict, exact_verdict
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab import sine
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.measures import uncertainty
from fedtangent._src.output.function_plots import BandPanel, bands_side_by_side
from fedtangent._src.output.style import METHODS, NEUTRAL, PREDICTED
from fedtangent.types import Algorithm, Model

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
    """Settings of fig. 2 of FE-2024: its fifty clients of two points, and choices that the paper leaves open."""

    num_clients: int = 50
    points_per_client: int = 2
    spacing: float = within(0.0, at_least=0)
    num_models: int = within(5, least=2)
    model: str = within("linear", of=("linear", "network"))
    width: int = 512
    local_steps: int = 10
    num_rounds: int = 200


class Band(NamedTuple):
    """A predicted mean at m points, its standard deviation, and the outputs of the models from which it is computed."""

    mean: np.ndarray  # [m]
    sd: np.ndarray  # [m]
    members: np.ndarray  # [K, m]; K = 0 for a process


class GapCase(NamedTuple):
    """The bands (mean and standard deviation) of all methods on one seed's data, and their scores by method and name.

    Attributes:
        distance: Relative distance of Fed-ensemble's trained models from the outputs that the flow predicts for them
            from their initial functions.
        wrong: As a control, the models' relative distance from the flow's mean, which ignores initial functions.
        trouble: Why Theorem 2's process is numerically unreliable; "" if it is reliable.
    """

    seed: int
    data: sine.SineData
    bands: dict[str, Band]  # by method
    scores: dict[str, dict[str, float]]
    distance: float
    wrong: float
    trouble: str


def _band_of_members(members: np.ndarray, noise_variance: float = 0.0) -> Band:
    """Computes the band of K models [K, m, 1]: their mean, and their variance plus ``noise_variance``."""
    # The band is computed by ``uncertainty.predictive_interval``. With one model its width comes from
    # ``noise_variance`` only, and is constant over inputs.
    ends = uncertainty.predictive_interval(jnp.asarray(members), noise_variance=noise_variance)
    half = 0.5 * np.asarray(ends.high - ends.low)[:, 0]
    return Band(members.mean(axis=0)[:, 0], half / sine.NORMAL_95, members[:, :, 0])


def _band_of_processes(means: np.ndarray, covariances: np.ndarray) -> Band:
    """Computes the band of a model drawn at random from K Gaussian processes: mean [K, m, 1], covariance [K, m, m]."""
    variance = np.diagonal(covariances, axis1=1, axis2=2).mean(axis=0) + means[:, :, 0].var(axis=0)
    return Band(means.mean(axis=0)[:, 0], np.sqrt(np.maximum(variance, 0)), np.zeros((0, means.shape[1])))


def _scores(band: Band, x: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Computes a band's coverage of the true function, width and expected NLL, in the range of data and in the gap.

    Coverage and width are of the 95 % interval of a normal distribution with the band's mean and standard deviation.
    The NLL is of an observation of a new client, infinite if the band has no width at some point. The score "ratio" is
    the width in the gap over the width on the data, infinite if the latter is 0. ``x`` [m, 1] are the test inputs and
    ``truth`` [m, 1] the true function there.
    """
    # The NLL is the exact expectation of ``-log N(y; mean, sd^2)`` in nats over an observation y of a new client, ``a
    # sin(2 pi x) + eps`` with ``a ~ N(1, 0.2^2)`` and ``eps ~ N(0, 0.2^2)`` (FE-2024, section V-A). It is infinite if
    # the band has no width at some point of the region.
    by_name, outside = {}, np.abs(x[:, 0]) >= EDGE - 1e-9
    low, high = (band.mean + sign * sine.NORMAL_95 * band.sd for sign in (-1, 1))
    for name in REGIONS:
        at = outside if name == "data" else ~outside
        ends = uncertainty.Interval(*(jnp.asarray(values[at]) for values in (band.mean, low, high)))
        by_name[f"coverage.{name}"] = float(uncertainty.coverage(ends, jnp.asarray(truth[at, 0])))
        by_name[f"width.{name}"] = float(np.mean(high[at] - low[at]))
        missed = (band.mean - truth[:, 0])[at] ** 2 + (AMPLITUDE * truth[at, 0] ** 2 + NOISE)
        variance = band.sd[at] ** 2
        by_name[f"nll.{name}"] = np.inf
        if np.all(variance > 0):
            nll = 0.5 * np.log(2 * np.pi * variance) + missed / (2 * variance)
            by_name[f"nll.{name}"] = float(np.mean(nll))
    width = by_name["width.data"]
    by_name["ratio"] = by_name["width.gap"] / width if width > 0 else np.inf
    return by_name


def _summary(name: str, values: Sequence[float]) -> lab.MeanInterval:
    """Computes the mean of a score over seeds and its 95 % interval.

    The interval is Wilson's if ``name`` starts with "coverage", else Student's, with NaN ends if a value is not finite.
    If ``name`` is "ratio", the mean is the geometric mean, with Student's interval of the logarithms.
    """
    # For Wilson's interval a seed counts as one observation, because all its test points use the same models.
    array = np.asarray(values, np.float64)
    mean = float(np.mean(array))
    if name.startswith("coverage"):
        ends = uncertainty.coverage_interval(mean, len(array))
        return lab.MeanInterval(mean, float(ends.low), float(ends.high))
    if not np.all(np.isfinite(array)):
        return lab.MeanInterval(mean, np.nan, np.nan)
    if name == "ratio":
        return lab.MeanInterval(*(float(np.exp(v)) for v in lab.interval(np.log(array))))
    return lab.interval(array)


def run(study: Study) -> lab.Outcome:
    """Computes and scores the bands of FedAvg, Fed-ensemble, the flow and the limiting process on every seed's data.

    A band is a predicted mean with its standard deviation.
    """
    settings, cases = study.settings, list[GapCase]()
    model = sine.linear_model() if settings.model == "linear" else sine.network(settings.width)
    first = sine.of_study(study, study.seeds[0], gap=True)
    permutations = ft.schedules.per_client_permutations(settings.num_clients, settings.num_models)
    schedules = ft.schedules.all_clients(settings.num_clients), permutations
    single, ensemble = (sine.algorithm(model, first, schedule, settings.local_steps) for schedule in schedules)
    for seed in study.each_seed():
        cases.append(_case(settings, model, single, ensemble, sine.of_study(study, seed, gap=True), seed))
        for method, values in cases[-1].scores.items():
            study.keep(lab.metric_rows(method, seed, settings.num_rounds, values, "test"))
    _draw(study, cases[0])
    methods = [m for m in cases[0].scores if all(m in case.scores for case in cases)]  # a limit may be missing
    names = (*COLUMNS, "ratio")
    summaries = {m: {n: _summary(n, [case.scores[m][n] for case in cases]) for n in names} for m in methods}
    rows = [{"method": m, "score": score, **v.row("mean")} for m, of in summaries.items() for score, v in of.items()]
    forms = [".0%" if name.startswith("coverage") else ".3g" for name in names]
    cells = tuple((LABELS[m], *map(format, of.values(), forms)) for m, of in summaries.items())
    columns = ("band", *(f"{score}: {where}" for score in SHOWN for where in REGIONS), "width gap / data (geometric)")
    sheet = lab.Sheet(
        "95 % bands where there are data and in the gap: means over seeds, 95 % intervals", columns, cells
    )
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
    verdicts = (exact(cases),) if settings.model == "linear" else ()
    return lab.Outcome((sheet,), rows, judge(summaries), {}, tuple(remarks), lab.disagreeing(verdicts), verdicts)


def _case(
    settings: GapSettings, model: Model, single: Algorithm, ensemble: Algorithm, data: sine.SineData, seed: int
) -> GapCase:
    one = sine.train(data, single, settings.num_rounds, seed)
    several = sine.train(data, ensemble, settings.num_rounds, seed)
    flow, blocks = sine.flow(data, model, ensemble.schedule, settings.local_steps, settings.num_rounds, seed)
    means, (limit, trouble) = np.asarray(flow.mean(settings.num_rounds)), _limit(blocks, data)
    bands = {
        AVERAGE: _band_of_members(one.test, _residual(one, data)),
        ENSEMBLE: _band_of_members(several.test),
        WITH_NOISE: _band_of_members(several.test, _residual(several, data)),
        FLOW: _band_of_processes(means, np.asarray(flow.cov(settings.num_rounds))),
        **({} if limit is None else {LIMIT: limit}),
    }
    predicted = np.asarray(flow.predict(several.start_train, several.start, settings.num_rounds))
    distance, wrong = relative_distance(predicted, several.test), relative_distance(means, several.test)
    by_method = {method: _scores(band, data.x_test, data.y_test) for method, band in bands.items()}
    return GapCase(seed, data, bands, by_method, distance, wrong, trouble)


def _residual(trained: sine.TrainedOutputs, data: sine.SineData) -> float:
    """Computes the mean squared residual of the models' mean on the training data, FE-2024's fitting error."""
    return float(np.mean((trained.train.mean(axis=0) - data.y) ** 2))


def _limit(blocks: ft.kernels.KernelBlocks, data: sine.SineData) -> tuple[Band | None, str]:
    """Computes the band of Theorem 2's process (None if its kernel is singular), and a text on numerical trouble."""
    try:
        limit = ft.theory.gp_limit(blocks, data.y)
    except ft.kernels.SingularKernelError as error:
        return None, str(error)
    reach = float(np.max(np.abs(limit.mean)))
    trouble = f"Theta is singular in float64, inverted with jitter {limit.jitter:.1e}; the mean reaches {reach:.2g}"
    band = _band_of_processes(np.asarray(limit.mean)[None], np.asarray(limit.cov)[None])
    return band, trouble if limit.jitter > 0 else ""


def judge(summaries: dict[str, dict[str, lab.MeanInterval]]) -> tuple[lab.Claim, ...]:
    """Judges the claims of FE-2024, section V-B, on the bands (95 % intervals) in the gap without data.

    Fed-ensemble's band should be wider there than on the data and cover the true function, FedAvg's should be too
    narrow.

    ``summaries`` has the mean of each score over seeds, with its interval, by method and name of the score.
    """
    single, ensemble = summaries[AVERAGE], summaries[ENSEMBLE]
    wider, covers = "Fed-ensemble's band is wider in the gap than on the data", "coverage {:.0%}, nominal 95 %"
    of_ratio = f"width ratio {{:.1f}}, FedAvg's {single['ratio'].mean:.1f}"
    return (
        ensemble["ratio"].claim_above(wider, of_ratio, 1),
        ensemble["coverage.gap"].claim_above("Fed-ensemble's band covers the true function in the gap", covers, 0.95),
        single["coverage.gap"].claim_below("FedAvg's band is overconfident in the gap", covers, 0.95),
    )


def exact(cases: Sequence[GapCase]) -> Verdict:
    """Judges whether Fed-ensemble's linear models, on every seed, equal the flow from their initial functions.

    The control is the flow's mean, which ignores the initial functions.
    """
    largest, wrong = max(case.distance for case in cases), min(case.wrong for case in cases)
    controls = {"its mean, without their start": wrong}
    verdict = exact_verdict("the exact flow", "linear models are where it puts them", largest, controls, EXACT)
    return verdict._replace(sizes=f"{len(cases)} seeds")


def _draw(study: Study, case: GapCase) -> None:
    settings, panels, flow = study.settings, [], case.bands[FLOW]
    titles = LABELS | ({LIMIT: f"{LABELS[LIMIT]}: singular"} if case.trouble else {})
    for method, band in case.bands.items():
        members = band.members if len(band.members) > 1 else band.members[:0]
        panels.append(BandPanel(titles[method], band.mean, band.sd, members, COLOURS[method]))
    height = 1.05 * float(np.max(np.abs(flow.mean) + sine.NORMAL_95 * flow.sd))
    title = (
        f"Sine functions with a gap, {settings.num_clients} clients, {settings.model} model, {settings.num_rounds} "
        "rounds"
    )
    train, test = ((x[:, 0], y[:, 0]) for x, y in (case.data[:2], case.data[3:]))
    bands_side_by_side(panels, train, test, EDGE, height, title, study.figures.path("uncertainty"))


SCALES = {"sine": by_scale(GapSettings(), GapSettings(num_rounds=1000), GapSettings(num_rounds=5000))}
CHECK = partial(sine.check, gap=True)
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024",), check=CHECK, least_seeds=2, exact=True),)
