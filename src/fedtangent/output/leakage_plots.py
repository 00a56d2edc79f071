"""Figures of what an attacker reads: similarity against sparsity, and the images themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtangent.output.plots import DATA, METHODS, NEUTRAL, _figure, _save

COLOURS = (*METHODS, NEUTRAL)


class Shown(NamedTuple):
    """A reconstruction."""

    image: np.ndarray  # [H, W] in [0, 1]
    ssim: float


def similarity_against_sparsity(
    series: Mapping[str, Mapping[float, tuple[float, float]]], published: Mapping[float, float], title: str, path: Path
) -> Path:
    """Mean SSIM with bars of one standard error, a line for each attack, and the published numbers.

    ``series`` is ``{attack: {sparsity: (mean, standard error)}}``; sparsities stand at equal distances, the largest
    first.
    """
    figure, axes = _figure(1, width=6.4, height=4.0)
    ax = axes[0][0]
    places = sorted({s for values in series.values() for s in values}, reverse=True)
    for i, (label, values) in enumerate(series.items()):
        at = [places.index(s) for s in values]
        mean, error = np.array(list(values.values())).T
        ax.errorbar(at, mean, error, fmt="os^Dv"[i % 5] + "-", ms=5, capsize=3, lw=1.4, color=COLOURS[i % 5],
                    label=label)  # fmt: skip
    at = [places.index(s) for s in published if s in places]
    if at:
        known = [v for s, v in published.items() if s in places]
        ax.plot(at, known, "*--", ms=10, lw=1.2, color=DATA, label="published (Fig. 8)")
    ax.set_xticks(range(len(places)), [f"{s:.0%}" for s in places])
    ax.set_ylim(-0.12, 1.05)
    ax.set_xlabel("sparsity")
    ax.set_ylabel("SSIM to the original")
    ax.set_title(title, fontsize=10)
    ax.grid(alpha=0.25)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return _save(figure, path)


def reconstructions(
    original: np.ndarray, rows: Mapping[str, Sequence[Shown]], columns: Sequence[str], title: str, path: Path
) -> Path:
    """A row of images for each attack, a column for each sparsity, beside the original; SSIM below each."""
    figure, axes = _figure(len(columns) + 1, len(rows), width=max(1.15, 5.0 / (len(columns) + 1)), height=1.2)
    for line, (label, shown) in zip(axes, rows.items(), strict=True):
        line[0].imshow(original, cmap="gray", vmin=0, vmax=1)
        line[0].set_ylabel(label, fontsize=8, rotation=0, ha="right", va="center")
        for ax, one in zip(line[1:], shown, strict=True):
            ax.imshow(one.image, cmap="gray", vmin=0, vmax=1)
            ax.set_xlabel(f"{one.ssim:.2f}", fontsize=8)
        for ax in line:
            ax.set_xticks([])
            ax.set_yticks([])
    for ax, name in zip(axes[0], ("original", *columns), strict=True):
        ax.set_title(name, fontsize=9)
    figure.suptitle(title, fontsize=10)
    return _save(figure, path)
