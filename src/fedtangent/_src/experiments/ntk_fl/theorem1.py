"""Theorem 1 of NTK-FL (Yue et al., ICML 2022, section 5, D): its rate beside the measured decay of the residual.

The two-layer ReLU network of eq. (12) on several clients: gradient descent on the network, which is what the proof
follows; the linearised network, which is what NTK-FL evolves; and the network at the linearised weights, which is what
NTK-FL sends out. The rate with lambda_max for lambda is the control, which has to be broken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedtangent._src.comparison.theorems.ntk_fl.descents import Descents, descents
from fedtangent._src.experiments.lab import two_layer
from fedtangent._src.experiments.lab.results import Outcome, Sheet, assumption_sheet, grouped, table, theorem_details
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.output.files import Metric
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent._src.theory.ntk_fl.convergence import NtkTheorem, TwoLayerStart, linear_rate, ntk_theorem_1
from fedtangent._src.types import Array, PyTree

METHODS = {
    "network": "gradient descent on the network (the proof)",
    "linear": "linearised network (9a)",
    "tangent": "network at NTK-FL's weights (9b)",
}


@dataclass(frozen=True)
class EvolutionDecaySettings:
    """One pooled round for every width and step, and a few rounds of NTK-FL at the largest of both."""

    num_examples: int = 40
    num_clients: int = 4
    widths: tuple[int, ...] = (256, 1024)
    step_factors: tuple[float, ...] = within((0.05, 0.5), above=0, below=1)  # of the largest step, 2 N / lambda_max
    last_time: int = within(3000, least=10)  # of ten candidates
    num_rounds: int = 3
    delta: float = within(0.05, above=0, below=1)


class FollowedDescent(NamedTuple):
    """A network of one seed, width and step, with its descents."""

    seed: int
    width: int
    factor: float
    theorem: NtkTheorem
    kernel: np.ndarray  # [N, N] at the start
    paths: Descents


def run(study: Study) -> Outcome:
    """Follows every seed's descents, and rounds of NTK-FL at the largest width and step."""
    s, found, rounds = study.settings, list[FollowedDescent](), list[two_layer.NtkRounds]()
    for seed in study.each_seed():
        task = two_layer.of_study(study, seed)
        own = follow(task, s, seed)
        start, eta = two_layer.network(task, s.widths[-1], seed), two_layer.step_size(task, s.step_factors[-1])
        rounds.append(two_layer.several_rounds(task, start, eta, two_layer.times(s.last_time), s.num_rounds, seed))
        found += own
        study.keep([
            Metric(int(t), f"{method} n={f.width} step={f.factor}", seed, "train", "relative_squared_residual",
                   float(getattr(f.paths, method)[t] / f.paths.network[0]), 0, 0)
            for f in own for method in METHODS
            for t in np.unique(np.linspace(0, len(f.paths.network) - 1, 101).round().astype(int))
        ])  # fmt: skip
    return conclude(study, found, rounds)


def follow(task: two_layer.TwoLayerProblem, s: EvolutionDecaySettings, seed: int) -> list[FollowedDescent]:
    """Follows every width and step of one seed. Needs 64-bit types."""
    found = []
    for width in s.widths:
        start = two_layer.network(task, width, seed)
        for factor in s.step_factors:
            eta = two_layer.step_size(task, factor)
            paths = descents(start.model, start.params, task.x, task.y[:, None], eta, s.last_time, watch=movement)
            theorem = ntk_theorem_1(task.x, start.residual, TwoLayerStart(width, kernel=start.kernel),
                                    learning_rate=eta, delta=s.delta,
                                    radius=float(paths.watched["moved"].max()))  # fmt: skip
            found.append(FollowedDescent(seed, width, factor, theorem, start.kernel, paths))
    return found


def movement(start: PyTree, weights: PyTree) -> dict[str, Array]:
    """Computes R, the largest distance that a neuron has moved."""
    return {"moved": jnp.max(jnp.linalg.norm(weights["v"] - start["v"], axis=1))}


def row(f: FollowedDescent) -> dict[str, Any]:
    """Compares one network's residuals with the theorem's bound, relative to the start."""
    steps, c = np.arange(len(f.paths.network)), f.theorem.constants
    bound, start = f.theorem.residual_bound(steps), c.residual**2
    floor = two_layer.TREND * start
    linear = start * linear_rate(f.kernel, c.learning_rate) ** steps
    return {
        "width": f.width,
        "step_factor": f.factor,
        "seed": f.seed,
        "learning_rate": c.learning_rate,
        "factor_a_step": f.theorem.rate(),
        **{f"{m}_worst": two_layer.worst(getattr(f.paths, m), bound, floor if m == "network" else 0.0)
           for m in METHODS},
        "linear_under_its_own_rate": two_layer.worst(f.paths.linear, linear, floor),
        "tangent_first_broken": two_layer.first_above(f.paths.tangent, bound, 0.0),
        "tangent_end": float(f.paths.tangent[-1] / start),
        "bound_end": float(bound[-1] / start),
        "control_worst": two_layer.worst(f.paths.network, f.theorem.residual_bound(steps, c.lambda_max), floor),
        "moved": f.theorem.radius,
        "failing": list(f.theorem.failing),
    }  # fmt: skip


