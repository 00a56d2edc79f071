"""Which of the choices that the papers leave open come nearest to table I of FE-2024, by the closed form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from fedtangent.compare.theorems.fed_ensemble import repeated_runs
from fedtangent.theory.fed_ensemble.bias_variance import decompose_laws

# Published (FE-2024, table I; FE-2021, table 1): K -> bias, variance.
PUBLISHED = {1: (0.109, 0.0496), 2: (0.117, 0.0115), 10: (0.112, 0.0063), 20: (0.113, 0.0045), 40: (0.112, 0.0042)}
# FE-2024 counts communication rounds; FE-2021 ages of K rounds, in which every client trains every model once.
BUDGETS = {"rounds": "the same rounds for every K", "ages": "rounds in proportion to K"}
READINGS = {"squared": 1.0, "root": 0.5}
SIGMAS = np.exp(np.linspace(np.log(0.02), np.log(20.0), 400))  # initial standard deviations that are tried


class Curve(NamedTuple):
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


def curves(settings: Any, seed: int) -> list[Curve]:
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
        found += [Curve(seed, steps, b, n, tuple(settings.num_models), *np.array(terms[b, n]).T) for b, n in lengths]
    return found


def best_fits(found: Iterable[Curve]) -> list[Fit]:
    """The nearest choice for each budget and each reading of the bias."""
    each = [fit(curve, reading) for curve in found for reading in READINGS]
    return [
        min((f for f in each if (f.budget, f.reading) == (b, r)), key=lambda f: f.distance)
        for b in BUDGETS for r in READINGS
    ]  # fmt: skip


def fit(curve: Curve, reading: str) -> Fit:
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
