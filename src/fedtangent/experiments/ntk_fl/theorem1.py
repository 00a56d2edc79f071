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

from fedtangent.compare.theorems.ntk_fl.descents import Descents, descents
from fedtangent.experiments.lab import two_layer
from fedtangent.experiments.lab.results import Outcome, Sheet, assumption_sheet, grouped, theorem_details
from fedtangent.experiments.lab.runner import Study, experiment
from fedtangent.experiments.lab.settings import by_scale, within
from fedtangent.experiments.lab.two_layer import NtkRounds, several_rounds
from fedtangent.models.two_layer import two_layer_relu
from fedtangent.output.files import Metric
from fedtangent.theory.ntk_fl.convergence import NtkTheorem, TwoLayerStart, linear_rate, ntk_theorem_1
from fedtangent.types import Array, PyTree

METHODS = {
    "network": "gradient descent on the network (the proof)",
    "linear": "linearised network (9a)",
    "tangent": "network at NTK-FL's weights (9b)",
}


@dataclass(frozen=True)
class EvolutionDecaySettings:
    """One pooled round of every width and step, and a few rounds of NTK-FL at the largest."""

    num_examples: int = 40
    num_clients: int = 4
    widths: tuple[int, ...] = (256, 1024)
    step_factors: tuple[float, ...] = within((0.05, 0.5), above=0, below=1)  # of the largest step, 2 N / lambda_max
    last_time: int = within(3000, least=10)  # of ten candidates
    num_rounds: int = 3
    delta: float = within(0.05, above=0, below=1)


class FollowedDescent(NamedTuple):
    """One network of one seed, width and step."""

    seed: int
    width: int
    factor: float
    theorem: NtkTheorem
    kernel: np.ndarray  # [N, N] at the start
    paths: Descents


def run(study: Study) -> Outcome:
    """Every seed's descents, and its rounds of NTK-FL."""
    found, rounds = list[FollowedDescent](), list[NtkRounds]()
    for seed in study.each_seed():
        task = two_layer.of_study(study, seed)
        found += follow(task, study.settings, seed)
        rounds.append(_rounds(task, study.settings, seed))
        study.keep(_metrics([f for f in found if f.seed == seed]))
    return conclude(study, found, rounds)


def follow(task: two_layer.TwoLayerProblem, s: EvolutionDecaySettings, seed: int) -> list[FollowedDescent]:
    """Every width and step of one seed. Needs 64-bit types."""
    found = []
    for width in s.widths:
        model, params, kernel, residual = two_layer.network(task, width, seed)
        for factor in s.step_factors:
            eta = two_layer.step_size(task, factor)
            paths = descents(model, params, task.x, task.y[:, None], eta, s.last_time, watch=movement)
            theorem = ntk_theorem_1(task.x, residual, TwoLayerStart(width, kernel=kernel), learning_rate=eta,
                                    delta=s.delta, radius=float(paths.watched["moved"].max()))  # fmt: skip
            found.append(FollowedDescent(seed, width, factor, theorem, kernel, paths))
    return found


def movement(start: PyTree, weights: PyTree) -> dict[str, Array]:
    """How far the neuron that moved most has moved, R."""
    return {"moved": jnp.max(jnp.linalg.norm(weights["v"] - start["v"], axis=1))}


def _rounds(task: two_layer.TwoLayerProblem, s: EvolutionDecaySettings, seed: int) -> NtkRounds:
    width, eta = s.widths[-1], two_layer.step_size(task, s.step_factors[-1])
    model = two_layer_relu(task.x.shape[1], width, seed=seed, dtype=jnp.float64)
    return several_rounds(
        task, model, two_layer.key(seed, width), eta, two_layer.times(s.last_time), s.num_rounds, seed
    )


def _metrics(found: list[FollowedDescent]) -> list[Metric]:
    return [
        Metric(int(t), f"{method} n={f.width} step={f.factor}", f.seed, "train", "relative_squared_residual",
               float(getattr(f.paths, method)[t] / f.paths.network[0]), 0, 0)
        for f in found for method in METHODS
        for t in np.unique(np.linspace(0, len(f.paths.network) - 1, 101).round().astype(int))
    ]  # fmt: skip


def row(f: FollowedDescent) -> dict[str, Any]:
    """What one network says of the theorem; squared residuals relative to the start."""
    steps = np.arange(len(f.paths.network))
    bound, start = f.theorem.residual_bound(steps), f.theorem.constants.residual**2
    wrong = f.theorem.residual_bound(steps, f.theorem.constants.lambda_max)
    floor = two_layer.TREND * start
    linear = start * linear_rate(f.kernel, f.theorem.constants.learning_rate) ** steps
    ratios = {m: two_layer.worst(getattr(f.paths, m), bound, floor if m == "network" else 0.0) for m in METHODS}
    return {
        "width": f.width,
        "step_factor": f.factor,
        "seed": f.seed,
        "learning_rate": f.theorem.constants.learning_rate,
        "factor_a_step": f.theorem.rate(),
        **{f"{m}_worst": r for m, r in ratios.items()},
        "linear_under_its_own_rate": two_layer.worst(f.paths.linear, linear, floor),
        "tangent_first_broken": two_layer.first_above(f.paths.tangent, bound, 0.0),
        "tangent_end": float(f.paths.tangent[-1] / start),
        "bound_end": float(bound[-1] / start),
        "control_worst": two_layer.worst(f.paths.network, wrong, floor),
        "moved": f.theorem.radius,
        "failing": list(f.theorem.failing),
    }


