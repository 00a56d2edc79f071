"""Table III of Fed-ensemble: FEMNIST by writer, each tested on its own examples; personal models and weights.

A writer of Fed-ensemble weighs the models by their loss on its own training examples (eq. 4). The paper says neither
how FEMNIST was trained nor gamma, Ditto's lambda and FedDyn's alpha: they are settings, alike for all data sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedtangent._src.experiments.fed_ensemble.table2 import DIGITS, SMOKE
from fedtangent._src.experiments.lab import league, league_report
from fedtangent._src.experiments.lab.league import LeagueSettings, Scores
from fedtangent._src.experiments.lab.results import Claim, Outcome, Sheet, interval, table
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment
from fedtangent._src.experiments.lab.trials import DISTORTED, USERS, scheme_name

METHODS = ("fed_avg", "ditto", "lg_fed_avg", "fed_ensemble", "fed_dyn", "fed_dyn_ensemble")
PUBLISHED = {
    "femnist": {
        (name, USERS): value
        for name, value in {
            "fed_avg": 77.9, "ditto": 80.2, "lg_fed_avg": 46.0, "fed_ensemble-5": 80.5, "fed_dyn": 82.0,
            "fed_dyn_ensemble-5": 83.4,
        }.items()
    }
}  # fmt: skip
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
        if league.divide(study, classes, study.seeds[0]).by_client is None:
            raise ValueError(f"classes_per_client: got {classes}, must be {USERS} or {DISTORTED}, clients tested apart")
    league.check(study)


def run(study: Study) -> Outcome:
    """Trains with every method of the table."""
    return league_report.outcome(study, "Table III", PUBLISHED, claims, lambda found: (own_predictions(found),))


def own_predictions(found: Sequence[Scores]) -> Sheet:
    """Builds the table of a client's own prediction, on its and another's examples, and of the shared prediction."""
    names = ("accuracy", "shared", "others")
    rows = [
        {"clients": scheme_name(f.classes), "method": f.entrant.label,
         **{name: 100 * float(f.values[name].mean()) for name in names}}
        for f in found
    ]  # fmt: skip
    columns = {"clients": "{clients}", "method": "{method}", "its own prediction %": "{accuracy:.2f}",
               "everybody's %": "{shared:.2f}", "its own, on another's examples %": "{others:.2f}"}  # fmt: skip
    return table("whose prediction, on whose examples", rows, columns)


def claims(found: Sequence[Scores]) -> tuple[Claim, ...]:
    """Judges the paper's claims, and whether a client's prediction is better for it than the shared one.

    It should also be better for the client itself than for another client.
    """
    at, said = {(f.entrant.method, f.classes): f for f in found}, list[Claim]()
    for classes in dict.fromkeys(f.classes for f in found):
        pairs = [(at.get((one, classes)), at.get((other, classes))) for one, other in AHEAD]
        said += [league_report.more_accurate(one, other) for one, other in pairs if one and other]
        for name in ("fed_ensemble", "fed_dyn_ensemble", "ditto"):
            if (f := at.get((name, classes))) is None:
                continue
            of, v = f"{scheme_name(classes)}: {f.entrant.label}", f.values
            gain, owned = interval(v["accuracy"] - v["shared"]), interval(v["accuracy"] - v["others"])
            said.append(Claim(f"{of}: a client predicts better for itself than everybody", f"{gain:+.4f}",
                              gain.above()))  # fmt: skip
            said.append(Claim(f"{of}: and better for itself than for another", f"{owned:+.4f}", owned.above()))
    return tuple(said)


ALL: dict[str, Any] = {"methods": METHODS}
MADE: dict[str, Any] = {**ALL, "classes_per_client": (DISTORTED,), "num_models": (5,)}
WRITERS: dict[str, Any] = {**ALL, "classes_per_client": (USERS,)}
FEW: dict[str, Any] = {
    "num_clients": 0, "num_rounds": 30, "local_epochs": 2, "model": "mlp", "width": 100, "weight_decay": 0.0,
    "learning_rates": (0.03, 0.1, 0.3, 1.0), "tuning_rounds": 10, "num_validation": 1500,
}  # fmt: skip
PAPER = LeagueSettings(**WRITERS, num_clients=0)
SCALES = {
    "digits": by_scale(LeagueSettings(**SMOKE, **MADE), LeagueSettings(**DIGITS, **MADE)),
    "femnist": by_scale(
        LeagueSettings(**{**SMOKE, **WRITERS, "num_train": 1000}), LeagueSettings(**FEW, **WRITERS), PAPER
    ),
}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024",), check=check, least_seeds=2),)
