"""Learning rates, features and laziness of FedAvg against the width of networks (Yang et al., 2022).

Networks in the ntk, the standard and the maximal-update parameterization are trained by FedAvg at many learning rates
and several widths. In the maximal-update parameterization the best rate, and how much the features change, should not
depend on the width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src import pytrees
from fedtangent._src.comparison.laziness import linearised_paths, parts
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.models.dense import PARAMETERIZATIONS, forward
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent._src.types import Algorithm, Array, FederatedData, Model, PyTree

STEP = 2.0  # of the grid of rates
ROUNDING = 1e-9  # of steps
MOST_COST = 1.1  # of a loss at another network's best rate, relative to the least loss
FLAT = -0.25  # slope between that of a quantity of order 1 and that of one of order width^-1/2
MOST_SHOWN = 1.5  # of the first loss, the largest that is drawn
PANELS = {"features": "change of features", "laziness": "laziness"}
COLUMNS = (
    "parameterization: {parameterization} | width: {width} | best rate: {best_rate:.3g} | loss: {loss:.4f} | "
    "at the narrowest's rate: {loss_at_first:.4f} | features move: {features:.3g} | outputs move: {outputs:.3g} | "
    "laziness: {laziness:.3g}"
)
REMARKS = (
    "best rates have the least training loss after the last round; losses are half the squared error of an example",
    "seeds draw weights, cohorts and minibatches; all have the data and clients of the first seed",
    "at one rate for all widths, features (of the last hidden layer, before the activation) and outputs move by a root "
    "mean square at test examples, and laziness is the distance of a network from its linearisation, relative to how "
    "far the linearisation moves",
)


@dataclass(frozen=True)
class FeatureSettings:
    """Settings of the study of widths: networks, clients and learning rates.

    In the standard parameterization the rates are divided by the largest of ``widths``.
    """

    widths: tuple[int, ...] = within((64, 256, 1024), count=2, increasing=True)
    hidden_layers: int = 2
    least_rate: float = within(1 / 16, above=0)  # the lowest learning rate to try
    num_rates: int = within(9, least=2)  # rates to try, each twice the one before
    rate: float = within(0.25, above=0)  # at which features, outputs and laziness are measured
    num_train: int = 500
    num_test: int = 100
    num_clients: int = 10
    clients_per_round: int = 5
    alpha: float = within(0.5, above=0)  # of the Dirichlet partition
    local_steps: int = 10
    batch_size: int = 16
    num_rounds: int = 20


class TrainedWidth(NamedTuple):
    """Losses at all learning rates, for one parameterization, width and seed, and how far the network changed.

    Attributes:
        rates: Client learning rates that were tried.
        losses: Training loss at each rate after the last round; infinite if the run diverged.
        start: Training loss before the first round.
        changes: At one rate for all widths, how far "features" and "outputs" move (root mean square at the test
            examples), and "laziness": the distance of the network from its linearisation, divided by how far the
            linearisation moves.
    """

    parameterization: str
    width: int
    seed: int
    rates: np.ndarray
    losses: np.ndarray
    start: float
    changes: dict[str, float]

    @property
    def at(self) -> int:
        """Index of the learning rate with the least training loss."""
        return int(np.argmin(self.losses))


class _Problem(NamedTuple):
    settings: FeatureSettings
    data: FederatedData
    x_test: Array

    def algorithm(self, model: Model, rate: float | Array) -> Algorithm:
        """Builds FedAvg of a model at a learning rate."""
        schedule = ft.schedules.uniform_sampling(self.settings.num_clients, self.settings.clients_per_round)
        work = ft.Work(steps=self.settings.local_steps, batch_size=self.settings.batch_size)
        return ft.fed_avg(model, schedule, rate, work, loss="squared_error")


def _problem_of(study: Study) -> _Problem:
    settings, seed = study.settings, study.seeds[0]
    loaded = ft.data.load(study.dataset, study.data_dir, seed, num_train=settings.num_train, num_test=settings.num_test)
    targets = ft.data.classification_targets(loaded.y_train, loaded.num_classes, centred=True)
    clients = ft.partition.dirichlet(loaded.y_train, settings.num_clients, settings.alpha, seed=seed)
    data = ft.data.federated_data(loaded.x_train, targets, clients, jnp.float32)
    return _Problem(settings, data, jnp.asarray(loaded.x_test, jnp.float32))


def _grid(settings: FeatureSettings, parameterization: str) -> tuple[list[float], float]:
    """Returns the learning rates to try, and the single rate at which changes of features are measured.

    In the standard parameterization both are divided by the largest width, and more rates are tried: the highest one,
    before the division, is larger by the ratio of the largest to the smallest width, rounded up to a power of 2.
    """
    steps, unit = settings.num_rates, 1.0
    if parameterization == "standard":
        wider = settings.widths[-1] / settings.widths[0]
        steps, unit = steps + math.ceil(math.log(wider, STEP)), settings.widths[0] * wider
    return [settings.least_rate * STEP**i / unit for i in range(steps)], settings.rate / unit


def _train(problem: _Problem, parameterization: str, width: int, seeds: tuple[int, ...]) -> list[TrainedWidth]:
    """Trains networks of one width with every seed at all rates, and their linearisations at one rate (``_grid``)."""
    settings, data, x_test = problem
    model = ft.models.mlp(
        math.prod(data.x.shape[1:]), data.y.shape[1], (width,) * settings.hidden_layers, "relu", parameterization
    )
    rates, rate = _grid(settings, parameterization)

    def measure(algorithm: Algorithm, state: PyTree) -> dict[str, Array]:
        assert algorithm.params is not None
        outputs = algorithm.predict(state, data.x).mean
        hidden = forward(model.structure, pytrees.take(algorithm.params(state), 0), x_test)[1]
        loss = 0.5 * jnp.mean(jnp.sum((outputs - data.y) ** 2, axis=1))
        return {"loss": loss, "features": hidden[-2], "outputs": hidden[-1]}

    swept = ft.sweep(
        functools.partial(problem.algorithm, model),
        data,
        num_rounds=settings.num_rounds,
        seeds=seeds,
        grid={"rate": [*rates, rate]},
        evaluation=ft.Evaluation(measure=measure),
    ).metrics
    losses = np.where(np.isfinite(swept["loss"]), swept["loss"], np.inf)
    features, outputs = (swept[name][:, -1, 1] - swept[name][:, -1, 0] for name in ("features", "outputs"))
    paths = linearised_paths(problem.algorithm(model, rate), model, data, x_test, (0, settings.num_rounds))
    lines = np.stack([paths(seed)[:, 0] for seed in seeds])
    changes = {
        "features": np.sqrt(np.mean(features**2, axis=(1, 2))),
        "outputs": np.sqrt(np.mean(outputs**2, axis=(1, 2))),
        "laziness": parts(outputs, lines[:, 1] - lines[:, 0]).feature_learning,
    }
    return [
        TrainedWidth(
            parameterization,
            width,
            seed,
            np.array(rates),
            losses[i, :-1, 1],
            float(losses[i, 0, 0]),
            {name: float(values[i]) for name, values in changes.items()},
        )
        for i, seed in enumerate(seeds)
    ]


def check(study: Study) -> None:
    """Raises ``ValueError`` for wrong settings: builds the first seed's data and FedAvg of a small network."""
    problem = _problem_of(study)
    problem.algorithm(ft.models.mlp(math.prod(problem.data.x.shape[1:]), problem.data.y.shape[1], (1,)), 1.0)


