"""Stragglers of Fed-ensemble: 130 clients are asked and the first 100 to answer make the round (FE-2024, section V-C).

The time of a round and the accuracy are compared with two other ways: waiting for all 130, and asking only 100. A
client's time is lognormal, with a mean in proportion to its examples. In the control the time also rises with a
client's mean label, so that the same clients are always late and their data are lost: accuracy has to fall.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

import fedtangent as ft
from fedtangent._src import streams
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.fed_ensemble import classifiers
from fedtangent._src.experiments.fed_ensemble.classifiers import LAST, ClassifierSettings, Entrant
from fedtangent._src.experiments.fed_ensemble.tables import DIGITS, IMAGES, SMOKE
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.experiments.lab.trials import scheme_name
from fedtangent._src.output.run_plots import curves

LITTLE = 0.01  # of accuracy: a smaller loss does not count


@dataclass(frozen=True)
class StragglerSettings(ClassifierSettings):
    """Settings of the straggler study: settings of the classifiers, and values of ``slowness`` to try.

    A client's mean time is multiplied by ``exp(slowness * z)``, where z is the standardised mean of its labels.
    ``slowness`` itself must stay 0: the runs take their values from ``slow``.
    """

    slow: tuple[float, ...] = within((0.0, 2.0), at_least=0)


class Waited(NamedTuple):
    """Times and accuracies of one method on all seeds, for one way to close a round.

    Attributes:
        classes: Number of classes of each client; 0 for i.i.d. clients.
        slowness: How strongly a client's time rises with its mean label.
        way: The way to close a round, such as "the first 100 of 130".
        entrant: The method.
        rate: Learning rate of the clients, as tuned.
        seconds: Time of each of R rounds, in units of a client's mean time, [seeds, R].
        accuracy: Test accuracy at the start and after each round, [seeds, R + 1].
    """

    classes: int
    slowness: float
    way: str
    entrant: Entrant
    rate: float
    seconds: np.ndarray
    accuracy: np.ndarray


def _ways(settings: StragglerSettings) -> dict[str, tuple[int, int]]:
    """Returns the pair (clients asked, answers kept), such as (130, 100), of three ways to close a round, by name."""
    invited, first = settings.clients_per_round, settings.keep_first
    return {
        f"the first {first} of {invited}": (invited, first),
        f"all of {invited}": (invited, invited),
        f"all of {first}": (first, first),
    }


def studies(study: Study) -> dict[tuple[float, str], Study]:
    """Returns the study with changed settings, for each slowness and each way to close a round."""
    settings, by_way = study.settings, {}
    for slowness in settings.slow:
        for name, (invited, first) in _ways(settings).items():
            changes = {"clients_per_round": invited, "keep_first": first, "slowness": slowness}
            by_way[slowness, name] = replace(study, settings=replace(settings, **changes))
    return by_way


def check(study: Study) -> None:
    """Raises ``ValueError`` unless ``keep_first`` is below ``clients_per_round`` and every run's settings are valid.

    ``slowness`` must be 0, because the runs take their slowness from the option ``slow``.
    """
    settings = study.settings
    if settings.slowness != 0:
        raise ValueError(f"slowness: got {settings.slowness:g}, must be 0: set the option slow instead")
    invited = settings.clients_per_round
    if invited < 2:
        raise ValueError(f"clients_per_round: got {invited}, must be at least 2, so that a round can end with fewer")
    if not 1 <= settings.keep_first < invited:
        raise ValueError(
            f"keep_first: got {settings.keep_first}, must be from 1 to {invited - 1}, below clients_per_round"
        )
    for one in studies(study).values():
        classifiers.check(one)


def run(study: Study) -> lab.Outcome:
    """Tunes and trains every method with every way to close a round, and compares times of a round and accuracies."""
    by_way = studies(study)
    names = {(slowness, way): way if slowness == 0 else f"{way}, slowness {slowness:g}" for slowness, way in by_way}
    played = classifiers.play_all({names[place]: one for place, one in by_way.items()})
    results = []
    for place, one in by_way.items():
        scores, runs = played[names[place]]
        for f in scores:
            accuracy = np.stack([record.test for record in runs[f.classes][f.entrant.key]])
            times = _times(one, f.classes, f.entrant)
            results.append(Waited(f.classes, *place, f.entrant, f.chosen.config.rate, times, accuracy))
    _draw(study, results)
    rows = _rows(results)
    columns = "clients: {clients} | slowness: {slowness:g} | method: {method} | kept: {way} | time of a round: "
    columns += "{seconds:.2f} | accuracy %: {percent:.2f} | at equal time %: {percent_in_time:.2f}"
    title = f"Stragglers on {study.dataset}: {len(study.seeds)} seeds, time in units of a client's mean"
    return lab.Outcome((lab.table(title, rows, columns),), rows, tuple(_claims(results)))


def _draw(study: Study, results: Sequence[Waited]) -> None:
    """Plots test accuracy by round for each way to close a round, a panel for each method and kind of clients."""
    panels = {
        f"{entrant.label}, {scheme_name(classes)}, slowness {slowness:g}": {one.way: one.accuracy for one in group}
        for (classes, slowness, entrant), group in _alike(results).items()
    }
    rounds, title = range(results[0].accuracy.shape[1]), f"test accuracy on {study.dataset}, {len(study.seeds)} seeds"
    curves(panels, rounds, title, study.figures.path("by_round"), late=True)


def _times(study: Study, classes: int, entrant: Entrant) -> np.ndarray:
    """Computes how long the server waits in each round of the runs, [seeds, R], for clients of ``classes`` classes."""
    settings, times = study.settings, []
    for seed in study.seeds:
        schedule = classifiers.schedule_of(settings, classifiers.divide(study, classes, seed), entrant)
        times.append(
            np.asarray(ft.faults.round_times(schedule, streams.keys(seed).schedule, settings.num_rounds), np.float64)
        )
    return np.stack(times)


def _in_time(one: Waited, budget: np.ndarray) -> np.ndarray:
    """Computes the mean accuracy of the last three rounds that end within a time budget, [seeds].

    ``budget`` [seeds] is in units of a client's mean time for a round. If fewer rounds end within it, the accuracy
    before training counts, too.
    """
    # The state before training, round 0, counts as a round.
    clock = one.seconds.cumsum(axis=1)
    done = (clock <= budget[:, None] * (1 + 1e-12)).sum(axis=1)
    return np.array([a[max(0, r + 1 - LAST) : r + 1].mean() for a, r in zip(one.accuracy, done, strict=True)])


def _alike(results: Sequence[Waited]) -> dict[tuple[int, float, Entrant], list[Waited]]:
    """Groups the results by classes of a client, slowness and entrant (method with a number of models).

    A group has one result for each way to close a round; 100 of 130 clients, FE-2024's way, is the first.
    """
    return lab.grouped(results, "classes", "slowness", "entrant")


def _rows(results: Sequence[Waited]) -> list[lab.Row]:
    """Builds the rows of result.json: mean time of a round, and accuracy after all rounds and at equal time.

    An accuracy is the mean over seeds and over the last three rounds; at equal time, over the last three that end
    within it. The equal time is the time in which the quickest way to close a round ends all its rounds.
    """
    rows = []
    for group in _alike(results).values():
        budget = np.min([one.seconds.sum(axis=1) for one in group], axis=0)
        for one in group:
            last = float(one.accuracy[:, -LAST:].mean())
            place = {"clients": scheme_name(one.classes), "slowness": one.slowness, "method": one.entrant.label}
            row = {**place, "way": one.way, "learning_rate": one.rate, "seconds": float(one.seconds.mean())}
            percents = {"percent": 100 * last, "percent_in_time": 100 * float(_in_time(one, budget).mean())}
            rows.append({**row, "accuracy": last, **percents})
    return rows


def _claims(results: Sequence[Waited]) -> Iterator[lab.Claim]:
    """Judges whether closing a round after the first answers shortens it, at little loss of accuracy at equal rounds.

    At equal time it should be more accurate than waiting for all. In the control the accuracy at equal rounds must
    fall. Accuracies are means over the last three rounds.
    """
    # Control: if the same clients are always late, accuracy must fall.
    for (classes, slowness, entrant), (first, every, few) in _alike(results).items():
        name = f"{scheme_name(classes)}, slowness {slowness:g}, {entrant.label}"
        for other in (every, few):
            ratio = lab.interval(first.seconds.mean(axis=1) / other.seconds.mean(axis=1))
            shorter = f"{name}: a round of {first.way} is shorter than of {other.way} (ratio)"
            yield ratio.claim_below(shorter, "{:.3f}", 1)
        loss = lab.interval((first.accuracy - every.accuracy)[:, -LAST:].mean(axis=1))
        if slowness == 0:
            yield loss.claim_above(f"{name}: it costs less than {LITTLE:g} of accuracy at equal rounds", level=-LITTLE)
        else:
            yield loss.claim_below(f"{name}: control, the same are always late: accuracy falls")
        budget = np.minimum(first.seconds.sum(axis=1), every.seconds.sum(axis=1))
        gain = lab.interval(_in_time(first, budget) - _in_time(every, budget))
        yield gain.claim_above(f"{name}: it is more accurate at equal time")


PRINTED = "num_clients=200 clients_per_round=130 keep_first=100"
PAPER = with_changes(
    StragglerSettings(), "methods=fed_avg,fed_ensemble classes_per_client=2", PRINTED, "num_clients=1000"
)
SMALL = with_changes(PAPER, SMOKE, "num_clients=20 clients_per_round=10 keep_first=5")
SCALES = {
    "digits": by_scale(SMALL, with_changes(PAPER, DIGITS, PRINTED, "learning_rates=0.1,0.3")),
    "mnist": by_scale(SMALL, with_changes(PAPER, IMAGES, PRINTED, "model=mlp width=64"), PAPER),
}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024",), check=check, least_seeds=2),)
