"""Learning rates that change with the round, and rates that are traced."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedtangent._src.engine import Devices, params_by_round, simulate
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.algorithms.normalised import Normalisation
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.ntk_fl import Evolution
from fedtangent._src.federated.schedule import all_clients, uniform_sampling
from fedtangent._src.optimizers import at_rate, at_round, check_linear, check_rate, rate_at, sgd, staircase_decay
from fedtangent._src.types import Algorithm, Model

from ..nightly import nightly
from . import reference
from .toys import cohorts, distance, go, leaves, models_of, owned_rows, two_layer, uneven_data

SAMPLING = uniform_sampling(6, 4)
MODEL = two_layer()


def test_the_papers_decay() -> None:
    rate = staircase_decay(0.1)
    assert [float(rate(jnp.int32(t))) for t in (0, 9)] == pytest.approx([0.1, 0.1], rel=1e-12)
    for t in (10, 19, 20, 999, 1500):
        assert float(rate(jnp.int32(t))) == pytest.approx(0.1 * 0.99 ** (t // 10), rel=1e-12)
        assert float(rate(jnp.int32(t))) != pytest.approx(0.1 * 0.99 ** (t / 10), rel=1e-12) or t % 10 == 0
    assert float(staircase_decay(0.2, 0.5, 3)(jnp.int32(7))) == pytest.approx(0.05)
    assert float(staircase_decay(0.2, 1.0)(jnp.int32(70))) == 0.2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0.0,), "initial: got 0.0"),
        ((lambda t: 0.1,), "initial: got a schedule"),
        ((0.1, 0.0), "factor: got 0.0"),
        ((0.1, 1.5), "factor: got 1.5"),
        ((0.1, 0.9, 0), "every: got 0"),
        ((0.1, 0.9, 2.5), "every: got 2.5"),
    ],
)
def test_bad_decay(arguments: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        staircase_decay(*arguments)


def test_only_a_concrete_rate_is_checked() -> None:
    bad = {"rate: got 0.0": 0.0, "rate: got -1.0": -1.0, "rate: got nan": np.nan, "rate: got inf": jnp.float32(np.inf)}
    for said, rate in bad.items():
        with pytest.raises(ValueError, match=f"^{said}, must be above 0 and finite"):
            check_rate("rate", rate)
    with pytest.raises(ValueError, match=r"^rate in round 0: got -0.1.*, must be at least 0 and finite"):
        check_rate("rate", lambda t: -0.1 + 0 * t)
    falling = optax.linear_schedule(0.1, -0.1, 4)
    check_rate("rate", falling, 3)  # 0 in round 2
    with pytest.raises(ValueError, match=r"^rate in round 3: got -0.05"):
        check_rate("rate", falling, 4)
    with pytest.raises(ValueError, match=r"^rate: got an optax optimiser, must be a number or a schedule of the round"):
        check_rate("rate", optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"rate: got an array of shape \(2,\), must be one number"):
        check_rate("rate", jnp.ones(2))
    check_rate("rate", staircase_decay(0.1))
    check_rate("rate", np.float32(0.1))

    def traced(rate: Any) -> Any:
        check_rate("rate", rate)
        check_rate("rate", lambda t: rate * t)
        return rate_at(lambda t: rate * t, jnp.int32(3))

    assert float(jax.jit(traced)(jnp.float64(-1.0))) == -3.0


@pytest.mark.parametrize("kind", ["array", "schedule", "numpy"])
def test_parameters_keep_their_dtype(kind: str) -> None:
    """A float64 rate on float32 parameters is what a Python number is: rounded first, bit for bit."""
    rate = {"array": jnp.float64(0.1), "schedule": lambda t: jnp.float64(0.1), "numpy": np.float64(0.1)}[kind]
    gradient = jax.random.normal(jax.random.key(0), (100,), jnp.float32)
    optimizer = at_round(sgd(rate), jnp.int32(0))
    step, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
    expected, _ = optax.sgd(0.1).update(gradient, optax.sgd(0.1).init(gradient), gradient)
    assert step.dtype == jnp.float32
    assert np.array_equal(step, expected)


def fed_avg(client: Any, server: Any = 1.0, model: Model = MODEL, work: Work | None = None) -> Algorithm:
    work = Work(epochs=2, batch_size=2) if work is None else work
    return algorithms.fed_avg(
        model, SAMPLING, client_learning_rate=client, averaging=Averaging(server_learning_rate=server), work=work
    )


@functools.cache
def start() -> Any:
    return fed_avg(0.2).init(0, 6)


def end(algorithm: Algorithm, rounds: int, mapping: str = "scan", state: Any = None) -> Any:
    return go(algorithm, uneven_data(), mapping, rounds, start() if state is None else state)[0]


@pytest.mark.parametrize("mapping", nightly(["scan", "vmap"], ["vmap"]))
def test_a_constant_schedule_or_array_is_the_number_bit_for_bit(mapping: str) -> None:
    plain = end(fed_avg(0.2, 0.7), 3, mapping).server.params
    for wrap in (jnp.float64, optax.constant_schedule) if mapping == "scan" else (jnp.float64,):
        other = end(fed_avg(wrap(0.2), wrap(0.7)), 3, mapping).server.params
        assert all(np.array_equal(*pair) for pair in zip(leaves(plain), leaves(other), strict=True))
    assert distance(plain, start().server.params) > 1e-2


def replayed(model: reference.Params, client: Any, server: Any, rounds: int) -> reference.Params:
    """Three full-batch steps a client and round in NumPy, at the rates of each round."""
    data = uneven_data()
    rows, x, y = owned_rows(data), np.asarray(data.x), np.asarray(data.y)
    for t, chosen in enumerate(cohorts(SAMPLING, 0, rounds).client):

        def train(_: int, i: int, w: reference.Params, rate: float = client(t)) -> reference.Params:
            return reference.sgd(w, x[rows[i]], y[rows[i]], [np.arange(len(rows[i]))] * 3, rate, "squared_error")

        model = reference.fed_avg(model, [chosen.tolist()], train, lambda i: len(rows[i]), server(t))
    return model


def test_a_run_with_schedules_is_the_loop_with_each_rounds_rates() -> None:
    algorithm = fed_avg(
        staircase_decay(0.3, 0.5, 2), lambda t: 1 / (1 + t.astype(float)), work=Work(steps=3, batch_size=None)
    )
    (begun,) = models_of(algorithm, start())
    (found,) = models_of(algorithm, end(algorithm, 5))
    assert distance(found, replayed(begun, lambda t: 0.3 * 0.5 ** (t // 2), lambda t: 1 / (1 + t), 5)) < 1e-12
    for wrong in (
        replayed(begun, lambda t: 0.3, lambda t: 1 / (1 + t), 5),
        replayed(begun, lambda t: 0.3 * 0.5 ** (t // 2), lambda t: 1, 5),
    ):
        assert distance(found, wrong) > 1e-2


def test_ntk_fl_takes_a_schedule() -> None:
    halved, plain = (
        algorithms.ntk_fl(MODEL, SAMPLING, learning_rate=rate, evolution=Evolution(times=(4,)))
        for rate in (staircase_decay(0.3, 0.5, 1), 0.3)
    )
    begun = plain.init(0, 6)
    first, second = ([end(a, rounds, state=begun).server for a in (halved, plain)] for rounds in (1, 2))
    assert distance(*first) < 1e-12
    assert distance(*second) > 1e-4


def test_a_rate_that_turns_negative_is_refused_before_any_work() -> None:
    """Also where only a later round's is: 0.1 - 0.1 r is 0 in round 1 and -0.1 in round 2."""
    rate = lambda round_: 0.1 - 0.1 * round_  # noqa: E731
    falling = algorithms.fed_avg(MODEL, all_clients(6), client_learning_rate=rate, work=Work(steps=1, batch_size=None))
    with pytest.raises(
        ValueError, match=r"^client_learning_rate in round 2: got -0.1.*, must be at least 0 and finite"
    ):
        simulate(falling, uneven_data(), num_rounds=3)
    assert simulate(falling, uneven_data(), num_rounds=2).status == "finished"


