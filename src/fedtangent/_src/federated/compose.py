"""Composes algorithms: the one federated loop, built from a local problem, a channel, an aggregate and a server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Shaped

from fedtangent._src import pytrees, streams
from fedtangent._src.checks import choice, instance, tokens
from fedtangent._src.federated.aggregate import slots_of, weighted_mean
from fedtangent._src.federated.faults import num_contacted
from fedtangent._src.federated.local import client_view
from fedtangent._src.federated.polling import NUMBER_BYTES, answers
from fedtangent._src.federated.predict import Personal, mean_of_models
from fedtangent._src.federated.schedule import WEIGHTINGS
from fedtangent._src.federated.wire.channel import lossless
from fedtangent._src.losses import get_loss
from fedtangent._src.models.rows import check_independent_rows, check_reads
from fedtangent._src.types import (
    Accept,
    Aggregate,
    Algorithm,
    AnyArray,
    Array,
    Channel,
    Client,
    Cohort,
    Composition,
    Cost,
    Engine,
    FederatedData,
    Key,
    Local,
    Loss,
    Model,
    Poll,
    Polled,
    Prediction,
    PyTree,
    RoundInfo,
    Schedule,
    Server,
    ServerUpdate,
    Slots,
)


class State(NamedTuple):
    """The state that a run carries from round to round: round, keys, and the states of schedule, server and clients.

    Attributes:
        round: Number of rounds so far, [] int32.
        key: Key of local training and of the server's random numbers.
        schedule_key: Key from which the schedule draws cohorts.
        schedule: State of the schedule.
        server: The server's state for each model, [K, ...].
        client: State of each client for each model, [K, N, ...].
        channel: The channel's memory of each client (error feedback), [K, N, ...].
    """

    round: Array
    key: Key
    schedule_key: Key
    schedule: PyTree
    server: PyTree
    client: PyTree
    channel: PyTree


class Parts(NamedTuple):
    """The parts of an algorithm that have a default.

    Attributes:
        aggregate: Reduction of a round's messages to one value per model; None for their weighted mean.
        channel: Transport of a message; None for lossless.
        weighting: "examples" weighs a client by its number of examples, "uniform" equally.
        accept: Decides which messages the server counts (such as ``faults.finite``); None for all. A rejected message
            counts as absent; ``info["rejected"]`` [K] is the number of rejected messages of each model.
        common_start: Whether all K models start with the parameters of the first one; otherwise each is initialised
            separately.
        predict: ``(model, state, x) -> Prediction``; None for the mean of the networks ``server.params``. With another
            prediction, the algorithm has no ``params``, and its schedule cannot poll clients.
        personal: Predicts for one client; None to predict with the global models.
        check: Raises ``ValueError`` for data that the algorithm cannot run on; None for no further check.
        ledger: ``(cost, data) -> cost``: corrects the counted bytes. None for an algorithm that sends one broadcast
            down and one message up for each client and model, and nothing before the first round.
    """

    aggregate: Aggregate | None = None
    channel: Channel | None = None
    weighting: str = "examples"
    accept: Accept | None = None
    common_start: bool = False
    predict: Callable[[Model, State, AnyArray], Prediction] | None = None
    personal: Personal | None = None
    check: Callable[[FederatedData], None] | None = None
    ledger: Callable[[Cost, FederatedData], Cost] | None = None


class _Shapes(Protocol):
    """A function that returns the shapes of a message and of a broadcast; clients have at most ``largest`` examples."""

    def __call__(self, data: FederatedData, *, largest: int) -> tuple[PyTree, PyTree]: ...


class _Composed(NamedTuple):
    """The arguments of ``compose`` with defaults filled in, for the algorithm's ``init``, ``step`` and ``cost``."""

    model: Model
    local: Local
    server: Server
    schedule: Schedule
    parts: Parts
    aggregate: Aggregate
    channel: Channel
    shapes: _Shapes
    loss: Loss  # by which clients train, and which polled clients answer


