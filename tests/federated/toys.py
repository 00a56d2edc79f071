"""Small models, data and schedules that the tests of ``federated`` share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedtangent._src.engine.clients import engine_for
from fedtangent._src.engine.history import first_rounds, stacked
from fedtangent._src.engine.loop import chunk_length, copied, info_shapes, run_chunk
from fedtangent._src.federated import schedule as schedules
from fedtangent._src.federated.aggregate import optax_server
from fedtangent._src.federated.algorithms import entry
from fedtangent._src.federated.compose import compose
from fedtangent._src.federated.local import Work, local_training
from fedtangent._src.losses import squared_error
from fedtangent._src.optimizers import at_rate
from fedtangent._src.types import Algorithm, Array, Cohort, FederatedData, Key, Local, Model, PyTree, Schedule

SIZES = (3, 5, 1, 4, 6, 2)  # six uneven clients, one of a single example
NUM_CLIENTS = len(SIZES)
INPUTS, HIDDEN, OUTPUTS = 3, 4, 2
EVERYBODY = schedules.all_clients(NUM_CLIENTS)


def arguments_of(recipe: Any, flat: dict[str, Any]) -> dict[str, Any]:
    """A recipe's arguments from flat names; a function from the rate makes the clients' optimiser."""
    arguments = entry.arguments_of(recipe, flat)
    make = arguments.get("client_optimizer")
    if make is not None and not isinstance(make, optax.GradientTransformation):
        arguments["client_optimizer"] = at_rate(make, arguments.pop("client_learning_rate"))
    return arguments


def two_layer(dtype: Any = jnp.float64) -> Model:
    """``tanh(x W + b) V``; not linear, so that a wrong order of averaging and training shows."""

    def init(key: Key) -> PyTree:
        shapes = {"W": (INPUTS, HIDDEN), "b": (1, HIDDEN), "V": (HIDDEN, OUTPUTS)}
        return {
            name: jax.random.normal(jax.random.fold_in(key, i), shape, dtype)
            for i, (name, shape) in enumerate(shapes.items())
        }

    def apply(params: PyTree, x: Array) -> Array:
        return jnp.tanh(x @ params["W"] + params["b"]) @ params["V"]

    return Model("two_layer", init, apply, None, OUTPUTS)


def counting(model: Model) -> tuple[Model, list[int]]:
    """``model``, and a list that grows by one entry each time its ``apply`` is traced or called."""
    calls: list[int] = []

    def apply(params: PyTree, x: Array) -> Array:
        calls.append(1)
        return model.apply(params, x)

    return model._replace(apply=apply), calls


def federated(x: np.ndarray, y: np.ndarray, owned: Sequence[np.ndarray]) -> FederatedData:
    """``FederatedData`` by hand: client i owns the rows ``owned[i]``."""
    offsets = np.cumsum([0, *map(len, owned)])
    indices = np.concatenate([np.asarray(rows, int) for rows in owned])
    return FederatedData(*map(jnp.asarray, (x, y, indices.astype(np.int32), offsets.astype(np.int32))))


def owned_rows(data: FederatedData) -> list[np.ndarray]:
    """The rows each client owns."""
    return np.split(np.asarray(data.indices), np.asarray(data.offsets)[1:-1])


def uneven_data(labels: bool = False, sizes: Sequence[int] = SIZES, seed: int = 0) -> FederatedData:
    """Random regression (or classification) data of clients with ``sizes`` examples, rows in random order."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    owned = np.split(rng.permutation(n), np.cumsum(sizes)[:-1])
    x = rng.normal(size=(n, INPUTS))
    y = rng.integers(0, OUTPUTS, n).astype(np.int32) if labels else rng.normal(size=(n, OUTPUTS))
    return federated(x, y, owned)


def fixed(num_clients: int, num_models: int, slots: Sequence[tuple[int, int, float]]) -> Schedule:
    """The same cohort every round; ``slots`` are (client, model, weight). The cohort is the schedule's state."""

    def init(key: Key) -> Cohort:
        client, model, weight = (jnp.asarray(column) for column in zip(*slots, strict=True))
        return Cohort(client.astype(jnp.int32), model.astype(jnp.int32), weight.astype(jnp.float32))

    return Schedule(num_models, num_clients, len(slots), init, lambda key, cohort, round_: (cohort, cohort))


