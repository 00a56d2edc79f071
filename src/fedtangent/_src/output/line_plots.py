"""Figures of experiments: heat maps over two settings, curves with bounds, and points with standard errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedtangent._src.output.style import DATA, MARKERS, METHODS, NEUTRAL, PREDICTED, canvas, dress, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHES = ("--", "-.", (0, (1, 1)), (0, (5, 1)), (0, (3, 1, 1, 1)))


class Shades(NamedTuple):
    """A heat map of ``values`` [rows, columns], whose cells also show the values as text.

    Attributes:
        values: The values.
        axes: Names of the ticks of each axis, by the axis' name: the vertical axis, then the horizontal one.
        label: Name of the values.
        title: Title of the panel.
        form: Format of the text, such as ".1f".
        log: Whether the shades show the logarithm of the values; the panel then has no colour bar.
    """

    values: np.ndarray
    axes: Mapping[str, list[str]]
    label: str
    title: str
    form: str = ".1f"
    log: bool = False


def heat_map(values: np.ndarray, axes: Mapping[str, list[str]], label: str, title: str, path: Path) -> Path:
    """Draws a figure with one heat map, whose cells also show the values as text.

    Args:
        values: Values [rows, columns].
        axes: Names of the ticks of each axis, by the axis' name: the vertical axis, then the horizontal one.
        label: Name of the values.
        title: Title of the panel.
        path: File to write, which is returned.
    """
    return heat_maps([[Shades(values, axes, label, title)]], path)


def heat_maps(grid: Sequence[Sequence[Shades]], path: Path, title: str = "") -> Path:
    """Draws a grid of heat maps; values that are not finite have no colour.

    Args:
        grid: Rows of heat maps, all of one length.
        path: File to write, which is returned.
        title: Title of the figure.
    """
    rows, columns = (max(panel.values.shape[i] for row in grid for panel in row) for i in (0, 1))
    figure, axes = canvas(len(grid[0]), len(grid), width=1.4 + 0.75 * columns, height=1.3 + 0.45 * rows)
    for ax, panel in zip(axes.ravel(), (panel for row in grid for panel in row), strict=True):
        (down, row_names), (across, column_names) = panel.axes.items()
        shade = np.log(panel.values) if panel.log else panel.values
        shade = np.where(np.isfinite(shade), shade, np.nan)
        image = ax.imshow(shade, cmap="Blues", aspect="auto")
        dark = np.nanmin(shade) + 0.6 * (np.nanmax(shade) - np.nanmin(shade))
        for (i, j), value in np.ndenumerate(panel.values):
            text = f"{value:{panel.form}}" if np.isfinite(value) else "-"
            colour = "white" if shade[i, j] > dark else "black"
            ax.text(j, i, text, ha="center", va="center", fontsize=8, color=colour)
        ax.set_yticks(range(len(row_names)), row_names)
        ax.set_xticks(range(len(column_names)), column_names)
        dress(ax, across, down, panel.title)
        if not panel.log:
            figure.colorbar(image, ax=ax, label=panel.label)
    return save(figure, path, title)


class BoundedPanel(NamedTuple):
    """A panel of measured curves at T values of the horizontal axis, with their bounds, each by name.

    Attributes:
        title: Title of the panel.
        x: Values of the horizontal axis, [T].
        measured: Curves [T], drawn as lines, or [K, T] for K curves of one name, drawn as points.
        bounds: Bounds [T] that theory gives, dashed.
        wrong: Wrong bounds [T] or [K, T], which are negative controls, dotted.
        predicted: Exact predictions [K, T] of K curves.
        x_of_bounds: Values of the horizontal axis for ``bounds`` and ``wrong``, if they differ from ``x``; else None.
    """

    title: str
    x: np.ndarray
    measured: dict[str, np.ndarray]
    bounds: dict[str, np.ndarray]
    wrong: dict[str, np.ndarray] = {}  # noqa: RUF012  # name -> [T], or [K, T]
    predicted: dict[str, np.ndarray] = {}  # noqa: RUF012  # name -> [K, T], exact
    x_of_bounds: np.ndarray | None = None


def bounded(
    panels: Sequence[BoundedPanel], title: str, names: tuple[str, str], lowest: float | None, path: Path, log: str = "y"
) -> Path:
    """Draws each panel's measured curves with their bounds, exact predictions and wrong bounds.

    Args:
        panels: The panels, side by side.
        title: Title of the figure.
        names: Names of the horizontal and the vertical axis.
        lowest: Lower end of the vertical axis; None for a third of the smallest value of ``measured`` or ``predicted``,
            at least 1e-14.
        path: File to write, which is returned.
        log: Axes that are logarithmic: "x", "y", "xy" or "".
    """
    figure, axes = canvas(len(panels), width=5.2, height=4.8)
    for ax, panel in zip(axes[0], panels, strict=True):
        at = panel.x if panel.x_of_bounds is None else panel.x_of_bounds
        for name, values in panel.predicted.items():
            paired = len(values) == len(panel.measured)  # each has the colour of the curve that it predicts
            for line, colour in zip(values, METHODS if paired else (PREDICTED,) * len(values), strict=False):
                ax.plot(panel.x, line, color=colour, lw=1)
            ax.plot([], [], color=NEUTRAL if paired else PREDICTED, lw=1, label=name)
        for (name, values), colour in zip(panel.measured.items(), METHODS, strict=False):
            style: dict[str, Any] = {"lw": 1.8} if values.ndim == 1 else {"ls": "", "marker": ".", "ms": 4}
            labels = name if values.ndim == 1 else [name, *[None] * (len(values) - 1)]
            ax.plot(panel.x, _positive(values).T, color=colour, label=labels, **style)
        colours = ("black",) * len(DASHES) if len(panel.bounds) < len(DASHES) - 1 else (*METHODS[2:], "black")
        for (name, values), style_, colour in zip(panel.bounds.items(), DASHES, colours, strict=False):
            ax.plot(at, _positive(values), ls=style_, color=colour, lw=1.5, label=name)
        for name, values in panel.wrong.items():
            lines = np.atleast_2d(_positive(values))
            ax.plot(at, lines.T, ls=":", color=NEUTRAL, lw=1.8, label=[name, *[None] * (len(lines) - 1)])
        curves = [*panel.measured.values(), *panel.predicted.values()]
        dress(ax, names[0], title=panel.title, log=log, whole="x" not in log and bool(np.all(at == np.round(at))))
        ax.set_ylim(
            max(min(float(np.min(v)) for v in curves) / 3, 1e-14) if lowest is None else lowest,
            1.5 * max(float(np.max(v)) for v in (*curves, *panel.bounds.values())),
        )
    axes[0][0].set_ylabel(names[1])
    return save(figure, path, title)


def _positive(values: np.ndarray) -> np.ndarray:
    """Replaces values of 0 and below by NaN, since a logarithmic axis cannot show them."""
    return np.where(np.asarray(values) > 0, values, np.nan)


class Points(NamedTuple):
    """Values with standard errors against the number of models K, for ``variance_against_models``.

    Attributes:
        values: The pair (value, standard error) for each K.
        is_line: True for a prediction, drawn as a line; False for points with bars of one standard error.
    """

    values: Mapping[int, tuple[float, float]]
    is_line: bool


def _series(ax: Axes, place: int, label: str, points: Points) -> None:
    x = np.array(list(points.values), float)
    value, error = np.array(list(points.values.values())).reshape(-1, 2).T
    colour = METHODS[place % len(METHODS)]
    if points.is_line:
        ax.plot(x, value, "-" if place % 2 == 0 else "--", color=colour, lw=1.6, label=label)
    else:
        ax.errorbar(x, value, error, fmt=MARKERS[place % 4], ms=5, capsize=3, lw=1.2, color=colour, label=label)


def variance_against_models(panels: Mapping[str, Mapping[str, Points]], title: str, path: Path) -> Path:
    """Draws an ensemble's variance against its number of models K on log-log axes, with a line of slope -1.

    Args:
        panels: For each panel's title its ``Points`` by label.
        title: Title of the figure.
        path: File to write, which is returned.
    """
    figure, axes = canvas(len(panels), width=5.0, height=4.0)
    for ax, (name, series) in zip(axes[0], panels.items(), strict=True):
        for i, (label, points) in enumerate(series.items()):
            _series(ax, i, label, points)
        first = next(iter(series.values())).values
        ends = np.array([min(first), max(first)], float)
        ax.plot(ends, first[min(first)][0] * ends[0] / ends, ":", color=NEUTRAL, lw=1, label="1/K")
        dress(ax, "models K", title=name, log="xy")
        ticks = sorted({k for points in series.values() for k in points.values})
        ax.set_xticks(ticks, [str(k) for k in ticks])
        ax.minorticks_off()
    axes[0][0].set_ylabel("variance, mean over x")
    return save(figure, path, title)


def points_with_errors(
    series: Mapping[str, Mapping[int, tuple[float, float]]],
    ticks: Mapping[int, str],
    names: tuple[str, str],
    title: str,
    path: Path,
) -> Path:
    """Draws several series of values with bars of one standard error.

    The last series is dashed: it has the values that a paper published.

    Args:
        series: For each label the value and standard error at each position on the horizontal axis.
        ticks: Name of each position.
        names: Names of the horizontal and the vertical axis.
        title: Title of the figure.
        path: File to write, which is returned.
    """
    figure, axes = canvas(1, width=6.4, height=4.0)
    ax = axes[0][0]
    colours = (*METHODS[: len(series) - 1], DATA)
    for i, ((label, values), colour) in enumerate(zip(series.items(), colours, strict=True)):
        if values:
            mean, error = np.array(list(values.values())).T
            style = {"marker": MARKERS[i % len(MARKERS)], "ls": "--" if colour == DATA else "-", "color": colour}
            ax.errorbar(list(values), mean, error, ms=5, capsize=3, lw=1.4, label=label, **style)
    ax.set_xticks(list(ticks), list(ticks.values()))
    dress(ax, *names, title)
    ax.grid(alpha=0.25)
    return save(figure, path)
