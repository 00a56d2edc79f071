"""A small federation for the tests of sweeps, seeds and hypergradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src.engine.clients import engine_for
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import per_client_permutations
from fedtangent._src.types import Algorithm, Array, Engine, FederatedData, Key, Model, Partition, PyTree

NUM_CLIENTS = 4
OFFSETS = np.array([0, 2, 7, 8, 12], np.int32)
_RNG = np.random.default_rng(0)
X, TARGETS = _RNG.normal(size=(12, 3)), _RNG.normal(size=(12, 1))
VALIDATION = jnp.asarray(_RNG.normal(size=(9, 3))), jnp.asarray(_RNG.normal(size=(9, 1)))
UNEVEN = Partition(_RNG.permutation(12).astype(np.int32), OFFSETS)
EVEN = Partition(np.arange(12, dtype=np.int32), np.arange(0, 13, 3, dtype=np.int32))


def _init(key: Key) -> PyTree:
    a, b = jax.random.split(key)
    return {"W": jax.random.normal(a, (3, 4)), "v": jax.random.normal(b, (4, 1))}


MODEL = Model("tanh", _init, lambda w, x: jnp.tanh(x @ w["W"]) @ w["v"], None, 1)


def data(partition: Partition = UNEVEN) -> FederatedData:
    """Twelve examples on four clients."""
    return FederatedData(*map(jnp.asarray, (X, TARGETS, partition.indices, partition.offsets)))


def engine() -> Engine:
    """The engine of ``data()`` that trains one client after another."""
    return engine_for(data(), "scan")


def build(
    client_learning_rate: Any, server_learning_rate: Any = 1.0, num_models: int = 1, differentiable: bool = False
) -> Algorithm:
    """Fed-ensemble, minibatches of two."""
    return algorithms.fed_ensemble(
        MODEL,
        per_client_permutations(NUM_CLIENTS, num_models),
        client_learning_rate=client_learning_rate,
        averaging=Averaging(server_learning_rate=server_learning_rate),
        work=Work(epochs=2, batch_size=2, differentiable=differentiable),
    )


def validation_loss(algorithm: Algorithm, state: PyTree) -> Array:
    """Mean squared error of the ensemble on other examples."""
    x, y = VALIDATION
    return jnp.mean((algorithm.predict(state, x).mean - y) ** 2)


def measures(algorithm: Algorithm, state: PyTree) -> dict[str, Array]:
    """The validation loss, and the predictions themselves."""
    return {"mse": validation_loss(algorithm, state), "outputs": algorithm.predict(state, VALIDATION[0]).mean}
