"""NTK-FL, fig. 6: accuracy of CP-NTK-FL after 10 rounds over the sampling rate beta and the projection's d1'."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtangent.experiments.lab import cohort_report as report
from fedtangent.experiments.lab.cohort_curves import Keep, Say, bench_of, check_builds, checked, remarks
from fedtangent.experiments.lab.cohort_runs import Runs, Tuned, repeat, tune
from fedtangent.experiments.lab.cohort_settings import DIGITS, IMAGES, Settings
from fedtangent.experiments.lab.contract import Experiment, Outcome, Prepared, Request, Sheet

CLAIM = "a larger beta or d1' gives a higher accuracy, and all are near each other: 81.9 to 85.0 %"
NOTES = {"digits": "scikit-learn's digits (64 inputs) stand in for Fashion-MNIST: name fashion_mnist and its folder"}
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
class Grid(Settings):
    """Those of one comparison, and the two axes; ``beta`` and ``projected`` themselves are where the rate is chosen."""

    methods: tuple[str, ...] = ("cp_ntk_fl",)
    alpha: float = 0.1
    num_rounds: int = 10
    reference_rounds: int = 10
    window: int = 1
    tuning_rounds: int = 10
    beta: float = 0.4
    projected: int = 300
    betas: tuple[float, ...] = (0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
    dimensions: tuple[int, ...] = PUBLISHED_DIMENSIONS


OWN = ("methods", "alpha", "num_rounds", "reference_rounds", "window", "tuning_rounds", "beta", "projected")


def _of(s: Settings, **changes: Any) -> Grid:
    return Grid(**{**{f.name: getattr(s, f.name) for f in fields(s) if f.name not in OWN}, **changes})


SMALL = _of(DIGITS, betas=(0.7, 0.4, 0.2), dimensions=(8, 16, 48), projected=16)
SETTINGS = {
    ("digits", "smoke"): SMALL,
    ("digits", "paper"): replace(SMALL, betas=Grid.betas, dimensions=(8, 16, 24, 32, 48, 64)),
    ("fashion_mnist", "smoke"): _of(IMAGES, betas=(0.7, 0.2), dimensions=(100, 300)),
    ("fashion_mnist", "paper"): Grid(),
}


def prepare(request: Request) -> Prepared:
    """Check the request and build the method at every corner; raises ``ValueError``."""
    name, seeds, s = checked(EXPERIMENT, request, SETTINGS)
    assert isinstance(s, Grid)
    if s.methods != ("cp_ntk_fl",):
        raise ValueError(f"methods: got {', '.join(s.methods)}, this figure is of cp_ntk_fl")
    for axis in ("betas", "dimensions"):
        if len(set(getattr(s, axis))) < max(2, len(getattr(s, axis))):
            raise ValueError(f"{axis}: got {getattr(s, axis)}, must be at least two different numbers")
    if not (all(0 < beta <= 1 for beta in s.betas) and min(s.dimensions) >= 1):
        raise ValueError(f"betas and dimensions: got {s.betas} and {s.dimensions}, must be in (0, 1] and 1 or more")
    check_builds(name, request.data_dir, seeds[0], replace(s, projected=max(s.dimensions)))

    def run(say: Say, keep: Keep, figures: Path) -> Outcome:
        return _run(s, name, request.data_dir, seeds, say, keep, figures)

    return Prepared(s, name, run)


def _run(
    s: Grid, dataset: str, data_dir: Path | None, seeds: tuple[int, ...], say: Say, keep: Keep, figures: Path
) -> Outcome:
    tuned: dict[str, Tuned] = {}
    found: dict[tuple[float, int], Runs] = {}
    middle = bench_of(dataset, data_dir, s, say, keep, figures)
    tuned = {"cp_ntk_fl": tune(middle, "cp_ntk_fl")}
    config = tuned["cp_ntk_fl"].config
    for beta, dimension in itertools.product(s.betas, s.dimensions):
        say(f"beta {beta:g}, d1' {dimension}")
        bench = bench_of(dataset, data_dir, replace(s, beta=beta, projected=dimension), say, keep, figures)
        found[beta, dimension] = repeat(bench, {"cp_ntk_fl": config}, seeds, {"cp_ntk_fl": s.num_rounds})
    ends = {at: report.ends(runs, s.num_rounds, s.window)["cp_ntk_fl"] for at, runs in found.items()}
    rows = [{"beta": b, "d1": d, "accuracy": float(v.mean()), "seeds": v, "published": published(b, d)}
            for (b, d), v in ends.items()]  # fmt: skip
    failed = tuple(f"beta {b:g}, d1' {d}: {line}" for (b, d), runs in found.items() for line in report.unstable(runs))
    chosen = f"the learning rate was chosen at beta {s.beta:g} and d1' {s.projected}, and is that of every cell"
    settled = remarks(replace(s, beta=1.0, projected=0), NOTES.get(dataset))
    lines = (f"the paper: {CLAIM}", *judge(s, ends), chosen, *settled)
    details = {"settings": s, "dataset": dataset, "tuned": report.plain(tuned), "claim": CLAIM}
    _draw(s, ends, f"{dataset}, CP-NTK-FL, round {s.num_rounds}", figures / "accuracy_by_beta_and_dimension.png")
    return Outcome((_table(s, ends), report.tuning(tuned)), rows, details, lines, failed)


def published(beta: float, dimension: int) -> float | None:
    """The paper's accuracy of a cell, as a share; None where it gives none."""
    if beta not in PUBLISHED or dimension not in PUBLISHED_DIMENSIONS:
        return None
    return PUBLISHED[beta][PUBLISHED_DIMENSIONS.index(dimension)] / 100