class TrainedSlots(NamedTuple):
    """The results of local training in each of the S slots of a cohort, [S, ...], apart from the messages.

    A slot is a place of the cohort, in which one client trains one model.

    Attributes:
        kept: The client's new state, and the channel's memory of the client.
        weight: Weight of the message in its model's average; 0 if the slot is empty or the server rejects the message.
        info: Numbers for the history, such as the training loss, by name.
    """

    kept: PyTree
    weight: Array
    info: dict[str, Array]


def compose(
    name: str,
    model: Model,
    local: Local,
    server: Server,
    schedule: Schedule,
    parts: Parts = Parts(),
    composition: Composition | None = None,
) -> Algorithm:
    """Builds an algorithm from its parts, which the one federated loop calls in every round.

    Args:
        name: Name of the algorithm.
        model: The network.
        local: A client's training of one model in a round, and its message.
        server: The server's update of one model by the aggregated messages.
        schedule: Which client trains which model in which round.
        parts: Further parts, such as the channel, with their defaults.
        composition: Record of the clients' training and the rule for theory; None for an algorithm that theory cannot
            follow.

    Raises:
        ValueError: A model, schedule or ``parts`` of another type, an unknown ``weighting`` or loss, or a schedule that
            polls clients although the algorithm has no global models or does not average by the polled weights.
    """
    instance("model", model, Model)
    instance("schedule", schedule, Schedule)
    instance("parts", parts, Parts)
    choice("weighting", parts.weighting, WEIGHTINGS)
    composition = Composition(weighting=parts.weighting) if composition is None else composition
    if schedule.poll is not None:
        _check_poll(name, schedule.poll, parts)
        composition = composition._replace(rule=POLLS)
    # jitted so that the shape of a message and the round itself share one trace
    local = local._replace(update=jax.jit(local.update, inline=True))
    aggregate = weighted_mean() if parts.aggregate is None else parts.aggregate
    channel = lossless() if parts.channel is None else parts.channel
    sent = jax.jit(partial(_sent, model, local, server), static_argnames="largest")  # one trace for all runs
    training = composition.training
    loss = model.loss if training is None else training.loss
    composed = _Composed(model, local, server, schedule, parts, aggregate, channel, sent.eval_shape, get_loss(loss))

    def init(key: Key | int, num_clients: int, start: Key | PyTree | None = None) -> State:
        return _init(composed, streams.keys(key), num_clients, start)

    def step(state: State, data: FederatedData, engine: Engine) -> tuple[State, dict[str, PyTree]]:
        return _step(composed, state, data, engine)

    def cost(data: FederatedData, engine: Engine) -> Cost:
        return _cost(composed, data, engine)

    def params(state: State) -> PyTree:
        return _params(composed, state)

    trained = model._replace(loss=loss if isinstance(loss, str) else "squared_error")  # its ensembles average by loss

    def predict_state(state: State, x: Shaped[AnyArray, "n ..."]) -> Prediction:
        if parts.predict is None:
            return _mean_prediction(trained, params(state), x)
        return parts.predict(trained, state, _scaled(model, x))

    def predict_personal(
        state: State, data: FederatedData, largest: int, client_id: Int[Array, ""], x: Shaped[AnyArray, "m ..."]
    ) -> Prediction:
        client_states = jax.tree.map(lambda leaf: leaf[:, client_id], state.client)
        client = client_view(data, client_id, jnp.bool_(True), largest, state.round)
        assert parts.personal is not None
        return parts.personal(trained, params(state), client_states, client, _scaled(model, x))

    return Algorithm(
        name,
        init,
        step,
        predict_state,
        cost,
        schedule,
        None if parts.personal is None else predict_personal,
        params if parts.predict is None else None,
        composition,
    )


POLLS = (  # why theory has no closed form
    "its schedule chooses clients by what they answer about the models, so that no cohort is known before training; "
    "nearest is a schedule that draws, such as uniform"
)


def _check_poll(name: str, poll: Poll, parts: Parts) -> None:
    """Raises ``ValueError`` if the algorithm ``name``, with these parts, cannot use the answers of polled clients.

    Clients answer about the global models, so the algorithm must predict with these. A poll with ``inverse_weights``
    also needs an algorithm that averages by weights.
    """
    if parts.predict is not None:
        raise ValueError(
            f"schedule: got one that asks clients about global models, but {name} has none: choose another"
        )
    if poll.inverse_weights and parts.aggregate is not None:
        raise ValueError(
            f"schedule: got one that divides messages by their probabilities (gradient_norm_sampling), which {name} "
            "cannot use, because it does not average messages: choose another schedule"
        )


