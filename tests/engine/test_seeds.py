"""Several seeds in one program: each is its own run; how seeds are written."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from fedtangent.engine.history import Evaluation, Run
from fedtangent.engine.run import simulate
from fedtangent.engine.sweeps import parse_seeds, simulate_seeds

from . import tiny_runs


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0:3", (0, 1, 2)), ("0,3,7", (0, 3, 7)), ("5", (5,)), ("7, 0:2", (7, 0, 1)), ("4294967295", (2**32 - 1,))],
)
def test_parse_seeds(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "1:", ":3", "-1", "0:2:4", "1,,2", "3:3", "1,0:2", "4294967296", "1.5"])
def test_bad_seeds(text: str) -> None:
    with pytest.raises(ValueError, match="seeds: got"):
        parse_seeds(text)


@functools.cache
def algorithm() -> Any:
    return tiny_runs.build(0.2, num_models=2)


def evaluate(state: Any) -> dict[str, Any]:
    return {"outputs": np.asarray(tiny_runs.measures(algorithm(), state)["outputs"])}


@functools.cache
def several(over: str) -> tuple[dict[int, Run], list[tuple[int, Evaluation]]]:
    told: list[tuple[int, Evaluation]] = []
    runs = simulate_seeds(
        algorithm(),
        tiny_runs.data(),
        5,
        (0, 4),
        evaluate_every=2,
        evaluate=evaluate,
        on_evaluation=lambda seed, e: told.append((seed, e)),
        over=over,
    )
    return runs, told


@pytest.mark.parametrize("over", ["map", "vmap"])
@pytest.mark.parametrize("seed", [0, 4])
def test_each_seed_is_its_own_run(over: str, seed: int) -> None:
    alone = simulate(algorithm(), tiny_runs.data(), 5, seed, evaluate_every=2, evaluate=evaluate)
    run, told = several(over)[0][seed], several(over)[1]
    assert [e for s, e in told if s == seed] == run.history.evaluations
    for mine, theirs in zip(run.history.evaluations, alone.history.evaluations, strict=True):
        assert (mine.round, mine.uplink_bytes, mine.downlink_bytes) == theirs[:1] + theirs[2:]
        assert np.abs(mine.metrics["outputs"] - theirs.metrics["outputs"]).max() < 1e-12
    assert run.history.cost == alone.history.cost
    for name, rows in alone.history.rounds.items():
        for mine, theirs in zip(jax.tree.leaves(run.history.rounds[name]), jax.tree.leaves(rows), strict=True):
            assert mine.shape == theirs.shape
            np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    assert run.state.round == alone.state.round == 5
    other = several(over)[0][4 - seed].history.evaluations[-1].metrics["outputs"]
    assert np.abs(other - run.history.evaluations[-1].metrics["outputs"]).max() > 1e-3


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_rounds": 0}, "num_rounds: got 0"),
        ({"seeds": (1, 1)}, r"seeds: got \[1, 1\]"),
        ({"over": "loop"}, "over: got 'loop'"),
        ({"mapping": "sharded:scan"}, "mapping: got 'sharded:scan'"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {"num_rounds": 1, "seeds": (0,)} | changed
    with pytest.raises(ValueError, match=named):
        simulate_seeds(algorithm(), tiny_runs.data(), **arguments)
