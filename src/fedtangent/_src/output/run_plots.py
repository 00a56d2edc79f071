"""Figures of runs: metrics against the round, calibration, tangent kernels, distance to the linear regime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtangent._src.intervals import half_width
from fedtangent._src.measures.uncertainty import Reliability, coverage_interval
from fedtangent._src.output.files import Metric
from fedtangent._src.output.style import (
    FEW,
    LAZINESS,
    MARKERS,
    METHODS,
    NEUTRAL,
    PREDICTED,
    SIMULATED,
    canvas,
    dress,
    in_words,
    reach,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MANY_SIZES = 20  # times the first of few values is the last
OVER_START = "over its value at round 0"
KERNEL_PANELS = (  # title, axis, metrics and their names in the legend
    (
        "drift from the initial kernel",
        "relative change",
        {"drift": "Frobenius norm", "drift_operator": "operator norm"},
    ),
    ("alignment with the targets", OVER_START, {"alignment": "plain", "alignment_centred": "centred"}),
    ("effective rank", OVER_START, {"effective_rank": "entropy", "trace_over_largest": "trace / largest eigenvalue"}),
    ("commutators of clients' Gram operators", OVER_START, {"commutator_relative": "mean of pairs"}),
    ("variance of clients' Gram operators", OVER_START, {"gram_variance_relative": "variance"}),
)


def curves(
    panels: Mapping[str, Mapping[str, np.ndarray]],
    x: Sequence[float],
    title: str,
    path: Path,
    across: str = "round",
    late: bool = False,
) -> Path:
    """Draws a panel for each metric and a line for each label: the mean over seeds and its 95 % interval.

    The interval is Student's, point by point: a shaded band, or bars if ``x`` has at most 8 values. A single seed has
    no interval. For more values of ``x`` the vertical axis fits the measured values, and may cut wide intervals.

    Args:
        panels: For each metric the values [seeds, len(x)] by label.
        x: Values of the horizontal axis, such as rounds.
        title: Title of the figure.
        path: File to write, which is returned.
        across: Name of the horizontal axis.
        late: Whether the vertical axis fits only the values of the last half, so that the first values may be cut; no
            effect if ``x`` has at most 8 values.
    """
    late = late and len(x) > FEW
    figure, axes = canvas(len(panels), width=5.4 if len(panels) == 1 else 4.6, height=3.6)
    for ax, (metric, lines) in zip(axes[0], panels.items(), strict=True):
        _mark(ax, x)
        _lines(ax, lines, x)
        dress(ax, across, metric, whole=len(x) > FEW and all(float(v).is_integer() for v in x))
        if len(x) > FEW:
            first = len(x) // 2 if late else 0
            ax.set_ylim(reach(np.concatenate([values[:, first:].ravel() for values in lines.values()])))
    return save(figure, path, f"{title}; vertical axis fits the last half" if late else title)


def _lines(ax: Axes, lines: Mapping[str, np.ndarray], x: Sequence[float]) -> None:
    """Draws a line for each label, the mean of values [seeds, len(x)], with its interval; see ``curves``."""
    few = len(x) <= FEW
    for i, (label, values) in enumerate(lines.items()):
        mean, at, colour = values.mean(axis=0), np.asarray(x, float), METHODS[i % len(METHODS)]
        half = half_width(values) if len(values) > 1 else None
        if half is not None and few:
            aside = (i - (len(lines) - 1) / 2) * 0.01  # of the axis: beside each other
            at = at * (at[-1] / at[0]) ** aside if ax.get_xscale() == "log" else at + aside * (at[-1] - at[0])
            ax.errorbar(at, mean, half, fmt="none", ecolor=colour, elinewidth=1.0, capsize=2.5)
        elif half is not None:
            ax.fill_between(at, mean - half, mean + half, color=colour, alpha=0.18, lw=0)
        step = max(1, len(x) // 25)
        style: dict[str, Any] = {
            "marker": MARKERS[i % len(MARKERS)],
            "ls": ("-", "--")[i // len(METHODS) % 2],
            "color": colour,
        }
        ax.plot(at, mean, ms=3.5, lw=1.4, label=label, markevery=(i % step, step), **style)  # one beside another's


def _mark(ax: Axes, x: Sequence[float]) -> None:
    """Sets a tick at every value of ``x`` if there are at most 8 values, and does nothing otherwise.

    With these ticks the axis is logarithmic if the last value is at least 20 times the first, and that is above 0.
    """
    if len(x) <= FEW:
        if 0 < MANY_SIZES * x[0] <= x[-1]:
            ax.set_xscale("log")
        ax.set_xticks(list(x), [f"{value:g}" for value in x])
        ax.minorticks_off()


def learning_curves(metrics: Sequence[Metric], loss: str, title: str, path: Path) -> Path:
    """Draws the loss and, if it was measured, the accuracy of a training run against the round.

    A further panel shows the accuracy (or the loss, if there is no accuracy) against the MiB of uplink. Each split has
    a line, as in ``curves``, over the rounds that every seed has measured.

    Args:
        metrics: Rows of metrics.csv.
        loss: Name of the loss metric.
        title: Title of the figure.
        path: File to write, which is returned.
    """
    names = [name for name in dict.fromkeys((loss, "accuracy")) if any(m.metric == name for m in metrics)]
    seeds = sorted({m.seed for m in metrics})
    sent = {(m.seed, m.round): m.uplink_bytes / 2**20 for m in metrics}
    rounds = [r for r in sorted({m.round for m in metrics}) if all((seed, r) in sent for seed in seeds)]
    figure, axes = canvas(len(names) + 1, width=4.2, height=3.4)
    for ax, name in zip(axes[0], names, strict=False):
        lines = _by_split(metrics, name, seeds, rounds)
        _mark(ax, rounds)
        _lines(ax, lines, rounds)
        dress(ax, "round", in_words(name), whole=len(rounds) > FEW)
    up = [float(np.mean([sent[seed, r] for seed in seeds])) for r in rounds]
    _lines(axes[0][-1], lines, up)
    dress(axes[0][-1], "MiB sent up" + (", mean of the seeds" if len(seeds) > 1 else ""), in_words(names[-1]))
    return save(figure, path, title)


def _by_split(
    metrics: Sequence[Metric], name: str, seeds: Sequence[int], rounds: Sequence[int]
) -> dict[str, np.ndarray]:
    """Collects the values [seeds, rounds] of the metric called ``name``, by split such as "train" or "test"."""
    values = {(m.split, m.seed, m.round): m.value for m in metrics if m.metric == name}
    splits = dict.fromkeys(split for split, _, _ in values)
    return {split: np.array([[values[split, seed, r] for r in rounds] for seed in seeds]) for split in splits}


def reliability_diagram(methods: Mapping[str, Sequence[Reliability]], title: str, path: Path) -> Path:
    """Draws accuracy against confidence for each method, and below it the number of examples in each bin.

    Whiskers are 95 % intervals (Wilson) of a bin's accuracy, as if its examples were independent.

    Args:
        methods: For each method the ``Reliability`` of each seed, over the same bins; examples of all seeds are pooled.
        title: Title of the figure.
        path: File to write, which is returned.
    """
    figure, axes = canvas(1, rows=2, width=5.0, height=2.9, sharex=True, height_ratios=(3, 1))
    upper, lower = axes[:, 0]
    upper.plot([0, 1], [0, 1], "--", color=NEUTRAL, lw=1, label="calibrated")
    for i, ((label, seeds), colour) in enumerate(zip(methods.items(), METHODS, strict=False)):
        edges, count, confidence, accuracy = _pooled(seeds)
        error = float(np.sum(count * np.abs(accuracy - confidence)) / np.sum(count))
        name = "ECE" if len(seeds) == 1 else "ECE of all"
        full = count > 0
        ends = [coverage_interval(a, int(n)) for a, n in zip(accuracy[full], count[full], strict=True)]
        whiskers = [accuracy[full] - [float(e.low) for e in ends], [float(e.high) for e in ends] - accuracy[full]]
        style = {"fmt": "o-", "ms": 4, "capsize": 2, "lw": 1.2, "color": colour}
        legend = f"{label}, {name} {error:.3f}"
        upper.errorbar(confidence[full], accuracy[full], np.maximum(whiskers, 0), label=legend, **style)
        width = np.diff(edges) / len(methods)
        bars = lower.bar(edges[:-1] + i * width, count, width, align="edge", color=colour, alpha=0.7)
        lower.bar_label(bars, [f"{n:.0f}" if n else "" for n in count], rotation=90, padding=2, fontsize=6)
    lower.margins(y=0.3)
    upper.set_ylim(-0.02, 1.02)
    lower.set_xlim(0, 1)
    dress(upper, y="accuracy", title=title)
    dress(lower, "confidence", "examples")
    return save(figure, path)


def _pooled(seeds: Sequence[Reliability]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pools the bins of all seeds; returns edges, number of examples, mean confidence and accuracy of the bins."""
    examples = np.array([seed.examples for seed in seeds])
    count = np.sum(examples, axis=0)
    confidence, accuracy = (
        np.sum(examples * np.array(means), axis=0) / np.maximum(count, 1)
        for means in ([seed.confidence for seed in seeds], [seed.accuracy for seed in seeds])
    )
    return np.asarray(seeds[0].edges), count, confidence, accuracy