def conclude(study: Study, found: list[FollowedDescent], rounds: list[NtkRounds]) -> Outcome:
    """What the runs say of the theorem."""
    rows = [row(f) for f in found]
    failed = []
    if not all(np.all(np.isfinite(f.paths.network)) for f in found):
        failed.append("networks diverged")
    failed += two_layer.control_kept(rows, found[0].theorem.constants)
    if any(r["linear_under_its_own_rate"] > 1 + 1e-6 for r in rows):
        failed.append("the linearised network is above its own exact rate")
    _draw(study, found)
    details = {"rounds": [r._asdict() for r in rounds], **theorem_details([f.theorem for f in found])}
    last = [f.theorem for f in found if (f.width, f.factor) == (found[-1].width, found[-1].factor)]
    title = f"assumptions, n = {found[-1].width}, step {found[-1].factor:g}, measured on the first seed"
    sheets = (_sheet(study, rows), _round_sheet(study.settings, rounds), assumption_sheet(last, title))
    return Outcome(sheets, rows, (), details, _remarks(rows, found), tuple(failed))


def _sheet(study: Study, rows: list[dict[str, Any]]) -> Sheet:
    s, shown = study.settings, []
    for (width, factor), own in grouped(rows, "width", "step_factor").items():
        first = [r["tangent_first_broken"] for r in own if r["tangent_first_broken"]]
        shown.append((
            f"n = {width}, step {factor:g}", f"{own[0]['factor_a_step']:.6f}",
            *(f"{max(r[f'{m}_worst'] for r in own):.3g}" for m in METHODS), str(min(first)) if first else "-",
            f"{sum(r['network_worst'] <= 1 for r in own)} of {len(own)}",
            f"{sum(r['tangent_worst'] <= 1 for r in own)} of {len(own)}",
            f"{min(r['control_worst'] for r in own):.2g}",
        ))  # fmt: skip
    columns = ("", "factor a step", "descent", "linearised", "NTK-FL", "broken at t", "descent holds", "NTK-FL holds",
               "control")  # fmt: skip
    title = (
        f"Theorem 1 on {study.dataset}: largest squared residual / bound over t = 1 .. {s.last_time}, "
        f"N = {s.num_examples} on {s.num_clients} clients"
    )
    return Sheet(title, columns, tuple(shown))


def _round_sheet(s: EvolutionDecaySettings, rounds: list[NtkRounds]) -> Sheet:
    shown = []
    for k in range(s.num_rounds):
        ratio = [r.after[k] / r.before[k] / r.bound[k] for r in rounds]
        first = rounds[0]
        shown.append((
            str(k), str(first.time[k]), f"{first.after[k] / first.before[k]:.3g}", f"{first.bound[k]:.3g}",
            f"{first.lambda_min[k]:.3g}", f"{max(ratio):.3g}", f"{sum(r <= 1 for r in ratio)} of {len(ratio)}",
        ))  # fmt: skip
    columns = ("round", "t(k)", "measured factor", "bound", "lambda_min(H)", "worst ratio", "holds")
    title = f"rounds of NTK-FL, n = {s.widths[-1]}, step {s.step_factors[-1]:g}, t(k) by the training loss (11a)"
    return Sheet(title, columns, tuple(shown))


def _remarks(rows: list[dict[str, Any]], found: list[FollowedDescent]) -> tuple[str, ...]:
    c, last = found[-1].theorem.constants, rows[-1]
    left = f"{last['tangent_end']:.2g} of the start at the last step, where the bound says {last['bound_end']:.2g}"
    return (
        f"lambda {c.lambda_min:.3g}, lambda_max {c.lambda_max:.3g} of the limiting kernel (13); steps are fractions of "
        f"2 N / lambda_max; the proof asks for at most lambda / (2 N) = {c.lambda_min / 2 / c.num_examples:.2g}",
        f"the proof follows gradient descent; NTK-FL's own weights keep the linearisation's error, here {left}",
        "lambda of rounds after the first: of that round's own kernel H, as trained neurons are no longer Gaussian",
        "a bound that holds where its assumptions fail was not owed; one that is broken there is no counterexample",
    )


def _draw(study: Study, found: list[FollowedDescent]) -> None:
    """First seed, largest step: squared residuals of the three under the bound, by width."""
    from fedtangent.output.line_plots import BoundedPanel, bounded

    s, panels = study.settings, []
    for f in found:
        if f.seed != found[0].seed or f.factor != s.step_factors[-1]:
            continue
        steps, start = np.arange(s.last_time + 1), f.theorem.constants.residual**2
        panels.append(BoundedPanel(
            f"width {f.width}, {f.factor:g} of the largest stable step", steps,
            {label: getattr(f.paths, m) / start for m, label in METHODS.items()},
            {"Theorem 1": f.theorem.residual_bound(steps) / start},
            {"control: lambda_max for lambda": f.theorem.residual_bound(steps, f.theorem.constants.lambda_max) / start},
        ))  # fmt: skip
    lowest = max(min(float(np.min(v)) for p in panels for v in p.measured.values()) / 10, 1e-12)
    bounded(panels, f"Theorem 1 of NTK-FL on {study.dataset}, N = {s.num_examples}",
            ("gradient steps t", "squared residual / initial"), lowest, study.figures / "theorem1.png")  # fmt: skip


SCALES = dict.fromkeys(
    two_layer.DATASETS,
    by_scale(
        EvolutionDecaySettings(),
        EvolutionDecaySettings(num_examples=80, num_clients=8, num_rounds=5),
        EvolutionDecaySettings(
            num_examples=200, num_clients=20, widths=(256, 1024, 4096), last_time=4000, num_rounds=5
        ),
    ),
)
ENTRIES = (experiment(__name__, run, SCALES, ("yue2022",), check=two_layer.check, exact=True),)
