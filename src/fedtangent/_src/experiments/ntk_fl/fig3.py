"""NTK-FL, fig. 3: what subsampling (beta = .4) and projection (d1' = 100) cost NTK-FL, and what they cost FedAvg."""

from __future__ import annotations

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab import harness
from fedtangent._src.experiments.lab.harness import Runs
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes
from fedtangent._src.experiments.ntk_fl import baselines
from fedtangent._src.experiments.ntk_fl.baselines import DIGITS, IMAGES, LABELS, PAIRED, BaselineSettings, Report

CLAIM = "a slight loss of accuracy for NTK-FL, a clear one for FedAvg (curves of 18 rounds only)"
METHODS = ("ntk_fl", "cp_ntk_fl", "fed_avg", "cp_fed_avg")
REDUCED = with_changes(BaselineSettings(methods=METHODS), "beta=0.4 alpha=0.1 projected=100")
LONG = "num_rounds=18 reference_rounds=18"
SCALES = {
    "digits": by_scale(with_changes(REDUCED, DIGITS, LONG, "projected=16")),
    "fashion_mnist": by_scale(with_changes(REDUCED, IMAGES), paper=with_changes(REDUCED, LONG)),
}


def check(study: Study) -> None:
    """Builds the four methods; raises ``ValueError``."""
    if study.settings.methods != METHODS:
        raise ValueError(f"methods: got {', '.join(study.settings.methods)}, must be {', '.join(METHODS)}")
    baselines.check(study)


def run(study: Study) -> lab.Outcome:
    """Trains with the four methods, and compares each pair."""
    bench = baselines.bench_of(study)
    harness.plan(bench)
    tuned = harness.tune_all(bench)
    runs = harness.repeat_all(bench, tuned)
    baselines.draw(study, runs)
    sheet, rows, claim = _losses(study.settings, runs)
    report = Report((sheet, baselines.by_round(runs)), rows, (claim,))
    return baselines.outcome(study, CLAIM, tuned, report, {"": runs})


def _losses(settings: BaselineSettings, runs: Runs) -> tuple[lab.Sheet, list[lab.Row], lab.Claim]:
    """Computes the accuracy that each method loses by the reduction, paired by seed, and if FedAvg loses more."""
    ends = baselines.ends(runs, settings)
    losses = {plain: ends[plain] - ends[small] for small, plain in PAIRED.items() if small in ends}
    rows, entries = list[lab.Row](), []
    for small, plain in ((small, plain) for small, plain in PAIRED.items() if small in ends):
        loss = lab.interval(losses[plain])
        accuracy = {"accuracy": ends[plain].mean(), "accuracy_reduced": ends[small].mean()}
        rows.append({"method": plain, **accuracy, **loss.row("loss"), "loses": loss.above()})
        entries.append({**rows[-1], "label": LABELS[plain], "interval": loss})
    more = lab.interval(losses["fed_avg"] - losses["ntk_fl"])
    rows.append({"method": "fed_avg minus ntk_fl", **more.row("loss"), "loses": more.above()})
    title = f"test accuracy, mean of the last {settings.window} of {settings.num_rounds} rounds: all, and reduced to"
    columns = "method: {label} | all: {accuracy:.4f} | reduced: {accuracy_reduced:.4f} | "
    columns += "loss, 95 % interval: {interval:+.4f} | it loses: {loses}"
    sheet = lab.table(f"{title} beta {settings.beta:g}, d1' {settings.projected}", entries, columns)
    return sheet, rows, more.claim_above("FedAvg loses more than NTK-FL", "by {:+.4f}")


ENTRIES = (experiment(__name__, run, SCALES, ("yue2022",), check=check, least_seeds=2),)
