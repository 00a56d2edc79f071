"""Privacy beside theory: the error of DP-FedAvg against epsilon, and the best rate and clipping bound of each budget.

Theory takes the networks as linear in their weights at infinite width: the server's noise is then a Gaussian function,
which later rounds train away. For every epsilon it searches a grid of learning rates and clipping bounds without
training a network. Networks are then trained on the whole grid, each with the same privacy budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src import checks
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.output.line_plots import points_with_errors
from fedtangent._src.types import Algorithm, Array, Model, Partition, PyTree

CLOSE = 0.1  # the relative distance within which an error counts as predicted
COSTLY = 0.1  # how much larger than the least error that of the predicted pair may be
COLUMNS = (
    "epsilon: {epsilon:g} | sigma: {noise:.3g} | best rate: {rate:.3g} | best clip: {clip:.3g} | "
    "predicted error: {predicted:.4f} | networks: {network:.4f} | their best: {least:.4f} | accuracy: {accuracy:.3f}"
)
REMARKS = (
    "errors: mean squared, of the test examples, targets one-hot less 1/C; best rate and clip: predicted ones, "
    "geometric means over seeds; their best: the least error of networks on the same grid",
    "epsilon is for the data of one client at the given delta; all clients take part in every round",
)


@dataclass(frozen=True)
class PrivacySettings:
    """Settings of the federation, its privacy budgets, and the grid of learning rates and clipping bounds."""

    epsilons: tuple[float, ...] = within((1.0, 4.0, 16.0, 64.0, 256.0), count=2, above=0, increasing=True)
    delta: float = within(1e-3, above=0, below=1)
    learning_rates: tuple[float, ...] = within((0.25, 0.5, 1.0, 2.0), above=0, increasing=True)
    clip_norms: tuple[float, ...] = within((0.3, 1.0, 3.0, 10.0), above=0, increasing=True)
    width: int = 1024  # of the one hidden layer
    num_train: int = within(1000, most=1400)
    num_test: int = within(300, most=397)
    num_clients: int = 500
    local_steps: int = 5
    num_rounds: int = 30
    num_runs: int = 16  # that theory draws for every pair


class Budget(NamedTuple):
    """Predicted and measured errors for one epsilon and seed.

    Attributes:
        epsilon: Privacy budget of the run.
        noise: Noise multiplier that gives this epsilon.
        rate, clip: Learning rate and clipping bound that theory predicts to be best.
        predicted: Mean squared test error that theory predicts at ``rate`` and ``clip``.
        losses: Mean squared test errors of networks trained on the whole grid, [rates, clips]; NaN where training
            diverged.
        place: Indices of ``rate`` and ``clip`` in ``losses``.
        accuracy: Test accuracy of the network trained at ``rate`` and ``clip``.
    """

    epsilon: float
    noise: float
    rate: float
    clip: float
    predicted: float
    losses: np.ndarray
    place: tuple[int, int]
    accuracy: float

    @property
    def network(self) -> float:
        """Mean squared test error of the network trained at ``rate`` and ``clip``."""
        return float(self.losses[self.place])

    @property
    def least(self) -> float:
        """Least mean squared test error of any network on the grid."""
        return float(np.nanmin(self.losses))


class PrivateTask(NamedTuple):
    """Examples of one seed, divided among clients, and the network; its ``init`` gives the same weights for any key.

    ``y`` and ``y_test`` are one-hot targets minus 1 / C, for C classes.
    """

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    labels_test: np.ndarray
    clients: Partition
    network: Model


def _task(study: Study, seed: int) -> PrivateTask:
    """Draws the examples of a seed, divides them among clients, and draws the network's initial weights."""
    settings, loaded = study.settings, ft.data.load(study.dataset, study.data_dir, seed)
    checks.whole("num_train", settings.num_train, most=len(loaded.x_train))
    checks.whole("num_test", settings.num_test, most=len(loaded.x_test))
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(loaded.x_train))[: settings.num_train]
    x, x_test = loaded.x_train[rows], loaded.x_test[: settings.num_test]
    labels, labels_test = np.asarray(loaded.y_train)[rows], np.asarray(loaded.y_test)[: settings.num_test]
    y, y_test = (
        ft.data.classification_targets(part, loaded.num_classes, centred=True) for part in (labels, labels_test)
    )
    network = ft.models.mlp(math.prod(x.shape[1:]), loaded.num_classes, (settings.width,), "erf")
    start = network.init(jax.random.key(seed))
    clients = ft.partition.iid(len(x), settings.num_clients, seed=seed)
    return PrivateTask(x, y, x_test, y_test, labels_test, clients, network._replace(init=lambda key: start))


