"""Fed-ensemble on the sine functions of FE-2024, section V: data, training, and theory's prediction of the same run."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy

import fedtangent as ft
from fedtangent._src.comparison.statistics import LEVEL
from fedtangent._src.comparison.theorems.fed_ensemble import bias_variance
from fedtangent._src.comparison.theorems.fed_ensemble.bias_variance import ToyProblem
from fedtangent._src.engine.run import predict
from fedtangent._src.experiments.lab.runner import Study
from fedtangent._src.theory.fed_ensemble.bias_variance import Decomposition, Estimate
from fedtangent.types import Algorithm, Model, Partition, Schedule

NORMAL_95 = 1.959963984540054  # the normal quantile of 0.975
CANDIDATES = 40  # clients that are drawn for each client that is kept, where inputs must not be close


class SineData(NamedTuple):
    """Training points of all clients, and test points: the true function sin(2 pi x) on an even grid of [-1, 1]."""

    x: np.ndarray  # [n, 1]
    y: np.ndarray  # [n, 1]
    clients: Partition
    x_test: np.ndarray  # [m, 1]
    y_test: np.ndarray  # [m, 1], sin(2 pi x)


class TrainedOutputs(NamedTuple):
    """Outputs of a run's K models at training points [K, n, 1] and test points [K, m, 1], before and after training."""

    start_train: np.ndarray
    start: np.ndarray
    train: np.ndarray
    test: np.ndarray


