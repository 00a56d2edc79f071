"""Table VII of Fed-ensemble: every client trains every model once in K rounds, beside one drawn at random each round.

The paper sees no difference i.i.d. and a gain of permutations with two classes a client (CIFAR-10, K = 5).
"""

from __future__ import annotations

from functools import partial

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.fed_ensemble import classifiers
from fedtangent._src.experiments.fed_ensemble.classifiers import ClassifierSettings, published
from fedtangent._src.experiments.fed_ensemble.table2 import image_scales
from fedtangent._src.experiments.lab.runner import Study, experiment, with_changes
from fedtangent._src.experiments.lab.trials import IID

PUBLISHED = {
    "cifar10": {
        **published(IID, random_sampling=87.8, fed_ensemble=88.0),
        **published(2, random_sampling=70.6, fed_ensemble=71.2),
    }
}


def run(study: Study) -> lab.Outcome:
    """Trains with both schedules, on clients of every kind."""
    claims = partial(classifiers.ahead, method="fed_ensemble")
    return classifiers.outcome(study, "Table VII", PUBLISHED, claims)


SCALES = image_scales(with_changes(ClassifierSettings(), "methods=random_sampling,fed_ensemble"))
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024",), check=classifiers.check, least_seeds=2),)
