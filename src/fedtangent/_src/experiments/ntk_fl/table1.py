"""NTK-FL, table 1: rounds and uplink that CP-NTK-FL, FedCOM, QSGD and FedAvg need to reach an accuracy of 85 %."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab import harness
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.experiments.ntk_fl import baselines
from fedtangent._src.experiments.ntk_fl.baselines import (
    DIGITS,
    EVOLVED,
    IMAGES,
    LABELS,
    BaselineSettings,
    Reached,
    Report,
)

CLAIM = "CP-NTK-FL needs the fewest rounds, by an order of magnitude, at a similar uplink"
# Rounds and MiB of uplink to 85 % on Fashion-MNIST, alpha = .1 (the paper prints MB; its FedAvg's are MiB).
PUBLISHED = {"cp_ntk_fl": (26, 386), "fed_com": (250, 379), "qsgd": (614, 465), "fed_avg": (284, 1720)}
# The paper does not say how its Jacobians are compressed: 386 MB in 26 rounds are about half a bit for each entry. Here
# only the largest entries are sent, with their places (``sparsity``), in ``value_bits`` bits.


@dataclass(frozen=True)
class TargetSettings(BaselineSettings):
    """A comparison's settings and the accuracy to reach.

    CP-NTK-FL runs for ``num_rounds`` at most, the other methods for ``reference_rounds``.
    """

    target: float = within(0.85, above=0, below=1)


METHODS = (
    "methods=cp_ntk_fl,cp_ntk_fl_cross_entropy,fed_com,qsgd,fed_avg alpha=0.1 beta=0.3 sparsity=0.98 value_bits=16"
)
REDUCED = with_changes(TargetSettings(), METHODS, "projected=200")
SCALES = {
    "digits": by_scale(with_changes(REDUCED, DIGITS, "num_rounds=30 reference_rounds=120 projected=32 target=0.88")),
    "fashion_mnist": by_scale(
        with_changes(REDUCED, IMAGES, "num_rounds=20 reference_rounds=80 target=0.75"),
        paper=with_changes(REDUCED, "num_rounds=60 reference_rounds=700"),
    ),
}


def check(study: Study) -> None:
    """Builds every method; raises ``ValueError``."""
    if not {"cp_ntk_fl", "fed_avg"} <= set(study.settings.methods):
        names = ", ".join(study.settings.methods)
        raise ValueError(f"methods: got {names}, must have cp_ntk_fl and fed_avg among them")
    baselines.check(study)


def run(study: Study) -> lab.Outcome:
    """Trains with every method for its largest number of rounds, and finds when it reaches the target."""
    settings, bench = study.settings, baselines.bench_of(study)
    rounds = {name: settings.reference_rounds for name in settings.methods if name not in EVOLVED}
    harness.plan(bench, rounds=rounds)
    tuned = harness.tune_all(bench)
    runs = harness.repeat_all(bench, tuned, rounds)
    target, seeds = settings.target, len(study.seeds)
    title = f"rounds and uplink to an accuracy of {target:g} on {study.dataset}, mean over {seeds} seeds"
    sheet, reached = baselines.to_the_level(runs, [target] * seeds, title, PUBLISHED)
    rows = [
        {"method": m, "rounds": r.mean_rounds, "uplink_mib": r.mean_mib, "by_seed": r, "published": PUBLISHED.get(m)}
        for m, r in reached.items()
    ]
    baselines.draw(study, runs)
    report = Report((sheet, baselines.by_round(runs)), rows, _judge(settings, reached))
    return baselines.outcome(study, CLAIM, tuned, report, {"": runs})


def _judge(settings: TargetSettings, reached: dict[str, Reached]) -> list[lab.Claim]:
    """Judges whether CP-NTK-FL needs fewer rounds than each other method, paired by seed."""
    evolved = [name for name in EVOLVED if name in reached]
    return [_claim(settings, reached, method, name) for method in evolved for name in reached if name not in EVOLVED]


def _claim(settings: TargetSettings, reached: dict[str, Reached], method: str, name: str) -> lab.Claim:
    """Judges whether one method needs fewer rounds than another one."""
    first, other = reached[method], reached[name]
    claim = f"{LABELS[method]} needs fewer rounds than {LABELS[name]}"
    if None in first.rounds:
        return lab.Claim(
            claim, f"does not get to {settings.target:g} in {settings.num_rounds} rounds with every seed", lab.UNDECIDED
        )
    is_reached = None not in other.rounds
    rounds = np.array([settings.reference_rounds if r is None else r for r in other.rounds], float)
    ratio = f"{'' if is_reached else 'at most '}{first.mean_rounds / rounds.mean():.2f} times the rounds"
    uplink = f" and {first.mean_mib / other.mean_mib:.2f} times its uplink" if is_reached else ""
    paper = ""
    if name in PUBLISHED:
        published = [a / b for a, b in zip(PUBLISHED["cp_ntk_fl"], PUBLISHED[name], strict=True)]
        paper = f" (the paper: {published[0]:.2f} and {published[1]:.2f})"
    return lab.Claim(claim, f"{ratio}{uplink}{paper}", lab.interval(rounds - np.array(first.rounds, float)).above())


ENTRIES = (experiment(__name__, run, SCALES, ("yue2022",), check=check, least_seeds=2),)
