"""NTK-FL, fig. 3: what subsampling (beta = .4) and projection (d1' = 100) cost NTK-FL, and what they cost FedAvg."""

from __future__ import annotations

from typing import Any

from fedtangent.experiments.lab import cohort_report as report
from fedtangent.experiments.lab.cohort import DIGITS, IMAGES, LABELS, PAIRED, CohortSettings
from fedtangent.experiments.lab.results import Claim, Outcome, Sheet, interval
from fedtangent.experiments.lab.runner import Study, experiment
from fedtangent.experiments.lab.runs import Runs
from fedtangent.experiments.lab.settings import by_scale, same

CLAIM = "a slight loss of accuracy for NTK-FL, a clear one for FedAvg (curves of 18 rounds only)"
NOTES = {"digits": "scikit-learn's digits (64 inputs) stand in for Fashion-MNIST: name fashion_mnist and its folder"}
METHODS = ("ntk_fl", "cp_ntk_fl", "fed_avg", "cp_fed_avg")
OWN: dict[str, Any] = {"methods": METHODS, "beta": 0.4, "alpha": 0.1}
LONG: dict[str, Any] = {"num_rounds": 18, "reference_rounds": 18}
SMALL = CohortSettings(**IMAGES, **OWN, projected=100)
SCALES = {
    "digits": same(CohortSettings(**{**DIGITS, **OWN, **LONG}, projected=16)),
    "fashion_mnist": by_scale(SMALL, SMALL, CohortSettings(**OWN, **LONG, projected=100)),
}


def check(study: Study) -> None:
    """Build the four methods."""
    if study.settings.methods != METHODS:
        raise ValueError(f"methods: got {', '.join(study.settings.methods)}, must be {', '.join(METHODS)}")
    report.check(study)


def run(study: Study) -> Outcome:
    """The four methods, and what each pair loses."""
    s, bench = study.settings, report.bench_of(study)
    tuned = report.tune_all(bench)
    runs = report.repeat_all(bench, tuned)
    clients = f"{s.num_clients} clients, {s.clients_per_round} a round"
    report.draw(study, runs, f"{study.dataset}, {clients}, beta {s.beta:g}, d1' {s.projected}")
    sheet, rows, claims = losses(s, runs)
    sheets = (sheet, report.by_round(runs), report.tuning(tuned))
    said = (f"the paper: {CLAIM}", *report.remarks(s, NOTES.get(study.dataset)))
    return Outcome(sheets, rows, claims, report.details_of(CLAIM, tuned), said, report.unstable(runs))


def losses(s: CohortSettings, runs: Runs) -> tuple[Sheet, list[dict[str, Any]], tuple[Claim, ...]]:
    """What each pair loses, seed by seed, at the end; and whether FedAvg loses more."""
    ends = report.ends(runs, s.num_rounds, s.window)
    lost = {plain: ends[plain] - ends[small] for small, plain in PAIRED.items() if small in ends}
    rows, shown = [], []
    for small, plain in PAIRED.items():
        if small in ends:
            e, whole, reduced = interval(lost[plain]), ends[plain].mean(), ends[small].mean()
            rows.append({"method": plain, "accuracy": whole, "accuracy_reduced": reduced, "loss": e.mean,
                         "low_95": e.low, "high_95": e.high, "loses": e.above()})  # fmt: skip
            cells = (f"{whole:.4f}", f"{reduced:.4f}", f"{e.mean:+.4f}", e.ends(), e.above())
            shown.append((LABELS[plain], *cells))
    more = interval(lost["fed_avg"] - lost["ntk_fl"])
    rows.append({"method": "fed_avg minus ntk_fl", "loss": more.mean, "low_95": more.low, "high_95": more.high,
                 "loses": more.above()})  # fmt: skip
    title = (
        f"test accuracy, mean of the last {s.window} of {s.num_rounds} rounds: all, and reduced to beta {s.beta:g}, "
        f"d1' {s.projected}"
    )
    columns = ("method", "all", "reduced", "loss", "95 % interval", "it loses")
    claims = (Claim("FedAvg loses more than NTK-FL", f"by {more.text()}", more.above()),)
    return Sheet(title, columns, tuple(shown)), rows, claims


ENTRIES = (experiment(__name__, run, SCALES, ("yue2022",), check=check, least_seeds=2),)
