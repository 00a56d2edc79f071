"""The one federated loop: an algorithm is a composition of a local problem, a channel, an aggregate and a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import pytrees
from fedtangent.federated.aggregate import slots_of, weighted_mean
from fedtangent.federated.faults import num_contacted
from fedtangent.federated.predict import mean_of_models
from fedtangent.federated.schedule import unroll
from fedtangent.federated.wire.channel import lossless
from fedtangent.types import (
    Accept,
    Aggregate,
    Algorithm,
    Array,
    Channel,
    Client,
    Cohort,
    Cost,
    Engine,
    FederatedData,
    Key,
    Local,
    Model,
    Partition,
    Prediction,
    PyTree,
    RoundInfo,
    Schedule,
    Server,
    Slots,
)

WEIGHTINGS = ("examples", "uniform")
_SERVER = 2**31  # folded into a round's key for what the server draws


class Keys(NamedTuple):
    """The three independent keys of a run."""

    init: Key
    schedule: Key
    train: Key


def drawn_cohorts(
    schedule: Schedule, partition: Partition, num_rounds: int, seed: int | Key = 0, weighting: str = "examples"
) -> Cohort:
    """The cohorts that ``simulate`` will draw with ``seed``, weighted as it weighs them: what the theory is given.

    NumPy arrays [R, S]. ``weighting`` is the algorithm's: "examples", or "uniform".

    Raises ``ValueError`` for another weighting, or a partition with another number of clients than the schedule's.
    """
    if weighting not in WEIGHTINGS:
        raise ValueError(f"weighting: got {weighting!r}, allowed are {', '.join(WEIGHTINGS)}")
    if partition.num_clients != schedule.num_clients:
        raise ValueError(
            f"partition: got {partition.num_clients} clients, but the schedule is of {schedule.num_clients}"
        )
    drawn = jax.tree.map(np.asarray, unroll(schedule, keys(seed).schedule, num_rounds))
    return _weigh(drawn, np.asarray(partition.offsets), weighting)


def keys(seed: int | Key) -> Keys:
    """Keys for initialisation, schedule and training from one seed (or typed key)."""
    root = seed if isinstance(seed, jax.Array) else jax.random.key(int(seed))
    return Keys(*jax.random.split(root, 3))


class State(NamedTuple):
    """Everything a run carries from round to round."""

    round: Array  # [] int32
    key: Key  # training key; a slot's keys are split from fold_in(fold_in(key, round), client id)
    schedule_key: Key
    schedule: PyTree
    server: PyTree  # [K, ...]
    client: PyTree  # [K, N, ...]
    channel: PyTree  # [K, N, ...], what the channel remembers of each client


def client_view(
    data: FederatedData, client_id: Array, active: Array, max_client_size: int, round_: Array | int = 0
) -> Client:
    """One client's rows of ``data``, padded to ``max_client_size``; an inactive slot has size 0."""
    start, stop = data.offsets[client_id], data.offsets[client_id + 1]
    # Padding repeats the client's own last example: another client's row, were it not finite, would reach the gradient.
    index = data.indices[jnp.minimum(start + jnp.arange(max_client_size, dtype=jnp.int32), stop - 1)]
    return Client(client_id, jnp.where(active, stop - start, 0), index, data, jnp.asarray(round_, jnp.int32))


def _fetched(data: FederatedData, cohort: Cohort, max_client_size: int) -> tuple[Array, Array] | None:
    """The examples of every slot, [S, max_client_size, ...], or None where they had better stay where they are.

    A minibatch is then gathered from its client's few rows. Gathering from the whole data set costs a CPU several
    microseconds more in every local step: XLA divides an operation with a large operand between threads.
    Not done where the cohort holds much of the data, or where clients differ so much in size that it is mostly padding.
    """
    padded, held = max_client_size * data.num_clients, data.indices.shape[0]
    most = min(held, data.x.shape[0])  # examples that many clients share stand in the data once
    if padded > 4 * held or 4 * max_client_size * cohort.client.shape[0] > most:
        return None
    rows = jax.vmap(lambda i: client_view(data, i, jnp.bool_(True), max_client_size).rows)(cohort.client)
    return data.x[rows], data.y[rows]


def _own_view(row: Slots, block: tuple[Array, Array], round_: Array) -> Client:
    """``client_view`` of a data set that holds this client's own examples only."""
    own = jnp.arange(block[0].shape[0], dtype=jnp.int32)
    data = FederatedData(*block, own, jnp.stack([jnp.zeros_like(row.size), row.size]))
    return Client(row.client, row.size, own, data, round_)


