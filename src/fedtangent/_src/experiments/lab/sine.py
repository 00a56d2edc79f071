"""Fed-ensemble on the sine functions of FE-2024, section V: data, training, and what theory says of the same run."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy.stats import t as student

from fedtangent._src import data
from fedtangent._src.comparison.statistics import LEVEL
from fedtangent._src.comparison.theorems.fed_ensemble import repeated_runs
from fedtangent._src.comparison.theorems.fed_ensemble.repeated_runs import ToyProblem
from fedtangent._src.data import partition
from fedtangent._src.engine import Devices, Evaluation
from fedtangent._src.engine.run import predict, simulate
from fedtangent._src.experiments.lab.runner import Study
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import drawn_cohorts
from fedtangent._src.kernels.gram import KernelBlocks, kernel_blocks
from fedtangent._src.models.dense import mlp
from fedtangent._src.models.features import rbf_linear
from fedtangent._src.theory.fed_ensemble.bias_variance import Decomposition, Estimate, decompose_laws, decompose_runs
from fedtangent._src.theory.flow import Flow, Rule, federated_flow
from fedtangent._src.types import Algorithm, Model, Partition, Schedule

NORMAL_95 = 1.959963984540054  # the normal quantile of 0.975
CANDIDATES = 40  # clients that are drawn for each client that is kept, where inputs must not be close


class SineData(NamedTuple):
    """Training points of the clients, and the true function on an even grid of [-1, 1]."""

    x: np.ndarray  # [n, 1]
    y: np.ndarray  # [n, 1]
    clients: Partition
    x_test: np.ndarray  # [m, 1]
    y_test: np.ndarray  # [m, 1], sin(2 pi x)


class TrainedOutputs(NamedTuple):
    """Outputs of the K models of a run, before the first round and after the last, [K, n, 1] and [K, m, 1]."""

    start_train: np.ndarray
    start: np.ndarray
    train: np.ndarray
    test: np.ndarray


def load(
    seed: int, num_clients: int, points_per_client: int, gap: bool, spacing: float = 0.0, test_points: int = 201
) -> SineData:
    """Draws the paper's sine data (``data.sources.sine``), with inputs at least ``spacing`` apart.

    If ``spacing`` > 0, clients are drawn one after another, and a client is left out if one of its inputs is too close
    to an earlier input. Close inputs make the tangent kernel singular, which Theorem 2 excludes.

    Args:
        seed: Seed of the data.
        num_clients: Number of clients.
        points_per_client: Training points of each client.
        gap: Whether inputs between -0.5 and 0.5 are left out.
        spacing: Smallest distance of two inputs.
        test_points: Points of the test grid.

    Raises:
        ValueError: An option is out of range, or too few clients fit at this spacing.
    """
    if not (math.isfinite(spacing) and spacing >= 0):
        raise ValueError(f"spacing: got {spacing}, must be 0 or more")
    if spacing > 0 and num_clients * points_per_client > 2 / spacing + 1:  # cannot fit, so none are drawn
        raise ValueError(
            f"spacing: got {spacing:g}, at which {int(2 / spacing) + 1} inputs fit into [-1, 1], must be smaller for "
            f"{num_clients} clients of {points_per_client}"
        )
    drawn = num_clients * (CANDIDATES if spacing > 0 else 1)
    toy = data.load("sine", seed=seed, num_users=drawn, points_per_user=points_per_client, gap=gap,
                    test_points=test_points)  # fmt: skip
    kept = list(range(num_clients)) if spacing == 0 else []
    x = np.asarray(toy.x_train, np.float64).reshape(drawn, points_per_client)
    for i in range(drawn):
        if len(kept) == num_clients:
            break
        inputs = np.sort(np.concatenate([x[kept].ravel(), x[i]]))
        if np.all(np.diff(inputs) >= spacing):
            kept.append(i)
    if len(kept) < num_clients:
        raise ValueError(
            f"spacing: got {spacing:g}, at which {len(kept)} of {drawn} clients fit, must be smaller for {num_clients}"
        )
    rows = np.isin(np.asarray(toy.user_train), kept)
    clients = partition.by_user(np.asarray(toy.user_train)[rows])
    return SineData(np.asarray(toy.x_train)[rows], np.asarray(toy.y_train)[rows], clients, toy.x_test, toy.y_test)


def of_study(study: Study, seed: int, gap: bool) -> SineData:
    """Draws the data of one of the study's seeds."""
    s = study.settings
    return load(seed, s.num_clients, s.points_per_client, gap, s.spacing)


