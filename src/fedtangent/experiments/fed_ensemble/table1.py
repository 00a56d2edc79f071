"""Bias and variance of Fed-ensemble on the toy of sine functions (FE-2024, table I; FE-2021, section 5, table 1).

The papers give the data, the model and K, but not the step size, the local steps, the rounds or the size of the
initial weights, nor whether their bias is squared. The model is linear, so that bias and variance after every round
are known in closed form: all choices are scanned, the one nearest to the published numbers is trained by simulation
too, and what distance remains is reported. The published numbers are fitted, not reproduced.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t as student

from fedtangent.compare.statistics import SIGNIFICANCE
from fedtangent.compare.theorems.fed_ensemble import repeated_runs
from fedtangent.experiments.lab import sine
from fedtangent.experiments.lab.results import Outcome, Sheet
from fedtangent.experiments.lab.runner import Study, experiment
from fedtangent.experiments.lab.settings import by_scale, within
from fedtangent.output.files import Metric
from fedtangent.theory.fed_ensemble.bias_variance import Decomposition, decompose_laws

# Published (FE-2024, table I; FE-2021, table 1): K -> bias, variance.
PUBLISHED = {1: (0.109, 0.0496), 2: (0.117, 0.0115), 10: (0.112, 0.0063), 20: (0.113, 0.0045), 40: (0.112, 0.0042)}
# FE-2024 counts communication rounds; FE-2021 ages of K rounds, in which every client trains every model once.
BUDGETS = {"rounds": "the same rounds for every K", "ages": "rounds in proportion to K"}
READINGS = {"squared": 1.0, "root": 0.5}
SIGMAS = np.exp(np.linspace(np.log(0.02), np.log(20.0), 400))  # initial standard deviations that are tried


@dataclass(frozen=True)
class BiasVarianceSettings:
    """The paper's sizes; what it leaves open is scanned. ``schedules`` and ``draws`` are of the simulation."""

    num_clients: int = 50
    points_per_client: int = 2
    num_models: tuple[int, ...] = (1, 2, 10, 20, 40)
    local_steps: tuple[int, ...] = (1, 10)
    rounds: tuple[int, ...] = (5, 8, 10, 15, 25, 50, 100)
    ages: tuple[int, ...] = (1, 2, 4)
    scanned_schedules: int = within(4, least=2)
    schedules: int = within(25, least=3)
    draws: int = within(20, least=2)


PAPER = BiasVarianceSettings(
    local_steps=(1, 10, 100, 1000), rounds=(5, 8, 10, 12, 15, 20, 25, 35, 50, 100, 200), ages=(1, 2, 3, 5, 10),
    scanned_schedules=10, schedules=100,
)  # fmt: skip


class ScanCurve(NamedTuple):
    """Closed form of one choice, for initial weights of unit variance, against K."""

    data_seed: int
    local_steps: int
    budget: str
    length: int  # rounds, or ages of K rounds
    num_models: tuple[int, ...]
    bias: np.ndarray  # [K's] squared
    initialisation: np.ndarray  # [K's]
    schedules: np.ndarray  # [K's]


class Fit(NamedTuple):
    """A choice with its best initial standard deviation, and its distance from the published numbers."""

    data_seed: int
    local_steps: int
    budget: str
    length: int
    sigma: float
    reading: str  # of the paper's bias, one of READINGS
    variance_factor: float  # exp of the root mean square of log(closed form / published)
    bias_factor: float
    distance: float  # root mean square of all those logarithms

    def num_rounds(self, num_models: int) -> int:
        """Rounds that K models are trained for."""
        return self.length * (num_models if self.budget == "ages" else 1)

    @property
    def rounds_text(self) -> str:
        """The rounds, as a number or a multiple of K."""
        return f"{self.length} K" if self.budget == "ages" else str(self.length)

    @property
    def text(self) -> str:
        """The choice in words."""
        return (
            f"{self.local_steps} local steps, {self.rounds_text} rounds, sigma {self.sigma:.2f}, data {self.data_seed}"
        )


def curves(settings: BiasVarianceSettings, seed: int) -> list[ScanCurve]:
    """Closed forms for the data of ``seed``: every number of local steps, and every length of either budget."""
    found = []
    lengths = [(b, n) for b in BUDGETS for n in getattr(settings, b)]
    for steps in settings.local_steps:
        problem = repeated_runs.sine_problem(
            seed, local_steps=steps, num_clients=settings.num_clients, points_per_client=settings.points_per_client
        )
        terms: dict[tuple[str, int], list[tuple[float, ...]]] = {of: [] for of in lengths}
        for k in settings.num_models:
            rounds = sorted({n * (k if b == "ages" else 1) for b, n in lengths})
            plan = repeated_runs.permutations(settings.num_clients, k)
            # One model is trained by all clients in every round: its schedule is no draw.
            laws = repeated_runs.laws(problem, plan, rounds, range(settings.scanned_schedules if k > 1 else 1))
            for b, n in lengths:
                at = rounds.index(n * (k if b == "ages" else 1))
                d = decompose_laws([law[at] for law in laws], problem.expected, problem.noise)
                terms[b, n].append((d.bias.value, d.initialisation.value, d.schedules.value))
        found += [
            ScanCurve(seed, steps, b, n, tuple(settings.num_models), *np.array(terms[b, n]).T) for b, n in lengths
        ]
    return found


