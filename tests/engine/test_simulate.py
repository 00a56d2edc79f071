"""The driver: history, seeds, mappings and bad arguments. The laws of the loop are in ``federated/test_laws.py``."""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedtangent as ft
from fedtangent import simulate as simulate_from_the_root
from fedtangent._src import data as datasets
from fedtangent._src import models
from fedtangent._src.cli import trained
from fedtangent._src.data import examples, partition
from fedtangent._src.engine import Devices, Evaluation, simulate
from fedtangent._src.engine.clients import engine_for
from fedtangent._src.engine.history import Measurement, charge
from fedtangent._src.engine.loop import chunk_length
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.aggregate import optax_server
from fedtangent._src.federated.compose import compose
from fedtangent._src.federated.local import Work, local_training
from fedtangent._src.federated.schedule import uniform_sampling
from fedtangent._src.losses import squared_error
from fedtangent._src.pytrees import is_key
from fedtangent._src.types import Algorithm, Cohort, Cost, FederatedData, Model, PyTree

from . import tiny_runs

OFFSETS = [0, 2, 5, 6]
COMPILES: list[str] = []


def _listen(event: str, duration: float, **_: Any) -> None:
    if "backend_compile" in event:
        COMPILES.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)


def data() -> FederatedData:
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(6, 2))), jnp.asarray(rng.normal(size=(6, 1)))
    return FederatedData(x, y, jnp.arange(6, dtype=jnp.int32), jnp.asarray(OFFSETS, jnp.int32))


@functools.cache
def algorithm() -> Algorithm:
    """Two of three clients a round; eight bytes for each of the linear model's two weights."""
    model = Model("linear", lambda key: jax.random.normal(key, (2, 1)), lambda w, x: x @ w, None, 1)
    local = local_training(model, squared_error, optax.sgd(0.1), Work(steps=2, batch_size=None))
    return compose("linear", model, local, optax_server(optax.sgd(1.0)), uniform_sampling(3, 2))


def weights(state: PyTree) -> np.ndarray:
    return np.asarray(state.server.params)


@functools.cache
def evaluated() -> tuple[Any, list[Measurement]]:
    """Seven rounds, evaluated every three."""
    told: list[Measurement] = []
    run = simulate(
        algorithm(),
        data(),
        num_rounds=7,
        seed=3,
        evaluation=Evaluation(3, lambda _, state: {"weights": weights(state).copy()}, report=told.append),
        devices=Devices("scan"),
    )
    return run, told


def test_evaluations() -> None:
    run, told = evaluated()
    seen = run.history.evaluations
    assert [e.round for e in seen] == [0, 3, 6, 7]
    assert [e.uplink_bytes for e in seen] == [e.downlink_bytes for e in seen] == [0, 3 * 32, 6 * 32, 7 * 32]
    assert run.history.cost == Cost(16, 0, 16)
    assert told == seen
    assert np.array_equal(seen[0].metrics["weights"], weights(algorithm().init(3, 3)))
    assert np.array_equal(seen[-1].metrics["weights"], weights(run.state))
    assert len({e.metrics["weights"].tobytes() for e in seen}) == 4


def test_rounds_are_stacked_without_the_padding_of_the_last_chunk() -> None:
    run, _ = evaluated()
    rounds = run.history.rounds
    assert rounds["steps"].shape == rounds["loss"].shape == rounds["cohort"].client.shape == (7, 2)
    assert rounds["model_weight"].shape == (7, 1)
    assert (rounds["steps"] == 2).all()
    sizes = np.diff(OFFSETS)[rounds["cohort"].client]
    assert np.array_equal(rounds["examples"], sizes)
    assert np.array_equal(rounds["cohort"].weight, sizes)
    assert np.array_equal(rounds["model_weight"][:, 0], sizes.sum(axis=1))
    assert int(run.state.round) == 7