def check(study: Study, gap: bool) -> None:
    """Draws every seed's data; raises ``ValueError``."""
    for seed in study.seeds:
        of_study(study, seed, gap)


def linear_model() -> Model:
    """Builds the paper's 100 radial basis functions (FE-2024, section V-A), in float64."""
    return rbf_linear(100, 0.08, 1.0, seed=0, dtype=jnp.float64)


def network(width: int) -> Model:
    """Builds an erf network of one hidden layer, in float64, with weights so large that units vary over [-1, 1]."""
    return mlp(1, 1, widths=(width,), activation="erf", w_std=8.0, b_std=4.0, last_w_std=4.0, dtype=jnp.float64)


def step_size(model: Model, held: SineData) -> float:
    """Computes half of the largest step that is stable for every client: ``1 / max Theta(x, x)`` over the domain.

    ``lambda_max(Theta_ii) / n_i`` is at most the largest entry of Theta's diagonal. The bound does not depend on the
    training data, so that one compiled program serves every seed.
    """
    assert model.kernel is not None
    theta = np.asarray(model.kernel(jnp.asarray(held.x_test), None, get="ntk"))
    return 1.0 / float(np.max(np.diag(theta)))


def algorithm(model: Model, held: SineData, plan: Schedule, local_steps: int) -> Algorithm:
    """Builds Fed-ensemble with full-batch gradient descent; it is FedAvg if ``plan`` has one model."""
    return algorithms.fed_ensemble(
        model, plan, client_learning_rate=step_size(model, held), work=Work(steps=local_steps, batch_size=None)
    )


def train(held: SineData, of: Algorithm, num_rounds: int, seed: int) -> TrainedOutputs:
    """Trains for ``num_rounds`` rounds; initial models, schedule and training depend only on ``seed``."""
    x, split = jnp.asarray(np.concatenate([held.x, held.x_test])), len(held.x)
    seen = simulate(
        of,
        data.federated_data(held.x, held.y, held.clients, dtype=jnp.float64),
        num_rounds=num_rounds,
        seed=seed,
        evaluation=Evaluation(measure=lambda of, state: {"members": np.asarray(predict(of, state, x).members)}),
        devices=Devices("scan"),
    ).history.evaluations
    first, last = seen[0].metrics["members"], seen[-1].metrics["members"]
    return TrainedOutputs(first[:, :split], first[:, split:], last[:, :split], last[:, split:])


def flow(
    held: SineData, model: Model, plan: Schedule, local_steps: int, num_rounds: int, seed: int
) -> tuple[Flow, KernelBlocks]:
    """Computes the exact law of the run of ``train``, with the same cohorts, and the kernel blocks."""
    assert model.kernel is not None
    blocks, rule = kernel_blocks(model.kernel, held.x, held.x_test), Rule(local_steps, step_size(model, held))
    cohorts = drawn_cohorts(plan, held.clients, num_rounds, seed)
    return federated_flow(blocks, held.y, held.clients, cohorts, rule, num_models=plan.num_models), blocks


def decomposed(
    problem: ToyProblem, num_models: int, num_rounds: int, schedules: int, draws: int
) -> tuple[Decomposition, Decomposition]:
    """Computes bias and variance of K models in closed form and by simulation, over the same schedules.

    Args:
        problem: Data, model and kernel.
        num_models: Number K of models.
        num_rounds: Number of rounds.
        schedules: Number of schedules.
        draws: Number of initialisations under each schedule; 1 for networks.
    """
    plan = repeated_runs.permutations(problem.clients.num_clients, num_models)
    seeds = repeated_runs.seeds_of(num_models, schedules)
    # With one model all clients train it in every round: the schedule is not random.
    laws = repeated_runs.laws(problem, plan, (num_rounds,), seeds if num_models > 1 else seeds[:1])
    runs = repeated_runs.simulated(problem, plan, num_rounds, seeds, draws)
    return (
        decompose_laws([law[0] for law in laws], problem.expected, problem.noise),
        decompose_runs(runs if draws > 1 else runs[:, 0], problem.expected, problem.noise),
    )


def allowed(runs: int, comparisons: int) -> float:
    """Computes the number of standard errors that some comparison exceeds by chance with probability ``LEVEL``.

    Args:
        runs: Number of runs behind a standard error.
        comparisons: Number of comparisons.
    """
    return float(student.ppf(1 - LEVEL / comparisons / 2, runs - 1))


def apart(seen: Estimate, exact: Estimate) -> float:
    """Computes simulation minus closed form, in standard errors."""
    return (seen.value - exact.value) / seen.standard_error
