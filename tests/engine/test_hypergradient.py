"""Derivatives through a whole run: against finite differences, and what they take."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.engine import Devices
from fedtangent._src.engine.hypergradients import Hypergradient, final_objective, hypergradient
from fedtangent._src.engine.run import simulate
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import all_clients, per_client_permutations
from fedtangent._src.optimizers import staircase_decay
from fedtangent._src.types import Algorithm, Model

from . import tiny_runs

ROUNDS, SEED = 5, 1
VALUES = {"client_learning_rate": 0.1, "server_learning_rate": 0.8}
STEPS = 0.02 / 2.0 ** np.arange(4)


def build(client_learning_rate: Any, server_learning_rate: Any, differentiable: bool = True) -> Algorithm:
    """The client's rate is the initial one of a decay, so that derivatives go through a schedule of rates too."""
    return algorithms.fed_avg(
        tiny_runs.MODEL,
        all_clients(tiny_runs.NUM_CLIENTS),
        client_learning_rate=staircase_decay(client_learning_rate, 0.5, 2),
        averaging=Averaging(server_learning_rate=server_learning_rate),
        work=Work(steps=3, batch_size=2, differentiable=differentiable),
    )


def build_ensemble(client_learning_rate: Any, server_learning_rate: Any) -> Algorithm:
    rate = staircase_decay(client_learning_rate, 0.5, 2)
    return tiny_runs.build(rate, server_learning_rate, num_models=2, differentiable=True)


@functools.cache
def found(remat: str = "round", mapping: str = "scan", last: int | None = None) -> Hypergradient:
    return hypergradient(
        build,
        tiny_runs.data(),
        ROUNDS,
        SEED,
        VALUES,
        tiny_runs.validation_loss,
        remat=remat,
        devices=Devices(mapping),
        last=last,
    )


@functools.cache
def plain_loss() -> Any:
    """The same objective from the ordinary, dynamic loops: a run of its own for each pair of rates."""
    data, engine = tiny_runs.data(), tiny_runs.engine()

    def loss(rates: Any) -> Any:
        algorithm = build(rates[0], rates[1], differentiable=False)
        state = algorithm.init(SEED, data.num_clients)
        state = jax.lax.fori_loop(0, ROUNDS, lambda _, s: algorithm.step(s, data, engine)[0], state)
        return tiny_runs.validation_loss(algorithm, state)

    return jax.jit(loss)


def central(name: str, step: float) -> float:
    at = {sign: [v + sign * step * (n == name) for n, v in VALUES.items()] for sign in (-1, 1)}
    return float(plain_loss()(jnp.asarray(at[1])) - plain_loss()(jnp.asarray(at[-1]))) / (2 * step)


def test_the_value_is_that_of_a_run() -> None:
    algorithm = build(**VALUES, differentiable=False)
    run = simulate(algorithm, tiny_runs.data(), num_rounds=ROUNDS, seed=SEED)
    value = float(tiny_runs.validation_loss(algorithm, run.state))
    assert [float(f.value) for f in (found(), found("none", last=1))] == pytest.approx([value] * 2, rel=1e-12)
    by_stretches = final_objective(build, tiny_runs.data(), ROUNDS, SEED, tiny_runs.validation_loss, remat="sqrt")
    assert float(jax.jit(by_stretches)(VALUES)) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("name", VALUES)
def test_central_differences_close_in_with_the_square_of_the_step(name: str) -> None:
    errors = np.array([abs(central(name, step) - float(found().gradient[name])) for step in STEPS])
    slope = np.polyfit(np.log(STEPS), np.log(errors), 1)[0]
    assert 1.95 < slope < 2.05
    # Negative control: a derivative that stops at the last round's start is another number, which they stay away from.
    cut = float(found("none", last=1).gradient[name])
    apart = np.array([abs(central(name, step) - cut) for step in STEPS])
    assert abs(np.polyfit(np.log(STEPS), np.log(apart), 1)[0]) < 0.5
    assert apart[-1] > 100 * errors[-1]


