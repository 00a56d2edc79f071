"""Mistakes that once ran silently: each is refused, or said, in one line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src import models
from fedtangent._src.engine import Evaluation, hypergradients, processes, sweeps
from fedtangent._src.engine.checkpoints import CheckpointError, Checkpoints
from fedtangent._src.engine.run import simulate
from fedtangent._src.federated import algorithms, faults, schedule
from fedtangent._src.federated.local import Work, validate_work

from .federated.toys import OUTPUTS, two_layer, uneven_data


@functools.cache
def average(rate: float = 0.1, steps: int = 1, loss: str = "squared_error") -> Any:
    """One algorithm, and so one program, for all that ask for the same."""
    work = Work(steps=steps, batch_size=None)
    plan = schedule.all_clients(6)
    return algorithms.fed_avg(two_layer(), plan, client_learning_rate=rate, work=work, loss=loss)


@functools.cache
def classifier() -> Any:
    return average(loss="cross_entropy")


def test_a_label_that_the_model_has_no_output_for() -> None:
    data = uneven_data(labels=True)
    assert np.isfinite(simulate(classifier(), data, num_rounds=1).history.rounds["loss"]).all()
    wrong = data._replace(y=data.y.at[3].set(OUTPUTS))
    with pytest.raises(ValueError, match="data: has the label 2, but the model two_layer has 2 outputs"):
        simulate(classifier(), wrong, num_rounds=1)


@pytest.mark.parametrize("work", [Work(steps=2.5), Work(steps=True), Work(epochs="3"), Work(steps=1, batch_size=2.5)])  # type: ignore[arg-type]
def test_work_in_whole_numbers(work: Work) -> None:
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        validate_work(work)


@pytest.mark.parametrize(
    "build",
    [
        lambda: schedule.all_clients(2.5),  # type: ignore[arg-type]
        lambda: schedule.uniform_sampling(3, 1.5),  # type: ignore[arg-type]
        lambda: schedule.per_client_permutations(3, float("nan")),  # type: ignore[arg-type]
        lambda: schedule.strata(3, 2, 1.5),  # type: ignore[arg-type]
    ],
)
def test_schedules_in_whole_numbers(build: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="must be a whole number"):
        build()


@pytest.mark.parametrize("rounds", [2.0, float("inf"), None, True, 0])
def test_rounds_in_whole_numbers(rounds: Any) -> None:
    with pytest.raises(ValueError, match=r"num_rounds: got .*, must be a whole number of at least 1"):
        simulate(classifier(), uneven_data(labels=True), num_rounds=rounds)


def test_a_checkpoint_of_another_algorithm_of_the_same_name(tmp_path: Path) -> None:
    """Without a config, the traced round stands for it, whichever object has it."""
    data = uneven_data()
    simulate(average(0.1, 1), data, num_rounds=2, checkpoints=Checkpoints(tmp_path, every=1))
    again = Checkpoints(tmp_path, every=1, resume=True)
    for other in (average(0.2, 1), average(0.1, 2)):
        with pytest.raises(CheckpointError, match="traced round"):
            simulate(other, data, num_rounds=4, checkpoints=again)
    same = average.__wrapped__(0.1, 1)
    assert same is not average(0.1, 1)
    assert simulate(same, data, num_rounds=4, checkpoints=again).status == "finished"


def test_faults_of_one_kind_draw_for_themselves() -> None:
    """Two dropouts of 0.3 leave 0.49 of the clients, and not the 0.7 that one draw for both would."""
    twice = faults.dropout(faults.dropout(schedule.all_clients(500), 0.3), 0.3)
    left = np.asarray(schedule.drawn_cohorts(twice, None, 20, weighting=None).weight).mean()
    assert abs(left - 0.49) < 4 * np.sqrt(0.49 * 0.51 / 10_000)


def test_a_label_without_an_output_in_a_sweep_and_a_hypergradient() -> None:
    data = uneven_data(labels=True)
    wrong = data._replace(y=data.y.at[3].set(OUTPUTS))

    def build(rate: Any) -> Any:
        work = Work(steps=1, differentiable=True, batch_size=None)
        plan = schedule.all_clients(6)
        return algorithms.fed_avg(two_layer(), plan, client_learning_rate=rate, work=work, loss="cross_entropy")

    def zero(algorithm: Any, state: Any) -> Any:
        return jnp.zeros(())

    with pytest.raises(ValueError, match="data: has the label 2"):
        sweeps.sweep(
            build,
            wrong,
            num_rounds=1,
            seeds=[0],
            grid={"rate": [0.1]},
            evaluation=Evaluation(measure=lambda a, s: {"zero": zero(a, s)}),
        )
    with pytest.raises(ValueError, match="data: has the label 2"):
        hypergradients.hypergradient(build, wrong, 1, 0, {"rate": 0.1}, zero)


def swept(evaluate: Any, values: dict[str, list[Any]], build: Any = None) -> sweeps.Sweep:
    def ensemble_of(K: int) -> Any:
        work, plan = Work(steps=1, batch_size=None), schedule.per_client_permutations(6, K)
        return algorithms.fed_ensemble(two_layer(), plan, client_learning_rate=0.1, work=work)

    return sweeps.sweep(
        build or ensemble_of,
        uneven_data(),
        num_rounds=1,
        seeds=[0, 1],
        grid=values,
        evaluation=Evaluation(measure=evaluate),
    )


def test_a_sweep_whose_configurations_measure_different_things() -> None:
    def some(algorithm: Any, state: Any) -> Any:
        return {"size": jnp.zeros(())} | ({"spread": jnp.ones(())} if algorithm.schedule.num_models > 1 else {})

    with pytest.raises(ValueError, match="measure: returned the metric 'spread' for only one of"):
        swept(some, {"K": [2, 1]})
    with pytest.raises(ValueError, match=r"measure: the metric 'per' has shape \[3\] for .* but \[1\]"):
        swept(lambda a, s: {"per": jnp.zeros(a.schedule.num_models)}, {"K": [3, 1]})


def test_a_sweep_whose_configurations_measure_in_different_types() -> None:
    def halves(algorithm: Any, state: Any) -> Any:
        return {"value": jnp.int32(1) if algorithm.schedule.num_models == 1 else jnp.float64(0.5)}

    found = swept(halves, {"K": [1, 2]}).metrics["value"]
    assert found[..., -1].tolist() == [[1.0, 0.5]] * 2


def test_a_sweep_over_arrays_that_look_alike() -> None:
    """Two long arrays whose texts are the same are two configurations."""
    weight = np.full(2000, 0.1)
    other = weight.copy()
    other[600] = 0.9
    assert repr(weight) == repr(other)

    def build(weight: np.ndarray) -> Any:
        return average(float(weight.sum()) / 1000, 1)

    found = swept(lambda a, s: {"norm": jnp.linalg.norm(s.server.params["W"])}, {"weight": [weight, other]}, build)
    ends = found.metrics["norm"][:, :, -1]
    assert (abs(ends[:, 0] - ends[:, 1]) > 1e-6).all()


def test_two_runs_cannot_share_a_checkpoint_folder(tmp_path: Path) -> None:
    def second(evaluation: Any) -> None:
        with pytest.raises(CheckpointError, match="in use by another run"):
            simulate(average(0.1, 1), uneven_data(), num_rounds=1, seed=1, checkpoints=Checkpoints(tmp_path))

    first = simulate(
        average(0.1, 1),
        uneven_data(),
        num_rounds=1,
        evaluation=Evaluation(report=second),
        checkpoints=Checkpoints(tmp_path),
    )
    assert first.status == "finished"
    resumed = Checkpoints(tmp_path, resume=True)
    assert simulate(average(0.1, 1), uneven_data(), num_rounds=2, checkpoints=resumed).status == "finished"


@pytest.mark.parametrize("seed", [1.5, -1, 2**32, "a", True])
def test_a_seed_in_whole_numbers(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"seed: got .*, must be a whole number from 0 to 4294967295"):
        simulate(average(0.1, 1), uneven_data(), num_rounds=1, seed=seed)


@pytest.mark.parametrize("seeds", [[1.7], [], [0, 0], [-1], ["1"]])
def test_seeds_in_whole_numbers(seeds: Any) -> None:
    with pytest.raises(ValueError, match="seeds: got"):
        sweeps.check_seeds(seeds)


def test_an_evaluation_that_is_no_dictionary() -> None:
    with pytest.raises(ValueError, match="measure: returned a float"):
        simulate(
            classifier(), uneven_data(labels=True), num_rounds=1, evaluation=Evaluation(measure=lambda _, state: 1.0)
        )  # type: ignore[arg-type, return-value]


def test_what_is_no_flax_module() -> None:
    with pytest.raises(ValueError, match="module: got a int, must be a module of flax"):
        models.from_flax(3, np.zeros((1, 2)), 2)
    with pytest.raises(ValueError, match="example_input: got"):
        models.from_flax(nn.Dense(2), (1, 64), 2)


@pytest.mark.parametrize("number", [-1, 10**6])
def test_more_cores_than_there_are(number: int) -> None:
    with pytest.raises(ValueError, match=f"host_devices: got {number}, must be from 0"):
        processes.use_cores(number)


def test_cores_cannot_become_devices_once_they_are_in_use() -> None:
    jnp.zeros(1).block_until_ready()
    before = jax.device_count()
    processes.use_cores(0)
    assert jax.device_count() == before
