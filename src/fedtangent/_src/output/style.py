"""The style of all figures: colours, panels, axes. Matplotlib is imported when the first figure is drawn."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

SIMULATED, PREDICTED, NEUTRAL, DATA = "#0072b2", "#d55e00", "#666666", "#222222"  # Okabe-Ito: safe for all eyes
SHADES = ("#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#084594", "#042c5c")
SHADES_ON_DARK = ("#2171b5", "#4292c6", "#6baed6", "#9ecae1", "#c6dbef", "#eff3ff")
ON_DARK = {DATA: "#eeeeee", "black": "#eeeeee", NEUTRAL: "#aaaaaa", **dict(zip(SHADES, SHADES_ON_DARK, strict=True))}
METHODS = (SIMULATED, PREDICTED, "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
METRICS = {"mse": "mean squared error", "nll": "negative log-likelihood"}
LAZINESS = {  # the parts of a network's distance to its prediction: name and colour
    "feature_learning": ("network to its linearisation", SIMULATED),
    "initial_kernel": ("linearisation to infinite width", PREDICTED),
    "total": ("network to infinite width", DATA),
}
FEW = 8  # values of x, all of which have a tick
MARGIN = 0.05  # free share of an axis at both ends
LINE = 0.17  # inches of a line of a legend
BELOW_NAMES = 4.8  # height of ticks and the axis' name, in letters of a legend
FEW_DECADES, MANY_STEPS = 2, 0.6  # powers of ten that an axis shows
MARKERS = ("o", "s", "^", "D", "v", "P")


def canvas(columns: int, rows: int = 1, width: float = 4.2, height: float = 3.4, **options: Any) -> tuple[Figure, Any]:
    """Creates a figure with a grid of axes, and returns both; the axes are an array [rows, columns].

    Args:
        columns: Number of columns.
        rows: Number of rows.
        width: Width of one panel in inches.
        height: Height of one panel in inches.
        **options: Further arguments of ``Figure.subplots``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, and without pyplot's global state
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def dress(ax: Axes, x: str = "", y: str = "", title: str = "", log: str = "", whole: bool = False) -> None:
    """Sets the names, the title and the scales of a panel's axes.

    Args:
        ax: The panel.
        x: Name of the horizontal axis; "" keeps the present name.
        y: Name of the vertical axis; "" keeps the present name.
        title: Title of the panel; "" removes the present one.
        log: Axes that become logarithmic: "x", "y", "xy" or "".
        whole: Whether the horizontal ticks are whole numbers only.
    """
    from matplotlib.ticker import AutoLocator

    for side in log:
        (ax.set_xscale if side == "x" else ax.set_yscale)("log")
    for axis in (ax.xaxis, ax.yaxis):
        locator = axis.get_major_locator()
        if isinstance(locator, AutoLocator):  # steps of 1, 2 and 5, not 2.5, whose numbers are longer
            locator.set_params(steps=[1, 2, 5, 10], integer=whole and axis is ax.xaxis)
    if x:
        ax.set_xlabel(x)
    if y:
        ax.set_ylabel(y)
    ax.set_title(title, fontsize=10)


def band(ax: Axes, x: np.ndarray, mean: np.ndarray, sd: np.ndarray, colour: str, label: str) -> None:
    """Draws the means of normal distributions as a line, with their central 95 % interval as a band.

    Args:
        ax: The panel.
        x: Values [m] of the horizontal axis.
        mean: Means [m].
        sd: Standard deviations [m].
        colour: Colour of line and band.
        label: Name of the mean in the legend.
    """
    ax.fill_between(x, mean - 1.96 * sd, mean + 1.96 * sd, color=colour, alpha=0.18, lw=0, label="mean +- 1.96 sd")
    ax.plot(x, mean, color=colour, lw=2, label=label)


def save(figure: Figure, path: Path, title: str = "") -> Path:
    """Finishes a figure, writes it and returns ``path``.

    The folder is created if it does not exist. The legend is outside the curves, and tick labels that would overlap are
    hidden. Equal figures give equal files, because no date is written. PDFs embed TrueType fonts, as journals require.

    Args:
        figure: The figure.
        path: File to write; its ending sets the format.
        title: Title of the figure.
    """
    import matplotlib

    finish(figure, title)
    dated = {".pdf": "CreationDate", ".svg": "Date"}.get(path.suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "fedtangent"}):
        figure.savefig(path, dpi=150, metadata={dated: None} if dated else None)
    return path


def finish(figure: Figure, title: str = "") -> None:
    """Adds the title, the legends and the ticks of logarithmic axes to a drawn figure, and hides ticks that overlap.

    Legends are below the panels, and make the figure higher. If matplotlib's style has a dark background
    (``plt.style.use("dark_background")``), dark lines become light.

    Args:
        figure: The figure.
        title: Title of the figure.
    """
    if title:
        figure.suptitle(title, fontsize=11)
    _lighten(figure)
    _add_legends(figure)
    for ax in figure.axes:
        _mark_logarithms(ax.xaxis)
        _mark_logarithms(ax.yaxis)
    _part_ticks(figure)


