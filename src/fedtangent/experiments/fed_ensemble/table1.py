"""Bias and variance of Fed-ensemble on the toy of sine functions (FE-2024, table I; FE-2021, section 5, table 1).

The papers give the data, the model and K, but not the step size, the local steps, the rounds or the size of the
initial weights, nor whether their bias is squared. The model is linear, so that bias and variance after every round
are known in closed form: all choices are scanned, the one nearest to the published numbers is trained by simulation
too, and what distance remains is reported. The published numbers are fitted, not reproduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from fedtangent.compare.settings import exact_arithmetic
from fedtangent.compare.statistics import SIGNIFICANCE
from fedtangent.compare.theorems.fed_ensemble import repeated_runs
from fedtangent.engine.sweeps import check_seeds
from fedtangent.experiments.lab import table1_scan as scan
from fedtangent.experiments.lab import trials
from fedtangent.experiments.lab.contract import Experiment, Outcome, Prepared, Request, Sheet, changed, choose
from fedtangent.experiments.lab.table1_scan import BUDGETS, PUBLISHED, Fit
from fedtangent.output.files import Metric
from fedtangent.theory.fed_ensemble.bias_variance import Decomposition, decompose_laws, decompose_runs


@dataclass(frozen=True)
class Settings:
    """The paper's sizes; what it leaves open is scanned. ``schedules`` and ``draws`` are of the simulation."""

    num_clients: int = 50
    points_per_client: int = 2
    num_models: tuple[int, ...] = (1, 2, 10, 20, 40)
    local_steps: tuple[int, ...] = (1, 10)
    rounds: tuple[int, ...] = (5, 8, 10, 15, 25, 50, 100)
    ages: tuple[int, ...] = (1, 2, 4)
    scanned_schedules: int = 4
    schedules: int = 25
    draws: int = 20


PAPER = Settings(
    local_steps=(1, 10, 100, 1000), rounds=(5, 8, 10, 12, 15, 20, 25, 35, 50, 100, 200), ages=(1, 2, 3, 5, 10),
    scanned_schedules=10, schedules=100,
)  # fmt: skip
SETTINGS = {"smoke": Settings(), "paper": PAPER}


def prepare(request: Request) -> Prepared:
    """Check the request; raises ``ValueError``."""
    name = choose(EXPERIMENT, request)
    seeds, s = check_seeds(request.seeds), changed(SETTINGS[request.scale], request.changes)
    trials.check_numbers(s, ("num_clients", "points_per_client"))
    trials.check_different(s, ("num_models", "local_steps", "rounds", "ages"))
    if not set(s.num_models) <= set(PUBLISHED):
        raise ValueError(f"num_models: got {s.num_models}, the paper has {tuple(PUBLISHED)}")
    trials.check_numbers(s, ("scanned_schedules", "draws"), least=2)
    trials.check_numbers(s, ("schedules",), least=3)

    def run(say: Callable[[str], None], keep: Callable[[Sequence[Metric]], None], figures: Path) -> Outcome:
        with exact_arithmetic():
            return _run(s, seeds, say, keep, figures)

    return Prepared(s, name, run)


def _run(
    s: Settings,
    seeds: tuple[int, ...],
    say: Callable[[str], None],
    keep: Callable[[Sequence[Metric]], None],
    figures: Path,
) -> Outcome:
    curves = []
    for seed in seeds:
        curves += scan.curves(s, seed)
        say(f"data of seed {seed}: closed form of {len(s.local_steps)} local trainings, every K and every round")
    fits = scan.best_fits(curves)
    nearest = {b: min((f for f in fits if f.budget == b), key=lambda f: f.distance) for b in BUDGETS}
    found, metrics = {}, []
    for budget, fit in nearest.items():
        found[budget] = {k: _both(s, fit, k) for k in s.num_models}
        metrics += _metrics(fit, found[budget])
        keep(metrics)
        say(f"simulated {s.schedules} schedules of {s.draws} initialisations: {fit.text}")
    checks = [_check(fit, found[budget]) for budget, fit in nearest.items()]
    _draw(nearest, found, figures)
    sheets = [_comparison(fit, found[b]) for b, fit in nearest.items()]
    sheets += [_mechanism(s, nearest["rounds"], found["rounds"]), _scan_sheet(fits)]
    rows = [row for b, fit in nearest.items() for row in _rows(fit, found[b])]
    details = {"published": PUBLISHED, "fits": [f._asdict() for f in fits], "checks": checks}
    return Outcome(tuple(sheets), rows, details, _remarks(s, fits, nearest, checks), _failures(s, checks))


