"""NTK-FL, fig. 5: test accuracy after 50 rounds against the Dirichlet parameter alpha, on Fashion-MNIST.

Hyper-parameters are chosen once, at the smallest alpha: what a method loses there is not for want of tuning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtangent._src.experiments.lab import cohort_report as report
from fedtangent._src.experiments.lab.cohort import DIGITS, IMAGES, LABELS, CohortSettings
from fedtangent._src.experiments.lab.results import Claim, Outcome, Sheet, interval
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.experiments.lab.runs import Runs, Tuned
from fedtangent._src.output.run_plots import curves

CLAIM = "NTK-FL is stable in alpha from .1 to .5; FedAvg and FedNova drop at small alpha (curves only)"
METHODS = ("ntk_fl", "data_sharing", "fed_nova", "fed_avg")


@dataclass(frozen=True)
class AlphaSettings(CohortSettings):
    """A comparison's settings and the values of alpha, which take the place of ``alpha``."""

    alphas: tuple[float, ...] = within((0.1, 0.2, 0.3, 0.4, 0.5), above=0, count=2, increasing=True)


SMALL: dict[str, Any] = {"methods": METHODS, "alphas": (0.1, 0.5)}
SCALES = {
    "digits": by_scale(AlphaSettings(**DIGITS, **SMALL), AlphaSettings(**DIGITS, methods=METHODS)),
    "fashion_mnist": by_scale(AlphaSettings(**IMAGES, **SMALL), paper=AlphaSettings(methods=METHODS)),
}


def check(study: Study) -> None:
    """Builds every method at the smallest and the largest alpha; raises ``ValueError``."""
    s = study.settings
    if s.partition != "dirichlet":
        raise ValueError(f"partition: got {s.partition!r}, must be dirichlet, whose alpha this is about")
    if "ntk_fl" not in s.methods:
        raise ValueError(f"methods: got {', '.join(s.methods)}, must have ntk_fl among them")
    for alpha in (s.alphas[0], s.alphas[-1]):
        report.check(study, alpha=alpha)


def run(study: Study) -> Outcome:
    """Tunes at the smallest alpha, and runs every method at each."""
    s, tuned, found = study.settings, dict[str, Tuned](), dict[float, Runs]()
    compiled: dict[Any, Any] = {}
    for alpha in s.alphas:
        bench = report.bench_of(study, alpha=alpha)
        bench.compiled = compiled  # clients are of the same sizes at every alpha
        tuned = tuned or report.tune_all(bench)
        study.say(f"alpha {alpha:g}")
        found[alpha] = report.repeat_all(bench, tuned)
    ends = {alpha: report.ends(runs, s) for alpha, runs in found.items()}
    rows = [
        {"method": m, "alpha": alpha, "accuracy": float(of[m].mean()), "seeds": of[m]}
        for m in s.methods for alpha, of in ends.items()
    ]  # fmt: skip
    gains = {m: ends[s.alphas[-1]][m] - ends[s.alphas[0]][m] for m in s.methods}
    title = f"test accuracy, mean of the last {s.window} of {s.num_rounds} rounds, +- its standard error, against alpha"
    shown = tuple((LABELS[m], *(report.mean_and_error(of[m]) for of in ends.values()), f"{interval(gains[m]):+.4f}")
                  for m in s.methods)  # fmt: skip
    sheet = Sheet(title, ("method", *(f"{alpha:g}" for alpha in s.alphas), "last - first, 95 % interval"), shown)
    lines = {LABELS[m]: np.stack([of[m] for of in ends.values()], axis=1) for m in s.methods}
    title = f"{study.dataset}, round {s.num_rounds}, {s.num_clients} clients, {s.clients_per_round} a round"
    path = study.figures.path("accuracy_by_alpha")
    curves({"test accuracy": lines}, s.alphas, title, path, across="Dirichlet alpha")
    runs = {f"alpha {alpha:g}: ": of for alpha, of in found.items()}
    return report.outcome(study, CLAIM, tuned, (sheet,), rows, judge(s, gains), runs)


def judge(s: AlphaSettings, gains: dict[str, np.ndarray]) -> list[Claim]:
    """Judges whether each method gains more from the smallest to the largest alpha than NTK-FL; gains are [seeds]."""
    more = {name: interval(gains[name] - gains["ntk_fl"]) for name in s.methods if name != "ntk_fl"}
    claim = f"gains more from alpha {s.alphas[0]:g} to {s.alphas[-1]:g} than NTK-FL"
    return [Claim(f"{LABELS[name]} {claim}", f"by {d:+.4f}", d.above()) for name, d in more.items()]


ENTRIES = (experiment(__name__, run, SCALES, ("yue2022",), check=check, least_seeds=2),)