def test_what_is_sent_before_the_first_round_counts_from_the_start() -> None:
    cost = Cost(1, 0, 1, uplink_once=5, downlink_once=7)
    run = simulate(algorithm()._replace(cost=lambda data, engine: cost), data(), num_rounds=1, devices=Devices("scan"))
    sent = [(e.uplink_bytes, e.downlink_bytes) for e in run.history.evaluations]
    assert sent == [(5, 7), (5 + 2, 7 + 2)]  # two of three clients a round


def test_evaluate_every_beyond_the_end_is_once_at_the_end() -> None:
    ends = [
        simulate(algorithm(), data(), num_rounds=3, seed=3, evaluation=Evaluation(every), devices=Devices("scan"))
        for every in (None, 100)
    ]
    for run in ends:
        assert [e.round for e in run.history.evaluations] == [0, 3]
        assert run.history.evaluations[-1].metrics == {}
        assert np.array_equal(weights(run.state), evaluated()[1][1].metrics["weights"])


def test_another_number_of_rounds_compiles_and_traces_nothing() -> None:
    """Without evaluations too: neither the number of rounds nor their interval is in the compiled program."""
    step = chex.assert_max_traces(algorithm().step, 2)  # the memory plan's and the program's
    watched = algorithm()._replace(step=step)
    simulate(watched, data(), num_rounds=3, devices=Devices("scan"))
    COMPILES.clear()
    for rounds, every in ((2, None), (17, None), (300, None), (20, 7)):
        run = simulate(watched, data(), num_rounds=rounds, evaluation=Evaluation(every), devices=Devices("scan"))
        assert len(run.history.rounds["loss"]) == int(run.state.round) == rounds
    assert COMPILES == []
    with pytest.raises(AssertionError, match="is traced > 2 times"):  # another algorithm is traced
        simulate(
            watched._replace(step=lambda *arguments: step(*arguments)), data(), num_rounds=2, devices=Devices("scan")
        )


def test_neither_an_evaluation_nor_a_second_run_traces_the_model_again() -> None:
    traced: list[Any] = []

    def init(key: jax.Array) -> jax.Array:
        traced.append(key)
        return jax.random.normal(key, (2, 1))

    model = Model("counted", init, lambda w, x: x @ w, None, 1)
    counted, x = ft.fed_avg(model, uniform_sampling(3, 2), 0.1), jnp.ones((4, 2))
    outputs = Evaluation(1, lambda algorithm, state: {"mean": np.asarray(algorithm.predict(state, x).mean)})
    assert len(simulate(counted, data(), num_rounds=2, evaluation=outputs).history.evaluations) == 3
    before = len(traced)
    assert len(simulate(counted, data(), num_rounds=9, evaluation=outputs).history.evaluations) == 10
    assert len(traced) == before > 0


def test_a_step_that_changes_the_state_s_type_is_refused_when_traced() -> None:
    def step(state: Any, *rest: Any) -> Any:
        after, info = algorithm().step(state, *rest)
        return after._replace(round=after.round.astype(jnp.float32)), info

    with pytest.raises(AssertionError, match="dtypes"):
        simulate(algorithm()._replace(step=step), data(), num_rounds=2, devices=Devices("scan"))


def test_infos_that_are_not_one_row_a_slot_are_refused_when_traced() -> None:
    def step(state: Any, *rest: Any) -> Any:
        after, info = algorithm().step(state, *rest)
        return after, info | {"examples": info["examples"][:1]}

    with pytest.raises(AssertionError, match="shape"):
        simulate(algorithm()._replace(step=step), data(), num_rounds=2, devices=Devices("scan"))


