"""The figure of a run's tangent kernels. Matplotlib is imported when it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedtangent.output.plots import NEUTRAL, PREDICTED, SIMULATED, _figure, _save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = (  # title, axis, metrics and their names in the legend
    (
        "drift from the initial kernel",
        "relative change",
        {"drift": "Frobenius norm", "drift_operator": "operator norm"},
    ),
    ("alignment with the targets", "alignment", {"alignment": "plain", "alignment_centred": "centred"}),
    ("effective rank", "rank", {"effective_rank": "entropy", "trace_over_largest": "trace / largest eigenvalue"}),
    (
        "commutators of clients' Gram operators",
        "relative norm",
        {"commutator_relative": "mean of pairs"},
    ),
    (
        "variance of clients' Gram operators",
        "relative norm",
        {"gram_variance_relative": "variance"},
    ),
)


def kernel_figure(
    series: dict[str, dict[int, list[float]]],
    first: Sequence[np.ndarray],
    last: Sequence[np.ndarray],
    last_round: int,
    title: str,
    path: Path,
) -> Path:
    """Kernel diagnostics along a run, and the spectrum at its two ends.

    ``series`` is ``{metric: {round: values}}``, a value for each model and seed: lines are means; the band of a panel's
    first metric goes from the smallest to the largest. ``first`` and ``last`` are eigenvalues, largest first, of every
    model: thin lines, with their geometric mean.
    """
    figure, axes = _figure(3, rows=2, width=4.2, height=3.1)
    flat = axes.ravel()
    for ax, (name, axis, metrics) in zip(flat, PANELS, strict=False):
        for i, ((metric, label), colour) in enumerate(zip(metrics.items(), (SIMULATED, PREDICTED), strict=False)):
            rounds = sorted(series[metric])
            values = np.array([series[metric][r] for r in rounds])
            if i == 0:  # the other metric of a panel is nearly the same, or has hardly a band
                ax.fill_between(rounds, values.min(axis=1), values.max(axis=1), color=colour, alpha=0.18, lw=0)
            ax.plot(rounds, values.mean(axis=1), "o-", ms=3, color=colour, label=label)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set_ylim(0, 1.08 * ax.get_ylim()[1])
        ax.set_xlabel("round")
        ax.set_ylabel(axis)
        ax.set_title(name, fontsize=10)
        if len(metrics) > 1:
            ax.legend(fontsize=8)
    _spectra(flat[-1], first, last, last_round)
    figure.suptitle(title)
    return _save(figure, path)


def _spectra(ax: Axes, first: Sequence[np.ndarray], last: Sequence[np.ndarray], last_round: int) -> None:
    for spectra, colour, label in ((first, NEUTRAL, "round 0"), (last, SIMULATED, f"round {last_round}")):
        values = np.array(spectra)
        positive = np.where(values > 0, values, np.nan)  # zeros are rounding: a logarithmic axis leaves them out
        order = np.arange(1, values.shape[1] + 1)
        for row in positive if len(positive) > 1 else ():
            ax.plot(order, row, color=colour, lw=0.6, alpha=0.3)
        kept = np.isfinite(positive).all(axis=0)
        mean = np.exp(np.mean(np.log(positive[:, kept]), axis=0))
        ax.plot(order[kept], mean, color=colour, lw=1.5, label=label)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("number")
    ax.set_ylabel("eigenvalue")
    ax.set_title("spectrum", fontsize=10)
    ax.legend(fontsize=8)
