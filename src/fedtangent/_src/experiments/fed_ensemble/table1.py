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

from fedtangent._src.comparison.theorems.fed_ensemble import repeated_runs
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.experiments.lab import sine
from fedtangent._src.experiments.lab.results import Outcome, Sheet, disagreeing, table
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.output.files import Metric
from fedtangent._src.output.line_plots import Points, variance_against_models
from fedtangent._src.theory.fed_ensemble.bias_variance import Decomposition, decompose_laws

# Published (FE-2024, table I; FE-2021, table 1): K -> bias, variance.
PUBLISHED = {1: (0.109, 0.0496), 2: (0.117, 0.0115), 10: (0.112, 0.0063), 20: (0.113, 0.0045), 40: (0.112, 0.0042)}
# FE-2024 counts communication rounds; FE-2021 ages of K rounds, in which every client trains every model once.
BUDGETS = {"rounds": "the same rounds for every K", "ages": "rounds in proportion to K"}
READINGS = {"squared": 1.0, "root": 0.5}
NOT_DIVIDED = "control, variance not divided by K"
SIGMAS = np.exp(np.linspace(np.log(0.02), np.log(20.0), 400))  # initial standard deviations that are tried


@dataclass(frozen=True)
class BiasVarianceSettings:
    """The paper's sizes, the values that are scanned, and the numbers of simulated schedules and initialisations."""

    num_clients: int = 50
    points_per_client: int = 2
    num_models: tuple[int, ...] = (1, 2, 10, 20, 40)
    local_steps: tuple[int, ...] = (1, 10)
    rounds: tuple[int, ...] = (5, 8, 10, 15, 25, 50, 100)
    ages: tuple[int, ...] = (1, 2, 4)
    scanned_schedules: int = within(4, least=2)
    schedules: int = within(25, least=3)
    draws: int = within(20, least=2)


Pairs = dict[int, tuple[Decomposition, Decomposition]]  # by K, closed form and simulation


class ScanCurve(NamedTuple):
    """Closed form against K for one choice of settings, with initial weights of unit variance."""

    data_seed: int
    local_steps: int
    budget: str
    length: int  # rounds, or ages of K rounds
    num_models: tuple[int, ...]
    bias: np.ndarray  # squared, for each of ``num_models``
    initialisation: np.ndarray  # part of the variance
    schedules: np.ndarray  # part of the variance


class Fit(NamedTuple):
    """A choice of settings with its best initial standard deviation, and its distance from the published numbers."""

    data_seed: int
    local_steps: int
    budget: str
    length: int
    sigma: float
    reading: str  # of READINGS: whether the paper's bias is squared
    variance_factor: float  # exp of the root mean square of log(closed form / published)
    bias_factor: float
    distance: float  # root mean square of all those logarithms

    def num_rounds(self, num_models: int) -> int:
        """Returns the number of rounds of a run with K models."""
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
    """Computes closed forms on the data of ``seed``, for all numbers of local steps and lengths of both budgets."""
    found, ks = [], settings.num_models
    lengths = [(b, n) for b in BUDGETS for n in getattr(settings, b)]
    for steps in settings.local_steps:
        problem = _problem(settings, seed, steps)
        terms: dict[tuple[str, int], list[tuple[float, ...]]] = {of: [] for of in lengths}
        for k in ks:
            rounds = sorted({n * (k if b == "ages" else 1) for b, n in lengths})
            plan = repeated_runs.permutations(settings.num_clients, k)
            # With one model all clients train it in every round: the schedule is not random.
            laws = repeated_runs.laws(problem, plan, rounds, range(settings.scanned_schedules if k > 1 else 1))
            for b, n in lengths:
                at = rounds.index(n * (k if b == "ages" else 1))
                d = decompose_laws([law[at] for law in laws], problem.expected, problem.noise)
                terms[b, n].append((d.bias.value, d.initialisation.value, d.schedules.value))
        found += [ScanCurve(seed, steps, b, n, tuple(ks), *np.array(terms[b, n]).T) for b, n in lengths]
    return found


def _problem(s: BiasVarianceSettings, seed: int, local_steps: int, sigma: float = 1.0) -> repeated_runs.ToyProblem:
    return repeated_runs.sine_problem(seed, local_steps=local_steps, sigma=sigma, num_clients=s.num_clients,
                                      points_per_client=s.points_per_client)  # fmt: skip