def test_a_chunk_of_large_infos_is_short() -> None:
    def shapes(*shape: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {"loss": jax.ShapeDtypeStruct(shape, jnp.float32)}

    lengths = [chunk_length(shapes(*shape)) for shape in ((), (1_000,), (100_000,), (1_000, 1_000), (10**9,))]
    assert lengths == [128, 128, 16, 2, 1]


def test_seed_is_an_int_or_its_key() -> None:
    run = functools.partial(
        simulate, algorithm(), data(), num_rounds=3, evaluation=Evaluation(3), devices=Devices("scan")
    )
    one = weights(run(seed=3).state)
    assert np.array_equal(one, weights(run(seed=jax.random.key(3)).state))
    assert not np.array_equal(one, weights(run(seed=4).state))


def test_a_key_as_start_changes_the_models_and_not_the_cohorts() -> None:
    run = simulate(
        algorithm(),
        data(),
        num_rounds=3,
        seed=3,
        start=jax.random.key(9),
        evaluation=Evaluation(3),
        devices=Devices("scan"),
    )
    other = evaluated()[0]
    assert np.array_equal(run.history.rounds["cohort"].client, other.history.rounds["cohort"].client[:3])
    assert not np.array_equal(weights(run.state), other.history.evaluations[1].metrics["weights"])


def test_parameters_as_start() -> None:
    """Those that a key draws give the run of that key, bit for bit; the caller's own arrays survive the run."""
    run = functools.partial(simulate, algorithm(), data(), num_rounds=3, seed=3, devices=Devices("scan"))
    of_key = run(start=jax.random.key(9))
    each = algorithm().params(algorithm().init(3, 3, jax.random.key(9)))  # type: ignore[misc]
    for given in (each, each[0], np.asarray(each)):
        for a, b in zip(jax.tree.leaves(run(start=given).state), jax.tree.leaves(of_key.state), strict=True):
            np.testing.assert_array_equal(*(jax.random.key_data(k) if is_key(k) else k for k in (a, b)))
    assert np.isfinite(each).all()


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (3, r"start: got 3, must be None, a typed key"),
        (jax.random.split(jax.random.key(0)), "start: got .*, must be None, a typed key"),
        (
            np.zeros((3, 1)),
            r"start: got float64 \(3, 1\) at the root, must be float\d\d \(2, 1\), or every leaf must begin",
        ),
        (np.zeros((2, 2, 1)), r"start: got float64 \(2, 2, 1\) at the root, must be"),
        (np.zeros((2, 1), np.int32), r"start: got int32 \(2, 1\) at the root"),
        ({"w": np.zeros((2, 1))}, "start: got nothing at the root, must be float"),
        (jax.random.PRNGKey(0), r"start: got an untyped key \(jax.random.PRNGKey\), must be None, a typed key"),
        (np.full((2, 1), np.nan), "start: got a parameter that is NaN or infinite, must be finite"),
    ],
)
def test_a_start_that_does_not_fit_is_refused_before_any_work(start: Any, message: str) -> None:
    step = chex.assert_max_traces(algorithm().step, 0)
    with pytest.raises(ValueError, match=message):
        simulate(algorithm()._replace(step=step), data(), num_rounds=1, start=start)


def test_progress_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run = simulate(
        algorithm(),
        data(),
        num_rounds=7,
        seed=3,
        evaluation=Evaluation(every=3, progress=True),
        devices=Devices("scan"),
    )
    assert np.array_equal(weights(run.state), weights(evaluated()[0].state))
    assert capsys.readouterr().out == ""


def test_the_callers_key_and_data_survive_a_run() -> None:
    key, given = jax.random.key(3), data()
    ends = [
        weights(
            simulate(
                algorithm(), given, num_rounds=3, seed=key, start=key, evaluation=Evaluation(3), devices=Devices("scan")
            ).state
        )
        for _ in range(2)
    ]
    assert np.array_equal(*ends)


def test_the_root_exports_it() -> None:
    assert simulate_from_the_root is simulate


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_rounds": 0}, "num_rounds: got 0, must be a whole number of at least 1"),
        ({"num_rounds": -3}, "num_rounds: got -3, must be a whole number of at least 1"),
        ({"devices": Devices("pmap")}, "mapping: got 'pmap', allowed are auto, scan, vmap, chunked"),
        ({"evaluation": 5}, "evaluation: got 5, must be an Evaluation"),
        ({"devices": "scan"}, "devices: got 'scan', must be a Devices"),
        ({"checkpoints": "folder"}, "checkpoints: got 'folder', must be a Checkpoints"),
        ({"evaluat": None}, r"simulate\(\) got an unexpected keyword argument 'evaluat'"),
    ],
)
def test_bad_arguments_before_any_work(changed: dict[str, Any], message: str) -> None:
    calls: list[Any] = []
    watched = algorithm()._replace(init=lambda *args: calls.append(args))
    with pytest.raises((ValueError, TypeError), match=message):
        simulate(watched, data(), **{"num_rounds": 1} | changed)
    assert calls == []


