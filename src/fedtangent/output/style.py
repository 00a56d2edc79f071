"""One look for every figure: colours, panels, the dress of an axis. Matplotlib is imported when the first is drawn."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIMULATED, PREDICTED, NEUTRAL, DATA = "#0072b2", "#d55e00", "#666666", "#222222"  # Okabe-Ito: safe for all eyes
SHADES = ("#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#084594", "#042c5c")
METHODS = (SIMULATED, PREDICTED, "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
LAZINESS = {  # the parts of a network's distance to its prediction: name and colour
    "feature_learning": ("network to its linearisation", SIMULATED),
    "initial_kernel": ("linearisation to infinite width", PREDICTED),
    "total": ("network to infinite width", DATA),
}
MARKERS = ("o", "s", "^", "D", "v", "P")


def canvas(columns: int, rows: int = 1, width: float = 4.2, height: float = 3.4, **options: Any) -> tuple[Figure, Any]:
    """A figure of ``rows`` by ``columns`` axes, [rows, columns], each so many inches large."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, and without pyplot's global state
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def dress(
    ax: Axes, x: str = "", y: str = "", title: str = "", log: str = "", legend: float = 8, whole: bool = False
) -> None:
    """Name an axis' sides, make those of ``log`` ("x", "y", "xy") logarithmic, and add a legend of this size, if any.

    ``whole``: only whole numbers are marked across.
    """
    for side in log:
        (ax.set_xscale if side == "x" else ax.set_yscale)("log")
    if whole:
        locator: Any = ax.xaxis.get_major_locator()
        locator.set_params(integer=True)
    if x:
        ax.set_xlabel(x)
    if y:
        ax.set_ylabel(y)
    ax.set_title(title, fontsize=10)
    if legend and ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=legend)


def band(ax: Axes, x: np.ndarray, mean: np.ndarray, sd: np.ndarray, colour: str, label: str) -> None:
    """A mean over ``x`` [m] and the 95 % band of normal distributions around it."""
    ax.fill_between(x, mean - 1.96 * sd, mean + 1.96 * sd, color=colour, alpha=0.18, lw=0, label="mean +- 1.96 sd")
    ax.plot(x, mean, color=colour, lw=2, label=label)


def legend_below(figure: Figure, axes: Any) -> Any:
    """One legend below all panels, with every label once."""
    found: dict[str, Any] = {}
    for ax in axes.ravel():
        found |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": len(found), "fontsize": 9}
    return figure.legend(list(found.values()), list(found), **place)


def save(figure: Figure, path: Path, title: str = "") -> Path:
    """Write the figure under its ``title``; returns ``path``."""
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)
    return path


def slug(name: str) -> str:
    """``name`` as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