def _lighten(figure: Figure) -> None:
    """Gives dark lines a light colour in panels whose background is dark."""
    from matplotlib.colors import to_rgb

    light = {to_rgb(dark): colour for dark, colour in ON_DARK.items()}
    for ax in figure.axes:
        if sum(to_rgb(ax.get_facecolor())) < 1.5:
            for line in ax.lines:
                line.set_color(light.get(to_rgb(line.get_color()), line.get_color()))


def _add_legends(figure: Figure) -> None:
    """Adds legends below the panels of a figure: a single one, or one below each panel.

    There is a single legend if one panel shows all labels, or if a label looks the same in all panels and no two labels
    look alike.
    """
    legends = {ax: dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True)) for ax in figure.axes}
    legends = {ax: legend for ax, legend in legends.items() if legend}
    if not legends:
        return
    every = {label: handle for legend in legends.values() for label, handle in legend.items()}
    looks = {(label, _look(handle)) for legend in legends.values() for label, handle in legend.items()}
    alike = len(looks) == len(every) == len({look for _, look in looks})
    if alike or any(len(legend) == len(every) for legend in legends.values()):
        style, lines = _columns(every, figure.get_figwidth())
        figure.legend(list(every.values()), list(every), **style | {"loc": "outside lower center"})
        figure.set_figheight(figure.get_figheight() + LINE * lines)
        return
    most: dict[int, int] = {}  # by row of panels, lines of the longest legend
    for ax, legend in legends.items():
        place: Any = ax.get_subplotspec()
        style, lines = _columns(legend, figure.get_figwidth() / place.get_gridspec().ncols)
        style |= {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "borderaxespad": BELOW_NAMES}
        ax.legend(list(legend.values()), list(legend), **style)
        most[place.rowspan.start] = max(lines, most.get(place.rowspan.start, 0))
    figure.set_figheight(figure.get_figheight() + LINE * sum(most.values()))


def _look(handle: object) -> str:
    """Returns the colour, dashes and marker of a legend's entry as text, or its face colour if it is no line."""
    first = handle[0] if isinstance(handle, tuple) else handle
    names = ("color", "linestyle", "marker") if hasattr(first, "get_marker") else ("facecolor",)
    return str([getattr(first, f"get_{name}")() for name in names])


def _columns(labels: Iterable[str], width: float) -> tuple[dict[str, Any], int]:
    """Lays out a legend of these labels within ``width`` inches.

    Returns the arguments of matplotlib's ``legend``, and the number of lines that the legend takes.
    """
    lengths = [len(label) for label in labels]
    columns = min(max(int(width / (0.55 + 0.068 * max(lengths))), 1), len(lengths))
    return {"ncols": columns, "fontsize": 8, "frameon": False}, -(-len(lengths) // columns)


def _mark_logarithms(axis: Axis) -> None:
    """Adds ticks between the powers of ten if a logarithmic axis shows only a few of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if axis.get_scale() != "log" or not isinstance(axis.get_major_locator(), LogLocator):
        return
    low, high = axis.get_view_interval()
    decades = np.log10(high / low)
    axis.set_minor_formatter(NullFormatter())
    if decades < FEW_DECADES:
        between = LogLocator(subs=(1.0, 2.0, 5.0) if decades > 1 else (1.0, 2.0, 3.0, 5.0, 7.0))
        axis.set_major_locator(between if decades > MANY_STEPS else MaxNLocator(6, steps=[1, 2, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _part_ticks(figure: Figure) -> None:
    """Hides tick labels that would overlap the last shown one, on axes whose ticks were set one by one."""
    from matplotlib.ticker import FixedLocator

    axes = [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)]
    with_names = [axis for axis in axes if isinstance(axis.get_major_locator(), FixedLocator)]
    if with_names:
        figure.draw_without_rendering()
    for axis in with_names:
        last = None
        for text in axis.get_ticklabels():
            box = text.get_window_extent().padded(2)
            if last is not None and box.overlaps(last):
                text.set_visible(False)
            elif text.get_text():
                last = box


def reach(values: np.ndarray) -> tuple[float, float] | None:
    """Computes the limits of an axis that shows all finite ``values`` with a margin; None unless two of them differ."""
    finite = values[np.isfinite(values)]
    low, high = float(np.min(finite, initial=np.inf)), float(np.max(finite, initial=-np.inf))
    return (low - MARGIN * (high - low), high + MARGIN * (high - low)) if low < high else None


def shades(count: int) -> list[str]:
    """Returns ``count`` shades of blue, from light to dark, for networks of increasing width."""
    return [SHADES[-1 - (count - 1 - i) * (len(SHADES) - 1) // max(count - 1, 1)] for i in range(count)]


def in_words(metric: str) -> str:
    """Returns the name of a metric for an axis: "mse" and "nll" in words, any other name unchanged."""
    return METRICS.get(metric, metric)


def slug(name: str) -> str:
    """Converts ``name`` to a part of a file's name: lower case, with an underscore for each run of other characters.

    Only a to z and 0 to 9 are kept, and there is no underscore at the ends.
    """
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
