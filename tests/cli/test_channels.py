"""The bytes of algorithms whose messages are compressed or noisy: of each, and in the metrics.csv of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from fedtangent._src.engine import Devices, simulate
from fedtangent._src.engine.clients import engine_for
from fedtangent._src.types import Algorithm, Cost

from ..metrics_file import rows_of
from .asking import prepared

P = 64 * 16 + 16 + 16 * 10 + 10
RUNS = {  # options, and the bytes of a message by hand
    "fed_com": ("--algorithm fed_com --bits 8", P + 8),
    "fed_paq": ("--algorithm fed_paq --bits 4", P // 2 + 4),
    "dp_fed_avg": ("--algorithm dp_fed_avg --noise-multiplier 0.1", 4 * P),
    "sparse": ("--channel top_k:0.1 --error-feedback", 121 * 4 + -(-P // 8)),  # places as a bit map, which is shorter
    "clipped": ("--channel clip:0.01", 4 * P),
}


GIVEN = "--num-train 300 --num-clients 5 --widths 16 --num-rounds 4 --evaluate-every 2 "
GIVEN += "--clients-per-round 3 --local-steps 1 --batch-size 0 --client-learning-rate 0.1"


@pytest.mark.parametrize("name", RUNS)
def test_a_message_has_its_bytes(name: str) -> None:
    options, message = RUNS[name]
    built = prepared(f"train {options} {GIVEN}").built
    cost = built.algorithm.cost(built.data, engine_for(built.data, "scan"))
    assert cost == Cost(message, 0, 4 * P)


@pytest.mark.slow
def test_metrics_carry_the_exact_bytes(run: Callable, folder: Path) -> None:
    """Three of five clients a round: the other two are charged neither way."""
    options, message = RUNS["dp_fed_avg"]
    ended = run("train", *options.split(), *GIVEN.split(), "--output", "out")
    assert ended.code == 0, ended
    columns = ("round", "uplink_bytes", "downlink_bytes")
    found = {tuple(int(row[column]) for column in columns) for row in rows_of(folder / "out")}
    assert found == {(r, r * 3 * message, r * 3 * 4 * P) for r in (0, 2, 4)}
    assert "privacy: epsilon " in ended.out and "at delta 1e-05, for the data of one client" in ended.out


def test_clip_is_the_channel_that_python_has() -> None:
    built = prepared(f"train --channel clip:0.01 {GIVEN}").built
    free = prepared(f"train {GIVEN}").built

    def moved(algorithm: Algorithm) -> float:
        """Length of the server's first step, of rate 1: at most that of one client's message."""
        start = algorithm.init(0, 5)
        after = simulate(algorithm, built.data, num_rounds=1, seed=0, devices=Devices("scan")).state
        leaves = zip(*map(jax.tree.leaves, (algorithm.params(start), algorithm.params(after))), strict=True)
        return float(np.sqrt(sum(np.sum(np.square(np.asarray(a) - np.asarray(b))) for a, b in leaves)))

    assert 0 < moved(built.algorithm) <= 0.01 * (1 + 1e-6)
    assert moved(free.algorithm) > 0.02  # the control
