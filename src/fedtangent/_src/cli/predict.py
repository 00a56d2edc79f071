"""``fedtangent predict``: theory alone: learning curve, best rate, rounds to a target.

With several algorithms, ``--algorithm A B ..``, or several values of an option, ``--mu 0.01 0.1``, one table ranks the
runs, each at its best rate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from fedtangent._src.checks import whole
from fedtangent._src.cli.arguments import FigureOptions
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
from fedtangent._src.engine.building import build, preview
from fedtangent._src.engine.description import Descriptions
from fedtangent._src.engine.loop import Evaluation
from fedtangent._src.entries import Values
from fedtangent._src.losses import divergence, mean_form, words
from fedtangent._src.output.files import (
    Ended,
    Metric,
    Row,
    ended,
    output_folder,
    write_config,
    write_metrics,
    write_result,
)
from fedtangent._src.output.tables import TextTable, clock, console, number
from fedtangent._src.types import wrapped

MEBIBYTE = 2**20
MUCH = 10.0  # times the best rate: a largest stable rate beyond it is of no use


@dataclass(frozen=True)
class PredictOptions(Forecasting):
    """Options of ``fedtangent predict``: how runs are predicted, and where the results are written."""

    evaluate_every: int = 1
    """Rounds between evaluations; a target can be reached only at these."""
    output: Path = Path("results/predict")
    """Folder for config.json, metrics.csv, result.json and figures/."""


class PredictJob(NamedTuple):
    """The runs to predict, and the options of the command.

    Attributes:
        plans: A run for each algorithm and combination of values.
        options: Values of all options, for config.json.
        output: Folder of the files.
        figures: Format of the figures.
    """

    plans: list[Plan]
    options: Values
    output: Path
    figures: FigureOptions


def prepare(options: PredictOptions, figures: FigureOptions, described: Descriptions) -> PredictJob:
    """Checks every option and loads the data.

    Args:
        options: Options of the prediction and its output.
        figures: Format of the figures.
        described: The runs to predict.

    Raises:
        ValueError: An option is not allowed, data are missing, theory does not follow a run, or memory is too small.
    """
    check_forecasting(options)
    evaluation = Evaluation(whole("evaluate_every", options.evaluate_every))
    for one in described.runs:  # before any data are loaded
        preview(one)
    placed = replace(options, kernel_dir=options.kernel_dir or options.output / "kernels")
    plans = []
    for one, label in zip(described.runs, described.labels(), strict=True):
        built, run = build(one), one.run
        algorithm = wrapped(built.algorithm, f"{built.algorithm.name}{label}") if label else built.algorithm
        plans.append(plan_of(algorithm, built.examples, run.num_rounds, run.seed, evaluation, placed))
    if plans[0].setting.start is None:
        memory_of(plans[0])
    values = described.values() | asdict(options) | asdict(figures)
    return PredictJob(plans, values, options.output, figures)


def run_job(job: PredictJob) -> Ended:
    """Predicts every run, writes files after each, prints a table and draws figures; returns the outcome."""
    from fedtangent._src.output.forecast_plots import learning_curves, loss_against_rate

    screen, start, done = console(), time.perf_counter(), list[Forecast]()
    say, folder = clock(screen), output_folder(job.output)
    write_config(folder, "predict", job.options)
    for plan in job.plans:
        screen.print(f"[bold]{plan.setting.title}[/bold]", highlight=False)
    for forecast in forecasts(job.plans, progress=True, say=say):
        done.append(forecast)
        write_metrics(folder, [metric for one in done for metric in _metrics(one)])
        write_result(folder, [row for one in ranked(done) for row in _rows(one)])
    figures = job.figures.within(folder)
    learning_curves(done, figures.path("predicted"))
    if done[0].rates is not None:
        loss_against_rate(done, figures.path("rates"))
    screen.print()
    if len(done) == 1:
        _show(screen, done[0])
    else:
        _show_ranked(screen, ranked(done))
    seconds = time.perf_counter() - start
    places = f"numbers in {folder / 'metrics.csv'}, figures in {folder / 'figures'}"
    screen.print(f"{seconds:.0f} s; {places}", highlight=False)
    return ended(_diverged(done))


def _diverged(forecasts: Sequence[Forecast]) -> list[str]:
    """Describes the runs that are predicted to diverge, a line each.

    With several runs only the best learning rate of each counts; with a single run its given rate counts as well.
    """
    curves = [(one.name, one.best) for one in forecasts]
    if len(forecasts) == 1:
        curves.append((forecasts[0].name, forecasts[0].given))
    by_rate = {(name, curve.rate): curve for name, curve in curves}
    loss = forecasts[0].plan.loss
    return [
        f"{n}: diverges at rate {rate:.4g}, it is predicted" for (n, rate), c in by_rate.items() if _is_far(c, loss)
    ]


def _is_far(curve: Curve, loss: str) -> bool:
    """Tells whether a predicted learning curve has diverged at its last round; ``loss`` names its loss metric."""
    return bool(divergence([values[:, -1] for values in curve.values.values()], curve.mean("train", loss)))


def _metrics(forecast: Forecast) -> list[Metric]:
    """Builds the rows of metrics.csv for a predicted run: by round, each metric's mean, 5th and 95th percentiles.

    They are at the given learning rate, and at the best and the fastest rate if there are any.
    """
    curves = {"predicted": forecast.given}
    if forecast.rates is not None:
        curves["predicted at the best rate"] = forecast.best
    if forecast.fastest is not None:
        curves["predicted at the fastest rate"] = forecast.fastest
    rows, seed, name_of_split = [], forecast.plan.setting.seed, forecast.plan.named
    for which, curve in curves.items():
        for (split, metric), values in curve.values.items():
            low, high = curve.band(split, metric)
            series = {metric: values.mean(axis=0), f"{metric}_p5": low, f"{metric}_p95": high}
            for name, by_round in series.items():
                columns = zip(curve.rounds, by_round, forecast.uplink_bytes, forecast.downlink_bytes, strict=True)
                for round_, value, up, down in columns:
                    algorithm = f"{forecast.name}, {which}"
                    rows.append(
                        Metric(
                            int(round_), algorithm, seed, name_of_split(split), name, float(value), int(up), int(down)
                        )
                    )
    return sorted(rows, key=lambda row: (row.algorithm, row.round))


def _rows(forecast: Forecast) -> list[Row]:
    """Builds the rows of result.json for a run, one for each learning rate.

    The first row has the given rate. If rates were searched for, the next row has the best rate, and a last row the
    rate that reaches the target in the fewest rounds, if a tried rate reaches it.
    """
    rows, plan, rates = [], forecast.plan, forecast.rates
    best = None if rates is None else forecast.best
    for which, curve in (("given", forecast.given), ("best", best), ("fastest", forecast.fastest)):
        if curve is None:
            continue
        row: Row = {"algorithm": forecast.name, "at": f"{which} rate", "rate": curve.rate}
        if rates is not None:
            row |= {"largest_stable_rate": rates.stable, "guaranteed_rate": rates.guaranteed}
        row["rounds"] = plan.setting.size.num_rounds
        row |= {f"{plan.named(split)}_{metric}": float(curve.mean(split, metric)[-1]) for split, metric in curve.values}
        row["uplink_bytes"] = int(forecast.uplink_bytes[-1])
        if plan.forecasting.target is not None:
            reached = forecast.reached(plan.forecasting.target, curve)
            row |= {"target": plan.forecasting.target, "rounds_to_target": reached.round}
            row |= {"uplink_bytes_to_target": reached.uplink_bytes, f"nearest_test_{plan.main}": reached.nearest}
        rows.append(row | ({} if forecast.limit is None else {"limit": forecast.limit}))
    return rows


def _rate(rate: float) -> str:
    return f"{rate:.4g}" if rate < float("inf") else "no end found"


def _goal(plan: Plan) -> str:
    return f"{'accuracy' if plan.main == 'accuracy' else 'MSE'} {plan.forecasting.target:g}"


def _ends(forecast: Forecast, curve: Curve) -> list[str]:
    """Returns cells of a table: test loss and main metric at the last round, and round and uplink MiB at the target.

    ``curve`` is a learning curve of ``forecast``, at one learning rate. The first two are one cell if the loss is the
    main metric. A target that is not reached gives "never" and "-"; without a target the last two cells are left out.
    """
    plan = forecast.plan
    cells = [number(float(curve.mean("test", name)[-1]), 4) for name in dict.fromkeys((plan.loss, plan.main))]
    if plan.forecasting.target is not None:
        reached = forecast.reached(plan.forecasting.target, curve)
        sent = None if reached.uplink_bytes is None else reached.uplink_bytes / MEBIBYTE
        cells += ["never" if reached.round is None else str(reached.round), number(sent, 1)]
    return cells


def _columns(plan: Plan) -> list[str]:
    """Returns the headings of the cells that ``_ends`` returns: test loss and main metric, rounds and uplink MiB.

    Without a target the last two are left out.
    """
    names = {"nll": "test NLL", "mse": "test MSE", "loss": "test loss", "accuracy": "accuracy"}
    metrics = [names[name] for name in dict.fromkeys((plan.loss, plan.main))]
    return [*metrics, *(["rounds", "MiB up"] if plan.forecasting.target is not None else [])]


def _until(plan: Plan) -> str:
    """Returns the end of a table's title: the target accuracy or loss, or "" if the user set no target."""
    return "" if plan.forecasting.target is None else f"; rounds and MiB to {_goal(plan)}"


