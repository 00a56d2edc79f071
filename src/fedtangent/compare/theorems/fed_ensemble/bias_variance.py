"""Corollary 1 and the bias-variance decomposition, on the linear toy: simulation against the closed form."""

from __future__ import annotations

import numpy as np
from scipy.stats import t as student

from fedtangent.compare.settings import exact_arithmetic
from fedtangent.compare.statistics import NUM_STANDARD_ERRORS, SIGNIFICANCE, Slope
from fedtangent.compare.theorems import TheoremEntry, of_scale
from fedtangent.compare.theorems.fed_ensemble import repeated_runs
from fedtangent.compare.theorems.fed_ensemble.repeated_runs import ToyProblem, power_law
from fedtangent.compare.verdicts import EXACT, Verdict
from fedtangent.theory.fed_ensemble.bias_variance import (
    Decomposition,
    Estimate,
    corollary_1,
    decompose_laws,
    decompose_runs,
)

NUM_MODELS = (1, 2, 4, 8)
LAST = max(NUM_MODELS)
SIZES = (16, 16, 30), (60, 40, 100)  # schedules, initialisations of each, rounds
CLIENTS = 24


def checks(scale: str, seed: int) -> list[Verdict]:
    """Corollary 1 (slope and value) and eq. (10) / (3) with both of the variance's parts."""
    schedules, draws, num_rounds = of_scale(scale, *SIZES)
    with exact_arithmetic():
        problem = repeated_runs.sine_problem(seed, local_steps=10, gap=True, num_clients=CLIENTS)
        exact, seen, runs = {}, {}, {}
        for k in NUM_MODELS:
            plan = repeated_runs.permutations(CLIENTS, k)
            seeds = repeated_runs.seeds_of(k, schedules, seed)
            laws = repeated_runs.laws(problem, plan, (num_rounds,), seeds)
            runs[k] = repeated_runs.simulated(problem, plan, num_rounds, seeds, draws)
            exact[k] = decompose_laws([law[0] for law in laws], problem.expected, problem.noise)
            seen[k] = decompose_runs(runs[k], problem.expected, problem.noise)
    sizes = (
        f"RBF-linear sine toy with a gap, N = {CLIENTS}, K = {', '.join(map(str, NUM_MODELS))}, round {num_rounds}, "
        f"{schedules} schedules x {draws} initialisations"
    )
    return [
        _slope(exact, seen, sizes),
        *_parts(exact[LAST], seen[LAST], schedules, sizes),
        _schedules(seed, schedules, num_rounds),
        _identity(runs[LAST], seen[LAST], problem, sizes),
        _limit(problem, sizes, num_rounds),
    ]


def _slope(exact: dict[int, Decomposition], seen: dict[int, Decomposition], sizes: str) -> Verdict:
    found = power_law({k: d.variance for k, d in seen.items()})
    predicted = power_law({k: d.variance for k, d in exact.items()}).slope
    undivided = power_law({k: _times(d.variance, k) for k, d in seen.items()})
    return Verdict.of(
        "FE-2024 Corollary 1, eq. (11)",
        "slope of log variance of the ensemble average in log K (exact flow, corollary: -1)",
        sizes,
        (f"{found.slope:.3f} +- {found.standard_error:.3f}", f"{predicted:.3f}", _agrees(found, predicted)),
        ("not divided by K", f"slope {undivided.slope:.3f}", not _agrees(undivided, predicted)),
    )


