"""Theorem 2 of NTK-FL (Yue et al., ICML 2022, section 5, E): FedAvg's rate beside measured rounds, and Remark 2.

FedAvg trains the two-layer ReLU network of eq. (12) of NTK-FL with every client in every round and with the step of eq.
(58) of that paper: step size ``eta / N`` times the sum over a client's examples, then the mean over M clients. It is
compared with a round of NTK-FL with the same eta. The control is the rate with the kernel's largest eigenvalue
lambda_max instead of the smallest, lambda, which must be broken.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

import fedtangent as ft
from fedtangent._src.comparison.theorems.ntk_fl.evolution import TwoLayerProblem, fed_avg_run
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab import two_layer
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.output.line_plots import BoundedPanel, bounded

MEANS = ("late_decay_over_bound", "end", "ntk_fl_one_round", "ratio_of_rates")  # of these the table has means
EVALUATIONS = 50  # of a run, about
REMARKS = (
    "late decay: the measured fall of the squared residual's logarithm over the bound's, second half of the run; 4 to "
    "first order, where one mode is left",
    "Remark 2: t(k) M / tau, by how much NTK-FL's bound of a round falls faster, same eta; M of it comes from dividing "
    "by N and by M in (58): FedAvg on each client's mean loss would take the step eta where (58) takes eta / M",
)


@dataclass(frozen=True)
class AveragingDecaySettings:
    """Settings of the study of NTK-FL's Theorem 2: FedAvg at several numbers of local steps, and a round of NTK-FL.

    ``delta`` is the probability with which Theorem 2 may fail.
    """

    num_examples: int = 40
    num_clients: int = 4
    widths: tuple[int, ...] = (256, 1024)
    step_factors: tuple[float, ...] = within((0.05, 0.5), above=0, below=1)  # of the largest step, 2 N / lambda_max
    local_steps: tuple[int, ...] = (1, 10)
    num_rounds: int = 200
    ntk_time: int = within(1000, least=10)  # the last of ten candidates
    delta: float = within(0.05, above=0, below=1)


class FollowedRounds(NamedTuple):
    """FedAvg's squared residuals by round in one run, with NTK-FL's Theorem 2 for it and one round of NTK-FL.

    Attributes:
        seed: Seed of the problem and of the initial network.
        width: Width of the network.
        factor: Step size as a share of the largest, 2 N / lambda_max.
        theorem: Constants, bounds and assumptions of Theorem 2 of NTK-FL for this run's number of local steps.
        rounds: Rounds after which FedAvg's residual was measured, [E].
        squared: Squared residuals of FedAvg after these rounds, [E].
        ntk_time: Number of gradient steps that NTK-FL's server chose in its only round.
        ntk: Squared residual after that round of NTK-FL.
        uplink_bytes: Bytes that FedAvg's clients sent in the whole run.
    """

    seed: int
    width: int
    factor: float
    theorem: ft.theory.NtkTheorem
    rounds: np.ndarray
    squared: np.ndarray
    ntk_time: int
    ntk: float
    uplink_bytes: int


def run(study: Study) -> lab.Outcome:
    """Trains with FedAvg on every seed, and compares its squared residuals with the bound of NTK-FL's Theorem 2.

    They are also compared with the squared residual after one round of NTK-FL.
    """
    results = list[FollowedRounds]()
    for seed in study.each_seed():
        for f in _follow(two_layer.of_study(study, seed), study.settings, seed):
            results.append(f)
            name = f"fed_avg n={f.width} step={f.factor} tau={f.theorem.constants.local_steps}"
            values = {"relative_squared_residual": f.squared / f.squared[0]}
            rows = lab.metric_rows(name, seed, f.rounds, values)
            sent = [f.uplink_bytes * row.round // int(f.rounds[-1]) for row in rows]
            study.keep([row._replace(uplink_bytes=b, downlink_bytes=b) for row, b in zip(rows, sent, strict=True)])
    return _conclude(study, results)


def _follow(task: TwoLayerProblem, settings: AveragingDecaySettings, seed: int) -> list[FollowedRounds]:
    """Trains by FedAvg for every width, step and number of local steps, and by NTK-FL for a round; needs float64."""
    results = []
    for width in settings.widths:
        start = two_layer.network(task, width, seed)
        for factor in settings.step_factors:
            eta, of_kernel = two_layer.step_size(task, factor), ft.theory.TwoLayerStart(width, kernel=start.kernel)
            evolved = two_layer.several_rounds(task, start, eta, two_layer.times(settings.ntk_time), 1)
            theorem = partial(
                ft.theory.ntk_theorem_2, task.x, start.residual, task.partition, of_kernel, learning_rate=eta
            )
            for steps in settings.local_steps:
                of_run = theorem(local_steps=steps, delta=settings.delta)
                every = max(settings.num_rounds // EVALUATIONS, 1)
                averaged = fed_avg_run(task, start, eta, steps, settings.num_rounds, every)
                ntk = evolved.time[0], evolved.after[0]
                results.append(FollowedRounds(seed, width, factor, of_run, *averaged[:2], *ntk, averaged.uplink_bytes))
    return results


def _row(f: FollowedRounds) -> lab.Row:
    """Builds a run's row: FedAvg's squared residuals against the bound of Theorem 2, and NTK-FL's after one round.

    "late_decay_over_bound" is NaN if the bound's factor a round is not within (0, 1), or if fewer than three residuals
    of the second half of the run are above rounding.
    """
    c, rounds, rate = f.theorem.constants, f.rounds, f.theorem.rate()
    bound, floor = f.theorem.residual_bound(rounds), two_layer.TREND * f.squared[0]
    reached, broken = f.squared <= f.ntk, two_layer.first_above(f.squared, bound, floor)
    late = slice(len(rounds) // 2, None)
    alive = f.squared[late] > floor
    slope = np.polyfit(rounds[late][alive], np.log(f.squared[late][alive]), 1)[0] if alive.sum() > 2 else np.nan
    return {
        "width": f.width,
        "step_factor": f.factor,
        "local_steps": c.local_steps,
        "seed": f.seed,
        "learning_rate": c.learning_rate,
        "factor_a_round": rate,
        "worst": two_layer.worst(f.squared, bound, floor),
        "first_broken": None if broken is None else int(rounds[broken]),
        "control_worst": two_layer.worst(f.squared, f.theorem.residual_bound(rounds, c.lambda_max), floor),
        "late_decay_over_bound": float(slope / np.log(rate)) if 0 < rate < 1 else np.nan,
        "end": float(f.squared[-1] / f.squared[0]),
        "ntk_fl_one_round": float(f.ntk / f.squared[0]),
        "ntk_time": f.ntk_time,
        "rounds_to_ntk_fl": int(rounds[np.argmax(reached)]) if reached.any() else None,
        "ratio_of_rates": f.ntk_time * c.num_clients / c.local_steps,
        "failing": list(f.theorem.failing),
    }


def _conclude(study: Study, results: list[FollowedRounds]) -> lab.Outcome:
    """Builds tables and figure, and the verdicts on Theorem 2 of NTK-FL; a broken bound does not fail the experiment.

    The table of assumptions is of the last run only.
    """
    rows, last = [_row(f) for f in results], results[-1]
    failed = () if all(np.all(np.isfinite(f.squared)) for f in results) else ("networks diverged",)
    _draw(study, results)
    at = f"n = {last.width}, step {last.factor:g}, tau = {last.theorem.constants.local_steps}"
    sheets = (_sheet(study, rows), lab.assumption_sheet([last.theorem], f"assumptions, {at}"))
    details = lab.theorem_details([f.theorem for f in results])
    remarks = (*REMARKS, *two_layer.remarks(last.theorem.constants))
    verdicts = two_layer.verdicts("NTK-FL Theorem 2", rows, "width", "step_factor", "local_steps")
    return lab.Outcome(sheets, rows, details=details, remarks=remarks, failed=failed, verdicts=verdicts)


def _sheet(study: Study, rows: list[lab.Row]) -> lab.Sheet:
    settings, entries = study.settings, []
    for group in lab.grouped(rows, "width", "step_factor", "local_steps").values():
        rounds, largest = [r["rounds_to_ntk_fl"] for r in group], max(r["worst"] for r in group)
        needed = f"> {settings.num_rounds}" if None in rounds else max(rounds)
        means = {m: np.mean([r[m] for r in group]) for m in MEANS}
        entries.append({**group[0], **means, "worst": largest, "needed": needed})
    columns = ": n = {width}, step {step_factor:g}, tau = {local_steps} | factor a round: {factor_a_round:.6f} | "
    columns += "worst: {worst:.3g} | late decay: {late_decay_over_bound:.2f} | FedAvg's end: {end:.2g} | "
    columns += "NTK-FL, 1 round: {ntk_fl_one_round:.2g} | rounds to that: {needed} | Remark 2: {ratio_of_rates:.0f}"
    title = f"Theorem 2 on {study.dataset}: largest squared residual / bound over {settings.num_rounds} rounds of"
    title += f" FedAvg, N = {settings.num_examples}, M = {settings.num_clients}"
    return lab.table(title, entries, columns)


def _draw(study: Study, results: list[FollowedRounds]) -> None:
    """Plots the first seed's residuals at the largest width and step with the bound, by number of local steps."""
    settings, panels, rounds = study.settings, [], results[0].rounds
    for f in (f for f in results if f[:3] == (results[0].seed, settings.widths[-1], settings.step_factors[-1])):
        c, start, bound = f.theorem.constants, f.squared[0], f.theorem.residual_bound
        ntk = 0 * rounds + f.ntk / start
        measured = {"FedAvg": f.squared / start, f"one round of NTK-FL, t = {f.ntk_time}": ntk}
        wrong = {"control: lambda_max instead of lambda": bound(rounds, c.lambda_max) / start}
        title = f"tau = {c.local_steps} local steps"
        panels.append(BoundedPanel(title, rounds, measured, {"Theorem 2": bound(rounds) / start}, wrong))
    width, step = settings.widths[-1], settings.step_factors[-1]
    title = f"Theorem 2 of NTK-FL on {study.dataset}, width {width}, {step:g} of the largest step"
    bounded(panels, title, ("round", "squared residual / initial"), None, study.figures.path("theorem2"))


DEFAULT = with_changes(AveragingDecaySettings(), "num_examples=80 num_clients=8 local_steps=1,5,20 num_rounds=400")
PAPER = with_changes(
    DEFAULT, "num_examples=200 num_clients=20 widths=256,1024,4096 local_steps=1,5,20,50 num_rounds=1000 ntk_time=2000"
)
SCALES = dict.fromkeys(two_layer.DATASETS, by_scale(AveragingDecaySettings(), DEFAULT, PAPER))
ENTRIES = (experiment(__name__, run, SCALES, ("yue2022",), check=two_layer.check, exact=True),)
