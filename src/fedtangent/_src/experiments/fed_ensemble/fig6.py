"""Fig. 6 of Fed-ensemble: no server; one model that walks over a ring of ten clients, beside the mean of K such models.

The paper's data are CIFAR-10, i.i.d. In a round each of the K models, or the single model, is trained by one client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.fed_ensemble import classifiers
from fedtangent._src.experiments.fed_ensemble.classifiers import ClassifierSettings, Scores
from fedtangent._src.experiments.fed_ensemble.table2 import image_scales
from fedtangent._src.experiments.lab.runner import Study, experiment, with_changes


def run(study: Study) -> lab.Outcome:
    """Trains a single walk, and K walks whose predictions are averaged."""
    return classifiers.outcome(study, "Fig. 6", {}, claims)


def claims(scores: Sequence[Scores]) -> Iterator[lab.Claim]:
    """Judges whether the mean of several walks is more accurate than one."""
    for walks in (f for f in scores if f.entrant.num_models > 1):
        one = next(f for f in scores if f.classes == walks.classes and f.entrant.num_models == 1)
        statement = f"the mean of {walks.entrant.num_models} walks is more accurate than one"
        yield classifiers.difference(walks, one).claim_above(statement)


PAPER = "methods=random_walk num_models=1,5 classes_per_client=0 num_clients=10 num_rounds=200"
SCALES = image_scales(with_changes(ClassifierSettings(), PAPER), default="num_clients=10 num_rounds=100")
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024",), check=classifiers.check, least_seeds=2),)
