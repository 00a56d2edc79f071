"""Fig. 4 of Fed-ensemble: test accuracy by round on Shakespeare; FedAvg and FedProx overfit, Fed-ensemble does not.

The curves of the 2021 appendix (its figures 4 to 6) are those that ``fed_ensemble.table2`` draws, on each data set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.fed_ensemble import classifiers
from fedtangent._src.experiments.fed_ensemble.classifiers import LAST, Scores
from fedtangent._src.experiments.fed_ensemble.table2 import DIGITS, ON_TEXT, PUBLISHED, SMOKE, TEXT_DEFAULT, TEXT_SMOKE
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes


def run(study: Study) -> lab.Outcome:
    """Trains with every method of the figure."""
    return classifiers.outcome(study, "Fig. 4", PUBLISHED, claims, lambda scores: (_falls(scores),))


def _falls(scores: Sequence[Scores]) -> lab.Sheet:
    """Builds the table of how far each method ends below its best accuracy."""
    rows = [{"method": f.entrant.label, "fell": 100 * lab.interval(f.values["fell"]).mean} for f in scores]
    title = f"accuracy of the last {LAST} rounds, below the best {LAST} of the run"
    return lab.table(title, rows, "method: {method} | below its best %: {fell:.2f}")


def claims(scores: Sequence[Scores]) -> Iterator[lab.Claim]:
    """Judges whether Fed-ensemble ends above the others, and they fall further below their best accuracy."""
    yield from classifiers.ahead(scores, "fed_ensemble")
    for ensemble in [f for f in scores if f.entrant.method == "fed_ensemble"][:1]:
        for other in (f for f in scores if f is not ensemble):
            statement = f"{other.entrant.label} falls by more than {ensemble.entrant.label}"
            yield classifiers.difference(other, ensemble, "fell").claim_above(statement)


TEN = "num_clients=10 batch_size=16 optimizer=sgd"
SCALES = {
    "digits": by_scale(with_changes(ON_TEXT, SMOKE, "optimizer=sgd"), with_changes(ON_TEXT, DIGITS, TEN)),
    "shakespeare": by_scale(with_changes(ON_TEXT, TEXT_SMOKE), with_changes(ON_TEXT, TEXT_DEFAULT), ON_TEXT),
}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), check=classifiers.check, least_seeds=2),)
