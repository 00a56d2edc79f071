"""Figures of NTK-FL's theory: squared residuals under their bounds, and weights that drift apart."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtangent.output.plots import METHODS, NEUTRAL, _figure, _save


class Curves(NamedTuple):
    """One panel: measured curves in full lines, bounds dashed, wrong bounds dotted."""

    title: str
    x: np.ndarray  # [T]
    measured: dict[str, np.ndarray]  # name -> [T]
    bounds: dict[str, np.ndarray]
    wrong: dict[str, np.ndarray] = {}  # noqa: RUF012


def bounded(panels: list[Curves], title: str, x_label: str, y_label: str, lowest: float, path: Path) -> Path:
    """Curves over a common kind of axis, on logarithmic scales cut off below ``lowest``."""
    figure, axes = _figure(len(panels), width=4.8, height=4.0)
    for ax, panel in zip(axes[0], panels, strict=True):
        for (name, values), colour in zip(panel.measured.items(), (*METHODS, "#e69f00"), strict=False):
            ax.plot(panel.x, _shown(values), color=colour, lw=1.8, label=name)
        for (name, values), style in zip(panel.bounds.items(), ("--", "-.", (0, (1, 1))), strict=False):
            ax.plot(panel.x, _shown(values), ls=style, color="black", lw=1.5, label=name)
        for name, values in panel.wrong.items():
            ax.plot(panel.x, _shown(values), ls=":", color=NEUTRAL, lw=1.8, label=name)
        ax.set_yscale("log")
        ax.set_ylim(lowest, 1.5 * max(float(np.max(v)) for v in (*panel.measured.values(), *panel.bounds.values())))
        ax.set_xlabel(x_label)
        ax.set_title(panel.title, fontsize=10)
        ax.legend(fontsize=7)
    axes[0][0].set_ylabel(y_label)
    figure.suptitle(title)
    return _save(figure, path)


def _shown(values: np.ndarray) -> np.ndarray:
    """A logarithmic axis has no place for 0."""
    return np.where(np.asarray(values) > 0, values, np.nan)