def _grid(settings: PrivacySettings) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return settings.learning_rates, settings.clip_norms


def _networks(
    of: PrivateTask, settings: PrivacySettings, noises: list[float], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Trains networks at every noise multiplier, learning rate and clipping bound.

    Returns mean squared test errors, NaN if training diverged, and test accuracies, [noises, rates, clips] each.
    """
    work, schedule = (
        ft.Work(steps=settings.local_steps, batch_size=None),
        ft.schedules.all_clients(settings.num_clients),
    )
    x_test, y_test = jnp.asarray(of.x_test, jnp.float32), jnp.asarray(of.y_test, jnp.float32)
    data = ft.data.federated_data(of.x, of.y, of.clients, jnp.float32)

    def build(noise: Any, rate: Any, clip: Any) -> Algorithm:
        return ft.dp_fed_avg(of.network, schedule, rate, work, ft.ClientPrivacy(clip, noise), loss="squared_error")

    def measure(algorithm: Algorithm, state: PyTree) -> dict[str, Array]:
        outputs, members = algorithm.predict(state, x_test)
        accuracy = ft.measures.accuracy(members, of.labels_test, "squared_error")
        return {"mse": jnp.mean((outputs - y_test) ** 2), "accuracy": accuracy}

    grid = {"noise": noises, "rate": list(settings.learning_rates), "clip": list(settings.clip_norms)}
    last = ft.Evaluation(settings.num_rounds, measure)
    run = ft.sweep(build, data, num_rounds=settings.num_rounds, seeds=[seed], grid=grid, evaluation=last)
    shape = tuple(map(len, grid.values()))
    mse, accuracy = (run.metrics[name][0, :, -1].astype(float).reshape(shape) for name in ("mse", "accuracy"))
    return np.where(np.isfinite(mse), mse, np.nan), accuracy


def _budgets(study: Study, seed: int, noises: list[float]) -> Iterator[Budget]:
    """Predicts the best pair of rate and clipping bound for every epsilon, and trains networks with all pairs."""
    settings, of = study.settings, _task(study, seed)
    assert of.network.kernel is not None
    kernels = ft.kernels.kernel_blocks(of.network.kernel, of.x, of.x_test)
    schedule = ft.schedules.all_clients(settings.num_clients)
    cohorts = ft.schedules.drawn_cohorts(schedule, of.clients, settings.num_rounds, seed=seed)
    start = of.network.init(jax.random.key(seed))
    f0 = [np.asarray(of.network.apply(start, jnp.asarray(x, jnp.float32)), float) for x in (of.x, of.x_test)]
    losses, accuracies = _networks(of, settings, noises, seed)
    rule, grid = ft.theory.Rule(settings.local_steps, settings.learning_rates[0]), _grid(settings)
    flow = ft.theory.federated_flow(kernels, of.y, of.clients, cohorts, rule)
    for i, (epsilon, noise) in enumerate(zip(settings.epsilons, noises, strict=True)):
        private = ft.theory.private_flow(flow, settings.clip_norms[0], noise)
        best = private.best(of.y_test, *grid, num_runs=settings.num_runs, seed=seed, f0_train=f0[0], f0_test=f0[1])
        pair = best.learning_rate, best.clip_norm
        place = grid[0].index(pair[0]), grid[1].index(pair[1])
        yield Budget(
            epsilon, noise, best.learning_rate, best.clip_norm, best.loss, losses[i], place, accuracies[(i, *place)]
        )


def _noises(settings: PrivacySettings) -> list[float]:
    """Computes the noise multiplier that gives each epsilon of the settings."""
    count, rounds = settings.num_clients, settings.num_rounds
    of_run = partial(ft.measures.noise_multiplier, num_clients=count, clients_per_round=count, num_rounds=rounds)
    return [of_run(epsilon, delta=settings.delta) for epsilon in settings.epsilons]


def check(study: Study) -> None:
    """Raises ``ValueError`` for wrong settings.

    It finds them by computing the noise multiplier of every epsilon and drawing the examples of the first seed.
    """
    _noises(study.settings)
    _task(study, study.seeds[0])


def run(study: Study) -> lab.Outcome:
    """Predicts best rate, clipping bound and error for every epsilon and seed, and compares with trained networks."""
    settings, by_epsilon = study.settings, dict[float, list[Budget]]()
    noises = _noises(settings)
    for seed in study.each_seed():
        for one in _budgets(study, seed, noises):
            by_epsilon.setdefault(one.epsilon, []).append(one)
            values = {"predicted": [one.predicted], "mse": [one.network], "least": [one.least]}
            study.keep(lab.metric_rows(f"epsilon {one.epsilon:g}", seed, [settings.num_rounds], values, "test"))
            errors = f"error {one.network:.4f}, predicted {one.predicted:.4f}"
            study.say(f"epsilon {one.epsilon:g}: rate {one.rate:g}, clip {one.clip:g}, {errors}")
    rows = [_row(budgets) for budgets in by_epsilon.values()]
    title = f"DP-FedAvg on {study.dataset}, {settings.num_rounds} rounds: mean of {len(study.seeds)} seeds"
    _draw(study, by_epsilon)
    return lab.Outcome((lab.table(title, rows, COLUMNS),), rows, tuple(_claims(by_epsilon)), remarks=REMARKS)


def _row(budgets: list[Budget]) -> lab.Row:
    """Builds the row of one epsilon: means over seeds, geometric means of learning rates and clipping bounds."""
    rate, clip = np.exp(np.mean(np.log([(b.rate, b.clip) for b in budgets]), axis=0))
    mean = {
        name: float(np.mean([getattr(b, name) for b in budgets]))
        for name in ("predicted", "network", "least", "accuracy")
    }
    return {"epsilon": budgets[0].epsilon, "noise": budgets[0].noise, "rate": float(rate), "clip": float(clip), **mean}


def _claims(by_epsilon: dict[float, list[Budget]]) -> Iterator[lab.Claim]:
    """Judges by intervals over seeds, for every epsilon, how good theory's predictions are.

    The network's error should be near the predicted error. At the learning rate and clipping bound that theory predicts
    to be best, it should be near the least error of the grid.
    """
    for epsilon, budgets in by_epsilon.items():
        off = lab.interval(b.network / b.predicted - 1 for b in budgets)
        answer = {True: lab.SEEN, False: lab.NOT_SEEN, None: lab.UNDECIDED}[off.within(0.0, CLOSE)]
        yield lab.Claim(
            f"epsilon {epsilon:g}: the error is within {CLOSE:.0%} of the predicted one", f"{off:+.3f}", answer
        )
        lost = lab.interval(b.network / b.least - 1 for b in budgets)
        statement = f"epsilon {epsilon:g}: the predicted rate and clip cost at most {COSTLY:.0%} of the least error"
        yield lost.claim_below(statement, "{:+.3f}", COSTLY)


def _draw(study: Study, by_epsilon: dict[float, list[Budget]]) -> None:
    """Plots test errors against epsilon: predicted, of networks at the predicted best pair, and of the best networks.

    A pair is a learning rate and a clipping bound.
    """

    def points(name: str) -> dict[int, tuple[float, float]]:
        values = [np.array([getattr(b, name) for b in budgets]) for budgets in by_epsilon.values()]
        return {i: (float(v.mean()), float(v.std(ddof=1) / len(v) ** 0.5)) for i, v in enumerate(values)}

    names = {
        "network": "networks at the predicted rate and clip",
        "least": "networks at their best",
        "predicted": "predicted",
    }
    ticks = {i: f"{epsilon:g}" for i, epsilon in enumerate(by_epsilon)}
    title = f"DP-FedAvg on {study.dataset}, width {study.settings.width}, mean of {len(study.seeds)} seeds"
    series = {label: points(name) for name, label in names.items()}
    points_with_errors(series, ticks, ("epsilon", "mean squared error, test"), title, study.figures.path("utility"))


PAPER = PrivacySettings()
SMALL = with_changes(
    PAPER,
    "epsilons=16,256 learning_rates=0.5,1 clip_norms=1,3 width=256",
    "num_train=300 num_test=100 num_clients=100 num_rounds=10",
)
SCALES = {"digits": by_scale(SMALL, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("mcmahan2018",), check=check, least_seeds=2, exact=True),)
