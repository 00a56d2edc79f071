"""The problem that NTK-FL's theorems are about: inputs of norm 1, one output, clients of equal size."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src.comparison.theorems.ntk_fl.evolution import Start, TwoLayerProblem, initial, ntk_fl_run
from fedtangent._src.experiments.lab import NOT_OWED, Row, grouped
from fedtangent._src.experiments.lab.runner import Study
from fedtangent._src.theory.ntk_fl.convergence import NtkConstants
from fedtangent._src.theory.ntk_fl.lemmas import empirical_kernel
from fedtangent.types import Partition, Verdict

DATASETS = ("digits", "sphere", "fashion_mnist")
SPHERE_DIMENSION = 20
TREND = 1e-9  # share of the initial squared residual below which a measured one is rounding


def _problem(name: str, data_dir: Path | None, num_examples: int, num_clients: int, seed: int) -> TwoLayerProblem:
    """Draws a problem: "sphere" has uniform inputs and random labels; of images even classes are 1 and odd ones -1."""
    # Examples are sorted by class, and each client holds N / M consecutive ones.
    if num_examples % num_clients:
        raise ValueError(f"num_examples: got {num_examples}, must be a multiple of num_clients, {num_clients}")
    rng = np.random.default_rng(seed)
    if name == "sphere":
        x, classes = rng.standard_normal((num_examples, SPHERE_DIMENSION)), rng.integers(0, 2, num_examples)
    else:
        loaded = ft.data.load(name, data_dir=data_dir, seed=seed, flatten=True)
        if num_examples > len(loaded.x_train):
            raise ValueError(f"num_examples: got {num_examples}, must be at most {len(loaded.x_train)}")
        rows = rng.choice(len(loaded.x_train), num_examples, replace=False)
        x, classes = np.asarray(loaded.x_train[rows], np.float64).reshape(num_examples, -1), loaded.y_train[rows]
        x = x - min(float(x.min()), 0.0)  # pixels from 0: images differ least that way, which is the harder case
    order = np.argsort(classes, kind="stable").astype(np.int32)
    offsets = np.arange(0, num_examples + 1, num_examples // num_clients, dtype=np.int32)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    return TwoLayerProblem(x / norms, np.where(np.asarray(classes) % 2 == 0, 1.0, -1.0), Partition(order, offsets))


def of_study(study: Study, seed: int) -> TwoLayerProblem:
    """Draws the problem of one seed."""
    settings = study.settings
    return _problem(study.dataset, study.data_dir, settings.num_examples, settings.num_clients, seed)


def check(study: Study) -> None:
    """Draws the first seed's problem; raises ``ValueError``."""
    of_study(study, study.seeds[0])


def times(last: int) -> tuple[int, ...]:
    """Returns ten candidate times of a round, evenly spaced up to ``last``."""
    return tuple(int(t) for t in np.unique(np.linspace(last / 10, last, 10).round()))


def worst(measured: np.ndarray, bound: np.ndarray, floor: float) -> float:
    """Computes the largest ratio of a squared residual to its bound after the start, for residuals above ``floor``.

    Args:
        measured: Squared residuals by step.
        bound: Their bound by step.
        floor: Residual below which a measured one is rounding.
    """
    with np.errstate(divide="ignore", over="ignore"):
        ratio = measured[1:] / bound[1:]
    return float(np.max(np.where(measured[1:] > floor, ratio, 0.0)))


def verdicts(theorem: str, rows: list[Row], *keys: str, worst: str = "worst") -> tuple[Verdict, ...]:
    """Checks for each value of ``keys`` that all runs stay below the bound; control: no run does with lambda_max.

    Args:
        theorem: Name of the theorem.
        rows: Rows of all runs.
        *keys: Entries of a row that name its sizes.
        worst: Entry of a row with the largest ratio of a residual to its bound.
    """
    results = []
    for at, group in grouped(rows, *keys).items():
        ratio, wrong = max(row[worst] for row in group), min(row["control_worst"] for row in group)
        sizes = ", ".join(f"{key.replace('_', ' ')} {value:g}" for key, value in zip(keys, at, strict=True))
        right = f"{ratio:.3g}", f"<= 1 with each of {len(group)} seeds", ratio <= 1
        control = "lambda_max instead of lambda", f"{wrong:.2g}", wrong > 1
        results.append(Verdict.of(theorem, "squared residual / bound, largest after the start", sizes, right, control))
    return tuple(results)


