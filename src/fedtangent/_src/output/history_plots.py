"""Figures of a run's history: metrics against the round, simulated (solid) and predicted (dashed, with bands)."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from fedtangent._src.output.style import PREDICTED, SIMULATED, canvas, dress, finish, in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedtangent._src.engine.history import History

LOSSES = ("nll", "mse", "loss")  # on a logarithmic axis
FIRST = ("accuracy", *LOSSES)  # metrics that are drawn where none is named, two at most
ROWS = 8  # of the table in a notebook, at most
SPLITS = {"test": (1.8, 1.0), "train": (1.1, 0.55)}  # width and strength of a line


def history_figure(history: History, metrics: Sequence[str] = ()) -> Figure:
    """Returns a figure with a panel for each metric against the round: simulation solid, theory dashed, bands shaded.

    Args:
        history: History of a simulated run, of a forecast or of a comparison.
        metrics: Names such as "accuracy"; empty for accuracy and loss, or if there are neither, the first two metrics.

    Raises:
        ValueError: The history has no metrics, or lacks one of ``metrics``.
    """
    both = [history] if history.predicted is None else [history, history.predicted]
    curves = [one.curves() for one in both]
    measured = list(dict.fromkeys(name.rpartition(".")[2] for by_name in curves for name in by_name))
    panels = list(metrics) or [name for name in FIRST if name in measured][:2] or measured[:2]
    for name in panels or [""]:
        if name not in measured:
            allowed = ", ".join(measured) or "none: nothing was measured"
            raise ValueError(f"metrics: got {name!r}, allowed are {allowed}")
    figure, axes = canvas(len(panels), width=4.4, height=3.2)
    for ax, metric in zip(axes[0], panels, strict=True):
        for one, by_name in zip(both, curves, strict=True):
            colour, style = (PREDICTED, "--") if one.is_predicted else (SIMULATED, "-")
            source = "predicted" if one.is_predicted else "simulated"
            for name, values in by_name.items():
                split, _, last = name.rpartition(".")
                if last != metric:
                    continue
                width, strength = SPLITS.get(split.partition(" ")[0], SPLITS["test"])
                label = f"{source}, {split}" if split else source
                ax.plot(one.evaluated, values, style, color=colour, lw=width, alpha=strength, label=label)
                if name in one.bands:
                    ax.fill_between(one.evaluated, *one.bands[name], color=colour, alpha=0.15, lw=0)
        positive = all(v > 0 for by_name in curves for n, vs in by_name.items() if n.endswith(metric) for v in vs)
        dress(ax, "round", in_words(metric), log="y" if metric in LOSSES and positive else "", whole=True)
    finish(figure)
    return figure


def history_html(history: History) -> str:
    """Returns HTML that shows a history in a notebook: a figure, and a table of up to 8 evaluations.

    The last evaluation is always in the table; of the metrics, accuracy and loss are, or all if there are neither. A
    history without metrics is shown as its ``repr`` only.
    """
    curves = history.curves()
    if not curves:
        return f"<pre>{escape(repr(history))}</pre>"
    rounds = history.evaluated
    rows = np.unique(np.linspace(0, len(rounds) - 1, min(len(rounds), ROWS)).astype(int))
    names = [name for name in curves if name.rpartition(".")[2] in FIRST] or list(curves)
    cells = [["round", *names]] + [[str(rounds[i]), *(f"{curves[name][i]:.4g}" for name in names)] for i in rows]
    lines = "".join(
        "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in zip(["th"] + ["td"] * (len(cells) - 1), cells, strict=True)
    )
    buffer = io.BytesIO()
    history_figure(history).savefig(buffer, dpi=90, format="png")
    picture = base64.b64encode(buffer.getvalue()).decode()
    return f'<p>{escape(repr(history))}</p><table>{lines}</table><img src="data:image/png;base64,{picture}">'
