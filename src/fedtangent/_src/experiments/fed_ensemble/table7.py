"""Table VII of Fed-ensemble: every client trains every model once in K rounds, beside one drawn at random each round.

The paper sees no difference i.i.d. and a gain of permutations with two classes a client (CIFAR-10, K = 5).
"""

from __future__ import annotations

from functools import partial

from fedtangent._src.experiments.fed_ensemble.table2 import image_scales
from fedtangent._src.experiments.lab import league, league_report
from fedtangent._src.experiments.lab.league import LeagueSettings
from fedtangent._src.experiments.lab.results import Outcome
from fedtangent._src.experiments.lab.runner import Study, experiment
from fedtangent._src.experiments.lab.trials import IID

PUBLISHED = {
    "cifar10": {
        ("random_sampling-5", IID): 87.8, ("fed_ensemble-5", IID): 88.0, ("random_sampling-5", 2): 70.6,
        ("fed_ensemble-5", 2): 71.2,
    }
}  # fmt: skip


def run(study: Study) -> Outcome:
    """Trains with both schedules, on clients of every kind."""
    return league_report.outcome(study, "Table VII", PUBLISHED, partial(league_report.ahead, of="fed_ensemble"))


SCALES = image_scales(LeagueSettings(methods=("random_sampling", "fed_ensemble")))
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024",), check=league.check, least_seeds=2),)
