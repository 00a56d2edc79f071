"""Corollary 1 of FE-2024: the variance of an ensemble of K models is k(x, x)/K (eq. 11), and what finite rounds add.

The data are the sine functions with a gap (section V-B), where the variance does not vanish. A linear model is followed
by its exact flow and by simulation; networks of two widths are compared with the infinitely wide one. Every run draws
initial models and schedule; the data stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import fedtangent as ft
from fedtangent._src.comparison.statistics import Slope
from fedtangent._src.comparison.theorems.fed_ensemble import bias_variance
from fedtangent._src.comparison.theorems.fed_ensemble.bias_variance import ToyProblem, power_law
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab import sine
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.output.line_plots import Points, variance_against_models
from fedtangent._src.theory.fed_ensemble.bias_variance import Corollary1, Decomposition
from fedtangent.types import Verdict


@dataclass(frozen=True)
class EnsembleSizeSettings:
    """Settings of the study of Corollary 1 (FE-2024), for a linear model and for networks of several widths.

    The linear model has ``schedules`` random schedules and ``draws`` initialisations under each; a network has
    ``network_runs`` runs, each with its own schedule and initialisation. Inputs of the networks are at least
    ``spacing`` apart, so that the kernel is invertible.
    """

    num_models: tuple[int, ...] = within((1, 2, 4, 8), count=2)
    num_clients: int = 50
    points_per_client: int = 2
    local_steps: int = 10
    num_rounds: int = 60
    schedules: int = within(20, least=3)
    draws: int = within(20, least=2)
    widths: tuple[int, ...] = (32, 128)
    network_clients: int = 8
    spacing: float = within(0.03, at_least=0)
    network_rounds: int = 40
    network_runs: int = within(24, least=3)


class Series(NamedTuple):
    """The ensemble's variance for one kind of model and every K: in closed form, by simulation, and by Corollary 1.

    Attributes:
        limit: FE-2024's Corollary 1 for K = 1: the variance k(x, x) after many rounds, which an ensemble divides by K.
        both: For each K the pair (closed form, simulation) of bias and variance after ``num_rounds`` rounds.
        runs: Number of independently drawn schedules in the simulation of each K.
    """

    name: str
    num_rounds: int
    limit: Corollary1
    both: dict[int, tuple[Decomposition, Decomposition]]
    runs: int

    def slope(self, simulated: bool) -> Slope:
        """Fits the slope of log variance against log K: of the simulation if ``simulated``, else of the closed form."""
        return power_law({k: pair[simulated].variance for k, pair in self.both.items()})

    def limit_of(self, num_models: int) -> float | None:
        """Computes the variance k(x, x) / K of FE-2024's Corollary 1, mean over x; None if the kernel is singular."""
        return None if self.limit.limit is None else float(self.limit.limit.mean()) / num_models


def check(study: Study) -> None:
    """Raises ``ValueError`` if the first seed's data of the networks cannot be drawn."""
    _network_problem(study.settings, study.seeds[0], study.settings.widths[0])


def _network_problem(settings: EnsembleSizeSettings, seed: int, width: int) -> ToyProblem:
    """Builds data, erf network of one hidden layer, and the network's kernel at infinite width, for one seed."""
    data = sine.load(
        seed, settings.network_clients, settings.points_per_client, True, settings.spacing, bias_variance.TEST_POINTS
    )
    model = sine.network(width)
    assert model.kernel is not None
    blocks, rate = ft.kernels.kernel_blocks(model.kernel, data.x, data.x_test), sine.step_size(model, data)
    return ToyProblem(*data, 0.0, lambda outputs: model, blocks, rate, settings.local_steps)