def _params(composed: _Composed, state: State) -> PyTree:
    """Returns the parameters of the K models as clients receive them, [K, ...]."""
    return pytrees.cast_like(jax.vmap(composed.server.params)(state.server), composed.model.shapes)


@partial(jax.jit, static_argnames="model")
def _mean_prediction(model: Model, params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Prediction:
    return mean_of_models(model, params, _scaled(model, x))


def _scaled(model: Model, x: Shaped[AnyArray, "n ..."]) -> Shaped[AnyArray, "n ..."]:
    """Returns 8-bit pixels divided by 255, so that they match the training data; other inputs and tokens unchanged."""
    return x / jnp.float32(255) if x.dtype == jnp.uint8 and not model.vocabulary else x


def sequentially(update: ServerUpdate) -> ServerUpdate:
    """Returns ``update``, a server's update of one model, mapped over K models one at a time, to save memory."""
    return lambda *arguments: jax.lax.map(lambda row: update(*row), arguments)


# ---- before the first round ---------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames="init")
def initial_params(init: Callable[[Key], PyTree], keys: Array) -> PyTree:
    """Draws the initial parameters of K models, [K, ...], one model after another in one compiled program.

    Args:
        init: Function of a model that draws its parameters from a key.
        keys: One key for each model, [K].
    """
    return jax.lax.map(init, keys)  # however many models, one is traced


def _init(
    composed: _Composed,
    run: streams.Keys,
    num_clients: int,
    start: Key | PyTree | None,
) -> State:
    schedule, num_models = composed.schedule, composed.schedule.num_models
    initialise = partial(initial_params, composed.model.init)
    if num_clients != schedule.num_clients:
        raise ValueError(f"data: has {num_clients} clients, but the schedule was built for {schedule.num_clients}")
    key = start if isinstance(start, jax.Array) and pytrees.is_key(start) else None
    model_keys = streams.model_keys(run.init if key is None else key, num_models)
    if start is None or key is not None:
        params = initialise(model_keys[:1] if composed.parts.common_start else model_keys)
    else:
        params = pytrees.each_model("start", start, jax.eval_shape(initialise, model_keys))
    if composed.parts.common_start:
        params = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_models, *leaf.shape[1:])), params)
    client = _for_each_client(composed.local.init, params, num_clients)
    memory = _for_each_client(lambda p: composed.channel.init(composed.local.message(p)), params, num_clients)
    init_schedule, sample_key = streams.schedule_keys(run.schedule)
    server_state = jax.vmap(composed.server.init)(pytrees.wide(params))
    return State(jnp.int32(0), run.train, sample_key, schedule.init(init_schedule), server_state, client, memory)


def _for_each_client(init: Callable[[PyTree], PyTree], params: PyTree, num_clients: int) -> PyTree:
    """Applies ``init`` to each model's parameters [K, ...] and copies the result for each of N clients, [K, N, ...]."""
    shape = jax.eval_shape(jax.vmap(init), params)
    if not jax.tree.leaves(shape):
        return shape
    return jax.tree.map(
        lambda p: jnp.broadcast_to(p[:, None], (p.shape[0], num_clients, *p.shape[1:])), jax.vmap(init)(params)
    )


def _cost(composed: _Composed, data: FederatedData, engine: Engine) -> Cost:
    _check_examples(composed.model, data)
    check_independent_rows(composed.model, data.x.shape[1:], data.x.dtype)
    if composed.parts.check is not None:
        composed.parts.check(data)
    message, broadcast = composed.shapes(data, largest=engine.max_client_size)
    uplink, per_example = composed.channel.uplink(message, broadcast)
    cost = Cost(uplink, per_example, pytrees.num_bytes(broadcast))
    poll = composed.schedule.poll
    if poll is not None:
        of_model = pytrees.num_bytes(composed.model.shapes)
        cost = cost._replace(
            downlink=max(cost.downlink - of_model, 0),  # a candidate that trains has the parameters already
            uplink_per_poll=NUMBER_BYTES * poll.num_answers,
            downlink_per_poll=composed.schedule.num_models * of_model,
        )
    return cost if composed.parts.ledger is None else composed.parts.ledger(cost, data)