def kernel_figure(
    series: dict[str, dict[int, list[float]]],
    first: Sequence[np.ndarray],
    last: Sequence[np.ndarray],
    last_round: int,
    title: str,
    path: Path,
) -> Path:
    """Draws measures of tangent kernels against the round, and the kernels' eigenvalues at the first and last round.

    ``measures.kernel_diagnostics`` defines the measures. Lines are means over models and seeds; the band of a panel's
    first metric goes from the smallest to the largest value. Metrics of a panel whose axis says so are divided by their
    values at round 0.

    Args:
        series: ``{metric: {round: values}}`` with a value for each model and seed; it must have every metric of
            ``KERNEL_PANELS``.
        first: Eigenvalues at round 0, largest first, of every model: thin lines, with their geometric mean.
        last: Eigenvalues at the last round, in the same form.
        last_round: Number of the last round, for the legend.
        title: Title of the figure.
        path: File to write, which is returned.
    """
    figure, axes = canvas(3, rows=2, width=4.2, height=3.1)
    flat = axes.ravel()
    for ax, (name, axis, metrics) in zip(flat, KERNEL_PANELS, strict=False):
        for i, ((metric, label), colour) in enumerate(zip(metrics.items(), (SIMULATED, PREDICTED), strict=False)):
            rounds = sorted(series[metric])
            values = np.array([series[metric][r] for r in rounds])
            if axis == OVER_START:  # metrics that change little along a run
                label = f"{label}, {values[0].mean():.3g} at round 0"
                values = values / values[0]
            if i == 0:  # the other metric of a panel is nearly the same, or has hardly a band
                ax.fill_between(rounds, values.min(axis=1), values.max(axis=1), color=colour, alpha=0.18, lw=0)
            style = "o-" if i == 0 else "s--"  # where one hides the other, both are seen
            ax.plot(rounds, values.mean(axis=1), style, ms=3, color=colour, label=label)
        dress(ax, "round", axis, name, whole=True)
    _spectra(flat[-1], [("round 0", first), (f"round {last_round}", last)])
    return save(figure, path, title)


