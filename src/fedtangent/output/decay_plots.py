"""Theorem 1's bounds beside measured decay."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtangent.output.plots import METHODS, NEUTRAL, PREDICTED, SHADES, SIMULATED, _figure, _save


class Decay(NamedTuple):
    """Norms of residuals relative to the initial ones, at rounds, with bounds at the ends of ages."""

    title: str
    rounds: np.ndarray  # [R]
    networks: np.ndarray | None  # [K, R] of trained networks
    flow: np.ndarray  # [K, R] of the exact flow
    ages: np.ndarray  # [A], rounds at which ages end
    bounds: dict[str, np.ndarray]  # name -> [A]
    rate: np.ndarray | None = None  # [A], the exact asymptotic rate, scaled to meet the flow at the end


def decay(panels: list[Decay], title: str, path: Path) -> Path:
    """Measured decay of every model, the exact flow, bounds, and the exact rate of the flow's operator."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.bounds))
    colours = dict(zip(names, (SIMULATED, METHODS[2], METHODS[3], NEUTRAL, "#e69f00"), strict=False))
    figure, axes = _figure(len(panels), width=5.4, height=4.2)
    for ax, panel in zip(axes[0], panels, strict=True):
        for k, values in enumerate(panel.flow):
            ax.plot(panel.rounds, values, color=PREDICTED, lw=1, label=None if k else "exact flow, each model")
        if panel.networks is not None:
            for k, values in enumerate(panel.networks):
                ax.plot(panel.rounds, values, ".", ms=4, color=SHADES[(k + 1) % len(SHADES)],
                        label=None if k else "trained networks")  # fmt: skip
        for name, values in panel.bounds.items():
            ax.plot(panel.ages, values, "--", lw=1.6, color=colours.get(name, "black"), label=name)
        if panel.rate is not None:
            ax.plot(panel.ages, panel.rate, ":", lw=2, color="black", label="exact rate, spectral radius of an age")
        lowest = min(float(v.min()) for v in (panel.flow, panel.networks) if v is not None)
        ax.set_yscale("log")
        ax.set_ylim(max(lowest / 30, 1e-14), 3)
        ax.set_xlabel("round")
        ax.set_title(panel.title, fontsize=10)
        ax.legend(fontsize=7, loc="lower left")
    axes[0][0].set_ylabel("training residual / initial residual")
    figure.suptitle(title)
    return _save(figure, path)
