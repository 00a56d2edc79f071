"""Three models: how they come about, their losses, and the loss on the segments between them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import pytrees
from fedtangent.engine.run import simulate
from fedtangent.measures import loss_surface
from fedtangent.types import Algorithm, Array, FederatedData, Key, Model, PyTree

PAIRS = tuple(combinations(range(3), 2))
SEGMENT_POINTS = 41


class Images(NamedTuple):
    """Data of one seed."""

    held: FederatedData  # the whole training set
    x_test: Array


class Triple(NamedTuple):
    """Three models, and what lies between them."""

    params: list[PyTree]
    losses: np.ndarray  # [3] at the models
    gradients: np.ndarray  # [3] norm of the loss's gradient
    at_mean: float  # loss at the mean of the three weights
    segments: np.ndarray  # [3, q] loss along each of PAIRS
    distances: np.ndarray  # [3] between the weights of each pair
    disagreement: np.ndarray  # [3] share of test examples that a pair classifies differently

    @property
    def barriers(self) -> np.ndarray:
        """Of each pair, [3]."""
        return np.array([loss_surface.barrier(values) for values in self.segments])


def from_one_start(algorithm: Algorithm) -> Algorithm:
    """The same algorithm with every model at the initial weights of the first."""

    def init(key: Key | int, num_clients: int, init_key: Key | None = None) -> PyTree:
        state = algorithm.init(key, num_clients, init_key)
        first = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape).copy(), state.server)
        return state._replace(server=first)

    return algorithm._replace(init=init, name=f"{algorithm.name}, one start")


def train(algorithm: Algorithm, held: FederatedData, num_rounds: int, seed: int) -> dict[int, PyTree]:
    """Weights of all models, [K, ...], before training, and after a half, three quarters and all of the rounds."""
    every = num_rounds // 4
    seen = simulate(
        algorithm, held, num_rounds, seed=seed, mapping="scan", evaluate_every=every,
        evaluate=lambda state: {"params": jax.tree.map(np.array, state.server.params)},
    ).history.evaluations  # fmt: skip
    return {e.round: e.metrics["params"] for e in seen if e.round != every}


def measurer(model: Model, loss: loss_surface.Loss) -> Callable[[list[PyTree], Images], Triple]:
    """``(three models, data) -> Triple``, compiled once."""
    both = jax.jit(jax.value_and_grad(loss))
    classify = jax.jit(lambda params, x: jnp.argmax(model.apply(params, x), axis=-1))
    shares = np.linspace(0, 1, SEGMENT_POINTS)

    def measure(params: list[PyTree], images: Images) -> Triple:
        given = images.held.x, images.held.y
        at = [both(p, *given) for p in params]
        mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *params)
        classes = [np.asarray(classify(p, images.x_test)) for p in params]
        return Triple(
            params,
            np.array([float(value) for value, _ in at]),
            np.array([float(pytrees.norm(gradient)) for _, gradient in at]),
            float(both(mean, *given)[0]),
            np.stack([loss_surface.segment(loss, params[i], params[j], shares, given) for i, j in PAIRS]),
            np.array([float(pytrees.norm(pytrees.subtract(params[i], params[j]))) for i, j in PAIRS]),
            np.array([np.mean(classes[i] != classes[j]) for i, j in PAIRS]),
        )

    return measure


def mean_distance(params: PyTree) -> float:
    """Between the weights of the first three models of [K, ...], the mean over pairs."""
    each = [pytrees.take(params, k) for k in range(3)]
    return float(np.mean([float(pytrees.norm(pytrees.subtract(each[i], each[j]))) for i, j in PAIRS]))


def lowest_point(a: np.ndarray, b: np.ndarray, values: np.ndarray, places: np.ndarray, t: Triple) -> str:
    """Whether the models are the lowest points of their plane."""
    row, column = np.unravel_index(np.nanargmin(values), values.shape)
    away = np.linalg.norm(places - np.array([a[column], b[row]]), axis=1)
    near = int(np.argmin(away))
    return (
        f"on the plane of the ensemble the loss is lowest, {values[row, column]:.4f}, at a distance of "
        f"{away[near]:.2f} from model {near + 1}, which has {t.losses[near]:.4f}: no model is a minimum of the plane "
        "if that is lower (without weight decay cross entropy goes on falling as weights grow)"
    )