def run(study: Study) -> lab.Outcome:
    """Trains networks of every parameterization, width and seed, and compares best rates and changes of features."""
    problem, trained = _problem_of(study), list[TrainedWidth]()
    for parameterization in PARAMETERIZATIONS:
        for width in study.settings.widths:
            of_width = _train(problem, parameterization, width, study.seeds)
            trained += of_width
            for one in of_width:
                values = {"best_rate": one.rates[one.at], "loss": one.losses[one.at], **one.changes}
                name = f"{parameterization}, width {width}"
                study.keep(lab.metric_rows(name, one.seed, study.settings.num_rounds, values))
            rates = ", ".join(f"{one.rates[one.at]:.3g}" for one in of_width)
            study.say(f"{parameterization}, width {width}: best rates {rates}")
    rows = list(_rows(trained))
    title = f"FedAvg on {study.dataset}, {study.settings.num_rounds} rounds: mean of {len(study.seeds)} seeds"
    at_edge = sorted({one.parameterization for one in trained if one.at in (0, len(one.rates) - 1)})
    edges = [f"best rates at an edge of their grid: {', '.join(at_edge)}"] if at_edge else []
    _draw(study, trained)
    claims = tuple(_claims(trained))
    return lab.Outcome((lab.table(title, rows, COLUMNS),), rows, claims, remarks=(*REMARKS, *edges))