def _sent(model: Model, local: Local, server: Server, data: FederatedData, largest: int) -> tuple[PyTree, PyTree]:
    """Returns a client's message and the server's broadcast, as examples of their shapes.

    ``largest`` is the number of examples of the largest client.
    """
    params = model.init(jax.random.key(0))
    broadcast = server.broadcast(server.init(params))
    client = client_view(data, jnp.int32(0), jnp.bool_(True), largest)
    return local.update(jax.random.key(0), broadcast, local.init(params), client)[0], broadcast


def _check_examples(model: Model, data: FederatedData) -> None:
    """Raises ``ValueError`` if the model cannot read the inputs (unknown tokens, say) or has no output for a label."""
    if not isinstance(data.x, jax.core.Tracer):
        if model.vocabulary:
            tokens("data: x", data.x, model.vocabulary)
        check_reads(model, data.x)
    if isinstance(data.y, jax.core.Tracer) or not jnp.issubdtype(data.y.dtype, jnp.integer) or data.y.size == 0:
        return
    largest = int(jnp.max(data.y))
    if largest >= model.output_size:
        raise ValueError(f"data: has the label {largest}, but the model {model.name} has {model.output_size} outputs")


# ---- a round ------------------------------------------------------------------------------------------------------


def _step(composed: _Composed, state: State, data: FederatedData, engine: Engine) -> tuple[State, dict[str, PyTree]]:
    """Computes one round: draws the cohort, trains its clients, and updates the clients' and the server's states.

    Returns the state after the round, and its numbers for the history by name.
    """
    cohort, schedule_state, poll_report = _draw(composed, state, data, engine)
    acc, trained = _train(composed, state, data, engine, cohort)
    client, memory = _settle(composed, state, cohort, trained)
    received, refused = _heard(composed, state, cohort, trained)
    server, server_info = _update(composed, state, acc, received, data)
    after = State(state.round + 1, state.key, state.schedule_key, schedule_state, server, client, memory)
    report: dict[str, PyTree] = {
        "cohort": cohort,
        "contacted": num_contacted(composed.schedule, cohort, schedule_state, jnp.diff(data.offsets)),
        "model_weight": received.weight,
        "rejected": jnp.zeros((composed.schedule.num_models,), jnp.int32).at[cohort.model].add(refused),
    }
    return after, report | poll_report | trained.info | server_info


def _draw(
    composed: _Composed, state: State, data: FederatedData, engine: Engine
) -> tuple[Cohort, PyTree, dict[str, Array]]:
    """Draws the cohort of a round, with its weights, after polling clients if the schedule does so.

    Returns the cohort, the schedule's next state and a dictionary: after a poll, ``polled`` is the number of the polled
    clients that have examples; without a poll it is empty.
    """
    import chex  # here: it is heavy, and needed only when a round is traced

    key, poll, report = state.schedule_key, composed.schedule.poll, dict[str, Array]()
    if poll is None:
        cohort, schedule_state = composed.schedule.sample(key, state.schedule, state.round)
    else:
        sizes = data.offsets[1:] - data.offsets[:-1]
        client = poll.candidates(streams.apart(key, streams.CANDIDATES), state.round, sizes)
        chex.assert_shape(client, (poll.num_candidates,))
        value = answers(poll.measure, composed.model, composed.loss, _params(composed, state), client, data, engine)
        weight = _client_weights(composed, data)[client]
        cohort, schedule_state = poll.choose(key, state.schedule, state.round, Polled(client, weight, value))
        report = {"polled": jnp.sum(weight > 0, dtype=jnp.int32)}
    chex.assert_shape(cohort, (composed.schedule.num_slots,))
    chex.assert_type((cohort.client, cohort.model, cohort.weight), (jnp.int32, jnp.int32, float))
    return _weigh(cohort, data.offsets, composed.parts.weighting), schedule_state, report


