"""Federated fine-tuning compared with its linearisation: the whole network, its last layer, and LoRA (Hu et al., 2021).

A network is trained on one half of the classes and fine-tuned federatedly on the other half. Theory linearises it at
the pre-trained weights, and predicts the learning curve and the best learning rate without training. Networks are then
trained at many rates around the predicted one. Laziness is the distance between the outputs of a network and of
its linearisation, relative to how far training moves the linearisation.
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
from fedtangent._src import checks, pytrees
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent._src.theory.flow.tuning import Rates
from fedtangent._src.types import Algorithm, Array, Model, Partition, PyTree, Schedule

FACTORS = 2.0 ** (np.arange(-4, 9) / 2)  # simulated rates over the predicted best one
CLOSE = 2.0  # the factor within which the predicted best rate is to be the best
ROUNDING = 1e-9  # of doublings
MOST_SHOWN = 2.0  # of the first loss, the largest that is drawn
LAZY = 0.1  # distance below which we call a network lazy
COLUMNS = (
    "part: {part} | parameters: {parameters} | accuracy: {accuracy:.3f} | predicted: {predicted_accuracy:.3f} | "
    "start: {start:.3f} | laziness: {laziness:.3g} | best rate: {best_rate:.3g} | "
    "predicted: {predicted_rate:.3g} | within 2: {close} of {seeds}"
)
REMARKS = (
    "laziness and curves are at half the predicted best rate: distance of network and linearisation after the last "
    "round at the test examples, over how far the linearisation moved",
    "best rates are those of the least test loss after the last round; of networks, among rates a factor 1.41 apart",
    "accuracy: of networks at their best rate, and predicted at the predicted one; start: of the pre-trained network",
)


@dataclass(frozen=True)
class FineTuningSettings:
    """Settings of the network, of its pre-training by SGD, and of federated fine-tuning."""

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


class PreTrained(NamedTuple):
    """A network pre-trained on half of the classes, and one seed's data of the other half for fine-tuning."""

    network: Model
    weights: PyTree
    data: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # training inputs and labels, test inputs and labels
    clients: Partition


class Tuned(NamedTuple):
    """Results of fine-tuning one part of the network (all, last layer, or LoRA) with one seed.

    Attributes:
        theory: Forecast of the linearised network, with the predicted best learning rate.
        side: Network and prediction side by side, at half the predicted best learning rate.
        losses: Test loss of the network at each rate after the last round; not finite where the run diverged.
        accuracies: Test accuracy at each rate, at the start and after the last round, [rates, 2].
    """

    part: str
    num_parameters: int
    theory: ft.types.Forecast
    side: ft.types.FromStart
    rates: np.ndarray  # of networks
    losses: np.ndarray
    accuracies: np.ndarray

    @property
    def at(self) -> int:
        """Index of the learning rate at which the network has the least test loss."""
        return int(np.nanargmin(self.losses))

    @property
    def predicted(self) -> Rates:
        """Learning rates that theory predicts: the best one, and the predicted loss at each rate of its grid."""
        assert self.theory.rates is not None
        return self.theory.rates

    @property
    def doublings(self) -> float:
        """Logarithm to base 2 of the predicted best learning rate over the best measured one."""
        return math.log2(self.predicted.best / self.rates[self.at])

    @property
    def laziness(self) -> float:
        """Laziness: distance of the network from its linearisation, over how far training moves the linearisation."""
        return float(self.side.feature_learning[-1, 0])

    @property
    def curves(self) -> np.ndarray:
        """Test loss of the network and of its prediction at each of E evaluations, [2, E]."""
        assert self.side.history.predicted is not None
        return np.array([history.curves()["test.mse"] for history in (self.side.history, self.side.history.predicted)])


class Halves(NamedTuple):
    """One seed's examples: half of the classes for pre-training, the other half for fine-tuning.

    Attributes:
        num_classes: Number of classes in each half.
        old: Inputs and labels for pre-training.
        data: Training inputs and labels, test inputs and labels, for fine-tuning.
        clients: Division of the training examples of ``data``.
    """

    num_classes: int

    old: tuple[np.ndarray, np.ndarray]
    data: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    clients: Partition


def _halves(study: Study, seed: int) -> Halves:
    """Draws the examples of a seed, and divides those for fine-tuning among clients."""
    settings, loaded = study.settings, ft.data.load(study.dataset, study.data_dir, seed)
    half, rng = loaded.num_classes // 2, np.random.default_rng(seed)
    y_train, y_test = np.asarray(loaded.y_train), np.asarray(loaded.y_test)
    rows_of = {
        "num_pre_train": rng.permutation(np.flatnonzero(y_train < half)),
        "num_train": rng.permutation(np.flatnonzero((y_train >= half) & (y_train < 2 * half))),
        "num_test": np.flatnonzero((y_test >= half) & (y_test < 2 * half)),
    }
    old, new, test = (
        rows[: checks.whole(name, getattr(settings, name), most=len(rows))] for name, rows in rows_of.items()
    )
    data = (loaded.x_train[new], y_train[new] - half, loaded.x_test[test], y_test[test] - half)
    clients = ft.partition.dirichlet(data[1], settings.num_clients, settings.alpha, seed=seed)
    return Halves(half, (loaded.x_train[old], y_train[old]), data, clients)


