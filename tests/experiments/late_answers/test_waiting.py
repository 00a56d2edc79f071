"""FedBuff and FedAsync beside waiting, small: the clock, the delays, and how times and claims are counted."""

from __future__ import annotations

import heapq
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.harness import Record
from fedtangent._src.experiments.late_answers import waiting
from fedtangent._src.experiments.late_answers.waiting import (
    BUFFERED,
    LABELS,
    PROMPT,
    SINGLE,
    WAITING,
    WaitingResults,
    WaitingSettings,
)

from ..performed import performed, study_of

SMALL = (
    *("num_clients=6", "training_clients=4", "buffer=2", "time=10", "width=8", "local_steps=2", "learning_rates=3"),
    *("num_train=60", "num_validation=20", "num_test=40"),
)


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    outcome, metrics = performed("late_answers.waiting", SMALL, tmp_path)
    assert outcome.failed == () and len(outcome.claims) == 6
    steps = {row["label"]: row["steps"] for row in outcome.rows}
    assert steps["FedAsync"] == 40 and steps["FedBuff"] == 20 and steps[LABELS[WAITING]] == 5
    last = {m.algorithm.split()[0]: m.round for m in metrics if m.seed == 0 and m.split == "test"}
    assert last == {WAITING: 5, BUFFERED: 20, SINGLE: 40, BUFFERED + PROMPT: 20, SINGLE + PROMPT: 40}


def simulated(busy: int, buffer: int, steps: int, seed: int) -> tuple[float, np.ndarray]:
    """A pool of busy clients, event by event: the time of ``steps`` steps of the server, and the answers' delays."""
    rng, server, waiting_answers, late = np.random.default_rng(seed), 0, 0, []
    events = [(rng.exponential(), 0) for _ in range(busy)]  # when an answer arrives, and the step at which it began
    heapq.heapify(events)
    now = 0.0
    while server < steps:
        now, began = heapq.heappop(events)
        late.append(server - began)
        waiting_answers += 1
        if waiting_answers == buffer:
            server, waiting_answers = server + 1, 0
        heapq.heappush(events, (now + rng.exponential(), server))
    return now, np.array(late)


@pytest.mark.parametrize(
    ("name", "busy", "buffer"), [(BUFFERED, 20, 5), (BUFFERED, 10, 3), (BUFFERED, 4, 4), (SINGLE, 20, 5)]
)
def test_the_clock_and_the_delays_are_those_of_a_pool_of_busy_clients(name: str, busy: int, buffer: int) -> None:
    settings = WaitingSettings(training_clients=busy, buffer=buffer, time=60)
    rounds, runs = waiting.rounds_of(settings)[name], 60
    pools = [simulated(busy, waiting.answers_of(settings)[name], rounds, seed) for seed in range(runs)]
    ends = [waiting.clock(settings, name, seed)[-1] for seed in range(runs)]
    spread = 60 / (60 * busy) ** 0.5  # standard deviation of the sum of 60 busy / rate exponential times
    for times in (ends, [now for now, _ in pools]):
        assert abs(np.mean(times) - 60) < 4 * spread / runs**0.5
        assert 0.6 * spread < np.std(times) < 1.5 * spread
    law = waiting.delays(settings, name)
    late = np.concatenate([values[8 * busy :] for _, values in pools])  # without the start, when all begin at once
    shares = np.bincount(np.minimum(late, len(law) - 1), minlength=len(law)) / len(late)
    assert law.sum() == pytest.approx(1) and 0 < law[-1] <= waiting.TOO_LATE
    assert np.abs(np.cumsum(shares - law)).max() < 0.008  # up to 0.005 at 32 other draws
    wrong = waiting.delays(replace(settings, training_clients=busy + 2), name)[: len(law)]  # control: a larger pool
    assert np.abs(np.cumsum(shares[:-1] - wrong[: len(law) - 1])).max() > 0.03


