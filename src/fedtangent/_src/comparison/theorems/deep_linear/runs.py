"""FedAvg on a deep linear network, in DeepLin's notation and normalisation, run by the engine."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedtangent._src.data.federated import federated_data
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.engine import Devices, Evaluation, simulate
from fedtangent._src.federated.algorithms import fed_avg
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import all_clients
from fedtangent._src.models.linear_networks import deep_linear
from fedtangent._src.theory.deep_linear.rounds import FullBatchWork, full_batch_work
from fedtangent._src.types import Algorithm, Partition, PyTree


class Size(NamedTuple):
    """Sizes of a problem and its network."""

    clients: int  # N
    held: int  # number of examples of a client
    dimension: int  # d
    outputs: int
    width: int  # m
    local_steps: int  # K
    rounds: int
    depth: int = 3

    def __str__(self) -> str:
        """Returns the sizes as the table shows them."""
        return f"N = {self.clients}, K = {self.local_steps}, L = {self.depth}, m = {self.width}"

    @property
    def partition(self) -> Partition:
        """The partition in which each client has consecutive examples."""
        return consecutive([self.held] * self.clients)


def problem(size: Size, seed: int, spread: float, truth: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Draws inputs X [n, d] with singular values from 1 to ``spread``, and targets ``X W*`` [n, C].

    Args:
        size: Sizes of the problem.
        seed: Seed of the draw.
        spread: Least singular value of X; the largest is 1.
        truth: Spectral norm of W*.
    """
    rng = np.random.default_rng([seed, size.dimension])
    columns = np.linalg.qr(rng.standard_normal((size.clients * size.held, size.dimension)))[0]
    rows = np.linalg.qr(rng.standard_normal((size.dimension, size.dimension)))[0]
    x = columns * np.linspace(1, spread, size.dimension) @ rows
    star = rng.standard_normal((size.dimension, size.outputs))
    return x, x @ (truth * star / np.linalg.norm(star, 2))


def work_of(size: Size, x: np.ndarray, y: np.ndarray, learning_rate: float) -> FullBatchWork:
    """Returns the local work of ``run_of`` in the form that theory needs.

    Args:
        size: Sizes of the problem.
        x: Inputs, [n, d].
        y: Targets, [n, C].
        learning_rate: Learning rate of the clients.
    """
    return full_batch_work(x, y, size.partition, learning_rate, size.local_steps)


@functools.lru_cache(maxsize=32)
def _algorithm(size: Size, learning_rate: float) -> Algorithm:
    """Builds FedAvg on the sum of squares with full batches and a plain mean; cached: all seeds share one program."""
    return fed_avg(
        deep_linear(size.dimension, size.outputs, size.width, size.depth, jnp.float64),
        all_clients(size.clients),
        client_learning_rate=learning_rate,
        loss="squared_error_sum",
        work=Work(steps=size.local_steps, batch_size=None),
        averaging=Averaging(weighting="uniform"),
    )


class Run(NamedTuple):
    """The recorded models and weights of a run."""

    models: np.ndarray  # [R + 1, d, C], the network as one matrix after every round
    weights: dict[int, list[np.ndarray]]  # W^1 .. W^L at some rounds, [fan_out, fan_in] as in the paper


def run_of(size: Size, x: np.ndarray, y: np.ndarray, learning_rate: float, seed: int, every: int) -> Run:
    """Simulates ``size.rounds`` rounds of FedAvg.

    Args:
        size: Sizes of the problem and the network.
        x: Inputs, [n, d].
        y: Targets, [n, C].
        learning_rate: Learning rate of the clients.
        seed: Seed of the initial weights.
        every: Rounds between records of the weights.
    """
    algorithm, count = _algorithm(size, learning_rate), itertools.count()
    read, weights = algorithm.params, dict[int, list[np.ndarray]]()
    assert read is not None  # FedAvg has a global model
    scale = (size.width ** (size.depth - 1) * size.outputs) ** -0.5

    def look(_: Algorithm, state: PyTree) -> dict[str, np.ndarray]:
        layers, r = [np.asarray(layer[0][0]) for layer in read(state)[::2]], next(count)
        if r % every == 0:
            weights[r] = [layer.T.copy() for layer in layers]
        product = layers[-1]
        for layer in layers[-2::-1]:
            product = layer @ product
        return {"model": scale * product}

    data = federated_data(x, y, size.partition, dtype=jnp.float64)
    run = simulate(
        algorithm, data, num_rounds=size.rounds, seed=seed, evaluation=Evaluation(1, look), devices=Devices("scan")
    )
    return Run(np.array([e.metrics["model"] for e in run.history.evaluations]), weights)
