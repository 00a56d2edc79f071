"""FedAvg on a deep linear network, in DeepLin's notation and normalisation, run by the engine."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedtangent.data.federated import federated_data
from fedtangent.data.partition.given import consecutive
from fedtangent.engine import Devices, Evaluation, simulate
from fedtangent.federated.algorithms import fed_avg
from fedtangent.federated.algorithms.common import Averaging
from fedtangent.federated.local import Work
from fedtangent.federated.schedule import all_clients
from fedtangent.models.linear_networks import deep_linear
from fedtangent.theory.deep_linear.rounds import FullBatchWork, full_batch_work
from fedtangent.types import Algorithm, Partition, PyTree


class Size(NamedTuple):
    """Sizes of a problem and its network."""

    clients: int  # N
    held: int  # examples of a client
    dimension: int  # d
    outputs: int
    width: int  # m
    local_steps: int  # K
    rounds: int
    depth: int = 3

    def __str__(self) -> str:
        """As the table shows it."""
        return f"N = {self.clients}, K = {self.local_steps}, L = {self.depth}, m = {self.width}"

    @property
    def partition(self) -> Partition:
        """One client's examples after another's."""
        return consecutive([self.held] * self.clients)


def problem(size: Size, seed: int, spread: float, truth: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Inputs X [n, d] with singular values from 1 to ``spread``, and targets ``X W*`` [n, C] with ``|W*| = truth``."""
    rng = np.random.default_rng([seed, size.dimension])
    left = np.linalg.qr(rng.standard_normal((size.clients * size.held, size.dimension)))[0]
    right = np.linalg.qr(rng.standard_normal((size.dimension, size.dimension)))[0]
    x = left * np.linspace(1, spread, size.dimension) @ right
    star = rng.standard_normal((size.dimension, size.outputs))
    return x, x @ (truth * star / np.linalg.norm(star, 2))


def work_of(size: Size, x: np.ndarray, y: np.ndarray, learning_rate: float) -> FullBatchWork:
    """The same local work as ``algorithm_of``, as theory takes it."""
    return full_batch_work(x, y, size.partition, learning_rate, size.local_steps)


@functools.lru_cache(maxsize=32)
def algorithm_of(size: Size, learning_rate: float) -> Algorithm:
    """FedAvg on the sum of squares with full batches and a plain mean; cached, so that all seeds share one program."""
    return fed_avg(
        deep_linear(size.dimension, size.outputs, size.width, size.depth, jnp.float64),
        all_clients(size.clients),
        client_learning_rate=learning_rate,
        loss="squared_error_sum",
        work=Work(steps=size.local_steps),
        averaging=Averaging(weighting="uniform"),
    )


class Run(NamedTuple):
    """What is recorded of a run."""

    models: np.ndarray  # [R + 1, d, C], the network as one matrix after every round
    weights: dict[int, list[np.ndarray]]  # W^1 .. W^L at some rounds, [fan_out, fan_in] as in the paper


def run_of(size: Size, x: np.ndarray, y: np.ndarray, learning_rate: float, seed: int, every: int) -> Run:
    """A run of ``size.rounds`` rounds; the weights of every ``every``-th are kept."""
    algorithm, count = algorithm_of(size, learning_rate), itertools.count()
    read, kept = algorithm.params, dict[int, list[np.ndarray]]()
    assert read is not None  # FedAvg has a global model
    scale = (size.width ** (size.depth - 1) * size.outputs) ** -0.5

    def look(_: Algorithm, state: PyTree) -> dict[str, np.ndarray]:
        layers, r = [np.asarray(layer[0][0]) for layer in read(state)[::2]], next(count)
        if r % every == 0:
            kept[r] = [layer.T.copy() for layer in layers]
        product = layers[-1]
        for layer in layers[-2::-1]:
            product = layer @ product
        return {"model": scale * product}

    data = federated_data(x, y, size.partition, dtype=jnp.float64)
    run = simulate(
        algorithm, data, num_rounds=size.rounds, seed=seed, evaluation=Evaluation(1, look), devices=Devices("scan")
    )
    return Run(np.array([e.metrics["model"] for e in run.history.evaluations]), kept)
