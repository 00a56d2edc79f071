"""A few rounds of NTK-FL on the problem of its theorems, with what Theorem 1 promises of each."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from fedtangent.engine.run import simulate
from fedtangent.experiments.lab.two_layer import Problem
from fedtangent.federated import algorithms, schedule
from fedtangent.theory.ntk_fl.lemmas import empirical_kernel
from fedtangent.types import Model, PyTree


class Rounds(NamedTuple):
    """Per round, [R] each, but for ``candidates`` [R, Psi]."""

    time: tuple[int, ...]  # t(k)
    before: tuple[float, ...]  # squared residuals
    after: tuple[float, ...]
    candidates: np.ndarray  # squared residuals at every candidate time
    lambda_min: tuple[float, ...]  # of the kernel H at the start of the round
    bound: tuple[float, ...]  # (1 - eta lambda_min / (2 N))^t(k)
    uplink_bytes: int


def several_rounds(
    task: Problem, model: Model, init_key: jax.Array, learning_rate: float, times: tuple[int, ...], num: int, seed: int
) -> Rounds:
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
    return Rounds(chosen, before, after, candidates, least, bound, run.history.evaluations[-1].uplink_bytes)
