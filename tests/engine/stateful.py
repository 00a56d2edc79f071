"""A small run in which everything has a state: clients, schedule, server optimiser, random numbers."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedtangent._src.engine import Devices, Evaluation, simulate
from fedtangent._src.engine.history import Run
from fedtangent._src.federated.aggregate import optax_server
from fedtangent._src.federated.compose import compose
from fedtangent._src.federated.local import Work, local_training
from fedtangent._src.federated.schedule import strata
from fedtangent._src.losses import squared_error
from fedtangent._src.types import Algorithm, Client, FederatedData, Key, Local, Model, PyTree

NUM_CLIENTS = 7
BREAKS = 7  # the round, from 0, in which data that break the models do so
CONFIG = {"run": "stateful"}  # instead of a digest of the traced round
BREAKING = 1e3  # the first target of such data


@functools.cache
def data(breaking: bool = False, scale: float = 1.0) -> FederatedData:
    """Seven clients of 1 to 7 examples."""
    offsets = np.cumsum([0, *range(1, NUM_CLIENTS + 1)]).astype(np.int32)
    rng = np.random.default_rng(0)
    x, y = scale * rng.normal(size=(offsets[-1], 3)), rng.normal(size=(offsets[-1], 2))
    y[0, 0] = BREAKING if breaking else y[0, 0]
    return FederatedData(*map(jnp.asarray, (x, y, np.arange(offsets[-1], dtype=np.int32), offsets)))


def _local(model: Model, rate: float) -> Local:
    """Local SGD whose message is moved by noise and by what the client remembers of its last message."""
    inner = local_training(model, squared_error, optax.sgd(rate), Work(steps=3, batch_size=2))

    def update(key: Key, broadcast: PyTree, memory: PyTree, client: Client) -> tuple[PyTree, PyTree, dict[str, Any]]:
        message, _, info = inner.update(key, broadcast, (), client)
        noise = 0.01 * jax.random.normal(jax.random.fold_in(key, 1), message.shape)
        message = message + 0.1 * memory["last"] + noise
        return message, {"last": message, "times": memory["times"] + 1}, info

    return Local(lambda params: {"last": jnp.zeros_like(params), "times": jnp.int32(0)}, update)


@functools.cache
def algorithm() -> Algorithm:
    """Two linear models, Adam at the server, strata with partial participation; NaN in one round where data say so.

    All tests share its programs: what differs between their runs is in the data.
    """
    model = Model("linear", lambda key: jax.random.normal(key, (3, 2)), lambda w, x: x @ w, None, 2)
    server = optax_server(optax.adam(0.05))
    sound = compose("stateful", model, _local(model, 0.1), server, strata(NUM_CLIENTS, 2, 3, 2))

    def step(state: Any, data: FederatedData, engine: Any) -> Any:
        after, info = sound.step(state, data, engine)
        breaks = (state.round >= BREAKS) & (data.y[0, 0] == BREAKING)
        params = jnp.where(breaks, jnp.nan, after.server.params)
        return after._replace(server=after.server._replace(params=params)), info

    return sound._replace(step=step)


def measure(_: Algorithm, state: PyTree) -> dict[str, Any]:
    """Metrics of every kind that a checkpoint holds."""
    weights = np.asarray(state.server.params)
    return {
        "train": {"norm": float(np.sum(weights**2)), "of": (1, "two", None, True)},
        "weights": weights.copy(),
        "scalar": np.float32(weights[0, 0, 0]),
        "nan": float("nan"),
    }


def run(num_rounds: int = 11, mapping: str = "scan", **options: Any) -> Run:
    """A run, evaluated every third round unless ``options``, settings and those of ``Evaluation``, say otherwise."""
    given = {"data": data(), "seed": 3, "every": 3, "measure": measure} | options
    fields = [field.name for field in dataclasses.fields(Evaluation)]
    evaluation = Evaluation(**{name: given.pop(name) for name in fields if name in given})
    return simulate(algorithm(), num_rounds=num_rounds, evaluation=evaluation, devices=Devices(mapping), **given)


def plain(tree: Any) -> Any:
    """The leaves with dtype, shape and bytes, containers with their types: equal only if equal bit for bit."""
    if isinstance(tree, jax.Array) and jax.dtypes.issubdtype(tree.dtype, jax.dtypes.prng_key):
        return str(tree.dtype), plain(np.asarray(jax.random.key_data(tree)))
    if isinstance(tree, (jax.Array, np.ndarray, np.generic)):
        array = np.asarray(tree)
        return isinstance(tree, np.generic), str(array.dtype), array.shape, array.tobytes()
    if isinstance(tree, dict):
        return {k: plain(v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree).__name__, [plain(v) for v in tree]
    return type(tree).__name__, repr(tree)


def bits(run: Run) -> Any:
    """All of a run's state and history but the clock's seconds."""
    evaluations = [e._replace(seconds=0.0) for e in run.history.evaluations]
    return plain((run.state, run.history._replace(evaluations=evaluations)))


def summary(run: Run) -> str:
    """A digest of all of a run's bits, its status, and the round of its last evaluation."""
    digest = hashlib.sha256(repr(bits(run)).encode()).hexdigest()
    return f"{digest} {run.status} {run.history.evaluations[-1].round}"
