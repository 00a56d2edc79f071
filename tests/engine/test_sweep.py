"""Sweeps: each member is its own run, seeds share their random numbers, bad arguments are named."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedtangent._src.engine import Devices, Evaluation, simulate
from fedtangent._src.engine.sweeps import Sweep, choose_over, sweep
from fedtangent._src.measures.paired import differences

from ..nightly import nightly
from . import tiny_runs

SEEDS = (3, 0, 8)
GRID = {"client_learning_rate": [0.05, 0.3], "num_models": [1, 2]}
PARTITIONS = {"uneven": tiny_runs.UNEVEN, "even": tiny_runs.EVEN}
ROUNDING = 1e-12
ROUNDS = np.array([0, 3])


@functools.cache
def swept(over: str) -> Sweep:
    return sweep(
        tiny_runs.build,
        tiny_runs.data(),
        {"skew": PARTITIONS},
        num_rounds=5,
        seeds=SEEDS,
        grid=GRID,
        evaluation=Evaluation(2, tiny_runs.measures),
        devices=Devices(runs=over),
    )


OVER = pytest.mark.parametrize("over", nightly(["map", "vmap"], ["vmap"]))  # the last tests have the others by day


@OVER
def test_the_configurations_are_the_product_and_the_metrics_have_their_axes(over: str) -> None:
    found = swept(over)
    assert found.seeds == SEEDS
    assert found.rounds.tolist() == [0, 2, 4, 5]
    assert [tuple(c.values()) for c in found.configs] == [
        (rate, models, skew) for rate in (0.05, 0.3) for models in (1, 2) for skew in ("uneven", "even")
    ]
    assert found.metrics["mse"].shape == (3, 8, 4)
    assert found.metrics["outputs"].shape == (3, 8, 4, 9, 1)


@functools.cache
def alone(*values: Any) -> list[np.ndarray]:
    """The outputs at every evaluation of the single runs of one configuration, with two of the seeds."""
    config = dict(zip((*GRID, "skew"), values, strict=True))
    data, algorithm = tiny_runs.data(PARTITIONS[config.pop("skew")]), tiny_runs.build(**config)
    outputs = jax.jit(lambda state: tiny_runs.measures(algorithm, state)["outputs"])
    runs = [
        simulate(
            algorithm,
            data,
            num_rounds=5,
            seed=SEEDS[i],
            evaluation=Evaluation(2, lambda _, s: {"outputs": np.asarray(outputs(s))}),
        )
        for i in (0, 2)
    ]
    return [np.stack([e.metrics["outputs"] for e in run.history.evaluations]) for run in runs]


@pytest.mark.parametrize(("over", "place"), nightly([("map", 1), ("map", 6), ("vmap", 6)], [("vmap", 6)]))
def test_a_member_is_the_single_run(over: str, place: int) -> None:
    found = swept(over)
    for i, seen in zip((0, 2), alone(*found.configs[place].values()), strict=True):
        assert np.abs(found.metrics["outputs"][i, place] - seen).max() < ROUNDING
        for other in (found.metrics["outputs"][1, place], found.metrics["outputs"][i, place - 1]):
            assert np.abs(other[1:] - seen[1:]).max() > 1e-3  # another seed; another configuration


@OVER
def test_a_seed_has_the_same_start_whatever_is_traced(over: str) -> None:
    start = swept(over).metrics["outputs"][:, :, 0]
    assert np.array_equal(start[:, 0], start[:, 4])  # another rate
    assert np.array_equal(start[:, 0], start[:, 1])  # another partition
    assert not np.array_equal(start[0], start[1])


RATES = [0.05, 0.06, 0.07]


@functools.cache
def of_many_seeds() -> tuple[np.ndarray, int]:
    """The error [24, 3, 2] of 24 seeds with three rates, and how often the algorithm was built for it."""
    calls: list[int] = []

    def build(client_learning_rate: Any) -> Any:
        calls.append(1)
        return tiny_runs.build(client_learning_rate)

    grid = {"client_learning_rate": RATES}
    found = sweep(
        build,
        tiny_runs.data(),
        num_rounds=3,
        seeds=range(24),
        grid=grid,
        evaluation=Evaluation(measure=tiny_runs.measures),
    )
    return found.metrics["mse"], len(calls)


def test_pairing_by_seed_narrows_the_intervals() -> None:
    """The negative control takes the two samples as independent, as runs without common random numbers are."""
    every = of_many_seeds()[0]
    found = Sweep(
        tuple({"client_learning_rate": rate} for rate in RATES), tuple(range(12)), ROUNDS, {"mse": every[:12]}
    )
    baseline = {"client_learning_rate": 0.05}
    last = found.metrics["mse"][:, :, -1]
    for paired, column in zip(differences(found, "mse", baseline), last.T[1:], strict=True):
        unpaired = stats.ttest_ind(column, last[:, 0], equal_var=False).confidence_interval()
        assert paired.mean == pytest.approx((unpaired.low + unpaired.high) / 2, rel=1e-6)
        assert (paired.high - paired.low) < (unpaired.high - unpaired.low) / 3
    # seeds of their own: what the pairing then finds is as wide as without it
    mixed = found._replace(metrics={"mse": np.concatenate([every[:12, :1], every[12:, 1:]], axis=1)})
    for apart, paired in zip(differences(mixed, "mse", baseline), differences(found, "mse", baseline), strict=True):
        assert (apart.high - apart.low) > 3 * (paired.high - paired.low)


def test_the_algorithm_is_traced_once_per_program() -> None:
    """Whatever the number of seeds, rates and rounds; each configuration's own numbers are checked beside that."""
    assert of_many_seeds()[1] - len(RATES) == 1