def _both(s: Settings, fit: Fit, num_models: int) -> tuple[Decomposition, Decomposition]:
    """Closed form and simulation of one K, under the same schedules."""
    problem = repeated_runs.sine_problem(
        fit.data_seed, local_steps=fit.local_steps, sigma=fit.sigma, num_clients=s.num_clients,
        points_per_client=s.points_per_client,
    )  # fmt: skip
    plan = repeated_runs.permutations(s.num_clients, num_models)
    seeds, num_rounds = repeated_runs.seeds_of(num_models, s.schedules), fit.num_rounds(num_models)
    # One model is trained by all clients in every round: its schedule is no draw.
    laws = repeated_runs.laws(problem, plan, (num_rounds,), seeds if num_models > 1 else seeds[:1])
    runs = repeated_runs.simulated(problem, plan, num_rounds, seeds, s.draws)
    return (
        decompose_laws([law[0] for law in laws], problem.expected, problem.noise),
        decompose_runs(runs, problem.expected, problem.noise),
    )


def _check(fit: Fit, found: dict[int, tuple[Decomposition, Decomposition]]) -> dict[str, Any]:
    """Largest deviations in standard errors: of the closed form, and of two wrong ones at the largest K."""
    largest = max(found)
    exact, seen = found[largest]
    error = seen.variance.standard_error
    return {
        "budget": fit.budget,
        "variance": max(
            abs(b.variance.value - a.variance.value) / b.variance.standard_error for a, b in found.values()
        ),
        "bias": max(abs(b.bias.value - a.bias.value) / b.bias.standard_error for a, b in found.values()),
        "control, variance not divided by K": abs(seen.variance.value - largest * exact.variance.value) / error,
        "control, schedules left out": seen.schedules.value / seen.schedules.standard_error,
    }


def _failures(s: Settings, checks: list[dict[str, Any]]) -> tuple[str, ...]:
    """Where simulation and closed form disagree: at three standard errors' level for the largest of all comparisons."""
    level = SIGNIFICANCE / (len(checks) * 2 * len(s.num_models))
    allowed = float(student.ppf(1 - level / 2, s.schedules - 1))
    return tuple(
        f"{name} of simulation and closed form are {c[name]:.1f} standard errors apart ({c['budget']}), "
        f"at most {allowed:.1f} are allowed"
        for c in checks for name in ("variance", "bias") if not c[name] <= allowed
    )  # fmt: skip


def _metrics(fit: Fit, found: dict[int, tuple[Decomposition, Decomposition]]) -> list[Metric]:
    return [
        Metric(fit.num_rounds(k), f"{how} K={k}", fit.data_seed, "test", name, getattr(d, name).value, 0, 0)
        for k, pair in found.items() for how, d in zip(("closed_form", "fed_ensemble"), pair, strict=True)
        for name in ("bias", "variance", "initialisation", "schedules")
    ]  # fmt: skip


def _rows(fit: Fit, found: dict[int, tuple[Decomposition, Decomposition]]) -> list[dict[str, Any]]:
    return [
        {"budget": fit.budget, "num_models": k, "num_rounds": fit.num_rounds(k), "published_bias": PUBLISHED[k][0],
         "published_variance": PUBLISHED[k][1], "closed_form": exact, "simulated": seen}
        for k, (exact, seen) in found.items()
    ]  # fmt: skip


def _comparison(fit: Fit, found: dict[int, tuple[Decomposition, Decomposition]]) -> Sheet:
    columns = ("K", "rounds", "paper bias", "bias^.5", "simulated", "bias", "paper variance", "closed form",
               "from schedules", "simulated variance", "apart, SE")  # fmt: skip
    rows = []
    for k, (exact, seen) in found.items():
        root, apart = exact.bias.value**0.5, (seen.variance.value - exact.variance.value) / seen.variance.standard_error
        rows.append((
            str(k), str(fit.num_rounds(k)), f"{PUBLISHED[k][0]:.3f}", f"{root:.3f}",
            f"{max(seen.bias.value, 0) ** 0.5:.3f}", f"{exact.bias.value:.4f}", f"{PUBLISHED[k][1]:.4f}",
            f"{exact.variance.value:.4f}", f"{exact.schedules.value:.5f}",
            f"{seen.variance.value:.4f} +- {seen.variance.standard_error:.4f}", f"{apart:+.1f}",
        ))  # fmt: skip
    return Sheet(f"table I, {BUDGETS[fit.budget]}: {fit.text}", columns, tuple(rows))


