"""Predicted runs of Fed-ensemble for an explorer, computed again within a fraction of a second as settings change.

``predict`` compiles a program for each shape of clients and cohorts, which takes seconds. Here the same recursion (see
``theory.flow``) runs in NumPy, which compiles nothing. Kernel, clients' eigenvectors, initial functions and cohorts are
cached, and computed again only if a setting changes them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import deque
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from fedtangent._src.checks import instance, whole
from fedtangent._src.comparison.forecast import Forecasting, Plan, plan_of
from fedtangent._src.comparison.predicted import prior_starts
from fedtangent._src.data.dataset import Dataset, check_dataset
from fedtangent._src.data.named import chosen, load
from fedtangent._src.data.own import SUFFIX
from fedtangent._src.data.partition.drawn import dirichlet
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
LOADED: dict[str, Any] = {
    "num_train": 500,
    "num_test": 200,
    "gap": True,
}  # options of a data set that is named, if it has them
EVALUATIONS = 15  # rounds at which a run is measured, besides the start
DRAWS, MANY_DRAWS = 8, 64  # initial functions of several outputs, and of one
BINS = 10  # groups of inputs that take the place of classes in regression
CURVE = {"activation": "erf", "w_std": 8.0, "b_std": 4.0, "last_w_std": 1.0}  # networks of one input, as in ``cases``
ALPHAS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0)
STEPS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 100)


@dataclasses.dataclass(frozen=True)
class Controls:
    """Settings of a run that the user of the explorer changes."""

    learning_rate: float = 1.0
    local_steps: int = 10
    alpha: float = 1.0
    """Concentration of the Dirichlet distribution of the clients' labels."""
    clients_per_round: int = 20
    num_models: int = 1
    staleness: int = 0
    """Rounds by which every answer is late."""
    width: int = 256
    """Width of the trained networks; the prediction is of infinite width."""


@dataclasses.dataclass(frozen=True, eq=False)
class Explored:
    """The parts of an explored run that stay the same while its ``Controls`` change; built by ``explored``.

    Attributes:
        data: The data set.
        source: Python call that loads the data; "" if the user gave a ``Dataset``.
        num_clients, num_rounds, seed: As for ``explored``.
        plan: The run with the first settings of the explorer, at learning rate 1, as ``ft.predict`` computes it.
        kernels: Tangent and prior kernel at the training and test points.
    """

    data: Dataset
    source: str
    num_clients: int
    num_rounds: int
    seed: int
    plan: Plan
    kernels: KernelBlocks

    @property
    def num_strata(self) -> int:
        """The number of strata: groups of clients of equal size. A round draws equally many clients from each group."""
        return _num_strata(self.num_clients)

    @property
    def is_curve(self) -> bool:
        """Whether examples have one input and one output."""
        return bool(_of_curve(self.data)) and self.plan.setting.problem.y_train.shape[1] == 1

    def first(self) -> Controls:
        """Returns the explorer's initial settings: all clients, and half of the largest stable learning rate.

        The local steps of every client are stable at that largest rate.
        """
        rate = float(f"{_clients(self, Controls.alpha).stable / 2:.2g}")
        return Controls(rate, clients_per_round=self.num_clients)

    def positions(self) -> dict[str, list[float]]:
        """Returns the values among which the user of the explorer chooses, for each setting by name."""
        rates = self.first().learning_rate * 10 ** (np.arange(-40, 25) / 20)
        return {
            "learning_rate": sorted({float(f"{rate:.2g}") for rate in rates}),
            "local_steps": list(STEPS),
            "alpha": list(ALPHAS),
            "clients_per_round": list(range(self.num_strata, self.num_clients + 1, self.num_strata)),
            "num_models": list(range(1, 9)),
            "staleness": list(range(9)),
            "width": [2**power for power in range(3, 12)],
        }


class Curves(NamedTuple):
    """A run of K models: errors by round, functions at the test points, and residuals of each client.

    Attributes:
        rounds: The r evaluated rounds.
        errors: Mean squared error of the mean of the K models, for "train" and "test", from each of E starts (initial
            functions; one for trained networks).
        accuracy: Test accuracy of this mean after the last round, averaged over starts; NaN in regression, or if the
            outputs are not finite.
        functions: First output of each model at the m test points, after the last round.
        residuals: Root mean square of the models' mean output minus the target at each client's examples, over all
            starts, after the last round.
    """

    rounds: Int[np.ndarray, "r"]
    errors: dict[str, Float[np.ndarray, "E r"]]
    accuracy: float
    functions: Float[np.ndarray, "E K m"]
    residuals: Float[np.ndarray, "N"]


