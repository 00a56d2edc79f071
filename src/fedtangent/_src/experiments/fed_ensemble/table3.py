"""Table III of Fed-ensemble: FEMNIST by writer, each tested on its own examples; personal models and weights.

A writer of Fed-ensemble weighs the models by their loss on its own training examples (eq. 4). The paper says neither
how FEMNIST was trained nor gamma, Ditto's lambda and FedDyn's alpha: they are settings, alike for all data sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.fed_ensemble import classifiers
from fedtangent._src.experiments.fed_ensemble.classifiers import ClassifierSettings, Scores, published
from fedtangent._src.experiments.fed_ensemble.table2 import DIGITS, SMOKE
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes
from fedtangent._src.experiments.lab.trials import DISTORTED, USERS, scheme_name

WRITERS = published(
    USERS, fed_avg=77.9, ditto=80.2, lg_fed_avg=46.0, fed_ensemble=80.5, fed_dyn=82.0, fed_dyn_ensemble=83.4
)
# Pairs of methods of which the paper finds the first to be more accurate.
AHEAD = (
    ("fed_ensemble", "fed_avg"),
    ("fed_ensemble", "ditto"),
    ("ditto", "fed_avg"),
    ("fed_avg", "lg_fed_avg"),
    ("fed_dyn", "fed_avg"),
    ("fed_dyn_ensemble", "fed_dyn"),
    ("fed_dyn_ensemble", "fed_ensemble"),
)


def check(study: Study) -> None:
    """Builds every method; raises ``ValueError`` for clients without test examples of their own."""
    for classes in study.settings.classes_per_client:
        if classifiers.divide(study, classes, study.seeds[0]).by_client is None:
            raise ValueError(f"classes_per_client: got {classes}, must be {USERS} or {DISTORTED}, clients tested apart")
    classifiers.check(study)


def run(study: Study) -> lab.Outcome:
    """Trains with every method of the table."""
    in_table = {"femnist": WRITERS}
    return classifiers.outcome(study, "Table III", in_table, _claims, lambda scores: (_own_predictions(scores),))


def _own_predictions(scores: Sequence[Scores]) -> lab.Sheet:
    """Builds the table of a client's own prediction, on its and another's examples, and of the shared prediction."""
    rows = []
    for f in scores:
        percents = {name: 100 * float(f.values[name].mean()) for name in ("accuracy", "shared", "others")}
        rows.append({"clients": scheme_name(f.classes), "method": f.entrant.label, **percents})
    columns = "clients: {clients} | method: {method} | its own prediction %: {accuracy:.2f} | everybody's %: "
    columns += "{shared:.2f} | its own, on another's examples %: {others:.2f}"
    return lab.table("whose prediction, on whose examples", rows, columns)


def _claims(scores: Sequence[Scores]) -> Iterator[lab.Claim]:
    """Judges the paper's claims, and whether a client's prediction is better for it than the shared one."""
    # It should also be better for the client itself than for another client.
    for (classes,), group in lab.grouped(scores, "classes").items():
        by_method = {f.entrant.method: f for f in group}
        for one, other in AHEAD:
            if one in by_method and other in by_method:
                yield classifiers.more_accurate(by_method[one], by_method[other])
        for name in ("fed_ensemble", "fed_dyn_ensemble", "ditto"):
            if name in by_method:
                label, values = f"{scheme_name(classes)}: {by_method[name].entrant.label}", by_method[name].values
                over_shared = lab.interval(values["accuracy"] - values["shared"])
                yield over_shared.claim_above(f"{label}: a client predicts better for itself than everybody")
                over_others = lab.interval(values["accuracy"] - values["others"])
                yield over_others.claim_above(f"{label}: and better for itself than for another")


METHODS = "methods=fed_avg,ditto,lg_fed_avg,fed_ensemble,fed_dyn,fed_dyn_ensemble"
FEW = (
    "num_clients=0 num_rounds=30 local_epochs=2 model=mlp width=100 weight_decay=0 learning_rates=0.03,0.1,0.3,1 "
    "tuning_rounds=10 num_validation=1500"
)
BY_DISTORTION = with_changes(ClassifierSettings(), METHODS, "classes_per_client=-2 num_models=5")
BY_WRITER = with_changes(ClassifierSettings(), METHODS, "classes_per_client=-1")
SCALES = {
    "digits": by_scale(with_changes(BY_DISTORTION, SMOKE), with_changes(BY_DISTORTION, DIGITS)),
    "femnist": by_scale(
        with_changes(BY_WRITER, SMOKE, "num_train=1000"),
        with_changes(BY_WRITER, FEW),
        with_changes(BY_WRITER, "num_clients=0"),
    ),
}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024",), check=check, least_seeds=2),)