def conclude(study: Study, found: list[FollowedDescent], rounds: list[two_layer.NtkRounds]) -> Outcome:
    """Builds tables, figure and verdicts."""
    s, rows, last = study.settings, [row(f) for f in found], found[-1]
    failed: tuple[str, ...] = () if all(np.all(np.isfinite(f.paths.network)) for f in found) else ("networks diverged",)
    if any(r["linear_under_its_own_rate"] > 1 + 1e-6 for r in rows):
        failed += ("the linearised network is above its own exact rate",)
    _draw(study, found)
    title = f"assumptions, n = {last.width}, step {last.factor:g}, measured on the first seed"
    sheet = assumption_sheet([f.theorem for f in found if (f.width, f.factor) == (last.width, last.factor)], title)
    end = (
        f"{rows[-1]['tangent_end']:.2g} of the start at the last step, where the bound says {rows[-1]['bound_end']:.2g}"
    )
    remarks = (
        f"the proof follows gradient descent; NTK-FL's own weights keep the linearisation's error, here {end}",
        "lambda of rounds after the first: of that round's own kernel H, as trained neurons are no longer Gaussian",
    )
    return Outcome(
        (_sheet(study, rows), _round_sheet(s, rounds), sheet), rows,
        details={"rounds": rounds, **theorem_details([f.theorem for f in found])},
        remarks=(*remarks, *two_layer.remarks(last.theorem.constants)), failed=failed,
        verdicts=two_layer.verdicts("NTK-FL Theorem 1", rows, "width", "step_factor", worst="network_worst"),
    )  # fmt: skip


def _sheet(study: Study, rows: list[dict[str, Any]]) -> Sheet:
    shown = [
        {**own[0], **{m: max(r[f"{m}_worst"] for r in own) for m in METHODS}, "runs": len(own),
         "broken": min((r["tangent_first_broken"] for r in own if r["tangent_first_broken"]), default=None),
         "kept": sum(r["tangent_worst"] <= 1 for r in own)}
        for own in grouped(rows, "width", "step_factor").values()
    ]  # fmt: skip
    s, over = study.settings, "largest squared residual / bound over t = 1 .."
    title = f"Theorem 1 on {study.dataset}: {over} {s.last_time}, N = {s.num_examples} on {s.num_clients} clients"
    return table(title, shown, {
        "": "n = {width}, step {step_factor:g}", "factor a step": "{factor_a_step:.6f}", "descent": "{network:.3g}",
        "linearised": "{linear:.3g}", "NTK-FL": "{tangent:.3g}", "broken at t": "{broken:d}",
        "NTK-FL holds": "{kept} of {runs}",
    })  # fmt: skip


def _round_sheet(s: EvolutionDecaySettings, rounds: list[two_layer.NtkRounds]) -> Sheet:
    first, shown = rounds[0], []
    for k in range(s.num_rounds):
        ratio = [r.after[k] / r.before[k] / r.bound[k] for r in rounds]
        shown.append({"k": k, "time": first.time[k], "factor": first.after[k] / first.before[k],
                      "bound": first.bound[k], "least": first.lambda_min[k], "worst": max(ratio),
                      "kept": sum(r <= 1 for r in ratio), "runs": len(ratio)})  # fmt: skip
    title = f"rounds of NTK-FL, n = {s.widths[-1]}, step {s.step_factors[-1]:g}, t(k) by the training loss (11a)"
    return table(title, shown, {
        "round": "{k}", "t(k)": "{time}", "measured factor": "{factor:.3g}", "bound": "{bound:.3g}",
        "lambda_min(H)": "{least:.3g}", "worst ratio": "{worst:.3g}", "holds": "{kept} of {runs}",
    })  # fmt: skip


def _draw(study: Study, found: list[FollowedDescent]) -> None:
    """Draws the first seed's squared residuals at the largest step, under the bound, a panel for each width."""
    s, panels = study.settings, []
    for f in (f for f in found if (f.seed, f.factor) == (found[0].seed, s.step_factors[-1])):
        steps, start = np.arange(s.last_time + 1), f.theorem.constants.residual**2
        panels.append(BoundedPanel(
            f"width {f.width}, {f.factor:g} of the largest stable step", steps,
            {label: getattr(f.paths, m) / start for m, label in METHODS.items()},
            {"Theorem 1": f.theorem.residual_bound(steps) / start},
            {"control: lambda_max for lambda": f.theorem.residual_bound(steps, f.theorem.constants.lambda_max) / start},
        ))  # fmt: skip
    bounded(panels, f"Theorem 1 of NTK-FL on {study.dataset}, N = {s.num_examples}",
            ("gradient steps t", "squared residual / initial"), None, study.figures.path("theorem1"))  # fmt: skip


DEFAULT = EvolutionDecaySettings(num_examples=80, num_clients=8, num_rounds=5)
PAPER = EvolutionDecaySettings(num_examples=200, num_clients=20, widths=(256, 1024, 4096), last_time=4000, num_rounds=5)
SCALES = dict.fromkeys(two_layer.DATASETS, by_scale(EvolutionDecaySettings(), DEFAULT, PAPER))
ENTRIES = (experiment(__name__, run, SCALES, ("yue2022",), check=two_layer.check, exact=True),)
