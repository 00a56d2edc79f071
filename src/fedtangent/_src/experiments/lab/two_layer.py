"""The regression problem of NTK-FL's theorems: inputs of norm 1, one output, clients with equally many examples."""

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
    """Draws examples and clients for a two-layer network; every input is scaled to norm 1.

    Args:
        name: "sphere" for uniform inputs on the sphere with random labels; or a data set of images, whose even classes
            have label 1 and odd classes -1. Pixels are shifted to be at least 0.
        data_dir: Folder of the data set.
        num_examples: Number N of all examples, a multiple of ``num_clients``. From a data set they are drawn without
            replacement from its training examples, and cannot be more than these.
        num_clients: Number M of clients. Each gets N / M examples that are consecutive in the order of classes.
        seed: Seed of the draw.
    """
    if num_examples % num_clients:
        raise ValueError(f"num_examples: got {num_examples}, must be a multiple of num_clients, {num_clients}")
    rng = np.random.default_rng(seed)
    if name == "sphere":
        x, classes = rng.standard_normal((num_examples, SPHERE_DIMENSION)), rng.integers(0, 2, num_examples)
    else:
        loaded = ft.data.load(name, data_dir=data_dir, seed=seed, flatten=True)
        if num_examples > len(loaded.x_train):
            raise ValueError(
                f"num_examples: got {num_examples}, must be at most {len(loaded.x_train)}, the size of {name}"
            )
        rows = rng.choice(len(loaded.x_train), num_examples, replace=False)
        x, classes = np.asarray(loaded.x_train[rows], np.float64).reshape(num_examples, -1), loaded.y_train[rows]
        x = x - min(float(x.min()), 0.0)  # pixels from 0: images differ least that way, which is the harder case
    order = np.argsort(classes, kind="stable").astype(np.int32)
    offsets = np.arange(0, num_examples + 1, num_examples // num_clients, dtype=np.int32)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    return TwoLayerProblem(x / norms, np.where(np.asarray(classes) % 2 == 0, 1.0, -1.0), Partition(order, offsets))


def of_study(study: Study, seed: int) -> TwoLayerProblem:
    """Draws the examples and clients of one seed for a two-layer network, with the data set and sizes of the study.

    Raises ``ValueError`` if the examples are no multiple of the clients, or more than the data set has.
    """
    settings = study.settings
    return _problem(study.dataset, study.data_dir, settings.num_examples, settings.num_clients, seed)


def check(study: Study) -> None:
    """Raises ``ValueError`` if the first seed's examples and clients cannot be drawn with the study's settings."""
    of_study(study, study.seeds[0])


def times(last: int) -> tuple[int, ...]:
    """Returns at most ten candidate numbers of gradient steps for a round of NTK-FL, evenly spaced up to ``last``."""
    return tuple(int(t) for t in np.unique(np.linspace(last / 10, last, 10).round()))


def worst(measured: np.ndarray, bound: np.ndarray, floor: float) -> float:
    """Computes the largest ratio of a squared residual to its bound, over all steps but the first.

    Residuals up to ``floor`` do not count; 0 if none counts.

    Args:
        measured: Squared residuals by step.
        bound: Their bound by step.
        floor: Squared residual up to which only rounding is measured.
    """
    with np.errstate(divide="ignore", over="ignore"):
        ratio = measured[1:] / bound[1:]
    return float(np.max(np.where(measured[1:] > floor, ratio, 0.0)))


def verdicts(theorem: str, rows: list[Row], *keys: str, worst: str = "worst") -> tuple[Verdict, ...]:
    """Judges whether squared residuals stay below a theorem's bound in all runs; returns a verdict for each size.

    The control is the bound with the largest eigenvalue lambda_max in place of the smallest; every run has to break it.

    Args:
        theorem: Name of the theorem.
        rows: Rows of all runs; their "control_worst" is the largest ratio of a residual to the control.
        *keys: Entries of a row that name its sizes, such as "width".
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
    """Returns remarks for the result, from the constants ``c`` of a theorem of NTK-FL.

    They give the kernel's eigenvalues behind the rates, and explain a broken bound where the assumptions fail.
    """
    return (
        f"lambda {c.lambda_min:.3g}, lambda_max {c.lambda_max:.3g} of the limiting kernel (13); steps are fractions of "
        f"2 N / lambda_max; the proof of Theorem 1 asks for at most {c.lambda_min / 2 / c.num_examples:.2g}",
        NOT_OWED,
    )


def first_above(measured: np.ndarray, bound: np.ndarray, floor: float) -> int | None:
    """Finds the first step after the start at which a squared residual is above its bound; None without one.

    Args:
        measured: Squared residuals by step.
        bound: Bound of each squared residual.
        floor: Squared residual below which only rounding is measured, and which does not count.
    """
    above = (measured > bound) & (measured > floor)
    above[0] = False
    return int(np.argmax(above)) if above.any() else None


def network(task: TwoLayerProblem, width: int, seed: int) -> Start:
    """Draws a two-layer ReLU network and computes its kernel and residual on the examples. Needs 64-bit types.

    Args:
        task: The examples.
        width: Number of hidden units.
        seed: Seed of the weights.
    """
    model = ft.models.two_layer_relu(task.x.shape[1], width, seed=seed, dtype=jnp.float64)
    key = jax.random.fold_in(jax.random.key(seed + 1), width)
    params = initial(model, key)
    residual = np.asarray(model.apply(params, jnp.asarray(task.x)))[:, 0] - task.y
    return Start(model, key, params, empirical_kernel(task.x, params["v"]), residual)


def step_size(task: TwoLayerProblem, factor: float) -> float:
    """Computes ``factor`` times the largest stable step of gradient descent on a network of infinite width.

    Args:
        task: The N examples.
        factor: Share of that step, which is 2 N / lambda_max with the kernel's largest eigenvalue lambda_max.
    """
    return factor * 2 * len(task.x) / float(np.linalg.eigvalsh(ft.theory.expected_kernel(task.x))[-1])


class NtkRounds(NamedTuple):
    """Results of R rounds of NTK-FL, one entry for each round.

    Attributes:
        time: Chosen number t(k) of gradient steps.
        before, after: Squared residual before and after the round.
        candidates: Squared residual at each of the candidate numbers of steps, [R, number of candidates].
        lambda_min: Least eigenvalue of the empirical kernel at the start of the round.
        bound: Factor by which NTK-FL's theory lets the squared residual shrink, ``(1 - eta lambda_min / (2 N))^t(k)``.
        uplink_bytes: Bytes that all clients sent in all rounds.
    """

    time: tuple[int, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    candidates: np.ndarray
    lambda_min: tuple[float, ...]
    bound: tuple[float, ...]
    uplink_bytes: int


def several_rounds(
    task: TwoLayerProblem, start: Start, learning_rate: float, times: tuple[int, ...], num: int
) -> NtkRounds:
    """Simulates NTK-FL on a two-layer network with every client in every round. Needs 64-bit types.

    In each round the server takes the number of steps with the least training loss (eq. (11a) of NTK-FL).

    Args:
        task: The examples and clients.
        start: The initial network.
        learning_rate: Step eta.
        times: Numbers of gradient steps from which the server chooses.
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
