"""Fig. 4 of Fed-ensemble: test accuracy by round on Shakespeare; FedAvg and FedProx overfit, Fed-ensemble does not.

The curves of the 2021 appendix (its figures 4 to 6) are those that ``fed_ensemble.table2`` draws, on each data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedtangent._src.experiments.fed_ensemble.table2 import DIGITS, PUBLISHED, SMOKE, TEXT, TEXT_DEFAULT, TEXT_SMOKE
from fedtangent._src.experiments.lab import league, league_report
from fedtangent._src.experiments.lab.league import LAST, LeagueSettings, Scores
from fedtangent._src.experiments.lab.results import Claim, Outcome, Sheet, interval, table
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment


def run(study: Study) -> Outcome:
    """Trains with every method of the figure."""
    return league_report.outcome(study, "Fig. 4", PUBLISHED, claims, lambda found: (falls(found),))


def falls(found: Sequence[Scores]) -> Sheet:
    """Builds the table of how far each method ends below its best accuracy."""
    rows = [{"method": f.entrant.label, "fell": 100 * interval(f.values["fell"]).mean} for f in found]
    columns = {"method": "{method}", "below its best %": "{fell:.2f}"}
    return table(f"accuracy of the last {LAST} rounds, below the best {LAST} of the run", rows, columns)


def claims(found: Sequence[Scores]) -> tuple[Claim, ...]:
    """Judges whether Fed-ensemble ends above the others, and they fall further below their best accuracy."""
    said = list(league_report.ahead(found, "fed_ensemble"))
    own = next((f for f in found if f.entrant.method == "fed_ensemble"), None)
    for other in (f for f in found if own is not None and f is not own):
        assert own is not None
        d = league_report.difference(other, own, "fell")
        said.append(Claim(f"{other.entrant.label} falls by more than {own.entrant.label}", f"{d:+.4f}", d.above()))
    return tuple(said)


PAPER = LeagueSettings(**TEXT)
SCALES = {
    "digits": by_scale(
        replace(PAPER, **{**SMOKE, "optimizer": "sgd"}),
        replace(PAPER, **{**DIGITS, "num_clients": 10, "batch_size": 16, "optimizer": "sgd"}),
    ),
    "shakespeare": by_scale(replace(PAPER, **TEXT_SMOKE), replace(PAPER, **TEXT_DEFAULT), PAPER),
}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), check=league.check, least_seeds=2),)
