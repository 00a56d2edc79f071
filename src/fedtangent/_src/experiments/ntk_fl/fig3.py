"""NTK-FL, fig. 3: what subsampling (beta = .4) and projection (d1' = 100) cost NTK-FL, and what they cost FedAvg."""

from __future__ import annotations

from typing import Any

from fedtangent._src.experiments.lab import cohort_report as report
from fedtangent._src.experiments.lab.cohort import DIGITS, IMAGES, LABELS, PAIRED, CohortSettings
from fedtangent._src.experiments.lab.results import Claim, Outcome, Sheet, interval, table
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment
from fedtangent._src.experiments.lab.runs import Runs

CLAIM = "a slight loss of accuracy for NTK-FL, a clear one for FedAvg (curves of 18 rounds only)"
METHODS = ("ntk_fl", "cp_ntk_fl", "fed_avg", "cp_fed_avg")
OWN: dict[str, Any] = {"methods": METHODS, "beta": 0.4, "alpha": 0.1}
LONG: dict[str, Any] = {"num_rounds": 18, "reference_rounds": 18}
SCALES = {
    "digits": by_scale(CohortSettings(**{**DIGITS, **OWN, **LONG}, projected=16)),
    "fashion_mnist": by_scale(
        CohortSettings(**IMAGES, **OWN, projected=100), paper=CohortSettings(**OWN, **LONG, projected=100)
    ),
}


def check(study: Study) -> None:
    """Builds the four methods; raises ``ValueError``."""
    if study.settings.methods != METHODS:
        raise ValueError(f"methods: got {', '.join(study.settings.methods)}, must be {', '.join(METHODS)}")
    report.check(study)


def run(study: Study) -> Outcome:
    """Trains with the four methods, and compares each pair."""
    bench = report.bench_of(study)
    tuned = report.tune_all(bench)
    runs = report.repeat_all(bench, tuned)
    report.draw(study, runs)
    sheet, rows, claim = losses(study.settings, runs)
    return report.outcome(study, CLAIM, tuned, (sheet, report.by_round(runs)), rows, (claim,), {"": runs})


def losses(s: CohortSettings, runs: Runs) -> tuple[Sheet, list[dict[str, Any]], Claim]:
    """Computes the accuracy that each method loses by the reduction, paired by seed, and if FedAvg loses more."""
    ends = report.ends(runs, s)
    lost = {plain: ends[plain] - ends[small] for small, plain in PAIRED.items() if small in ends}
    rows, shown = [], []
    for small, plain in ((small, plain) for small, plain in PAIRED.items() if small in ends):
        e = interval(lost[plain])
        rows.append({"method": plain, "accuracy": ends[plain].mean(), "accuracy_reduced": ends[small].mean(),
                     **e.row("loss"), "loses": e.above()})  # fmt: skip
        shown.append({**rows[-1], "label": LABELS[plain], "e": e})
    more = interval(lost["fed_avg"] - lost["ntk_fl"])
    rows.append({"method": "fed_avg minus ntk_fl", **more.row("loss"), "loses": more.above()})
    what = f"all, and reduced to beta {s.beta:g}, d1' {s.projected}"
    columns = {"method": "{label}", "all": "{accuracy:.4f}", "reduced": "{accuracy_reduced:.4f}",
               "loss, 95 % interval": "{e:+.4f}", "it loses": "{loses}"}  # fmt: skip
    sheet = table(f"test accuracy, mean of the last {s.window} of {s.num_rounds} rounds: {what}", shown, columns)
    return sheet, rows, Claim("FedAvg loses more than NTK-FL", f"by {more:+.4f}", more.above())


ENTRIES = (experiment(__name__, run, SCALES, ("yue2022",), check=check, least_seeds=2),)
