"""The problem that NTK-FL's theorems are about: inputs of norm 1, one output, clients of equal size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import data as datasets
from fedtangent.experiments.lab import trials
from fedtangent.models.two_layer import two_layer_relu
from fedtangent.theory.ntk_fl.lemmas import empirical_kernel, expected_kernel
from fedtangent.types import FederatedData, Model, Partition, PyTree

DATASETS = ("digits", "sphere", "fashion_mnist")
SPHERE_DIMENSION = 20
TREND = 1e-9  # of the initial squared residual: below it a measured residual is rounding


class Problem(NamedTuple):
    """N examples on M clients of N / M each, every client with few labels."""

    x: np.ndarray  # [N, d] of norm 1
    y: np.ndarray  # [N] -1 or 1
    partition: Partition

    def federated(self) -> FederatedData:
        """The data on the device, float64."""
        return datasets.federated_data(self.x, self.y[:, None], self.partition, dtype=jnp.float64)


def problem(name: str, data_dir: Path | None, num_examples: int, num_clients: int, seed: int) -> Problem:
    """Draw it: on "sphere" inputs are uniform and labels random, on images 1 is an even class and -1 an odd one.

    Clients hold the examples in the order of their class (of chance, on the sphere), N / M each.

    Raises:
        ValueError: sizes that do not fit, what the data set's loader refuses.
    """
    if num_examples % num_clients:
        raise ValueError(f"num_examples: got {num_examples}, must be a multiple of num_clients, {num_clients}")
    rng = np.random.default_rng(seed)
    if name == "sphere":
        x, classes = rng.standard_normal((num_examples, SPHERE_DIMENSION)), rng.integers(0, 2, num_examples)
    else:
        loaded = datasets.load(name, data_dir=data_dir, seed=seed)
        if num_examples > len(loaded.x_train):
            raise ValueError(f"num_examples: got {num_examples}, must be at most {len(loaded.x_train)}")
        kept = rng.choice(len(loaded.x_train), num_examples, replace=False)
        x, classes = np.asarray(loaded.x_train[kept], np.float64).reshape(num_examples, -1), loaded.y_train[kept]
        x = x - min(float(x.min()), 0.0)  # pixels from 0: images differ least that way, which is the harder case
    order = np.argsort(classes, kind="stable").astype(np.int32)
    offsets = np.arange(0, num_examples + 1, num_examples // num_clients, dtype=np.int32)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    return Problem(x / norms, np.where(np.asarray(classes) % 2 == 0, 1.0, -1.0), Partition(order, offsets))


def problems(
    name: str, data_dir: Path | None, settings: Any, seeds: tuple[int, ...], say: Callable[[str], None]
) -> Iterator[tuple[int, Problem]]:
    """Each seed with its problem; says how long was spent on it once the next is asked for."""
    for seed in seeds:
        start = time.perf_counter()
        yield seed, problem(name, data_dir, settings.num_examples, settings.num_clients, seed)
        say(f"seed {seed}: {time.perf_counter() - start:.0f} s")


def check(settings: Any, whole: tuple[str, ...]) -> None:
    """What both theorems' experiments ask of their settings; raises ``ValueError``."""
    trials.check_numbers(settings, whole)
    trials.check_different(settings, ("widths",))
    if settings.num_examples % settings.num_clients:
        raise ValueError(
            f"num_examples: got {settings.num_examples}, must be a multiple of num_clients, {settings.num_clients}"
        )
    factors = settings.step_factors
    if not factors or any(not 0 < f < 1 for f in factors) or len(set(factors)) < len(factors):
        raise ValueError(f"step_factors: got {factors}, must be different numbers between 0 and 1")
    if not 0 < settings.delta < 1:
        raise ValueError(f"delta: got {settings.delta}, must lie between 0 and 1")


def worst(measured: np.ndarray, bound: np.ndarray, floor: float) -> float:
    """Largest ratio of a squared residual to its bound after the start, both relative to the start."""
    with np.errstate(divide="ignore", over="ignore"):
        ratio = measured[1:] / bound[1:]
    return float(np.max(np.where(measured[1:] > floor, ratio, 0.0)))


def first_above(measured: np.ndarray, bound: np.ndarray, floor: float) -> int | None:
    """The first place after the start where the bound is broken, None if nowhere."""
    above = (measured > bound) & (measured > floor)
    above[0] = False
    return int(np.argmax(above)) if above.any() else None


def key(seed: int, width: int) -> jax.Array:
    """The key that a run's network is drawn from: the same for every method."""
    return jax.random.fold_in(jax.random.key(seed + 1), width)


def start(model: Model, run_key: jax.Array) -> PyTree:
    """The weights that a run of one model begins with, given ``run_key`` as its ``init_key``."""
    return model.init(jax.random.split(run_key, 1)[0])


class Start(NamedTuple):
    """The network of one seed and width, as every run of it begins."""

    model: Model
    params: PyTree
    kernel: np.ndarray  # [N, N] empirical
    residual: np.ndarray  # [N]


def network(task: Problem, width: int, seed: int) -> Start:
    """The network of ``seed`` at ``width`` in float64. Needs 64-bit types."""
    model = two_layer_relu(task.x.shape[1], width, seed=seed, dtype=jnp.float64)
    params = start(model, key(seed, width))
    residual = np.asarray(model.apply(params, jnp.asarray(task.x)))[:, 0] - task.y
    return Start(model, params, empirical_kernel(task.x, params["v"]), residual)


def step_size(task: Problem, factor: float) -> float:
    """``factor`` of the largest stable step of the limiting kernel, 2 N / lambda_max."""
    return factor * 2 * len(task.x) / float(np.linalg.eigvalsh(expected_kernel(task.x))[-1])