def best_fits(found: Iterable[ScanCurve]) -> list[Fit]:
    """The nearest choice for each budget and each reading of the bias."""
    each = [fit(curve, reading) for curve in found for reading in READINGS]
    return [
        min((f for f in each if (f.budget, f.reading) == (b, r)), key=lambda f: f.distance)
        for b in BUDGETS for r in READINGS
    ]  # fmt: skip


def fit(curve: ScanCurve, reading: str) -> Fit:
    """The initial standard deviation with which a choice is nearest to the published variances, and how near."""
    published = np.array([PUBLISHED[k] for k in curve.num_models])
    variance = SIGMAS[:, None] ** 2 * curve.initialisation + curve.schedules
    misses = np.log(variance / published[:, 1])
    best = int(np.argmin(np.sum(misses**2, axis=1)))
    bias = np.log(np.maximum(curve.bias, 1e-12) ** READINGS[reading] / published[:, 0])
    both = np.concatenate([misses[best], bias])
    sizes = [float(np.sqrt(np.mean(part**2))) for part in (misses[best], bias, both)]
    return Fit(
        curve.data_seed, curve.local_steps, curve.budget, curve.length, float(SIGMAS[best]), reading,
        float(np.exp(sizes[0])), float(np.exp(sizes[1])), sizes[2],
    )  # fmt: skip


def check(study: Study) -> None:
    """Only what the paper has can stand beside it."""
    if not set(study.settings.num_models) <= set(PUBLISHED):
        raise ValueError(f"num_models: got {study.settings.num_models}, allowed are {', '.join(map(str, PUBLISHED))}")


def run(study: Study) -> Outcome:
    """Scan, and simulate the nearest choice of each budget."""
    s, scanned = study.settings, []
    for seed in study.each_seed():
        scanned += curves(s, seed)
    fits = best_fits(scanned)
    nearest = {b: min((f for f in fits if f.budget == b), key=lambda f: f.distance) for b in BUDGETS}
    found = {}
    for budget, chosen in nearest.items():
        found[budget] = {k: _both(s, chosen, k) for k in s.num_models}
        study.keep(_metrics(chosen, found[budget]))
        study.say(f"simulated {s.schedules} schedules of {s.draws} initialisations: {chosen.text}")
    checks = [_deviations(chosen, found[budget]) for budget, chosen in nearest.items()]
    _draw(study, nearest, found)
    sheets = [_comparison(chosen, found[b]) for b, chosen in nearest.items()]
    sheets += [_mechanism(s, nearest["rounds"], found["rounds"]), _scan_sheet(fits)]
    rows = [row for b, chosen in nearest.items() for row in _rows(chosen, found[b])]
    details = {"published": PUBLISHED, "fits": [f._asdict() for f in fits], "checks": checks}
    return Outcome(tuple(sheets), rows, (), details, _remarks(s, fits, checks), _failures(s, checks))


def _both(s: BiasVarianceSettings, fit: Fit, num_models: int) -> tuple[Decomposition, Decomposition]:
    """Closed form and simulation of one K, under the same schedules."""
    problem = repeated_runs.sine_problem(
        fit.data_seed, local_steps=fit.local_steps, sigma=fit.sigma, num_clients=s.num_clients,
        points_per_client=s.points_per_client,
    )  # fmt: skip
    return sine.decomposed(problem, num_models, fit.num_rounds(num_models), s.schedules, s.draws)


def _deviations(fit: Fit, found: dict[int, tuple[Decomposition, Decomposition]]) -> dict[str, Any]:
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


def _failures(s: BiasVarianceSettings, checks: list[dict[str, Any]]) -> tuple[str, ...]:
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


def _mechanism(s: BiasVarianceSettings, fit: Fit, found: dict[int, tuple[Decomposition, Decomposition]]) -> Sheet:
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


def _remarks(s: BiasVarianceSettings, fits: list[Fit], checks: list[dict[str, Any]]) -> tuple[str, ...]:
    fit = min(fits, key=lambda f: f.distance)
    lines = [
        "SE: standard errors over schedules. bias^.5: root of the squared bias, the reading nearer to the paper's bias"
        if fit.reading == "root" else "The squared bias is the reading nearer to the paper's bias",
        "expected pull: a client's mean weight per round relative to K = 1, 1 - (1 - 1/K)^N: a model with no client in "
        "a round does not move. clients seen: share of clients that have trained a model by the end.",
        "step size 1 / max Theta(x, x)",
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


def _draw(
    study: Study, nearest: dict[str, Fit], found: dict[str, dict[int, tuple[Decomposition, Decomposition]]]
) -> None:
    from fedtangent.output.line_plots import Points, variance_against_models

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
    variance_against_models(panels, "variance of the ensemble average (table I)", study.figures / "table1.png")


SCALES = {"sine": by_scale(BiasVarianceSettings(), BiasVarianceSettings(local_steps=(1, 10, 100), schedules=50), PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), check=check, exact=True),)
