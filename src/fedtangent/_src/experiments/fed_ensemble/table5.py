"""Table V of Fed-ensemble: accuracy against the number of models K, of the ensemble and of its models.

With more models the ensemble's accuracy rises at first; each model then sees fewer clients in a round, and its own
accuracy falls while the entropy of its predictions rises (MNIST, K from 3 to 80, i.i.d.). ``table6`` is Table VI.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.fed_ensemble import classifiers
from fedtangent._src.experiments.fed_ensemble.classifiers import ClassifierSettings, Scores
from fedtangent._src.experiments.fed_ensemble.table2 import DIGITS, IMAGES, SMOKE, image_scales
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes
from fedtangent._src.experiments.lab.trials import IID, scheme_name


def _by_num_models(classes: int, percents: dict[int, float]) -> classifiers.Published:
    """Returns published percents of Fed-ensemble by K, on clients of one kind."""
    return {(classifiers.Entrant("fed_ensemble", k).key, classes): percent for k, percent in percents.items()}


PUBLISHED = {  # FE-2024, tables V and VI
    "mnist": _by_num_models(IID, {3: 97.49, 5: 97.85, 20: 98.19, 40: 98.17, 80: 97.98}),
    "cifar10": {
        **_by_num_models(IID, {1: 86.4, 2: 88.6, 5: 88.0}),
        **_by_num_models(2, {1: 66.1, 2: 68.0, 5: 71.2}),
    },
}
# The best and the worst single model's percent on MNIST, and the mean entropy, by K.
SINGLE = {
    3: (95.50, 94.97, 0.16),
    5: (95.60, 95.00, 0.15),
    20: (95.57, 94.13, 0.16),
    40: (95.53, 93.54, 0.18),
    80: (94.84, 92.74, 0.20),
}


def _run(name: str, study: Study) -> lab.Outcome:
    """Trains with every number of models, for the table of this name."""
    return classifiers.outcome(study, name, PUBLISHED, claims, lambda scores: (_single_models(study, scores),))


def _single_models(study: Study, scores: Sequence[Scores]) -> lab.Sheet:
    """Builds the table of the ensembles' single models: the best, the worst, and the mean entropy of predictions."""
    rows = []
    for f in scores:
        percents = {name: 100 * float(f.values[name].mean()) for name in ("largest", "least")}
        best, worst, entropy = (SINGLE if study.dataset == "mnist" else {}).get(f.entrant.num_models, (None,) * 3)
        published = {"best": best, "worst": worst, "published": entropy}
        row = {"clients": scheme_name(f.classes), "k": f.entrant.num_models, **percents, **published}
        rows.append({**row, "entropy": float(f.values["entropy"].mean())})
    columns = "clients: {clients} | K: {k} | best %: {largest:.2f} | worst %: {least:.2f} | entropy: {entropy:.3f} | "
    columns += "published best: {best:.2f} | worst: {worst:.2f} | published entropy: {published:.2f}"
    return lab.table("the models of an ensemble by themselves", rows, columns)


def claims(scores: Sequence[Scores]) -> Iterator[lab.Claim]:
    """Judges whether more models make the ensemble more accurate at first, and its single models less accurate."""
    for (classes,), group in lab.grouped(scores, "classes").items():
        ensembles = sorted(group, key=lambda f: f.entrant.num_models)
        best = max(ensembles, key=lambda f: float(np.mean(f.values["accuracy"])))
        least, most = ensembles[0], ensembles[-1]
        name, k = scheme_name(classes), [f.entrant.num_models for f in (least, best, most)]
        gain = classifiers.difference(most, least)
        yield gain.claim_above(f"{name}: K = {k[2]} is more accurate than K = {k[0]}")
        if best is not least:
            rise = classifiers.difference(best, least)
            yield rise.claim_above(f"{name}: the best, K = {k[1]}, is above K = {k[0]}")
        loss = classifiers.difference(most, least, "least")
        yield loss.claim_below(f"{name}: the worst model of K = {k[2]} is below that of K = {k[0]}")
        entropy = classifiers.difference(most, least, "entropy")
        yield entropy.claim_above(f"{name}: models of K = {k[2]} are less certain than those of K = {k[0]}")


PAPER = with_changes(ClassifierSettings(), "methods=fed_ensemble classes_per_client=0 num_models=3,5,20,40,80")
SMALL = with_changes(PAPER, SMOKE, "num_models=2,5")
MNIST = by_scale(SMALL, with_changes(PAPER, IMAGES, "num_models=3,5,10,25"), PAPER)
SCALES = {
    "digits": by_scale(SMALL, with_changes(PAPER, DIGITS, "num_models=1,2,5,10,25")),
    "mnist": MNIST,
    "fashion_mnist": MNIST,
}
TABLE_6 = "Table VI of Fed-ensemble: accuracy of one, two and five models, i.i.d. and two classes a client (CIFAR-10)."
SCALES_6 = image_scales(with_changes(ClassifierSettings(), "methods=fed_ensemble num_models=1,2,5"))
RUN, RUN_6, CHECK = partial(_run, "Table V"), partial(_run, "Table VI"), classifiers.check
ENTRIES = (
    experiment(__name__, RUN, SCALES, ("shi2024", "shi2021"), check=CHECK, least_seeds=2),
    experiment(__name__, RUN_6, SCALES_6, ("shi2024",), check=CHECK, least_seeds=2, part=("table6", TABLE_6)),
)
