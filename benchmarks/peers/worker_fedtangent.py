"""One measurement of fedtangent: ``fedtangent._src.engine.run`` on FedAvg with uniform sampling."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import workloads
from workloads import CLASSES, EMBEDDING, EVALUATION_BATCH, HIDDEN, LOGISTIC_INPUTS, SIDE, VOCABULARY, WORKLOADS

import fedtangent as ft
from fedtangent._src.federated.algorithms.common import Averaging

SPREAD_SEEDS = 3


def build_model(name: str) -> Any:
    """fedtangent's model of workload ``name``."""
    if name in ("logistic", "mlp"):
        inputs, widths = (LOGISTIC_INPUTS, ()) if name == "logistic" else (SIDE * SIDE, (100,))
        return ft.models.mlp(inputs, CLASSES, widths, parameterization="standard", b_std=0.0)
    if name == "cnn":
        return ft.models.cnn((SIDE, SIDE, 1), CLASSES, filters=(32, 64), hidden=(128,))
    return ft.models.lstm(VOCABULARY, embedding=EMBEDDING, units=HIDDEN, layers=2)


def _gates(array: np.ndarray) -> np.ndarray:
    """Input, forget, cell, output along the last axis become input, forget, output, cell."""
    i, f, g, o = np.split(array, 4, axis=-1)
    return np.concatenate([i, f, o, g], axis=-1)


def starting_at(name: str, model: Any, start: dict[str, np.ndarray]) -> Any:
    """The model with the common initial parameters, array after array in the order of its own."""
    if name == "lstm":
        layers = [[_gates(start[f"lstm{i}.{part}"]) for part in ("bias", "input", "recurrent")] for i in range(2)]
        ordered = [start["embedding"], *layers[0], *layers[1], start["dense0.bias"], start["dense0.kernel"]]
    elif name == "cnn":
        ordered = [
            start[f"{layer}.{part}"] for layer in ("conv0", "conv1", "dense0", "dense1") for part in ("bias", "kernel")
        ]
    else:
        ordered = list(start.values())
    leaves, tree = jax.tree.flatten(jax.eval_shape(model.init, jax.random.key(0)))
    if [leaf.size for leaf in leaves] != [array.size for array in ordered]:
        raise ValueError(f"model: {model.name} has parameters {[leaf.shape for leaf in leaves]}, not {name}'s")
    arrays = [array.reshape(leaf.shape) for array, leaf in zip(ordered, leaves, strict=True)]
    return model._replace(init=lambda key: jax.tree.unflatten(tree, [jnp.asarray(array) for array in arrays]))


def loss_of(algorithm: Any, state: Any, problem: workloads.Problem) -> float:
    """Mean cross entropy over all the data."""
    total = 0.0
    for at in range(0, len(problem.x), EVALUATION_BATCH):
        rows = slice(at, at + EVALUATION_BATCH)
        outputs = algorithm.predict(state, jnp.asarray(problem.x[rows])).mean
        total += float(optax.softmax_cross_entropy_with_integer_labels(outputs, jnp.asarray(problem.y[rows])).sum())
    return total / len(problem.x)


def measure(arguments: Any) -> dict[str, Any]:
    """Compile and train the compared rounds; then time blocks of as many rounds, compiled already."""
    workload = WORKLOADS[arguments.workload]
    problem = workloads.read(arguments.data)
    algorithm = ft.fed_avg(
        starting_at(workload.name, build_model(workload.name), problem.initial),
        ft.schedules.uniform_sampling(workload.num_clients, workload.clients_per_round),
        client_learning_rate=workload.learning_rate,
        work=ft.Work(epochs=1, batch_size=workload.batch_size),
        loss="cross_entropy",
        averaging=Averaging(weighting="examples"),
    )
    size = workload.examples_per_client
    parts = ft.types.Partition(
        np.arange(len(problem.y), dtype=np.int32),
        np.arange(0, len(problem.y) + 1, size, dtype=np.int32),
    )
    data = ft.data.federated_data(problem.x, problem.y, parts, dtype=problem.x.dtype)
    block = workload.warmup_rounds + arguments.rounds

    def simulate(blocks: int, seed: int = arguments.seed) -> tuple[Any, float]:
        """A run, and the seconds from its start until its last round is done."""
        clock: list[float] = []
        run = ft.simulate(
            algorithm,
            data,
            num_rounds=blocks * block,
            seed=seed,
            evaluation=ft.Evaluation(report=lambda _: clock.append(time.perf_counter())),
            devices=ft.Devices(arguments.mapping),
        )
        return run, clock[-1] - clock[0]

    before = loss_of(algorithm, algorithm.init(arguments.seed, workload.num_clients), problem)
    run, _ = simulate(1)
    after = loss_of(algorithm, run.state, problem)
    blocks = 1
    run, seconds = simulate(blocks)
    if seconds < arguments.min_seconds:
        blocks = int(np.ceil(arguments.min_seconds / seconds))
        run, seconds = simulate(blocks)
    steps = int(np.sum(run.history.rounds["steps"]))
    versions = {"fedtangent": ft.__version__, "jax": version("jax"), "jaxlib": version("jaxlib")}
    found = workloads.result(workload, blocks * block, seconds, (before, after), steps, versions)
    if arguments.spread:
        seeds = range(arguments.seed + 1, arguments.seed + 1 + SPREAD_SEEDS)
        found["losses_of_other_seeds"] = [loss_of(algorithm, simulate(1, seed)[0].state, problem) for seed in seeds]
    return found


if __name__ == "__main__":
    workloads.emit(measure(workloads.worker_arguments()))