def load(
    seed: int, num_clients: int, points_per_client: int, gap: bool, spacing: float = 0.0, test_points: int = 201
) -> SineData:
    """Draws the sine data of FE-2024, section V (``data.sources.sine``), with inputs at least ``spacing`` apart.

    If ``spacing`` > 0, clients are drawn one after another, and a client is left out if one of its inputs is too close
    to another one or to an earlier client's. Close inputs make the tangent kernel singular, which Theorem 2 of FE-2024
    excludes.

    Args:
        seed: Seed of the data.
        num_clients: Number of clients.
        points_per_client: Training points of each client.
        gap: Whether the data have no inputs between -0.5 and 0.5.
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
            f"{num_clients} clients of {points_per_client} inputs"
        )
    candidates = num_clients * (CANDIDATES if spacing > 0 else 1)
    draw = partial(ft.data.load, "sine", seed=seed, gap=gap, test_points=test_points)
    toy = draw(num_users=candidates, points_per_user=points_per_client)
    users, fitting = np.asarray(toy.user_train), list(range(num_clients)) if spacing == 0 else []
    x = np.asarray(toy.x_train, np.float64).reshape(candidates, points_per_client)
    for i in range(candidates):
        if len(fitting) == num_clients:
            break
        inputs = np.sort(np.concatenate([x[fitting].ravel(), x[i]]))
        if np.all(np.diff(inputs) >= spacing):
            fitting.append(i)
    if len(fitting) < num_clients:
        fit = f"only {len(fitting)} of {candidates} drawn clients fit"
        raise ValueError(f"spacing: got {spacing:g}, at which {fit}, must be smaller for {num_clients} clients")
    rows = np.isin(users, fitting)
    clients = ft.partition.by_user(users[rows])
    return SineData(np.asarray(toy.x_train)[rows], np.asarray(toy.y_train)[rows], clients, toy.x_test, toy.y_test)


def of_study(study: Study, seed: int, gap: bool) -> SineData:
    """Draws the sine data of one seed, with the clients and points of the study's settings.

    Args:
        study: The checked request; its settings have ``num_clients``, ``points_per_client`` and ``spacing``.
        seed: Seed of the data.
        gap: Whether the data have no inputs between -0.5 and 0.5.

    Raises:
        ValueError: A setting is out of range, or too few clients fit at this spacing.
    """
    settings = study.settings
    return load(seed, settings.num_clients, settings.points_per_client, gap, settings.spacing)


def check(study: Study, gap: bool) -> None:
    """Raises ``ValueError`` if a seed's sine data cannot be drawn with the study's settings; ``gap`` as in ``load``."""
    for seed in study.seeds:
        of_study(study, seed, gap)


def linear_model() -> Model:
    """Builds the linear model on 100 radial basis functions of FE-2024, section V-A, in float64."""
    return ft.models.rbf_linear(100, 0.08, 1.0, seed=0, dtype=jnp.float64)


def network(width: int) -> Model:
    """Builds an erf network of one hidden layer, in float64; its large weights let hidden units vary over [-1, 1]."""
    return ft.models.mlp(
        1, 1, widths=(width,), activation="erf", w_std=8.0, b_std=4.0, last_w_std=4.0, dtype=jnp.float64
    )


def step_size(model: Model, data: SineData) -> float:
    """Computes a step size that is at most half of the largest stable one for every client: ``1 / max_x Theta(x, x)``.

    The reason is that the largest eigenvalue of a client's kernel, divided by its number of examples, is at most the
    largest diagonal entry. The step does not depend on the training data: one compiled program serves every seed.

    Args:
        model: Model with an analytic kernel Theta.
        data: Data of one seed, whose test grid covers the domain.
    """
    assert model.kernel is not None
    theta = np.asarray(model.kernel(jnp.asarray(data.x_test), None, get="ntk"))
    return 1.0 / float(np.max(np.diag(theta)))


def algorithm(model: Model, data: SineData, schedule: Schedule, local_steps: int) -> Algorithm:
    """Builds Fed-ensemble with full-batch gradient descent; it is FedAvg if the schedule has one model.

    Args:
        model: The model.
        data: Data of one seed, from which ``step_size`` computes the step.
        schedule: Which client trains which model.
        local_steps: Local steps in a round.
    """
    work = ft.Work(steps=local_steps, batch_size=None)
    return ft.fed_ensemble(model, schedule, client_learning_rate=step_size(model, data), work=work)


def train(data: SineData, of: Algorithm, num_rounds: int, seed: int) -> TrainedOutputs:
    """Trains the K models of an algorithm on sine data; returns their outputs before and after training.

    Args:
        data: Data of one seed.
        of: The algorithm.
        num_rounds: Number of rounds.
        seed: Seed of initial models, schedule and training.
    """
    x, split = jnp.asarray(np.concatenate([data.x, data.x_test])), len(data.x)
    federated = ft.data.federated_data(data.x, data.y, data.clients, dtype=jnp.float64)
    measure = ft.Evaluation(measure=lambda of, state: {"members": np.asarray(predict(of, state, x).members)})
    devices = ft.Devices("scan")
    run = ft.simulate(of, federated, num_rounds=num_rounds, seed=seed, evaluation=measure, devices=devices)
    first, last = (run.history.evaluations[e].metrics["members"] for e in (0, -1))
    return TrainedOutputs(first[:, :split], first[:, split:], last[:, :split], last[:, split:])


def flow(
    data: SineData, model: Model, schedule: Schedule, local_steps: int, num_rounds: int, seed: int
) -> tuple[ft.theory.Flow, ft.kernels.KernelBlocks]:
    """Computes the flow (exact mean and covariance of wide networks) of the run that ``train`` simulates.

    Returns the flow and the blocks of the model's kernel that it was built from.

    Args:
        data: Data of one seed.
        model: The model.
        schedule: Which client trains which model.
        local_steps: Local steps in a round.
        num_rounds: Number of rounds.
        seed: Seed of the run; the cohorts are those that ``train`` draws with it.
    """
    assert model.kernel is not None
    blocks = ft.kernels.kernel_blocks(model.kernel, data.x, data.x_test)
    rule = ft.theory.Rule(local_steps, step_size(model, data))
    cohorts = ft.schedules.drawn_cohorts(schedule, data.clients, num_rounds, seed)
    return ft.theory.federated_flow(blocks, data.y, data.clients, cohorts, rule, num_models=schedule.num_models), blocks


def decomposed(
    problem: ToyProblem, num_models: int, num_rounds: int, schedules: int, draws: int
) -> tuple[Decomposition, Decomposition]:
    """Decomposes the test error of K averaged models into bias and variance: in closed form, and from simulated runs.

    Both average over the same random schedules.

    Args:
        problem: Data, model and kernel.
        num_models: Number K of models.
        num_rounds: Number of rounds.
        schedules: Number of schedules.
        draws: Number of initialisations under each schedule. With 1 the two parts of the simulated variance, from
            initialisations and from schedules, are nan.

    Returns:
        The decomposition in closed form, and the one from simulated runs.
    """
    plan = bias_variance.permutations(problem.clients.num_clients, num_models)
    seeds = bias_variance.seeds_of(num_models, schedules)
    # With one model all clients train it in every round: the schedule is not random.
    laws = bias_variance.laws_of(problem, plan, (num_rounds,), seeds if num_models > 1 else seeds[:1])
    runs = bias_variance.simulated(problem, plan, num_rounds, seeds, draws)
    return (
        ft.theory.decompose_laws([law[0] for law in laws], problem.expected, problem.noise),
        ft.theory.decompose_runs(runs if draws > 1 else runs[:, 0], problem.expected, problem.noise),
    )


def allowed(runs: int, comparisons: int) -> float:
    """Computes the largest deviation, in standard errors, that chance allows for any of several comparisons.

    By chance, one of the deviations is larger with probability 1e-4 at most (Student's t, Bonferroni).

    Args:
        runs: Number of runs behind a standard error.
        comparisons: Number of comparisons.
    """
    return float(scipy.stats.t.ppf(1 - LEVEL / comparisons / 2, runs - 1))


def apart(simulated: Estimate, exact: Estimate) -> float:
    """Computes the simulated estimate minus the closed form, in units of the simulation's standard error.

    Args:
        simulated: Estimate from simulated runs, with its standard error.
        exact: Value in closed form.
    """
    return (simulated.value - exact.value) / simulated.standard_error
