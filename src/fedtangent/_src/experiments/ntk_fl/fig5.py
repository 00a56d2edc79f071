"""NTK-FL, fig. 5: test accuracy after 50 rounds against the Dirichlet parameter alpha, on Fashion-MNIST.

Hyper-parameters are chosen once, at the smallest alpha, so that a method's loss there is not due to poor tuning.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab import harness
from fedtangent._src.experiments.lab.harness import Runs, Tuned
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.experiments.ntk_fl import baselines
from fedtangent._src.experiments.ntk_fl.baselines import DIGITS, IMAGES, LABELS, BaselineSettings, Report
from fedtangent._src.output.run_plots import curves

CLAIM = "NTK-FL is stable in alpha from .1 to .5; FedAvg and FedNova drop at small alpha (curves only)"


@dataclass(frozen=True)
class AlphaSettings(BaselineSettings):
    """A comparison's settings and the values of alpha, which take the place of ``alpha``."""

    alphas: tuple[float, ...] = within((0.1, 0.2, 0.3, 0.4, 0.5), above=0, count=2, increasing=True)


PAPER = AlphaSettings(methods=("ntk_fl", "data_sharing", "fed_nova", "fed_avg"))
SCALES = {
    "digits": by_scale(with_changes(PAPER, DIGITS, "alphas=0.1,0.5"), with_changes(PAPER, DIGITS)),
    "fashion_mnist": by_scale(with_changes(PAPER, IMAGES, "alphas=0.1,0.5"), paper=PAPER),
}


def check(study: Study) -> None:
    """Builds every method at the smallest and the largest alpha; raises ``ValueError``."""
    settings = study.settings
    if settings.partition != "dirichlet":
        raise ValueError(f"partition: got {settings.partition!r}, must be dirichlet, whose alpha this is about")
    if "ntk_fl" not in settings.methods:
        raise ValueError(f"methods: got {', '.join(settings.methods)}, must have ntk_fl among them")
    for alpha in (settings.alphas[0], settings.alphas[-1]):
        baselines.check(study, alpha=alpha)


def run(study: Study) -> lab.Outcome:
    """Tunes at the smallest alpha, and runs every method at each."""
    settings, tuned, runs = study.settings, dict[str, Tuned](), dict[float, Runs]()
    benches = {alpha: baselines.bench_of(study, alpha=alpha) for alpha in settings.alphas}
    harness.plan(benches[settings.alphas[0]], repetitions=len(benches))
    for alpha, bench in benches.items():
        bench.compiled = benches[settings.alphas[0]].compiled  # clients are of the same sizes at every alpha
        tuned = tuned or harness.tune_all(bench)
        study.say(f"alpha {alpha:g}")
        runs[alpha] = harness.repeat_all(bench, tuned)
    ends = {alpha: baselines.ends(of, settings) for alpha, of in runs.items()}
    rows = [
        {"method": m, "alpha": alpha, "accuracy": float(of[m].mean()), "seeds": of[m]}
        for m in settings.methods
        for alpha, of in ends.items()
    ]
    gains = {m: ends[settings.alphas[-1]][m] - ends[settings.alphas[0]][m] for m in settings.methods}
    title = f"test accuracy, mean of the last {settings.window} of {settings.num_rounds} rounds, +- its standard error"
    cells = tuple(
        (LABELS[m], *(baselines.mean_and_error(of[m]) for of in ends.values()), f"{lab.interval(gains[m]):+.4f}")
        for m in settings.methods
    )
    columns = ("method", *(f"{alpha:g}" for alpha in settings.alphas), "last - first, 95 % interval")
    sheet = lab.Sheet(f"{title}, against alpha", columns, cells)
    lines = {LABELS[m]: np.stack([of[m] for of in ends.values()], axis=1) for m in settings.methods}
    clients = f"{settings.num_clients} clients, {settings.clients_per_round} a round"
    title = f"{study.dataset}, round {settings.num_rounds}, {clients}"
    path = study.figures.path("accuracy_by_alpha")
    curves({"test accuracy": lines}, settings.alphas, title, path, across="Dirichlet alpha")
    by_alpha = {f"alpha {alpha:g}: ": of for alpha, of in runs.items()}
    return baselines.outcome(study, CLAIM, tuned, Report((sheet,), rows, _judge(settings, gains)), by_alpha)


def _judge(settings: AlphaSettings, gains: dict[str, np.ndarray]) -> list[lab.Claim]:
    """Judges whether each method gains more from the smallest to the largest alpha than NTK-FL; gains are [seeds]."""
    more = {name: lab.interval(gains[name] - gains["ntk_fl"]) for name in settings.methods if name != "ntk_fl"}
    claim = f"gains more from alpha {settings.alphas[0]:g} to {settings.alphas[-1]:g} than NTK-FL"
    return [gain.claim_above(f"{LABELS[name]} {claim}", "by {:+.4f}") for name, gain in more.items()]


ENTRIES = (experiment(__name__, run, SCALES, ("yue2022",), check=check, least_seeds=2),)
