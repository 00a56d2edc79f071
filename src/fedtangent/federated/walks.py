"""Schedules without a server: models that walk over a graph of clients, and models that stay where they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.data.checks import integer
from fedtangent.federated.graph import Graph, check_stochastic, metropolis_hastings
from fedtangent.types import Array, Cohort, Key, Schedule


def random_walk(graph: Graph, num_models: int = 1, transition: np.ndarray | None = None) -> Schedule:
    """K models walk over the clients of a graph, each on its own (FE-2024, section V-H: Fed-ensemble Random Walk).

    In every round each model is trained by the client where it stands, and then moves along an edge (or stays, where
    ``transition`` lets it): S = K. The paper trains the K models "independently", so each starts at a client drawn
    uniformly, whatever the others do; several may meet at one client, which then trains each of them, and K may exceed
    N. With the default transition a model stands at each client with probability 1/N in every round.

    Args:
        transition: [N, N], rows sum to 1, nothing outside the edges and the diagonal; by default
            ``graph.metropolis_hastings``, whose stationary law is uniform.

    The schedule's state is where the models stand, [K] int32. Raises ``ValueError`` for another transition.
    """
    number, nodes = integer("num_models", num_models, 1), graph.num_nodes
    matrix = np.asarray(metropolis_hastings(graph) if transition is None else transition, np.float64)
    if matrix.shape != (nodes, nodes):
        raise ValueError(f"transition: got shape {matrix.shape}, must be [{nodes}, {nodes}], the graph's nodes")
    check_stochastic("transition", matrix)
    strange = np.argwhere((matrix > 0) & ~graph.adjacency & ~np.eye(nodes, dtype=bool))
    if len(strange):
        i, j = strange[0]
        raise ValueError(f"transition: moves from {i} to {j}, which is no edge of {graph.name}")
    cumulative = jnp.asarray(_cumulative(matrix))
    model = jnp.arange(number, dtype=jnp.int32)

    def init(key: Key) -> Array:
        return jax.random.randint(key, (number,), 0, nodes, jnp.int32)

    def sample(key: Key, at: Array, round_: Array) -> tuple[Cohort, Array]:
        draw = jax.random.uniform(jax.random.fold_in(key, round_), (number,), jnp.float32)
        moved = jnp.sum(cumulative[at] <= draw[:, None], axis=1, dtype=jnp.int32)
        return Cohort(at, model, jnp.ones((number,), jnp.float32)), moved

    return Schedule(number, nodes, number, init, sample)


def own_models(num_clients: int) -> Schedule:
    """Each client trains a model of its own, K = S = N: slot k trains model k on client k (what gossip mixes)."""
    number = integer("num_clients", num_clients, 1)
    each = jnp.arange(number, dtype=jnp.int32)

    def sample(key: Key, state: tuple[()], round_: Array) -> tuple[Cohort, tuple[()]]:
        return Cohort(each, each, jnp.ones((number,), jnp.float32)), state

    return Schedule(number, number, number, lambda key: (), sample)


def _cumulative(matrix: np.ndarray) -> np.ndarray:
    """Cumulative sums of the rows, [N, N] float32: exactly 1 from the last entry that is not 0.

    So that a draw from [0, 1) falls into the interval of an entry that is not 0, whatever the rounding.
    """
    sums = np.cumsum(matrix, axis=1)
    last = matrix.shape[1] - 1 - np.argmax(matrix[:, ::-1] > 0, axis=1)
    return np.where(np.arange(matrix.shape[1])[None] >= last[:, None], 1.0, np.minimum(sums, 1.0)).astype(np.float32)
