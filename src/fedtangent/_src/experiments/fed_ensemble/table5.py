"""Table V of Fed-ensemble: accuracy against the number of models K, of the ensemble and of its models.

With more models the ensemble's accuracy rises at first; each model then sees fewer clients in a round, and its own
accuracy falls while the entropy of its predictions rises (MNIST, K from 3 to 80, i.i.d.).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fedtangent._src.experiments.fed_ensemble.table2 import DIGITS, IMAGES, SMOKE
from fedtangent._src.experiments.lab import league, league_report
from fedtangent._src.experiments.lab.league import LeagueSettings, Scores
from fedtangent._src.experiments.lab.results import Claim, Outcome, Sheet, grouped, table
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment
from fedtangent._src.experiments.lab.trials import IID, scheme_name

# FE-2024, tables V and VI, percent.
PUBLISHED = {
    "mnist": {(f"fed_ensemble-{k}", IID): v for k, v in
              {3: 97.49, 5: 97.85, 20: 98.19, 40: 98.17, 80: 97.98}.items()},
    "cifar10": {
        (f"fed_ensemble-{k}" if k > 1 else "fed_ensemble", c): v
        for c, of in {IID: {1: 86.4, 2: 88.6, 5: 88.0}, 2: {1: 66.1, 2: 68.0, 5: 71.2}}.items() for k, v in of.items()
    },
}  # fmt: skip
MODELS = {"mnist": {3: (95.50, 94.97, 0.16), 5: (95.60, 95.00, 0.15), 20: (95.57, 94.13, 0.16),
                    40: (95.53, 93.54, 0.18), 80: (94.84, 92.74, 0.20)}}  # fmt: skip


def run(name: str, study: Study) -> Outcome:
    """Trains with every number of models, for the table called ``name``."""
    return league_report.outcome(study, name, PUBLISHED, claims, lambda found: (each_model(study, found),))


def each_model(study: Study, found: Sequence[Scores]) -> Sheet:
    """Builds the table of the ensembles' single models: the best, the worst, and the mean entropy of predictions."""
    rows = []
    for f in found:
        best, worst, entropy = MODELS.get(study.dataset, {}).get(f.entrant.num_models, (None,) * 3)
        given = {name: 100 * float(f.values[name].mean()) for name in ("largest", "least")}
        rows.append({
            "clients": scheme_name(f.classes), "k": f.entrant.num_models, **given,
            "entropy": float(f.values["entropy"].mean()), "best": best, "worst": worst, "published": entropy,
        })  # fmt: skip
    columns = {"clients": "{clients}", "K": "{k}", "best %": "{largest:.2f}", "worst %": "{least:.2f}",
               "entropy": "{entropy:.3f}", "published best": "{best:.2f}", "worst": "{worst:.2f}",
               "published entropy": "{published:.2f}"}  # fmt: skip
    return table("the models of an ensemble by themselves", rows, columns)


def claims(found: Sequence[Scores]) -> tuple[Claim, ...]:
    """Judges whether more models make the ensemble more accurate at first, and its single models less accurate."""
    said = []
    for (classes,), same in grouped(found, "classes").items():
        own = sorted(same, key=lambda f: f.entrant.num_models)
        best = max(own, key=lambda f: float(np.mean(f.values["accuracy"])))
        least, most = own[0], own[-1]
        name, k = scheme_name(classes), [f.entrant.num_models for f in (least, best, most)]
        gain = league_report.difference(most, least)
        said.append(Claim(f"{name}: K = {k[2]} is more accurate than K = {k[0]}", f"{gain:+.4f}", gain.above()))
        if best is not least:
            d = league_report.difference(best, least)
            said.append(Claim(f"{name}: the best, K = {k[1]}, is above K = {k[0]}", f"{d:+.4f}", d.above()))
        loss = league_report.difference(most, least, "least")
        said.append(Claim(f"{name}: the worst model of K = {k[2]} is below that of K = {k[0]}", f"{loss:+.4f}",
                          loss.below()))  # fmt: skip
        entropy = league_report.difference(most, least, "entropy")
        said.append(Claim(f"{name}: models of K = {k[2]} are less certain than those of K = {k[0]}", f"{entropy:+.4f}",
                          entropy.above()))  # fmt: skip
    return tuple(said)


ONE: dict[str, Any] = {"methods": ("fed_ensemble",)}
ALIKE: dict[str, Any] = {**ONE, "classes_per_client": (IID,)}
PAPER = LeagueSettings(**ALIKE, num_models=(3, 5, 20, 40, 80))
SMALL = replace(PAPER, **SMOKE, num_models=(2, 5))
MNIST = by_scale(SMALL, replace(PAPER, **IMAGES, num_models=(3, 5, 10, 25)), PAPER)
SCALES = {
    "digits": by_scale(SMALL, replace(PAPER, **DIGITS, num_models=(1, 2, 5, 10, 25))),
    "mnist": MNIST,
    "fashion_mnist": MNIST,
}
ENTRIES = (
    experiment(
        __name__, partial(run, "Table V"), SCALES, ("shi2024", "shi2021"), check=league.check, least_seeds=2
    ),
)  # fmt: skip
