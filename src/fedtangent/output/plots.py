"""Figures of comparisons, runs and experiments. Matplotlib is imported when the first figure is drawn."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtangent.compare.side_by_side import SideBySide
from fedtangent.compare.statistics import fitted_slope
from fedtangent.measures.paired import half_width
from fedtangent.measures.uncertainty import Reliability, coverage_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIMULATED, PREDICTED, NEUTRAL, DATA = (
    "#0072b2",
    "#d55e00",
    "#666666",
    "#222222",
)  # Okabe-Ito: safe for colour-blind eyes
SHADES = ("#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#084594", "#042c5c")
METHODS = (SIMULATED, PREDICTED, "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MEMBERS_SHOWN = 8


def _figure(columns: int, rows: int = 1, width: float = 4.2, height: float = 3.4, **options: Any) -> tuple[Figure, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, and without pyplot's global state
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def draw_all(results: Sequence[SideBySide], folder: Path) -> list[Path]:
    """Every figure that applies to ``results``, as PNG files in ``folder``; returns their paths."""
    paths = [bands(r, folder) for r in results if r.setting.x_train.shape[1] == 1]
    networks = [r for r in results if not r.setting.is_linear]
    if networks:
        paths.append(width_errors(networks, folder))
    paths.append(residuals(results, folder))
    paths += [uncertainty(r, folder) for r in networks if r.setting.x_train.shape[1] > 1]
    return paths


def _band(axes: Axes, x: np.ndarray, mean: np.ndarray, sd: np.ndarray, colour: str, label: str) -> None:
    axes.fill_between(x, mean - 1.96 * sd, mean + 1.96 * sd, color=colour, alpha=0.18, lw=0, label="mean +- 1.96 sd")
    axes.plot(x, mean, color=colour, lw=2, label=label)


def bands(result: SideBySide, folder: Path) -> Path:
    """Networks, NTK-FL and theory on a scalar input: mean, 95 % band, individual models, data."""
    setting, theory = result.setting, result.theory
    x, order = setting.x_test[:, 0], np.argsort(setting.x_test[:, 0])
    evolved = [s for s in result.ntk_fl if s.width == setting.largest][:1]
    panels = [(s.method, s.test[-1]) for s in (result.simulated[-1], *evolved)]
    figure, axes = _figure(len(panels) + 1, sharey=True, sharex=True)
    for ax, (title, members) in zip(axes[0], panels, strict=False):
        draws = members.swapaxes(0, 1).reshape(-1, *members.shape[2:])[:, order, 0]
        for draw in draws[:MEMBERS_SHOWN]:
            ax.plot(x[order], draw, color=NEUTRAL, lw=0.7, alpha=0.6)
        _band(ax, x[order], draws.mean(axis=0), draws.std(axis=0, ddof=1), SIMULATED, f"mean of {len(draws)} models")
        ax.set_title(f"{title}, width {result.simulated[-1].width}")
    last = theory.moments[-1]
    mean, cov = last.mean.mean(axis=0)[order, 0], last.cov.mean(axis=0)
    _band(axes[0][-1], x[order], mean, np.sqrt(np.maximum(np.diag(cov), 0))[order], PREDICTED, "predicted mean")
    rng = np.random.default_rng(0)
    for draw in rng.multivariate_normal(mean, cov[np.ix_(order, order)], MEMBERS_SHOWN, method="eigh"):
        axes[0][-1].plot(x[order], draw, color=NEUTRAL, lw=0.7, alpha=0.6)
    axes[0][-1].set_title(f"Gaussian process, federated flow at round {setting.num_rounds}")
    low = min(float(np.min(setting.y_train)), float(np.min(mean))) - 1.5
    high = max(float(np.max(setting.y_train)), float(np.max(mean))) + 1.5
    for ax in axes[0]:
        ax.plot(setting.x_train[:, 0], setting.y_train[:, 0], ".", color=DATA, ms=4, label="training data")
        ax.set_xlabel("x")
        ax.set_ylim(low, high)
        ax.legend(loc="lower left", fontsize=7, framealpha=0.8)
    axes[0][0].set_ylabel("f(x)")
    figure.suptitle(setting.title)
    return _save(figure, folder / f"{_slug(setting.name)}_bands.png")


def width_errors(results: Sequence[SideBySide], folder: Path) -> Path:
    """Relative error of each network to the flow against width, with the fitted slope beside theory's -1/2."""
    figure, axes = _figure(len(results), width=4.6, height=3.8)
    for ax, result in zip(axes[0], results, strict=True):
        widths = np.array(result.setting.widths, float)
        errors = [g.error[-1].ravel() for g in result.gaps]
        for w, e in zip(widths, errors, strict=True):
            ax.plot(np.full(e.size, w), e, ".", color=NEUTRAL, ms=3, alpha=0.35)
        means = np.array([np.exp(np.log(e).mean()) for e in errors])
        ax.plot(widths, means, "o", color=SIMULATED, label="geometric mean over networks")
        if len(widths) >= 3:
            fit = fitted_slope(widths, errors)
            ax.plot(
                widths,
                np.exp(fit.intercept) * widths**fit.slope,
                color=SIMULATED,
                label=f"fitted slope {fit.slope:.3f}",
            )
        ax.plot(widths, means[-1] * (widths / widths[-1]) ** -0.5, "--", color=PREDICTED, label="theory: slope -1/2")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(widths, [f"{w:.0f}" for w in widths])
        ax.set_xlabel("width")
        ax.set_title(result.setting.name)
        ax.legend(fontsize=8)
    axes[0][0].set_ylabel("relative error of a network to the flow")
    return _save(figure, folder / "width_error.png")


