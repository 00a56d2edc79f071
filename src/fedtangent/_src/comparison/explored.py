"""Predicted runs of Fed-ensemble for an explorer, computed anew within a fraction of a second as settings change.

``predict`` compiles a program for each shape of clients and cohorts, which takes seconds. Here the same recursion (see
``theory.flow``) runs in NumPy, which compiles nothing. Kernel, clients' modes, initial functions and cohorts are kept,
and computed anew only if a setting changes them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import deque
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from fedtangent._src.checks import instance, number, whole
from fedtangent._src.comparison.forecast import BAND, Forecasting, Plan, plan_of
from fedtangent._src.comparison.predicted import prior_starts
from fedtangent._src.data.dataset import Dataset
from fedtangent._src.data.named import chosen, load
from fedtangent._src.data.partition.drawn import ALPHA, dirichlet
from fedtangent._src.engine import run
from fedtangent._src.engine.loop import Evaluation, Reported
from fedtangent._src.federated.algorithms.averaging import fed_avg, fed_ensemble
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.algorithms.stale import Staleness, fed_async
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import drawn_cohorts, strata
from fedtangent._src.kernels.gram import KernelBlocks, known_modes
from fedtangent._src.losses import divergence
from fedtangent._src.models.dense import mlp
from fedtangent._src.theory.flow.clients import response
from fedtangent._src.types import Algorithm, Cohort, Partition, Schedule

MOST_POINTS = 2500  # training and test examples together
LOADED = {"num_train": 500, "num_test": 200}  # examples of a data set that is named
EVALUATIONS = 15  # rounds at which a run is measured, besides the start
DRAWS, MANY_DRAWS = 8, 64  # initial functions of several outputs, and of one
BINS = 10  # groups of inputs that take the place of classes in regression


@dataclasses.dataclass(frozen=True)
class Controls:
    """Settings of a run that the explorer changes."""

    learning_rate: float = 1.0
    local_steps: int = 10
    alpha: float = 1.0
    """Concentration of the Dirichlet distribution of the clients' labels."""
    clients_per_stratum: int = 1
    num_models: int = 1
    width: int = 256
    staleness: int = 0
    """Rounds by which every answer is late."""


