"""NTK-FL, fig. 6: accuracy of CP-NTK-FL after 10 rounds over the sampling rate beta and the projection's d1'."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtangent._src.experiments.lab import cohort_report as report
from fedtangent._src.experiments.lab.cohort import DIGITS, IMAGES, CohortSettings
from fedtangent._src.experiments.lab.results import Claim, Outcome, Sheet, interval
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.experiments.lab.runs import Runs
from fedtangent._src.output.line_plots import heat_map

CLAIM = "a larger beta or d1' gives a higher accuracy, and all are near each other: 81.9 to 85.0 %"
# The paper's fig. 6, per cent on Fashion-MNIST, alpha = .1, after 10 rounds: rows beta, columns d1'.
PUBLISHED = {
    0.7: (82.9, 84.1, 84.3, 84.7, 84.8, 84.6),
    0.6: (83.1, 83.8, 84.8, 84.4, 84.5, 85.0),
    0.5: (82.8, 83.9, 84.4, 84.6, 84.4, 84.9),
    0.4: (82.4, 83.8, 84.3, 84.4, 84.4, 84.5),
    0.3: (82.4, 83.5, 84.2, 84.4, 84.1, 84.2),
    0.2: (81.9, 83.2, 83.7, 84.2, 84.5, 84.6),
}
PUBLISHED_DIMENSIONS = (100, 200, 300, 400, 500, 600)


@dataclass(frozen=True)
class BetaSettings(CohortSettings):
    """A comparison's settings and the two axes; the rate is chosen at ``beta`` and ``projected``."""

    betas: tuple[float, ...] = within((0.7, 0.6, 0.5, 0.4, 0.3, 0.2), above=0, at_most=1, count=2)
    dimensions: tuple[int, ...] = within(PUBLISHED_DIMENSIONS, count=2)


OWN: dict[str, Any] = {
    "methods": ("cp_ntk_fl",), "alpha": 0.1, "beta": 0.4, "num_rounds": 10, "reference_rounds": 10, "window": 1,
    "tuning_rounds": 10,
}  # fmt: skip
SOME: dict[str, Any] = {"projected": 16, "betas": (0.7, 0.4, 0.2), "dimensions": (8, 16, 48)}
SMALL: dict[str, Any] = {"projected": 300, "betas": (0.7, 0.2), "dimensions": (100, 300)}
WHOLE: dict[str, Any] = {"projected": 16, "dimensions": (8, 16, 24, 32, 48, 64)}
SCALES = {
    "digits": by_scale(BetaSettings(**{**DIGITS, **OWN}, **SOME), BetaSettings(**{**DIGITS, **OWN}, **WHOLE)),
    "fashion_mnist": by_scale(BetaSettings(**{**IMAGES, **OWN}, **SMALL), paper=BetaSettings(**OWN, projected=300)),
}


def check(study: Study) -> None:
    """Builds the method at the largest dimension; raises ``ValueError``."""
    if study.settings.methods != ("cp_ntk_fl",):
        raise ValueError(f"methods: got {', '.join(study.settings.methods)}, must be cp_ntk_fl")
    report.check(study, projected=max(study.settings.dimensions))


def run(study: Study) -> Outcome:
    """Chooses the rate at ``beta`` and ``projected``, and runs every cell with it."""
    s, found = study.settings, dict[tuple[float, int], Runs]()
    tuned = report.tune_all(report.bench_of(study))
    for beta, dimension in itertools.product(s.betas, s.dimensions):
        study.say(f"beta {beta:g}, d1' {dimension}")
        found[beta, dimension] = report.repeat_all(report.bench_of(study, beta=beta, projected=dimension), tuned)
    ends = {at: report.ends(runs, s)["cp_ntk_fl"] for at, runs in found.items()}
    rows = [{"beta": b, "d1": d, "accuracy": float(v.mean()), "seeds": v, "published": published(b, d)}
            for (b, d), v in ends.items()]  # fmt: skip
    values = np.array([[100 * ends[b, d].mean() for d in s.dimensions] for b in s.betas])
    axes = {"beta": [f"{b:g}" for b in s.betas], "d1'": [str(d) for d in s.dimensions]}
    path, title = study.figures.path("accuracy_by_beta_and_dimension"), f"CP-NTK-FL, round {s.num_rounds}"
    heat_map(values, axes, "test accuracy, %", f"{study.dataset}, {title}", path)
    runs = {f"beta {b:g}, d1' {d}: ": of for (b, d), of in found.items()}
    return report.outcome(study, CLAIM, tuned, (_table(s, ends),), rows, judge(s, ends), runs)


def published(beta: float, dimension: int) -> float | None:
    """Returns the paper's accuracy of a cell, as a share; None if the paper has no such cell."""
    if beta not in PUBLISHED or dimension not in PUBLISHED_DIMENSIONS:
        return None
    return PUBLISHED[beta][PUBLISHED_DIMENSIONS.index(dimension)] / 100


def judge(s: BetaSettings, ends: dict[tuple[float, int], np.ndarray]) -> tuple[Claim, ...]:
    """Judges the largest against the smallest value of each axis, averaged over the other axis, paired by seed."""
    top, low = max(s.betas), min(s.betas)
    most, least = max(s.dimensions), min(s.dimensions)
    by_beta = interval(np.mean([ends[top, d] - ends[low, d] for d in s.dimensions], axis=0))
    by_size = interval(np.mean([ends[b, most] - ends[b, least] for b in s.betas], axis=0))
    means = [float(v.mean()) for v in ends.values()]
    cells = f"all cells are between {min(means):.4f} and {max(means):.4f}"
    return (
        Claim(f"beta {top:g} is above {low:g}", f"by {by_beta:+.4f}; {cells}", by_beta.above()),
        Claim(f"d1' {most} is above {least}", f"by {by_size:+.4f}", by_size.above()),
    )


def _table(s: BetaSettings, ends: dict[tuple[float, int], np.ndarray]) -> Sheet:
    rows = []
    for b in s.betas:
        paper = [published(b, d) for d in s.dimensions]
        own = (f"{100 * ends[b, d].mean():.1f}" for d in s.dimensions)
        cells = (f"{v}" if p is None else f"{v} ({100 * p:.1f})" for v, p in zip(own, paper, strict=True))
        rows.append((f"{b:g}", *cells))
    title = (
        f"accuracy in % after {s.num_rounds} rounds, over beta (down) and d1' (across), the rate chosen at beta "
        f"{s.beta:g} and d1' {s.projected}; in brackets the paper's, on Fashion-MNIST"
    )
    return Sheet(title, ("beta", *map(str, s.dimensions)), tuple(rows))


ENTRIES = (experiment(__name__, run, SCALES, ("yue2022",), check=check, least_seeds=2),)
