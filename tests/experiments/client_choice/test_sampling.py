"""Clients chosen by loss or gradient norm, small: who is compared, and how rounds, bytes and claims are counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.client_choice import sampling
from fedtangent._src.experiments.client_choice.sampling import (
    BY_SIZE,
    EVERYONE,
    LAST,
    NORM,
    UNIFORM,
    SamplingResults,
    SamplingSettings,
)
from fedtangent._src.experiments.lab.harness import Record

from ..performed import performed, study_of

SMALL = (
    *("num_clients=6", "clients_per_round=2", "candidates=3,6", "num_rounds=5", "tuning_rounds=1", "width=8"),
    *("local_steps=2", "learning_rates=1", "num_train=60", "num_validation=20", "num_test=40"),
)


@pytest.mark.slow
def test_a_small_run_charges_the_polls(tmp_path: Path) -> None:
    outcome, metrics = performed("client_choice.sampling", SMALL, tmp_path)
    assert outcome.failed == () and len(outcome.claims) == 9 and len(outcome.rows) == 6
    up = {m.algorithm.split()[0]: m.uplink_bytes for m in metrics if (m.round, m.seed, m.split) == (5, 0, "test")}
    down = {m.algorithm.split()[0]: m.downlink_bytes for m in metrics if (m.round, m.seed, m.split) == (5, 0, "test")}
    # candidates send one number of 4 bytes each; each receives the model, of which those that train need no second copy
    assert up["power_of_choice-3"] == up[UNIFORM] + 5 * 3 * 4
    assert down["power_of_choice-3"] * 2 == down[UNIFORM] * 3
    assert down["power_of_choice-6"] == down[EVERYONE] == down[NORM]


def record(accuracy: list[float], bytes_a_round: int) -> Record:
    rounds = np.arange(len(accuracy))
    sent = np.outer(rounds, [bytes_a_round, bytes_a_round])
    return Record(rounds, {"test.accuracy": np.array(accuracy)}, sent, np.zeros(len(accuracy) - 1, int), 0.0)


def test_ends_are_means_of_the_last_rounds_and_of_their_bytes() -> None:
    own = record([0.0, 0.25, 0.5, 0.75, 0.75, 0.75, 1.0], 2**20)  # 2 MiB in each of 6 rounds
    cheap, alike, dear = (record([0.0] * 6 + [1.0], size) for size in (2**19, 2**20, 2**23))
    found = sampling.results_of([own] * 3, [cheap, alike, dear], 0.75)
    assert LAST == 5 and found.accuracy.tolist() == [0.75] * 3 and found.rounds.tolist() == [3] * 3
    # cheap: over 1 and up to 6 MiB, after rounds 1 to 3; dear: all its last rounds cost more than all of these
    assert found.mib.tolist() == [12] * 3 and found.within_bytes.tolist() == [0.5, 0.75, 1.0]
    assert sampling.results_of([alike], [alike], 0.75).within_bytes.tolist() == [0.2]  # the mean of the last rounds
    assert sampling.results_of([own], [record([0.0] * 7, 2**17)], 0.75).within_bytes.tolist() == [0.0]
    assert sampling.results_of([record([0.0] * 7, 1)], [cheap], 0.75).rounds.tolist() == [7]  # one round after the last


@pytest.mark.parametrize(
    ("lead", "rounds", "verdicts"),
    [(0.1, 5.0, [lab.SEEN] * 3), (-0.1, 20.0, [lab.NOT_SEEN] * 3), (0.0, 10.0, [lab.UNDECIDED] * 3)],
)
def test_claims_are_of_differences_by_seed(lead: float, rounds: float, verdicts: list[str]) -> None:
    noise = np.array([-0.002, 0.0, 0.002])

    def ends(accuracy: float, first: float, turn: int = 0) -> SamplingResults:
        spread = np.roll(noise, turn)
        return SamplingResults(accuracy + spread, first + 50 * spread, 0 * noise, accuracy + spread)

    results = {
        UNIFORM: ends(0.8, 10.0),
        BY_SIZE: ends(0.8, 10.0),
        NORM: ends(0.8 + lead, 10.0, 1),
        EVERYONE: ends(0.9, 10.0),
        "power_of_choice-6": ends(0.8 + lead, rounds, 1),
    }
    *of_losses, above, close, control = sampling._claims(results, SamplingSettings(candidates=(6,)))
    assert [claim.verdict for claim in of_losses] == verdicts and above.verdict == verdicts[0]
    assert close.verdict == (lab.SEEN if lead > 0 else lab.NOT_SEEN) and control.verdict == lab.NOT_SEEN


def test_bad_settings() -> None:
    for change, words in (
        ("tuning_seed=1", "tuning_seed: got 1, must not be among the seeds"),
        ("candidates=7", "candidates: got 7"),
        ("candidates=1", "candidates: got 1, must be a whole number from 2 to 6"),
        ("num_rounds=4", "num_rounds: got 4"),
    ):
        with pytest.raises(ValueError, match=words):
            study_of("client_choice.sampling", (*SMALL, change))
