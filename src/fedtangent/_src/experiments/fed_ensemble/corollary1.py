"""Corollary 1 of FE-2024: the variance of an ensemble of K models is k(x, x)/K (eq. 11), and what finite rounds add.

On the sine functions with a gap (section V-B), where the variance does not die out: the linear toy by its exact flow
and by simulation, and networks of two widths beside the infinitely wide one. Every run draws its initial models and
its schedule; the data stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from fedtangent._src.comparison.statistics import Slope
from fedtangent._src.comparison.theorems.fed_ensemble import repeated_runs
from fedtangent._src.comparison.theorems.fed_ensemble.repeated_runs import ToyProblem, power_law
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.experiments.lab import sine
from fedtangent._src.experiments.lab.results import Outcome, disagreeing, table
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.kernels.gram import kernel_blocks
from fedtangent._src.output.files import Metric
from fedtangent._src.output.line_plots import Points, variance_against_models
from fedtangent._src.theory.fed_ensemble.bias_variance import Corollary1, Decomposition, corollary_1


@dataclass(frozen=True)
class EnsembleSizeSettings:
    """Sizes of the linear toy and of the networks, whose inputs are ``spacing`` apart so that Theta has an inverse."""

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
    """Results for one kind of model and every K: closed form, simulation, and Corollary 1's limit."""

    name: str
    num_rounds: int
    limit: Corollary1
    both: dict[int, tuple[Decomposition, Decomposition]]  # by K, closed form and simulation
    runs: int  # independent runs of each K

    def slope(self, seen: bool) -> Slope:
        """Computes the slope of log variance in log K, simulated if ``seen``, else in closed form."""
        return power_law({k: pair[seen].variance for k, pair in self.both.items()})

    def limit_of(self, num_models: int) -> float | None:
        """Computes Corollary 1's k(x, x) / K, mean over x; None if Theta has no inverse."""
        return None if self.limit.limit is None else float(self.limit.limit.mean()) / num_models


def check(study: Study) -> None:
    """Draws the networks' data; raises ``ValueError``."""
    _network_problem(study.settings, study.seeds[0], study.settings.widths[0])


def _network_problem(s: EnsembleSizeSettings, seed: int, width: int) -> ToyProblem:
    """Builds the problem of erf networks of one hidden layer; the kernel is that of infinite width."""
    held = sine.load(seed, s.network_clients, s.points_per_client, True, s.spacing, repeated_runs.TEST_POINTS)
    model = sine.network(width)
    assert model.kernel is not None
    blocks = kernel_blocks(model.kernel, held.x, held.x_test)
    rate = sine.step_size(model, held)
    return ToyProblem(held.x, held.y, held.clients, held.x_test, held.y_test, 0.0, lambda outputs: model, blocks, rate,
                   s.local_steps)  # fmt: skip


def run(study: Study) -> Outcome:
    """Decomposes the variance of the linear toy and of networks of every width, on the first seed's data."""
    s, seed = study.settings, study.seeds[0]
    clients = {"num_clients": s.num_clients, "points_per_client": s.points_per_client}
    linear = repeated_runs.sine_problem(seed, local_steps=s.local_steps, gap=True, **clients)
    found = [_series(s, "linear toy", linear, s.num_rounds, s.schedules, s.draws)]
    study.say(f"linear toy: every K, {s.schedules} schedules of {s.draws} initialisations, {s.num_rounds} rounds")
    for width in s.widths:
        problem = _network_problem(s, seed, width)
        found.append(_series(s, f"erf, width {width}", problem, s.network_rounds, s.network_runs, 1))
        study.say(f"networks of width {width}: every K, {s.network_runs} runs, {s.network_rounds} rounds")
    study.keep([
        Metric(one.num_rounds, f"{how} {one.name} K={k}", seed, "test", "variance", pair[i].variance.value, 0, 0)
        for one in found for i, how in enumerate(("closed_form", "fed_ensemble")) for k, pair in one.both.items()
    ])  # fmt: skip
    _draw(study, found)
    rows: list[dict[str, Any]] = [
        {"model": one.name, "num_models": k, "num_rounds": one.num_rounds, "closed_form": exact,
         "simulated": seen, "limit": one.limit_of(k)}
        for one in found for k, (exact, seen) in one.both.items()
    ]  # fmt: skip
    shown = [{**r, "apart": sine.apart(r["simulated"].variance, r["closed_form"].variance),
              "times": r["num_models"] * r["simulated"].variance.value} for r in rows]  # fmt: skip
    sheet = table("variance of the average of K models", shown, {
        "model": "{model}", "K": "{num_models}", "round": "{num_rounds}", "limit k/K": "{limit:.4f}",
        "at this round": "{closed_form.variance.value:.4f}", "from schedules": "{closed_form.schedules.value:.5f}",
        "simulated": "{simulated.variance.value:.4f} +- {simulated.variance.standard_error:.4f}",
        "apart, SE": "{apart:+.1f}", "simulated x K": "{times:.4f}",
    })  # fmt: skip
    slopes = {one.name: {"closed_form": one.slope(False), "simulated": one.slope(True)} for one in found}
    remarks = ["SE: standard errors over runs (of the linear toy: over schedules); variances are means over [-1, 1]"]
    remarks += [
        f"{one.name}: an assumption of corollary 1 fails in float64: {one.limit.assumptions[0].statement}"
        for one in found if not one.limit.assumptions[0].holds
    ]  # fmt: skip
    remarks.append("networks: the closed form is that of infinite width; their own variance differs by O(1/width)")
    verdicts = (_variances(found[0]), *(_slope(one, len(found)) for one in found))
    return Outcome((sheet,), rows, (), {"slopes": slopes}, tuple(remarks), disagreeing(verdicts), verdicts)


