"""Ensembles trained many times: under many schedules, and for a linear model from many initial functions under each.

The simulation (``simulated``) and the theory of the same schedules (``laws``) share only the data, the learning rate
and the keys of the schedules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

import fedtangent as ft
from fedtangent._src.comparison.statistics import Slope, weighted_line
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.engine.run import predict
from fedtangent._src.theory.fed_ensemble.bias_variance import EnsembleLaw, Estimate
from fedtangent._src.types import Cohort, Model, Partition, Schedule

TEST_POINTS = 201
# Variances of the sine data (FE-2024, section V-A): of a client's amplitude, and of the noise.
AMPLITUDE, NOISE = 0.2**2, 0.2**2
ToyModel = Callable[[int], Model]


class ToyProblem(NamedTuple):
    """Data, a model and its kernels, and the clients' training; the C outputs of a linear model are independent."""

    x: Float[np.ndarray, "n 1"]
    y: Float[np.ndarray, "n 1"]
    clients: Partition
    x_test: Float[np.ndarray, "m 1"]  # an even grid
    expected: Float[np.ndarray, "m 1"]  # E[y | x] on the grid
    noise: float  # E_x Var[y | x] over the grid
    model: ToyModel  # number of outputs -> model
    blocks: ft.kernels.KernelBlocks
    learning_rate: float
    local_steps: int


def sine_problem(
    seed: int,
    *,
    local_steps: int,
    sigma: float = 1.0,
    gap: bool = False,
    num_clients: int = 50,
    points_per_client: int = 2,
) -> ToyProblem:
    """Builds the toy of FE-2024, section V-A (FE-2021, section 5), in float64.

    The paper gives neither learning rate nor local steps. The rate here is ``1 / max_x Theta(x, x)``, half of the
    largest that is stable for any data. The 100 centres are the same for every ``seed``.

    Args:
        seed: Seed of the data.
        local_steps: Local steps of a round.
        sigma: Standard deviation of the initial weights.
        gap: Whether to use the data of section V-B, which have a gap.
        num_clients: Number of clients.
        points_per_client: Examples of each client.
    """
    toy = ft.data.load(
        "sine", seed=seed, num_users=num_clients, points_per_user=points_per_client, gap=gap, test_points=TEST_POINTS
    )

    def model(outputs: int) -> Model:
        return ft.models.rbf_linear(100, 0.08, sigma, seed=0, output_size=outputs, dtype=jnp.float64)

    blocks = _blocks(model, toy.x_train, toy.x_test)
    assert blocks.ntk_test is not None
    expected = np.asarray(toy.y_test)
    return ToyProblem(
        np.asarray(toy.x_train),
        np.asarray(toy.y_train),
        ft.partition.by_user(np.asarray(toy.user_train)),
        np.asarray(toy.x_test),
        expected,
        float(np.mean(AMPLITUDE * expected**2 + NOISE)),
        model,
        blocks,
        1 / float(np.max(np.diag(blocks.ntk_test))),
        local_steps,
    )


def _blocks(model: ToyModel, x: np.ndarray, x_test: np.ndarray) -> ft.kernels.KernelBlocks:
    kernel = model(1).kernel
    assert kernel is not None
    return ft.kernels.kernel_blocks(kernel, x, x_test)


def spaced_problem(seed: int, local_steps: int) -> ToyProblem:
    """Builds the toy with a gap on three unequal clients, with eight points that are more than a bandwidth apart.

    On the papers' points Theta is nearly singular and no run comes near Theorem 2's limit; here a hundred rounds
    suffice for any seed.

    Args:
        seed: Seed of the data.
        local_steps: Local steps of a round.
    """
    rng, whole = np.random.default_rng(seed), sine_problem(seed, local_steps=local_steps, gap=True, num_clients=1)
    x = 0.5 + 0.13 * np.arange(4) + rng.uniform(0, 0.02, (2, 4))
    x = rng.permutation((x * [[-1], [1]]).ravel())[:, None]
    y = np.sin(2 * np.pi * x) + rng.normal(0, NOISE**0.5, x.shape)
    return whole._replace(x=x, y=y, clients=consecutive((1, 3, 4)), blocks=_blocks(whole.model, x, whole.x_test))


