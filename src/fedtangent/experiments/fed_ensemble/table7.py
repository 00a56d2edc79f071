"""Table VII of Fed-ensemble: every client trains every model once in K rounds, beside one drawn at random each round.

The paper sees no difference i.i.d. and a gain of permutations with two classes a client (CIFAR-10, K = 5).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fedtangent.experiments.fed_ensemble.table2 import CIFAR10, DIGITS, IMAGES, SMOKE
from fedtangent.experiments.lab import league, league_report
from fedtangent.experiments.lab.league import LeagueSettings
from fedtangent.experiments.lab.results import Outcome
from fedtangent.experiments.lab.runner import Study, by_scale, experiment
from fedtangent.experiments.lab.trials import IID

PUBLISHED = {
    "cifar10": {
        ("random_sampling-5", IID): 87.8, ("fed_ensemble-5", IID): 88.0, ("random_sampling-5", 2): 70.6,
        ("fed_ensemble-5", 2): 71.2,
    }
}  # fmt: skip


def run(study: Study) -> Outcome:
    """Both ways, on clients of both kinds."""
    return league_report.outcome(study, "Table VII", PUBLISHED, partial(league_report.ahead, of="fed_ensemble"))


BOTH: dict[str, Any] = {"methods": ("random_sampling", "fed_ensemble")}
PAPER = LeagueSettings(**BOTH)
IMAGES_SCALES = by_scale(replace(PAPER, **SMOKE), replace(PAPER, **IMAGES), PAPER)
SCALES = {
    "digits": by_scale(replace(PAPER, **SMOKE), replace(PAPER, **DIGITS)),
    "mnist": IMAGES_SCALES,
    "fashion_mnist": IMAGES_SCALES,
    "cifar10": {**IMAGES_SCALES, "paper": replace(PAPER, **CIFAR10)},
}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024",), check=league.check, least_seeds=2),)