def reordered(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """``schedule`` with its slots in another order."""

    def sample(key: Key, state: PyTree, round_: Array) -> tuple[Cohort, PyTree]:
        cohort, state = schedule.sample(key, state, round_)
        return jax.tree.map(lambda leaf: leaf[jnp.asarray(order)], cohort), state

    return schedule._replace(sample=sample)


def cohorts(schedule: Schedule, seed: int, num_rounds: int) -> Cohort:
    """The cohorts that a run with ``seed`` draws, NumPy arrays [R, S], with the weights of the schedule."""
    return schedules.drawn_cohorts(schedule, None, num_rounds, seed, weighting=None)


def go(
    algorithm: Algorithm,
    data: FederatedData,
    mapping: str,
    rounds: int,
    state: PyTree,
    cohort: Cohort | None = None,
) -> tuple[PyTree, PyTree]:
    """The state after ``rounds`` rounds from ``state`` and their infos, in the program that ``simulate`` uses.

    ``cohort`` replaces the schedule's state: runs of an algorithm that differ in it share a program.
    """
    state = copied(state if cohort is None else state._replace(schedule=cohort))
    engine, chunks = engine_for(data, mapping), []
    shapes = info_shapes(algorithm, engine, state, data)
    length = chunk_length(shapes)
    for done in range(0, rounds, length):
        count = min(length, rounds - done)
        state, infos, _ = run_chunk(algorithm, engine, length, state, data, jnp.int32(count))
        chunks.append(first_rounds(infos, count))
    return state, stacked(shapes, chunks)


def leaves(tree: PyTree) -> list[np.ndarray]:
    """The leaves as NumPy arrays, keys as their data."""
    return [
        np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
        for leaf in jax.tree.leaves(tree)
    ]


def models_of(algorithm: Algorithm, state: PyTree) -> list[dict[str, np.ndarray]]:
    """The K models' parameters (of a ``two_layer`` model) as NumPy dictionaries."""
    params = getattr(state.server, "params", state.server) if algorithm.params is None else algorithm.params(state)
    stacked = {name: np.asarray(leaf) for name, leaf in params.items()}
    return [{name: leaf[k] for name, leaf in stacked.items()} for k in range(algorithm.schedule.num_models)]


def distance(a: PyTree, b: PyTree) -> float:
    """Largest difference between two pytrees of arrays of equal structure."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return max(float(np.max(np.abs(x - y))) for x, y in zip(leaves(a), leaves(b), strict=True))


class Recording(NamedTuple):
    """Which examples were in which local step: ``share[t, i][j, s]`` is row j's weight in the gradient of step s."""

    share: np.ndarray  # [R, S, n, steps]
    client: np.ndarray  # [R, S]
    infos: PyTree

    def of(self, round_: int, client: int) -> np.ndarray:
        """Shares [n, steps] of one client's (first) slot in one round."""
        slot = int(np.flatnonzero(self.client[round_] == client)[0])
        return self.share[round_, slot]

    def batches(self, round_: int, client: int) -> list[np.ndarray]:
        """Rows of ``data.x`` in each local step."""
        share = self.of(round_, client)
        return [np.flatnonzero(column) for column in share.T if column.any()]


def recording_local(work: Work, num_rows: int, max_steps: int) -> tuple[Model, Local]:
    """Local training that writes down the share of each row in each step's gradient.

    The model is linear with one-hot inputs and one output per step, its weights start at 0 and its targets are -1:
    the gradient of row j's weights is then the row's share of the batch. The optimiser of step s keeps column s only,
    so that the message (server - client) is the table of shares.
    """
    model = Model(
        "record", lambda key: jnp.zeros((num_rows, max_steps), jnp.float64), lambda w, x: x @ w, None, max_steps
    )

    def update(gradient: PyTree, step: Array, params: PyTree | None = None) -> tuple[PyTree, Array]:
        return -gradient * (jnp.arange(max_steps) == step)[None].astype(gradient.dtype), step + 1

    optimizer = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
    train = local_training(model, squared_error, optimizer, work)

    def recorded(key: Key, broadcast: PyTree, client_state: PyTree, client: Any) -> tuple[PyTree, PyTree, dict]:
        message, client_state, info = train.update(key, jnp.zeros_like(broadcast), client_state, client)
        return message, client_state, {**info, "share": message}

    return model, Local(train.init, recorded)


@functools.cache
def _recorder(schedule: Schedule, work: Work, num_rows: int, max_steps: int) -> Algorithm:
    model, local = recording_local(work, num_rows, max_steps)
    return compose("record", model, local, optax_server(optax.sgd(1.0)), schedule)


def record(
    data: FederatedData,
    schedule: Schedule,
    work: Work,
    max_steps: int,
    num_rounds: int,
    seed: int,
    mapping: str = "scan",
) -> Recording:
    """Run ``work`` on the clients of ``data`` and record the batches; keys are those of any run with ``seed``."""
    rows = data.x.shape[0]
    algorithm = _recorder(schedule, work, rows, max_steps)
    coded = data._replace(x=jnp.eye(rows), y=-jnp.ones((rows, max_steps)))
    infos = go(algorithm, coded, mapping, num_rounds, algorithm.init(seed, data.num_clients))[1]
    return Recording(infos["share"], infos["cohort"].client, infos)


def flat(params: PyTree) -> np.ndarray:
    """All numbers of ``params`` in one row."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])