def best_fits(found: Iterable[ScanCurve]) -> list[Fit]:
    """Selects the nearest choice for each budget and each reading of the bias."""
    each = [fit(curve, reading) for curve in found for reading in READINGS]
    return [
        min((f for f in each if (f.budget, f.reading) == (b, r)), key=lambda f: f.distance)
        for b in BUDGETS for r in READINGS
    ]  # fmt: skip


def fit(curve: ScanCurve, reading: str) -> Fit:
    """Finds the initial standard deviation at which a choice is nearest to the published variances."""
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
    """Raises ``ValueError`` for numbers of models that the paper does not have."""
    if not set(study.settings.num_models) <= set(PUBLISHED):
        raise ValueError(f"num_models: got {study.settings.num_models}, allowed are {', '.join(map(str, PUBLISHED))}")


def run(study: Study) -> Outcome:
    """Scans the settings, and simulates the nearest choice of each budget."""
    s, scanned, found, rows = study.settings, list[ScanCurve](), dict[str, Pairs](), list[dict[str, Any]]()
    for seed in study.each_seed():
        scanned += curves(s, seed)
    fits = best_fits(scanned)
    nearest = {b: min((f for f in fits if f.budget == b), key=lambda f: f.distance) for b in BUDGETS}
    for budget, of in nearest.items():
        problem = _problem(s, of.data_seed, of.local_steps, of.sigma)
        found[budget] = {k: sine.decomposed(problem, k, of.num_rounds(k), s.schedules, s.draws) for k in s.num_models}
        rows += [
            {"budget": budget, "num_models": k, "num_rounds": of.num_rounds(k), "published_bias": PUBLISHED[k][0],
             "published_variance": PUBLISHED[k][1], "closed_form": exact, "simulated": seen}
            for k, (exact, seen) in found[budget].items()
        ]  # fmt: skip
        study.keep([
            Metric(of.num_rounds(k), f"{how} K={k}", of.data_seed, "test", name, getattr(d, name).value, 0, 0)
            for k, pair in found[budget].items() for how, d in zip(("closed_form", "fed_ensemble"), pair, strict=True)
            for name in ("bias", "variance", "initialisation", "schedules")
        ])  # fmt: skip
        study.say(f"simulated {s.schedules} schedules of {s.draws} initialisations: {of.text}")
    checks = [_deviations(budget, pairs) for budget, pairs in found.items()]
    verdicts = tuple(_verdict(s, c, len(checks)) for c in checks)
    _draw(study, nearest, found)
    sheets = [_comparison(of, [r for r in rows if r["budget"] == b]) for b, of in nearest.items()]
    sheets += [_mechanism(s, nearest["rounds"], found["rounds"]), _scan_sheet(fits)]
    details = {"published": PUBLISHED, "fits": [f._asdict() for f in fits], "checks": checks}
    return Outcome(tuple(sheets), rows, (), details, _remarks(fits, checks), disagreeing(verdicts), verdicts)


def _deviations(budget: str, found: Pairs) -> dict[str, Any]:
    """Computes the largest deviations in standard errors: of the closed form, and of wrong ones at the largest K."""
    largest = max(found)
    exact, seen = found[largest]
    wrong = abs(seen.variance.value - largest * exact.variance.value) / seen.variance.standard_error
    return {
        "budget": budget,
        "variance": max(abs(sine.apart(b.variance, a.variance)) for a, b in found.values()),
        "bias": max(abs(sine.apart(b.bias, a.bias)) for a, b in found.values()),
        NOT_DIVIDED: wrong,
        "control, schedules left out": seen.schedules.value / seen.schedules.standard_error,
    }


def _verdict(s: BiasVarianceSettings, c: dict[str, Any], budgets: int) -> Verdict:
    """Checks that simulation agrees with the closed form, at the level of one verdict on all comparisons together."""
    allowed = sine.allowed(s.schedules, budgets * 2 * len(s.num_models))
    found = f"variance {c['variance']:.1f} SE, bias {c['bias']:.1f} SE at most", f"<= {allowed:.1f} SE"
    holds, control = max(c["variance"], c["bias"]) <= allowed, ("variance not divided by K", f"{c[NOT_DIVIDED]:.0f} SE")
    return Verdict.of("FE-2021 eq. (3)", "simulation is the closed form", BUDGETS[c["budget"]], (*found, holds),
                      (*control, c[NOT_DIVIDED] > allowed))  # fmt: skip