class Moved(NamedTuple):
    """The predicted run for one choice of the settings; built by ``moved``.

    Attributes:
        curves: Errors by round, and functions and residuals after the last round.
        before: Root mean square of the models' mean output minus the target at each client's examples, before training.
        curvatures: Learning rate times eigenvalue of a client's kernel, divided by the client's number of examples; for
            every eigenvalue of every client. Local steps are stable up to 2.
        remark: Whether the run is stable, in words.
    """

    curves: Curves
    before: Float[np.ndarray, "N"]
    curvatures: Float[np.ndarray, "n"]
    remark: str


class _Clients(NamedTuple):
    """The clients for one value of ``alpha``, the concentration of their labels, with eigenvectors of their kernels.

    ``rows`` are each client's training examples, ``vectors`` the eigenvectors of its kernel. ``values`` are the
    eigenvalues of all clients, one client after the other, and ``sizes`` for each eigenvalue the number of examples
    of its client.
    """

    partition: Partition
    rows: list[Int[np.ndarray, "_"]]
    vectors: list[Float[np.ndarray, "_ _"]]  # modes of each client's kernel
    values: Float[np.ndarray, "n"]  # eigenvalues of all clients, one client after the other
    sizes: Float[np.ndarray, "n"]  # number of examples of the client of each eigenvalue

    @property
    def stable(self) -> float:
        """The largest rate at which the local steps of every client are stable, ``min_i 2 n_i / lambda_max_i``."""
        return float(2 / np.max(self.values / self.sizes))


def explored(data: Dataset | str, num_clients: int = 20, num_rounds: int = 30, seed: int = 0) -> Explored:
    """Checks the arguments of ``explore``, loads the data and computes the kernel of its examples.

    Args:
        data: A ``Dataset``, or the name of a data set, which is loaded with ``num_train=500``, ``num_test=200`` and
            ``gap=True`` if it has these options; a user's file may have fewer examples.
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
        if data.endswith(SUFFIX):  # a user's file may be smaller
            whole_file = load(data, seed=seed)
            for name, part in (("num_train", whole_file.x_train), ("num_test", whole_file.x_test)):
                sizes[name] = min(sizes[name], len(part))
        source = f"ft.data.load({', '.join([repr(data), *(f'{n}={v}' for n, v in sizes.items()), f'seed={seed}'])})"
        data = load(data, seed=seed, **sizes)
    instance("data", data, Dataset)
    check_dataset(data)
    points = len(data.x_train) + len(data.x_test)
    if points > MOST_POINTS:
        raise ValueError(f"data: got {points} training and test examples, must be at most {MOST_POINTS} to explore")
    whole("num_clients", num_clients, 1, len(data.x_train))
    whole("num_rounds", num_rounds)
    clients = _partition(data, num_clients, Controls.alpha, seed)
    algorithm = _algorithm(data, num_clients, Controls(clients_per_round=num_clients))
    examples, evaluation = run.examples_of(algorithm, data, clients), Evaluation(_every(num_rounds))
    draws = MANY_DRAWS if algorithm.model.output_size == 1 else DRAWS
    plan = plan_of(algorithm, examples, num_rounds, seed, evaluation, Forecasting(draws=draws, rates=False))
    return Explored(data, source, num_clients, num_rounds, seed, plan, plan.setting.blocks())


def python_call(explored: Explored, controls: Controls) -> str:
    """Returns Python code that predicts the run with ``ft.predict`` and trains it with ``ft.simulate``.

    Args:
        explored: The data and the parts of the run that do not change.
        controls: The settings.
    """
    c, n, seed = controls, explored.num_clients, explored.seed
    recipe, options, forecasting = "fed_avg", "", explored.plan.forecasting
    if c.staleness:
        late = f'ft.Staleness(delay={c.staleness}, buffered=True, discount="constant")'
        recipe, options = "fed_async", f'    staleness={late},\n    averaging=ft.Averaging(weighting="examples"),\n'
    if c.num_models > 1:
        recipe, options = "fed_ensemble", f"    base=ft.{recipe},\n{options}"
    by_class = explored.data.num_classes > 0
    inputs = "" if by_class else "x = data.x_train.reshape(len(data.x_train), -1)[:, 0]\n"
    labels = "data.y_train" if by_class else f"x.argsort().argsort() * {BINS} // len(x)"
    network = "".join(f", {name}={value!r}" for name, value in _of_curve(explored.data).items())
    return f"""import fedtangent as ft

