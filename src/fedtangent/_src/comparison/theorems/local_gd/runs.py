"""Local-GD on a linear problem, run by the engine: the global model after every round."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64

from fedtangent._src.data.federated import federated_data
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.engine import Devices, params_by_round
from fedtangent._src.federated.algorithms.entry import arguments_of
from fedtangent._src.federated.local import Work
from fedtangent._src.models.features import linear
from fedtangent._src.types import Partition, Recipe, Schedule


class Size(NamedTuple):
    """The sizes of a linear problem."""

    nodes: int  # M
    per_node: int  # number N of examples of a node
    dimension: int  # d

    @property
    def examples(self) -> int:
        """The number of examples of all nodes."""
        return self.nodes * self.per_node

    def without_last(self) -> list[float]:
        """Returns weights [M] of the nodes in a wrong theory that ignores the last one."""
        return [1.0] * (self.nodes - 1) + [0.0]

    def __str__(self) -> str:
        """Returns the sizes as the table shows them."""
        return f"M = {self.nodes}, N = {self.per_node}, d = {self.dimension}"


SIZES = Size(4, 6, 60), Size(10, 50, 1500)


class LinearProblem(NamedTuple):
    """The examples of all nodes, whose linear targets differ from node to node, and the seed of the problem's runs."""

    size: Size
    x: Float64[np.ndarray, "examples d"]
    y: Float64[np.ndarray, "examples"]
    seed: int

    @property
    def partition(self) -> Partition:
        """The partition in which each node has consecutive examples."""
        return consecutive([self.size.per_node] * self.size.nodes)


class Descent(NamedTuple):
    """The schedule and the steps of a run, for any recipe."""

    schedule: Schedule
    steps: int  # L
    rate: float  # eta
    rounds: int
    scatter: float = 0.0  # standard deviation of the first model's weights


def simulated(
    recipe: Recipe, problem: LinearProblem, descent: Descent, every: int = 1, **options: float | str
) -> Float64[np.ndarray, "records d"]:
    """Simulates a run and returns the global model at the start and after every ``every`` rounds.

    Args:
        recipe: Builds the algorithm.
        problem: Examples of all nodes.
        descent: Schedule and steps.
        every: Rounds between records.
        options: Further arguments of the recipe.
    """
    algorithm = recipe(
        linear(problem.size.dimension, sigma=descent.scatter, dtype=jnp.float64),
        descent.schedule,
        client_learning_rate=descent.rate,
        work=Work(steps=descent.steps, batch_size=None),
        **arguments_of(recipe, options),
    )
    data = federated_data(problem.x, problem.y[:, None], problem.partition, dtype=jnp.float64)
    path = params_by_round(
        algorithm, data, num_rounds=descent.rounds, seed=problem.seed, every=every, devices=Devices("vmap")
    )
    return np.asarray(path["weights"][:, 0, :, 0])
