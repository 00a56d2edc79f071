"""The problem that NTK-FL's theorems are about: inputs of norm 1, one output, clients of equal size."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import data as datasets
from fedtangent.engine.run import simulate
from fedtangent.experiments.lab.runner import Study
from fedtangent.federated import algorithms, schedule
from fedtangent.models.two_layer import two_layer_relu
from fedtangent.theory.ntk_fl.lemmas import empirical_kernel, expected_kernel
from fedtangent.types import FederatedData, Model, Partition, PyTree

DATASETS = ("digits", "sphere", "fashion_mnist")
SPHERE_DIMENSION = 20
TREND = 1e-9  # of the initial squared residual: below it a measured residual is rounding


class TwoLayerProblem(NamedTuple):
    """N examples on M clients of N / M each, every client with few labels."""

    x: np.ndarray  # [N, d] of norm 1
    y: np.ndarray  # [N] -1 or 1
    partition: Partition

    def federated(self) -> FederatedData:
        """The data on the device, float64."""
        return datasets.federated_data(self.x, self.y[:, None], self.partition, dtype=jnp.float64)


def problem(name: str, data_dir: Path | None, num_examples: int, num_clients: int, seed: int) -> TwoLayerProblem:
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
        loaded = datasets.load(name, data_dir=data_dir, seed=seed, flatten=True)
        if num_examples > len(loaded.x_train):
            raise ValueError(f"num_examples: got {num_examples}, must be at most {len(loaded.x_train)}")
        kept = rng.choice(len(loaded.x_train), num_examples, replace=False)
        x, classes = np.asarray(loaded.x_train[kept], np.float64).reshape(num_examples, -1), loaded.y_train[kept]
        x = x - min(float(x.min()), 0.0)  # pixels from 0: images differ least that way, which is the harder case
    order = np.argsort(classes, kind="stable").astype(np.int32)
    offsets = np.arange(0, num_examples + 1, num_examples // num_clients, dtype=np.int32)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    return TwoLayerProblem(x / norms, np.where(np.asarray(classes) % 2 == 0, 1.0, -1.0), Partition(order, offsets))


def of_study(study: Study, seed: int) -> TwoLayerProblem:
    """The problem of one seed."""
    s = study.settings
    return problem(study.dataset, study.data_dir, s.num_examples, s.num_clients, seed)


def check(study: Study) -> None:
    """Build the first seed's problem; raises ``ValueError``."""
    of_study(study, study.seeds[0])


def times(last: int) -> tuple[int, ...]:
    """Ten candidate times of a round, the last ``last``."""
    return tuple(int(t) for t in np.unique(np.linspace(last / 10, last, 10).round()))


def worst(measured: np.ndarray, bound: np.ndarray, floor: float) -> float:
    """Largest ratio of a squared residual to its bound after the start, both relative to the start."""
    with np.errstate(divide="ignore", over="ignore"):
        ratio = measured[1:] / bound[1:]
    return float(np.max(np.where(measured[1:] > floor, ratio, 0.0)))


def control_kept(rows: list[dict[str, Any]], constants: Any) -> list[str]:
    """Why the runs do not count, where the rate with lambda_max for lambda was not broken by all of them."""
    kept = sum(row["control_worst"] <= 1 for row in rows)
    ratio = constants.lambda_max / constants.lambda_min if constants.lambda_min > 0 else np.inf
    broken = (
        f"the control's rate was not broken in {kept} of {len(rows)} runs: it takes many steps, and lambda_max above 4 "
        f"lambda (here {ratio:.3g} times)"
    )
    return [broken] if kept else []


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


def network(task: TwoLayerProblem, width: int, seed: int) -> Start:
    """The network of ``seed`` at ``width`` in float64. Needs 64-bit types."""
    model = two_layer_relu(task.x.shape[1], width, seed=seed, dtype=jnp.float64)
    params = start(model, key(seed, width))
    residual = np.asarray(model.apply(params, jnp.asarray(task.x)))[:, 0] - task.y
    return Start(model, params, empirical_kernel(task.x, params["v"]), residual)


def step_size(task: TwoLayerProblem, factor: float) -> float:
    """``factor`` of the largest stable step of the limiting kernel, 2 N / lambda_max."""
    return factor * 2 * len(task.x) / float(np.linalg.eigvalsh(expected_kernel(task.x))[-1])


class NtkRounds(NamedTuple):
    """Per round, [R] each, but for ``candidates`` [R, Psi]."""

    time: tuple[int, ...]  # t(k)
    before: tuple[float, ...]  # squared residuals
    after: tuple[float, ...]
    candidates: np.ndarray  # squared residuals at every candidate time
    lambda_min: tuple[float, ...]  # of the kernel H at the start of the round
    bound: tuple[float, ...]  # (1 - eta lambda_min / (2 N))^t(k)
    uplink_bytes: int


def several_rounds(
    task: TwoLayerProblem,
    model: Model,
    init_key: jax.Array,
    learning_rate: float,
    times: tuple[int, ...],
    num: int,
    seed: int,
) -> NtkRounds:
    """NTK-FL with every client in every round, t(k) by the training loss (11a). Needs 64-bit types."""
    algorithm = algorithms.ntk_fl(
        model, schedule.all_clients(task.partition.num_clients), learning_rate=learning_rate, times=times,
        kernel="averaged",
    )  # fmt: skip
    read = algorithm.params

    def look(state: PyTree) -> dict[str, np.ndarray]:
        return {"v": np.array(read(state)["v"][0])}  # type: ignore[misc]

    run = simulate(algorithm, task.federated(), num, seed, evaluate_every=1, evaluate=look, init_key=init_key)
    size = len(task.x)
    starts = [e.metrics["v"] for e in run.history.evaluations][:num]
    least = tuple(float(np.linalg.eigvalsh(empirical_kernel(task.x, v))[0]) for v in starts)
    infos = {name: np.asarray(run.history.rounds[name]) for name in ("time", "losses", "loss_before")}
    chosen = tuple(int(t) for t in infos["time"].reshape(num))
    candidates = 2 * size * infos["losses"].reshape(num, -1)
    bound = tuple(max(1 - learning_rate * v / (2 * size), 0.0) ** t for v, t in zip(least, chosen, strict=True))
    after = tuple(float(v) for v in candidates.min(axis=1))
    before = tuple(float(2 * size * v) for v in infos["loss_before"].reshape(num))
    return NtkRounds(chosen, before, after, candidates, least, bound, run.history.evaluations[-1].uplink_bytes)