def run(study: Study) -> lab.Outcome:
    """Compares the simulated variance of K averaged models with its closed form, on the first seed's data.

    It does so for linear models and networks of every width.
    """
    settings, seed = study.settings, study.seeds[0]
    clients = {"num_clients": settings.num_clients, "points_per_client": settings.points_per_client}
    linear = bias_variance.sine_problem(seed, local_steps=settings.local_steps, gap=True, **clients)
    series = [_series(settings, "linear toy", linear, settings.num_rounds, settings.schedules, settings.draws)]
    study.say(
        f"linear toy: every K, {settings.schedules} schedules of {settings.draws} initialisations, "
        f"{settings.num_rounds} rounds"
    )
    for width in settings.widths:
        problem = _network_problem(settings, seed, width)
        series.append(
            _series(settings, f"erf, width {width}", problem, settings.network_rounds, settings.network_runs, 1)
        )
        study.say(f"networks of width {width}: every K, {settings.network_runs} runs, {settings.network_rounds} rounds")
    rows, entries = list[lab.Row](), []
    for one in series:
        for i, kind in enumerate(("closed_form", "fed_ensemble")):
            for k, pair in one.both.items():
                variance = {"variance": pair[i].variance.value}
                study.keep(lab.metric_rows(f"{kind} {one.name} K={k}", seed, one.num_rounds, variance, "test"))
        for k, (exact, simulated) in one.both.items():
            row = {"model": one.name, "num_models": k, "num_rounds": one.num_rounds, "closed_form": exact}
            rows.append({**row, "simulated": simulated, "limit": one.limit_of(k)})
            apart, times = sine.apart(simulated.variance, exact.variance), k * simulated.variance.value
            entries.append({**rows[-1], "apart": apart, "times": times})
    _draw(study, series)
    columns = "model: {model} | K: {num_models} | round: {num_rounds} | limit k/K: {limit:.4f} | "
    columns += "at this round: {closed_form.variance.value:.4f} | from schedules: {closed_form.schedules.value:.5f} | "
    columns += "simulated: {simulated.variance.value:.4f} +- {simulated.variance.standard_error:.4f} | "
    columns += "apart, SE: {apart:+.1f} | simulated x K: {times:.4f}"
    sheet = lab.table("variance of the average of K models", entries, columns)
    slopes = {one.name: {"closed_form": one.slope(False), "simulated": one.slope(True)} for one in series}
    failing = [(one.name, one.limit.assumptions[0]) for one in series if not one.limit.assumptions[0].holds]
    remarks = (
        "SE: standard errors over runs (of the linear toy: over schedules); variances are means over [-1, 1]",
        *(f"{name}: an assumption of corollary 1 fails in float64: {a.statement}" for name, a in failing),
        "networks: the closed form is that of infinite width; their own variance differs by O(1/width)",
    )
    verdicts = (_variances(series[0]), *(_slope(one, len(series)) for one in series))
    return lab.Outcome((sheet,), rows, (), {"slopes": slopes}, remarks, lab.disagreeing(verdicts), verdicts)


def _series(
    settings: EnsembleSizeSettings, name: str, problem: ToyProblem, num_rounds: int, schedules: int, draws: int
) -> Series:
    both = {k: sine.decomposed(problem, k, num_rounds, schedules, draws) for k in settings.num_models}
    return Series(name, num_rounds, ft.theory.corollary_1(problem.blocks, problem.y, 1), both, schedules)


def _variances(linear: Series) -> Verdict:
    """Judges whether the linear model's simulated variance is the closed form's at every K, but for chance.

    The control is the closed form without the division by K.
    """
    allowed, most = sine.allowed(linear.runs, len(linear.both)), max(linear.both)
    largest = max(abs(sine.apart(simulated.variance, exact.variance)) for exact, simulated in linear.both.values())
    exact, simulated = (d.variance for d in linear.both[most])
    control = abs(simulated.value - most * exact.value) / simulated.standard_error
    right = f"{largest:.1f} SE at most", f"<= {allowed:.1f} SE", largest <= allowed
    wrong = "not divided by K", f"{control:.0f} SE", control > allowed
    return Verdict.of("FE-2024 Corollary 1", "variance of K models is the closed form's", linear.name, right, wrong)


def _slope(one: Series, comparisons: int) -> Verdict:
    """Judges whether the simulated slope of log variance against log K is the closed form's, but for chance.

    The control is slope 0. ``comparisons`` is the number of such tests, for the Bonferroni correction.
    """
    exact, fitted, allowed = one.slope(False), one.slope(True), sine.allowed(one.runs, comparisons)
    away, control = (abs(fitted.slope - slope) / fitted.standard_error for slope in (exact.slope, 0.0))
    measured = f"{fitted.slope:.3f} +- {fitted.standard_error:.3f}"
    right = measured, f"{exact.slope:.3f} +- {allowed:.1f} SE", away <= allowed
    wrong = "0: averaging does nothing", f"{control:.1f} SE away", control > allowed
    return Verdict.of("FE-2024 Corollary 1", "slope of log variance in log K", one.name, right, wrong)


def _draw(study: Study, series: list[Series]) -> None:
    panels = {}
    for one in series:
        exact = {k: (closed.variance.value, 0.0) for k, (closed, _) in one.both.items()}
        lines = {"predicted at this round": Points(exact, True)}
        if one.limit.limit is not None:
            lines["limit, k(x, x)/K"] = Points({k: (one.limit_of(k) or 0.0, 0.0) for k in one.both}, True)
        simulated = {k: (both[1].variance[0], both[1].variance[1]) for k, both in one.both.items()}
        slope = one.slope(True)
        title = f"{one.name}, {one.num_rounds} rounds: slope {slope.slope:.2f} +- {slope.standard_error:.2f}"
        panels[title] = lines | {"simulated": Points(simulated, False)}
    variance_against_models(panels, "variance of the ensemble average (corollary 1)", study.figures.path("corollary1"))


SMALL = EnsembleSizeSettings()
DEFAULT = with_changes(SMALL, "num_rounds=200 schedules=40 widths=64,256 network_rounds=100 network_runs=40")
PAPER = with_changes(
    SMALL, "num_models=1,2,4,8,16,32 num_rounds=1000 schedules=100 widths=128,512 network_rounds=400 network_runs=100"
)
SCALES = {"sine": by_scale(SMALL, DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024",), check=check, exact=True),)