@pytest.mark.parametrize(
    ("remat", "mapping", "last"),
    [("sqrt", "vmap", ROUNDS), ("none", "scan", None)],
)
@pytest.mark.slow
def test_neither_what_is_kept_nor_the_mapping_changes_it(remat: str, mapping: str, last: int | None) -> None:
    """By day all ways of keeping have the same value, above, and one has the derivative of central differences."""
    other = found(remat, mapping, last)
    for name in VALUES:
        assert float(other.gradient[name]) == pytest.approx(float(found().gradient[name]), rel=1e-10)
    assert float(other.value) == pytest.approx(float(found().value), rel=1e-12)


@pytest.mark.slow
def test_through_an_ensemble() -> None:
    """The same from central differences at one small step."""
    data, objective, step = tiny_runs.data(), tiny_runs.validation_loss, 1e-4
    found = hypergradient(build_ensemble, data, ROUNDS, SEED, VALUES, objective)
    loss = jax.jit(final_objective(build_ensemble, data, ROUNDS, SEED, objective))
    for name in VALUES:
        ends = [float(loss(VALUES | {name: VALUES[name] + sign * step})) for sign in (1, -1)]
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float(found.gradient[name]), rel=1e-5)


def peak(remat: str, rounds: int) -> int:
    """Bytes of temporaries that the compiled derivative needs; full batches of a linear model of 2,000 inputs."""
    model = Model("linear", lambda key: jnp.zeros((2000, 1)), lambda w, x: x @ w, None, 1)
    data = tiny_runs.data()._replace(x=jnp.ones((12, 2000)))

    def linear(client_learning_rate: Any) -> Algorithm:
        work = Work(steps=4, differentiable=True, batch_size=None)
        plan = per_client_permutations(4, 1)
        return algorithms.fed_avg(model, plan, client_learning_rate=client_learning_rate, work=work)

    def objective(algorithm: Algorithm, state: Any) -> Any:
        return jnp.sum(state.server.params**2)

    loss = final_objective(linear, data, rounds, 0, objective, remat=remat)
    compiled = jax.jit(jax.grad(loss)).lower({"client_learning_rate": jnp.asarray(0.1)}).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_grows_as_documented() -> None:
    state = 2000 * 8
    growth = {remat: (peak(remat, 100) - peak(remat, 16)) / state for remat in ("none", "round", "sqrt")}
    assert growth["none"] > 84 * 4 * 4  # at least the parameters of each client's every step
    assert 84 <= growth["round"] < 1.2 * 84  # a state per round
    assert growth["sqrt"] < 2 * 2 * (10 - 4)  # states of the stretches, and of the rounds of one


def test_without_static_loops_there_is_no_derivative_and_it_says_why() -> None:
    def dynamic(client_learning_rate: Any) -> Algorithm:
        return tiny_runs.build(client_learning_rate)

    values = {"client_learning_rate": 0.1}
    with pytest.raises(ValueError, match=r"build: .*must train by Work\(\.\.\., differentiable=True\)"):
        hypergradient(dynamic, tiny_runs.data(), 2, 0, values, tiny_runs.validation_loss)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_rounds": 0}, "num_rounds: got 0"),
        ({"remat": "all"}, "remat: got 'all', allowed are none, round, sqrt"),
        ({"last": 0}, "last: got 0, must be a whole number from 1 to 2"),
        ({"last": 3}, "last: got 3, must be a whole number from 1 to 2"),
        ({"devices": Devices("sharded")}, "mapping: got 'sharded'"),
        ({"values": VALUES | {"server_learning_rate": -1.0}}, "server_learning_rate: got -1.0"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], named: str) -> None:
    given: dict[str, Any] = {"num_rounds": 2, "seed": 0, "values": VALUES} | changed
    with pytest.raises(ValueError, match=named):
        hypergradient(build, tiny_runs.data(), objective=tiny_runs.validation_loss, **given)