def _pre_training(halves: Halves, settings: FineTuningSettings) -> Algorithm:
    """Builds the algorithm that pre-trains a network on ``halves.old``: minibatch SGD, as FedAvg with one client."""
    pixels = math.prod(halves.old[0].shape[1:])
    network = ft.models.mlp(pixels, halves.num_classes, (settings.width,) * 2, b_std=0.1)
    work = ft.Work(steps=settings.pre_steps, batch_size=32)
    return ft.fed_avg(network, ft.schedules.all_clients(1), 1.0, work)


def _task_of(study: Study, seed: int) -> PreTrained:
    """Draws the examples of a seed and pre-trains the network on the first half of the classes."""
    halves = _halves(study, seed)
    sgd, everyone = _pre_training(halves, study.settings), [np.arange(len(halves.old[0]))]
    path = ft.params_by_round(sgd, halves.old, everyone, num_rounds=1, seed=seed)
    weights = jax.tree.map(lambda leaf: jnp.asarray(leaf[-1, 0]), path)
    return PreTrained(sgd.model, weights, halves.data, halves.clients)


def check(study: Study) -> None:
    """Raises ``ValueError`` for wrong settings: draws the first seed's examples and builds its algorithms."""
    settings = study.settings
    _pre_training(_halves(study, study.seeds[0]), settings)
    _local(settings)


def _local(settings: FineTuningSettings) -> tuple[Schedule, ft.Work]:
    """Builds the schedule of clients and their local work in fine-tuning."""
    schedule = ft.schedules.uniform_sampling(settings.num_clients, settings.clients_per_round)
    return schedule, ft.Work(steps=settings.local_steps, batch_size=settings.batch_size)


def _parts(task: PreTrained, settings: FineTuningSettings) -> dict[str, Model]:
    """Returns the models to fine-tune by name: the whole network, its last layer, and LoRA of each rank."""
    of_rank = partial(ft.models.lora, task.network, task.weights)
    return {
        "whole network": task.network,
        "last layer": ft.models.trainable(task.network, task.weights, f"^{len(task.weights) - 1}/"),
        **{f"LoRA {rank}": of_rank(rank, alpha=settings.lora_scale * rank) for rank in settings.ranks},
    }