def _show(screen: Console, forecast: Forecast) -> None:
    plan, curve = forecast.plan, forecast.given
    cells, several = [], plan.draws > 1
    for split, metric in curve.values:
        low, high = (number(float(end[-1]), 4) for end in curve.band(split, metric))
        mean = number(float(curve.mean(split, metric)[-1]), 4)
        cells.append((plan.named(split), metric.replace("_", " "), mean, *[f"{low} to {high}"] * several))
    for way, sent in (("uplink", forecast.uplink_bytes), ("downlink", forecast.downlink_bytes)):
        cells.append(("", f"{way} MiB", number(int(sent[-1]) / MEBIBYTE, 2), *[""] * several))
    at_rate = "" if np.isnan(curve.rate) else f" at rate {curve.rate:g}"
    title = f"{forecast.name}{at_rate}, round {plan.setting.size.num_rounds}, predicted"
    columns = ("split", "metric", "value", *[f"90 % of {plan.draws} starts"] * several)
    screen.print(TextTable(title, columns, cells))
    if forecast.rates is not None:
        _show_rates(screen, forecast, forecast.rates)
    _remark(screen, forecast)


def _show_rates(screen: Console, forecast: Forecast, rates: Rates) -> None:
    plan, curve = forecast.plan, forecast.given
    columns = _columns(plan)
    blank = [""] * len(columns)
    lines = [("given", _rate(curve.rate), *_ends(forecast, curve))]
    lines.append((f"best at round {plan.setting.size.num_rounds}", _rate(rates.best), *_ends(forecast, forecast.best)))
    if forecast.fastest is not None:
        fastest = forecast.fastest
        lines.append(("of the fewest rounds", _rate(fastest.rate), *_ends(forecast, fastest)))
    lines.append(("largest stable", _rate(rates.stable), *blank))
    if rates.guaranteed is not None:
        lines.append(("guaranteed stable below", _rate(rates.guaranteed), *blank))
    screen.print(TextTable(f"client learning rate{_until(plan)}", ("", "rate", *columns), lines))
    if 0 < rates.stable < curve.rate:
        warning = "the run does not train: it is above the largest stable one"
        screen.print(f"{forecast.name}: at rate {curve.rate:g} {warning}", highlight=False)


