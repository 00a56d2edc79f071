"""Local-GD on a linear problem, run by the engine: the global model after every round."""

from __future__ import annotations

import functools
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
from fedtangent._src.types import Algorithm, Partition, Recipe, Schedule


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

    @property
    def examples(self) -> tuple[np.ndarray, np.ndarray, Partition]:
        """Inputs, targets, and the examples of each node."""
        return self.x, self.y, self.partition


class Descent(NamedTuple):
    """The schedule and the steps of a run, for any recipe."""

    schedule: Schedule
    steps: int  # L
    rate: float  # eta
    rounds: int
    scatter: float = 0.0  # standard deviation of the first model's weights
    seed: int = 0
    mapping: str = "vmap"  # of the nodes


@functools.lru_cache(maxsize=8)
def _algorithm(recipe: Recipe, size: int, descent: Descent, options: tuple[tuple[str, float | str], ...]) -> Algorithm:
    """Builds the algorithm, cached so that all seeds share one compiled program."""
    model, work = linear(size, sigma=descent.scatter, dtype=jnp.float64), Work(steps=descent.steps, batch_size=None)
    more = arguments_of(recipe, dict(options))
    return recipe(model, descent.schedule, client_learning_rate=descent.rate, work=work, **more)


def simulated(
    recipe: Recipe,
    examples: tuple[Float64[np.ndarray, "examples d"], Float64[np.ndarray, "examples"], Partition],
    descent: Descent,
    every: int = 1,
    **options: float | str,
) -> Float64[np.ndarray, "records d"]:
    """Simulates a run and returns the global model at the start and after every ``every`` rounds.

    Args:
        recipe: Builds the algorithm.
        examples: Inputs, targets, and the examples of each node.
        descent: Schedule and steps.
        every: Rounds between records.
        options: Further arguments of the recipe.
    """
    x, y, nodes = examples
    algorithm = _algorithm(recipe, x.shape[1], descent._replace(rounds=0, seed=0), tuple(sorted(options.items())))
    data, devices = federated_data(x, y[:, None], nodes, dtype=jnp.float64), Devices(descent.mapping)
    path = params_by_round(algorithm, data, num_rounds=descent.rounds, seed=descent.seed, every=every, devices=devices)
    return np.asarray(path["weights"][:, 0, :, 0])
