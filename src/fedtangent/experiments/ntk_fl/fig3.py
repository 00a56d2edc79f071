"""NTK-FL, fig. 3: what subsampling (beta = .4) and projection (d1' = 100) cost NTK-FL, and what they cost FedAvg."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtangent.experiments.lab import cohort_report as report
from fedtangent.experiments.lab.cohort_curves import Keep, Say, bench_of, check_builds, checked, remarks
from fedtangent.experiments.lab.cohort_methods import LABELS, PAIRED
from fedtangent.experiments.lab.cohort_runs import Runs, repeat, tune
from fedtangent.experiments.lab.cohort_settings import DIGITS, IMAGES, Settings
from fedtangent.experiments.lab.contract import Experiment, Outcome, Prepared, Request, Sheet

CLAIM = "a slight loss of accuracy for NTK-FL, a clear one for FedAvg (curves of 18 rounds only)"
NOTES = {"digits": "scikit-learn's digits (64 inputs) stand in for Fashion-MNIST: name fashion_mnist and its folder"}
METHODS = ("ntk_fl", "cp_ntk_fl", "fed_avg", "cp_fed_avg")
PAPER = Settings(methods=METHODS, num_rounds=18, reference_rounds=18, beta=0.4, projected=100, alpha=0.1)
SMALL = replace(DIGITS, methods=METHODS, num_rounds=18, reference_rounds=18, beta=0.4, projected=16, alpha=0.1)

SETTINGS = {
    ("digits", "smoke"): SMALL,
    ("digits", "paper"): SMALL,
    ("fashion_mnist", "smoke"): replace(IMAGES, methods=METHODS, beta=0.4, projected=100, alpha=0.1),
    ("fashion_mnist", "paper"): PAPER,
}


def prepare(request: Request) -> Prepared:
    """Check the request and build the four methods; raises ``ValueError``."""
    name, seeds, s = checked(EXPERIMENT, request, SETTINGS)
    if s.methods != METHODS:
        raise ValueError(f"methods: got {', '.join(s.methods)}, this figure compares {', '.join(METHODS)}")
    check_builds(name, request.data_dir, seeds[0], s)

    def run(say: Say, keep: Keep, figures: Path) -> Outcome:
        bench = bench_of(name, request.data_dir, s, say, keep, figures)
        tuned = {method: tune(bench, method) for method in METHODS}
        runs = repeat(bench, {m: t.config for m, t in tuned.items()}, seeds, dict.fromkeys(METHODS, s.num_rounds))
        report.draw(runs, s.num_rounds, _title(s, name), figures / "accuracy_by_round.png")
        sheet, rows, lines = losses(s, runs)
        details: dict[str, Any] = {"settings": s, "dataset": name, "tuned": report.plain(tuned), "claim": CLAIM}
        sheets = (sheet, report.by_round(runs), report.tuning(tuned))
        said = (f"the paper: {CLAIM}", *lines, *remarks(s, NOTES.get(name)))
        return Outcome(sheets, rows, details, said, report.unstable(runs))

    return Prepared(s, name, run)


def losses(s: Settings, runs: Runs) -> tuple[Sheet, list[dict[str, Any]], list[str]]:
    """What each pair loses, seed by seed, at the end; and whether FedAvg loses more."""
    ends = report.ends(runs, s.num_rounds, s.window)
    lost = {plain: ends[plain] - ends[small] for small, plain in PAIRED.items()}
    rows, shown = [], []
    for small, plain in PAIRED.items():
        e = report.estimate(lost[plain])
        rows.append({"method": plain, "accuracy": ends[plain].mean(), "accuracy_reduced": ends[small].mean(),
                     "loss": e.mean, "low_95": e.low, "high_95": e.high, "loses": report.verdict(e)})  # fmt: skip
        cells = (
            f"{np.mean(ends[plain]):.4f}",
            f"{np.mean(ends[small]):.4f}",
            f"{e.mean:+.4f}",
            str(e),
            report.verdict(e),
        )
        shown.append((LABELS[plain], *cells))
    more = report.estimate(lost["fed_avg"] - lost["ntk_fl"])
    lines = [f"FedAvg loses more than NTK-FL: {report.verdict(more)}, by {more.mean:+.4f} {more}"]
    rows.append({"method": "fed_avg minus ntk_fl", "loss": more.mean, "low_95": more.low, "high_95": more.high,
                 "loses": report.verdict(more)})  # fmt: skip
    title = (
        f"test accuracy, mean of the last {s.window} of {s.num_rounds} rounds: all, and reduced to beta {s.beta:g}, "
        f"d1' {s.projected}"
    )
    columns = ("method", "all", "reduced", "loss", "95 % interval", "it loses")
    return Sheet(title, columns, tuple(shown)), rows, lines


def _title(s: Settings, name: str) -> str:
    return f"{name}, {s.num_clients} clients, {s.clients_per_round} a round, beta {s.beta:g}, d1' {s.projected}"


EXPERIMENT = Experiment(
    "What subsampling and random projection cost NTK-FL and FedAvg in accuracy, by round, paired seeds",
    ("digits", "fashion_mnist"),
    prepare,
)