def remarks(c: NtkConstants) -> tuple[str, ...]:
    """Returns remarks on the constants behind the rates, and on a bound whose assumptions fail."""
    return (
        f"lambda {c.lambda_min:.3g}, lambda_max {c.lambda_max:.3g} of the limiting kernel (13); steps are fractions of "
        f"2 N / lambda_max; the proof of Theorem 1 asks for at most {c.lambda_min / 2 / c.num_examples:.2g}",
        NOT_OWED,
    )


def first_above(measured: np.ndarray, bound: np.ndarray, floor: float) -> int | None:
    """Finds the first index after the start at which the bound is broken; None if it holds throughout.

    Args:
        measured: Squared residuals by step.
        bound: Their bound by step.
        floor: Residual below which a measured one is rounding.
    """
    above = (measured > bound) & (measured > floor)
    above[0] = False
    return int(np.argmax(above)) if above.any() else None


def network(task: TwoLayerProblem, width: int, seed: int) -> Start:
    """Draws the network of ``seed`` at ``width`` in float64. Needs 64-bit types.

    Args:
        task: The examples.
        width: Width n.
        seed: Seed of the weights.
    """
    model = ft.models.two_layer_relu(task.x.shape[1], width, seed=seed, dtype=jnp.float64)
    key = jax.random.fold_in(jax.random.key(seed + 1), width)
    params = initial(model, key)
    residual = np.asarray(model.apply(params, jnp.asarray(task.x)))[:, 0] - task.y
    return Start(model, key, params, empirical_kernel(task.x, params["v"]), residual)


def step_size(task: TwoLayerProblem, factor: float) -> float:
    """Computes ``factor`` times the largest stable step of the limiting kernel, 2 N / lambda_max.

    Args:
        task: The examples.
        factor: Fraction of the largest stable step.
    """
    return factor * 2 * len(task.x) / float(np.linalg.eigvalsh(ft.theory.expected_kernel(task.x))[-1])


class NtkRounds(NamedTuple):
    """Results of R rounds of NTK-FL."""

    time: tuple[int, ...]  # t(k)
    before: tuple[float, ...]  # squared residual before the round
    after: tuple[float, ...]  # and after it
    candidates: np.ndarray  # squared residuals at every candidate time, [R, Psi]
    lambda_min: tuple[float, ...]  # of the kernel H at the start of the round
    bound: tuple[float, ...]  # (1 - eta lambda_min / (2 N))^t(k)
    uplink_bytes: int


def several_rounds(
    task: TwoLayerProblem, start: Start, learning_rate: float, times: tuple[int, ...], num: int
) -> NtkRounds:
    """Simulates NTK-FL with every client in every round, t(k) by the training loss (11a). Needs 64-bit types.

    Args:
        task: The examples and clients.
        start: The network at its start.
        learning_rate: Step eta.
        times: Candidate times of a round.
        num: Number R of rounds.
    """
    size, history = len(task.x), ntk_fl_run(task, start, learning_rate, ft.Evolution(times, kernel="averaged"), num)
    starts = [e.metrics["params"]["v"] for e in history.evaluations[:num]]
    least = tuple(float(np.linalg.eigvalsh(empirical_kernel(task.x, v))[0]) for v in starts)
    chosen = tuple(int(t) for t in np.asarray(history.rounds["time"]).reshape(num))
    candidates = 2 * size * np.asarray(history.rounds["losses"]).reshape(num, -1)
    bound = tuple(max(1 - learning_rate * v / (2 * size), 0.0) ** t for v, t in zip(least, chosen, strict=True))
    after = tuple(float(v) for v in candidates.min(axis=1))
    before = tuple(float(2 * size * v) for v in np.asarray(history.rounds["loss_before"]).reshape(num))
    return NtkRounds(chosen, before, after, candidates, least, bound, history.evaluations[-1].uplink_bytes)
