"""One look for every figure: colours, panels, the dress of an axis. Matplotlib is imported when the first is drawn."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIMULATED, PREDICTED, NEUTRAL, DATA = "#0072b2", "#d55e00", "#666666", "#222222"  # Okabe-Ito: safe for all eyes
SHADES = ("#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#084594", "#042c5c")
METHODS = (SIMULATED, PREDICTED, "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
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


def save(figure: Figure, path: Path, title: str = "") -> Path:
    """Write the figure under its ``title``; returns ``path``."""
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)
    return path


def slug(name: str) -> str:
    """``name`` as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