def test_a_proximal_term_times_a_rate_of_1_is_refused_in_a_later_round_too() -> None:
    """0.4 r is 1.2 in round 3; before that the run is sound."""
    growing = algorithms.fed_nova(
        MODEL, all_clients(6), lambda round_: 0.4 * round_, Work(steps=1, batch_size=None), Normalisation(mu=1.0)
    )
    with pytest.raises(ValueError, match=r"^mu \* client_learning_rate: got 1\.2"):
        simulate(growing, uneven_data(), num_rounds=4)
    assert simulate(growing, uneven_data(), num_rounds=3).status == "finished"


@pytest.mark.parametrize("recipe", nightly(["fed_avg", "scaffold", "fed_nova", "fed_dyn"], ["scaffold"]))
def test_a_warm_up_from_0_moves_nothing_in_its_first_round(recipe: str) -> None:
    """By day of the recipe that is not among the daily ones of the next test."""
    warm = optax.linear_schedule(0.0, 0.2, 2)
    algorithm = getattr(algorithms, recipe)(
        two_layer(), all_clients(6), client_learning_rate=warm, work=Work(steps=2, batch_size=None)
    )
    models = params_by_round(algorithm, uneven_data(), num_rounds=2, devices=Devices("scan"))
    for leaf in jax.tree.leaves(models):
        assert np.array_equal(leaf[0], leaf[1]) and np.isfinite(leaf[2]).all() and not np.array_equal(leaf[1], leaf[2])


