"""Fig. 6 of Fed-ensemble: no server; models walk over a ring of ten clients, one beside the mean of K that walk alone.

The paper's is CIFAR-10, i.i.d. A round is a step of each walk, in which K models train K clients and one model one.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedtangent._src.experiments.fed_ensemble.table2 import image_scales
from fedtangent._src.experiments.lab import league, league_report
from fedtangent._src.experiments.lab.league import LeagueSettings, Scores
from fedtangent._src.experiments.lab.results import Claim, Outcome
from fedtangent._src.experiments.lab.runner import Study, experiment
from fedtangent._src.experiments.lab.trials import IID


def run(study: Study) -> Outcome:
    """Trains a single walk, and K walks whose predictions are averaged."""
    return league_report.outcome(study, "Fig. 6", {}, claims)


def claims(found: Sequence[Scores]) -> tuple[Claim, ...]:
    """Judges whether the mean of several walks is more accurate than one."""
    said = []
    for several in (f for f in found if f.entrant.num_models > 1):
        one = next(f for f in found if f.classes == several.classes and f.entrant.num_models == 1)
        d = league_report.difference(several, one)
        said.append(Claim(f"the mean of {several.entrant.num_models} walks is more accurate than one", f"{d:+.4f}",
                          d.above()))  # fmt: skip
    return tuple(said)


PAPER = LeagueSettings(
    methods=("random_walk",), num_models=(1, 5), classes_per_client=(IID,), num_clients=10, num_rounds=200
)
SCALES = image_scales(PAPER, default={"num_clients": 10, "num_rounds": 100})
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024",), check=league.check, least_seeds=2),)