def _weigh(cohort: Cohort, offsets: Array | np.ndarray, weighting: str) -> Cohort:
    """Weights times the clients' sizes, or whether they hold anything."""
    size = offsets[cohort.client + 1] - offsets[cohort.client]
    factor = size > 0 if weighting == "uniform" else size
    return cohort._replace(weight=cohort.weight * factor.astype(cohort.weight.dtype))


def _train_slot(
    local: Local, channel: Channel, accept: Accept | None, engine: Engine
) -> Callable[[PyTree, Slots], tuple[Slots, PyTree, PyTree]]:
    """The pure function of one slot that the engine maps.

    ``(held, row) -> (row, message, ((client_state, memory), weight, info))``, where ``held`` is what every slot sees:
    data, state and broadcasts. The row comes back as the aggregate is to see it: with weight 0 where the server does
    not accept the message.
    """

    def train(held: tuple[FederatedData, State, PyTree], row: Slots) -> tuple[Slots, PyTree, PyTree]:
        data, state, broadcasts = held
        key = jax.random.fold_in(state.key, state.round)
        update_key, send_key = jax.random.split(jax.random.fold_in(key, row.client))
        if row.block is None:
            client = client_view(data, row.client, row.weight > 0, engine.max_client_size, state.round)
        else:
            client, row = _own_view(row, row.block, state.round), row._replace(block=None)
        before = jax.tree.map(lambda leaf: leaf[row.model, row.client], (state.client, state.channel))
        message, own, info = local.update(update_key, pytrees.take(broadcasts, row.model), before[0], client)
        message, memory = channel.send(send_key, message, before[1])
        own = local.settle(before[0], own, message)
        if accept is not None:
            row = row._replace(weight=jnp.where(accept(message), row.weight, 0))
        after = pytrees.where(row.weight > 0, (own, memory), before)
        return row, message, (after, row.weight, {"examples": client.size, **info})

    return train


def _message_shape(
    model: Model, local: Local, server: Server, data: FederatedData, engine: Engine
) -> tuple[PyTree, PyTree]:
    """Shapes of a message and of a broadcast."""

    def one() -> tuple[PyTree, PyTree]:
        params = model.init(jax.random.key(0))
        broadcast = server.broadcast(server.init(params))
        client = client_view(data, jnp.int32(0), jnp.bool_(True), engine.max_client_size)
        return local.update(jax.random.key(0), broadcast, local.init(params), client)[0], broadcast

    return jax.eval_shape(one)


def _for_each_client(init: Callable[[PyTree], PyTree], params: PyTree, num_clients: int) -> PyTree:
    """What ``init`` makes of each model's parameters [K, ...], for each of N clients, [K, N, ...]."""
    shape = jax.eval_shape(jax.vmap(init), params)
    if not jax.tree.leaves(shape):
        return shape
    return jax.tree.map(
        lambda p: jnp.broadcast_to(p[:, None], (p.shape[0], num_clients, *p.shape[1:])), jax.vmap(init)(params)
    )


def _server_keys(state: State, num_models: int) -> Key:
    """One key for each model, apart from those of clients, which are folded from ids below 2^31."""
    root = jax.random.fold_in(jax.random.fold_in(state.key, state.round), jnp.uint32(_SERVER))
    return jax.random.split(root, num_models)


def _check_labels(model: Model, data: FederatedData) -> None:
    """Raise ``ValueError`` for class labels that the model has no output for: a loss would read past the last one."""
    if isinstance(data.y, jax.core.Tracer) or not jnp.issubdtype(data.y.dtype, jnp.integer) or data.y.size == 0:
        return
    largest = int(jnp.max(data.y))
    if largest >= model.output_size:
        raise ValueError(f"data: has the label {largest}, but the model {model.name} has {model.output_size} outputs")


