"""The figure of Theorem 2: K trained networks beside the law that every one of them is drawn from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedtangent.compare.theorems.fed_ensemble.ensemble_law import Entries, coverage, entries
from fedtangent.compare.theorems.fed_ensemble.limit import Theorem2
from fedtangent.output.plots import DATA, NEUTRAL, PREDICTED, SHADES, SIMULATED, _figure, _save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVELS = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])
MOST_BARS = 600  # entries drawn of a scatter
MOST_LINEAR = 30  # largest over smallest variance on linear axes


def theorem2_figure(result: Theorem2, path: Path) -> Path:
    """Mean and band, or mean scatter; variance and off-diagonal covariance against the predicted; coverage by level."""
    figure, axes = _figure(4, width=4.3, height=3.9)
    first, variance, covariance, cover = axes[0]
    found = [entries(t.samples, result.law) for t in result.trained]
    if result.setting.x_train.shape[1] == 1:
        _bands(first, result)
    else:
        _scatter(first, "mean", [f["mean"] for f in found], result)
    _scatter(variance, "variance", [f["variance"] for f in found], result)
    _scatter(covariance, "off-diagonal covariance", [f["covariance"] for f in found], result)
    predicted = found[0]["variance"].predicted
    if np.max(predicted) > MOST_LINEAR * np.min(predicted):
        variance.set_xscale("log")
        variance.set_yscale("log")
    _coverage(cover, result)
    figure.suptitle(f"{result.setting.title}: K = {len(result.law.mean)} models beside {result.of}")
    return _save(figure, path)


def _bands(ax: Axes, result: Theorem2) -> None:
    x, order = result.setting.x_test[:, 0], np.argsort(result.setting.x_test[:, 0])
    largest = result.trained[-1]
    mean, sd = result.law.mean.mean(axis=0)[order, 0], np.sqrt(np.diag(result.law.average_cov))[order]
    ax.fill_between(x[order], mean - 1.96 * sd, mean + 1.96 * sd, color=PREDICTED, alpha=0.2, lw=0)
    ax.plot(x[order], mean, color=PREDICTED, lw=2, label="predicted mean, 95 % band")
    sampled, spread = largest.samples[..., 0].mean(axis=0)[order], largest.samples[..., 0].std(axis=0, ddof=1)[order]
    ax.plot(x[order], sampled, color=SIMULATED, lw=1.5, label=f"mean of networks, width {largest.width}")
    for sign in (-1.96, 1.96):
        label = "mean +- 1.96 sd of networks" if sign > 0 else None
        ax.plot(x[order], sampled + sign * spread, "--", color=SIMULATED, lw=1, label=label)
    ax.plot(result.setting.x_train[:, 0], result.setting.y_train[:, 0], ".", color=DATA, ms=6, label="training data")
    low, high = np.min(mean - 2 * sd), np.max(mean + 2 * sd)
    ax.set_ylim(low - 0.1 * (high - low), high + 0.6 * (high - low))
    ax.set_xlabel("x")
    ax.set_ylabel("f(x)")
    ax.legend(fontsize=7, loc="upper center")


def _scatter(ax: Axes, name: str, widths: list[Entries], result: Theorem2) -> None:
    """Measured against predicted entries of each width, with bars of one standard error and the line of equality.

    Variances and covariances, which all outputs share, are averaged over the outputs (so are their errors, which are
    independent); of many, every so many one is drawn.
    """
    outputs = 1 if name == "mean" else result.setting.y_train.shape[1]
    step = max(len(widths[0].measured) // outputs // MOST_BARS, 1)
    for found, trained, colour in zip(widths, result.trained, (SHADES[1], SHADES[4]), strict=False):
        predicted, measured, error = (
            part.reshape(-1, outputs).mean(axis=1)[::step]
            for part in (found.predicted, found.measured, found.standard_error / np.sqrt(outputs))
        )
        label = f"width {trained.width}: {found.share_beyond:.1%} beyond 3 SE"
        ax.errorbar(predicted, measured, error, fmt=".", ms=4, lw=0.5, alpha=0.6, color=colour, label=label)
    line = np.sort(widths[0].predicted)
    ax.plot(line, line, color=PREDICTED, lw=1.2, label="equal", zorder=3)
    notes = [f"mean of {outputs} outputs"] * (outputs > 1) + [f"1 in {step}"] * (step > 1)
    ax.set_xlabel("predicted")
    ax.set_ylabel("over the models")
    ax.set_title(", ".join([f"{name}, bars of 1 SE", *notes]), fontsize=9)
    ax.legend(fontsize=7)


def _coverage(ax: Axes, result: Theorem2) -> None:
    """Share of values inside the law's central intervals of each level; of the networks before training, beside it."""
    trials = coverage(result.trained[0].samples, result.law).trials
    half = 1.96 * np.sqrt(LEVELS * (1 - LEVELS) / trials)
    ax.fill_between(LEVELS, LEVELS - half, LEVELS + half, color=PREDICTED, alpha=0.2, lw=0,
                    label=f"95 % of {trials} independent values")  # fmt: skip
    ax.plot([0, 1], [0, 1], color=PREDICTED, lw=1.2, label="nominal")
    for trained, colour in zip(result.trained, (SHADES[1], SHADES[4]), strict=False):
        shares = [coverage(trained.samples, result.law, level).share for level in LEVELS]
        ax.plot(LEVELS, shares, "o-", ms=3, color=colour, label=f"width {trained.width}, all values")
    start = [coverage(result.trained[-1].start, result.law, level).share for level in LEVELS]
    ax.plot(LEVELS, start, ":", color=NEUTRAL, label="before training")
    ax.set_xlabel("nominal level of the interval")
    ax.set_ylabel("share inside")
    ax.set_title("coverage", fontsize=10)
    ax.legend(fontsize=7)
