"""Table IV of Fed-ensemble: the fewer classes a client holds, the more Fed-ensemble is ahead of FedAvg and FedProx.

The paper's is CIFAR-10 with ResNet-18 and N.o.C. of 2, 4, 6, 8 and 10.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.fed_ensemble import classifiers
from fedtangent._src.experiments.fed_ensemble.classifiers import LABELS, ClassifierSettings, Scores, published
from fedtangent._src.experiments.fed_ensemble.table2 import image_scales
from fedtangent._src.experiments.lab.runner import Study, experiment, with_changes

PUBLISHED = {
    "cifar10": {
        **published(2, fed_avg=66.19, fed_prox=66.87, fed_ensemble=71.45),
        **published(4, fed_avg=83.90, fed_prox=84.40, fed_ensemble=86.12),
        **published(6, fed_avg=85.90, fed_prox=86.10, fed_ensemble=87.14),
        **published(8, fed_avg=85.90, fed_prox=86.06, fed_ensemble=87.33),
        **published(10, fed_avg=86.52, fed_prox=86.77, fed_ensemble=87.94),
    }
}


def run(study: Study) -> lab.Outcome:
    """Trains with every method and every number of classes."""
    return classifiers.outcome(study, "Table IV", PUBLISHED, claims)


def claims(scores: Sequence[Scores]) -> Iterator[lab.Claim]:
    """Judges whether Fed-ensemble is ahead, and more so with few classes per client than with many."""
    yield from classifiers.ahead(scores, "fed_ensemble")
    counts = sorted({f.classes for f in scores})
    accuracy = {(f.entrant.method, f.classes): f.values["accuracy"] for f in scores}
    for other in dict.fromkeys(f.entrant.method for f in scores if f.entrant.method != "fed_ensemble"):
        leads = np.array([accuracy["fed_ensemble", c] - accuracy[other, c] for c in counts])  # [counts, seeds]
        statement = f"the lead over {LABELS[other]} is larger with {counts[0]} classes a client than with {counts[-1]}"
        yield lab.interval(leads[0] - leads[-1]).claim_above(statement)


PAPER = "methods=fed_avg,fed_prox,fed_ensemble classes_per_client=2,4,6,8,10"
SCALES = image_scales(with_changes(ClassifierSettings(), PAPER), smoke="classes_per_client=2,10")
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), check=classifiers.check, least_seeds=2),)
