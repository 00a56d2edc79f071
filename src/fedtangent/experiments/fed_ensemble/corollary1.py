"""Corollary 1 of FE-2024: the variance of an ensemble of K models is k(x, x)/K (eq. 11), and what finite rounds add.

On the sine functions with a gap (section V-B), where the variance does not die out: the linear toy by its exact flow
and by simulation, and networks of two widths beside the infinitely wide one. Every run draws its initial models and
its schedule; the data stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from scipy.stats import t as student

from fedtangent.compare.statistics import SIGNIFICANCE, Slope
from fedtangent.compare.theorems.fed_ensemble import repeated_runs
from fedtangent.compare.theorems.fed_ensemble.repeated_runs import ToyProblem, power_law
from fedtangent.experiments.lab import sine
from fedtangent.experiments.lab.results import Outcome, Sheet
from fedtangent.experiments.lab.runner import Study, experiment
from fedtangent.experiments.lab.settings import by_scale, within
from fedtangent.kernels.gram import kernel_blocks
from fedtangent.output.files import Metric
from fedtangent.theory.fed_ensemble.bias_variance import (
    Corollary1,
    Decomposition,
    corollary_1,
)


@dataclass(frozen=True)
class EnsembleSizeSettings:
    """``spacing``: least distance of the networks' inputs, so that their kernel has an inverse."""

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


DEFAULT = EnsembleSizeSettings(num_rounds=200, schedules=40, widths=(64, 256), network_rounds=100, network_runs=40)
PAPER = EnsembleSizeSettings(
    num_models=(1, 2, 4, 8, 16, 32), num_rounds=1000, schedules=100, widths=(128, 512), network_rounds=400,
    network_runs=100,
)  # fmt: skip


class Series(NamedTuple):
    """One model for every K: closed form and simulation, the limit of one model where there is one."""

    name: str
    num_rounds: int
    limit: Corollary1
    exact: dict[int, Decomposition]
    seen: dict[int, Decomposition]
    runs: int  # independent ones, of each K

    @property
    def predicted_slope(self) -> Slope:
        """Of the closed form's variance in K."""
        return power_law({k: d.variance for k, d in self.exact.items()})

    @property
    def slope(self) -> Slope:
        """Of the simulated variance in K."""
        return power_law({k: d.variance for k, d in self.seen.items()})


def check(study: Study) -> None:
    """Build the networks' data."""
    _network_problem(study.settings, study.seeds[0], study.settings.widths[0])


def _network_problem(s: EnsembleSizeSettings, seed: int, width: int) -> ToyProblem:
    """Erf networks of one hidden layer; the kernel is that of infinite width."""
    held = sine.load(seed, s.network_clients, s.points_per_client, True, s.spacing, repeated_runs.TEST_POINTS)
    model = sine.network(width)
    assert model.kernel is not None
    blocks = kernel_blocks(model.kernel, held.x, held.x_test)
    rate = sine.step_size(model, held)
    return ToyProblem(held.x, held.y, held.clients, held.x_test, held.y_test, 0.0, lambda outputs: model, blocks, rate,
                   s.local_steps)  # fmt: skip


def run(study: Study) -> Outcome:
    """The linear toy, and networks of every width, on the first seed's data."""
    s, seed = study.settings, study.seeds[0]
    linear = repeated_runs.sine_problem(
        seed, local_steps=s.local_steps, gap=True, num_clients=s.num_clients, points_per_client=s.points_per_client
    )
    found = [_series("linear toy", linear, s.num_models, s.num_rounds, s.schedules, s.draws)]
    study.say(f"linear toy: every K, {s.schedules} schedules of {s.draws} initialisations, {s.num_rounds} rounds")
    for width in s.widths:
        problem = _network_problem(s, seed, width)
        found.append(_series(f"erf, width {width}", problem, s.num_models, s.network_rounds, s.network_runs, 1))
        study.say(f"networks of width {width}: every K, {s.network_runs} runs, {s.network_rounds} rounds")
    study.keep([m for one in found for m in _metrics(one, seed)])
    _draw(study, found)
    rows = [
        {"model": one.name, "num_models": k, "num_rounds": one.num_rounds, "closed_form": one.exact[k],
         "simulated": one.seen[k], "limit": _limit(one, k)}
        for one in found for k in one.seen
    ]  # fmt: skip
    slopes = {one.name: {"closed_form": one.predicted_slope, "simulated": one.slope} for one in found}
    sheets = (*(_sheet(one) for one in found), _slopes(found))
    return Outcome(sheets, rows, details={"slopes": slopes}, remarks=_remarks(found), failed=_failures(found))