def _train(
    composed: _Composed, state: State, data: FederatedData, engine: Engine, cohort: Cohort
) -> tuple[PyTree, TrainedSlots]:
    """Trains every slot of the cohort, which is one client with one model.

    Returns the accumulator of ``composed.aggregate`` after all messages, and the results of each slot.
    """
    message, broadcast = composed.shapes(data, largest=engine.max_client_size)
    broadcasts = pytrees.cast_like(jax.vmap(composed.server.broadcast)(state.server), broadcast)
    acc = composed.aggregate.init(message, composed.schedule.num_models)
    slots = slots_of(cohort, composed.schedule.num_models, data.offsets)
    slots = slots._replace(block=_fetched(data, cohort, engine.max_client_size))
    train = _train_slot(composed, message, engine)
    return engine.map_clients(train, (data, state, broadcasts), composed.aggregate, acc, slots)


def _train_slot(
    composed: _Composed, expected: PyTree, engine: Engine
) -> Callable[[PyTree, Slots], tuple[Slots, PyTree, TrainedSlots]]:
    """Builds the function ``((data, state, broadcasts), slot) -> (slot, message, results)``, which trains one slot.

    A slot is one client with one model. The engine maps the function over the cohort. If the server rejects the
    message, the slot's weight becomes 0. ``expected`` is the shape of a message.
    """
    import chex

    def train(common: tuple[FederatedData, State, PyTree], row: Slots) -> tuple[Slots, PyTree, TrainedSlots]:
        data, state, broadcasts = common
        update_key, send_key = streams.slot_keys(state.key, state.round, row.client)
        if row.block is None:
            client = client_view(data, row.client, row.weight > 0, engine.max_client_size, state.round)
        else:
            client, row = _own_view(row, row.block, state.round), row._replace(block=None)
        before = jax.tree.map(lambda leaf: leaf[row.model, row.client], (state.client, state.channel))
        broadcast = pytrees.take(broadcasts, row.model)
        message, client_state, info = composed.local.update(update_key, broadcast, before[0], client)
        on_the_way = composed.channel.report(send_key, message, before[1])
        message, memory = composed.channel.send(send_key, message, before[1])
        chex.assert_trees_all_equal_shapes_and_dtypes(message, expected)
        client_state = composed.local.settle(before[0], client_state, message)
        if composed.parts.accept is not None:
            row = row._replace(weight=jnp.where(composed.parts.accept(message), row.weight, 0))
        on_the_way = pytrees.where(row.weight > 0, on_the_way, pytrees.zeros_like(on_the_way))
        info = {"examples": client.size, **info, **on_the_way}
        return row, message, TrainedSlots((client_state, memory), row.weight, info)

    return train


def _fetched(data: FederatedData, cohort: Cohort, max_client_size: int) -> tuple[Array, Array] | None:
    """Copies the inputs and targets of the clients of all S slots, [S, max_client_size, ...], once for the whole round.

    Returns None if the copy costs more than it saves: for a large cohort, or clients of very uneven sizes.
    """
    # A gather from the whole data set costs a CPU microseconds more in every local step than one from a client's rows:
    # XLA divides an operation with a large operand between threads. Not for large cohorts or very uneven clients.
    padded, num_rows = max_client_size * data.num_clients, data.indices.shape[0]
    most = min(num_rows, data.x.shape[0])  # examples that many clients share stand in the data once
    if padded > 4 * num_rows or 4 * max_client_size * cohort.client.shape[0] > most:
        return None
    rows = jax.vmap(lambda i: client_view(data, i, jnp.bool_(True), max_client_size).rows)(cohort.client)
    return data.x[rows], data.y[rows]


def _own_view(row: Slots, block: tuple[Array, Array], round_: Array) -> Client:
    """Returns the ``Client`` of a slot whose inputs and targets (``block``) were copied by ``_fetched``."""
    rows = jnp.arange(block[0].shape[0], dtype=jnp.int32)
    data = FederatedData(*block, rows, jnp.stack([jnp.zeros_like(row.size), row.size]))
    return Client(row.client, row.size, rows, data, round_)