def residuals(results: Sequence[SideBySide], folder: Path) -> Path:
    """Predicted and simulated training residual against the round."""
    figure, axes = _figure(len(results), width=4.6, height=3.6)
    for ax, result in zip(axes[0], results, strict=True):
        for seen, gap, colour in zip(result.simulated, result.gaps, SHADES, strict=False):
            ax.plot(seen.rounds, gap.simulated_residual, "o", ms=4, color=colour, label=f"networks, width {seen.width}")
        ax.plot(result.setting.rounds, result.gaps[-1].predicted_residual, color=PREDICTED, lw=1.5,
                label="federated flow")  # fmt: skip
        ax.set_yscale("log")
        ax.set_xlabel("round")
        ax.set_title(result.setting.name)
        ax.legend(fontsize=8)
    axes[0][0].set_ylabel("training residual, root mean square")
    return _save(figure, folder / "residual.png")


def uncertainty(result: SideBySide, folder: Path) -> Path:
    """Predicted against sampled mean and standard deviation, test point by test point, at the largest width."""
    seen, last = result.simulated[-1], result.theory.moments[-1]
    members = seen.test[-1]  # [K, E, m, C]
    sampled = members.mean(axis=(0, 1)), np.sqrt(members.var(axis=1, ddof=1).mean(axis=(0, 2)))
    variance = np.maximum(np.diagonal(last.cov, axis1=1, axis2=2), 0).mean(axis=0)
    predicted = last.mean.mean(axis=0), np.sqrt(variance)
    figure, axes = _figure(2, width=4.4, height=4.0)
    names = ("mean of the models, every output", "standard deviation over models")
    for ax, name, p, s in zip(axes[0], names, predicted, sampled, strict=True):
        ax.plot(p.ravel(), s.ravel(), ".", ms=3, color=SIMULATED, alpha=0.4)
        ends = [min(p.min(), s.min()), max(p.max(), s.max())]
        ax.plot(ends, ends, color=PREDICTED, lw=1.2, label="equal")
        ax.set_xlabel("predicted by the flow")
        ax.set_title(name, fontsize=10)
        ax.legend(fontsize=8)
    axes[0][0].set_ylabel(f"{members.shape[0] * members.shape[1]} networks of width {seen.width}")
    figure.suptitle(f"{result.setting.name}: test points, round {result.setting.num_rounds}")
    return _save(figure, folder / f"{_slug(result.setting.name)}_uncertainty.png")