def _series(
    s: EnsembleSizeSettings, name: str, problem: ToyProblem, num_rounds: int, schedules: int, draws: int
) -> Series:
    both = {k: sine.decomposed(problem, k, num_rounds, schedules, draws) for k in s.num_models}
    return Series(name, num_rounds, corollary_1(problem.blocks, problem.y, 1), both, schedules)


def _variances(linear: Series) -> Verdict:
    """Checks that the linear toy's variance is the closed form's at every K; control: variance not divided by K."""
    allowed, most = sine.allowed(linear.runs, len(linear.both)), max(linear.both)
    worst = max(abs(sine.apart(seen.variance, exact.variance)) for exact, seen in linear.both.values())
    exact, seen = (d.variance for d in linear.both[most])
    wrong = abs(seen.value - most * exact.value) / seen.standard_error
    found = f"{worst:.1f} SE at most", f"<= {allowed:.1f} SE", worst <= allowed
    control = "not divided by K", f"{wrong:.0f} SE", wrong > allowed
    return Verdict.of("FE-2024 Corollary 1", "variance of K models is the closed form's", linear.name, found, control)


def _slope(one: Series, comparisons: int) -> Verdict:
    """Checks that the slope is the closed form's, -1 for independent, equally trained models; control: slope 0."""
    exact, seen, allowed = one.slope(False), one.slope(True), sine.allowed(one.runs, comparisons)
    away, wrong = (abs(seen.slope - slope) / seen.standard_error for slope in (exact.slope, 0.0))
    found = f"{seen.slope:.3f} +- {seen.standard_error:.3f}", f"{exact.slope:.3f} +- {allowed:.1f} SE", away <= allowed
    control = "0: averaging does nothing", f"{wrong:.1f} SE away", wrong > allowed
    return Verdict.of("FE-2024 Corollary 1", "slope of log variance in log K", one.name, found, control)


def _draw(study: Study, found: list[Series]) -> None:
    panels: dict[str, Any] = {}
    for one in found:
        lines = {"predicted at this round": {k: (exact.variance.value, 0.0) for k, (exact, _) in one.both.items()}}
        if one.limit.limit is not None:
            lines["limit, k(x, x)/K"] = {k: (one.limit_of(k) or 0.0, 0.0) for k in one.both}
        series = {name: Points(values, True) for name, values in lines.items()}
        series["simulated"] = Points({k: (s.variance[0], s.variance[1]) for k, (_, s) in one.both.items()}, False)
        slope = one.slope(True)
        panels[f"{one.name}, {one.num_rounds} rounds: slope {slope.slope:.2f} +- {slope.standard_error:.2f}"] = series
    variance_against_models(panels, "variance of the ensemble average (corollary 1)", study.figures.path("corollary1"))


DEFAULT = EnsembleSizeSettings(num_rounds=200, schedules=40, widths=(64, 256), network_rounds=100, network_runs=40)
PAPER = EnsembleSizeSettings(
    num_models=(1, 2, 4, 8, 16, 32), num_rounds=1000, schedules=100, widths=(128, 512), network_rounds=400,
    network_runs=100,
)  # fmt: skip
SCALES = {"sine": by_scale(EnsembleSizeSettings(), DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024",), check=check, exact=True),)
