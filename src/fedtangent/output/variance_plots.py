"""The figure of an ensemble's variance against its number of models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtangent.output.plots import METHODS, NEUTRAL, _figure, _save


class Points(NamedTuple):
    """One series: by number of models, a value and its standard error."""

    values: Mapping[int, tuple[float, float]]
    is_line: bool  # a prediction, drawn as a line; otherwise points with bars of one standard error


def variance_against_models(panels: Mapping[str, Mapping[str, Points]], title: str, path: Path) -> Path:
    """Log-log panels of several series, each with a line of slope -1 through the first value of its first series."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator

    figure, axes = _figure(len(panels), width=5.0, height=4.0)
    for ax, (name, series) in zip(axes[0], panels.items(), strict=True):
        for i, (label, points) in enumerate(series.items()):
            k = np.array(list(points.values), float)
            value, error = np.array(list(points.values.values())).reshape(-1, 2).T
            colour, marker = METHODS[i % len(METHODS)], "os^D"[i % 4]
            if points.is_line:
                ax.plot(k, value, "-" if i % 2 == 0 else "--", color=colour, lw=1.6, label=label)
            else:
                ax.errorbar(k, value, error, fmt=marker, ms=5, capsize=3, lw=1.2, color=colour, label=label)
        first = next(iter(series.values())).values
        ends = np.array([min(first), max(first)], float)
        ax.plot(ends, first[min(first)][0] * ends[0] / ends, ":", color=NEUTRAL, lw=1, label="1/K")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ticks = sorted({k for points in series.values() for k in points.values})
        ax.set_xticks(ticks, [str(k) for k in ticks])
        ax.minorticks_off()
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        ax.set_xlabel("models K")
        ax.set_title(name, fontsize=9)
        ax.legend(fontsize=8)
    axes[0][0].set_ylabel("variance, mean over x")
    figure.suptitle(title)
    return _save(figure, path)
