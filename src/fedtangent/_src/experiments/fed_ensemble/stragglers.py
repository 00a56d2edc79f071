"""Stragglers of Fed-ensemble: 130 clients are asked and the first 100 to answer make the round (FE-2024, section V-C).

Its effect on the time of a round and on accuracy, beside waiting for all that are asked and asking only so many as are
kept. A client's time is lognormal, in the mean in proportion to its examples. Where it also rises with a client's
labels, the same clients are always late and what they know is lost: the control, in which accuracy has to fall.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fedtangent._src import streams
from fedtangent._src.experiments.fed_ensemble.table2 import DIGITS, IMAGES, SMOKE
from fedtangent._src.experiments.lab import league
from fedtangent._src.experiments.lab.league import LAST, Entrant, LeagueSettings
from fedtangent._src.experiments.lab.results import Claim, Outcome, grouped, interval, table
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.experiments.lab.trials import scheme_name
from fedtangent._src.federated.faults import round_times
from fedtangent._src.output.run_plots import curves

LITTLE = 0.01  # of accuracy: a smaller loss does not count


@dataclass(frozen=True)
class StragglerSettings(LeagueSettings):
    """The settings of the league; ``slow`` holds the values of ``slowness`` that are compared."""

    slow: tuple[float, ...] = within((0.0, 2.0), at_least=0)


class Waited(NamedTuple):
    """Results of one method under one way to close a round, on all seeds."""

    classes: int
    slowness: float
    way: str  # of ``ways``
    entrant: Entrant
    rate: float
    seconds: np.ndarray  # [seeds, R] of each round, in units of a client's mean time
    accuracy: np.ndarray  # [seeds, R + 1] on the test set, after each round


def ways(s: LeagueSettings) -> dict[str, tuple[int, int]]:
    """Returns the ways to close a round, as (asked, kept): after the first answers, after all, and with fewer asked."""
    asked, kept = s.clients_per_round, s.keep_first
    return {
        f"the first {kept} of {asked}": (asked, kept),
        f"all of {asked}": (asked, asked),
        f"all of {kept}": (kept, kept),
    }


def studies(study: Study) -> dict[tuple[float, str], Study]:
    """Returns a study for each slowness and each way to close a round."""
    s = study.settings
    return {
        (slowness, name): replace(
            study, settings=replace(s, clients_per_round=asked, keep_first=kept, slowness=slowness)
        )
        for slowness in s.slow
        for name, (asked, kept) in ways(s).items()
    }


def check(study: Study) -> None:
    """Builds every method under every way; raises ``ValueError`` unless fewer answers are kept than are asked for."""
    s = study.settings
    if s.slowness != 0:
        raise ValueError(f"slowness: got {s.slowness:g}, must be 0 here: slow has those that are compared")
    if not 1 <= s.keep_first < s.clients_per_round:
        raise ValueError(
            f"keep_first: got {s.keep_first}, must be from 1 to {s.clients_per_round - 1}, fewer than asked"
        )
    for one in studies(study).values():
        league.check(one)


def run(study: Study) -> Outcome:
    """Trains with every method under every way, with its rate chosen by validation under each."""
    found = list[Waited]()
    for (slowness, way), own in studies(study).items():
        scores, runs = league.play_all(own, way if slowness == 0 else f"{way}, slowness {slowness:g}")
        for f in scores:
            records = runs[f.classes][f.entrant.key]
            found.append(Waited(f.classes, slowness, way, f.entrant, f.chosen.config.rate,
                                times(own, f.classes, f.entrant), np.stack([r.test for r in records])))  # fmt: skip
    draw(study, found)
    rows = rows_of(found)
    columns = {"clients": "{clients}", "slowness": "{slowness:g}", "method": "{method}", "kept": "{way}",
               "time of a round": "{seconds:.2f}", "accuracy %": "{percent:.2f}",
               "at equal time %": "{percent_in_time:.2f}"}  # fmt: skip
    title = f"Stragglers on {study.dataset}: {len(study.seeds)} seeds, time in units of a client's mean"
    return Outcome((table(title, rows, columns),), rows, claims(found))


def draw(study: Study, found: Sequence[Waited]) -> None:
    """Draws test accuracy by round under each way, a panel for each method and kind of clients."""
    panels = {
        f"{entrant.label}, {scheme_name(classes)}, slowness {slowness:g}": {
            way: one.accuracy for way, one in of.items()
        }
        for (classes, slowness, entrant), of in alike(found).items()
    }
    rounds, title = range(found[0].accuracy.shape[1]), f"test accuracy on {study.dataset}, {len(study.seeds)} seeds"
    curves(panels, rounds, title, study.figures.path("by_round"), late=True)


def times(study: Study, classes: int, entrant: Entrant) -> np.ndarray:
    """Computes the server's waiting time in each round, [seeds, R], with the cohorts and times of the runs."""
    s, found = study.settings, []
    for seed in study.seeds:
        plan = league.schedule_of(s, league.divide(study, classes, seed), entrant)
        found.append(np.asarray(round_times(plan, streams.keys(seed).schedule, s.num_rounds), np.float64))
    return np.stack(found)


