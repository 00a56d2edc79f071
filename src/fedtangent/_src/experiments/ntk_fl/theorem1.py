"""Theorem 1 of NTK-FL (Yue et al., ICML 2022, section 5, D): its rate beside the measured decay of the residual.

The two-layer ReLU network of eq. (12) of NTK-FL is trained on several clients in three ways: gradient descent on the
network, as in the proof; the linearised network, which NTK-FL evolves; and the network at the linearised weights, which
NTK-FL sends out. The control is the rate with the kernel's largest eigenvalue lambda_max instead of the smallest,
lambda, which must be broken.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

import fedtangent as ft
from fedtangent._src.comparison.theorems.ntk_fl.evolution import Descents, TwoLayerProblem, descents, movement
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab import two_layer
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent._src.theory.ntk_fl.convergence import linear_rate

METHODS = {
    "network": "gradient descent on the network (the proof)",
    "linear": "linearised network (9a)",
    "tangent": "network at NTK-FL's weights (9b)",
}


@dataclass(frozen=True)
class EvolutionDecaySettings:
    """Settings of the study of NTK-FL's Theorem 1: one long round, and a few rounds of NTK-FL.

    The long round is trained at every width and step size, the others at the largest of both. ``delta`` is the
    probability with which Theorem 1 may fail.
    """

    num_examples: int = 40
    num_clients: int = 4
    widths: tuple[int, ...] = (256, 1024)
    step_factors: tuple[float, ...] = within((0.05, 0.5), above=0, below=1)  # of the largest step, 2 N / lambda_max
    last_time: int = within(3000, least=10)  # of ten candidates
    num_rounds: int = 3
    delta: float = within(0.05, above=0, below=1)


class FollowedDescent(NamedTuple):
    """Residuals of one two-layer network by step in three kinds of training, with NTK-FL's Theorem 1.

    Attributes:
        seed: Seed of the data and the network.
        width: Width of the network.
        factor: Step size as a share of the largest, 2 N / lambda_max.
        theorem: Constants, bounds and assumptions of Theorem 1 of NTK-FL for this network.
        kernel: Tangent kernel at the initial weights, [N, N].
        paths: Squared residuals after every step: of the network under gradient descent (``network``), of its
            linearisation (``linear``), and of the network at the linearisation's weights (``tangent``).
    """

    seed: int
    width: int
    factor: float
    theorem: ft.theory.NtkTheorem
    kernel: np.ndarray
    paths: Descents


def run(study: Study) -> lab.Outcome:
    """Compares the squared residuals of two-layer networks with the bound of NTK-FL's Theorem 1.

    For each seed, networks of every width and step size are trained in one long round: by gradient descent, linearised,
    and at the linearised weights. NTK-FL then runs for a few rounds, at the largest width and step size.
    """
    settings, results, rounds = study.settings, list[FollowedDescent](), list[two_layer.NtkRounds]()
    steps = np.unique(np.linspace(0, settings.last_time, 101).round().astype(int))
    for seed in study.each_seed():
        task = two_layer.of_study(study, seed)
        start = two_layer.network(task, settings.widths[-1], seed)
        eta = two_layer.step_size(task, settings.step_factors[-1])
        of_seed = _follow(task, settings, seed)
        times = two_layer.times(settings.last_time)
        rounds.append(two_layer.several_rounds(task, start, eta, times, settings.num_rounds))
        results += of_seed
        for f, method in itertools.product(of_seed, METHODS):
            values = {"relative_squared_residual": getattr(f.paths, method)[steps] / f.paths.network[0]}
            study.keep(lab.metric_rows(f"{method} n={f.width} step={f.factor}", seed, steps, values))
    return _conclude(study, results, rounds)


def _follow(task: TwoLayerProblem, settings: EvolutionDecaySettings, seed: int) -> list[FollowedDescent]:
    """Computes the networks' residuals by step for every width and step size of one seed. Needs 64-bit types."""
    results = []
    for width in settings.widths:
        start = two_layer.network(task, width, seed)
        for factor in settings.step_factors:
            eta, of_kernel = two_layer.step_size(task, factor), ft.theory.TwoLayerStart(width, kernel=start.kernel)
            paths = descents(
                start.model, start.params, task.x, task.y[:, None], eta, settings.last_time, watch=movement
            )
            theorem = partial(
                ft.theory.ntk_theorem_1, task.x, start.residual, of_kernel, learning_rate=eta, delta=settings.delta
            )
            of_run = theorem(radius=float(paths.watched["moved"].max()))
            results.append(FollowedDescent(seed, width, factor, of_run, start.kernel, paths))
    return results