def test_a_recipe_that_is_not_called_is_refused() -> None:
    with pytest.raises(ValueError, match=r"algorithm: got the function fed_avg, must be an Algorithm: call fed_avg\("):
        simulate(ft.fed_avg, data(), num_rounds=1)  # type: ignore[arg-type]


def test_data_of_another_number_of_clients() -> None:
    fewer = data()._replace(offsets=jnp.asarray([0, 2, 6], jnp.int32))
    with pytest.raises(ValueError, match="data: has 2 clients, but the schedule was built for 3"):
        simulate(algorithm(), fewer, num_rounds=1)


def test_a_step_outside_of_a_run_needs_only_an_engine() -> None:
    state, given = algorithm().init(3, 3), data()
    step = jax.jit(algorithm().step, static_argnums=2)
    for _ in range(3):
        state, info = step(state, given, engine_for(given, "scan"))
    np.testing.assert_allclose(weights(state), evaluated()[1][1].metrics["weights"], rtol=1e-14)
    assert set(info) >= {"cohort", "model_weight", "loss", "steps", "examples"}


def test_a_client_that_was_contacted_and_dropped_out_is_charged_downlink_alone() -> None:
    weight = np.array([[2.0, 0.0, 1.0], [0.0, 0.0, 4.0]])
    cohort = Cohort(np.zeros_like(weight, int), np.zeros_like(weight, int), weight)  # type: ignore[arg-type]
    infos = {"cohort": cohort, "contacted": np.array([3, 2]), "examples": np.array([[5, 0, 7], [0, 0, 1]])}
    assert charge(Cost(100, 10, 1000), infos) == (3 * 100 + 13 * 10, 5 * 1000)


def test_data_are_a_data_set_its_name_or_arrays() -> None:
    digits = datasets.load("digits", num_train=40, num_test=5)
    clients = partition.iid(40, num_clients=4, seed=0)
    rows, user = [clients.client(i) for i in range(4)], np.empty(40, int)
    for i, own in enumerate(rows):
        user[own] = i
    model = models.logistic(64, 10)
    fed_avg = algorithms.fed_avg(
        model, schedule.all_clients(4), client_learning_rate=0.1, work=Work(steps=2, batch_size=None)
    )

    def trained(data: Any, clients: Any) -> np.ndarray:
        run = simulate(fed_avg, data, clients, num_rounds=2, seed=0)
        assert fed_avg.params is not None
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(fed_avg.params(run.state))])

    targets = datasets.classification_targets(digits.y_train, 10, centred=True)
    divided = datasets.federated_data(digits.x_train, targets, clients, dtype=jnp.float32)
    expected = trained(divided, None)
    arrays = digits.x_train, digits.y_train
    for data, held in ((digits, clients), (arrays, rows), ((*arrays, digits.x_test, digits.y_test), clients)):
        np.testing.assert_array_equal(trained(data, held), expected)
    np.testing.assert_allclose(trained(digits, user), expected, rtol=1e-5, atol=1e-6)  # in the order of the rows
    assert np.max(np.abs(trained(digits, [*rows[:3], rows[3][:5]]) - expected)) > 1e-3


