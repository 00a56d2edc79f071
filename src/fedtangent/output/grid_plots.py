"""Figures of comparisons over rounds, or over one or two settings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np

from fedtangent.output.plots import METHODS, _figure, _save

MARKERS = ("o", "s", "^", "D", "v", "P")
FEW = 8  # values of x


def lines_with_errors(
    lines: dict[str, np.ndarray], x: Sequence[float], names: tuple[str, str], title: str, path: Path
) -> Path:
    """A line for each key of ``lines``, values [seeds, len(x)]: the mean over seeds and its standard error.

    The error is a shade around the line, or a bar at each of few values of ``x``. ``names`` are those of the two axes,
    across and up.
    """
    figure, axes = _figure(1, width=6.2, height=4.2)
    ax = axes[0][0]
    for (label, values), i in zip(lines.items(), count(), strict=False):
        mean, colour = values.mean(axis=0), METHODS[i % len(METHODS)]
        at, every = np.asarray(x, float), max(1, len(x) // 25)
        if len(values) > 1:
            error = values.std(axis=0, ddof=1) / np.sqrt(len(values))
            if len(x) > FEW:
                ax.fill_between(at, mean - error, mean + error, color=colour, alpha=0.18, lw=0)
            else:
                at = at + (i - (len(lines) - 1) / 2) * 0.01 * (at[-1] - at[0])  # beside each other
                ax.errorbar(at, mean, error, fmt="none", ecolor=colour, elinewidth=1.0, capsize=2.5)
        style = {"marker": MARKERS[i % len(MARKERS)], "ls": ("-", "--")[i // len(METHODS) % 2], "color": colour}
        ax.plot(at, mean, ms=3.5, lw=1.4, label=label, markevery=every, **style)
    if len(x) <= FEW:
        ax.set_xticks(list(x))
    elif all(float(v).is_integer() for v in x):
        ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel(names[0])
    ax.set_ylabel(f"{names[1]} (mean, standard error)")
    ax.set_title(title, fontsize=10)
    ax.legend(fontsize=8)
    return _save(figure, path)


def heat_map(
    values: np.ndarray, rows: list[str], columns: list[str], names: tuple[str, str], label: str, title: str, path: Path
) -> Path:
    """``values`` [rows, columns] as shades with their numbers; ``names`` are those of the two axes, down and across."""
    figure, axes = _figure(1, width=1.4 + 0.75 * len(columns), height=1.3 + 0.45 * len(rows))
    ax = axes[0][0]
    image = ax.imshow(values, cmap="Blues", aspect="auto")
    dark = np.nanmin(values) + 0.6 * (np.nanmax(values) - np.nanmin(values))
    for (i, j), value in np.ndenumerate(values):
        ax.text(j, i, f"{value:.1f}", ha="center", va="center", fontsize=8, color="white" if value > dark else "black")
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_ylabel(names[0])
    ax.set_xlabel(names[1])
    ax.set_title(title, fontsize=10)
    figure.colorbar(image, label=label)
    return _save(figure, path)
