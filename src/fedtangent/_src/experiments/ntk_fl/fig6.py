"""NTK-FL, fig. 6: accuracy of CP-NTK-FL after 10 rounds over the sampling rate beta and the projection's d1'."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab import harness
from fedtangent._src.experiments.lab.harness import Runs
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.experiments.ntk_fl import baselines
from fedtangent._src.experiments.ntk_fl.baselines import DIGITS, IMAGES, BaselineSettings, Report
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
class BetaSettings(BaselineSettings):
    """A comparison's settings and the two axes; the rate is chosen at ``beta`` and ``projected``."""

    betas: tuple[float, ...] = within((0.7, 0.6, 0.5, 0.4, 0.3, 0.2), above=0, at_most=1, count=2)
    dimensions: tuple[int, ...] = within(PUBLISHED_DIMENSIONS, count=2)


TEN = "methods=cp_ntk_fl alpha=0.1 beta=0.4 num_rounds=10 reference_rounds=10 window=1 tuning_rounds=10"
ON_DIGITS = with_changes(BetaSettings(), DIGITS, TEN, "projected=16")
PAPER = with_changes(BetaSettings(), TEN, "projected=300")
SCALES = {
    "digits": by_scale(
        with_changes(ON_DIGITS, "betas=0.7,0.4,0.2 dimensions=8,16,48"),
        with_changes(ON_DIGITS, "dimensions=8,16,24,32,48,64"),
    ),
    "fashion_mnist": by_scale(with_changes(PAPER, IMAGES, TEN, "betas=0.7,0.2 dimensions=100,300"), paper=PAPER),
}


def check(study: Study) -> None:
    """Builds the method at the largest dimension; raises ``ValueError``."""
    if study.settings.methods != ("cp_ntk_fl",):
        raise ValueError(f"methods: got {', '.join(study.settings.methods)}, must be cp_ntk_fl")
    baselines.check(study, projected=max(study.settings.dimensions))


def run(study: Study) -> lab.Outcome:
    """Chooses the rate at ``beta`` and ``projected``, and runs every cell with it."""
    settings, runs = study.settings, dict[tuple[float, int], Runs]()
    bench = baselines.bench_of(study)
    harness.plan(bench, repetitions=len(settings.betas) * len(settings.dimensions))
    tuned = harness.tune_all(bench)
    for beta, dimension in itertools.product(settings.betas, settings.dimensions):
        study.say(f"beta {beta:g}, d1' {dimension}")
        cell = baselines.bench_of(study, beta=beta, projected=dimension)
        runs[beta, dimension] = harness.repeat_all(cell, tuned)
    ends = {at: baselines.ends(of, settings)["cp_ntk_fl"] for at, of in runs.items()}
    rows = [
        {"beta": b, "d1": d, "accuracy": float(v.mean()), "seeds": v, "published": published(b, d)}
        for (b, d), v in ends.items()
    ]
    values = np.array([[100 * ends[b, d].mean() for d in settings.dimensions] for b in settings.betas])
    axes = {"beta": [f"{b:g}" for b in settings.betas], "d1'": [str(d) for d in settings.dimensions]}
    path, title = study.figures.path("accuracy_by_beta_and_dimension"), f"CP-NTK-FL, round {settings.num_rounds}"
    heat_map(values, axes, "test accuracy, %", f"{study.dataset}, {title}", path)
    by_cell = {f"beta {b:g}, d1' {d}: ": of for (b, d), of in runs.items()}
    return baselines.outcome(
        study, CLAIM, tuned, Report((_sheet(settings, ends),), rows, _judge(settings, ends)), by_cell
    )


def published(beta: float, dimension: int) -> float | None:
    """Returns the paper's accuracy of a cell, as a share; None if the paper has no such cell."""
    if beta not in PUBLISHED or dimension not in PUBLISHED_DIMENSIONS:
        return None
    return PUBLISHED[beta][PUBLISHED_DIMENSIONS.index(dimension)] / 100


def _judge(settings: BetaSettings, ends: dict[tuple[float, int], np.ndarray]) -> tuple[lab.Claim, ...]:
    """Judges the largest against the smallest value of each axis, averaged over the other axis, paired by seed."""
    top, low = max(settings.betas), min(settings.betas)
    most, least = max(settings.dimensions), min(settings.dimensions)
    by_beta = lab.interval(np.mean([ends[top, d] - ends[low, d] for d in settings.dimensions], axis=0))
    by_size = lab.interval(np.mean([ends[b, most] - ends[b, least] for b in settings.betas], axis=0))
    means = [float(v.mean()) for v in ends.values()]
    cells = f"all cells are between {min(means):.4f} and {max(means):.4f}"
    return (
        by_beta.claim_above(f"beta {top:g} is above {low:g}", f"by {{:+.4f}}; {cells}"),
        by_size.claim_above(f"d1' {most} is above {least}", "by {:+.4f}"),
    )


def _sheet(settings: BetaSettings, ends: dict[tuple[float, int], np.ndarray]) -> lab.Sheet:
    """Builds the table of percents over both axes, with the paper's in brackets."""

    def cell(beta: float, dimension: int) -> str:
        percent, paper = f"{100 * ends[beta, dimension].mean():.1f}", published(beta, dimension)
        return percent if paper is None else f"{percent} ({100 * paper:.1f})"

    title = (
        f"accuracy in % after {settings.num_rounds} rounds, over beta (down) and d1' (across), the rate chosen at beta "
        f"{settings.beta:g} and d1' {settings.projected}; in brackets the paper's, on Fashion-MNIST"
    )
    rows = tuple(
        (f"{beta:g}", *(cell(beta, dimension) for dimension in settings.dimensions)) for beta in settings.betas
    )
    return lab.Sheet(title, ("beta", *map(str, settings.dimensions)), rows)


ENTRIES = (experiment(__name__, run, SCALES, ("yue2022",), check=check, least_seeds=2),)
