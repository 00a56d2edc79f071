"""TCT beside FedAvg, with few classes a client and with i.i.d. clients (Yu et al., 2022).

FedAvg trains a network for some rounds. Then SCAFFOLD trains a linear model on the network's tangent features, for as
many rounds as FedAvg may go on. Two further methods show whether the gain comes from control variates or from trained
features: SCAFFOLD on the network, and a linear model on features of the untrained network. Theory predicts every round
of the second phase exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.output.run_plots import curves
from fedtangent._src.types import Algorithm, Array, Partition, PyTree

FED_AVG, SCAFFOLD, TCT, UNTRAINED = "FedAvg", "SCAFFOLD", "TCT", "linear, untrained features"
IID = "i.i.d."
COLUMNS = (
    "clients: {clients} | method: {method} | learning rate: {rate:.3g} | test accuracy: {accuracy:.4f} | "
    "TCT minus it: {lead:+.4f}"
)
REMARKS = (
    "FedAvg and SCAFFOLD on the network have the rate of the highest test accuracy after all rounds, a choice in their "
    "favour; TCT's first phase has FedAvg's rate, and its second one 1 over the largest eigenvalue of a client's loss",
    "dense network on digits, where the paper has convolutional ones on 28 x 28 and 32 x 32 pixels",
    "features are neither centred nor normalised, as in the authors' code; the paper's own text was not at hand",
)


@dataclass(frozen=True)
class TCTSettings:
    """Settings of the network, of the clients, and of both phases of TCT."""

    width: int = 64  # of both hidden layers
    num_train: int = 1000
    num_test: int = 500
    num_clients: int = 5
    classes_per_client: int = 2
    first_rounds: int = 20
    convex_rounds: int = 20
    local_steps: int = 40
    batch_size: int = 20
    rates: tuple[float, ...] = within((0.3, 1.0, 3.0, 10.0), above=0)  # of FedAvg and SCAFFOLD on the network
    num_features: int = 2000
    convex_steps: int = 100  # of full-batch gradient descent


class TCTData(NamedTuple):
    """Data and clients of one seed: training inputs and labels, test inputs and labels, number of classes."""

    data: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # training inputs and labels, test inputs and labels
    clients: Partition
    outputs: int  # number of classes
    seed: int

    def network(self, width: int, outputs: int | None = None) -> ft.types.Model:
        """Builds the dense network of two hidden layers.

        Args:
            width: Width of its two hidden layers.
            outputs: Number of outputs; None for the number of classes.
        """
        return ft.models.mlp(math.prod(self.data[0].shape[1:]), outputs or self.outputs, (width,) * 2, b_std=0.1)


class Result(NamedTuple):
    """Test accuracy by round of one method, with one seed and one kind of clients: few classes each, or i.i.d."""

    clients: str
    method: str
    seed: int
    rate: float  # of the last phase
    accuracy: np.ndarray  # after each round from 0 on

    @property
    def last(self) -> float:
        """Test accuracy after the last round."""
        return float(self.accuracy[-1])


class SecondPhase(NamedTuple):
    """TCT's second phase: its test accuracy, its learning rate, and the arguments with which ``compare`` repeats it.

    Attributes:
        accuracy: Test accuracy after each round, from round 0 on.
        algorithm: Algorithm that trains the linear model.
        data: Training features and labels, test features and labels.
        rate: Client learning rate of ``algorithm``.
    """

    accuracy: np.ndarray
    algorithm: Algorithm
    data: tuple[Array, np.ndarray, Array, np.ndarray]
    rate: float


def _tasks(study: Study, seed: int) -> Iterator[tuple[str, TCTData]]:
    """Yields the data of a seed, once with few classes a client and once with i.i.d. clients."""
    settings = study.settings
    sizes = {"num_train": settings.num_train, "num_test": settings.num_test}
    loaded = ft.data.load(study.dataset, study.data_dir, seed, **sizes)
    labels, count = np.asarray(loaded.y_train), settings.num_clients
    data = (loaded.x_train, labels, loaded.x_test, np.asarray(loaded.y_test))
    few = ft.partition.classes(labels, count, settings.classes_per_client, seed=seed)
    yield f"{settings.classes_per_client} classes a client", TCTData(data, few, loaded.num_classes, seed)
    yield IID, TCTData(data, ft.partition.iid(len(labels), count, seed=seed), loaded.num_classes, seed)


def _on_network(recipe: str, task: TCTData, settings: TCTSettings) -> tuple[float, np.ndarray]:
    """Trains the network with ``recipe`` ("fed_avg" or "scaffold") at every learning rate of the settings.

    Returns the rate of the highest test accuracy after the last round and, at this rate, the accuracy by round.
    """
    x_test, labels = jnp.asarray(task.data[2], jnp.float32), task.data[3]

    def at_rate(rate: float | Array) -> Algorithm:
        return first_phase(recipe, task, settings, rate)

    def measure(algorithm: Algorithm, state: PyTree) -> dict[str, Array]:
        return {"accuracy": ft.measures.accuracy(algorithm.predict(state, x_test).members, labels, "cross_entropy")}

    federated = ft.data.federated_data(task.data[0], task.data[1], task.clients, jnp.float32)
    grid, rounds = {"rate": list(settings.rates)}, settings.first_rounds + settings.convex_rounds
    evaluation = ft.Evaluation(every=1, measure=measure)
    runs = ft.sweep(at_rate, federated, num_rounds=rounds, seeds=[task.seed], grid=grid, evaluation=evaluation)
    accuracy = runs.metrics["accuracy"][0]
    best = int(np.argmax(np.nan_to_num(accuracy[:, -1], nan=-1)))  # NaN: a run that diverged
    return settings.rates[best], np.asarray(accuracy[best], np.float64)


def first_phase(recipe: str, task: TCTData, settings: TCTSettings, rate: float | Array) -> Algorithm:
    """Builds the algorithm that trains the network, in TCT's first phase or on its own.

    Args:
        recipe: Name of the algorithm, "fed_avg" or "scaffold".
        task: Data and clients.
        settings: The settings.
        rate: Learning rate of the clients.
    """
    work = ft.Work(steps=settings.local_steps, batch_size=settings.batch_size)
    schedule = ft.schedules.all_clients(settings.num_clients)
    algorithm: Algorithm = getattr(ft, recipe)(task.network(settings.width), schedule, rate, work, loss="cross_entropy")
    return algorithm


def second_phase(task: TCTData, settings: TCTSettings, weights: PyTree) -> SecondPhase:
    """Trains a linear model by SCAFFOLD on the network's tangent features at ``weights``.

    The features are derivatives of one output, whose last layer is random, by ``num_features`` random parameters.

    Args:
        task: Data and clients.
        settings: The settings.
        weights: Parameters of the network.
    """
    one_output, (x, labels, x_test, labels_test) = task.network(settings.width, outputs=1), task.data
    phi, phi_test = (
        ft.kernels.tangent_features(one_output, weights, part, settings.num_features, task.seed) for part in (x, x_test)
    )
    parts = [np.asarray(phi, np.float64)[task.clients.client(i)] for i in range(settings.num_clients)]
    rate = 1 / max(float(np.linalg.norm(part, 2)) ** 2 / len(part) for part in parts)
    model = ft.models.linear(settings.num_features, task.outputs, dtype=jnp.float64)
    schedule, work = ft.schedules.all_clients(settings.num_clients), ft.Work(settings.convex_steps, batch_size=None)
    algorithm, data = ft.scaffold(model, schedule, rate, work, "squared_error"), (phi, labels, phi_test, labels_test)
    rounds, evaluation = settings.convex_rounds, ft.Evaluation(1, progress=False)
    run = ft.simulate(algorithm, data, task.clients, num_rounds=rounds, seed=task.seed, evaluation=evaluation)
    return SecondPhase(np.asarray(run.history.curves()["test.accuracy"], np.float64), algorithm, data, rate)


def _copied(weights: PyTree) -> PyTree:
    """Copies the parameters of the first and only model; a later run may overwrite the originals."""
    return jax.tree.map(lambda leaf: jnp.array(leaf[0]), weights)


def _results(task: TCTData, clients: str, settings: TCTSettings) -> tuple[list[Result], SecondPhase]:
    """Trains with all four methods on one seed's data; also returns TCT's second phase.

    ``clients`` names the kind of clients. In the rounds of the first phase TCT has FedAvg's accuracy, and the linear
    model on untrained features its initial accuracy.
    """
    rate, accuracy = _on_network("fed_avg", task, settings)
    controlled_rate, controlled = _on_network("scaffold", task, settings)
    fed_avg, quiet = first_phase("fed_avg", task, settings, rate), ft.Evaluation(progress=False)
    assert fed_avg.params is not None
    begun = _copied(fed_avg.params(fed_avg.init(task.seed, settings.num_clients)))
    rounds = settings.first_rounds
    first = ft.simulate(fed_avg, task.data, task.clients, num_rounds=rounds, seed=task.seed, evaluation=quiet)
    trained = _copied(fed_avg.params(first.state))
    second, untrained = (second_phase(task, settings, weights) for weights in (trained, begun))
    flat = np.full(rounds, untrained.accuracy[0])  # rounds in which it does not train
    methods = {
        TCT: (second.rate, np.concatenate([accuracy[: rounds + 1], second.accuracy[1:]])),
        FED_AVG: (rate, accuracy),
        SCAFFOLD: (controlled_rate, controlled),
        UNTRAINED: (untrained.rate, np.concatenate([flat, untrained.accuracy])),
    }
    return [Result(clients, name, task.seed, *of_method) for name, of_method in methods.items()], second


def check(study: Study) -> None:
    """Raises ``ValueError`` for wrong settings: builds both kinds of clients and the first phase of the first seed."""
    for _, task in _tasks(study, study.seeds[0]):
        first_phase("scaffold", task, study.settings, study.settings.rates[0])


def run(study: Study) -> lab.Outcome:
    """Trains with every method, both kinds of clients and every seed, and compares their last test accuracies."""
    settings, results, verdicts = study.settings, list[Result](), list[ft.types.Verdict]()
    for seed in study.each_seed():
        for clients, task in _tasks(study, seed):
            of_task, second = _results(task, clients, settings)
            results += of_task
            for one in of_task:
                name, at = f"{clients}, {one.method}", range(len(one.accuracy))
                study.keep(lab.metric_rows(name, seed, at, {"accuracy": one.accuracy}, split="test"))
            if seed == study.seeds[0] and clients != IID:
                verdicts += _verdicts(task, second, clients, settings)
            study.say(f"{clients}: " + ", ".join(f"{one.method} {one.last:.4f}" for one in of_task))
    by_place = lab.grouped(results, "clients", "method")
    rows = [_row(by_place, *place) for place in by_place]
    _draw(study, by_place)
    rounds = f"{settings.first_rounds} + {settings.convex_rounds} rounds"
    title = f"TCT on {study.dataset}, {rounds}: mean of {len(study.seeds)} seeds, lead with its 95 % interval"
    sheets, claims = (lab.table(title, rows, COLUMNS),), tuple(_claims(by_place))
    failed, ends = lab.disagreeing(verdicts), (min(settings.rates), max(settings.rates))
    edges = dict.fromkeys(f"{one.method}, {one.clients}" for one in results if one.rate in ends)
    remarks = (*REMARKS, *([f"best rates at an edge of their grid: {'; '.join(edges)}"] if edges else []))
    return lab.Outcome(sheets, rows, claims, remarks=remarks, failed=failed, verdicts=tuple(verdicts))


def _verdicts(task: TCTData, second: SecondPhase, clients: str, settings: TCTSettings) -> Iterator[ft.types.Verdict]:
    """Judges whether TCT's second phase on one seed's data is the flow that predicts it; wrong flows must differ.

    ``clients`` names the kind of clients, for the verdicts' subject.
    """
    run, rounds = (second.algorithm, second.data, task.clients), settings.convex_rounds
    compared = ft.compare(*run, num_rounds=rounds, seed=task.seed, evaluation=ft.Evaluation(progress=False), draws=5)
    return (verdict._replace(subject=f"TCT's second phase, {clients}") for verdict in compared.verdicts)


Places = dict[tuple[str, str], list[Result]]
"""Results of all seeds by clients and method."""


def _leads(by_place: Places, clients: str, method: str) -> np.ndarray:
    """Computes TCT's last test accuracy minus the last test accuracy of ``method``, for each seed.

    ``by_place`` has the results of all seeds by kind of clients and method.
    """
    return np.array(
        [one.last - other.last for one, other in zip(by_place[clients, TCT], by_place[clients, method], strict=True)]
    )


def _row(by_place: Places, clients: str, method: str) -> lab.Row:
    """Builds the row of one method and kind of clients: means over seeds, geometric mean of learning rates."""
    of_seeds = by_place[clients, method]
    row = {"clients": clients, "method": method, "rate": float(np.exp(np.mean([np.log(one.rate) for one in of_seeds])))}
    lead = None if method == TCT else lab.interval(_leads(by_place, clients, method))
    last = [one.last for one in of_seeds]
    return {**row, "accuracy": float(np.mean(last)), "lead": lead, "seeds": last}


def _claims(by_place: Places) -> Iterator[lab.Claim]:
    """Judges TCT's lead in accuracy over FedAvg and the other methods after as many rounds.

    It also judges whether the lead over FedAvg is larger with few classes a client than with i.i.d. clients.
    """
    few, iid = dict.fromkeys(clients for clients, _ in by_place)
    gain, gain_iid = (_leads(by_place, clients, FED_AVG) for clients in (few, iid))
    yield lab.interval(gain).claim_above(f"{few}: TCT is above FedAvg after as many rounds", "by {:+.4f}")
    more = "the gain over FedAvg is larger under heterogeneity than with i.i.d. clients"
    yield lab.interval(gain - gain_iid).claim_above(more, "by {:+.4f}")
    yield lab.interval(gain_iid).claim_above(f"ours: {iid}: TCT is above FedAvg", "by {:+.4f}")
    for method in (SCAFFOLD, UNTRAINED):
        yield lab.interval(_leads(by_place, few, method)).claim_above(
            f"ours: {few}: TCT is above {method}", "by {:+.4f}"
        )


def _draw(study: Study, by_place: Places) -> None:
    """Plots test accuracy by round, a panel for each kind of clients."""
    panels: dict[str, dict[str, np.ndarray]] = {}
    for (clients, method), of_seeds in by_place.items():
        panels.setdefault(clients, {})[method] = np.stack([one.accuracy for one in of_seeds])
    rounds = study.settings.first_rounds + study.settings.convex_rounds
    title = f"test accuracy on {study.dataset}, {len(study.seeds)} seeds"
    curves(panels, range(rounds + 1), title, study.figures.path("by_round"))


DEFAULT = TCTSettings()
SMALL = with_changes(
    DEFAULT,
    "num_train=200 num_test=300 first_rounds=10 convex_rounds=10 local_steps=20 num_features=1000 convex_steps=50",
)
SCALES = {"digits": by_scale(SMALL, with_changes(DEFAULT, "num_test=359")), "fashion_mnist": by_scale(SMALL, DEFAULT)}
ENTRIES = (experiment(__name__, run, SCALES, ("yu2022",), check=check, least_seeds=2, exact=True),)
