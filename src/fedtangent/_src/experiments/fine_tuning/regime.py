"""Federated fine-tuning beside its linearisation: the whole network, its last layer, and LoRA (Hu et al., 2021).

A network is trained on one half of the classes and fine-tuned federatedly on the other half, from the same outputs.
Theory linearises at the pre-trained weights: it predicts the curve and the best learning rate, with no network trained.
Networks are then trained at many rates around the predicted one. Laziness is the distance of a network from its
linearisation, relative to how far training moves the latter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src import pytrees
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.experiments.lab.results import (
    Claim,
    Outcome,
    Row,
    disagreeing,
    grouped,
    interval,
    metric_rows,
    table,
)
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent._src.types import Algorithm, Array, Model, Partition, PyTree

WHOLE, LAST = "whole network", "last layer"
FACTORS = 2.0 ** (np.arange(-4, 9) / 2)  # simulated rates over the predicted best one
CLOSE = 2.0  # the factor within which the predicted best rate is to be the best
LAZY = 0.1  # distance below which we call a network lazy
REMARKS = (
    "laziness and curves are at half the predicted best rate: distance of network and linearisation after the last "
    "round at the test examples, over how far the linearisation moved",
    "best rates are those of the least test loss after the last round; of networks, among rates a factor 1.41 apart",
    "accuracy: of networks at their best rate, and predicted at the predicted one; start: of the pre-trained network",
)


@dataclass(frozen=True)
class RegimeSettings:
    """The network, its pre-training by SGD, and federated fine-tuning."""

    width: int = 128  # of both hidden layers
    ranks: tuple[int, ...] = within((1, 4, 16), increasing=True)
    lora_scale: float = within(1.0, above=0)  # alpha over the rank
    num_pre_train: int = 600
    pre_steps: int = 1000
    num_train: int = within(200, most=800)
    num_test: int = 300
    num_clients: int = 10
    clients_per_round: int = 5
    alpha: float = within(0.5, above=0)  # of the Dirichlet partition
    local_steps: int = 10
    batch_size: int = 16
    num_rounds: int = within(20, least=2)


class Task(NamedTuple):
    """The data of one seed, and the network that was pre-trained on the other classes."""

    network: Model
    weights: PyTree
    data: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # training inputs and labels, test inputs and labels
    clients: Partition
    num_classes: int


class Tuned(NamedTuple):
    """Fine-tuning of one part of the network with one seed."""

    part: str
    num_parameters: int
    rounds: np.ndarray  # [r], of the curves
    curves: np.ndarray  # test loss of the network and of its prediction, [2, r]
    start: float  # accuracy of the pre-trained network
    accuracies: tuple[float, float]  # of the network, and predicted
    laziness: float
    predicted: tuple[np.ndarray, np.ndarray]  # rates, and the loss that is predicted at each
    simulated: tuple[np.ndarray, np.ndarray]  # rates, and the loss of the network at each; NaN if it diverged
    best: tuple[float, float]  # rate of the least loss of networks, and predicted
    verdict: Verdict  # the linearised network is the predicted one

    @property
    def doublings(self) -> float:
        """Logarithm to base 2 of the predicted best rate over that of networks."""
        return math.log2(self.best[1] / self.best[0])


def task_of(study: Study, seed: int) -> Task:
    """Draws the examples of a seed and trains the network on the first half of the classes.

    Args:
        study: The study.
        seed: Seed of examples, clients and pre-training.
    """
    settings, loaded = study.settings, ft.data.load(study.dataset, study.data_dir, seed)
    half, rng = loaded.num_classes // 2, np.random.default_rng(seed)
    y_train, y_test = np.asarray(loaded.y_train), np.asarray(loaded.y_test)
    old = rng.permutation(np.flatnonzero(y_train < half))[: settings.num_pre_train]
    new = rng.permutation(np.flatnonzero((y_train >= half) & (y_train < 2 * half)))[: settings.num_train]
    test = np.flatnonzero((y_test >= half) & (y_test < 2 * half))[: settings.num_test]
    data = (loaded.x_train[new], y_train[new] - half, loaded.x_test[test], y_test[test] - half)
    network = ft.models.mlp(math.prod(loaded.x_train.shape[1:]), half, (settings.width,) * 2, b_std=0.1)
    one = ft.fed_avg(network, ft.schedules.all_clients(1), 1.0, ft.Work(steps=settings.pre_steps, batch_size=32))
    trained = ft.simulate(one, (loaded.x_train[old], y_train[old]), [np.arange(len(old))], num_rounds=1, seed=seed)
    assert one.params is not None
    clients = ft.partition.dirichlet(data[1], settings.num_clients, settings.alpha, seed=seed)
    return Task(network, pytrees.take(one.params(trained.state), 0), data, clients, half)


def parts_of(task: Task, settings: RegimeSettings) -> dict[str, Model]:
    """Returns the models that are fine-tuned, by name."""
    of_rank = partial(ft.models.lora, task.network, task.weights)
    return {
        WHOLE: task.network._replace(init=lambda key: task.weights),
        LAST: ft.models.trainable(task.network, task.weights, f"^{len(task.weights) - 1}/"),
        **{f"LoRA {rank}": of_rank(rank, alpha=settings.lora_scale * rank) for rank in settings.ranks},
    }


def tune(task: Task, part: str, model: Model, settings: RegimeSettings, seed: int) -> Tuned:
    """Fine-tunes a model at many rates, beside what its linearisation predicts.

    Args:
        task: Data and clients.
        part: Name of the model.
        model: The model, whose ``init`` returns the pre-trained weights.
        settings: Settings.
        seed: Seed of the runs.
    """
    _, labels, x_test, y_test = task.data
    schedule = ft.schedules.uniform_sampling(settings.num_clients, settings.clients_per_round)
    work, targets = ft.Work(steps=settings.local_steps, batch_size=settings.batch_size), np.eye(task.num_classes)
    start = model.init(jax.random.key(seed))

    def fed_avg(rate: float | Array) -> Algorithm:
        return ft.fed_avg(model._replace(init=lambda key: start), schedule, rate, work, loss="squared_error")

    def measure(algorithm: Algorithm, state: PyTree) -> dict[str, Array]:
        outputs = algorithm.predict(state, jnp.asarray(x_test, jnp.float32)).mean
        right = jnp.argmax(outputs, axis=-1) == y_test
        return {"mse": jnp.mean((outputs - targets[y_test]) ** 2), "accuracy": jnp.mean(right)}

    run = {"num_rounds": settings.num_rounds, "seed": seed, "start": start}
    ends = ft.Evaluation(settings.num_rounds, progress=False)
    theory = ft.predict(fed_avg(0.1), task.data, task.clients, evaluation=ends, **run)
    assert theory.rates is not None
    federated = ft.data.federated_data(task.data[0], targets[labels], task.clients, jnp.float32)
    grid = {"rate": [float(rate) for rate in theory.rates.best * FACTORS]}
    sweep = ft.sweep(
        fed_avg,
        federated,
        num_rounds=settings.num_rounds,
        seeds=[seed],
        grid=grid,
        evaluation=ft.Evaluation(measure=measure),
    )
    losses, accuracies = (sweep.metrics[name][0, :, -1].astype(np.float64) for name in ("mse", "accuracy"))
    best = int(np.nanargmin(losses))
    every = ft.Evaluation(max(1, settings.num_rounds // 10), progress=False)
    side = ft.compare(fed_avg(theory.rates.best / 2), task.data, task.clients, evaluation=every, **run)
    curves = np.array([history.curves()["test.mse"] for history in (side.history, side.history.predicted)])
    return Tuned(
        part,
        pytrees.size(start),
        np.asarray(side.history.evaluated),
        curves,
        float(sweep.metrics["accuracy"][0, 0, 0]),
        (float(accuracies[best]), float(theory.best.mean("test", "accuracy")[-1])),
        float(side.feature_learning[-1, 0]),
        (theory.rates.tried, theory.rates.losses),
        (np.array(grid["rate"]), losses),
        (grid["rate"][best], theory.rates.best),
        side.verdicts[0],
    )


def run(study: Study) -> Outcome:
    """Fine-tunes every part with every seed."""
    results = list[Tuned]()
    for seed in study.each_seed():
        task = task_of(study, seed)
        for part, model in parts_of(task, study.settings).items():
            tuned = tune(task, part, model, study.settings, seed)
            results.append(tuned)
            for name, curve in zip(("network", "predicted"), tuned.curves, strict=True):
                study.keep(metric_rows(f"{part}, {name}", seed, tuned.rounds, {"mse": curve}, "test"))
            study.say(f"{part}: laziness {tuned.laziness:.3g}, best rates {tuned.best[0]:.3g} and {tuned.best[1]:.3g}")
    by_part = {part: tuned for (part,), tuned in grouped(results, "part").items()}
    rows = [_row(part, tuned) for part, tuned in by_part.items()]
    title = f"fine-tuning on {study.dataset}, {study.settings.num_rounds} rounds: mean of {len(study.seeds)} seeds"
    columns = (
        "part: {part} | parameters: {parameters} | accuracy: {accuracy:.3f} | predicted: {predicted_accuracy:.3f} | "
        "start: {start:.3f} | laziness: {laziness:.3g} | best rate: {best_rate:.3g} | "
        "predicted: {predicted_rate:.3g} | within 2: {close} of {seeds}"
    )
    verdicts = tuple(tuned.verdict._replace(subject=f"fine-tuning, {tuned.part}") for tuned in results)
    edges = sorted({tuned.part for tuned in results if tuned.best[0] in tuned.simulated[0][[0, -1]]})
    remarks = (*REMARKS, *([f"best rates of networks at an edge of their grid: {', '.join(edges)}"] if edges else []))
    _draw(study, by_part)
    return Outcome(
        (table(title, rows, columns),),
        rows,
        tuple(_claims(by_part)),
        remarks=remarks,
        failed=disagreeing(verdicts),
        verdicts=verdicts,
    )


def _row(part: str, tuned: list[Tuned]) -> Row:
    """Returns the means over seeds; of rates the geometric ones."""
    rates = np.exp(np.mean(np.log([one.best for one in tuned]), axis=0))
    accuracies = np.mean([one.accuracies for one in tuned], axis=0)
    return {
        "part": part,
        "parameters": tuned[0].num_parameters,
        "start": float(np.mean([one.start for one in tuned])),
        "accuracy": float(accuracies[0]),
        "predicted_accuracy": float(accuracies[1]),
        "laziness": float(np.mean([one.laziness for one in tuned])),
        "laziness_of_seeds": [one.laziness for one in tuned],
        "best_rate": float(rates[0]),
        "predicted_rate": float(rates[1]),
        "doublings": [one.doublings for one in tuned],
        "close": sum(abs(one.doublings) <= math.log2(CLOSE) + 1e-9 for one in tuned),
        "seeds": len(tuned),
    }


def _claims(by_part: dict[str, list[Tuned]]) -> Iterator[Claim]:
    """Judges laziness and the predicted best rate of each part by intervals over seeds."""
    for part, tuned in by_part.items():
        lazy = interval(one.laziness for one in tuned)
        yield lazy.claim_below(f"{part}: lazy, within {LAZY:g} of its linearisation", "{:.3g}", LAZY)
        apart = interval(abs(one.doublings) for one in tuned)
        statement = f"{part}: the predicted best rate is within a factor {CLOSE:g} of the best"
        yield apart.claim_below(statement, "doublings apart: {:.2f}", math.log2(CLOSE) + 1e-9)


def _draw(study: Study, by_part: dict[str, list[Tuned]]) -> None:
    """Draws losses by round, mean over seeds, and by rate, of the first seed; predictions are dashed."""
    by_round, by_rate = [], []
    for part, tuned in by_part.items():
        network, predicted = np.mean([one.curves for one in tuned], axis=0)
        by_round.append(BoundedPanel(part, tuned[0].rounds, {"network": network}, {"predicted": predicted}))
        (rates, losses), (tried, expected) = tuned[0].simulated, tuned[0].predicted
        shown, near = losses <= network[0], (tried >= rates[0]) & (expected <= network[0])
        measured, theory = {"network": losses[shown]}, {"predicted": expected[near]}
        by_rate.append(BoundedPanel(part, rates[shown], measured, theory, x_of_bounds=tried[near]))
    figures, title, loss = study.figures, f"fine-tuning on {study.dataset}", "mean squared error, test"
    bounded(by_round, f"{title}, mean of {len(study.seeds)} seeds", ("round", loss), None, figures.path("curves"))
    bounded(by_rate, f"{title}, one seed", ("client learning rate", loss), None, figures.path("rates"), log="xy")


PAPER = RegimeSettings()
SMALL = with_changes(PAPER, "width=16 ranks=1 num_pre_train=200 pre_steps=200 num_train=60 num_test=60 num_rounds=6")
SCALES = {"digits": by_scale(SMALL, PAPER), "fashion_mnist": by_scale(SMALL, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("hu2021",), least_seeds=2, exact=True),)