def _row(f: FollowedDescent) -> lab.Row:
    """Builds the row of one network: how its squared residuals compare with the bound of NTK-FL's Theorem 1.

    It has the largest ratios to the bound and to a wrong bound (a control), the first step that breaks the bound, and
    both at the end. Residuals of the network itself that are only rounding do not count.
    """
    steps, c, worst = np.arange(len(f.paths.network)), f.theorem.constants, two_layer.worst
    bound, start = f.theorem.residual_bound(steps), c.residual**2
    floor = two_layer.TREND * start
    linear = start * linear_rate(f.kernel, c.learning_rate) ** steps
    floors = dict.fromkeys(METHODS, 0.0) | {"network": floor}
    return {
        "width": f.width,
        "step_factor": f.factor,
        "seed": f.seed,
        "learning_rate": c.learning_rate,
        "factor_a_step": f.theorem.rate(),
        **{f"{m}_worst": worst(getattr(f.paths, m), bound, floors[m]) for m in METHODS},
        "linear_under_its_own_rate": worst(np.asarray(f.paths.linear), linear, floor),
        "tangent_first_broken": two_layer.first_above(np.asarray(f.paths.tangent), bound, 0.0),
        "tangent_end": float(f.paths.tangent[-1] / start),
        "bound_end": float(bound[-1] / start),
        "control_worst": worst(np.asarray(f.paths.network), f.theorem.residual_bound(steps, c.lambda_max), floor),
        "moved": f.theorem.radius,
        "failing": list(f.theorem.failing),
    }


def _conclude(study: Study, results: list[FollowedDescent], rounds: list[two_layer.NtkRounds]) -> lab.Outcome:
    """Builds tables, figure and verdicts on NTK-FL's Theorem 1: a row for each network, and the assumptions.

    A verdict says whether networks under gradient descent, of one width and step size, stay below the bound. A broken
    bound does not fail the experiment.
    """
    settings, rows, last = study.settings, [_row(f) for f in results], results[-1]
    is_finite = all(np.all(np.isfinite(f.paths.network)) for f in results)
    failed: tuple[str, ...] = () if is_finite else ("networks diverged",)
    if any(r["linear_under_its_own_rate"] > 1 + 1e-6 for r in rows):
        failed += ("the linearised network is above its own exact rate",)
    _draw(study, results)
    title = f"assumptions, n = {last.width}, step {last.factor:g}, measured on the first seed"
    sheet = lab.assumption_sheet(
        [f.theorem for f in results if (f.width, f.factor) == (last.width, last.factor)], title
    )
    end, bound = f"{rows[-1]['tangent_end']:.2g}", f"{rows[-1]['bound_end']:.2g}"
    remarks = (
        "the proof follows gradient descent; NTK-FL's own weights keep the linearisation's error, here "
        f"{end} of the start at the last step, where the bound says {bound}",
        "lambda of rounds after the first: of that round's own kernel H, as trained neurons are no longer Gaussian",
        *two_layer.remarks(last.theorem.constants),
    )
    details = {"rounds": rounds, **lab.theorem_details([f.theorem for f in results])}
    verdicts = two_layer.verdicts("NTK-FL Theorem 1", rows, "width", "step_factor", worst="network_worst")
    sheets = (_sheet(study, rows), _round_sheet(settings, rounds), sheet)
    return lab.Outcome(sheets, rows, details=details, remarks=remarks, failed=failed, verdicts=verdicts)