def test_waiting_for_all_takes_the_longest_of_their_times() -> None:
    settings = WaitingSettings(training_clients=20, time=600)
    harmonic = sum(1 / k for k in range(1, 21))
    assert waiting.rounds_of(settings)[WAITING] == round(600 / harmonic)
    spans = np.concatenate([np.diff(waiting.clock(settings, WAITING, seed)) for seed in range(30)])
    error = sum(1 / k**2 for k in range(1, 21)) ** 0.5 / len(spans) ** 0.5
    assert abs(spans.mean() - harmonic) < 4 * error
    assert abs(spans.mean() - 1) > 40 * error  # control: one client's time


def record(accuracy: np.ndarray) -> Record:
    rounds = np.arange(len(accuracy))
    return Record(rounds, {"test.accuracy": accuracy}, np.zeros((len(rounds), 2), int), np.zeros(len(rounds) - 1), 0.0)


def test_means_over_the_last_unit_of_time() -> None:
    times, values = np.array([0.0, 0.5, 0.9, 1.6, 4.0]), np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    assert waiting.over_last_unit(values, times).tolist() == [1.0, 1.5, 7 / 3, 6.0, 16.0]


def test_time_and_answers_to_the_target() -> None:
    settings = WaitingSettings(training_clients=4, buffer=2, time=10, target=0.5)
    times = waiting.clock(settings, BUFFERED, 3)
    rising, steps = record(np.linspace(0, 1, len(times))), len(times)
    means = [np.mean([rising.test[j] for j in range(i + 1) if times[j] > times[i] - 1]) for i in range(steps)]
    first = next(i for i in range(1, steps) if means[i] >= 0.5)
    assert means[first] < rising.test[first]
    found = waiting.results_of(settings, BUFFERED, [rising], (3,))
    assert found.time.tolist() == [times[first]] and found.answers.tolist() == [2 * first]
    assert 0.9 < found.accuracy[0] < 1
    never = waiting.results_of(settings, BUFFERED, [record(np.zeros(steps))], (3,))
    assert np.isnan(never.time).all() and np.isnan(never.answers).all()
    at_once = waiting.results_of(settings, BUFFERED, [record(np.ones(steps))], (3,))  # not before a step
    assert at_once.time.tolist() == [times[1]]
    shown = waiting.by_time(settings, BUFFERED, rising, 3)
    grid = np.linspace(0, 10, waiting.GRID)
    for point, value in zip(grid, shown, strict=True):
        assert value == rising.test[np.flatnonzero(times <= point)[-1]]


def test_claims_are_of_ratios_by_seed() -> None:
    def claimed(quick: float, loss: float, never: float = 1.0) -> list[str]:
        noise = np.array([-0.001, 0.0, 0.001])

        def ends(time: float, accuracy: float, turn: int = 0) -> WaitingResults:
            spread = np.roll(noise, turn)
            return WaitingResults(accuracy + spread, time + spread, 100 * time + spread)

        results = {
            WAITING: ends(10.0, 0.9),
            BUFFERED: ends(10 / quick, 0.9 - loss, 1),
            SINGLE: ends(never * 10 / quick**0.5, 0.9 - loss, 2),
            BUFFERED + PROMPT: ends(1.0, 0.9),
            SINGLE + PROMPT: ends(1.0, 0.9),
        }
        return [claim.verdict for claim in waiting._claims(results, WaitingSettings())]

    assert claimed(3.0, 0.0) == [lab.SEEN] * 6
    assert claimed(0.5, 0.1) == [lab.NOT_SEEN] * 6
    seen, undecided = lab.SEEN, lab.UNDECIDED
    assert claimed(3.0, 0.0, np.nan) == [seen, undecided, undecided, seen, seen, seen]


def test_bad_settings() -> None:
    for change, words in (
        ("tuning_seed=1", "tuning_seed: got 1, must not be among the seeds"),
        ("training_clients=7", "training_clients: got 7"),
        ("training_clients=201", "training_clients: got 201, must be a whole number from 2 to 200"),
        ("buffer=5", "buffer: got 5"),
        ("mixing_rate=1.5", "mixing_rate: got 1.5"),
    ):
        with pytest.raises(ValueError, match=words):
            study_of("late_answers.waiting", (*SMALL, change))
