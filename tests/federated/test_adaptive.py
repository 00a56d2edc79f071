"""FedAdam, FedYogi, FedAdagrad and FedAvgM against NumPy loops written from the papers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from fedtangent._src.federated import algorithms
from fedtangent._src.federated.algorithms import adaptive
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import per_client_permutations, uniform_sampling
from fedtangent._src.optimizers import staircase_decay
from fedtangent._src.types import Algorithm

from ..nightly import nightly
from . import reference_corrected as loops
from .replay import MODEL, TOLERANCE, VISIBLE, Case, alike, build, by_examples, replayed, simulated
from .toys import arguments_of, distance

FOUR, PAIRS = uniform_sampling(6, 4), per_client_permutations(6, 2)
FULL, PASSES = Work(steps=3, batch_size=None), Work(epochs=2, batch_size=2)
PUBLISHED = {"beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3, "initial": 1e-6}
HALVED = staircase_decay(0.1, 0.5, 1)


def adaptive_case(
    recipe: Callable[..., Algorithm],
    options: dict[str, Any],
    wrong: tuple[str, ...],
    schedule: Any = FOUR,
    work: Work = FULL,
    **how: Any,
) -> Case:
    method = recipe.__name__.removeprefix("fed_")
    how = {"method": method, "weight": by_examples, "rate": lambda t: 0.01, **PUBLISHED, **how}
    return Case(recipe, options, loops.adaptive, how, schedule, 3, work, wrong=wrong)


CASES = {
    "adam": adaptive_case(algorithms.fed_adam, {}, ("bias_correction", "zero_start")),
    "adam_ensemble": adaptive_case(
        algorithms.fed_adam,
        {"server_learning_rate": HALVED, "beta_1": 0.5, "beta_2": 0.7, "tau": 0.02, "weighting": "uniform"},
        ("bias_correction", "zero_start"),
        PAIRS,
        PASSES,
        **{"rate": lambda t: 0.1 * 0.5**t, "beta_1": 0.5, "beta_2": 0.7, "tau": 0.02, "initial": 4e-4, "weight": alike},
    ),
    # a second moment that starts above the squares must fall by their size, and below it grow: both signs
    "yogi": adaptive_case(
        algorithms.fed_yogi,
        {"initial_second_moment": 3e-3, "beta_2": 0.8},
        ("as_adam", "zero_start"),
        initial=3e-3,
        beta_2=0.8,
    ),
    "yogi_published": adaptive_case(algorithms.fed_yogi, {}, ("bias_correction", "zero_start")),
    "adagrad": adaptive_case(
        algorithms.fed_adagrad, {"tau": 0.1}, ("zero_start",), rate=lambda t: 0.1, beta_1=0.0, tau=0.1, initial=0.01
    ),
    "adagrad_momentum": adaptive_case(
        algorithms.fed_adagrad,
        {"server_learning_rate": jnp.float64(0.05), "beta_1": 0.8, "tau": 0.1, "initial_second_moment": 0.0},
        ("bias_correction",),
        PAIRS,
        rate=lambda t: 0.05,
        beta_1=0.8,
        tau=0.1,
        initial=0.0,
    ),
    "avg_m": Case(
        algorithms.fed_avg_m,
        {},
        loops.fed_avg_m,
        {"weight": by_examples, "momentum": 0.9, "rate": lambda t: 1.0},
        FOUR,
        3,
        PASSES,
        wrong=("forgetful", "nesterov"),
    ),
    "avg_m_nesterov_ensemble": Case(
        algorithms.fed_avg_m,
        {"momentum": 0.5, "nesterov": True, "server_learning_rate": HALVED, "weighting": "uniform"},
        loops.fed_avg_m,
        {"weight": alike, "momentum": 0.5, "nesterov": True, "rate": lambda t: 0.1 * 0.5**t},
        PAIRS,
        3,
        FULL,
        wrong=("forgetful", "nesterov"),
    ),
}


@functools.cache
def ran(name: str) -> tuple[Any, Any]:
    return simulated(CASES[name], "vmap")


DAILY = ("adam", "yogi", "adagrad_momentum", "avg_m_nesterov_ensemble")
WRONG = [(name, wrong) for name, case in CASES.items() for wrong in case.wrong]


@pytest.mark.parametrize("name", nightly(CASES, DAILY))
def test_equals_the_loop(name: str) -> None:
    start, end = ran(name)
    assert distance(start, end) > 5e-3
    assert distance(end, replayed(CASES[name], start)) < TOLERANCE


@pytest.mark.parametrize(("name", "wrong"), nightly(WRONG, DAILY))
def test_a_loop_with_one_thing_wrong_differs(name: str, wrong: str) -> None:
    start, end = ran(name)
    assert distance(end, replayed(CASES[name], start, wrong)) > VISIBLE


def after(optimizer: optax.GradientTransformation, gradients: list[Any]) -> Any:
    """The sum of the updates."""
    state, total = optimizer.init(gradients[0]), jax.tree.map(jnp.zeros_like, gradients[0])
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, gradient)
        total = jax.tree.map(jnp.add, total, updates)
    return total


def gradients(dtype: Any = jnp.float64) -> list[Any]:
    return [{"w": jax.random.normal(jax.random.key(t), (3, 2), dtype)} for t in range(4)]


def test_fed_adam_is_not_optax_adam_and_what_makes_it_so() -> None:
    """Bias corrected by hand (which needs a start at 0) the two agree; as published they are far apart."""
    published = adaptive.adam(0.1, 0.9, 0.99, 1e-3)
    assert distance(after(published, gradients()), after(optax.adam(0.1, 0.9, 0.99, 1e-3), gradients())) > 0.05

    total = jax.tree.map(jnp.zeros_like, gradients()[0])
    scaled, state = adaptive.adam(0.1, 0.9, 0.99, 1e-3, 0.0), None
    for t, gradient in enumerate(gradients(), start=1):
        state = scaled.init(gradient) if state is None else state
        _, state = scaled.update(gradient, state)
        m = jax.tree.map(lambda leaf, t=t: leaf / (1 - 0.9**t), state.first)
        v = jax.tree.map(lambda leaf, t=t: leaf / (1 - 0.99**t), state.second)
        total = jax.tree.map(lambda x, m, v: x - 0.1 * m / (jnp.sqrt(v) + 1e-3), total, m, v)
    assert distance(total, after(optax.adam(0.1, 0.9, 0.99, 1e-3), gradients())) < 1e-12


@pytest.mark.slow
def test_momentum_of_zero_is_fed_avg() -> None:
    """By day the loop has the momentum, and one that forgets it is told apart."""
    still = CASES["avg_m"]._replace(options={"momentum": 0.0})
    average = still._replace(recipe=algorithms.fed_avg, options={})
    (_, end), (_, plain) = simulated(still, "vmap"), simulated(average, "vmap")
    assert distance(end, plain) < 1e-15
    assert distance(ran("avg_m")[1], plain) > VISIBLE


@pytest.mark.parametrize("rate", [0.1, jnp.float64(0.1)])
def test_float32_stays_float32_with_constants_in_float64(rate: Any) -> None:
    half, small = jnp.float64(0.5), jnp.float64(0.01)
    for optimizer, plain in (
        (adaptive.adam(rate, half, half, small), adaptive.adam(0.1, 0.5, 0.5, 0.01)),
        (adaptive.yogi(rate, half, half, small), adaptive.yogi(0.1, 0.5, 0.5, 0.01)),
        (adaptive.adagrad(rate, half, small), adaptive.adagrad(0.1, 0.5, 0.01)),
        (adaptive.heavy_ball(rate, half), adaptive.heavy_ball(0.1, 0.5)),
    ):
        found = after(optimizer, gradients(jnp.float32))
        assert found["w"].dtype == jnp.float32
        assert distance(found, after(plain, gradients(jnp.float32))) < 1e-6
        state = optimizer.update(gradients(jnp.float32)[0], optimizer.init(gradients(jnp.float32)[0]))[1]
        assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32)}


def test_constants_may_be_traced() -> None:
    def end(tau: Any, beta_1: Any) -> Any:
        case = CASES["adam"]._replace(options={"tau": tau, "beta_1": beta_1})
        build(case)
        return after(adaptive.adam(0.1, beta_1, 0.99, tau), gradients())

    assert distance(jax.jit(end)(1e-3, 0.9), after(adaptive.adam(0.1, 0.9, 0.99, 1e-3), gradients())) < 1e-12


@pytest.mark.parametrize(
    ("recipe", "changed", "named"),
    [
        ("fed_adam", {"beta_1": 1.0}, "beta_1: got 1.0, must be at least 0 and below 1"),
        ("fed_yogi", {"beta_2": -0.1}, "beta_2: got -0.1, must be at least 0 and below 1"),
        ("fed_adagrad", {"beta_1": float("nan")}, "beta_1: got nan"),
        ("fed_adam", {"tau": 0.0}, r"tau: got 0\.0, must be above 0 and finite"),
        (
            "fed_adagrad",
            {"initial_second_moment": -1.0},
            "initial_second_moment: got -1.0, must be at least 0 and finite",
        ),
        ("fed_yogi", {"server_learning_rate": 0.0}, "server_learning_rate: got 0.0"),
        ("fed_avg_m", {"momentum": 1.0}, "momentum: got 1.0, must be at least 0 and below 1"),
        ("fed_avg_m", {"client_learning_rate": -1.0}, "client_learning_rate: got -1.0"),
        ("fed_adam", {"work": Work(steps=0, batch_size=None)}, "work.steps: got 0"),
    ],
)
def test_bad_arguments(recipe: str, changed: dict[str, Any], named: str) -> None:
    arguments = {"client_learning_rate": 0.1, "work": FULL} | changed
    with pytest.raises(ValueError, match=named):
        build_named = getattr(algorithms, recipe)
        build_named(MODEL, FOUR, **arguments_of(build_named, arguments))


@pytest.mark.parametrize("unit", [2.0**-40, 2.0**40])
@pytest.mark.parametrize("name", ["adam", "yogi", "adagrad"])
def test_pseudo_gradients_of_another_unit_move_the_server_alike(name: str, unit: float) -> None:
    """In float32, with tau (a size of pseudo-gradients) in the same unit."""
    decay = {} if name == "adagrad" else {"beta_2": 0.99}
    gradients = jax.random.normal(jax.random.key(0), (5, 7), jnp.float32)

    def moves(unit: float) -> jax.Array:
        optimizer = getattr(adaptive, name)(rate=0.1, beta_1=0.9, tau=1e-3 * unit, **decay)

        def step(state: Any, gradient: jax.Array) -> tuple[Any, jax.Array]:
            return optimizer.update(unit * gradient, state)[::-1]

        return jax.lax.scan(step, optimizer.init(gradients[0]), gradients)[1]

    assert float(jnp.max(jnp.abs(moves(1.0) - moves(unit)))) < 1e-6 < 0.01 < float(jnp.max(jnp.abs(moves(1.0))))
