"""Theorem 1 of NTK-FL (Yue et al., ICML 2022, section 5, D): its rate beside the measured decay of the residual.

The two-layer ReLU network of eq. (12) on several clients: gradient descent on the network, which is what the proof
follows; the linearised network, which is what NTK-FL evolves; and the network at the linearised weights, which is what
NTK-FL sends out. The rate with lambda_max for lambda is the control, which has to be broken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedtangent.compare.settings import exact_arithmetic
from fedtangent.compare.theorems.ntk_fl.descents import Descents, descents
from fedtangent.engine.sweeps import check_seeds
from fedtangent.experiments.lab import two_layer
from fedtangent.experiments.lab.contract import Experiment, Outcome, Prepared, Request, Sheet, changed, choose
from fedtangent.experiments.lab.ntk_rounds import Rounds, several_rounds
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
class Settings:
    """One pooled round of every width and step, and a few rounds of NTK-FL at the largest."""

    num_examples: int = 40
    num_clients: int = 4
    widths: tuple[int, ...] = (256, 1024)
    step_factors: tuple[float, ...] = (0.05, 0.5)  # of the largest stable step, 2 N / lambda_max
    last_time: int = 3000
    num_rounds: int = 3
    delta: float = 0.05


SETTINGS = {
    "smoke": Settings(),
    "paper": Settings(num_examples=200, num_clients=20, widths=(256, 1024, 4096), last_time=4000, num_rounds=5),
}


class Followed(NamedTuple):
    """One network of one seed, width and step."""

    seed: int
    width: int
    factor: float
    theorem: NtkTheorem
    kernel: np.ndarray  # [N, N] at the start
    paths: Descents


def prepare(request: Request) -> Prepared:
    """Check the request; raises ``ValueError``."""
    name = choose(EXPERIMENT, request)
    seeds = check_seeds(request.seeds)
    settings = changed(SETTINGS[request.scale], request.changes)
    two_layer.check(settings, ("num_examples", "num_clients", "last_time", "num_rounds"))
    if settings.last_time < 10:
        raise ValueError(f"last_time: got {settings.last_time}, must be at least 10, the number of candidate times")

    def run(say: Callable[[str], None], keep: Callable[[Sequence[Metric]], None], figures: Path) -> Outcome:
        found, rounds = [], []
        with exact_arithmetic():
            for seed, task in two_layer.problems(name, request.data_dir, settings, seeds, say):
                found += follow(task, settings, seed)
                rounds.append(_rounds(task, settings, seed))
                keep(_metrics([f for f in found if f.seed == seed]))
            return _conclude(name, settings, found, rounds, figures)

    return Prepared(settings, name, run)


def follow(task: two_layer.Problem, s: Settings, seed: int) -> list[Followed]:
    """Every width and step of one seed. Needs 64-bit types."""
    found = []
    for width in s.widths:
        model, params, kernel, residual = two_layer.network(task, width, seed)
        for factor in s.step_factors:
            eta = two_layer.step_size(task, factor)
            paths = descents(model, params, task.x, task.y[:, None], eta, s.last_time, watch=movement)
            theorem = ntk_theorem_1(task.x, residual, TwoLayerStart(width, kernel=kernel), learning_rate=eta,
                                    delta=s.delta, radius=float(paths.watched["moved"].max()))  # fmt: skip
            found.append(Followed(seed, width, factor, theorem, kernel, paths))
    return found


def movement(start: PyTree, weights: PyTree) -> dict[str, Array]:
    """How far the neuron that moved most has moved, R."""
    return {"moved": jnp.max(jnp.linalg.norm(weights["v"] - start["v"], axis=1))}


def times(s: Settings) -> tuple[int, ...]:
    """Ten candidate times, the last ``last_time``."""
    return tuple(int(t) for t in np.unique(np.linspace(s.last_time / 10, s.last_time, 10).round()))


def _rounds(task: two_layer.Problem, s: Settings, seed: int) -> Rounds:
    width, eta = s.widths[-1], two_layer.step_size(task, s.step_factors[-1])
    model = two_layer_relu(task.x.shape[1], width, seed=seed, dtype=jnp.float64)
    return several_rounds(task, model, two_layer.key(seed, width), eta, times(s), s.num_rounds, seed)


def _metrics(found: list[Followed]) -> list[Metric]:
    return [
        Metric(int(t), f"{method} n={f.width} step={f.factor}", f.seed, "train", "relative_squared_residual",
               float(getattr(f.paths, method)[t] / f.paths.network[0]), 0, 0)
        for f in found for method in METHODS
        for t in np.unique(np.linspace(0, len(f.paths.network) - 1, 101).round().astype(int))
    ]  # fmt: skip


def row(f: Followed) -> dict[str, Any]:
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


def _conclude(name: str, s: Settings, found: list[Followed], rounds: list[Rounds], figures: Path) -> Outcome:
    rows, c = [row(f) for f in found], found[0].theorem.constants
    failed = []
    if not all(np.all(np.isfinite(f.paths.network)) for f in found):
        failed.append("networks diverged")
    kept = [r["control_worst"] for r in rows if r["control_worst"] <= 1]
    if kept:
        ratio = c.lambda_max / c.lambda_min if c.lambda_min > 0 else np.inf
        failed.append(
            f"the control's rate was not broken in {len(kept)} of {len(rows)} runs: it takes many steps, and "
            f"lambda_max above 4 lambda (here {ratio:.3g} times)"
        )
    if any(r["linear_under_its_own_rate"] > 1 + 1e-6 for r in rows):
        failed.append("the linearised network is above its own exact rate")
    draw(found, s, name, figures)
    details = {
        "settings": s,
        "dataset": name,
        "rounds": [r._asdict() for r in rounds],
        "assumptions": [[a._asdict() for a in f.theorem.assumptions] for f in found],
        "constants": [f.theorem.constants._asdict() for f in found],
    }
    sheets = (_sheet(name, s, rows), _round_sheet(s, rounds), _assumption_sheet(found))
    return Outcome(sheets, rows, details, _remarks(rows, found), tuple(failed))


def _sheet(name: str, s: Settings, rows: list[dict[str, Any]]) -> Sheet:
    shown = []
    for width in s.widths:
        for factor in s.step_factors:
            own = [r for r in rows if r["width"] == width and r["step_factor"] == factor]
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
        f"Theorem 1 on {name}: largest squared residual / bound over t = 1 .. {s.last_time}, N = {s.num_examples} on "
        f"{s.num_clients} clients"
    )
    return Sheet(title, columns, tuple(shown))


def _round_sheet(s: Settings, rounds: list[Rounds]) -> Sheet:
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


def _assumption_sheet(found: list[Followed]) -> Sheet:
    last = [f for f in found if f.width == found[-1].width and f.factor == found[-1].factor]
    rows = tuple(
        (a.name, a.statement, f"{a.measured:.3g}", f"{a.relation} {a.required:.3g}",
         f"{sum(f.theorem.assumptions[i].holds for f in last)} of {len(last)}")
        for i, a in enumerate(last[0].theorem.assumptions)
    )  # fmt: skip
    title = f"assumptions, n = {last[0].width}, step {last[0].factor:g}, measured on the first seed"
    return Sheet(title, ("assumption", "what", "measured", "required", "holds"), rows)


def _remarks(rows: list[dict[str, Any]], found: list[Followed]) -> tuple[str, ...]:
    c, last = found[-1].theorem.constants, rows[-1]
    left = f"{last['tangent_end']:.2g} of the start at the last step, where the bound says {last['bound_end']:.2g}"
    return (
        f"lambda {c.lambda_min:.3g}, lambda_max {c.lambda_max:.3g} of the limiting kernel (13); steps are fractions of "
        f"2 N / lambda_max; the proof asks for at most lambda / (2 N) = {c.lambda_min / 2 / c.num_examples:.2g}",
        f"the proof follows gradient descent; NTK-FL's own weights keep the linearisation's error, here {left}",
        "lambda of rounds after the first: of that round's own kernel H, as trained neurons are no longer Gaussian",
        "a bound that holds where its assumptions fail was not owed; one that is broken there is no counterexample",
    )


def draw(found: list[Followed], s: Settings, name: str, folder: Path) -> Path:
    """First seed, largest step: squared residuals of the three under the bound, by width."""
    from fedtangent.output.ntk_plots import Curves, bounded

    panels = []
    for f in found:
        if f.seed != found[0].seed or f.factor != s.step_factors[-1]:
            continue
        steps, start = np.arange(s.last_time + 1), f.theorem.constants.residual**2
        panels.append(Curves(
            f"width {f.width}, {f.factor:g} of the largest stable step", steps,
            {label: getattr(f.paths, m) / start for m, label in METHODS.items()},
            {"Theorem 1": f.theorem.residual_bound(steps) / start},
            {"control: lambda_max for lambda": f.theorem.residual_bound(steps, f.theorem.constants.lambda_max) / start},
        ))  # fmt: skip
    lowest = max(min(float(np.min(v)) for p in panels for v in p.measured.values()) / 10, 1e-12)
    return bounded(panels, f"Theorem 1 of NTK-FL on {name}, N = {s.num_examples}", "gradient steps t",
                   "squared residual / initial", lowest, folder / "theorem1.png")  # fmt: skip


EXPERIMENT = Experiment(
    "NTK-FL's Theorem 1: its rate beside the measured decay of the residual, and which of its assumptions hold",
    two_layer.DATASETS,
    prepare,
)