def _series(
    name: str, problem: ToyProblem, num_models: Sequence[int], num_rounds: int, schedules: int, draws: int
) -> Series:
    found = {k: sine.decomposed(problem, k, num_rounds, schedules, draws) for k in num_models}
    exact, seen = ({k: both[i] for k, both in found.items()} for i in (0, 1))
    return Series(name, num_rounds, corollary_1(problem.blocks, problem.y, 1), exact, seen, schedules)


def _limit(one: Series, num_models: int) -> float | None:
    return None if one.limit.limit is None else float(one.limit.limit.mean()) / num_models


def _metrics(one: Series, seed: int) -> list[Metric]:
    return [
        Metric(one.num_rounds, f"{how} {one.name} K={k}", seed, "test", "variance", d[k].variance.value, 0, 0)
        for how, d in (("closed_form", one.exact), ("fed_ensemble", one.seen)) for k in d
    ]  # fmt: skip


def _sheet(one: Series) -> Sheet:
    columns = ("K", "limit k/K", "at this round", "from schedules", "simulated", "apart, SE", "simulated x K")
    rows = []
    for k, seen in one.seen.items():
        exact, limit = one.exact[k], _limit(one, k)
        apart = (seen.variance.value - exact.variance.value) / seen.variance.standard_error
        rows.append((
            str(k), "-" if limit is None else f"{limit:.4f}", f"{exact.variance.value:.4f}",
            f"{exact.schedules.value:.5f}", f"{seen.variance.value:.4f} +- {seen.variance.standard_error:.4f}",
            f"{apart:+.1f}", f"{k * seen.variance.value:.4f}",
        ))  # fmt: skip
    return Sheet(f"{one.name}: variance of the average of K models after {one.num_rounds} rounds", columns, tuple(rows))


def _slopes(found: list[Series]) -> Sheet:
    rows = tuple(
        (one.name, "-1", f"{one.predicted_slope.slope:.3f}", f"{one.slope.slope:.3f} +- {one.slope.standard_error:.3f}",
         f"{one.slope.slope / one.slope.standard_error:.1f}")
        for one in found
    )  # fmt: skip
    columns = ("slope of log variance in log K", "corollary 1", "closed form", "simulated", "from 0, SE")
    return Sheet("the slope: -1 for independent models of equal training, 0 if averaging did nothing", columns, rows)


def _allowed(one: Series, comparisons: int) -> float:
    """Standard errors at which one of so many comparisons fails by chance as rarely as one does at three."""
    return float(student.ppf(1 - SIGNIFICANCE / comparisons / 2, one.runs - 1))


def _failures(found: list[Series]) -> tuple[str, ...]:
    """The linear toy must agree with its closed form at every K; every slope with its closed form's."""
    failed = []
    for one in found:
        apart = abs(one.slope.slope - one.predicted_slope.slope) / one.slope.standard_error
        if not apart <= _allowed(one, len(found)):
            failed.append(f"{one.name}: simulated and predicted slopes are {apart:.1f} standard errors apart")
    exact, seen = found[0].exact, found[0].seen
    for k, d in seen.items():
        apart = abs(d.variance.value - exact[k].variance.value) / d.variance.standard_error
        if not apart <= _allowed(found[0], len(seen)):
            failed.append(f"{found[0].name}, K = {k}: variances are {apart:.1f} standard errors apart")
    return tuple(failed)


def _remarks(found: list[Series]) -> tuple[str, ...]:
    lines = ["SE: standard errors over runs (of the linear toy: over schedules); variances are means over [-1, 1]"]
    for one in found:
        rank = one.limit.assumptions[0]
        if not rank.holds:
            lines.append(f"{one.name}: an assumption of corollary 1 fails in float64: {rank.statement}")
    lines.append("networks: the closed form is that of infinite width; their own variance differs by O(1/width)")
    return tuple(lines)


def _draw(study: Study, found: list[Series]) -> None:
    from fedtangent.output.line_plots import Points, variance_against_models

    panels: dict[str, Any] = {}
    for one in found:
        series = {"predicted at this round": Points({k: (d.variance.value, 0.0) for k, d in one.exact.items()}, True)}
        limits = {k: _limit(one, k) for k in one.seen}
        if None not in limits.values():
            series["limit, k(x, x)/K"] = Points({k: (float(v or 0), 0.0) for k, v in limits.items()}, True)
        series["simulated"] = Points(
            {k: (d.variance.value, d.variance.standard_error) for k, d in one.seen.items()}, False
        )
        slope = f"slope {one.slope.slope:.2f} +- {one.slope.standard_error:.2f}"
        panels[f"{one.name}, {one.num_rounds} rounds: {slope}"] = series
    variance_against_models(panels, "variance of the ensemble average (corollary 1)", study.figures / "corollary1.png")


SCALES = {"sine": by_scale(EnsembleSizeSettings(), DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024",), check=check, exact=True),)
