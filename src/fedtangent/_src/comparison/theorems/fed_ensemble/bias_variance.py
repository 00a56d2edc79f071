"""Corollary 1 and the bias-variance decomposition, on the linear toy: simulation against the closed form.

The toy's model is linear, so theory is exact at its one width: sampled quantities need no extrapolation in the width,
and must be within a margin of the closed form. Both sides use the same schedules. Each output of a run is an
independent initialisation; estimates come from independent batches of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from fedtangent._src.comparison.settings import exact_arithmetic
from fedtangent._src.comparison.statistics import Interval, combined
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.theorems.fed_ensemble import repeated_runs
from fedtangent._src.comparison.theorems.fed_ensemble.repeated_runs import ToyProblem
from fedtangent._src.comparison.verdicts import EXACT, Rival, Verdict, judged
from fedtangent._src.theory.fed_ensemble.bias_variance import Decomposition, corollary_1, decompose_laws, decompose_runs
from fedtangent._src.theory.prior import prior_blocks

NUM_MODELS = (1, 2, 4, 8)
LAST = max(NUM_MODELS)
CLIENTS = 24
STEPS, LIMIT_STEPS = 2, 10  # local steps: few enough that their number matters; enough to reach the limit
BIAS_MARGIN, MARGIN, LIMIT_MARGIN = 0.15, 0.05, 0.1  # of the closed form
BATCHES = 64
SIZES = (8, 2048, 8), (32, 2048, 16)  # schedules, initialisations of each, rounds: of the decomposition
LIMIT_SIZES = (4, 1024, 16), (12, 1024, 60)  # of the corollary, rounds for each model
SOONER = 8  # the corollary's last round, over an earlier one that must not have reached the limit
DECOMPOSED, COROLLARY = "FE-2024 eq. (10), FE-2021 eq. (3)", "FE-2024 Corollary 1, eq. (11)"


def _checks(scale: str, seed: int) -> list[Verdict]:
    """Checks Corollary 1 at its limit, and every term of eq. (10) / (3) after a few rounds."""
    with exact_arithmetic():
        return _corollary(seed, *of_scale(scale, *LIMIT_SIZES)) + _decomposition(seed, *of_scale(scale, *SIZES))


def _corollary(seed: int, schedules: int, draws: int, ages: int) -> list[Verdict]:
    """Checks Corollary 1 for every K: the mean of K models has the variance k(x, x) / K."""
    problem = repeated_runs.spaced_problem(seed, LIMIT_STEPS)
    clients = problem.clients.num_clients
    ratios: dict[int, np.ndarray] = {}
    late, early = 0.0, 0.0
    for k in NUM_MODELS:
        schedule, seeds = repeated_runs.permutations(clients, k), repeated_runs.seeds_of(k, schedules, seed)
        num_rounds = ages * max(k, 4)
        mean, variance = corollary_1(problem.blocks, problem.y, k)[:2]
        assert mean is not None and variance is not None
        limit = float(variance.mean())
        runs = repeated_runs.simulated(problem, schedule, num_rounds, seeds, draws)
        ratios[k] = np.mean((runs - mean) ** 2, axis=(2, 3)).ravel() / limit
        for laws in repeated_runs.laws(problem, schedule, (num_rounds // SOONER, num_rounds), seeds):
            off = [float(np.mean(law.variance + ((law.mean - mean) ** 2)[:, 0])) / limit - 1 for law in laws]
            early, late = np.maximum((early, late), np.abs(off))
    prior, cross, test = prior_blocks(problem.blocks)
    b = np.linalg.solve(problem.blocks.ntk_train, problem.blocks.ntk_test_train.T).T
    whole = np.trace(test + b @ prior @ b.T - 2 * b @ cross.T)
    wrong = {
        **{f"K - 1 instead of K = {k}": (k / (k - 1), k) for k in NUM_MODELS[1:]},
        "cross terms once": (float(np.trace(test + b @ prior @ b.T - b @ cross.T) / whole), 1),
        "the prior's variance": (float(np.trace(test) / whole), 1),
    }
    rivals = [Rival(name, abs(1 / by - 1), partial(_mean, ratios[k] / by)) for name, (by, k) in wrong.items()]
    sizes = (
        f"RBF-linear sine toy, n = {len(problem.x)} on {clients} unequal clients, "
        f"K = {', '.join(map(str, NUM_MODELS))}, round {ages * LAST} (of the largest K), "
        f"{schedules} schedules x {draws} initialisations"
    )
    close = 0.1 * LIMIT_MARGIN
    flow = "variance and bias of the exact flow's ensemble are the corollary's: relative distance, largest over K"
    reached = Claim(COROLLARY, flow, sizes).judged(
        (f"{late:.1e}", f"<= {close:g}", late <= close),
        (f"{SOONER} times sooner", f"{early:.1e}", early > close),
        f"{close:.0%}",
    )
    claim = Claim(COROLLARY, "squared distance of the ensemble from m(x) / (k(x, x) / K), the worst K", sizes)
    return [_judged(claim, LIMIT_MARGIN, list(ratios.values()), rivals), reached]


def _mean(values: np.ndarray) -> Interval:
    """Returns the mean of independent ``values`` [n] with its interval; the model has one width."""
    return combined((1,), (values,))


def _judged(claim: Claim, margin: float, values: list[np.ndarray], rivals: list[Rival]) -> Verdict:
    """Checks that the mean of each of ``values`` is 1 to ``margin``."""
    estimates = [_mean(ratios) for ratios in values]
    verdict = judged(claim.theorem, claim.statement, 1.0, margin, estimates, rivals)
    return verdict._replace(sizes=claim.sizes, notices=f"{margin + max(e.length for e in estimates):.1%}")


def _decomposition(seed: int, schedules: int, draws: int, num_rounds: int) -> list[Verdict]:
    """Checks every term of the decomposition for ``LAST`` models against its closed form under the same schedules."""
    problem = repeated_runs.sine_problem(seed, local_steps=STEPS, num_clients=CLIENTS)
    schedule, seeds = repeated_runs.permutations(CLIENTS, LAST), repeated_runs.seeds_of(LAST, schedules, seed)

    def law(problem: ToyProblem) -> Decomposition:
        laws = repeated_runs.laws(problem, schedule, (num_rounds,), seeds)
        return decompose_laws([law[0] for law in laws], problem.expected, problem.noise)

    exact = law(problem)
    other = {f"{steps} local steps for {STEPS}": law(problem._replace(local_steps=steps)) for steps in (1, 3)}
    runs = repeated_runs.simulated(problem, schedule, num_rounds, seeds, draws)
    batches = [decompose_runs(part, problem.expected, problem.noise) for part in np.array_split(runs, BATCHES, axis=1)]
    sizes = (
        f"RBF-linear sine toy, N = {CLIENTS}, K = {LAST}, round {num_rounds}, {schedules} schedules x "
        f"{draws} initialisations"
    )

    def part(name: str, margin: float, more: Mapping[str, float]) -> Verdict:
        """Checks one term; ``more`` are wrong values of it, by name, in addition to ``other``."""
        wrong = {mistake: getattr(terms, name).value for mistake, terms in other.items()} | dict(more)
        values, right = np.array([getattr(b, name).value for b in batches]), getattr(exact, name).value
        rivals = [Rival(mistake, abs(right / by - 1), partial(_mean, values / by)) for mistake, by in wrong.items()]
        claim = Claim(DECOMPOSED, f"{name} of the ensemble of {LAST} / its closed form", sizes)
        return _judged(claim, margin, [values / right], rivals)

    return [
        part("bias", BIAS_MARGIN, {"variance not subtracted": exact.bias.value + exact.variance.value}),
        part("initialisation", MARGIN, {"K - 1 instead of K": LAST / (LAST - 1) * exact.initialisation.value}),
        _error(problem, exact, runs, seed, sizes),
        _schedules(seed, schedules, num_rounds),
    ]


def _error(problem: ToyProblem, exact: Decomposition, runs: np.ndarray, seed: int, sizes: str) -> Verdict:
    """Checks that ``E (y - h)^2`` on fresh labels of fresh clients equals the sum of the three terms in closed form."""
    rng = np.random.default_rng(seed)
    amplitude, noise = rng.normal(1.0, 0.2, runs.shape), rng.normal(0.0, 0.2, runs.shape)
    errors = np.mean((amplitude * np.sin(2 * np.pi * problem.x_test) + noise - runs) ** 2, axis=(2, 3)).ravel()
    total, variance = exact.total.value, exact.variance.value
    wrong = {
        "bias of h, not of its mean, as FE-2024 prints": total + variance,
        "no data uncertainty": total - exact.noise,
        "no variance": total - variance,
    }
    rivals = [Rival(mistake, abs(total / by - 1), partial(_mean, errors / by)) for mistake, by in wrong.items()]
    statement = "mean squared error on fresh labels / (data uncertainty + bias (of the mean of h, FE-2021) + variance)"
    return _judged(Claim(DECOMPOSED, statement, sizes), MARGIN, [errors / total], rivals)


def _schedules(seed: int, schedules: int, num_rounds: int) -> Verdict:
    """Checks the schedules' part of the variance to rounding; models start at 0 and differ only by schedule."""
    problem = repeated_runs.sine_problem(seed, local_steps=STEPS, sigma=0.0, num_clients=CLIENTS)
    schedule, seeds = repeated_runs.permutations(CLIENTS, LAST), repeated_runs.seeds_of(LAST, schedules, seed)
    laws = repeated_runs.laws(problem, schedule, (num_rounds,), seeds)
    runs = repeated_runs.simulated(problem, schedule, num_rounds, seeds, 1)[:, 0]
    exact = decompose_laws([law[0] for law in laws], problem.expected).variance.value
    variance = decompose_runs(runs, problem.expected).variance.value
    biased = exact * (schedules - 1) / schedules
    return Claim(
        DECOMPOSED,
        "variance that the schedules alone add (all models start at 0): simulation = closed form to 1e-9",
        f"RBF-linear sine toy, N = {CLIENTS}, K = {LAST}, round {num_rounds}, {schedules} schedules",
    ).judged(
        (f"{variance:.6g}", f"{exact:.6g}", abs(variance - exact) <= EXACT * exact),
        ("divided by S instead of S - 1", f"{biased:.6g}", abs(variance - biased) > EXACT * exact),
        f"{EXACT:.0e}",
    )


ENTRIES = (
    TheoremEntry(
        "fed_ensemble.bias_variance",
        "the variance of an ensemble against its size, and the decomposition of its error",
        _checks,
        papers=("shi2024", "shi2021"),
        statement="Corollary 1 and eq. (10) of FE-2024 (4.1 and eq. 3 of FE-2021)",
        functions=(corollary_1, decompose_laws, decompose_runs),
        figures=("fed_ensemble.corollary1", "fed_ensemble.table1"),
    ),
)