def judge(s: Grid, ends: dict[tuple[float, int], np.ndarray]) -> list[str]:
    """The claim's parts: the largest against the smallest of each axis, mean over the other, seed by seed."""
    top, low = max(s.betas), min(s.betas)
    most, least = max(s.dimensions), min(s.dimensions)
    by_beta = report.estimate(np.mean([ends[top, d] - ends[low, d] for d in s.dimensions], axis=0))
    by_size = report.estimate(np.mean([ends[b, most] - ends[b, least] for b in s.betas], axis=0))
    means = [float(v.mean()) for v in ends.values()]
    return [
        f"beta {top:g} is above {low:g}: {report.verdict(by_beta)}, by {by_beta.mean:+.4f} {by_beta}",
        f"d1' {most} is above {least}: {report.verdict(by_size)}, by {by_size.mean:+.4f} {by_size}",
        f"all cells are between {min(means):.4f} and {max(means):.4f}",
    ]


def _table(s: Grid, ends: dict[tuple[float, int], np.ndarray]) -> Sheet:
    rows = []
    for b in s.betas:
        cells = []
        for d in s.dimensions:
            paper = published(b, d)
            cells.append(f"{100 * ends[b, d].mean():.1f}" + ("" if paper is None else f" ({100 * paper:.1f})"))
        rows.append((f"{b:g}", *cells))
    title = f"accuracy in % after {s.num_rounds} rounds, over beta (down) and d1' (across)"
    if any(published(*at) is not None for at in ends):
        title += "; in brackets the paper's, on Fashion-MNIST"
    return Sheet(title, ("beta", *(str(d) for d in s.dimensions)), tuple(rows))


def _draw(s: Grid, ends: dict[tuple[float, int], np.ndarray], title: str, path: Path) -> None:
    from fedtangent.output.grid_plots import heat_map

    values = np.array([[100 * ends[b, d].mean() for d in s.dimensions] for b in s.betas])
    heat_map(values, [f"{b:g}" for b in s.betas], [str(d) for d in s.dimensions], ("beta", "d1'"),
             "test accuracy, %", title, path)  # fmt: skip


EXPERIMENT = Experiment(
    "CP-NTK-FL over the sampling rate and the projection's dimension: accuracy after 10 rounds beside the paper's",
    ("digits", "fashion_mnist"),
    prepare,
)