@pytest.mark.parametrize(
    ("data", "clients", "message"),
    [
        (tiny_runs.data(), tiny_runs.EVEN, r"clients: got .*, must be None: FederatedData has"),
        ((tiny_runs.X, tiny_runs.TARGETS), None, "clients: got None, must be a Partition, a list"),
        ((tiny_runs.X, tiny_runs.TARGETS), [[0, 1], [1, 12], [2], [3]], "clients: got 12"),
        ((tiny_runs.X[:, :2], tiny_runs.TARGETS), tiny_runs.EVEN, "model: got tanh, which cannot read examples"),
        ((tiny_runs.X, np.arange(12) % 3), tiny_runs.EVEN, "model: got tanh of 1 output, must have 3"),
        ("digts", tiny_runs.EVEN, "did you mean digits"),
    ],
)
def test_data_that_do_not_fit_are_refused(data: Any, clients: Any, message: str) -> None:
    fed_avg = algorithms.fed_avg(
        tiny_runs.MODEL, schedule.all_clients(4), client_learning_rate=0.1, work=Work(steps=2, batch_size=None)
    )
    with pytest.raises(ValueError, match=message):
        simulate(fed_avg, data, clients, num_rounds=1)


def test_an_algorithm_that_does_not_say_what_it_trains_takes_divided_data() -> None:
    with pytest.raises(ValueError, match=r"algorithm: got .*, which does not say which model"):
        simulate(algorithm(), (tiny_runs.X, tiny_runs.TARGETS), tiny_runs.EVEN, num_rounds=1)


def test_metrics_of_a_sample_of_the_training_examples_are_named_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted by class, so that the first ones would say 1 or 0 where a model knows one class alone."""
    monkeypatch.setattr(examples, "MOST_MEASURED", 30)
    x, labels = np.random.default_rng(0).normal(size=(60, 3)), np.repeat([0, 1], 30)
    model = ft.models.logistic(3, 2)
    fed_avg = ft.fed_avg(
        model, ft.schedules.all_clients(2), 0.1, ft.Work(steps=1, batch_size=None), loss="cross_entropy"
    )
    start = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0)))  # says class 0
    run = ft.simulate(fed_avg, (x, labels, x, labels), [np.arange(30), np.arange(30, 60)], num_rounds=2, start=start)
    first = run.history.evaluations[0].metrics
    assert list(first) == ["train 30 of 60", "test"] and first["test"]["accuracy"] == 0.5
    rows = examples.sampled(30, x, labels)
    assert first["train 30 of 60"]["accuracy"] == np.mean(labels[rows] == 0) != np.mean(labels[:30] == 0)
    assert "train 30 of 60.accuracy" in run.history.curves() and "test accuracy" in repr(run.history)
    assert trained.status(run) == "finished"


def test_pixels_have_one_scale_in_training_and_in_prediction() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 3), dtype=np.uint8)
    model = ft.models.logistic(3, 2, zero_init=False)
    fed_avg = ft.fed_avg(model, ft.schedules.all_clients(2), client_learning_rate=0.1)
    start = fed_avg.init(0, 2)
    right = fed_avg.predict(start, pixels / np.float32(255)).mean
    np.testing.assert_allclose(fed_avg.predict(start, pixels).mean, right, rtol=1e-5)
    assert np.abs(fed_avg.predict(start, pixels.astype(np.float32)).mean - right).max() > 1  # control
    ditto = ft.ditto(model, ft.schedules.all_clients(2), client_learning_rate=0.1)
    own, data = ditto.init(0, 2), ft.data.federated_data(pixels, np.arange(8) % 2, ft.partition.iid(8, 2, seed=0))
    assert ditto.personal is not None
    scaled, raw, unscaled = (
        ditto.personal(own, data, 4, jnp.int32(0), jnp.asarray(x)).mean
        for x in (pixels / np.float32(255), pixels, pixels.astype(np.float32))
    )
    np.testing.assert_allclose(raw, scaled, rtol=1e-5)
    assert np.abs(unscaled - scaled).max() > 1  # control
    lstm = ft.models.lstm(80, 80, 4, 4, 1)
    texts = ft.fed_avg(lstm, ft.schedules.all_clients(2), client_learning_rate=0.1)
    begun = texts.init(0, 2)
    np.testing.assert_array_equal(
        texts.predict(begun, pixels % 80).mean, texts.predict(begun, (pixels % 80).astype(np.int32)).mean
    )