def compose(
    name: str,
    model: Model,
    local: Local,
    server: Server,
    schedule: Schedule,
    aggregate: Aggregate | None = None,
    channel: Channel | None = None,
    predict: Callable[..., Prediction] = mean_of_models,
    weighting: str = "examples",
    map_models: Callable[..., Callable[..., PyTree]] = jax.vmap,
    accept: Accept | None = None,
    personal: Callable[..., Prediction] | None = None,
    once: tuple[int, int] = (0, 0),
) -> Algorithm:
    """Compose an algorithm from its parts in the one federated loop.

    Args:
        weighting: ``"examples"`` weighs a client by its number of examples, ``"uniform"`` equally.
        map_models: how the server's update is mapped over the K models; ``sequentially`` for heavy servers.
        accept: which messages the server counts (``faults.finite``); by default all. One that it rejects is as absent,
            ``info["rejected"]`` counts them per model [K], and a model that is left with none keeps its state.
        personal: how a client predicts for itself: ``(model, params [K, ...], client_states [K, ...], client, x)`` to a
            ``Prediction``; by default as everybody does.
        once: bytes up and down before the first round, for the ledger: data that the server holds or shares.

    Returns an ``Algorithm`` whose ``step`` needs an ``Engine`` (``simulate`` makes one).
    Raises ``ValueError`` for an unknown ``weighting``.
    """
    if weighting not in WEIGHTINGS:
        raise ValueError(f"weighting: got {weighting!r}, allowed are {', '.join(WEIGHTINGS)}")
    reduce = weighted_mean() if aggregate is None else aggregate
    wire = lossless() if channel is None else channel

    def init(key: Key | int, num_clients: int, init_key: Key | None = None) -> State:
        if num_clients != schedule.num_clients:
            raise ValueError(f"data: has {num_clients} clients, but the schedule was built for {schedule.num_clients}")
        run = keys(key)
        model_keys = jax.random.split(run.init if init_key is None else init_key, schedule.num_models)
        params = pytrees.stack([model.init(k) for k in model_keys])
        client = _for_each_client(local.init, params, num_clients)
        memory = _for_each_client(lambda p: wire.init(local.message(p)), params, num_clients)
        init_schedule, sample_key = jax.random.split(run.schedule)
        server_state = jax.vmap(server.init)(params)
        return State(jnp.int32(0), run.train, sample_key, schedule.init(init_schedule), server_state, client, memory)

    def step(state: State, data: FederatedData, engine: Engine) -> tuple[State, dict[str, Array]]:
        cohort, schedule_state = schedule.sample(state.schedule_key, state.schedule, state.round)
        cohort = _weigh(cohort, data.offsets, weighting)
        broadcasts = jax.vmap(server.broadcast)(state.server)
        train, held = _train_slot(local, wire, accept, engine), (data, state, broadcasts)
        acc = reduce.init(_message_shape(model, local, server, data, engine)[0], schedule.num_models)
        slots = slots_of(cohort, schedule.num_models, data.offsets)
        slots = slots._replace(block=_fetched(data, cohort, engine.max_client_size))
        acc, (kept, counted, local_info) = engine.map_clients(train, held, reduce, acc, slots)
        # An empty slot names a client too: dropped, it cannot write over the slot that really trains that client.
        at = (jnp.where(counted > 0, cohort.model, schedule.num_models), cohort.client)
        held_before = (state.client, state.channel)
        client, memory = jax.tree.map(lambda all_, new: all_.at[at].set(new, mode="drop"), held_before, kept)
        weight = jnp.zeros((schedule.num_models,), cohort.weight.dtype).at[cohort.model].add(counted)
        count = jnp.zeros((schedule.num_models,), jnp.int32).at[cohort.model].add((counted > 0).astype(jnp.int32))
        refused = ((cohort.weight > 0) & (counted == 0)).astype(jnp.int32)
        info = RoundInfo(
            jnp.broadcast_to(state.round, weight.shape), weight, count, _server_keys(state, weight.shape[0])
        )
        updated, server_info = map_models(server.update)(state.server, reduce.finish(acc), info)
        updated = pytrees.where(weight > 0, updated, state.server)
        after = State(state.round + 1, state.key, state.schedule_key, schedule_state, updated, client, memory)
        report = {
            "cohort": cohort,
            "contacted": num_contacted(schedule, cohort, schedule_state),
            "model_weight": weight,
            "rejected": jnp.zeros((schedule.num_models,), jnp.int32).at[cohort.model].add(refused),
        }
        return after, {**report, **local_info, **server_info}

    def cost(data: FederatedData, engine: Engine) -> Cost:
        _check_labels(model, data)
        message, broadcast = _message_shape(model, local, server, data, engine)
        uplink, per_example = wire.uplink(message, broadcast)
        return Cost(uplink, per_example, pytrees.num_bytes(broadcast), *once)

    def params(state: State) -> PyTree:
        return jax.vmap(server.params)(state.server)

    def predict_state(state: State, x: Array) -> Prediction:
        return predict(model, params(state), x)

    def predict_personal(state: State, data: FederatedData, largest: int, client_id: Array, x: Array) -> Prediction:
        own = jax.tree.map(lambda leaf: leaf[:, client_id], state.client)
        client = client_view(data, client_id, jnp.bool_(True), largest, state.round)
        assert personal is not None
        return personal(model, params(state), own, client, x)

    private = None if personal is None else predict_personal
    return Algorithm(name, init, step, predict_state, cost, schedule, private, params)


def sequentially(update: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Map a server update over models one at a time: memory for one model's work only."""
    return lambda *args: jax.lax.map(lambda row: update(*row), args)
