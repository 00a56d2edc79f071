"""``fedtangent predict``: theory alone, no network trained: learning curve, best rate, rounds to a target.

Of several algorithms, ``--algorithm A B ..``, or several values of an option, ``--mu 0.01 0.1``, one table ranks the
runs, each at its own best rate.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from fedtangent._src.cli.arguments import FigureOptions
from fedtangent._src.comparison.followed import check_analytic, followed_rule
from fedtangent._src.comparison.forecast import (
    Curve,
    Forecast,
    Forecasting,
    Plan,
    Rates,
    check_forecasting,
    forecasts,
    memory_of,
    plan_of,
    ranked,
)
from fedtangent._src.engine.building import build, preview, small_model
from fedtangent._src.engine.description import Description, in_common
from fedtangent._src.engine.loop import Evaluation
from fedtangent._src.losses import divergence, mean_form, words
from fedtangent._src.output.files import Ended, Metric, ended, output_folder, write_config, write_metrics, write_result
from fedtangent._src.output.tables import TextTable, clock, console, number
from fedtangent._src.types import wrapped

MEBIBYTE = 2**20
MUCH = 10.0  # times the best rate, beyond which a stable one is no use


@dataclass(frozen=True)
class PredictOptions(Forecasting):
    """What is predicted of the run, and where it goes."""

    evaluate_every: int = 1
    """Rounds between evaluations, at which a target can be reached."""
    output: Path = Path("results/predict")
    """Folder for config.json, metrics.csv, result.json and figures/."""


class PredictJob(NamedTuple):
    """Checked runs, one for each algorithm and combination of values, and the options that they came from."""

    plans: list[Plan]
    options: dict[str, Any]
    output: Path
    figures: FigureOptions


def prepare(options: PredictOptions, figures: FigureOptions, described: tuple[Description, ...]) -> PredictJob:
    """Checks every option and loads the data; raises ``ValueError``, also if theory has no rule for a run."""
    check_forecasting(options)
    evaluation = Evaluation(options.evaluate_every)
    for one in described:  # before any data are loaded
        followed_rule(preview(one), one.run.num_rounds)
        check_analytic(small_model(one))
    values = in_common([one.values() for one in described]) | asdict(options) | asdict(figures)
    names = list(dict.fromkeys(one.algorithm.entry.name for one in described))
    values["algorithm"] = names[0] if len(names) == 1 else names
    of_runs = [one.values() for one in described]
    values |= {name: list(dict.fromkeys(run[name] for run in of_runs if name in run)) for name in _differing(of_runs)}
    placed = replace(options, kernel_dir=options.kernel_dir or options.output / "kernels")
    plans = []
    for one, label in zip(described, _labels(of_runs), strict=True):
        built, run = build(one), one.run
        algorithm = wrapped(built.algorithm, f"{built.algorithm.name}{label}") if label else built.algorithm
        plans.append(plan_of(algorithm, built.examples, run.num_rounds, run.seed, evaluation, placed))
    memory_of(plans[0])
    return PredictJob(plans, values, options.output, figures)


def _differing(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the options whose values differ between runs of one algorithm."""
    alike = [(a, b) for a in values for b in values if a["algorithm"] == b["algorithm"]]
    return list(dict.fromkeys(name for a, b in alike for name in a if name in b and a[name] != b[name]))


