"""Bias and variance of Fed-ensemble on the toy of sine functions (FE-2024, table I; FE-2021, section 5, table 1).

The papers give the data, the model and the number K of models. They do not give the step size, the local steps, the
rounds or the size of the initial weights, nor whether their bias is squared. The model is linear, so that bias and
variance after every round have a closed form. All choices are scanned, the one nearest to the published numbers is also
simulated, and the distance that remains is reported. So the published numbers are fitted, not reproduced.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

import fedtangent as ft
from fedtangent._src.comparison.theorems.fed_ensemble import bias_variance
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab import sine
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.output.line_plots import Points, variance_against_models
from fedtangent._src.theory.fed_ensemble.bias_variance import Decomposition


def _curves(settings: BiasVarianceSettings, seed: int) -> list[ScanCurve]:
    """Computes an ensemble's bias and variances by the number K of models, for all scanned settings of one seed.

    They are in closed form, for K > 1 from ``scanned_schedules`` random schedules. There is a curve for each number of
    local steps and each length of training, in rounds or in multiples of K rounds.
    """
    curves, lengths = [], [(b, n) for b in BUDGETS for n in getattr(settings, b)]
    for steps in settings.local_steps:
        problem, terms = _problem(settings, seed, steps), dict[tuple[str, int], list[tuple[float, ...]]]()
        for k in settings.num_models:
            rounds = sorted({n * (k if b == "ages" else 1) for b, n in lengths})
            plan = bias_variance.permutations(settings.num_clients, k)
            # With one model all clients train it in every round: the schedule is not random.
            laws = bias_variance.laws_of(problem, plan, rounds, range(settings.scanned_schedules if k > 1 else 1))
            for b, n in lengths:
                at = rounds.index(n * (k if b == "ages" else 1))
                d = ft.theory.decompose_laws([law[at] for law in laws], problem.expected, problem.noise)
                terms.setdefault((b, n), []).append((d.bias.value, d.initialisation.value, d.schedules.value))
        curves += [
            ScanCurve(seed, steps, *of, settings.num_models, *np.array(values).T) for of, values in terms.items()
        ]
    return curves


# Published (FE-2024, table I; FE-2021, table 1): K -> bias, variance.
PUBLISHED = {1: (0.109, 0.0496), 2: (0.117, 0.0115), 10: (0.112, 0.0063), 20: (0.113, 0.0045), 40: (0.112, 0.0042)}
# FE-2024 counts communication rounds; FE-2021 ages of K rounds, in which every client trains every model once.
BUDGETS = {"rounds": "the same rounds for every K", "ages": "rounds in proportion to K"}
READINGS = {"squared": 1.0, "root": 0.5}
NOT_DIVIDED = "control, variance not divided by K"
SIGMAS = np.exp(np.linspace(np.log(0.02), np.log(20.0), 400))  # initial standard deviations that are tried


@dataclass(frozen=True)
class BiasVarianceSettings:
    """Settings of table I (FE-2024): the papers' sizes, the values that are scanned, and the size of the simulation.

    ``scanned_schedules`` are the random schedules of a closed form; ``schedules`` are simulated, with ``draws``
    initialisations under each.
    """

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
    """Bias and variance in closed form for each K, for one choice of settings and initial weights of variance 1.

    Attributes:
        data_seed: Seed of the data and of their division into clients.
        local_steps: Steps that a client takes in a round.
        budget: "rounds" if ``length`` counts rounds, "ages" if it counts ages of K rounds, in which every client trains
            every model once.
        length: Length of the training.
        num_models: Numbers K of models.
        bias: Squared bias for each K.
        initialisation: Variance for each K that is due to the initial weights.
        schedules: Variance for each K that is due to the random schedules.
    """

    data_seed: int
    local_steps: int
    budget: str
    length: int
    num_models: tuple[int, ...]
    bias: np.ndarray
    initialisation: np.ndarray
    schedules: np.ndarray


class Fit(NamedTuple):
    """A choice of settings with its best initial standard deviation, and its distance from the published numbers.

    Attributes:
        data_seed, local_steps, budget, length: As in ``ScanCurve``.
        sigma: Initial standard deviation of the weights that fits best.
        reading: Whether the published bias is taken as squared ("squared") or not ("root").
        variance_factor: Typical factor between variance in closed form and published: exp of the root mean square log.
        bias_factor: Typical factor between the bias in closed form and the published one.
        distance: Root mean square of the logarithms of all ratios, of variances and biases.
    """

    data_seed: int
    local_steps: int
    budget: str
    length: int
    sigma: float
    reading: str
    variance_factor: float
    bias_factor: float
    distance: float

    def num_rounds(self, num_models: int) -> int:
        """Returns the number of rounds with K models: ``length``, or K times ``length`` if ``budget`` is "ages".

        An age is K rounds, in which every client trains every model once.

        Args:
            num_models: Number K of models.
        """
        return self.length * (num_models if self.budget == "ages" else 1)

    @property
    def rounds_text(self) -> str:
        """The number of rounds as text, either a number or a multiple of K."""
        return f"{self.length} K" if self.budget == "ages" else str(self.length)

    @property
    def text(self) -> str:
        """The settings of the fit as text for titles of figures: local steps, rounds, sigma and data seed."""
        return (
            f"{self.local_steps} local steps, {self.rounds_text} rounds, sigma {self.sigma:.2f}, data {self.data_seed}"
        )


def _problem(
    settings: BiasVarianceSettings, seed: int, local_steps: int, sigma: float = 1.0
) -> bias_variance.ToyProblem:
    draw = partial(bias_variance.sine_problem, seed, local_steps=local_steps, sigma=sigma)
    return draw(num_clients=settings.num_clients, points_per_client=settings.points_per_client)


def _nearest(fits: Iterable[Fit]) -> Fit:
    return min(fits, key=lambda f: f.distance)


def _fit(curve: ScanCurve, reading: str) -> Fit:
    """Fits the initial standard deviation of a choice of settings to the published variances.

    ``reading`` says whether the published bias is taken as squared ("squared") or not ("root").
    """
    published = np.array([PUBLISHED[k] for k in curve.num_models])
    variance = SIGMAS[:, None] ** 2 * curve.initialisation + curve.schedules
    misses = np.log(variance / published[:, 1])
    best = int(np.argmin(np.sum(misses**2, axis=1)))
    bias = np.log(np.maximum(curve.bias, 1e-12) ** READINGS[reading] / published[:, 0])
    both = np.concatenate([misses[best], bias])
    sizes = [float(np.sqrt(np.mean(part**2))) for part in (misses[best], bias, both)]
    factors = float(np.exp(sizes[0])), float(np.exp(sizes[1]))
    return Fit(*curve[:4], float(SIGMAS[best]), reading, *factors, sizes[2])


def check(study: Study) -> None:
    """Raises ``ValueError`` for a number of models K without published values."""
    if not set(study.settings.num_models) <= set(PUBLISHED):
        raise ValueError(f"num_models: got {study.settings.num_models}, allowed are {', '.join(map(str, PUBLISHED))}")


def run(study: Study) -> lab.Outcome:
    """Computes table I for all settings in closed form, and simulates the settings nearest to the published numbers.

    There are two nearest settings: one with equal rounds at every K, one with K times as many rounds.
    """
    settings, scanned, by_budget, rows = study.settings, list[ScanCurve](), dict[str, Pairs](), list[lab.Row]()
    for seed in study.each_seed():
        scanned += _curves(settings, seed)
    tried = lab.grouped([_fit(curve, reading) for curve in scanned for reading in READINGS], "budget", "reading")
    fits = [_nearest(tried[place]) for place in itertools.product(BUDGETS, READINGS)]
    nearest = {b: _nearest(f for f in fits if f.budget == b) for b in BUDGETS}
    for budget, choice in nearest.items():
        problem, pairs = _problem(settings, choice.data_seed, choice.local_steps, choice.sigma), Pairs()
        for k in settings.num_models:
            pairs[k] = sine.decomposed(problem, k, choice.num_rounds(k), settings.schedules, settings.draws)
            row = {"budget": budget, "num_models": k, "num_rounds": choice.num_rounds(k)}
            row |= dict(zip(("published_bias", "published_variance"), PUBLISHED[k], strict=True))
            rows.append(row | dict(zip(("closed_form", "simulated"), pairs[k], strict=True)))
            for kind, d in zip(("closed_form", "fed_ensemble"), pairs[k], strict=True):
                values = {n: getattr(d, n).value for n in ("bias", "variance", "initialisation", "schedules")}
                study.keep(lab.metric_rows(f"{kind} K={k}", choice.data_seed, choice.num_rounds(k), values, "test"))
        by_budget[budget] = pairs
        study.say(f"simulated {settings.schedules} schedules of {settings.draws} initialisations: {choice.text}")
    checks = [_deviations(budget, pairs) for budget, pairs in by_budget.items()]
    verdicts = tuple(_verdict(settings, c, len(checks)) for c in checks)
    _draw(study, nearest, by_budget)
    sheets = [_comparison(choice, [r for r in rows if r["budget"] == b]) for b, choice in nearest.items()]
    sheets += [_mechanism(settings, nearest["rounds"], by_budget["rounds"]), _scan_sheet(fits)]
    details = {"published": PUBLISHED, "fits": [f._asdict() for f in fits], "checks": checks}
    return lab.Outcome(tuple(sheets), rows, (), details, _remarks(fits, checks), lab.disagreeing(verdicts), verdicts)


def _deviations(budget: str, pairs: Pairs) -> lab.Row:
    """Computes by how many standard errors simulated bias and variance differ from the closed form, the largest over K.

    The row also has the deviations from two wrong theories at the largest K: variance not divided by K, and schedules
    left out. ``pairs`` has the closed form and the simulation by K; ``budget`` is "rounds" or "ages", as in
    ``ScanCurve``.
    """
    largest = max(pairs)
    exact, simulated = pairs[largest]
    wrong = abs(simulated.variance.value - largest * exact.variance.value) / simulated.variance.standard_error
    return {
        "budget": budget,
        "variance": max(abs(sine.apart(b.variance, a.variance)) for a, b in pairs.values()),
        "bias": max(abs(sine.apart(b.bias, a.bias)) for a, b in pairs.values()),
        NOT_DIVIDED: wrong,
        "control, schedules left out": simulated.schedules.value / simulated.schedules.standard_error,
    }


def _verdict(settings: BiasVarianceSettings, c: lab.Row, budgets: int) -> ft.types.Verdict:
    """Judges by the row ``c`` of ``_deviations`` whether simulation agrees with the closed form for every K.

    ``budgets`` is the number of such verdicts, for the Bonferroni correction.
    """
    allowed, control = sine.allowed(settings.schedules, budgets * 2 * len(settings.num_models)), c[NOT_DIVIDED]
    measured, holds = f"variance {c['variance']:.1f} SE, bias {c['bias']:.1f} SE at most", max(c["variance"], c["bias"])
    right = measured, f"<= {allowed:.1f} SE", holds <= allowed
    wrong = "variance not divided by K", f"{control:.0f} SE", control > allowed
    statement, sizes = "simulation is the closed form", BUDGETS[c["budget"]]
    return ft.types.Verdict.of("FE-2021 eq. (3)", statement, sizes, right, wrong)


def _comparison(choice: Fit, rows: list[lab.Row]) -> lab.Sheet:
    entries = []
    for row in rows:
        exact, simulated = row["closed_form"], row["simulated"]
        roots = {"root": exact.bias.value**0.5, "simulated_root": max(simulated.bias.value, 0) ** 0.5}
        entries.append({**row, **roots, "apart": sine.apart(simulated.variance, exact.variance)})
    columns = "K: {num_models} | rounds: {num_rounds} | paper bias: {published_bias:.3f} | bias^.5: {root:.3f} | "
    columns += "simulated: {simulated_root:.3f} | bias: {closed_form.bias.value:.4f} | "
    columns += "paper variance: {published_variance:.4f} | closed form: {closed_form.variance.value:.4f} | "
    columns += "from schedules: {closed_form.schedules.value:.5f} | simulated variance: "
    columns += "{simulated.variance.value:.4f} +- {simulated.variance.standard_error:.4f} | apart, SE: {apart:+.1f}"
    return lab.table(f"table I, {BUDGETS[choice.budget]}: {choice.text}", entries, columns)


def _mechanism(settings: BiasVarianceSettings, choice: Fit, pairs: Pairs) -> lab.Sheet:
    """Builds the table of the reasons why the variance of an ensemble of K models does not fall as 1/K.

    With more models, each model is trained by fewer clients in the same number of rounds, and the schedules are random.
    The table has K times each part of the variance, and how much a model is trained, for every K.

    Args:
        settings: Settings of the study.
        choice: The scanned settings nearest to the published numbers.
        pairs: Bias and variance by K, in closed form (shown here) and simulated.
    """
    rows = []
    for k, (exact, _) in pairs.items():
        parts = {"initial": k * exact.initialisation.value, "schedules": k * exact.schedules.value}
        shares = {"pull": 1 - (1 - 1 / k) ** settings.num_clients, "share": min(choice.num_rounds(k) / k, 1)}
        rows.append({"k": k, "paper": k * PUBLISHED[k][1], **parts, **shares})
    columns = "K: {k} | paper: K variance: {paper:.3f} | initialisation: {initial:.3f} | "
    columns += "schedules: {schedules:.3f} | expected pull: {pull:.3f} | clients seen: {share:.2f}"
    return lab.table("what breaks 1/K: variance of one model, K times the ensemble's", rows, columns)


def _scan_sheet(fits: list[Fit]) -> lab.Sheet:
    rows = [{**f._asdict(), "label": BUDGETS[f.budget], "rounds": f.rounds_text} for f in fits]
    columns = "budget, reading of the bias: {label}, {reading} | data: {data_seed} | local steps: {local_steps} | "
    columns += "rounds: {rounds} | sigma: {sigma:.2f} | variance off by: x {variance_factor:.2f} | "
    columns += "bias off by: x {bias_factor:.2f}"
    return lab.table("the setting nearest to the paper's ten numbers (root mean square factor)", rows, columns)


def _remarks(fits: list[Fit], checks: list[lab.Row]) -> tuple[str, ...]:
    reading, out = min(fits, key=lambda f: f.distance).reading, "control, schedules left out"
    return (
        "SE: standard errors over schedules. bias^.5: root of the squared bias, the reading nearer to the paper's bias"
        if reading == "root"
        else "The squared bias is the reading nearer to the paper's bias",
        "expected pull: a client's mean weight per round relative to K = 1, 1 - (1 - 1/K)^N: a model with no client in "
        "a round does not move. clients seen: share of clients that have trained a model by the end.",
        f"step size 1 / max Theta(x, x); the schedules' part is {', '.join(f'{c[out]:.1f}' for c in checks)} SE from 0",
    )


def _draw(study: Study, nearest: dict[str, Fit], by_budget: dict[str, Pairs]) -> None:
    panels = {}
    for budget, choice in nearest.items():
        pairs = by_budget[budget].items()
        panels[f"{BUDGETS[budget]}\n{choice.text}"] = {
            "predicted": Points({k: (a.variance.value, 0.0) for k, (a, _) in pairs}, True),
            "predicted, schedules' part": Points({k: (a.schedules.value, 0.0) for k, (a, _) in pairs if k > 1}, True),
            "simulated": Points({k: (b.variance[0], b.variance[1]) for k, (_, b) in pairs}, False),
            "published": Points({k: (PUBLISHED[k][1], 0.0) for k, _ in pairs}, False),
        }
    variance_against_models(panels, "variance of the ensemble average (table I)", study.figures.path("table1"))


SMALL = BiasVarianceSettings()
PAPER = with_changes(
    SMALL,
    "local_steps=1,10,100,1000 rounds=5,8,10,12,15,20,25,35,50,100,200 ages=1,2,3,5,10",
    "scanned_schedules=10 schedules=100",
)
DEFAULT = with_changes(SMALL, "local_steps=1,10,100 schedules=50")
SCALES = {"sine": by_scale(SMALL, DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), check=check, exact=True),)