def _times(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(factor * estimate.value, factor * estimate.standard_error)


def _agrees(found: Slope, predicted: float) -> bool:
    return abs(found.slope - predicted) <= NUM_STANDARD_ERRORS * found.standard_error


def _parts(exact: Decomposition, seen: Decomposition, schedules: int, sizes: str) -> list[Verdict]:
    """Bias, and the initial functions' part of the variance, each beside the number that a wrong theory gives."""
    allowed = float(student.ppf(1 - SIGNIFICANCE / 2, schedules - 1))
    wrong = {
        "bias": ("not squared", exact.bias.value**0.5),
        "initialisation": (f"K ignored, K = {LAST}", LAST * exact.initialisation.value),
    }
    rows = []
    for name, (control, value) in wrong.items():
        a, b = getattr(exact, name), getattr(seen, name)
        off = abs(b.value - value) / b.standard_error
        rows.append(
            Verdict.of(
                "FE-2024 eq. (10), FE-2021 eq. (3)",
                f"{name} of the ensemble of {LAST}: simulation = closed form, within {allowed:.1f} standard errors",
                sizes,
                (
                    f"{b.value:.4g} +- {b.standard_error:.2g}",
                    f"{a.value:.4g}",
                    abs(b.value - a.value) <= allowed * b.standard_error,
                ),
                (control, f"{off:.1f} standard errors away", not off <= allowed),
            )
        )
    return rows


def _schedules(seed: int, schedules: int, num_rounds: int) -> Verdict:
    """The schedules' part alone: models that all start at zero differ by nothing else, and must agree to rounding."""
    with exact_arithmetic():
        problem = repeated_runs.sine_problem(seed, local_steps=10, sigma=0.0, num_clients=CLIENTS)
        plan = repeated_runs.permutations(CLIENTS, LAST)
        laws = repeated_runs.laws(problem, plan, (num_rounds,), range(seed, seed + schedules))
        runs = repeated_runs.simulated(problem, plan, num_rounds, range(seed, seed + schedules), 1)[:, 0]
        exact = decompose_laws([law[0] for law in laws], problem.expected).variance.value
    seen = decompose_runs(runs, problem.expected).variance.value
    return Verdict.of(
        "FE-2024 eq. (10), FE-2021 eq. (3)",
        "variance that the schedules alone add (all models start at 0): simulation = closed form to 1e-9",
        f"RBF-linear sine toy, N = {CLIENTS}, K = {LAST}, round {num_rounds}, {schedules} schedules",
        (f"{seen:.6g}", f"{exact:.6g}", abs(seen - exact) <= EXACT * exact),
        ("divided by K again", f"{exact / LAST:.3g}", abs(seen - exact / LAST) > EXACT * exact),
    )


def _identity(runs: np.ndarray, seen: Decomposition, problem: ToyProblem, sizes: str) -> Verdict:
    """``E (y - h)^2`` over all runs, as it is and as the sum of its terms."""
    error = float(np.mean((runs - problem.expected) ** 2)) + problem.noise
    bias = float(np.mean((runs.mean(axis=(0, 1)) - problem.expected) ** 2))
    variance = float(np.mean(runs.var(axis=(0, 1))))
    printed = problem.noise + float(np.mean((runs - problem.expected) ** 2)) + variance
    terms = problem.noise + bias + variance
    return Verdict.of(
        "FE-2024 eq. (10), FE-2021 eq. (3)",
        "mean squared error = data uncertainty + bias (of the mean of h, FE-2021) + variance, over the same runs",
        sizes,
        (f"{error:.6g}", f"{terms:.6g}", abs(error - terms) <= EXACT * error),
        (
            "bias of h itself, as FE-2024 prints it",
            f"{printed:.6g}, off by the variance {seen.variance.value:.3g}",
            abs(error - printed) > EXACT * error,
        ),
    )


def _limit(problem: ToyProblem, sizes: str, num_rounds: int) -> Verdict:
    """Corollary 1's assumption on Theta, and how far the finite round is from its limit."""
    with exact_arithmetic():
        found = corollary_1(problem.blocks, problem.y, LAST)
        plan = repeated_runs.permutations(CLIENTS, 1)
        rounds = (num_rounds, 30 * num_rounds)
        laws = repeated_runs.laws(problem, plan, rounds, range(1))[0]
    limit = float("nan") if found.limit is None else LAST * float(found.limit.mean())
    early, late = (float(law.variance.mean()) for law in laws)
    untrained = float(np.mean(np.diag(problem.blocks.nngp_test)))  # type: ignore[arg-type]
    return Verdict.of(
        "FE-2024 Corollary 1, eq. (11)",
        "variance of one model falls towards k(x, x) from above as rounds go on, and has not reached it",
        sizes,
        (
            f"{early:.3f} at round {rounds[0]}, {late:.3f} at round {rounds[1]}",
            f"limit {limit:.3f} (jitter added to its diagonal: {found.assumptions[0].measured:.3g})",
            bool(limit < late < early),
        ),
        ("untrained", f"{untrained:.3f}", untrained > early),
    )


ENTRIES = (
    TheoremEntry(
        "fed_ensemble.bias_variance",
        "the variance of an ensemble against its size, and the decomposition of its error",
        checks,
        papers=("shi2024", "shi2021"),
        statement="Corollary 1 and eq. (10) of FE-2024 (4.1 and eq. 3 of FE-2021)",
    ),
)