def _weigh(cohort: Cohort, offsets: Array | np.ndarray, weighting: str) -> Cohort:
    """Multiplies the cohort's weights by the clients' numbers of examples, for ``weighting`` "examples".

    For "uniform" the factor is 1, or 0 for a client without examples. Client i has the examples from ``offsets[i]`` up
    to ``offsets[i + 1]``.
    """
    size = offsets[cohort.client + 1] - offsets[cohort.client]
    factor = size > 0 if weighting == "uniform" else size
    return cohort._replace(weight=cohort.weight * factor.astype(cohort.weight.dtype))


def _client_weights(composed: _Composed, data: FederatedData) -> Array:
    """Returns the weight of each of the N clients in a mean over all clients, [N].

    It is the client's number of examples or, with uniform weighting, 1 (0 without examples).
    """
    clients = jnp.arange(composed.schedule.num_clients, dtype=jnp.int32)
    everyone = Cohort(clients, jnp.zeros_like(clients), jnp.ones(clients.shape, jnp.float32))
    return _weigh(everyone, data.offsets, composed.parts.weighting).weight


def _settle(composed: _Composed, state: State, cohort: Cohort, trained: TrainedSlots) -> tuple[PyTree, PyTree]:
    """Returns the clients' states, and the channel's memories, with the new ones of the clients that trained.

    Clients that did not train, or whose message was rejected, keep their old ones.
    """
    # Empty and refused slots name a client too: their writes are dropped, so that they cannot overwrite the slot that
    # trains it.
    at = (jnp.where(trained.weight > 0, cohort.model, composed.schedule.num_models), cohort.client)
    before = (state.client, state.channel)
    client, memory = jax.tree.map(lambda all_, new: all_.at[at].set(new, mode="drop"), before, trained.kept)
    return client, memory


def _heard(composed: _Composed, state: State, cohort: Cohort, trained: TrainedSlots) -> tuple[RoundInfo, Array]:
    """Returns the facts for each model's server about the round, and for each slot whether its message was rejected.

    The facts are a ``RoundInfo`` with arrays [K]: round, total weight, number of accepted messages, key. The rejections
    are 1 or 0, [S] int32, for the cohort's S slots.
    """
    num_models = composed.schedule.num_models
    weight = jnp.zeros((num_models,), cohort.weight.dtype).at[cohort.model].add(trained.weight)
    count = jnp.zeros((num_models,), jnp.int32).at[cohort.model].add((trained.weight > 0).astype(jnp.int32))
    refused = ((cohort.weight > 0) & (trained.weight == 0)).astype(jnp.int32)
    round_ = jnp.broadcast_to(state.round, weight.shape)
    return RoundInfo(round_, weight, count, streams.server_keys(state.key, state.round, num_models)), refused


def _update(
    composed: _Composed, state: State, acc: PyTree, received: RoundInfo, data: FederatedData
) -> tuple[PyTree, dict[str, Array]]:
    """Returns the server's states of all models after the round, and the numbers that it reports, by name.

    ``acc`` are the aggregated messages and ``received`` the facts about the round. A model for which no message was
    accepted keeps its state, or is updated by ``server.unheard``. After a poll with ``inverse_weights`` the means are
    multiplied by the share of the messages' weight in the weight of all N clients.
    """
    aggregated, poll = composed.aggregate.finish(acc), composed.schedule.poll
    if poll is not None and poll.inverse_weights:
        share = received.weight / jnp.sum(_client_weights(composed, data))
        aggregated = jax.vmap(pytrees.scale)(share, aggregated)
    updated, report = composed.server.map_models(composed.server.update)(state.server, aggregated, received)
    still = state.server
    if composed.server.unheard is not None:
        keys = streams.server_keys(state.key, state.round, composed.schedule.num_models, streams.EMPTY)
        nothing = RoundInfo(received.round, jnp.zeros_like(received.weight), jnp.zeros_like(received.num_clients), keys)
        still = jax.vmap(composed.server.unheard)(state.server, nothing)
    return pytrees.where(received.weight > 0, updated, still), report