def _show_ranked(screen: Console, forecasts: Sequence[Forecast]) -> None:
    plan, has_rates = forecasts[0].plan, forecasts[0].rates is not None
    which = "best" if has_rates else "given"
    columns = ("algorithm", f"{which} rate", *["stable to"] * has_rates, *_columns(plan))
    lines = []
    for one in forecasts:
        stable = [] if one.rates is None else [_rate(one.rates.stable)]
        lines.append((one.name, _rate(one.best.rate), *stable, *_ends(one, one.best)))
    title = f"round {plan.setting.size.num_rounds} at {which} rates, predicted{_until(plan)}"
    screen.print(TextTable(title, columns, lines))
    for one in forecasts:
        _remark(screen, one)


def _remark(screen: Console, forecast: Forecast) -> None:
    """Prints remarks about a prediction that the user should know before trusting its rates or changing its target."""
    plan, rates, lines = forecast.plan, forecast.rates, list[str]()
    if rates is not None and rates.stable == 0:
        lines.append("the training loss rises at every rate that was tried")
    if rates is not None and plan.loss != "mse" and rates.stable > MUCH * rates.best:
        by = words(mean_form(plan.examples.loss))
        lines.append(f"by the {by} loss a run may end well at rates far above the best: avoid the largest stable rate")
    if rates is not None and rates.at_edge:
        lines.append(f"the best rate is at an end of those tried, {rates.tried[0]:.3g} to {rates.tried[-1]:.3g}")
    if plan.forecasting.target is not None:
        reached = forecast.reached(plan.forecasting.target, forecast.best)
        if reached.round is None:
            at_end = (
                "" if forecast.limit is None else f"; in the limit of many rounds it is {forecast.limit[plan.main]:.4g}"
            )
            lines.append(
                f"{_goal(plan)} is never reached in {plan.setting.size.num_rounds} rounds: the best at rate "
                f"{forecast.best.rate:.3g} is {reached.nearest:.4g}{at_end}"
            )
    if not plan.is_flow:
        lines.insert(0, f"predicted by {plan.how}")
    for line in lines:
        screen.print(f"{forecast.name}: {line}", highlight=False)
