"""What the comparisons of Fed-ensemble report: accuracies beside the paper's, claims, accuracy by round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedtangent._src.experiments.lab.league import LAST, Scores, entrants, play_all
from fedtangent._src.experiments.lab.results import Claim, MeanInterval, Outcome, Sheet, grouped, interval, table
from fedtangent._src.experiments.lab.runner import Study
from fedtangent._src.experiments.lab.runs import Runs
from fedtangent._src.experiments.lab.trials import scheme_name
from fedtangent._src.output.run_plots import curves


def sheet(title: str, found: Sequence[Scores], published: Mapping[tuple[str, int], float]) -> Sheet:
    """Builds the table of accuracies in percent, with deviations and published values.

    Args:
        title: Title of the table.
        found: Scores of all entrants; deviations are over last rounds and seeds.
        published: Published percents by (entrant's key, classes per client).
    """
    rows = [
        {
            "clients": scheme_name(f.classes), "method": f.entrant.label, "rate": f.chosen.config.rate,
            "accuracy": 100 * f.values["accuracy"].mean(), "spread": 100 * f.spread,
            "published": published.get((f.entrant.key, f.classes)),
        }
        for f in found
    ]  # fmt: skip
    columns = {"clients": "{clients}", "method": "{method}", "rate": "{rate:g}", "accuracy %": "{accuracy:.2f}",
               "deviation": "{spread:.2f}"}  # fmt: skip
    return table(title, rows, columns | ({"published": "{published:.2f}"} if published else {}))


def rows_of(found: Sequence[Scores]) -> list[dict[str, Any]]:
    """Builds the rows of result.json."""
    return [
        {"method": f.entrant.method, "num_models": f.entrant.num_models, "classes_per_client": f.classes,
         "learning_rate": f.chosen.config.rate, "validation_accuracy": f.chosen.score, "deviation": f.spread,
         **{name: float(v.mean()) for name, v in f.values.items()},
         "by_seed": [float(v) for v in f.values["accuracy"]]}
        for f in found
    ]  # fmt: skip


def difference(one: Scores, other: Scores, metric: str = "accuracy") -> MeanInterval:
    """Computes the difference of two entrants in ``metric``, paired by seed."""
    return interval(one.values[metric] - other.values[metric])


def more_accurate(one: Scores, other: Scores) -> Claim:
    """Judges whether the first of two entrants on the same clients is more accurate."""
    d = difference(one, other)
    said = f"{scheme_name(one.classes)}: {one.entrant.label} is more accurate than {other.entrant.label}"
    return Claim(said, f"{d:+.4f}", d.above())


def ahead(found: Sequence[Scores], of: str) -> tuple[Claim, ...]:
    """Judges whether the method ``of`` is more accurate than every other, on clients of every kind."""
    said = []
    for own in grouped(found, "classes").values():
        for one in (f for f in own if f.entrant.method == of):
            said += [more_accurate(one, other) for other in own if other.entrant.method != of]
    return tuple(said)


def outcome(
    study: Study,
    name: str,
    published: Mapping[str, Mapping[tuple[str, int], float]],
    claims: Callable[[Sequence[Scores]], tuple[Claim, ...]],
    more: Callable[[Sequence[Scores]], tuple[Sheet, ...]] = lambda _: (),
) -> Outcome:
    """Trains every entrant and reports the table ``name``, accuracy by round, and the claims.

    Args:
        study: The study.
        name: Name of the table.
        published: Published percents by data set and (entrant's key, classes per client).
        claims: Function from all scores to the claims.
        more: Function from all scores to further sheets.
    """
    found, runs = play_all(study)
    draw_rounds(study, runs)
    title = f"{name} on {study.dataset}: test accuracy of the last {LAST} rounds, {len(study.seeds)} seeds"
    edges = [f"{f.entrant.label}, {scheme_name(f.classes)}" for f in found if f.chosen.at_edge]
    remarks = [f"rates at an edge of the grid: {'; '.join(edges)}"] if edges else []
    if study.dataset in published:
        remarks.append("published: percent, on the paper's full set-up, in its last three rounds")
    return Outcome(
        (sheet(title, found, published.get(study.dataset, {})), *more(found)),
        rows_of(found),
        claims(found),
        remarks=tuple(remarks),
    )


def draw_rounds(study: Study, runs: Mapping[int, Runs]) -> None:
    """Draws test accuracy by round, a panel for each kind of clients."""
    names = {e.key: e.label for e in entrants(study.settings)}
    panels = {
        f"test accuracy, {scheme_name(classes)}": {
            names[key]: np.stack([r.test for r in own]) for key, own in of.items()
        }
        for classes, of in runs.items()
    }
    rounds = [int(r) for r in next(iter(next(iter(runs.values())).values()))[0].rounds]
    curves(panels, rounds, f"{study.dataset}, {len(study.seeds)} seeds", study.figures.path("by_round"), late=True)
