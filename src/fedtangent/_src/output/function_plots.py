"""Figures of functions of a scalar input with bands: samples of a posterior, and predictions away from the data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtangent._src.output.style import DATA, METHODS, NEUTRAL, PREDICTED, band, canvas, dress, save

TICKS = (-1.0, -0.5, 0.0, 0.5, 1.0)
MEMBERS = (METHODS[0], METHODS[2], METHODS[3], "#e69f00", "#56b4e9")  # one colour a model, apart from the theory's


class PosteriorRow(NamedTuple):
    """A Gaussian process and K models as functions of a scalar input, for a row of ``posterior_samples``.

    Attributes:
        name: Name of the family of models.
        x, y: Training inputs and targets, [n].
        grid: Inputs at which the functions are drawn, [m].
        mean, sd: Mean and standard deviation of the Gaussian process on the grid, [m].
        draws: Functions drawn from the process, [K, m].
        trained, untrained: Outputs of the models after and before training, [K, m].
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    grid: np.ndarray
    mean: np.ndarray
    sd: np.ndarray
    draws: np.ndarray
    trained: np.ndarray
    untrained: np.ndarray


class BandPanel(NamedTuple):
    """Prediction of one method as a function of a scalar input, at m grid points.

    Attributes:
        name: Name of the method.
        mean, sd: Mean and standard deviation of the prediction, [m].
        members: Outputs of K single models, drawn as thin lines, [K, m].
        colour: Colour of the panel.
    """

    name: str
    mean: np.ndarray
    sd: np.ndarray
    members: np.ndarray
    colour: str


class UserCurve(NamedTuple):
    """Measurements of one user (client) as a function of a scalar input, and the prediction for this user.

    Attributes:
        name: Name of the user.
        grid: Inputs at which the prediction is drawn, [m].
        predicted: Prediction there, [m].
        points: Inputs and targets of training examples.
        tested: Inputs and targets of test examples; may be empty.
    """

    name: str
    grid: np.ndarray
    predicted: np.ndarray
    points: tuple[np.ndarray, np.ndarray]
    tested: tuple[np.ndarray, np.ndarray]


def curves_by_user(users: Sequence[UserCurve], names: tuple[str, str], title: str, path: Path) -> Path:
    """Draws a panel for each user: dots for training data, crosses for test data, a line for the prediction.

    Args:
        users: The panels, on shared axes.
        names: Names of the horizontal and the vertical axis.
        title: Title of the figure.
        path: File to write, which is returned; its ending sets the format.
    """
    columns = min(len(users), 3)
    figure, axes = canvas(columns, rows=-(-len(users) // columns), width=3.4, height=2.5, sharex=True, sharey=True)
    for ax, user, colour in zip(axes.ravel(), users, cycle(METHODS), strict=False):
        ax.plot(user.grid, user.predicted, color=colour, lw=1.6, label="prediction")
        ax.plot(*user.points, ".", ms=3.5, color=DATA, alpha=0.7, label="training data")
        if len(user.tested[0]):
            ax.plot(*user.tested, "x", ms=5, color=PREDICTED, label="test data")
        dress(ax, title=user.name)
    for ax in axes.ravel()[len(users) :]:
        ax.set_axis_off()
    for ax in axes[-1]:
        ax.set_xlabel(names[0])
    for line in axes:
        line[0].set_ylabel(names[1])
    return save(figure, path, title)


def posterior_samples(rows: Sequence[PosteriorRow], num_rounds: int, path: Path) -> Path:
    """Draws three panels of functions over mean and 95 % band of a Gaussian process, a row for each family of models.

    The panels have draws of the process, trained models, and untrained models, at most five of each. The panels of a
    row share axes that fit the band and the data, so that untrained models may be cut.

    Args:
        rows: The families of models.
        num_rounds: Rounds of training, for the titles.
        path: File to write, which is returned.
    """
    figure, axes = canvas(3, rows=len(rows), width=4.2, height=3.1, sharex=True, sharey="row")
    for line, row in zip(axes, rows, strict=True):
        panels = (
            ("Theorem 2: three draws", row.draws),
            (f"Fed-ensemble: after {num_rounds} rounds", row.trained),
            ("the same models before training", row.untrained),
        )
        for ax, (title, functions) in zip(line, panels, strict=True):
            band(ax, row.grid, row.mean, row.sd, PREDICTED, "mean of Theorem 2 (Gaussian process)")
            for k, (f, colour) in enumerate(zip(functions, MEMBERS, strict=False), start=1):
                ax.plot(row.grid, f, color=colour, lw=1.3, label=f"draw or model {k}")
            ax.plot(row.x, row.y, "o", ms=4.5, color=DATA, mec="white", mew=0.6, zorder=5, label="training data")
            ax.set_title(title, fontsize=10)
        visible = np.concatenate([row.mean - 3.1 * row.sd, row.mean + 3.1 * row.sd, row.y])
        line[0].set_ylim(float(visible.min()), float(visible.max()))
        line[0].set_xlim(float(row.grid[0]), float(row.grid[-1]))
        line[0].set_ylabel(f"{row.name}\nf(x)")
    for ax in axes[-1]:
        ax.set_xlabel("input x")
    axes[0][0].set_xticks(TICKS)
    return save(figure, path)


def bands_side_by_side(
    panels: Sequence[BandPanel],
    points: tuple[np.ndarray, np.ndarray],
    truth: tuple[np.ndarray, np.ndarray],
    edge: float,
    height: float,
    title: str,
    path: Path,
) -> Path:
    """Draws one panel for each method on shared axes: mean, 95 % band, models, data and the true function.

    Args:
        panels: The methods' predictions.
        points: Inputs and targets of the training data.
        truth: Inputs at which the functions are drawn, and the true function there, called sin(2 pi x) in the legend.
        edge: Half the width of the interval around 0 without data, which is shaded.
        height: The vertical axis shows [-height, height].
        title: Title of the figure.
        path: File to write, which is returned.
    """
    grid, columns = truth[0], min(len(panels), 3)
    figure, axes = canvas(columns, rows=-(-len(panels) // columns), width=4.2, height=3.1, sharex=True, sharey=True)
    for ax, panel in zip(axes.ravel(), panels, strict=False):
        ax.axvspan(-edge, edge, color="#000000", alpha=0.05, lw=0, label="no data")
        for k, f in enumerate(panel.members):
            ax.plot(grid, f, color=panel.colour, lw=0.7, alpha=0.6, label=None if k else "models of the ensemble")
        ax.plot(*truth, "--", color=NEUTRAL, lw=1.2, label="true function sin(2 pi x)")
        band(ax, grid, panel.mean, panel.sd, panel.colour, "prediction")
        ax.plot(*points, ".", ms=3.5, color=DATA, alpha=0.8, zorder=5, label="training data")
        ax.set_title(panel.name, fontsize=10)
        ax.set_ylim(-height, height)
        ax.set_xlim(float(grid[0]), float(grid[-1]))
    for ax in axes.ravel()[len(panels) :]:
        ax.set_axis_off()
    for column in range(columns):
        lowest = axes.ravel()[: len(panels)][column::columns][-1]
        lowest.set_xlabel("input x")
        lowest.tick_params(labelbottom=True)
    axes[0][0].set_xticks(TICKS)
    for line in axes:
        line[0].set_ylabel("f(x)")
    return save(figure, path, title)
