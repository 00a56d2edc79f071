"""The bytes of algorithms whose messages are compressed or noisy: of each, and in the metrics.csv of one."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from fedtangent.engine.clients import engine_for
from fedtangent.types import Cost

from .asking import prepared

P = 64 * 16 + 16 + 16 * 10 + 10
RUNS = {  # options, and the bytes of a message by hand
    "fed_com": ("--algorithm fed_com --bits 8", P + 8),
    "fed_paq": ("--algorithm fed_paq --bits 4", P // 2 + 4),
    "dp_fed_avg": ("--algorithm dp_fed_avg --noise-multiplier 0.1", 4 * P),
    "sparse": ("--channel top_k:0.1 --error-feedback", 121 * 4 + -(-P // 8)),  # places as a bit map, which is shorter
}


GIVEN = "--num-train 300 --num-clients 5 --widths 16 --num-rounds 4 --evaluate-every 2 "
GIVEN += "--clients-per-round 3 --local-steps 1 --client-learning-rate 0.1"


@pytest.mark.parametrize("name", RUNS)
def test_a_message_has_its_bytes(name: str) -> None:
    options, message = RUNS[name]
    built = prepared(f"train {options} {GIVEN}").built
    cost = built.algorithm.cost(built.data, engine_for(built.data, "scan"))
    assert cost == Cost(message, 0, 4 * P)


def test_metrics_carry_the_exact_bytes(run: Callable, folder: Path) -> None:
    """Three of five clients a round: the other two are charged neither way."""
    options, message = RUNS["dp_fed_avg"]
    ended = run("train", *options.split(), *GIVEN.split(), "--output", "out")
    assert ended.code == 0, ended
    with (folder / "out" / "metrics.csv").open(newline="") as file:
        found = {
            tuple(int(row[c]) for c in ("round", "uplink_bytes", "downlink_bytes")) for row in csv.DictReader(file)
        }
    assert found == {(r, r * 3 * message, r * 3 * 4 * P) for r in (0, 2, 4)}
    assert "privacy: epsilon " in ended.out and "at delta 1e-05, for the data of one client" in ended.out