def _tune(task: PreTrained, part: str, model: Model, settings: FineTuningSettings, seed: int) -> Tuned:
    """Fine-tunes a model at many learning rates, and predicts the same runs from its linearisation.

    Args:
        task: The pre-trained network and the data.
        part: Name of the model in tables.
        model: The model, one of ``_parts``.
        settings: Settings.
        seed: Seed of cohorts, minibatches and, for LoRA, initial weights.

    Returns:
        The results; networks are trained at 13 rates, from a quarter of the predicted best rate to 16 times this rate.
    """
    x, labels, x_test, labels_test = task.data
    schedule, work = _local(settings)
    targets, targets_test = (
        ft.data.classification_targets(part, model.output_size, centred=True) for part in (labels, labels_test)
    )  # centred, as ``predict`` and ``compare`` take labels
    start = task.weights if model is task.network else model.init(jax.random.key(seed))

    def fed_avg(rate: float | Array) -> Algorithm:
        return ft.fed_avg(model._replace(init=lambda key: start), schedule, rate, work, loss="squared_error")

    def measure(algorithm: Algorithm, state: PyTree) -> dict[str, Array]:
        outputs, members = algorithm.predict(state, jnp.asarray(x_test, jnp.float32))
        accuracy = ft.measures.accuracy(members, labels_test, "squared_error")
        return {"mse": jnp.mean((outputs - targets_test) ** 2), "accuracy": accuracy}

    run = {"num_rounds": settings.num_rounds, "seed": seed, "start": start}
    ends, often = (ft.Evaluation(max(1, settings.num_rounds // n), progress=False) for n in (1, 10))
    theory = ft.predict(fed_avg(0.1), task.data, task.clients, evaluation=ends, **run)
    assert theory.rates is not None
    federated = ft.data.federated_data(x, targets, task.clients, jnp.float32)
    rates, evaluation = [float(rate) for rate in theory.rates.best * FACTORS], ft.Evaluation(measure=measure)
    rounds, grid = settings.num_rounds, {"rate": rates}
    networks = ft.sweep(fed_avg, federated, num_rounds=rounds, seeds=[seed], grid=grid, evaluation=evaluation)
    losses, accuracies = (networks.metrics[name][0].astype(np.float64) for name in ("mse", "accuracy"))
    side = ft.compare(fed_avg(theory.rates.best / 2), task.data, task.clients, evaluation=often, **run)
    assert isinstance(side, ft.types.FromStart)
    return Tuned(part, pytrees.size(start), theory, side, np.array(rates), losses[:, -1], accuracies)


def run(study: Study) -> lab.Outcome:
    """Trains the whole network, its last layer and LoRA further with every seed; compares them with predictions."""
    results = list[Tuned]()
    for seed in study.each_seed():
        task = _task_of(study, seed)
        for part, model in _parts(task, study.settings).items():
            one = _tune(task, part, model, study.settings, seed)
            results.append(one)
            for name, curve in zip(("network", "predicted"), one.curves, strict=True):
                study.keep(lab.metric_rows(f"{part}, {name}", seed, one.side.history.evaluated, {"mse": curve}, "test"))
            rates = f"{one.rates[one.at]:.3g}, predicted {one.predicted.best:.3g}"
            study.say(f"{part}: laziness {one.laziness:.3g}, best rate {rates}")
    by_part = {part: tuned for (part,), tuned in lab.grouped(results, "part").items()}
    rows = [_row(part, tuned) for part, tuned in by_part.items()]
    title = f"fine-tuning on {study.dataset}, {study.settings.num_rounds} rounds: mean of {len(study.seeds)} seeds"
    verdicts = tuple(one.side.verdicts[0]._replace(subject=f"fine-tuning, {one.part}") for one in results)
    edges = sorted({one.part for one in results if one.at in (0, len(FACTORS) - 1)})
    remarks = (*REMARKS, *([f"best rates of networks at an edge of their grid: {', '.join(edges)}"] if edges else []))
    _draw(study, by_part)
    sheets, claims = (lab.table(title, rows, COLUMNS),), tuple(_claims(by_part))
    return lab.Outcome(sheets, rows, claims, remarks=remarks, failed=lab.disagreeing(verdicts), verdicts=verdicts)


def _row(part: str, tuned: list[Tuned]) -> lab.Row:
    """Builds the table's row of one part: means of its results over seeds, geometric means of learning rates."""
    rates = np.exp(np.mean(np.log([(one.rates[one.at], one.predicted.best) for one in tuned]), axis=0))
    predicted = [one.theory.best.mean("test", "accuracy")[-1] for one in tuned]
    return {
        "part": part,
        "parameters": tuned[0].num_parameters,
        "start": float(np.mean([one.accuracies[0, 0] for one in tuned])),
        "accuracy": float(np.mean([one.accuracies[one.at, -1] for one in tuned])),
        "predicted_accuracy": float(np.mean(predicted)),
        "laziness": float(np.mean([one.laziness for one in tuned])),
        "laziness_of_seeds": [one.laziness for one in tuned],
        "best_rate": float(rates[0]),
        "predicted_rate": float(rates[1]),
        "doublings": [one.doublings for one in tuned],
        "close": sum(abs(one.doublings) <= math.log2(CLOSE) + ROUNDING for one in tuned),
        "seeds": len(tuned),
    }


def _claims(by_part: dict[str, list[Tuned]]) -> Iterator[lab.Claim]:
    """Judges by intervals over seeds, for each part, whether it is lazy and whether the predicted rate is the best."""
    for part, tuned in by_part.items():
        lazy = lab.interval(one.laziness for one in tuned)
        yield lazy.claim_below(f"{part}: lazy, within {LAZY:g} of its linearisation", "{:.3g}", LAZY)
        apart = lab.interval(abs(one.doublings) for one in tuned)
        statement = f"{part}: the predicted best rate is within a factor {CLOSE:g} of the best"
        yield apart.claim_below(statement, "doublings apart: {:.2f}", math.log2(CLOSE) + ROUNDING)


def _draw(study: Study, by_part: dict[str, list[Tuned]]) -> None:
    """Plots test losses by round (mean over seeds) and by learning rate (first seed), each with its prediction."""
    by_round, by_rate = [], []
    for part, tuned in by_part.items():
        network, expected = np.mean([one.curves for one in tuned], axis=0)
        by_round.append(
            BoundedPanel(part, tuned[0].side.history.evaluated, {"network": network}, {"predicted": expected})
        )
        one, theory = tuned[0], tuned[0].predicted
        most = MOST_SHOWN * network[0]
        below, near = one.losses <= most, (theory.losses <= most) & (theory.tried >= one.rates[0])
        losses, expected = {"network": one.losses[below]}, {"predicted": theory.losses[near]}
        by_rate.append(BoundedPanel(part, one.rates[below], losses, expected, x_of_bounds=theory.tried[near]))
    figures, title, loss = study.figures, f"fine-tuning on {study.dataset}", "mean squared error, test"
    lowest = 0.8 * min(float(np.nanmin(one.losses)) for tuned in by_part.values() for one in tuned)
    bounded(by_round, f"{title}, mean of {len(study.seeds)} seeds", ("round", loss), lowest, figures.path("curves"))
    bounded(by_rate, f"{title}, one seed", ("client learning rate", loss), lowest, figures.path("rates"), log="xy")


PAPER = FineTuningSettings()
SMALL = with_changes(PAPER, "width=16 ranks=1 num_pre_train=200 pre_steps=200 num_train=60 num_test=60 num_rounds=6")
SCALES = {"digits": by_scale(SMALL, with_changes(PAPER, "num_test=179")), "fashion_mnist": by_scale(SMALL, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("hu2021",), check=check, least_seeds=2, exact=True),)
