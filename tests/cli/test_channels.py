"""The ledger in metrics.csv of algorithms whose messages are compressed or noisy."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from fedtangent.cli.algorithms import ALGORITHMS, AlgorithmEntry
from fedtangent.federated import algorithms
from fedtangent.federated.local import Work
from fedtangent.federated.wire.channel import top_k, with_error_feedback

P = 64 * 16 + 16 + 16 * 10 + 10
WORK = {"client_learning_rate": 0.1, "work": Work(steps=1)}
BUILT = {  # how to build it, and the bytes of a message by hand
    "fed_com": (lambda o, given: algorithms.fed_com(given.model, given.plan, **WORK), P + 8),
    "fed_paq": (lambda o, given: algorithms.fed_paq(given.model, given.plan, **WORK), P // 2 + 4),
    "dp_fed_avg": (
        lambda o, given: algorithms.dp_fed_avg(given.model, given.plan, clip_norm=1.0, noise_multiplier=0.1, **WORK),
        4 * P,
    ),
    "sparse": (
        lambda o, given: algorithms.fed_avg(given.model, given.plan, channel=with_error_feedback(top_k(20)), **WORK),
        20 * 4 + -(-20 * 11 // 8),  # 2^10 < P < 2^11
    ),
}


@pytest.mark.parametrize("name", BUILT)
def test_metrics_carry_the_exact_bytes(run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Three of five clients a round: the other two are charged neither way."""
    build, message = BUILT[name]
    monkeypatch.setitem(ALGORITHMS, name, AlgorithmEntry("a channel", build, "uniform"))
    given = ["--num-train", "300", "--num-clients", "5", "--widths", "16", "--num-rounds", "4", "--evaluate-every", "2"]
    ended = run("train", "--algorithm", name, "--clients-per-round", "3", *given, "--output", "out")
    assert ended.code == 0, ended
    with (folder / "out" / "metrics.csv").open(newline="") as file:
        found = {
            tuple(int(row[c]) for c in ("round", "uplink_bytes", "downlink_bytes")) for row in csv.DictReader(file)
        }
    assert found == {(r, r * 3 * message, r * 3 * 4 * P) for r in (0, 2, 4)}