def curves(series: dict[str, list[tuple[int, float]]], name: str, title: str, path: Path) -> Path:
    """One metric against the round, a line for each key of ``series``."""
    figure, axes = _figure(1, width=5.4, height=3.6)
    ax = axes[0][0]
    for (label, points), colour in zip(series.items(), (SIMULATED, PREDICTED, NEUTRAL), strict=False):
        ax.plot([r for r, _ in points], [v for _, v in points], "o-", ms=3, color=colour, label=label)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("round")
    ax.set_ylabel(name)
    ax.set_title(title)
    ax.legend()
    return _save(figure, path)


def curves_with_bands(panels: dict[str, dict[str, np.ndarray]], rounds: Sequence[int], title: str, path: Path) -> Path:
    """Metrics against the round, a panel for each: the mean over seeds of each method, in its 95 % interval.

    ``panels`` is ``{metric: {method: values [seeds, E]}}``; ``rounds`` [E] are those of the evaluations. The interval
    is Student's, round by round; with one seed there is none.
    """
    figure, axes = _figure(len(panels), width=4.6, height=3.6)
    for ax, (metric, methods) in zip(axes[0], panels.items(), strict=True):
        for (label, values), colour in zip(methods.items(), METHODS, strict=False):
            mean, seeds = values.mean(axis=0), len(values)
            if seeds > 1:
                half = half_width(values)
                ax.fill_between(rounds, mean - half, mean + half, color=colour, alpha=0.18, lw=0)
            ax.plot(rounds, mean, "o-", ms=3, color=colour, label=label)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set_xlabel("round")
        ax.set_ylabel(metric)
        ax.legend(fontsize=8)
    figure.suptitle(title)
    return _save(figure, path)


def reliability_diagram(methods: Mapping[str, Sequence[Reliability]], title: str, path: Path) -> Path:
    """Accuracy against confidence for each method, and below it the share of examples in each bin.

    A method has one ``Reliability`` for each seed, over the same bins; their examples are pooled. Whiskers are 95 %
    intervals (Wilson) of a bin's accuracy if its examples were independent.
    """
    figure, axes = _figure(1, rows=2, width=5.0, height=2.9, sharex=True, height_ratios=(3, 1))
    upper, lower = axes[:, 0]
    upper.plot([0, 1], [0, 1], "--", color=NEUTRAL, lw=1, label="calibrated")
    for i, ((label, seeds), colour) in enumerate(zip(methods.items(), METHODS, strict=False)):
        edges, count, confidence, accuracy = _pooled(seeds)
        error = float(np.sum(count * np.abs(accuracy - confidence)) / np.sum(count))
        name = "ECE" if len(seeds) == 1 else "ECE of all"
        full = count > 0
        ends = [coverage_interval(a, int(n)) for a, n in zip(accuracy[full], count[full], strict=True)]
        whiskers = [accuracy[full] - [float(e.low) for e in ends], [float(e.high) for e in ends] - accuracy[full]]
        upper.errorbar(confidence[full], accuracy[full], np.maximum(whiskers, 0), fmt="o-", ms=4, capsize=2, lw=1.2,
                       color=colour, label=f"{label}, {name} {error:.3f}")  # fmt: skip
        width = np.diff(edges) / len(methods)
        lower.bar(edges[:-1] + i * width, count / count.sum(), width, align="edge", color=colour, alpha=0.7)
    upper.set_ylabel("accuracy")
    upper.set_ylim(-0.02, 1.02)
    upper.set_title(title)
    upper.legend(fontsize=8, loc="best")
    lower.set_xlabel("confidence")
    lower.set_xlim(0, 1)
    lower.set_ylabel("examples, share")
    return _save(figure, path)


def _pooled(seeds: Sequence[Reliability]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Edges, and examples, confidence and accuracy of each bin over all seeds."""
    count = np.sum([np.asarray(s.examples) for s in seeds], axis=0)
    sums = [np.sum([np.asarray(s.examples) * np.asarray(part) for s, part in zip(seeds, parts, strict=True)], axis=0)
            for parts in ([s.confidence for s in seeds], [s.accuracy for s in seeds])]  # fmt: skip
    return np.asarray(seeds[0].edges), count, *(total / np.maximum(count, 1) for total in sums)