def _sheet(study: Study, rows: list[lab.Row]) -> lab.Sheet:
    entries, settings = [], study.settings
    for group in lab.grouped(rows, "width", "step_factor").values():
        broken = [r["tangent_first_broken"] for r in group if r["tangent_first_broken"]]
        holding = sum(r["tangent_worst"] <= 1 for r in group)
        entry = {**group[0], "runs": len(group), "broken": min(broken, default=None), "holding": holding}
        entries.append(entry | {m: max(r[f"{m}_worst"] for r in group) for m in METHODS})
    title = f"Theorem 1 on {study.dataset}: largest squared residual / bound over t = 1 .. {settings.last_time}, N = "
    columns = ": n = {width}, step {step_factor:g} | factor a step: {factor_a_step:.6f} | descent: {network:.3g} | "
    columns += "linearised: {linear:.3g} | NTK-FL: {tangent:.3g} | broken at t: {broken:d} | "
    columns += "NTK-FL holds: {holding} of {runs}"
    return lab.table(f"{title}{settings.num_examples} on {settings.num_clients} clients", entries, columns)


def _round_sheet(settings: EvolutionDecaySettings, rounds: list[two_layer.NtkRounds]) -> lab.Sheet:
    first, entries = rounds[0], []
    for k in range(settings.num_rounds):
        ratios = [r.after[k] / r.before[k] / r.bound[k] for r in rounds]
        entry = {"k": k, "time": first.time[k], "factor": first.after[k] / first.before[k], "bound": first.bound[k]}
        counts = {"worst": max(ratios), "holding": sum(r <= 1 for r in ratios), "runs": len(ratios)}
        entries.append({**entry, "least": first.lambda_min[k], **counts})
    columns = "round: {k} | t(k): {time} | measured factor: {factor:.3g} | bound: {bound:.3g} | "
    columns += "lambda_min(H): {least:.3g} | worst ratio: {worst:.3g} | holds: {holding} of {runs}"
    width, step = settings.widths[-1], settings.step_factors[-1]
    title = f"rounds of NTK-FL, n = {width}, step {step:g}, t(k) by the training loss (11a)"
    return lab.table(title, entries, columns)


def _draw(study: Study, results: list[FollowedDescent]) -> None:
    """Plots the first seed's squared residuals at the largest step with the bound, a panel for each width."""
    settings, panels, steps = study.settings, [], np.arange(study.settings.last_time + 1)
    for f in (f for f in results if (f.seed, f.factor) == (results[0].seed, settings.step_factors[-1])):
        start, bound = f.theorem.constants.residual**2, f.theorem.residual_bound
        measured = {label: getattr(f.paths, m) / start for m, label in METHODS.items()}
        wrong = {"control: lambda_max instead of lambda": bound(steps, f.theorem.constants.lambda_max) / start}
        title = f"width {f.width}, {f.factor:g} of the largest stable step"
        panels.append(BoundedPanel(title, steps, measured, {"Theorem 1": bound(steps) / start}, wrong))
    title, names = f"Theorem 1 of NTK-FL on {study.dataset}, N = {settings.num_examples}", "squared residual / initial"
    bounded(panels, title, ("gradient steps t", names), None, study.figures.path("theorem1"))


DEFAULT = with_changes(EvolutionDecaySettings(), "num_examples=80 num_clients=8 num_rounds=5")
PAPER = with_changes(DEFAULT, "num_examples=200 num_clients=20 widths=256,1024,4096 last_time=4000")
SCALES = dict.fromkeys(two_layer.DATASETS, by_scale(EvolutionDecaySettings(), DEFAULT, PAPER))
ENTRIES = (experiment(__name__, run, SCALES, ("yue2022",), check=two_layer.check, exact=True),)
