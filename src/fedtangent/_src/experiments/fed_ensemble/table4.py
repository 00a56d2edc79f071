"""Table IV of Fed-ensemble: the fewer classes a client holds, the more Fed-ensemble is ahead of FedAvg and FedProx.

The paper's is CIFAR-10 with ResNet-18 and N.o.C. of 2, 4, 6, 8 and 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedtangent._src.experiments.fed_ensemble.table2 import image_scales
from fedtangent._src.experiments.lab import league, league_report
from fedtangent._src.experiments.lab.league import LeagueSettings, Scores
from fedtangent._src.experiments.lab.results import Claim, Outcome, interval
from fedtangent._src.experiments.lab.runner import Study, experiment

COUNTS = (2, 4, 6, 8, 10)
PUBLISHED = {
    "cifar10": {
        (method, classes): value
        for method, values in {
            "fed_avg": (66.19, 83.90, 85.90, 85.90, 86.52),
            "fed_prox": (66.87, 84.40, 86.10, 86.06, 86.77),
            "fed_ensemble-5": (71.45, 86.12, 87.14, 87.33, 87.94),
        }.items()
        for classes, value in zip(COUNTS, values, strict=True)
    }
}


def run(study: Study) -> Outcome:
    """Trains with every method and every number of classes."""
    return league_report.outcome(study, "Table IV", PUBLISHED, claims)


def claims(found: Sequence[Scores]) -> tuple[Claim, ...]:
    """Judges whether Fed-ensemble is ahead, and more so with few classes per client than with many."""
    said, counts = list(league_report.ahead(found, "fed_ensemble")), sorted({f.classes for f in found})
    at = {(f.entrant.method, f.classes): f.values["accuracy"] for f in found}
    for other in dict.fromkeys(f.entrant.method for f in found if f.entrant.method != "fed_ensemble"):
        leads = np.array([at["fed_ensemble", c] - at[other, c] for c in counts])  # [counts, seeds]
        d = interval(leads[0] - leads[-1])
        name = (
            f"the lead over {league.LABELS[other]} is larger with {counts[0]} classes a client than with {counts[-1]}"
        )
        said.append(Claim(name, f"{d:+.4f}", d.above()))
    return tuple(said)


FEW: dict[str, Any] = {"methods": ("fed_avg", "fed_prox", "fed_ensemble"), "classes_per_client": COUNTS}
SCALES = image_scales(LeagueSettings(**FEW), smoke={"classes_per_client": (2, 10)})
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), check=league.check, least_seeds=2),)