@dataclasses.dataclass(frozen=True, eq=False)
class Explored:
    """The parts of a run that its controls do not change; built by ``explored``."""

    data: Dataset
    source: str  # the call that loads the data; "" for a user's own
    num_clients: int
    num_rounds: int
    seed: int
    plan: Plan  # of the first controls
    kernels: KernelBlocks

    @property
    def num_strata(self) -> int:
        """The number of strata, all of the same number of clients."""
        return _num_strata(self.num_clients)

    @property
    def draws(self) -> int:
        """The number of initial functions of a model."""
        return self.plan.forecasting.draws

    @property
    def every(self) -> int:
        """The number of rounds between evaluations."""
        return self.plan.setting.size.evaluate_every

    @property
    def is_curve(self) -> bool:
        """Whether examples have one input and one output."""
        return math.prod(self.data.x_train.shape[1:]) == self.plan.setting.problem.y_train.shape[1] == 1

    def first(self) -> Controls:
        """Returns the first controls: half of the rate at which every client is stable, and all clients."""
        rate = float(f"{_clients(self, Controls.alpha).stable / 2:.2g}")
        return Controls(rate, clients_per_stratum=self.num_clients // self.num_strata)


class Curves(NamedTuple):
    """A run of K models: errors by round, functions at the test points, and what is left at each client."""

    rounds: Int[np.ndarray, "r"]
    errors: dict[str, Float[np.ndarray, "E r"]]  # mean squared errors of the models' mean, by split
    accuracy: float  # of the test examples at the end; NaN in regression
    functions: Float[np.ndarray, "E K m"]  # first output of each model at the end
    residuals: Float[np.ndarray, "N"]  # root mean square at each client's examples at the end, of the models' mean


class Moved(NamedTuple):
    """The prediction for one position of the controls."""

    curves: Curves
    before: Float[np.ndarray, "N"]  # the clients' residuals before training
    curvatures: Float[np.ndarray, "n"]  # rate times eigenvalue of each mode of each client; stable up to 2
    stable: float  # the largest rate at which every client's local steps are stable
    remark: str  # whether the run is stable, in words


class _Clients(NamedTuple):
    """The clients at one heterogeneity."""

    partition: Partition
    rows: list[Int[np.ndarray, "s"]]
    vectors: list[Float[np.ndarray, "s s"]]  # modes of each client's kernel
    values: Float[np.ndarray, "n"]  # eigenvalues of all clients, one client after the other
    sizes: Float[np.ndarray, "n"]  # number of examples of the client of each eigenvalue

    @property
    def stable(self) -> float:
        """The largest rate at which the local steps of every client are stable, ``min_i 2 n_i / lambda_max_i``."""
        return float(2 / np.max(self.values / self.sizes))


def explored(data: Dataset | str, num_clients: int = 20, num_rounds: int = 30, seed: int = 0) -> Explored:
    """Checks the arguments of ``explore``, loads the data and computes their kernel.

    Args:
        data: A ``Dataset``, or the name of one, of which 500 training and 200 test examples are loaded.
        num_clients: Clients N.
        num_rounds: Communication rounds R.
        seed: Seed of data, partition, schedule and initial functions.

    Raises:
        ValueError: An argument of the wrong type or range, 64-bit types are off, or more than 2,500 examples.
    """
    source = ""
    if isinstance(data, str):
        options = {field.name for field in dataclasses.fields(chosen(data).options)}
        sizes = {name: value for name, value in LOADED.items() if name in options}
        source = f"ft.data.load({', '.join([repr(data), *(f'{n}={v}' for n, v in sizes.items()), f'seed={seed}'])})"
        data = load(data, seed=seed, **sizes)
    instance("data", data, Dataset)
    points = len(data.x_train) + (0 if data.x_test is None else len(data.x_test))
    if points > MOST_POINTS:
        raise ValueError(f"data: got {points} training and test examples, must be at most {MOST_POINTS} to explore")
    whole("num_clients", num_clients, 1, len(data.x_train))
    whole("num_rounds", num_rounds)
    clients, first = _partition(data, num_clients, Controls.alpha, seed), Controls()
    algorithm = _algorithm(data, num_clients, first)
    examples, evaluation = run.examples_of(algorithm, data, clients), Evaluation(-(-num_rounds // EVALUATIONS))
    draws = MANY_DRAWS if algorithm.model.output_size == 1 else DRAWS
    plan = plan_of(algorithm, examples, num_rounds, seed, evaluation, Forecasting(draws=draws, rates=False))
    return Explored(data, source, num_clients, num_rounds, seed, plan, plan.setting.blocks())


def python_call(explored: Explored, controls: Controls) -> str:
    """Returns the Python code that predicts and trains the same run."""
    c, every = controls, explored.every
    data = explored.source or "data  # as it was given to ft.explore"
    schedule = f"num_models={c.num_models}, num_strata={explored.num_strata}"
    recipe, options = "fed_avg", f"client_learning_rate={c.learning_rate}"
    options += f", work=ft.Work(steps={c.local_steps}, batch_size=None)"
    if c.num_models > 1:
        recipe = "fed_ensemble"
    if c.staleness:
        late = f'ft.Staleness(delay={c.staleness}, buffered=True, discount="constant")'
        options += f',\n    staleness={late}, averaging=ft.Averaging(weighting="examples")'
        options += ", base=ft.fed_async" if c.num_models > 1 else ""
        recipe = "fed_ensemble" if c.num_models > 1 else "fed_async"
    labels = "data.y_train" if explored.data.num_classes else f"x.argsort().argsort() * {BINS} // len(x)"
    inputs = "" if explored.data.num_classes else "x = data.x_train.reshape(len(data.x_train), -1)[:, 0]\n"
    return f"""import fedtangent as ft

ft.enable_x64()
data = {data}
{inputs}clients = ft.partition.dirichlet({labels}, num_clients={explored.num_clients}, alpha={c.alpha}, seed={explored.seed})
schedule = ft.schedules.strata({explored.num_clients}, {schedule}, clients_per_stratum={c.clients_per_stratum})
model = ft.models.mlp(data, widths=({c.width},))
algorithm = ft.{recipe}(
    model, schedule, {options}
)
forecasting = ft.Forecasting(draws={explored.draws}, rates=False)
run = dict(num_rounds={explored.num_rounds}, seed={explored.seed}, evaluation=ft.Evaluation({every}))
theory = ft.predict(algorithm, data, clients, forecasting=forecasting, **run)
trained = ft.simulate(algorithm, data, clients, **run)
"""


def moved(explored: Explored, controls: Controls) -> Moved:
    """Predicts the run of ``controls``: the numbers of ``ft.predict`` with the call of ``python_call``.

    Args:
        explored: The run.
        controls: Position of the controls.

    Raises:
        ValueError: A control is out of range.
    """
    check_controls(explored, controls)
    clients, cohorts = _clients(explored, controls.alpha), _cohorts(explored, controls.num_models)
    start = _start(explored, controls.num_models)
    gains = np.split(
        np.asarray(response(clients.values, controls.learning_rate, clients.sizes, controls.local_steps)),
        np.cumsum([len(rows) for rows in clients.rows])[:-1],
    )
    answers = [(vectors * gain) @ vectors.T for vectors, gain in zip(clients.vectors, gains, strict=True)]
    weighted = Cohort(*(part[:, :, : controls.clients_per_stratum].reshape(len(part), -1) for part in cohorts))
    weighted = weighted._replace(weight=np.asarray(clients.partition.sizes)[weighted.client])
    rounds = np.array(explored.plan.setting.size.rounds)
    with np.errstate(over="ignore", invalid="ignore"):
        errors = _follow(_theta(explored), clients.rows, answers, weighted, controls.staleness, start, rounds)
        errors = errors.reshape(*errors.shape[:3], explored.draws, -1)
        curves = _measured(explored, clients, rounds, errors)
        before = _residuals(clients, errors[0].mean(axis=0))
    return Moved(
        curves,
        before,
        controls.learning_rate * clients.values / clients.sizes,
        clients.stable,
        _remark(controls, clients.stable, curves.errors["train"]),
    )


def trained(explored: Explored, controls: Controls, report: Reported) -> Curves:
    """Trains the networks of ``controls``, of their width.

    Args:
        explored: The run.
        controls: Position of the controls.
        report: Called with each ``Measurement`` of the run.

    Raises:
        ValueError: A control is out of range.
        FloatingPointError: The networks diverge.
    """
    check_controls(explored, controls)
    algorithm, clients = _algorithm(explored.data, explored.num_clients, controls), _clients(explored, controls.alpha)
    evaluation = Evaluation(explored.every, report=report, progress=False, stop_on_divergence=True)
    examples, problem = run.examples_of(algorithm, explored.data, clients.partition), explored.plan.setting.problem
    finished = run.simulate(
        algorithm, examples, num_rounds=explored.num_rounds, seed=explored.seed, evaluation=evaluation
    )
    if finished.history.evaluations[-1].round < explored.num_rounds:
        raise FloatingPointError(finished.status)
    points = (problem.x_train, problem.x_test)
    outputs = [np.asarray(run.predict(algorithm, finished.state, x).members, np.float64) for x in points]  # [K, ., C]
    targets = np.concatenate([problem.y_train, problem.y_test])
    at_end = _measured(explored, clients, np.zeros(1), (np.concatenate(outputs, axis=1) - targets)[None, :, :, None])
    curves = finished.history.curves()
    errors = {split: curves.get(f"{split}.mse", curves["train.mse"])[None] for split in at_end.errors}
    return at_end._replace(rounds=finished.history.evaluated, errors=errors)


def check_controls(explored: Explored, controls: Controls) -> None:
    """Raises ``ValueError`` for a control of the wrong type or range."""
    instance("controls", controls, Controls)
    number("learning_rate", controls.learning_rate, above=0)
    number("alpha", controls.alpha, **ALPHA)
    whole("clients_per_stratum", controls.clients_per_stratum, 1, explored.num_clients // explored.num_strata)
    for name in ("local_steps", "num_models", "width"):
        whole(name, getattr(controls, name))
    whole("staleness", controls.staleness, 0)


def _num_strata(num_clients: int) -> int:
    """Returns the largest divisor of the number of clients that leaves at least four clients in a stratum."""
    return max(q for q in range(1, max(num_clients // 4, 1) + 1) if num_clients % q == 0)


def _schedule(num_clients: int, controls: Controls) -> Schedule:
    return strata(num_clients, controls.num_models, _num_strata(num_clients), controls.clients_per_stratum)


def _algorithm(data: Dataset, num_clients: int, controls: Controls) -> Algorithm:
    """Builds the algorithm of ``python_call``."""
    model, schedule = mlp(data, widths=(controls.width,)), _schedule(num_clients, controls)
    options = {"client_learning_rate": controls.learning_rate, "work": Work(controls.local_steps, batch_size=None)}
    base = fed_avg
    if controls.staleness:
        late = Staleness(delay=controls.staleness, buffered=True, discount="constant")
        base, options = fed_async, options | {"staleness": late, "averaging": Averaging(weighting="examples")}
    if controls.num_models == 1:
        return base(model, schedule, **options)
    return fed_ensemble(model, schedule, base=base, **options)


def _partition(data: Dataset, num_clients: int, alpha: float, seed: int) -> Partition:
    """Divides the examples by their classes, in regression by ten groups of equal size along the first input."""
    x = np.asarray(data.x_train).reshape(len(data.x_train), -1)[:, 0]
    labels = data.y_train if data.num_classes else x.argsort().argsort() * BINS // len(x)
    return dirichlet(labels, num_clients=num_clients, alpha=alpha, seed=seed)


@functools.lru_cache(maxsize=64)
def _clients(explored: Explored, alpha: float) -> _Clients:
    """Returns the clients and the modes of their kernels."""
    partition = _partition(explored.data, explored.num_clients, alpha, explored.seed)
    rows = [np.asarray(partition.client(i)) for i in range(explored.num_clients)]
    theta = np.asarray(explored.kernels.ntk_train)
    values, vectors = zip(*(known_modes(theta[np.ix_(one, one)]) for one in rows), strict=True)
    sizes = np.repeat(np.asarray(partition.sizes, float), partition.sizes)
    return _Clients(partition, rows, list(vectors), np.concatenate(values), sizes)


@functools.lru_cache(maxsize=16)
def _cohorts(explored: Explored, num_models: int) -> Cohort:
    """Returns the cohorts of all clients, [R, Q, N / Q], of which a smaller cohort is the first of each stratum."""
    size = explored.num_clients // explored.num_strata
    schedule = _schedule(explored.num_clients, Controls(clients_per_stratum=size, num_models=num_models))
    drawn = drawn_cohorts(schedule, None, explored.num_rounds, explored.seed, None)
    return Cohort(*(np.asarray(part).reshape(explored.num_rounds, explored.num_strata, size) for part in drawn))


@functools.lru_cache(maxsize=4)
def _start(explored: Explored, num_models: int) -> Float[np.ndarray, "K points D"]:
    """Returns the initial residuals at the training and then the test points, D columns of E draws and C outputs."""
    algorithm = _algorithm(explored.data, explored.num_clients, Controls(num_models=num_models))
    setting = dataclasses.replace(explored.plan.setting, algorithm=algorithm)
    drawn = np.concatenate(prior_starts(setting, explored.kernels, explored.draws), axis=2)
    residuals = drawn - np.concatenate([setting.problem.y_train, setting.problem.y_test])
    return np.ascontiguousarray(residuals.transpose(1, 2, 0, 3)).reshape(*drawn.shape[1:3], -1)


@functools.lru_cache(maxsize=4)
def _theta(explored: Explored) -> Float[np.ndarray, "n points"]:
    """Returns the tangent kernel of the training points with all points."""
    return np.concatenate([explored.kernels.ntk_train, np.asarray(explored.kernels.ntk_test_train).T], axis=1)


def _follow(
    theta: Float[np.ndarray, "n points"],
    rows: list[Int[np.ndarray, "s"]],
    answers: list[Float[np.ndarray, "s s"]],
    cohorts: Cohort,
    staleness: int,
    start: Float[np.ndarray, "K points D"],
    rounds: Int[np.ndarray, "r"],
) -> Float[np.ndarray, "r K points D"]:
    """Computes the residuals after ``rounds``: client i answers to the residual g at its examples by ``answers[i] g``."""
    past, kept = deque([start], maxlen=staleness + 1), [start]
    for r, (client, model, weight) in enumerate(zip(*cohorts, strict=True), start=1):
        old, new = past[0], past[-1].copy()
        for k in np.unique(model):
            slots = model == k
            shares = weight[slots] / weight[slots].sum()
            moves = [share * (answers[i] @ old[k, rows[i]]) for i, share in zip(client[slots], shares, strict=True)]
            new[k] -= theta[np.concatenate([rows[i] for i in client[slots]])].T @ np.concatenate(moves)
        past.append(new)
        if r in rounds:
            kept.append(new)
    return np.stack(kept)


def _measured(
    explored: Explored,
    clients: _Clients,
    rounds: Int[np.ndarray, "r"],
    residuals: Float[np.ndarray, "r K points E C"],
) -> Curves:
    """Measures the models and their mean."""
    problem, mean = explored.plan.setting.problem, residuals.mean(axis=1)
    n, squares = len(problem.y_train), (mean**2).mean(axis=3)
    errors = {split: part.mean(axis=1).T for split, part in (("train", squares[:, :n]), ("test", squares[:, n:]))}
    at_end, accuracy = mean[-1, n:].transpose(1, 0, 2) + problem.y_test, np.nan
    if problem.labels_test is not None and np.isfinite(at_end).all():
        accuracy = float(np.mean(problem.accuracy(at_end)))
    functions = residuals[-1, :, n:, :, 0].transpose(2, 0, 1) + problem.y_test[:, 0]
    return Curves(rounds, errors, accuracy, functions, _residuals(clients, mean[-1]))


def _residuals(clients: _Clients, mean: Float[np.ndarray, "points E C"]) -> Float[np.ndarray, "N"]:
    """Returns the root mean square of the residuals at each client's examples."""
    squares = (mean**2).mean(axis=(1, 2))
    return np.sqrt([squares[rows].mean() for rows in clients.rows])


def _remark(controls: Controls, stable: float, errors: Float[np.ndarray, "E r"]) -> str:
    """Returns in words whether the run is stable."""
    by_round = errors.mean(axis=0)
    grows = divergence([errors[:, -1]], by_round) or by_round[-1] > by_round[0]
    if grows:
        return f"unstable: the training error grows at rate {controls.learning_rate:g}"
    if controls.learning_rate > stable:
        return f"the error falls, but above rate {stable:.3g} local steps of some clients overshoot"
    if controls.staleness:
        return f"the error falls; local steps are stable up to rate {stable:.3g}, but late answers may need less"
    return f"stable: local steps are, up to rate {stable:.3g}"