def _mechanism(s: Settings, fit: Fit, found: dict[int, tuple[Decomposition, Decomposition]]) -> Sheet:
    """What breaks 1/K: how much each model has been trained, and the schedules' part."""
    rows = []
    for k, (exact, _) in found.items():
        speed = 1 - (1 - 1 / k) ** s.num_clients
        rows.append((
            str(k), f"{k * PUBLISHED[k][1]:.3f}", f"{k * exact.initialisation.value:.3f}",
            f"{k * exact.schedules.value:.3f}", f"{speed:.3f}", f"{min(fit.num_rounds(k) / k, 1):.2f}",
        ))  # fmt: skip
    columns = ("K", "paper: K variance", "initialisation", "schedules", "expected pull", "clients seen")
    return Sheet("what breaks 1/K: variance of one model, K times the ensemble's", columns, tuple(rows))


def _scan_sheet(fits: list[Fit]) -> Sheet:
    columns = (
        "budget, reading of the bias",
        "data",
        "local steps",
        "rounds",
        "sigma",
        "variance off by",
        "bias off by",
    )
    rows = tuple(
        (f"{BUDGETS[f.budget]}, {f.reading}", str(f.data_seed), str(f.local_steps), f.rounds_text, f"{f.sigma:.2f}",
         f"x {f.variance_factor:.2f}", f"x {f.bias_factor:.2f}")
        for f in fits
    )  # fmt: skip
    return Sheet("the setting nearest to the paper's ten numbers (root mean square factor)", columns, rows)


def _remarks(s: Settings, fits: list[Fit], nearest: dict[str, Fit], checks: list[dict[str, Any]]) -> tuple[str, ...]:
    fit = min(fits, key=lambda f: f.distance)
    lines = [
        "SE: standard errors over schedules. bias^.5: root of the squared bias, the reading nearer to the paper's bias"
        if fit.reading == "root" else "The squared bias is the reading nearer to the paper's bias",
        "expected pull: a client's mean weight per round relative to K = 1, 1 - (1 - 1/K)^N: a model with no client in "
        "a round does not move. clients seen: share of clients that have trained a model by the end.",
        f"settings: step 1 / max Theta(x, x), {', '.join(f'{name} {value}' for name, value in vars(s).items())}",
    ]  # fmt: skip
    if {1, 2} <= set(s.num_models):
        ratio = PUBLISHED[1][1] / PUBLISHED[2][1]
        lines.append(
            f"the paper's variance falls {ratio:.1f} times from K = 1 to 2; independent models of equal training give 2"
        )
    lines += [
        f"{BUDGETS[c['budget']]}: largest deviation of the closed form {c['variance']:.1f} SE in variance, "
        f"{c['bias']:.1f} in bias; controls: not divided by K {c['control, variance not divided by K']:.0f} SE, "
        f"schedules left out {c['control, schedules left out']:.1f} SE"
        for c in checks
    ]
    return tuple(lines)


def _draw(nearest: dict[str, Fit], found: dict[str, dict[int, tuple[Decomposition, Decomposition]]], out: Path) -> None:
    from fedtangent.output.variance_plots import Points, variance_against_models

    panels = {}
    for budget, fit in nearest.items():
        panels[f"{BUDGETS[budget]}\n{fit.text}"] = {
            "predicted": Points({k: (a.variance.value, 0.0) for k, (a, _) in found[budget].items()}, True),
            "predicted, schedules' part": Points(
                {k: (a.schedules.value, 0.0) for k, (a, _) in found[budget].items() if k > 1}, True
            ),
            "simulated": Points(
                {k: (b.variance.value, b.variance.standard_error) for k, (_, b) in found[budget].items()}, False
            ),
            "published": Points({k: (PUBLISHED[k][1], 0.0) for k in found[budget]}, False),
        }
    variance_against_models(panels, "variance of the ensemble average (table I)", out / "table1.png")


EXPERIMENT = Experiment(
    "Bias and variance of Fed-ensemble on the sine toy against K: closed form, simulation, the paper's table I",
    ("sine",),
    prepare,
)