def laziness_figure(series: dict[str, dict[int, list[float]]], title: str, path: Path) -> Path:
    """Draws how far networks of a run are from the linear (lazy) regime, by round.

    The distance of a network to its prediction has two parts: from the network to its linearisation, and from the
    linearisation to infinite width. One panel has these parts and the whole distance, the other the relative change of
    the tangent kernel. Lines are means over models and seeds; bands go from the smallest to the largest value.
    Distances start at round 1, because they are 0 before.

    Args:
        series: ``{metric: {round: values}}`` with a value for each model and seed. The metrics are "drift", and any of
            the distances "feature_learning", "initial_kernel" and "total" (the whole), which are relative to the
            movement of the linearisation.
        title: Title of the figure.
        path: File to write, which is returned.
    """
    figure, axes = canvas(2, width=4.8, height=3.6)
    distances, drift = axes[0]
    for metric, (label, colour) in LAZINESS.items():
        if metric in series:
            _banded(distances, {r: values for r, values in series[metric].items() if r > 0}, colour, label)
    dress(distances, "round", "relative to the movement\nof the linearisation", "distance of the function", whole=True)
    _banded(drift, series["drift"], METHODS[3], "")
    dress(drift, "round", "relative change, Frobenius norm", "drift of the tangent kernel", whole=True)
    for ax in axes[0]:
        ax.set_ylim(bottom=0)
    return save(figure, path, title)


def _banded(ax: Axes, values: Mapping[int, Sequence[float]], colour: str, label: str) -> None:
    """Draws a line through the mean of the values of each round, and a band from the smallest to the largest."""
    rounds = sorted(values)
    by_round = np.array([values[r] for r in rounds])
    if by_round.shape[1] > 1:
        ax.fill_between(rounds, by_round.min(axis=1), by_round.max(axis=1), color=colour, alpha=0.18, lw=0)
    ax.plot(rounds, by_round.mean(axis=1), "o-", ms=3, color=colour, label=label)


def _spectra(ax: Axes, spectra: Sequence[tuple[str, Sequence[np.ndarray]]]) -> None:
    """Draws two spectra, eigenvalues against their index from 1: for each label the geometric mean over models.

    If there are several models, each has a thin line, too. Eigenvalues that are not positive are left out, and the mean
    is left out wherever a model's eigenvalue is.

    Args:
        ax: Axes to draw on.
        spectra: Two pairs of a label and the eigenvalues of every model, largest first.
    """
    for (label, values), colour in zip(spectra, (NEUTRAL, SIMULATED), strict=True):
        every = np.array(values)
        positive = np.where(every > 0, every, np.nan)  # zeros are rounding: a logarithmic axis leaves them out
        order = np.arange(1, every.shape[1] + 1)
        for row in positive if len(positive) > 1 else ():
            ax.plot(order, row, color=colour, lw=0.6, alpha=0.3)
        complete = np.isfinite(positive).all(axis=0)
        mean = np.exp(np.mean(np.log(positive[:, complete]), axis=0))
        ax.plot(order[complete], mean, color=colour, lw=1.5, label=label)
    dress(ax, "number", "eigenvalue", "spectrum", log="xy")
