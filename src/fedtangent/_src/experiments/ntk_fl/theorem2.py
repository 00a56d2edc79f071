"""Theorem 2 of NTK-FL (Yue et al., ICML 2022, section 5, E): FedAvg's rate beside measured rounds, and Remark 2.

FedAvg with every client in every round on the two-layer ReLU network of eq. (12), with the step of (58): ``eta / N``
times the sum over a client's examples, then the mean over M clients. A round of NTK-FL with the same eta stands beside
it. The rate with lambda_max for lambda is the control, which has to be broken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src.engine import Evaluation
from fedtangent._src.engine.run import predict, simulate
from fedtangent._src.experiments.lab import two_layer
from fedtangent._src.experiments.lab.results import Outcome, Sheet, assumption_sheet, grouped, table, theorem_details
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.local import Work
from fedtangent._src.output.files import Metric
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent._src.theory.ntk_fl.convergence import NtkTheorem, TwoLayerStart, ntk_theorem_2
from fedtangent._src.types import Algorithm, PyTree

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
    """FedAvg with several numbers of local steps, and one round of NTK-FL."""

    num_examples: int = 40
    num_clients: int = 4
    widths: tuple[int, ...] = (256, 1024)
    step_factors: tuple[float, ...] = within((0.05, 0.5), above=0, below=1)  # of the largest step, 2 N / lambda_max
    local_steps: tuple[int, ...] = (1, 10)
    num_rounds: int = 200
    ntk_time: int = within(1000, least=10)  # the last of ten candidates
    delta: float = within(0.05, above=0, below=1)


class FollowedRounds(NamedTuple):
    """A network of one seed, width, step and number of local steps, with its residuals."""

    seed: int
    width: int
    factor: float
    theorem: NtkTheorem
    rounds: np.ndarray  # [E], evaluated
    squared: np.ndarray  # [E] squared residuals of FedAvg
    ntk_time: int
    ntk: float  # squared residual after one round of NTK-FL
    uplink_bytes: int


def run(study: Study) -> Outcome:
    """Follows FedAvg on every seed, and one round of NTK-FL."""
    found = list[FollowedRounds]()
    for seed in study.each_seed():
        own = follow(two_layer.of_study(study, seed), study.settings, seed)
        found += own
        study.keep([
            Metric(int(k), f"fed_avg n={f.width} step={f.factor} tau={f.theorem.constants.local_steps}", seed, "train",
                   "relative_squared_residual", float(v / f.squared[0]),
                   *(2 * (f.uplink_bytes * int(k) // int(f.rounds[-1]),)))
            for f in own for k, v in zip(f.rounds, f.squared, strict=True)
        ])  # fmt: skip
    return conclude(study, found)


def follow(task: two_layer.TwoLayerProblem, s: AveragingDecaySettings, seed: int) -> list[FollowedRounds]:
    """Follows every width, step and number of local steps of one seed. Needs 64-bit types."""
    found = []
    for width in s.widths:
        start = two_layer.network(task, width, seed)
        for factor in s.step_factors:
            eta = two_layer.step_size(task, factor)
            evolved = two_layer.several_rounds(task, start, eta, two_layer.times(s.ntk_time), 1, seed)
            for steps in s.local_steps:
                theorem = ntk_theorem_2(
                    task.x, start.residual, task.partition, TwoLayerStart(width, kernel=start.kernel),
                    learning_rate=eta, local_steps=steps, delta=s.delta,
                )  # fmt: skip
                followed = fed_avg_residuals(task, start, eta, steps, s.num_rounds, seed)
                ntk = evolved.time[0], evolved.after[0]
                found.append(FollowedRounds(seed, width, factor, theorem, *followed[:2], *ntk, followed[2]))
    return found


def fed_avg_residuals(
    task: two_layer.TwoLayerProblem,
    start: two_layer.Start,
    learning_rate: float,
    local_steps: int,
    num_rounds: int,
    seed: int,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Trains with FedAvg and the theorem's eta. Needs 64-bit types.

    The recipe divides by a client's N_m = N / M examples where (58) divides by N: its step is ``eta / M``.

    Returns:
        Evaluated rounds [E], squared residuals [E] and uplink bytes.
    """
    clients, x = task.partition.num_clients, jnp.asarray(task.x)
    plan, work = schedule.all_clients(clients), Work(steps=local_steps, batch_size=None)
    algorithm = algorithms.fed_avg(start.model, plan, client_learning_rate=learning_rate / clients, work=work)
    outputs = jax.jit(lambda state: predict(algorithm, state, x).mean[:, 0])

    def look(_: Algorithm, state: PyTree) -> dict[str, float]:
        return {"squared": float(np.sum((np.asarray(outputs(state)) - task.y) ** 2))}

    every, held = max(num_rounds // EVALUATIONS, 1), task.federated()
    run = simulate(
        algorithm, held, num_rounds=num_rounds, seed=seed, start=start.key, evaluation=Evaluation(every, look)
    )
    seen = run.history.evaluations
    squared = np.array([e.metrics["squared"] for e in seen])
    return np.array([e.round for e in seen]), squared, seen[-1].uplink_bytes


def row(f: FollowedRounds) -> dict[str, Any]:
    """Compares one run's residuals with the theorem's bound, and with NTK-FL as in Remark 2."""
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


def conclude(study: Study, found: list[FollowedRounds]) -> Outcome:
    """Builds tables, figure and verdicts."""
    rows, last = [row(f) for f in found], found[-1]
    failed = () if all(np.all(np.isfinite(f.squared)) for f in found) else ("networks diverged",)
    _draw(study, found)
    at = f"n = {last.width}, step {last.factor:g}, tau = {last.theorem.constants.local_steps}"
    sheet = assumption_sheet([last.theorem], f"assumptions, {at}")
    return Outcome(
        (_sheet(study, rows), sheet), rows, details=theorem_details([f.theorem for f in found]),
        remarks=(*REMARKS, *two_layer.remarks(last.theorem.constants)), failed=failed,
        verdicts=two_layer.verdicts("NTK-FL Theorem 2", rows, "width", "step_factor", "local_steps"),
    )  # fmt: skip


def _sheet(study: Study, rows: list[dict[str, Any]]) -> Sheet:
    s, shown = study.settings, []
    for own in grouped(rows, "width", "step_factor", "local_steps").values():
        needed = [r["rounds_to_ntk_fl"] for r in own]
        means = {m: np.mean([r[m] for r in own]) for m in MEANS}
        shown.append({**own[0], **means, "worst": max(r["worst"] for r in own),
                      "needed": f"> {s.num_rounds}" if None in needed else max(needed)})  # fmt: skip
    over = f"largest squared residual / bound over {s.num_rounds} rounds of FedAvg"
    title = f"Theorem 2 on {study.dataset}: {over}, N = {s.num_examples}, M = {s.num_clients}"
    return table(title, shown, {
        "": "n = {width}, step {step_factor:g}, tau = {local_steps}", "factor a round": "{factor_a_round:.6f}",
        "worst": "{worst:.3g}", "late decay": "{late_decay_over_bound:.2f}", "FedAvg's end": "{end:.2g}",
        "NTK-FL, 1 round": "{ntk_fl_one_round:.2g}", "rounds to that": "{needed}", "Remark 2": "{ratio_of_rates:.0f}",
    })  # fmt: skip


def _draw(study: Study, found: list[FollowedRounds]) -> None:
    """Draws the first seed at the largest width and step under the bound, a panel for each number of local steps."""
    s, panels, rounds = study.settings, [], found[0].rounds
    for f in (f for f in found if f[:3] == (found[0].seed, s.widths[-1], s.step_factors[-1])):
        c, start = f.theorem.constants, f.squared[0]
        panels.append(BoundedPanel(
            f"tau = {c.local_steps} local steps", rounds,
            {"FedAvg": f.squared / start, f"one round of NTK-FL, t = {f.ntk_time}": 0 * rounds + f.ntk / start},
            {"Theorem 2": f.theorem.residual_bound(rounds) / start},
            {"control: lambda_max for lambda": f.theorem.residual_bound(rounds, c.lambda_max) / start},
        ))  # fmt: skip
    title = f"Theorem 2 of NTK-FL on {study.dataset}, width {s.widths[-1]}, {s.step_factors[-1]:g} of the largest step"
    bounded(panels, title, ("round", "squared residual / initial"), None, study.figures.path("theorem2"))


DEFAULT = AveragingDecaySettings(num_examples=80, num_clients=8, local_steps=(1, 5, 20), num_rounds=400)
PAPER = AveragingDecaySettings(
    num_examples=200, num_clients=20, widths=(256, 1024, 4096), local_steps=(1, 5, 20, 50), num_rounds=1000,
    ntk_time=2000,
)  # fmt: skip
SCALES = dict.fromkeys(two_layer.DATASETS, by_scale(AveragingDecaySettings(), DEFAULT, PAPER))
ENTRIES = (experiment(__name__, run, SCALES, ("yue2022",), check=two_layer.check, exact=True),)
