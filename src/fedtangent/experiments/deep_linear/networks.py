"""What experiments on DeepLin's theory share: a small problem that can be fitted, and a network's way through it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import data as datasets
from fedtangent import models
from fedtangent.engine import simulate
from fedtangent.federated import algorithms, schedule
from fedtangent.federated.local import Work
from fedtangent.theory.deep_linear import FullBatchWork
from fedtangent.theory.deep_linear.theorem import linear_model
from fedtangent.types import Algorithm, Partition, PyTree

Weights = list[np.ndarray]  # W^1 .. W^L, [fan_out, fan_in] each


class Problem(NamedTuple):
    """Inputs of norm 1 as a matrix, and targets ``Y = X W*``."""

    x: np.ndarray  # [n, d] float64
    y: np.ndarray  # [n, C]


def problem(seed: int, num_examples: int, dimension: int, outputs: int, kappa: float, truth: float) -> Problem:
    """The squared singular values of X fall from 1 to 1 / kappa in equal ratios; ``truth`` is the norm of W*.

    Its singular vectors and those of W* are uniform.
    """
    rng, rank = np.random.default_rng([seed, num_examples, dimension]), min(num_examples, dimension)
    left, right = (np.linalg.qr(rng.standard_normal((size, rank)))[0] for size in (num_examples, dimension))
    x = (left * kappa ** (-np.linspace(0, 0.5, rank))) @ right.T
    star = rng.standard_normal((dimension, outputs))
    return Problem(x, x @ star * (truth / np.linalg.norm(star, 2)))


def contiguous(num_examples: int, num_clients: int) -> Partition:
    """So many clients of equal size, in the order of the examples; that of 2 N clients halves each of N."""
    ends = np.linspace(0, num_examples, num_clients + 1).round().astype(np.int32)
    return Partition(np.arange(num_examples, dtype=np.int32), ends)


@functools.cache
def algorithm(sizes: tuple[int, int], width: int, depth: int, rate: float, steps: int, num_clients: int) -> Algorithm:
    """DeepLin's FedAvg on its network in float64; ``sizes`` are of inputs and outputs. One for all seeds."""
    return algorithms.fed_avg(
        models.deep_linear(*sizes, width, depth, jnp.float64), schedule.all_clients(num_clients),
        client_learning_rate=rate, loss="squared_error_sum", work=Work(steps=steps), weighting="uniform",
    )  # fmt: skip


def walk(
    work: FullBatchWork,
    network: tuple[int, int],
    num_rounds: int,
    seed: int,
    every: int = 1,
    look: Callable[[int, Weights], None] = lambda round_, weights: None,
    draw: int = 0,
) -> np.ndarray:
    """A network of this width and depth through the federated loop, as one matrix after each ``every`` rounds.

    [1 + R / every, d, C], NaN once it has diverged; until then ``look`` is shown the server's weights. ``draw`` is
    which of the seed's networks.
    """
    made = algorithm((work.x.shape[1], work.y.shape[1]), *network, work.learning_rate, work.local_steps,
                     work.num_clients)  # fmt: skip
    read, seen = made.params, list[np.ndarray]()
    assert read is not None

    def evaluate(state: PyTree) -> dict[str, float]:
        weights = [np.array(layer[0][0], np.float64).T for layer in read(state)[::2]]
        if diverged := not all(np.isfinite(w).all() for w in weights):
            seen.append(np.full_like(seen[0], np.nan))
        else:
            look(every * len(seen), weights)
            seen.append(linear_model(weights))
        return {"diverged": float(diverged)}

    held = datasets.federated_data(work.x, work.y, work.partition, jnp.float64)
    start = jax.random.fold_in(jax.random.key(seed), draw)
    simulate(made, held, num_rounds, seed, "scan", every, evaluate, init_key=start)
    return np.stack(seen)