def test_choosing_how_to_run_many() -> None:
    assert jax.default_backend() == "cpu"
    assert [choose_over(name) for name in ("auto", "map", "vmap")] == ["map", "map", "vmap"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_rounds": 0}, "num_rounds: got 0"),
        ({"evaluation": Evaluation(2)}, "evaluation: got no measure"),
        (
            {"evaluation": Evaluation(measure=tiny_runs.measures, stop_on_divergence=True)},
            "evaluation: a sweep uses only its fields every and measure",
        ),
        ({"seeds": ()}, r"seeds: got \[\]"),
        ({"seeds": (1, 1)}, r"seeds: got \[1, 1\]"),
        ({"seeds": (-1,)}, "seeds: got -1, must be a whole number from 0 to 4294967295"),
        ({"devices": Devices(runs="pmap")}, "devices.runs: got 'pmap', allowed are auto, map, vmap"),
        ({"devices": Devices("sharded")}, "mapping: got 'sharded'"),
        ({"devices": Devices("pmap")}, "mapping: got 'pmap'"),
        ({"grid": {"client_learning_rate": []}}, r"grid: got \[\] for client_learning_rate"),
        ({"grid": {"client_learning_rate": [0.1, -0.1]}}, "client_learning_rate: got -0.1"),
        ({"clients": {}}, r"clients: got \{\}, must be None or"),
        ({"clients": {"skew": {}}}, "clients: got"),
        ({"clients": {"client_learning_rate": PARTITIONS}}, "clients: got the name 'client_lea"),
        (
            {"clients": {"a": {"x": tiny_runs.EVEN._replace(offsets=np.array([0, 6, 12]))}}},
            "'x' has 2 clients, but data",
        ),
        (
            {"clients": {"a": {"x": tiny_runs.EVEN._replace(indices=np.arange(1, 13))}}},
            "clients: 'x': partition: got 12 for client 3, must be from 0 to 11",
        ),
    ],
)
def test_bad_arguments(changed: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {
        "num_rounds": 2,
        "seeds": (0,),
        "grid": {"client_learning_rate": [0.1]},
        "evaluation": Evaluation(measure=tiny_runs.measures),
    } | changed
    with pytest.raises(ValueError, match=named):
        sweep(tiny_runs.build, tiny_runs.data(), **arguments)


def test_a_grid_of_nothing_is_one_configuration() -> None:
    found = sweep(
        functools.partial(tiny_runs.build, 0.1),
        tiny_runs.data(),
        num_rounds=2,
        seeds=(0, 1),
        grid={},
        evaluation=Evaluation(measure=tiny_runs.measures),
    )
    assert found.configs == ({},)
    assert found.metrics["mse"].shape == (2, 1, 2)
    assert jnp.isfinite(found.metrics["mse"]).all()