FALLING, RISING = optax.linear_schedule(0.1, 0.0, 4), optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 10)
SCHEDULES = {  # with the rounds of seven in which the rate is 0
    "up and down": (optax.join_schedules([optax.linear_schedule(0.0, 0.1, 2), optax.linear_schedule(0.1, 0, 2)], [2]),
                    (0, 4, 5, 6)),
    "falling": (FALLING, (4, 5, 6)),
    "rising": (RISING, (0,)),
}  # fmt: skip
STILL: dict[str, Any] = {  # recipe and its arguments from a schedule of the rate
    "fed_avg": lambda rate: (algorithms.fed_avg, {"client_learning_rate": rate}),
    "fed_prox": lambda rate: (algorithms.fed_prox, {"client_learning_rate": rate}),
    "fed_dyn": lambda rate: (algorithms.fed_dyn, {"client_learning_rate": rate, "mu": 0.3}),
    "scaffold": lambda rate: (algorithms.scaffold, {"client_learning_rate": rate}),
    "fed_nova": lambda rate: (algorithms.fed_nova, {"client_learning_rate": rate}),
    "fed_nova, mu": lambda rate: (
        algorithms.fed_nova,
        {"client_learning_rate": rate, "normalisation": Normalisation(0.3)},
    ),
    "fed_nova, momentum": lambda rate: (
        algorithms.fed_nova,
        {"client_optimizer": at_rate(functools.partial(optax.sgd, momentum=0.9), rate)},
    ),
    "fed_nova, mu and momentum": lambda rate: (
        algorithms.fed_nova,
        {
            "client_optimizer": at_rate(functools.partial(optax.sgd, momentum=0.9), rate),
            "normalisation": Normalisation(0.3, tau_eff=2.0),
        },
    ),
}


@pytest.mark.parametrize(
    ("name", "schedule"),
    nightly(
        itertools.product(STILL, SCHEDULES),
        [("fed_dyn", "up and down"), ("fed_nova, mu and momentum", "up and down")],
    ),
)
def test_a_round_of_rate_0_changes_no_bit_of_a_model(name: str, schedule: str) -> None:
    """Three clients of other sizes, minibatches; the last three rounds of seven, the first of a warm-up, or both."""
    data, (rate, at_0) = uneven_data(sizes=(3, 5, 4)), SCHEDULES[schedule]
    recipe, arguments = STILL[name](rate)
    algorithm = recipe(MODEL, all_clients(3), work=Work(epochs=2, batch_size=2), **arguments)
    states = [algorithm.init(0, 3)]
    for _ in range(7):
        states.append(go(algorithm, data, "scan", 1, states[-1])[0])
    models = [leaves(algorithm.params(state)) for state in states]
    assert all(np.isfinite(leaf).all() for model in models for leaf in model)
    still = [all(np.array_equal(*pair) for pair in zip(*both, strict=True)) for both in itertools.pairwise(models)]
    expected = [round_ in at_0 for round_ in range(7)]
    if name == "fed_dyn":
        expected[1:] = [False] * 6  # after its first step the server moves by h / mu
    assert still == expected


def test_a_warm_up_from_0_is_as_linear_as_its_later_rounds() -> None:
    make = functools.partial(optax.sgd, momentum=0.9)
    check_linear("client_optimizer", at_rate(make, lambda t: jnp.where(t < 900, 0.0, 0.1)))
    with pytest.raises(ValueError, match="not linear in the gradients"):
        check_linear("client_optimizer", at_rate(optax.adam, RISING))
    with pytest.raises(ValueError, match="does not move against the gradients"):
        check_linear("client_optimizer", at_rate(optax.sgd, lambda t: 0.0 * t))
