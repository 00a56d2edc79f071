"""Figures of the loss on a plane through three models and its segments, and of images that an attack reconstructs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedtangent._src.output.style import METHODS, canvas, dress, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVELS = 24


class SurfacePanel(NamedTuple):
    """Loss on a plane through three models in weight space, for a panel of ``loss_surfaces``.

    Attributes:
        name: Title of the panel.
        a, b: Coordinates of the grid along the two directions of the plane, [A] and [B].
        loss: Loss at the grid points, [B, A].
        models: Coordinates of the three models, [3, 2].
        labels: Names of the three models.
    """

    name: str
    a: np.ndarray
    b: np.ndarray
    loss: np.ndarray
    models: np.ndarray
    labels: tuple[str, ...]


def loss_surfaces(panels: Sequence[SurfacePanel], title: str, path: Path) -> Path:
    """Draws contours of the logarithm of the loss on planes through three models, a panel for each plane.

    All panels have one range of colours. Dots are the models, a cross is the mean of their weights, and dotted lines
    are the segments between them.

    Args:
        panels: The planes.
        title: Title of the figure.
        path: File to write, which is returned.

    Raises:
        ValueError: No loss on one of the planes is finite and positive.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    logs = [_log10(panel.loss) for panel in panels]
    low, high = min(float(np.nanmin(v)) for v in logs), max(float(np.nanmax(v)) for v in logs)
    high = max(high, low + 1e-3)
    levels, norm = np.linspace(low, high, LEVELS + 1), Normalize(low, high)
    tallest = max(np.ptp(panel.b) / np.ptp(panel.a) for panel in panels)
    figure, axes = canvas(len(panels), width=4.3, height=1.3 + 3.3 * tallest)
    for ax, panel, values in zip(axes[0], panels, logs, strict=True):
        filled = ax.contourf(panel.a, panel.b, values, levels, cmap="viridis", norm=norm, extend="both")
        filled.set(edgecolor="face", linewidth=0.3)  # or a PDF has seams
        ax.contour(panel.a, panel.b, values, levels[::2], colors="white", linewidths=0.4, alpha=0.5)
        _mark(ax, panel)
        ax.set_aspect("equal")
        dress(ax, "distance in weights, from model 1 to 2", title=panel.name)
    axes[0][0].set_ylabel("distance across, towards model 3")
    bar = figure.colorbar(ScalarMappable(norm, "viridis"), ax=list(axes[0]), shrink=0.85, pad=0.015)
    bar.set_label("log10 of the loss in nats")
    return save(figure, path, f"{title}\ndots: models, cross: mean of their weights")


def loss_segments(panels: Mapping[str, Mapping[str, np.ndarray]], title: str, path: Path) -> Path:
    """Draws the loss along the segments between pairs of models, on one logarithmic axis.

    Args:
        panels: For each panel's title the losses of each pair of models by the pair's name: an array [q], at q points
            of the segment.
        title: Title of the figure.
        path: File to write, which is returned.
    """
    figure, axes = canvas(len(panels), width=4.0, height=3.2, sharex=True, sharey=True)
    for ax, (name, pairs) in zip(axes[0], panels.items(), strict=True):
        for (pair, values), colour in zip(pairs.items(), METHODS, strict=False):
            ax.plot(np.linspace(0, 1, len(values)), values, color=colour, lw=1.8, label=f"model {pair}")
        ax.set_yscale("log")
        dress(ax, "share of the way", title=name)
        ax.grid(alpha=0.25)
    axes[0][0].set_ylabel("loss in nats")
    return save(figure, path, title)


def _log10(loss: np.ndarray) -> np.ndarray:
    """Computes base 10 logarithms of a loss; NaN where it is not finite and positive.

    Raises ``ValueError`` if no loss is finite and positive.
    """
    usable = np.isfinite(loss) & (loss > 0)
    if not usable.any():
        raise ValueError("loss: got no finite number above 0, must have one to draw")
    return np.where(usable, np.log10(np.where(usable, loss, 1.0)), np.nan)


def _mark(ax: Axes, panel: SurfacePanel) -> None:
    """Draws the three models with labels that point outwards, the segments between them, and their mean."""
    corners = np.concatenate([panel.models, panel.models[:1]])
    centre = panel.models.mean(axis=0)
    ax.plot(corners[:, 0], corners[:, 1], ":", color="white", lw=1.2)
    ax.plot(*centre, "x", color="white", ms=7, mew=2)
    ax.plot(panel.models[:, 0], panel.models[:, 1], "o", ls="", color="white", mec="black", ms=7)
    for place, label in zip(panel.models, panel.labels, strict=True):
        x, y = (place - centre) / np.linalg.norm(place - centre)
        beside = "left" if x > 0.4 else "right" if x < -0.4 else "center"
        above = "bottom" if y > 0.4 else "top" if y < -0.4 else "center"
        text = ax.annotate(label, tuple(place), xytext=(9 * x, 9 * y), textcoords="offset points")
        text.set(color="white", ha=beside, va=above, fontsize=10, fontweight="bold")
        text.set_in_layout(False)  # or the layout makes room for it outside the axes


class Shown(NamedTuple):
    """A reconstructed image and its structural similarity (SSIM) to the original."""

    image: np.ndarray  # [H, W] in [0, 1]
    ssim: float


def reconstructions(
    original: np.ndarray, rows: Mapping[str, Sequence[Shown]], columns: Sequence[str], title: str, path: Path
) -> Path:
    """Draws reconstructed images, a row for each attack, with their similarity to the original (SSIM) below them.

    Args:
        original: Image [H, W] in [0, 1], the first of every row.
        rows: For each attack its reconstructions, in the order of ``columns``.
        columns: Names of the columns, such as the sparsity of the attacked messages.
        title: Title of the figure.
        path: File to write, which is returned.
    """
    figure, axes = canvas(len(columns) + 1, len(rows), width=max(1.15, 5.0 / (len(columns) + 1)), height=1.2)
    for line, (label, images) in zip(axes, rows.items(), strict=True):
        line[0].imshow(original, cmap="gray", vmin=0, vmax=1)
        line[0].set_ylabel(label, fontsize=8, rotation=0, ha="right", va="center")
        for ax, one in zip(line[1:], images, strict=True):
            ax.imshow(one.image, cmap="gray", vmin=0, vmax=1)
            ax.set_xlabel(f"{one.ssim:.2f}", fontsize=8)
        for ax in line:
            ax.set_xticks([])
            ax.set_yticks([])
    for ax, name in zip(axes[0], ("original", *columns), strict=True):
        ax.set_title(name, fontsize=9)
    return save(figure, path, title)
