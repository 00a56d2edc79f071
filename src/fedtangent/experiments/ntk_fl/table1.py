"""NTK-FL, table 1: rounds and uplink that CP-NTK-FL, FedCOM, QSGD and FedAvg need to reach an accuracy of 85 %."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedtangent.experiments.lab import cohort_report as report
from fedtangent.experiments.lab.cohort_curves import Keep, Say, bench_of, check_builds, checked, remarks
from fedtangent.experiments.lab.cohort_methods import EVOLVED, LABELS
from fedtangent.experiments.lab.cohort_runs import repeat, tune
from fedtangent.experiments.lab.cohort_settings import DIGITS, IMAGES, Settings
from fedtangent.experiments.lab.contract import Experiment, Outcome, Prepared, Request, Sheet

CLAIM = "CP-NTK-FL needs the fewest rounds, by an order of magnitude, at a similar uplink"
# Rounds and MiB of uplink to 85 % on Fashion-MNIST, alpha = .1 (the paper prints MB; its FedAvg's are MiB).
PUBLISHED = {"cp_ntk_fl": (26, 386), "fed_com": (250, 379), "qsgd": (614, 465), "fed_avg": (284, 1720)}
COMPRESSOR = (
    "the paper does not specify the compressor of its Jacobians; its 386 MB in 26 rounds are about half a bit for each "
    "number of a Jacobian. Here the largest are kept, and their places sent: sparsity and value_bits"
)
NOTES = {"digits": "scikit-learn's digits (64 inputs) stand in for Fashion-MNIST, with a target of their own"}


@dataclass(frozen=True)
class Target(Settings):
    """Those of one comparison, and the accuracy to reach; ``num_rounds`` is the most of CP-NTK-FL under each loss."""

    methods: tuple[str, ...] = ("cp_ntk_fl", "cp_ntk_fl_cross_entropy", "fed_com", "qsgd", "fed_avg")
    alpha: float = 0.1
    num_rounds: int = 60
    reference_rounds: int = 700  # the most of the others
    beta: float = 0.3
    projected: int = 200
    sparsity: float = 0.98
    value_bits: int = 16
    target: float = 0.85


OWN = ("methods", "alpha", "num_rounds", "reference_rounds", "beta", "projected", "sparsity", "value_bits")


def _of(s: Settings, **changes: Any) -> Target:
    return Target(**{**{f.name: getattr(s, f.name) for f in fields(s) if f.name not in OWN}, **changes})


SMALL = _of(DIGITS, num_rounds=30, reference_rounds=120, projected=32, target=0.88)
SETTINGS = {
    ("digits", "smoke"): SMALL,
    ("digits", "paper"): SMALL,
    ("fashion_mnist", "smoke"): _of(IMAGES, num_rounds=20, reference_rounds=80, target=0.75),
    ("fashion_mnist", "paper"): Target(),
}


def prepare(request: Request) -> Prepared:
    """Check the request and build every method; raises ``ValueError``."""
    name, seeds, s = checked(EXPERIMENT, request, SETTINGS)
    assert isinstance(s, Target)
    if not 0 < s.target < 1:
        raise ValueError(f"target: got {s.target}, must be above 0 and below 1")
    if "cp_ntk_fl" not in s.methods or "fed_avg" not in s.methods:
        raise ValueError(f"methods: got {', '.join(s.methods)}, cp_ntk_fl and fed_avg must be among them")
    check_builds(name, request.data_dir, seeds[0], s)

    def run(say: Say, keep: Keep, figures: Path) -> Outcome:
        return _run(s, name, request.data_dir, seeds, say, keep, figures)

    return Prepared(s, name, run)


def _run(
    s: Target, dataset: str, data_dir: Path | None, seeds: tuple[int, ...], say: Say, keep: Keep, figures: Path
) -> Outcome:
    bench = bench_of(dataset, data_dir, s, say, keep, figures)
    tuned = {method: tune(bench, method) for method in s.methods}
    rounds = {m: s.num_rounds if m in EVOLVED else s.reference_rounds for m in s.methods}
    runs = repeat(bench, {m: t.config for m, t in tuned.items()}, seeds, rounds)
    title = f"rounds and uplink to an accuracy of {s.target:g} on {dataset}, mean over {len(seeds)} seeds"
    sheet, found = report.to_the_level(runs, [s.target] * len(seeds), title)
    rows = [
        {"method": m, "rounds": r.mean_rounds, "uplink_mib": r.mean_mib, "by_seed": r, "published": PUBLISHED.get(m)}
        for m, r in found.items()
    ]
    report.draw(runs, s.num_rounds, f"{dataset}, {s.num_clients} clients", figures / "accuracy_by_round.png")
    lines = (f"the paper: {CLAIM}", *judge(s, found), COMPRESSOR, *remarks(s, NOTES.get(dataset)))
    details = {"settings": s, "dataset": dataset, "tuned": report.plain(tuned), "claim": CLAIM}
    sheets = (_beside(sheet, list(found)), report.by_round(runs), report.tuning(tuned))
    return Outcome(sheets, rows, details, lines, report.unstable(runs))


def judge(s: Target, found: dict[str, report.Reached]) -> list[str]:
    """The claim's parts; one that nobody's runs decide is said to be so."""
    return [line for own in EVOLVED if own in found for line in _judge(s, found, own)]


def _judge(s: Target, found: dict[str, report.Reached], method: str) -> list[str]:
    own, label, lines = found[method], LABELS[method], []
    if None in own.rounds:
        return [f"{label} does not get to {s.target:g} in {s.num_rounds} rounds with every seed"]
    for name, other in found.items():
        if name in EVOLVED:
            continue
        rounds = s.reference_rounds if None in other.rounds else other.mean_rounds
        most = "at most " if None in other.rounds else ""
        uplink = "" if None in other.rounds else f" and {own.mean_mib / other.mean_mib:.2f} times its uplink"
        paper = ""
        if name in PUBLISHED:
            published = [a / b for a, b in zip(PUBLISHED["cp_ntk_fl"], PUBLISHED[name], strict=True)]
            paper = f" (the paper: {published[0]:.2f} and {published[1]:.2f})"
        ratio = f"{most}{own.mean_rounds / rounds:.2f} times the rounds"
        lines.append(f"{label} needs {ratio} of {LABELS[name]}{uplink}{paper}")
    return lines


def _beside(sheet: Sheet, names: list[str]) -> Sheet:
    """The table with the paper's numbers in two more columns."""
    rows = []
    for name, row in zip(names, sheet.rows, strict=True):
        paper = PUBLISHED.get(name)
        rows.append((*row, *(("", "") if paper is None else (str(paper[0]), str(paper[1])))))
    return Sheet(sheet.title, (*sheet.columns, "the paper: rounds", "MB"), tuple(rows))


EXPERIMENT = Experiment(
    "Rounds and uplink of CP-NTK-FL, FedCOM, QSGD and FedAvg to a target accuracy, beside the paper's table 1",
    ("digits", "fashion_mnist"),
    prepare,
)