def in_time(one: Waited, budget: np.ndarray) -> np.ndarray:
    """Computes the mean accuracy of the last ``LAST`` rounds that end within the time ``budget`` [seeds]: [seeds].

    The state before training, round 0, counts as a round.
    """
    clock = one.seconds.cumsum(axis=1)
    done = (clock <= budget[:, None] * (1 + 1e-12)).sum(axis=1)
    return np.array([a[max(0, r + 1 - LAST) : r + 1].mean() for a, r in zip(one.accuracy, done, strict=True)])


def alike(found: Sequence[Waited]) -> dict[tuple[Any, ...], dict[str, Waited]]:
    """Groups the results by classes, slowness and entrant: for each the runs by way, the paper's way first."""
    groups = grouped(found, "classes", "slowness", "entrant")
    return {at: {one.way: one for one in own} for at, own in groups.items()}


def rows_of(found: Sequence[Waited]) -> list[dict[str, Any]]:
    """Builds the rows of result.json; "in time" means the time in which the quickest way ends its rounds."""
    rows = []
    for of in alike(found).values():
        budget = np.min([one.seconds.sum(axis=1) for one in of.values()], axis=0)
        for one in of.values():
            last, same = one.accuracy[:, -LAST:].mean(), in_time(one, budget).mean()
            rows.append({
                "clients": scheme_name(one.classes), "slowness": one.slowness, "method": one.entrant.label,
                "way": one.way, "learning_rate": one.rate, "seconds": float(one.seconds.mean()),
                "accuracy": float(last), "percent": 100 * float(last), "percent_in_time": 100 * float(same),
            })  # fmt: skip
    return rows


def claims(found: Sequence[Waited]) -> tuple[Claim, ...]:
    """Judges whether rounds get shorter at little loss of accuracy; control: not if the same clients are late."""
    said = []
    for (classes, slowness, entrant), of in alike(found).items():
        first, every, few = of.values()
        name = f"{scheme_name(classes)}, slowness {slowness:g}, {entrant.label}"
        for other in (every, few):
            ratio = interval(first.seconds.mean(axis=1) / other.seconds.mean(axis=1))
            said.append(Claim(f"{name}: a round of {first.way} is shorter than of {other.way} (ratio)", f"{ratio:.3f}",
                              ratio.below(1)))  # fmt: skip
        d = interval((first.accuracy - every.accuracy)[:, -LAST:].mean(axis=1))
        if slowness == 0:
            said.append(Claim(f"{name}: it costs less than {LITTLE:g} of accuracy at equal rounds", f"{d:+.4f}",
                              d.above(-LITTLE)))  # fmt: skip
        else:
            said.append(Claim(f"{name}: control, the same are always late: accuracy falls", f"{d:+.4f}", d.below()))
        budget = np.minimum(first.seconds.sum(axis=1), every.seconds.sum(axis=1))
        gain = interval(in_time(first, budget) - in_time(every, budget))
        said.append(Claim(f"{name}: it is more accurate at equal time", f"{gain:+.4f}", gain.above()))
    return tuple(said)


BOTH: dict[str, Any] = {"methods": ("fed_avg", "fed_ensemble"), "classes_per_client": (2,)}
AS_PRINTED: dict[str, Any] = {"num_clients": 200, "clients_per_round": 130, "keep_first": 100}
FEW: dict[str, Any] = {"num_clients": 20, "clients_per_round": 10, "keep_first": 5}
PAPER = StragglerSettings(**BOTH, **{**AS_PRINTED, "num_clients": 1000})
SMALL = replace(PAPER, **{**SMOKE, **FEW})
SCALES = {
    "digits": by_scale(SMALL, replace(PAPER, **{**DIGITS, **AS_PRINTED, "learning_rates": (0.1, 0.3)})),
    "mnist": by_scale(SMALL, replace(PAPER, **{**IMAGES, **AS_PRINTED, "model": "mlp", "width": 64}), PAPER),
}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024",), check=check, least_seeds=2),)
