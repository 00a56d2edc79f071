"""IFCA on clustered data in the kernel regime: do the kernel's features choose the models that wide networks choose?

Two clusters of clients have inputs of one law and targets of two functions. Each client trains that of two models which
fits it better. The schedule depends on the models, so no closed form follows it; the run on the features of the kernel
(rung 2 of theory) starts at the networks' initial functions and makes its own choices. With the cohorts that it
recorded, the flow (rung 3) gives its functions. Controls: choices at random, features of a kernel whose rows belong to
other examples, and the flow of random choices.

    python benchmarks/clusters.py --output results/bench
    python benchmarks/clusters.py --widths 64 256 --seeds 2
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import fedtangent as ft
from fedtangent._src.kernels.features import KernelFeatures, feature_model
from fedtangent._src.output.tables import TextTable, console
from fedtangent.types import Algorithm, Model, Run

CLIENTS, EXAMPLES, POINTS, INPUTS, MODELS = 10, 8, 60, 4, 2  # examples of a client
ROUNDS, STEPS, RATE = 40, 4, 0.1


class Problem(NamedTuple):
    """Clustered clients: client i belongs to cluster i mod 2, and ``truth`` has both clusters' targets at x_test."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    truth: np.ndarray  # [2, points, 1]
    clients: ft.types.Partition


class Row(NamedTuple):
    """One width and seed."""

    width: int
    seed: int
    agreement: float  # share of the choices (round, client) that networks and features have in common
    at_random: float  # the same share for choices at random
    wrong_kernel: float  # .. for features of a kernel whose rows belong to other examples
    distance: float  # of functions at the test points after the last round, relative to their movement
    is_sorted: int  # 1 if in the last round every client trains the model of its cluster
    own_error: float  # of the models at the test points of their cluster, mean squared, by the features
    other_error: float  # .. of the other cluster
    flow: float  # largest difference of flow and features, relative to their movement
    random_flow: float  # the same for the flow of random choices


def problem_of(seed: int) -> Problem:
    """Inputs on a sphere; the targets of one cluster are a sine of one direction, and of the other its negative."""
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(CLIENTS * EXAMPLES + POINTS, INPUTS))
    points *= np.sqrt(INPUTS) / np.linalg.norm(points, axis=1, keepdims=True)
    wave = np.sin(1.5 * points @ np.linalg.qr(rng.normal(size=(INPUTS, 1)))[0])
    targets = np.stack([wave, -wave])  # [2, points, 1]
    n = CLIENTS * EXAMPLES
    clients = ft.partition.of([np.arange(i, n, CLIENTS) for i in range(CLIENTS)])
    cluster = np.arange(n) % CLIENTS % 2
    return Problem(points[:n], targets[cluster, np.arange(n)], points[n:], targets[:, n:], clients)


@functools.cache
def network(width: int) -> Model:
    """The network of a width, one object for all seeds, so that they share compiled programs."""
    return ft.models.mlp(INPUTS, 1, (width,), "erf", dtype="float64")


@functools.cache
def of_size(size: int) -> Model:
    """The linear model of so many features."""
    return feature_model(size, np.eye(1), False)


@functools.cache
def ifca(model: Model) -> Algorithm:
    """IFCA with all clients in every round."""
    schedule, work = ft.schedules.best_fitting(CLIENTS, MODELS), ft.Work(steps=STEPS, batch_size=None)
    return ft.fed_avg(model, schedule, RATE, work=work, averaging=ft.Averaging(weighting="uniform"))


def run_of(algorithm: Algorithm, x: np.ndarray, problem: Problem, start: object) -> Run:
    """A run in float64, on inputs or features ``x`` of the training examples."""
    data = ft.data.federated_data(x, problem.y, problem.clients, dtype=jnp.float64)
    return ft.simulate(
        algorithm, data, num_rounds=ROUNDS, seed=0, start=start, evaluation=ft.Evaluation(progress=False)
    )