@functools.cache
def permutations(num_clients: int, num_models: int) -> Schedule:
    """Returns ``per_client_permutations``, cached so that all runs share a compiled program.

    Args:
        num_clients: Clients N.
        num_models: Models K.
    """
    return ft.schedules.per_client_permutations(num_clients, num_models)


def seeds_of(num_models: int, count: int, first: int = 0) -> range:
    """Returns ``count`` seeds for runs of K models, different for every K and ``first``.

    Args:
        num_models: Number of models K.
        count: Number of seeds.
        first: Seed of the whole check.
    """
    start = (first * 2**16 + 1000 * num_models) % 2**32
    return range(start, start + count)


def laws(
    problem: ToyProblem, schedule: Schedule, rounds: Sequence[int], seeds: Sequence[int]
) -> list[tuple[EnsembleLaw, ...]]:
    """Computes the ensemble's exact law after each of ``rounds`` under each seed's schedule, ``[schedule][round]``.

    Clients are weighted by their examples.

    Args:
        problem: Data, kernels and training.
        schedule: The schedule, drawn with each seed.
        rounds: Rounds of the laws.
        seeds: Seeds of the runs.
    """
    last = max(rounds)
    longer = max(256, 1 << (last - 1).bit_length())  # one compiled program serves runs of many lengths
    runs = (ft.schedules.drawn_cohorts(schedule, problem.clients, longer, int(seed)) for seed in seeds)
    cohorts = [Cohort(*(np.asarray(part)[:last] for part in run)) for run in runs]  # type: ignore[arg-type]
    rule = ft.theory.Rule(problem.local_steps, problem.learning_rate)
    return ft.theory.ensemble_laws(
        problem.blocks, problem.y, problem.clients, cohorts, rule, rounds, schedule.num_models
    )


def simulated(
    problem: ToyProblem, schedule: Schedule, num_rounds: int, seeds: Sequence[int], draws: int
) -> Float[np.ndarray, "S J m 1"]:
    """Trains ensembles and returns their predictions at the test points, one run for each seed's schedule.

    The outputs of a linear model share no weights and, under squared loss, no gradients: each is an independent
    initialisation of the one-output model, trained by the same schedule on the same targets. For a network, whose
    outputs share layers, ``draws`` must be 1.

    Args:
        problem: Data, model and training.
        schedule: The schedule.
        num_rounds: Rounds R.
        seeds: Seeds of the S runs.
        draws: Outputs J of the model in each run.
    """
    rate, work = problem.learning_rate, ft.Work(steps=problem.local_steps, batch_size=None)
    algorithm = ft.fed_ensemble(problem.model(draws), schedule, client_learning_rate=rate, work=work)
    targets = np.tile(problem.y, (1, draws))
    examples = ft.data.federated_data(problem.x, targets, problem.clients, dtype=jnp.float64)
    x, predictions = jnp.asarray(problem.x_test), []
    for seed in seeds:
        run = ft.simulate(algorithm, examples, num_rounds=num_rounds, seed=int(seed), devices=ft.Devices("scan"))
        predictions.append(np.asarray(predict(algorithm, run.state, x).mean).T[:, :, None])
    return np.stack(predictions)


def power_law(variances: Mapping[int, Estimate]) -> Slope:
    """Fits the slope of log variance against log K, weighted by relative standard errors (equally if they are 0).

    Args:
        variances: Variance at each of two or more K, all positive.
    """
    k, value = np.array(list(variances), float), np.array([v.value for v in variances.values()])
    if len(k) < 2 or not np.all(value > 0):
        raise ValueError(f"variances: got {dict(variances)}, must be positive, at two K or more")
    error = np.array([v.standard_error for v in variances.values()]) / value
    if np.all(error > 0):
        return weighted_line(np.log(k), np.log(value), 1 / error**2)
    return weighted_line(np.log(k), np.log(value), np.ones(len(k)))._replace(standard_error=0.0)
