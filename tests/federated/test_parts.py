"""The server's optimiser, the ensemble's prediction, and how the loop puts the parts together."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedtangent._src.engine import Devices, Evaluation
from fedtangent._src.engine.clients import engine_for
from fedtangent._src.engine.run import predict, simulate
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.aggregate import optax_server, stack
from fedtangent._src.federated.algorithms.tangent import Pooling
from fedtangent._src.federated.compose import Parts, compose
from fedtangent._src.federated.local import Work, local_training
from fedtangent._src.federated.ntk_fl import Evolution, send_examples
from fedtangent._src.federated.predict import mean_of_models
from fedtangent._src.federated.schedule import all_clients, random_models, strata
from fedtangent._src.federated.wire.channel import jacobians, lossless
from fedtangent._src.losses import squared_error
from fedtangent._src.types import Client, Cost, FederatedData, Key, Local, Model, PyTree, RoundInfo, Server

from ..nightly import nightly
from . import reference
from .toys import SIZES, arguments_of, cohorts, distance, fixed, go, leaves, two_layer, uneven_data


def test_optax_server_takes_the_message_as_a_gradient() -> None:
    server = optax_server(optax.sgd(0.5, momentum=0.9))
    state = server.init({"w": jnp.array([1.0, 2.0])})
    info = RoundInfo(jnp.int32(0), jnp.float32(1), jnp.int32(1), jax.random.key(0))
    for gradient in ([1.0, 0.0], [0.0, 2.0]):
        state, _ = server.update(state, {"w": jnp.array(gradient)}, info)
    # velocity (1, 0), then (.9, 2)
    np.testing.assert_allclose(server.params(state)["w"], [1 - 0.5 * 1.9, 2 - 0.5 * 2.0], rtol=0, atol=1e-15)
    assert server.broadcast(state) is server.params(state)


def test_prediction_is_the_mean_of_the_models(model: Model, data: FederatedData) -> None:
    params = jax.vmap(model.init)(jax.random.split(jax.random.key(0), 4))
    prediction = mean_of_models(model, params, data.x)
    each = [reference.outputs({k: np.asarray(v)[i] for k, v in params.items()}, np.asarray(data.x)) for i in range(4)]
    np.testing.assert_allclose(prediction.members, each, rtol=0, atol=1e-14)
    np.testing.assert_allclose(prediction.mean, np.mean(each, axis=0), rtol=0, atol=1e-14)


def test_predict_of_a_run_uses_its_models(model: Model, data: FederatedData) -> None:
    algorithm = algorithms.fed_ensemble(
        model, all_clients(6, 2), client_learning_rate=0.1, work=Work(steps=1, batch_size=None)
    )
    state = algorithm.init(0, 6)
    direct = mean_of_models(model, state.server.params, data.x)
    assert distance(predict(algorithm, state, data.x), direct) < 1e-14


def test_models_start_apart_and_from_the_init_key(model: Model) -> None:
    algorithm = algorithms.fed_ensemble(
        model, all_clients(6, 2), client_learning_rate=0.1, work=Work(steps=1, batch_size=None)
    )
    start = algorithm.init(0, 6).server.params
    assert distance(*(jax.tree.map(lambda leaf, k=k: leaf[k], start) for k in (0, 1))) > 0.1
    assert distance(start, algorithm.init(0, 6).server.params) == 0
    assert distance(start, algorithm.init(1, 6).server.params) > 0.1
    key = jax.random.key(7)
    given = algorithm.init(0, 6, key).server.params
    assert distance(given, jax.vmap(model.init)(jax.random.split(key, 2))) == 0


# --- a model that gets no client -------------------------------------------------------------------------------


def test_a_model_without_clients_stays_and_is_reported(model: Model) -> None:
    """With momentum, so that an update by a zero message would show."""
    schedule, seed = random_models(2, 4), 0
    local = local_training(model, squared_error, optax.sgd(0.1), Work(steps=1, batch_size=None))
    algorithm = compose("idle", model, local, optax_server(optax.sgd(1.0, momentum=0.9)), schedule)
    data = uneven_data(sizes=(3, 5))
    at, states, found = algorithm.init(seed, 2), [], []
    states.append(leaves(at.server))
    for _ in range(4):
        at, infos = go(algorithm, data, "scan", 1, at)
        states.append(leaves(at.server))
        found.append(infos["model_weight"][0])
    cohort = cohorts(schedule, seed, 4)
    expected = np.array(
        [[sum(s for s, m in zip((3, 5), row, strict=True) if m == k) for k in range(4)] for row in cohort.model]
    )
    assert np.array_equal(found, expected)
    assert (expected[:, :] == 0).sum() >= 8  # two clients, four models
    for t, k in np.ndindex(4, 4):
        moved = any(not np.array_equal(a[k], b[k]) for a, b in zip(states[t], states[t + 1], strict=True))
        assert moved == (expected[t, k] > 0)


# --- clients' own state, keys, and empty slots -----------------------------------------------------------------


def visiting() -> Local:
    """A client that counts its visits, per model, and sends NaN if it has nothing (an empty slot)."""

    def update(key: Key, broadcast: PyTree, visits: Any, client: Client) -> tuple[PyTree, Any, dict[str, Any]]:
        message = jax.tree.map(lambda leaf: jnp.where(client.size > 0, jnp.ones_like(leaf), jnp.nan), broadcast)
        return message, visits + 1, {"key": jax.random.key_data(key)}

    return Local(lambda params: jnp.int32(0), update)


def pooling() -> Server:
    """A server that pools whole messages: it adds up those of the filled slots."""

    def update(params: PyTree, pooled: Any, info: RoundInfo) -> tuple[PyTree, dict[str, Any]]:
        return jax.tree.map(lambda p, m: p + jnp.sum(m, axis=0), params, pooled.messages), {"count": pooled.filled}

    return Server(lambda params: params, lambda state: state, lambda state: state, update)


STRATA = strata(6, 3, 4)  # strata of 2, 2, 1 and 1 clients: two empty slots a round, which name client 0


@functools.cache
def visited(mapping: str, aggregate: str) -> tuple[PyTree, PyTree]:
    """The state after nine rounds, and the rounds."""
    if aggregate == "mean":
        algorithm = compose("visits", two_layer(), visiting(), optax_server(optax.sgd(1.0)), STRATA)
    else:
        algorithm = compose("visits", two_layer(), visiting(), pooling(), STRATA, Parts(aggregate=stack(8)))
    return go(algorithm, uneven_data(), mapping, 9, algorithm.init(0, len(SIZES)))


COMBINATIONS = pytest.mark.parametrize(
    ("mapping", "aggregate"),
    nightly(
        [("scan", "mean"), ("vmap", "mean"), ("scan", "stack"), ("vmap", "stack")],
        [("scan", "mean"), ("vmap", "stack")],
    ),
)


@COMBINATIONS
def test_what_an_empty_slot_sends_does_not_leak(mapping: str, aggregate: str) -> None:
    state, rounds = visited(mapping, aggregate)
    assert np.all(np.isfinite(np.concatenate([leaf.ravel() for leaf in leaves(state.server)])))
    assert (rounds["cohort"].weight == 0).sum() == 2 * 9


@COMBINATIONS
def test_client_state_is_kept_per_model_and_client_and_never_by_an_empty_slot(mapping: str, aggregate: str) -> None:
    cohort = cohorts(STRATA, 0, 9)
    expected, with_empty = np.zeros((3, 6), int), np.zeros((3, 6), int)
    np.add.at(expected, (cohort.model[cohort.weight > 0], cohort.client[cohort.weight > 0]), 1)
    np.add.at(with_empty, (cohort.model, cohort.client), 1)
    assert np.array_equal(visited(mapping, aggregate)[0].client, expected)
    assert not np.array_equal(expected, with_empty)
    clash = [  # the case that needs care: an empty slot names a pair that a filled slot trains in the same round
        t
        for t, (c, m, w) in enumerate(zip(*cohort, strict=True))
        if set(zip(c[w == 0], m[w == 0], strict=True)) & set(zip(c[w > 0], m[w > 0], strict=True))
    ]
    assert clash


def test_each_client_and_round_has_its_own_key_whatever_the_model() -> None:
    _, rounds = visited("scan", "mean")
    by_pair: dict[tuple[int, int], set[bytes]] = {}
    for t, s in np.ndindex(rounds["cohort"].client.shape):
        by_pair.setdefault((t, int(rounds["cohort"].client[t, s])), set()).add(rounds["key"][t, s].tobytes())
    assert all(len(found) == 1 for found in by_pair.values())
    assert len(set.union(*by_pair.values())) == len(by_pair) == 9 * 6


def test_the_channels_key_is_not_one_of_training() -> None:
    """The batches of epoch e use fold_in(key, e): noise from such a key would be correlated with the shuffles."""

    def send(key: Key, message: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        return {**message, "key": jax.random.key_data(key).astype(jnp.float64)}, memory

    def update(key: Key, broadcast: PyTree, state: PyTree, client: Client) -> tuple[PyTree, PyTree, dict[str, Any]]:
        epochs = jnp.stack([key, *(jax.random.fold_in(key, e) for e in range(4))])
        return {"key": jnp.zeros(2)}, state, {"epochs": jax.random.key_data(epochs)}

    def keep(params: PyTree, pooled: Any, info: RoundInfo) -> tuple[PyTree, dict[str, Any]]:
        return params, {"sent": pooled.messages["key"]}

    server = Server(lambda params: params, lambda state: state, lambda state: state, keep)
    local = Local(lambda params: (), update)
    algorithm = compose(
        "keys",
        two_layer(),
        local,
        server,
        fixed(2, 1, [(0, 0, 1.0), (1, 0, 1.0)]),
        Parts(aggregate=stack(2), channel=lossless()._replace(send=send)),
    )
    _, sent = go(algorithm, uneven_data(sizes=(3, 5)), "scan", 3, algorithm.init(0, 2))
    training = {tuple(key) for key in sent["epochs"].reshape(-1, 2).tolist()}
    channel = {tuple(int(word) for word in key) for key in sent["sent"].reshape(-1, 2).tolist()}
    assert len(channel) == 3 * 2
    assert not training & channel


# --- the ledger ------------------------------------------------------------------------------------------------


def parameters(output_size: int = 2) -> int:
    return 3 * 4 + 4 + 4 * output_size


def test_a_model_up_and_a_model_down_per_filled_slot() -> None:
    algorithm = algorithms.fed_ensemble(
        two_layer(jnp.float32), STRATA, client_learning_rate=0.1, work=Work(steps=1, batch_size=None)
    )
    data = uneven_data()
    data = data._replace(x=data.x.astype(jnp.float32), y=data.y.astype(jnp.float32))
    run = simulate(algorithm, data, num_rounds=3, seed=0, evaluation=Evaluation(2), devices=Devices("scan"))
    assert [(e.round, e.uplink_bytes, e.downlink_bytes) for e in run.history.evaluations] == [
        (t, t * 6 * parameters() * 4, t * 6 * parameters() * 4) for t in (0, 2, 3)
    ]


def test_a_client_without_examples_is_not_charged() -> None:
    schedule = fixed(3, 1, [(0, 0, 1.0), (1, 0, 1.0), (2, 0, 0.0)])
    algorithm = algorithms.fed_avg(two_layer(), schedule, client_learning_rate=0.1, work=Work(steps=1, batch_size=None))
    run = simulate(algorithm, uneven_data(sizes=(2, 0, 3)), num_rounds=2, seed=0, devices=Devices("scan"))
    assert run.history.evaluations[-1].uplink_bytes == 2 * parameters() * 8
    assert run.history.rounds["examples"].tolist() == [[2, 0, 0]] * 2


def test_ntk_fl_is_charged_for_its_jacobians_and_reports_who_found_no_place(model: Model) -> None:
    schedule = fixed(6, 1, [(1, 0, 1.0), (4, 0, 1.0), (2, 0, 0.0)])
    algorithm = algorithms.ntk_fl(
        model, schedule, learning_rate=0.1, evolution=Evolution(times=(1,)), pooling=Pooling(slots_per_model=1)
    )
    run = simulate(algorithm, uneven_data(), num_rounds=2, seed=0, devices=Devices("scan"))
    assert run.history.rounds["dropped"].tolist() == [[1], [1]] and "2 messages were dropped" in repr(run)
    examples = SIZES[1] + SIZES[4]  # both were sent
    per_example = 2 * parameters() + 2 + 2  # the Jacobian of two outputs, the outputs, the targets
    assert run.history.evaluations[-1].uplink_bytes == 2 * examples * per_example * 8
    assert run.history.evaluations[-1].downlink_bytes == 2 * 2 * parameters() * 8


def test_the_ledger_is_exact_beyond_32_bits() -> None:
    """Jacobians of a wide model, charged and never built: the server of this run keeps its weights."""
    outputs, side = 10, 1500
    wide = Model("wide", lambda key: jnp.zeros((side, side), jnp.float32), lambda w, x: x, None, outputs)
    algorithm = algorithms.ntk_fl(wide, all_clients(6), learning_rate=0.1, evolution=Evolution(times=(1,)))
    idle = compose(
        "idle",
        wide,
        send_examples(),
        Server(lambda p: p, lambda s: s, lambda s: s, lambda s, pooled, info: (s, {})),
        all_clients(6),
        Parts(aggregate=stack(6), channel=jacobians(outputs)),
    )
    data = uneven_data()
    data = data._replace(y=jnp.zeros((sum(SIZES), outputs), jnp.float32))
    run = simulate(idle, data, num_rounds=3, seed=0, devices=Devices("scan"))
    per_example = 4 * (outputs * side**2 + 2 * outputs)
    total = 3 * sum(SIZES) * per_example
    assert run.history.evaluations[-1].uplink_bytes == total > 2**32
    assert run.history.evaluations[-1].downlink_bytes == 3 * 6 * 4 * side**2
    assert run.history.cost == algorithm.cost(data, engine_for(data)) == Cost(0, per_example, 4 * side**2)
    assert float(np.float32(total)) != total  # a ledger kept in float32 would be wrong


# --- bad arguments ---------------------------------------------------------------------------------------------


def test_unknown_weighting(model: Model) -> None:
    local = local_training(model, squared_error, optax.sgd(0.1), Work(steps=1, batch_size=None))
    with pytest.raises(ValueError, match="weighting: got 'size', allowed are examples, uniform"):
        compose("x", model, local, optax_server(optax.sgd(1.0)), all_clients(6), Parts(weighting="size"))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"times": ()}, "times"),
        ({"times": (10, 0)}, "times"),
        ({"times": (10, 5)}, "times.*increasing"),
        ({"times": (1.5,)}, "times"),
        ({"kernel": "mean"}, "kernel: got 'mean', allowed are averaged, exact"),
        ({"method": "guess"}, "method: got 'guess', allowed are auto, eigh, chebyshev, iterate"),
        ({"slots_per_model": 0}, "slots_per_model: got 0, must be a whole number from 1 to 6"),
        ({"slots_per_model": 7}, "slots_per_model: got 7, must be a whole number from 1 to 6"),
    ],
)
def test_bad_arguments_of_ntk_fl(model: Model, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        algorithms.ntk_fl(model, all_clients(6), **arguments_of(algorithms.ntk_fl, {"learning_rate": 0.1} | changed))
