"""Figures of predicted runs: learning curves with bands, and the final loss against the clients' learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedtangent._src.comparison.forecast import TRIED_DRAWS, Curve, Forecast
from fedtangent._src.output.style import (
    FEW,
    METHODS,
    NEUTRAL,
    PREDICTED,
    SIMULATED,
    canvas,
    dress,
    in_words,
    reach,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEYOND = 2.0  # times the untrained loss, above which a curve is cut off


def learning_curves(forecasts: Sequence[Forecast], path: Path) -> Path:
    """Draws predicted loss and main metric against the round, with bands from the 5th to the 95th percentile.

    The main metric is the accuracy, or the loss if the targets are not classes. Percentiles are over initial functions.
    One forecast has training and test curves at its learning rate, and the test curve at the best rate if rates were
    searched. Of several forecasts, each has one test curve, at its best rate. Runs of more than eight rounds get a
    further panel, in which the vertical axis fits the main metric of the last half of the rounds.

    Args:
        forecasts: The forecasts.
        path: File to write, which is returned.
    """
    first = forecasts[0].plan
    target = first.forecasting.target
    panels = [(metric, False) for metric in dict.fromkeys((first.loss, first.main))]
    panels += [(first.main, True)] * (first.setting.size.num_rounds > FEW)
    figure, axes = canvas(len(panels), width=4.6, height=3.6)
    for ax, (metric, late) in zip(axes[0], panels, strict=True):
        bands = []
        for curve, split, label, colour in _lines(forecasts):
            mean, (low, high) = curve.mean(split, metric), curve.band(split, metric)
            bands += [end[len(end) // 2 :] for end in (low, high)]
            ax.fill_between(curve.rounds, low, high, color=colour, alpha=0.18, lw=0)
            ax.plot(curve.rounds, mean, color=colour, lw=1.6, label=label, ls="-" if split == "test" else "--")
        if late:
            ax.set_ylim(reach(np.concatenate(bands)))
        elif metric != "accuracy":
            untrained = max(float(f.given.mean("train", metric)[0]) for f in forecasts)
            values = np.concatenate([c.mean(split, metric) for c, split, *_ in _lines(forecasts)])
            least = np.nanmin(values if target is None else [*values, target])
            ax.set_ylim(0.8 * least, BEYOND * untrained)
        if target is not None and metric == first.main:
            ax.axhline(target, color=NEUTRAL, lw=1, ls=":", label=f"target {target:g}")
        title = "the last half of the rounds, enlarged" if late else ""
        dress(ax, "round", in_words(metric), title, log="" if late or metric == "accuracy" else "y", whole=True)
    return save(figure, path, f"{_title(forecasts)}, predicted; bands: 90 % of {first.draws} starts")


def _title(forecasts: Sequence[Forecast]) -> str:
    dataset = forecasts[0].plan.examples.dataset.name
    return f"{forecasts[0].name if len(forecasts) == 1 else f'{len(forecasts)} algorithms'} on {dataset}"


def _lines(forecasts: Sequence[Forecast]) -> list[tuple[Curve, str, str, str]]:
    if len(forecasts) > 1:
        return [
            (f.best, "test", f"{f.name}, rate {f.best.rate:.3g}", METHODS[i % len(METHODS)])
            for i, f in enumerate(forecasts)
        ]
    (only,) = forecasts
    rate = f"rate {only.given.rate:.3g}"
    lines = [
        (only.given, "train", f"training, {rate}", SIMULATED),
        (only.given, "test", f"test, {rate}", SIMULATED),
    ]
    if only.rates is not None:
        lines.append((only.best, "test", f"test, best rate {only.best.rate:.3g}", PREDICTED))
    return lines


def loss_against_rate(forecasts: Sequence[Forecast], path: Path) -> Path:
    """Draws the predicted test loss at the last round against the clients' learning rate.

    The best and the largest stable rate are marked; for a single forecast also the rate of its run.

    Args:
        forecasts: The forecasts, a line each; one whose learning rates were not searched has no line.
        path: File to write, which is returned.
    """
    figure, axes = canvas(1, width=6.0, height=4.0)
    ax: Axes = axes[0][0]
    for i, forecast in enumerate(forecasts):
        colour, rates, one = METHODS[i % len(METHODS)], forecast.rates, len(forecasts) == 1
        if rates is None:
            continue
        finite = np.isfinite(rates.losses)
        ax.plot(rates.tried[finite], rates.losses[finite], ".-", ms=4, lw=1.2, color=colour, label=forecast.name)
        best = float(rates.losses[rates.tried == rates.best][0])
        ax.plot(rates.best, best, "o", ms=7, color=colour, label=f"best: {rates.best:.3g}" if one else None)
        if 0 < rates.stable < np.inf:
            label = f"largest stable: {rates.stable:.3g}" if one else None
            ax.axvline(rates.stable, color=colour, lw=1, ls="--", label=label)
        if one:
            ax.axvline(forecast.given.rate, color=NEUTRAL, lw=1, ls=":", label=f"given: {forecast.given.rate:.3g}")
    metric, horizon = forecasts[0].plan.loss, forecasts[0].plan.setting.size.num_rounds
    legend = "" if len(forecasts) == 1 else "dots: best, dashed: largest stable"
    starts = min(TRIED_DRAWS, forecasts[0].plan.draws)  # fewer than the curves are of
    dress(ax, "client learning rate", f"test {in_words(metric)} at round {horizon}, {starts} starts", legend, log="xy")
    return save(figure, path, f"{_title(forecasts)}, predicted")