def _comparison(fit: Fit, rows: list[dict[str, Any]]) -> Sheet:
    shown = [
        {**r, "root": r["closed_form"].bias.value ** 0.5, "seen_root": max(r["simulated"].bias.value, 0) ** 0.5,
         "apart": sine.apart(r["simulated"].variance, r["closed_form"].variance)}
        for r in rows
    ]  # fmt: skip
    return table(f"table I, {BUDGETS[fit.budget]}: {fit.text}", shown, {
        "K": "{num_models}", "rounds": "{num_rounds}", "paper bias": "{published_bias:.3f}", "bias^.5": "{root:.3f}",
        "simulated": "{seen_root:.3f}", "bias": "{closed_form.bias.value:.4f}",
        "paper variance": "{published_variance:.4f}", "closed form": "{closed_form.variance.value:.4f}",
        "from schedules": "{closed_form.schedules.value:.5f}",
        "simulated variance": "{simulated.variance.value:.4f} +- {simulated.variance.standard_error:.4f}",
        "apart, SE": "{apart:+.1f}",
    })  # fmt: skip


def _mechanism(s: BiasVarianceSettings, fit: Fit, found: Pairs) -> Sheet:
    """Builds the table that explains why the variance does not fall as 1/K: training of each model, and schedules."""
    rows = [
        {"k": k, "paper": k * PUBLISHED[k][1], "initial": k * exact.initialisation.value,
         "schedules": k * exact.schedules.value, "pull": 1 - (1 - 1 / k) ** s.num_clients,
         "seen": min(fit.num_rounds(k) / k, 1)}
        for k, (exact, _) in found.items()
    ]  # fmt: skip
    return table("what breaks 1/K: variance of one model, K times the ensemble's", rows, {
        "K": "{k}", "paper: K variance": "{paper:.3f}", "initialisation": "{initial:.3f}",
        "schedules": "{schedules:.3f}", "expected pull": "{pull:.3f}", "clients seen": "{seen:.2f}",
    })  # fmt: skip


def _scan_sheet(fits: list[Fit]) -> Sheet:
    rows = [{**f._asdict(), "of": BUDGETS[f.budget], "rounds": f.rounds_text} for f in fits]
    return table("the setting nearest to the paper's ten numbers (root mean square factor)", rows, {
        "budget, reading of the bias": "{of}, {reading}", "data": "{data_seed}", "local steps": "{local_steps}",
        "rounds": "{rounds}", "sigma": "{sigma:.2f}", "variance off by": "x {variance_factor:.2f}",
        "bias off by": "x {bias_factor:.2f}",
    })  # fmt: skip


def _remarks(fits: list[Fit], checks: list[dict[str, Any]]) -> tuple[str, ...]:
    reading, out = min(fits, key=lambda f: f.distance).reading, "control, schedules left out"
    return (
        "SE: standard errors over schedules. bias^.5: root of the squared bias, the reading nearer to the paper's bias"
        if reading == "root" else "The squared bias is the reading nearer to the paper's bias",
        "expected pull: a client's mean weight per round relative to K = 1, 1 - (1 - 1/K)^N: a model with no client in "
        "a round does not move. clients seen: share of clients that have trained a model by the end.",
        f"step size 1 / max Theta(x, x); the schedules' part is {', '.join(f'{c[out]:.1f}' for c in checks)} SE from 0",
    )  # fmt: skip


def _draw(study: Study, nearest: dict[str, Fit], found: dict[str, Pairs]) -> None:
    panels = {}
    for budget, fit in nearest.items():
        of = found[budget].items()
        panels[f"{BUDGETS[budget]}\n{fit.text}"] = {
            "predicted": Points({k: (a.variance.value, 0.0) for k, (a, _) in of}, True),
            "predicted, schedules' part": Points({k: (a.schedules.value, 0.0) for k, (a, _) in of if k > 1}, True),
            "simulated": Points({k: (b.variance[0], b.variance[1]) for k, (_, b) in of}, False),
            "published": Points({k: (PUBLISHED[k][1], 0.0) for k, _ in of}, False),
        }
    variance_against_models(panels, "variance of the ensemble average (table I)", study.figures.path("table1"))


PAPER = BiasVarianceSettings(
    local_steps=(1, 10, 100, 1000), rounds=(5, 8, 10, 12, 15, 20, 25, 35, 50, 100, 200), ages=(1, 2, 3, 5, 10),
    scanned_schedules=10, schedules=100,
)  # fmt: skip
DEFAULT = BiasVarianceSettings(local_steps=(1, 10, 100), schedules=50)
SCALES = {"sine": by_scale(BiasVarianceSettings(), DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), check=check, exact=True),)
