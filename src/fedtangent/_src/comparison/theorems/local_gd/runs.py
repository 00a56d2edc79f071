"""Local-GD on a linear problem, run by the engine: the global model after every round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedtangent._src.data.federated import federated_data
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.engine import Devices, params_by_round
from fedtangent._src.federated.algorithms.entry import arguments_of
from fedtangent._src.federated.local import Work
from fedtangent._src.models.features import linear
from fedtangent._src.types import Algorithm, Partition, Schedule


class Size(NamedTuple):
    """The sizes of a linear problem."""

    nodes: int  # M
    held: int  # number N of examples of a node
    dimension: int  # d

    @property
    def examples(self) -> int:
        """The number of examples of all nodes."""
        return self.nodes * self.held

    def without_last(self) -> list[float]:
        """Returns weights [M] of the nodes in a wrong theory that ignores the last one."""
        return [1.0] * (self.nodes - 1) + [0.0]

    def __str__(self) -> str:
        """Returns the sizes as the table shows them."""
        return f"M = {self.nodes}, N = {self.held}, d = {self.dimension}"


SIZES = Size(4, 6, 60), Size(10, 50, 1500)


class LinearProblem(NamedTuple):
    """The examples of all nodes; each node has different linear targets."""

    size: Size
    x: np.ndarray  # [M N, d]
    y: np.ndarray  # [M N]

    @property
    def partition(self) -> Partition:
        """The partition in which each node has consecutive examples."""
        return consecutive([self.size.held] * self.size.nodes)


class Descent(NamedTuple):
    """The schedule and the steps of a run, for any recipe."""

    schedule: Schedule
    steps: int  # L
    rate: float  # eta
    rounds: int
    seed: int
    scatter: float = 0.0  # standard deviation of the first model's weights


def simulated(
    recipe: Callable[..., Algorithm], problem: LinearProblem, descent: Descent, every: int = 1, **options: Any
) -> np.ndarray:
    """Simulates a run and returns the global model at the start and after every ``every`` rounds.

    Args:
        recipe: Builds the algorithm.
        problem: Examples of all nodes.
        descent: Schedule and steps.
        every: Rounds between records.
        options: Further arguments of the recipe.

    Returns:
        Weights [1 + R / every, d] in float64.
    """
    algorithm = recipe(
        linear(problem.size.dimension, sigma=descent.scatter, dtype=jnp.float64),
        descent.schedule,
        client_learning_rate=descent.rate,
        work=Work(steps=descent.steps, batch_size=None),
        **arguments_of(recipe, options),
    )
    held = federated_data(problem.x, problem.y[:, None], problem.partition, dtype=jnp.float64)
    path = params_by_round(
        algorithm, held, num_rounds=descent.rounds, seed=descent.seed, every=every, devices=Devices("vmap")
    )
    return np.asarray(path["weights"][:, 0, :, 0])
