"""Figures of comparisons of trained networks with theory: the federated kernel flow, and Fed-ensemble's Theorem 2."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedtangent._src.comparison.comparing import Compared
from fedtangent._src.comparison.outcomes import errors_by_client
from fedtangent._src.comparison.side_by_side import Comparison
from fedtangent._src.comparison.statistics import fitted_slope
from fedtangent._src.comparison.theorems.fed_ensemble.limit import Entries, Theorem2, covered, entries
from fedtangent._src.output.files import Figures
from fedtangent._src.output.style import (
    DATA,
    LAZINESS,
    METHODS,
    NEUTRAL,
    PREDICTED,
    SIMULATED,
    band,
    canvas,
    dress,
    save,
    shades,
    slug,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEMBERS_SHOWN = 8
LEVELS = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])
MOST_NAMED = 30  # clients with their number on the axis
MOST_BARS = 600  # entries drawn of a scatter
MOST_LINEAR = 30  # largest over smallest variance on linear axes


def draw_all(results: Sequence[Compared], figures: Figures) -> list[Path]:
    """Draws the figures of each comparison and of all comparisons together; returns the paths of the files.

    Args:
        results: The comparisons.
        figures: Folder and format of the figures.
    """
    return [*(path for result in results for path in draw_each(result, figures)), *draw_together(results, figures)]


def draw_each(result: Compared, figures: Figures) -> list[Path]:
    """Draws the figures that apply to one comparison; returns the paths of the files.

    Args:
        result: The comparison.
        figures: Folder and format of the figures.
    """

    def of(subject: str) -> Path:
        return figures.path(f"{slug(result.setting.name)}_{subject}")

    paths, setting = list[Path](), result.setting
    is_scalar = setting.problem.x_train.shape[1] == 1
    if not setting.is_standard:
        paths.append(_beside(result, of("beside")))
    if isinstance(result, Comparison):
        if is_scalar:
            paths.append(_bands(result, of("bands")))
        if result.laziness:
            paths.append(_laziness(result, of("laziness")))
        if not is_scalar and not setting.is_linear:
            paths.append(_uncertainty(result, of("uncertainty")))
    return paths


def draw_together(results: Sequence[Compared], figures: Figures) -> list[Path]:
    """Draws the figures that have a panel for each comparison; returns the paths of the files.

    They show the distance of networks to their prediction by width, and the residual by round. The first leaves out
    linear models and comparisons that start from given parameters.

    Args:
        results: The comparisons.
        figures: Folder and format of the figures.
    """
    networks = [r for r in results if not r.setting.is_linear and r.setting.start is None]
    paths = [width_errors(networks, figures.path("width_error"))] if networks else []
    return [*paths, _residuals(results, figures.path("residual"))]


def _bands(result: Comparison, path: Path) -> Path:
    """Draws trained networks, NTK-FL and the prediction of theory as functions of a scalar input.

    Means are lines with 95 % bands; single networks are thin lines.
    """
    setting, problem, theory = result.setting, result.setting.problem, result.theory
    x, order = problem.x_test[:, 0], np.argsort(problem.x_test[:, 0])
    evolved = [networks for networks in result.ntk_fl if networks.width == setting.size.largest][:1]
    methods = [result.simulated[-1], *evolved]
    figure, axes = canvas(len(methods) + 1, sharey=True, sharex=True)
    for ax, networks in zip(axes[0], methods, strict=False):
        draws = networks.test[-1].swapaxes(0, 1).reshape(-1, *networks.test.shape[3:])[:, order, 0]
        _members(ax, x[order], draws[:MEMBERS_SHOWN], "single models")
        band(ax, x[order], draws.mean(axis=0), draws.std(axis=0, ddof=1), SIMULATED, f"mean of {len(draws)} models")
    last = theory.moments[-1]
    mean, cov = last.mean.mean(axis=0)[order, 0], last.cov.mean(axis=0)
    band(axes[0][-1], x[order], mean, np.sqrt(np.maximum(np.diag(cov), 0))[order], PREDICTED, "predicted mean")
    rng = np.random.default_rng(0)
    functions = rng.multivariate_normal(mean, cov[np.ix_(order, order)], MEMBERS_SHOWN, method="eigh")
    _members(axes[0][-1], x[order], functions, "draws of the prediction")
    low = min(float(np.min(problem.y_train)), float(np.min(mean))) - 1.5
    high = max(float(np.max(problem.y_train)), float(np.max(mean))) + 1.5
    titles = [f"{networks.method}, width {networks.width}" for networks in methods]
    for ax, title in zip(axes[0], [*titles, f"federated flow at round {setting.size.num_rounds}"], strict=True):
        ax.plot(problem.x_train[:, 0], problem.y_train[:, 0], ".", color=DATA, ms=4, label="training data")
        ax.set_ylim(low, high)
        dress(ax, "x", "f(x)" if ax is axes[0][0] else "", title)
    return save(figure, path, setting.title)


def _members(ax: Axes, x: np.ndarray, functions: np.ndarray, label: str) -> None:
    """Draws functions [draws, len(x)] as thin lines with a single entry ``label`` in the legend."""
    ax.plot(x, functions.T, color=NEUTRAL, lw=0.7, alpha=0.6, label=[label, *[None] * (len(functions) - 1)])


def width_errors(results: Sequence[Compared], path: Path) -> Path:
    """Draws the relative distance of trained networks to their prediction against the width, on log-log axes.

    Points are single networks and their geometric means. A panel has a line with the slope -1/2 of theory and, for
    three or more widths, a line with the fitted slope.

    Args:
        results: Comparisons, a panel each.
        path: File to write, which is returned.
    """
    figure, axes = canvas(len(results), width=4.6, height=3.8)
    for ax, result in zip(axes[0], results, strict=True):
        widths = np.array(result.setting.size.widths, float)
        errors = [g.run_error.ravel() for g in result.gaps]
        across = np.repeat(widths, [e.size for e in errors])
        ax.plot(across, np.concatenate(errors), ".", color=NEUTRAL, ms=3, alpha=0.35, label="one network")
        means = np.array([np.exp(np.log(e).mean()) for e in errors])
        ax.plot(widths, means, "o", color=SIMULATED, label="geometric mean over networks")
        if len(widths) >= 3:
            slope, intercept = fitted_slope(widths, errors)
            line = np.exp(intercept) * widths**slope.value
            ax.plot(widths, line, color=SIMULATED, label=f"fitted slope {slope.value:.3f}")
        ax.plot(widths, means[-1] * (widths / widths[-1]) ** -0.5, "--", color=PREDICTED, label="theory: slope -1/2")
        ax.set_xscale("log", base=2)
        ax.set_xticks(widths, [f"{w:.0f}" for w in widths])
        dress(ax, "width", title=result.setting.name, log="y")
    axes[0][0].set_ylabel("relative error of a network\nto its prediction, all rounds")
    return save(figure, path)


def _residuals(results: Sequence[Compared], path: Path) -> Path:
    """Draws the training residual of predictions and of trained networks against the round, a panel per comparison."""
    figure, axes = canvas(len(results), width=4.6, height=3.6)
    for ax, result in zip(axes[0], results, strict=True):
        for networks, gap, colour in zip(result.simulated, result.gaps, shades(len(result.gaps)), strict=True):
            label = f"networks{networks.of_width}"
            ax.plot(networks.rounds, gap.simulated, "o", ms=4, color=colour, label=label)
        ax.plot(result.curve.rounds, result.curve.left, color=PREDICTED, lw=1.5, label=result.method)
        dress(ax, "round", result.setting.problem.what_is_left, result.setting.name, log="y")
    return save(figure, path)


def _beside(result: Compared, path: Path) -> Path:
    """Draws learning curves of trained networks of every width beside the predicted curve.

    A further panel has each client's residual at the last round, predicted and of the widest networks.
    """
    setting, widest = result.setting, result.simulated[-1]
    figure, axes = canvas(2, width=5.2, height=3.9)
    curve, clients = axes[0]
    metric = "mean squared error" if setting.problem.labels_test is None else "accuracy"
    for networks, colour in zip(result.simulated, shades(len(result.simulated)), strict=True):
        mean = np.mean(setting.problem.score(networks.ensemble), axis=1)
        curve.plot(networks.rounds, mean, "o", ms=4, color=colour, label=f"networks{networks.of_width}")
    scores, rounds = result.curve.score, result.curve.rounds
    low, high = np.percentile(scores, [2.5, 97.5], axis=1)
    curve.fill_between(rounds, low, high, color=PREDICTED, alpha=0.18, lw=0, label=f"95 % of {scores[0].size} starts")
    label = f"predicted from the networks' starts{widest.of_width}"
    curve.plot(rounds, scores.mean(axis=1), color=PREDICTED, lw=2, label=label)
    dress(curve, "round", f"test {metric}", "learning curve", whole=True)
    residual_of = errors_by_client(setting.problem, widest, result.gaps[-1])
    order = sorted(residual_of, key=lambda i: residual_of[i][0])
    predicted, simulated = np.array([residual_of[i] for i in order]).T
    clients.plot(predicted, "_", ms=9, mew=2, color=PREDICTED, label="predicted")
    clients.plot(simulated, "o", ms=4, color=SIMULATED, label=f"networks{widest.of_width}")
    if len(order) <= MOST_NAMED:
        clients.set_xticks(range(len(order)), map(str, order), fontsize=7)
    title = f"each client's own examples, round {setting.size.num_rounds}"
    dress(clients, "client", setting.problem.what_is_left, title)
    return save(figure, path, setting.title)


def _laziness(result: Comparison, path: Path) -> Path:
    """Draws how far networks are from the linear (lazy) regime, by width and by round.

    The distance of a network to the federated kernel flow has two parts: from the network to its linearisation, and
    from the linearisation to infinite width. Both are drawn, and the change of the network's tangent kernel. Points are
    single networks.
    """
    figure, axes = canvas(3, width=4.6, height=3.8)
    across, along, drift = axes[0]
    widths = np.array([lazy.width for lazy in result.laziness], float)
    metrics = LAZINESS | {"drift": ("drift of its tangent kernel", METHODS[3])}
    for metric, (label, colour) in metrics.items():
        values = np.array([lazy.curves()[metric] for lazy in result.laziness])  # [W, r, K, e]
        at_end = values[:, -1].reshape(len(widths), -1)
        across.plot(widths, at_end, ".", color=colour, ms=3, alpha=0.4)
        across.plot(widths, _geometric(at_end), "o-", ms=4, color=colour, label=label)
        if metric != "drift":
            mean = _geometric(values[-1, 1:].reshape(len(values[-1]) - 1, -1))
            along.plot(result.setting.size.rounds[1:], mean, "o-", ms=3, color=colour, label=label)
    first = _geometric(result.laziness[-1].parts.feature_learning[-1].reshape(1, -1))
    across.plot(widths, first * (widths / widths[-1]) ** -0.5, "--", lw=1, color=NEUTRAL, label="slope -1/2")
    across.set_xscale("log", base=2)
    across.set_xticks(widths, [f"{w:.0f}" for w in widths])
    rounds = result.setting.size.rounds[-1]
    dress(
        across, "width", "distance of outputs, relative to\nthe movement of the linearisation", f"round {rounds}", "y"
    )
    dress(along, "round", title=f"width {widths[-1]:.0f}", whole=True)
    for lazy, colour in zip(result.laziness, shades(len(result.laziness)), strict=True):
        mean = _geometric(lazy.drift[1:].reshape(len(lazy.drift) - 1, -1))
        drift.plot(result.setting.size.rounds[1:], mean, "o-", ms=3, color=colour, label=f"width {lazy.width}")
    dress(drift, "round", "relative change, Frobenius norm", "drift of the tangent kernel", whole=True)
    for ax in (along, drift):
        ax.set_ylim(bottom=0)
    count = result.laziness[-1].drift[0].size
    title = f"{result.setting.name}: network, its linearisation at the start, and infinite width"
    return save(figure, path, f"{title} ({count} networks a width)")


def _geometric(values: np.ndarray) -> np.ndarray:
    """Computes the geometric mean over the last axis."""
    return np.asarray(np.exp(np.mean(np.log(values), axis=-1)))


def _uncertainty(result: Comparison, path: Path) -> Path:
    """Draws the mean and standard deviation of outputs over trained networks against the predicted values, as points.

    The networks have the largest width.
    """
    networks, last = result.simulated[-1], result.theory.moments[-1]
    members = networks.test[-1]  # [K, E, m, C]
    variance = np.maximum(np.diagonal(last.cov, axis1=1, axis2=2), 0).mean(axis=0)
    sampled_deviation = np.sqrt(members.var(axis=1, ddof=1).mean(axis=(0, 2)))
    panels = {
        "mean of the models, every output": (last.mean.mean(axis=0), members.mean(axis=(0, 1))),
        "standard deviation over models": (np.sqrt(variance), sampled_deviation),
    }
    figure, axes = canvas(2, width=4.4, height=4.0)
    for ax, (name, (predicted, sampled)) in zip(axes[0], panels.items(), strict=True):
        ax.plot(predicted.ravel(), sampled.ravel(), ".", ms=3, color=SIMULATED, alpha=0.4)
        ends = [min(predicted.min(), sampled.min()), max(predicted.max(), sampled.max())]
        ax.plot(ends, ends, color=PREDICTED, lw=1.2, label="equal")
        dress(ax, "predicted by the flow", title=name)
    axes[0][0].set_ylabel(f"{members.shape[0] * members.shape[1]} networks of width {networks.width}")
    title = f"{result.setting.name}: test points, round {result.setting.size.num_rounds}"
    return save(figure, path, title)


def theorem2_figure(result: Theorem2, path: Path) -> Path:
    """Draws four panels that compare K trained models with a predicted Gaussian distribution (Fed-ensemble, Theorem 2).

    Mean, variance and covariance over the models are drawn against the predicted ones. For scalar inputs, the first
    panel shows mean and band over x instead. The last panel shows the coverage of the predicted intervals.

    Args:
        result: Outputs of trained networks, and their predicted mean and covariance: of Theorem 2, or of the flow.
        path: File to write, which is returned.
    """
    figure, axes = canvas(4, width=4.3, height=3.9)
    first, variance, covariance, cover = axes[0]
    by_width = [entries(trained.samples, result.law) for trained in result.trained]
    if result.setting.problem.x_train.shape[1] == 1:
        _law_band(first, result)
    else:
        _scatter(first, "mean", [sampled["mean"] for sampled in by_width], result)
    _scatter(variance, "variance", [sampled["variance"] for sampled in by_width], result)
    _scatter(covariance, "off-diagonal covariance", [sampled["covariance"] for sampled in by_width], result)
    predicted = by_width[0]["variance"].predicted
    if np.max(predicted) > MOST_LINEAR * np.min(predicted):
        variance.set(xscale="log", yscale="log")
    _coverage(cover, result)
    return save(figure, path, f"{result.setting.title}: K = {len(result.law.mean)} models beside {result.of}")


def _law_band(ax: Axes, result: Theorem2) -> None:
    problem = result.setting.problem
    x, order = problem.x_test[:, 0], np.argsort(problem.x_test[:, 0])
    largest = result.trained[-1]
    mean, sd = result.law.mean.mean(axis=0)[order, 0], np.sqrt(np.diag(result.law.average_cov))[order]
    band(ax, x[order], mean, sd, PREDICTED, "predicted mean")
    sampled, spread = largest.samples[..., 0].mean(axis=0)[order], largest.samples[..., 0].std(axis=0, ddof=1)[order]
    band(ax, x[order], sampled, spread, SIMULATED, f"mean of networks, width {largest.width}")
    ax.plot(problem.x_train[:, 0], problem.y_train[:, 0], ".", color=DATA, ms=6, label="training data")
    low, high = np.min(mean - 2 * sd), np.max(mean + 2 * sd)
    ax.set_ylim(low - 0.1 * (high - low), high + 0.6 * (high - low))
    dress(ax, "x", "f(x)")


def _scatter(ax: Axes, name: str, widths: list[Entries], result: Theorem2) -> None:
    """Draws measured against predicted entries of a mean or covariance, with bars of one standard error.

    ``name`` is "mean", "variance" or "off-diagonal covariance"; the latter two are averaged over outputs. ``widths``
    has the entries for each width of the networks.
    """
    # all outputs share variances and covariances, and their errors are independent
    outputs = 1 if name == "mean" else result.setting.problem.y_train.shape[1]
    step = max(len(widths[0].measured) // outputs // MOST_BARS, 1)
    for sampled, trained, colour in zip(widths, result.trained, shades(len(widths)), strict=True):
        predicted, measured, error = (
            part.reshape(-1, outputs).mean(axis=1)[::step]
            for part in (sampled.predicted, sampled.measured, sampled.standard_error / np.sqrt(outputs))
        )
        label = f"width {trained.width}: at most {sampled.farthest:.1f} SE off"
        ax.errorbar(predicted, measured, error, fmt=".", ms=4, lw=0.5, alpha=0.6, color=colour, label=label)
    line = np.sort(widths[0].predicted)
    ax.plot(line, line, color=PREDICTED, lw=1.2, label="equal", zorder=3)
    notes = [f"mean of {outputs} outputs"] * (outputs > 1) + [f"1 in {step}"] * (step > 1)
    dress(ax, "predicted", "measured over the models", ", ".join([f"{name}, bars of 1 SE", *notes]))


def _coverage(ax: Axes, result: Theorem2) -> None:
    """Draws the share of outputs inside the predicted central interval against the level of the interval.

    There are curves for networks after and before training.
    """
    ax.plot([0, 1], [0, 1], color=PREDICTED, lw=1.2, label="nominal")
    for trained, colour in zip(result.trained, shades(len(result.trained)), strict=True):
        shares = [covered(trained.samples, result.law, level).mean() for level in LEVELS]
        ax.plot(LEVELS, shares, "o-", ms=3, color=colour, label=f"width {trained.width}, all values")
    start = [covered(result.trained[-1].start, result.law, level).mean() for level in LEVELS]
    ax.plot(LEVELS, start, ":", color=NEUTRAL, label="before training")
    dress(ax, "nominal level of the interval", "share of values inside", "coverage")
