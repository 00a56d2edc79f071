"""NTK-FL, fig. 5: test accuracy after 50 rounds against the Dirichlet parameter alpha, on Fashion-MNIST.

Hyper-parameters are chosen once, at the smallest alpha: what a method loses there is not for want of tuning.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtangent.experiments.lab import cohort_report as report
from fedtangent.experiments.lab.cohort_curves import Keep, Say, bench_of, check_builds, checked, remarks
from fedtangent.experiments.lab.cohort_methods import LABELS
from fedtangent.experiments.lab.cohort_runs import Runs, Tuned, repeat, tune
from fedtangent.experiments.lab.cohort_settings import DIGITS, IMAGES, Settings
from fedtangent.experiments.lab.contract import Experiment, Outcome, Prepared, Request, Sheet

CLAIM = "NTK-FL is stable in alpha from .1 to .5; FedAvg and FedNova drop at small alpha (curves only)"
NOTES = {"digits": "scikit-learn's digits stand in for Fashion-MNIST: name fashion_mnist and its folder"}


@dataclass(frozen=True)
class Alphas(Settings):
    """Those of one comparison, and the values of alpha; ``alpha`` itself is not used."""

    methods: tuple[str, ...] = ("ntk_fl", "data_sharing", "fed_nova", "fed_avg")
    alphas: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5)


def _of(s: Settings, **changes: Any) -> Alphas:
    given = {f.name: getattr(s, f.name) for f in fields(s) if f.name != "methods"}
    return Alphas(**{**given, **changes})


SETTINGS = {
    ("digits", "smoke"): _of(DIGITS, alphas=(0.1, 0.5)),
    ("digits", "paper"): _of(DIGITS),
    ("fashion_mnist", "smoke"): _of(IMAGES, alphas=(0.1, 0.5)),
    ("fashion_mnist", "paper"): Alphas(),
}


def prepare(request: Request) -> Prepared:
    """Check the request and build every method at every alpha; raises ``ValueError``."""
    name, seeds, s = checked(EXPERIMENT, request, SETTINGS)
    assert isinstance(s, Alphas)
    if len(s.alphas) < 2 or list(s.alphas) != sorted(set(s.alphas)) or s.alphas[0] <= 0:
        raise ValueError(f"alphas: got {s.alphas}, must be at least two increasing positive numbers")
    if s.partition != "dirichlet" or "ntk_fl" not in s.methods:
        raise ValueError("partition and methods: alpha is that of dirichlet clients, and ntk_fl is what is compared")
    check_builds(name, request.data_dir, seeds[0], replace(s, alpha=s.alphas[0]))

    def run(say: Say, keep: Keep, figures: Path) -> Outcome:
        return _run(s, name, request.data_dir, seeds, say, keep, figures)

    return Prepared(s, name, run)


def _run(
    s: Alphas, dataset: str, data_dir: Path | None, seeds: tuple[int, ...], say: Say, keep: Keep, figures: Path
) -> Outcome:
    tuned: dict[str, Tuned] = {}
    found: dict[float, Runs] = {}
    compiled: dict[Any, Any] = {}
    for alpha in s.alphas:
        bench = bench_of(dataset, data_dir, replace(s, alpha=alpha), say, keep, figures)
        bench.compiled = compiled  # clients are of the same sizes at every alpha
        tuned = tuned or {method: tune(bench, method) for method in s.methods}
        say(f"alpha {alpha:g}")
        found[alpha] = repeat(
            bench, {m: t.config for m, t in tuned.items()}, seeds, dict.fromkeys(s.methods, s.num_rounds)
        )
    return _conclude(s, dataset, tuned, found, figures)


def _conclude(s: Alphas, dataset: str, tuned: dict[str, Tuned], found: dict[float, Runs], figures: Path) -> Outcome:
    ends = {alpha: report.ends(runs, s.num_rounds, s.window) for alpha, runs in found.items()}
    rows = [
        {"method": m, "alpha": alpha, "accuracy": float(of[m].mean()), "seeds": of[m]}
        for m in s.methods for alpha, of in ends.items()
    ]  # fmt: skip
    gains = {m: ends[s.alphas[-1]][m] - ends[s.alphas[0]][m] for m in s.methods}
    lines = [f"the paper: {CLAIM}", *judge(s, gains)]
    title = f"{dataset}, round {s.num_rounds}, {s.num_clients} clients, {s.clients_per_round} a round"
    _draw(s, ends, title, figures / "accuracy_by_alpha.png")
    failed = tuple(f"alpha {alpha:g}: {line}" for alpha, runs in found.items() for line in report.unstable(runs))
    details = {"settings": s, "dataset": dataset, "tuned": report.plain(tuned), "claim": CLAIM}
    sheets = (_table(s, ends, gains), report.tuning(tuned))
    return Outcome(sheets, rows, details, (*lines, *remarks(s, NOTES.get(dataset))), failed)


def judge(s: Alphas, gains: dict[str, np.ndarray]) -> list[str]:
    """What each method gains from the smallest to the largest alpha, [seeds], and whether NTK-FL gains less."""
    ends = f"from alpha {s.alphas[0]:g} to {s.alphas[-1]:g}"
    own = report.estimate(gains["ntk_fl"])
    lines = [f"NTK-FL gains {own.mean:+.4f} {own} {ends}"]
    for name in s.methods:
        if name != "ntk_fl":
            more = report.estimate(gains[name] - gains["ntk_fl"])
            lines.append(
                f"{LABELS[name]} gains more {ends} than NTK-FL: {report.verdict(more)}, by {more.mean:+.4f} {more}"
            )
    return lines


def _table(s: Alphas, ends: dict[float, dict[str, np.ndarray]], gains: dict[str, np.ndarray]) -> Sheet:
    rows = []
    for m in s.methods:
        gain = report.estimate(gains[m])
        cells = (f"{of[m].mean():.4f} +- {of[m].std(ddof=1) / np.sqrt(len(of[m])):.4f}" for of in ends.values())
        rows.append((LABELS[m], *cells, f"{gain.mean:+.4f}", str(gain)))
    title = f"test accuracy, mean of the last {s.window} of {s.num_rounds} rounds, +- its standard error, against alpha"
    columns = ("method", *(f"{alpha:g}" for alpha in s.alphas), "last - first", "95 % interval")
    return Sheet(title, columns, tuple(rows))


def _draw(s: Alphas, ends: dict[float, dict[str, np.ndarray]], title: str, path: Path) -> None:
    from fedtangent.output.grid_plots import lines_with_errors

    lines = {LABELS[m]: np.stack([of[m] for of in ends.values()], axis=1) for m in s.methods}
    lines_with_errors(lines, s.alphas, ("Dirichlet alpha", "test accuracy"), title, path)


EXPERIMENT = Experiment(
    "NTK-FL and its baselines against the Dirichlet alpha of the clients' labels: accuracy after 50 rounds",
    ("digits", "fashion_mnist"),
    prepare,
)