def _labels(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a text for each run that tells it from other runs of its algorithm, such as ", mu 0.1"."""
    names = _differing(values)
    return ["".join(f", {name.replace('_', ' ')} {one[name]}" for name in names if name in one) for one in values]


def run_job(job: PredictJob) -> Ended:
    """Predicts every run, writes files after each, prints the table and draws figures; returns the outcome."""
    from fedtangent._src.output.forecast_plots import learning_curves, loss_against_rate

    screen, start, found = console(), time.perf_counter(), list[Forecast]()
    say, folder = clock(screen), output_folder(job.output)
    write_config(folder, "predict", job.options)
    for plan in job.plans:
        screen.print(f"[bold]{plan.setting.title}[/bold]", highlight=False)
    for forecast in forecasts(job.plans, progress=True, say=say):
        found.append(forecast)
        write_metrics(folder, [metric for one in found for metric in _metrics(one)])
        write_result(folder, [row for one in ranked(found) for row in _rows(one)])
    figures = job.figures.within(folder)
    learning_curves(found, figures.path("predicted"))
    if found[0].rates is not None:
        loss_against_rate(found, figures.path("rates"))
    screen.print()
    if len(found) == 1:
        _show(screen, found[0])
    else:
        _show_ranked(screen, ranked(found))
    screen.print(
        f"{time.perf_counter() - start:.0f} s; numbers in {folder / 'metrics.csv'}, figures in {folder / 'figures'}",
        highlight=False,
    )
    return ended(_diverged(found))


def _diverged(found: Sequence[Forecast]) -> list[str]:
    """Describes the runs that diverge at their best rate, or, for a single run, at its given rate."""
    curves = [(one.name, one.best) for one in found] + [(one.name, one.given) for one in found if len(found) == 1]
    shown = {(name, curve.rate): curve for name, curve in curves}
    return [
        f"{name}: diverges at rate {rate:.4g}, it is predicted"
        for (name, rate), curve in shown.items()
        if _is_far(curve, found[0].plan.loss)
    ]


def _is_far(curve: Curve, loss: str) -> bool:
    """Tells whether a curve diverges."""
    return bool(divergence([values[:, -1] for values in curve.values.values()], curve.mean("train", loss)))


def _metrics(found: Forecast) -> list[Metric]:
    """Builds rows of metrics.csv: the predicted curves, named as in ``train``, and their 5th and 95th percentiles."""
    rows = []
    best = [] if found.rates is None else [("predicted at the best rate", found.best)]
    best += [] if found.fastest is None else [("predicted at the fastest rate", found.fastest)]
    for which, curve in (("predicted", found.given), *best):
        for (split, metric), values in curve.values.items():
            ends = dict(zip(("p5", "p95"), curve.band(split, metric), strict=True))
            shown = {metric: values.mean(axis=0), **{f"{metric}_{end}": value for end, value in ends.items()}}
            for name, series in shown.items():
                sent = zip(curve.rounds, series, found.uplink_bytes, found.downlink_bytes, strict=True)
                rows += [
                    Metric(int(r), f"{found.name}, {which}", found.plan.setting.seed, split, name, float(value),
                           int(up), int(down))
                    for r, value, up, down in sent
                ]  # fmt: skip
    return sorted(rows, key=lambda row: (row.algorithm, row.round))


def _rows(found: Forecast) -> list[dict[str, Any]]:
    """Builds the rows of result.json: for the given rate, and for the best and the fastest where searched."""
    rows, plan, rates = [], found.plan, found.rates
    curves = [("given", found.given), ("best", None if rates is None else found.best), ("fastest", found.fastest)]
    for which, curve in ((name, curve) for name, curve in curves if curve is not None):
        row: dict[str, Any] = {"algorithm": found.name, "at": f"{which} rate", "rate": curve.rate}
        if rates is not None:
            row |= {"largest_stable_rate": rates.stable, "guaranteed_rate": rates.guaranteed}
        row |= {"rounds": plan.setting.size.num_rounds}
        row |= {f"{split}_{metric}": float(curve.mean(split, metric)[-1]) for split, metric in curve.values}
        row |= {"uplink_bytes": int(found.uplink_bytes[-1])}
        if plan.forecasting.target is not None:
            reached = found.reached(plan.forecasting.target, curve)
            row |= {"target": plan.forecasting.target, "rounds_to_target": reached.round}
            row |= {"uplink_bytes_to_target": reached.uplink_bytes, f"nearest_test_{plan.main}": reached.nearest}
        rows.append(row | ({} if found.limit is None else {"limit": found.limit}))
    return rows


def _rate(rate: float) -> str:
    return f"{rate:.4g}" if rate < float("inf") else "no end found"


def _goal(plan: Plan) -> str:
    return f"{'accuracy' if plan.main == 'accuracy' else 'MSE'} {plan.forecasting.target:g}"


def _ends(found: Forecast, curve: Curve) -> list[str]:
    """Returns the test metrics at the last round, and the round and MiB at which the target is reached."""
    plan = found.plan
    cells = [number(float(curve.mean("test", name)[-1]), 4) for name in dict.fromkeys((plan.loss, plan.main))]
    if plan.forecasting.target is not None:
        reached = found.reached(plan.forecasting.target, curve)
        sent = None if reached.uplink_bytes is None else reached.uplink_bytes / MEBIBYTE
        cells += ["never" if reached.round is None else str(reached.round), number(sent, 1)]
    return cells


def _columns(plan: Plan) -> list[str]:
    names = {"nll": "test NLL", "mse": "test MSE", "loss": "test loss", "accuracy": "accuracy"}
    found = [names[name] for name in dict.fromkeys((plan.loss, plan.main))]
    return [*found, *(["rounds", "MiB up"] if plan.forecasting.target is not None else [])]


def _until(plan: Plan) -> str:
    """Returns the part of a table's title that explains its rounds and bytes; "" without a target."""
    return "" if plan.forecasting.target is None else f"; rounds and MiB to {_goal(plan)}"


def _show(screen: Console, found: Forecast) -> None:
    plan, rates, horizon = found.plan, found.rates, found.plan.setting.size.num_rounds
    cells = []
    for split, metric in found.given.values:
        low, high = (float(end[-1]) for end in found.given.band(split, metric))
        mean = float(found.given.mean(split, metric)[-1])
        cells.append((split, metric.replace("_", " "), number(mean, 4), f"{number(low, 4)} to {number(high, 4)}"))
    for way, sent in (("uplink", found.uplink_bytes), ("downlink", found.downlink_bytes)):
        cells.append(("", f"{way} MiB", number(int(sent[-1]) / MEBIBYTE, 2), ""))
    title = f"{found.name} at rate {found.given.rate:g}, round {horizon}, predicted"
    screen.print(TextTable(title, ("split", "metric", "value", f"90 % of {plan.forecasting.draws} starts"), cells))
    if rates is not None:
        _show_rates(screen, found, rates)
    _remark(screen, found)


def _show_rates(screen: Console, found: Forecast, rates: Rates) -> None:
    plan, horizon, blank = found.plan, found.plan.setting.size.num_rounds, [""] * len(_columns(found.plan))
    lines = [("given", _rate(found.given.rate), *_ends(found, found.given)),
             (f"best at round {horizon}", _rate(rates.best), *_ends(found, found.best)),
             ("largest stable", _rate(rates.stable), *blank)]  # fmt: skip
    if found.fastest is not None:
        lines.insert(2, ("of the fewest rounds", _rate(found.fastest.rate), *_ends(found, found.fastest)))
    if rates.guaranteed is not None:
        lines.append(("guaranteed stable below", _rate(rates.guaranteed), *blank))
    screen.print(TextTable(f"client learning rate{_until(plan)}", ("", "rate", *_columns(plan)), lines))
    if 0 < rates.stable < found.given.rate:
        said = "the run does not train: it is above the largest stable one"
        screen.print(f"{found.name}: at rate {found.given.rate:g} {said}", highlight=False)


def _show_ranked(screen: Console, found: Sequence[Forecast]) -> None:
    plan = found[0].plan
    lines = [(f.name, _rate(f.best.rate), *_stable(f), *_ends(f, f.best)) for f in found]  # fmt: skip
    which = "given" if found[0].rates is None else "best"
    title = f"round {plan.setting.size.num_rounds} at {which} rates, predicted{_until(plan)}"
    screen.print(
        TextTable(
            title, ("algorithm", f"{which} rate", *(["stable to"] if found[0].rates else []), *_columns(plan)), lines
        )
    )
    for one in found:
        _remark(screen, one)


def _stable(found: Forecast) -> list[str]:
    return [] if found.rates is None else [_rate(found.rates.stable)]


def _remark(screen: Console, found: Forecast) -> None:
    """Prints remarks on the rates and the target that matter before the user trusts or changes them."""
    plan, rates, lines = found.plan, found.rates, list[str]()
    if rates is not None and rates.stable == 0:
        lines.append("the training loss rises at every rate that was tried")
    if rates is not None and plan.loss != "mse" and rates.stable > MUCH * rates.best:
        by = words(mean_form(plan.examples.loss))
        lines.append(f"by the {by} loss a run may end well at rates far above the best: stable is no bound to go to")
    if rates is not None and rates.at_edge:
        lines.append(f"the best rate is at an end of those tried, {rates.tried[0]:.3g} to {rates.tried[-1]:.3g}")
    if plan.forecasting.target is not None:
        reached = found.reached(plan.forecasting.target, found.best)
        if reached.round is None:
            at_end = "" if found.limit is None else f"; Theorem 2's limit has {found.limit[plan.main]:.4g}"
            lines.append(
                f"{_goal(plan)} is never reached in {plan.setting.size.num_rounds} rounds: the best at rate "
                f"{found.best.rate:.3g} is {reached.nearest:.4g}{at_end}"
            )
    for line in lines:
        screen.print(f"{found.name}: {line}", highlight=False)
