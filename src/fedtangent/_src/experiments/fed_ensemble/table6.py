"""Table VI of Fed-ensemble: accuracy of one, two and five models, i.i.d. and two classes a client (CIFAR-10)."""

from __future__ import annotations

from functools import partial

from fedtangent._src.experiments.fed_ensemble.table2 import image_scales
from fedtangent._src.experiments.fed_ensemble.table5 import ONE, run
from fedtangent._src.experiments.lab import league
from fedtangent._src.experiments.lab.league import LeagueSettings
from fedtangent._src.experiments.lab.runner import experiment

SCALES = image_scales(LeagueSettings(**ONE, num_models=(1, 2, 5)))
ENTRIES = (
    experiment(__name__, partial(run, "Table VI"), SCALES, ("shi2024",), check=league.check, least_seeds=2),
)  # fmt: skip