def row_of(width: int, seed: int) -> Row:
    """Networks of one width and seed beside the features of their kernel."""
    problem, model = problem_of(seed), network(width)
    n, both = len(problem.x), np.concatenate([problem.x, problem.x_test])
    assert model.kernel is not None
    kernels = ft.kernels.kernel_blocks(model.kernel, problem.x, problem.x_test)
    features, algorithm = ft.models.kernel_features(kernels), ifca(model)
    of_features = ifca(of_size(features.train.shape[1]))
    networks = run_of(algorithm, problem.x, problem, jax.random.key(seed))

    def on_features(of: KernelFeatures, f0: np.ndarray) -> tuple[np.ndarray, np.ndarray, Run]:
        run = run_of(of_features, of.train, problem, of.start(of.spanned(f0)))
        outputs = of_features.predict(run.state, np.concatenate([of.train, of.test])).members
        return run.history.rounds["cohort"].model, np.asarray(outputs), run

    first = algorithm.init(0, CLIENTS, jax.random.key(seed))
    f0, chosen = np.asarray(algorithm.predict(first, both).members), networks.history.rounds["cohort"].model
    start = features.spanned(f0)
    predicted, outputs, run = on_features(features, f0)
    order, rng = np.random.default_rng(seed).permutation(n), np.random.default_rng(seed + 1)
    inverse = np.concatenate([features.left_inverse[:, order], features.left_inverse[:, n:]], axis=1)
    shuffled = dataclasses.replace(features, train=features.train[order], left_inverse=inverse)
    wrong, _, _ = on_features(shuffled, f0)
    at_random = rng.integers(0, MODELS, chosen.shape)

    moved = outputs - start
    found = np.asarray(algorithm.predict(networks.state, problem.x_test).members)
    distance = np.sqrt(np.mean((found - outputs[:, n:]) ** 2) / np.mean(moved[:, n:] ** 2))

    def flow_of(model_ids: np.ndarray) -> float:
        cohorts = run.history.rounds["cohort"]._replace(model=model_ids.astype(np.int32))
        rule = ft.theory.Rule(STEPS, RATE)
        flow = ft.theory.federated_flow(kernels, problem.y, problem.clients, cohorts, rule, num_models=MODELS)
        ends = flow.predict(start[:, :n], start[:, n:], ROUNDS)
        return float(np.max(np.abs(ends - outputs[:, n:])) / np.max(np.abs(moved[:, n:])))

    cluster = np.arange(CLIENTS) % 2
    of_cluster = np.array([np.bincount(predicted[-1][cluster == c], minlength=MODELS).argmax() for c in range(2)])
    is_sorted = bool((predicted[-1] == of_cluster[cluster]).all() and of_cluster[0] != of_cluster[1])
    errors = [[np.mean((outputs[of_cluster[c], n:] - problem.truth[d]) ** 2) for d in range(2)] for c in range(2)]
    return Row(
        width=width,
        seed=seed,
        agreement=float(np.mean(chosen == predicted)),
        at_random=float(np.mean(chosen == at_random)),
        wrong_kernel=float(np.mean(chosen == wrong)),
        distance=float(distance),
        is_sorted=int(is_sorted),
        own_error=float((errors[0][0] + errors[1][1]) / 2),
        other_error=float((errors[0][1] + errors[1][0]) / 2),
        flow=flow_of(predicted),
        random_flow=flow_of(at_random),
    )


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for clusters.json")
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 64, 256, 1024, 4096])
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    ft.enable_x64()
    cases = [(width, seed) for width in options.widths for seed in range(options.seeds)]
    rows = [row_of(*case) for case in tqdm(cases)]
    fields = [name for name in Row._fields if name not in ("width", "seed")]
    cells = []
    for width in options.widths:
        of_width = [row for row in rows if row.width == width]
        means = [np.mean([getattr(row, name) for row in of_width]) for name in fields]
        cells.append([str(width), *(f"{mean:.3g}" for mean in means)])
    console().print(TextTable(f"means over {options.seeds} seeds", ("width", *fields), cells))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "clusters.json").write_text(json.dumps([row._asdict() for row in rows], indent=2))


if __name__ == "__main__":
    main()
