"""Table VI of Fed-ensemble: accuracy of one, two and five models, i.i.d. and two classes a client (CIFAR-10)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fedtangent.experiments.fed_ensemble.table2 import CIFAR10, DIGITS, IMAGES, SMOKE
from fedtangent.experiments.fed_ensemble.table5 import ONE, run
from fedtangent.experiments.lab import league
from fedtangent.experiments.lab.league import LeagueSettings
from fedtangent.experiments.lab.runner import by_scale, experiment

PAPER = LeagueSettings(**ONE, num_models=(1, 2, 5))
SMALL = replace(PAPER, **SMOKE)
IMAGES_SCALES = by_scale(SMALL, replace(PAPER, **IMAGES), PAPER)
SCALES = {
    "digits": by_scale(SMALL, replace(PAPER, **DIGITS)),
    "cifar10": {**IMAGES_SCALES, "paper": replace(PAPER, **CIFAR10)},
    "mnist": IMAGES_SCALES,
    "fashion_mnist": IMAGES_SCALES,
}
ENTRIES = (
    experiment(__name__, partial(run, "Table VI"), SCALES, ("shi2024",), check=league.check, least_seeds=2),
)  # fmt: skip