def _rows(trained: list[TrainedWidth]) -> Iterator[lab.Row]:
    """Yields a row for each parameterization and width: means over seeds, geometric means of learning rates.

    It has the loss at the best rate, and at the best rate of the narrowest network of the same seed.
    """
    narrowest = {(one.parameterization, one.seed): one.at for one in reversed(trained)}
    for (parameterization, width), group in lab.grouped(trained, "parameterization", "width").items():
        yield {
            "parameterization": parameterization,
            "width": width,
            "best_rate": float(np.exp(np.mean([np.log(one.rates[one.at]) for one in group]))),
            "best_rates": [one.rates[one.at] for one in group],
            "loss": float(np.mean([one.losses[one.at] for one in group])),
            "loss_at_first": float(np.mean([one.losses[narrowest[parameterization, one.seed]] for one in group])),
            **{name: float(np.mean([one.changes[name] for one in group])) for name in group[0].changes},
        }


def _steps_apart(narrow: TrainedWidth, wide: TrainedWidth) -> float:
    """Computes how many steps of the grid of learning rates lie between the best rates of two networks."""
    return abs(math.log(wide.rates[wide.at] / narrow.rates[narrow.at], STEP))


def _cost(narrow: TrainedWidth, wide: TrainedWidth) -> float:
    """Computes the loss of the ``wide`` network at the ``narrow`` one's best rate, over the wide one's least loss.

    The former counts as 1.5 times (``MOST_SHOWN``) the loss before training if it is larger than that.
    """
    return float(min(wide.losses[narrow.at], MOST_SHOWN * wide.start) / wide.losses[wide.at])


def _claims(trained: list[TrainedWidth]) -> Iterator[lab.Claim]:
    """Judges by intervals over seeds how best learning rates, features and laziness depend on the width.

    Best rates are compared between the narrowest and the widest networks; for the others slopes in the width are
    judged.
    """
    by_name = {name: group for (name,), group in lab.grouped(trained, "parameterization").items()}
    ends = {name: [(of[0], of[-1]) for of in lab.grouped(group, "seed").values()] for name, group in by_name.items()}
    apart = lab.interval(_steps_apart(*pair) for pair in ends["maximal_update"])
    statement = "maximal_update: one best rate for all widths, within a step of the grid"
    yield apart.claim_below(statement, "steps apart: {:.2f}", 1 + ROUNDING)
    near, far = (lab.interval(_cost(*pair) for pair in ends[name]) for name in ("maximal_update", "standard"))
    statement = "at the narrowest networks' best rate the widest ones' loss is more than 1.1 times their least loss"
    yield near.claim_below(f"maximal_update: {statement.replace('more', 'less')}", "{:.3f} times", MOST_COST)
    yield far.claim_above(f"standard: {statement}", "{:.3f} times", MOST_COST)
    for name, text in PANELS.items():

        def change(one: TrainedWidth, name: str = name) -> float:
            return one.changes[name]

        flat, falling = (lab.log_slopes(by_name[p], "width", change, "seed") for p in ("maximal_update", "ntk"))
        yield flat.claim_above(f"maximal_update: {text} does not fall with the width", "slope {:+.2f}", FLAT)
        yield falling.claim_below(f"ntk: {text} falls with the width", "slope {:+.2f}", FLAT)


def _draw(study: Study, trained: list[TrainedWidth]) -> None:
    """Plots losses by learning rate, and changes of features and laziness by width, means over seeds."""
    figures, title = study.figures, f"FedAvg on {study.dataset}, mean of {len(study.seeds)} seeds"
    by_rate, most = list[BoundedPanel](), MOST_SHOWN * trained[0].start
    by_name = {name: group for (name,), group in lab.grouped(trained, "parameterization").items()}
    for name, group in by_name.items():
        losses = {
            f"width {width}": np.mean([np.minimum(one.losses, most) for one in of_width], axis=0)
            for (width,), of_width in lab.grouped(group, "width").items()
        }
        by_rate.append(BoundedPanel(name, group[0].rates, losses, {}))
    names = "client learning rate", f"training loss, at most {MOST_SHOWN:g} of the first"
    bounded(by_rate, title, names, None, figures.path("rates"), log="xy")
    rows, widths = lab.grouped(_rows(trained), "parameterization"), np.array(study.settings.widths)
    by_width = [
        BoundedPanel(text, widths, {name: np.array([row[key] for row in of]) for (name,), of in rows.items()}, {})
        for key, text in PANELS.items()
    ]
    bounded(by_width, title, ("width", "at one learning rate"), None, figures.path("widths"), log="xy")


DEFAULT = FeatureSettings()
SMALL = with_changes(DEFAULT, "num_train=200 local_steps=4 num_rounds=8")
SCALES = {"digits": by_scale(SMALL, DEFAULT), "fashion_mnist": by_scale(SMALL, DEFAULT)}
ENTRIES = (experiment(__name__, run, SCALES, ("yang2021", "yang2022"), check=check, least_seeds=2),)