ft.enable_x64()
data = {explored.source or "data  # as ft.explore got it"}
{inputs}clients = ft.partition.dirichlet({labels}, num_clients={n}, alpha={c.alpha}, seed={seed})
model = ft.models.mlp(data, widths=({c.width},){network})
algorithm = ft.{recipe}(
    model,
    ft.schedules.strata({n}, {c.num_models}, {explored.num_strata}, {c.clients_per_round // explored.num_strata}),
    client_learning_rate={c.learning_rate},
    work=ft.Work(steps={c.local_steps}, batch_size=None),
{options})
run = dict(num_rounds={explored.num_rounds}, seed={seed}, evaluation=ft.Evaluation({_every(explored.num_rounds)}))
forecasting = ft.Forecasting(draws={forecasting.draws}, rates=False)
theory = ft.predict(algorithm, data, clients, forecasting=forecasting, **run)
trained = ft.simulate(algorithm, data, clients, **run)
"""


def moved(explored: Explored, controls: Controls) -> Moved:
    """Predicts the run with the settings ``controls``; the numbers are those that ``ft.predict`` gives.

    Args:
        explored: The data and the parts of the run that do not change.
        controls: The settings.
    """
    clients, rate = _clients(explored, controls.alpha), controls.learning_rate
    factors = np.asarray(response(clients.values, rate, clients.sizes, controls.local_steps))
    of_clients = np.split(factors, np.cumsum([len(rows) for rows in clients.rows])[:-1])
    answers = [(vectors * gains) @ vectors.T for vectors, gains in zip(clients.vectors, of_clients, strict=True)]
    everyone, size = _cohorts(explored, controls.num_models), controls.clients_per_round // explored.num_strata
    cohorts = jax.tree.map(lambda part: part[:, :, :size].reshape(len(part), -1), everyone)
    cohorts = cohorts._replace(weight=np.asarray(clients.partition.sizes)[cohorts.client])
    rounds, start = np.array(explored.plan.setting.size.rounds), _start(explored, controls.num_models)
    with np.errstate(over="ignore", invalid="ignore"):
        parts = _follow(_theta(explored), clients.rows, answers, cohorts, controls.staleness, start, rounds)
        means, models = (part.reshape(*part.shape[:2], explored.plan.forecasting.draws, -1) for part in parts)
        curves, before = _measured(explored, clients, rounds, means, models), _residuals(clients, means[0])
    remark = _remark(controls, clients.stable, curves.errors["train"])
    return Moved(curves, before, rate * clients.values / clients.sizes, remark)


def trained(explored: Explored, controls: Controls, report: Reported) -> Curves:
    """Trains networks with the settings ``controls``, and returns the same measurements as for a predicted run.

    Args:
        explored: The data and the parts of the run that do not change.
        controls: The settings.
        report: Called with each ``Measurement`` of the run.

    Raises:
        FloatingPointError: The networks diverge.
    """
    algorithm, clients = _algorithm(explored.data, explored.num_clients, controls), _clients(explored, controls.alpha)
    evaluation = Evaluation(_every(explored.num_rounds), report=report, progress=False, stop_on_divergence=True)
    examples, problem = run.examples_of(algorithm, explored.data, clients.partition), explored.plan.setting.problem
    finished = run.simulate(
        algorithm, examples, num_rounds=explored.num_rounds, seed=explored.seed, evaluation=evaluation
    )
    if finished.history.evaluations[-1].round < explored.num_rounds:
        raise FloatingPointError(finished.status)
    inputs, targets = (
        np.concatenate(ends) for ends in ((problem.x_train, problem.x_test), (problem.y_train, problem.y_test))
    )
    residuals = (
        np.asarray(run.predict(algorithm, finished.state, inputs).members, np.float64) - targets
    )  # [K, points, C]
    residuals = residuals[:, :, None]  # of one start
    at_end = _measured(
        explored, clients, finished.history.evaluated[-1:], residuals.mean(axis=0, keepdims=True), residuals
    )
    curves = finished.history.curves()
    errors = {split: curves.get(f"{split}.mse", curves["train.mse"])[None] for split in at_end.errors}
    return at_end._replace(rounds=finished.history.evaluated, errors=errors)


def _num_strata(num_clients: int) -> int:
    """Returns the largest number of equal groups (strata) of at least four clients each, and at least 1."""
    return max(q for q in range(1, max(num_clients // 4, 1) + 1) if num_clients % q == 0)


def _every(num_rounds: int) -> int:
    return -(-num_rounds // EVALUATIONS)


def _of_curve(data: Dataset) -> dict[str, Any]:
    """Returns the options of ``mlp`` for examples with a single input; an empty dict for other data."""
    return CURVE if math.prod(data.x_train.shape[1:]) == 1 else {}


def _schedule(num_clients: int, controls: Controls) -> Schedule:
    number = _num_strata(num_clients)
    return strata(num_clients, controls.num_models, number, controls.clients_per_round // number)


def _algorithm(data: Dataset, num_clients: int, controls: Controls) -> Algorithm:
    """Builds the algorithm for the settings ``controls``, the same as the code of ``python_call``."""
    model = mlp(data, widths=(controls.width,), **_of_curve(data))
    schedule = _schedule(num_clients, controls)
    options = {"client_learning_rate": controls.learning_rate, "work": Work(controls.local_steps, batch_size=None)}
    base = fed_avg
    if controls.staleness:
        late = Staleness(delay=controls.staleness, buffered=True, discount="constant")
        base, options = fed_async, options | {"staleness": late, "averaging": Averaging(weighting="examples")}
    if controls.num_models == 1:
        return base(model, schedule, **options)
    return fed_ensemble(model, schedule, base=base, **options)


def _partition(data: Dataset, num_clients: int, alpha: float, seed: int) -> Partition:
    """Divides the examples among clients by a Dirichlet distribution of concentration ``alpha`` over labels.

    The labels are the classes; in regression they are ten groups of equal size along the first input.
    """
    x = np.asarray(data.x_train).reshape(len(data.x_train), -1)[:, 0]
    labels = data.y_train if data.num_classes else x.argsort().argsort() * BINS // len(x)
    return dirichlet(labels, num_clients=num_clients, alpha=alpha, seed=seed)


@functools.lru_cache(maxsize=64)
def _clients(explored: Explored, alpha: float) -> _Clients:
    """Divides the examples among clients, and computes eigenvectors and eigenvalues of each client's kernel.

    ``alpha`` is the concentration of the Dirichlet distribution of the clients' labels.
    """
    partition = _partition(explored.data, explored.num_clients, alpha, explored.seed)
    rows = [np.asarray(partition.client(i)) for i in range(explored.num_clients)]
    theta = np.asarray(explored.kernels.ntk_train)
    values, vectors = zip(*(known_modes(theta[np.ix_(one, one)]) for one in rows), strict=True)
    sizes = np.repeat(np.asarray(partition.sizes, float), partition.sizes)
    return _Clients(partition, rows, list(vectors), np.concatenate(values), sizes)


@functools.lru_cache(maxsize=16)
def _cohorts(explored: Explored, num_models: int) -> Cohort:
    """Returns the cohorts in which all clients take part, [R, Q, N / Q] for Q strata (groups of clients).

    A run with fewer clients in a round takes the first clients of each stratum.
    """
    size = explored.num_clients // explored.num_strata
    everyone = Controls(clients_per_round=explored.num_clients, num_models=num_models)
    schedule = _schedule(explored.num_clients, everyone)
    cohorts = drawn_cohorts(schedule, None, explored.num_rounds, explored.seed, None)
    return jax.tree.map(lambda part: part.reshape(explored.num_rounds, explored.num_strata, size), cohorts)


@functools.lru_cache(maxsize=16)
def _start(explored: Explored, num_models: int) -> Float[np.ndarray, "K points D"]:
    """Returns the residuals before training at the training and then the test points.

    The D columns are the pairs of E initial functions and C outputs.
    """
    algorithm = _algorithm(
        explored.data, explored.num_clients, Controls(clients_per_round=explored.num_clients, num_models=num_models)
    )
    setting = dataclasses.replace(explored.plan.setting, algorithm=algorithm)
    functions = np.concatenate(prior_starts(setting, explored.kernels, explored.plan.forecasting.draws), axis=2)
    residuals = functions - np.concatenate([setting.problem.y_train, setting.problem.y_test])
    return np.ascontiguousarray(residuals.transpose(1, 2, 0, 3)).reshape(*functions.shape[1:3], -1)


@functools.lru_cache(maxsize=4)
def _theta(explored: Explored) -> Float[np.ndarray, "n points"]:
    """Returns the tangent kernel of the training points with all points."""
    return np.concatenate([explored.kernels.ntk_train, np.asarray(explored.kernels.ntk_test_train).T], axis=1)


def _follow(
    theta: Float[np.ndarray, "n points"],
    rows: list[Int[np.ndarray, "_"]],
    answers: list[Float[np.ndarray, "_ _"]],
    cohorts: Cohort,
    staleness: int,
    start: Float[np.ndarray, "K points D"],
    rounds: Int[np.ndarray, "r"],
) -> tuple[Float[np.ndarray, "r points D"], Float[np.ndarray, "K points D"]]:
    """Computes the residuals of the models' mean after ``rounds``, and the residuals of each model at the end.

    In a round client i changes its model's function by ``-theta[rows[i]]' answers[i] g``, where g is the residual at
    its examples. The server averages these changes by the weights in ``cohorts``.

    Args:
        theta: Tangent kernel of the training points with all points.
        rows: Indices of each client's training examples.
        answers: Matrix of each client, which stands for its local steps.
        cohorts: Clients of each round with models and weights, [R, S].
        staleness: Number of rounds by which every answer is late.
        start: Residuals before training; D columns of initial functions and outputs.
        rounds: The evaluated rounds.
    """
    past, means = deque([start], maxlen=staleness + 1), [start.mean(axis=0)]
    for r, (client, model, weight) in enumerate(zip(*cohorts, strict=True), start=1):
        old, new = past[0], past[-1].copy()
        for k in np.unique(model):
            slots = model == k
            shares = weight[slots] / weight[slots].sum()
            moves = [share * (answers[i] @ old[k, rows[i]]) for i, share in zip(client[slots], shares, strict=True)]
            new[k] -= theta[np.concatenate([rows[i] for i in client[slots]])].T @ np.concatenate(moves)
        past.append(new)
        if r in rounds:
            means.append(new.mean(axis=0))
    return np.stack(means), past[-1]


def _measured(
    explored: Explored,
    clients: _Clients,
    rounds: Int[np.ndarray, "r"],
    means: Float[np.ndarray, "r points E C"],
    models: Float[np.ndarray, "K points E C"],
) -> Curves:
    """Computes the measurements of a run from residuals (outputs minus targets) at all points.

    ``means`` are residuals of the models' mean at ``rounds``, and ``models`` are residuals of each model at the end.
    """
    problem, squares = explored.plan.setting.problem, (means**2).mean(axis=3)
    n = len(problem.y_train)
    errors = {split: part.mean(axis=1).T for split, part in (("train", squares[:, :n]), ("test", squares[:, n:]))}
    at_end, accuracy = means[-1, n:].transpose(1, 0, 2) + problem.y_test, np.nan
    if problem.labels_test is not None and np.isfinite(at_end).all():
        accuracy = float(np.mean(problem.accuracy(at_end)))
    functions = models[:, n:, :, 0].transpose(2, 0, 1) + problem.y_test[:, 0]
    return Curves(rounds, errors, accuracy, functions, _residuals(clients, means[-1]))


def _residuals(clients: _Clients, mean: Float[np.ndarray, "points E C"]) -> Float[np.ndarray, "N"]:
    """Returns the root mean square of the residuals at each client's examples.

    ``mean`` are the residuals of the mean of the K models at all points, from each of E initial functions.
    """
    squares = (mean**2).mean(axis=(1, 2))
    return np.sqrt([squares[rows].mean() for rows in clients.rows])


def _remark(controls: Controls, stable: float, errors: Float[np.ndarray, "E r"]) -> str:
    """Returns in words whether a run is stable.

    ``stable`` is the largest learning rate at which every client's local steps are stable; ``errors`` are training
    errors.
    """
    by_round = errors.mean(axis=0)
    if divergence([errors[:, -1]], by_round) or by_round[-1] > by_round[0]:
        return f"unstable: the training error grows at rate {controls.learning_rate:g}"
    if controls.learning_rate > stable:
        return f"the error falls, but above rate {stable:.3g} local steps of some clients overshoot and grow"
    if controls.staleness:
        return f"the error falls; local steps are stable up to rate {stable:.3g}, with late answers rounds to less"
    return f"stable: the local steps of every client are, up to rate {stable:.3g}"
