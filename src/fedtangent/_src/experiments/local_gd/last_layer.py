"""Local-GD, fig. 1(h) and 1(i): the last linear layer trained on fixed features by heterogeneous nodes (section 5).

There are ten nodes, half of a node's data of one class; training is SGD on the cross entropy. The centralised model
takes as many steps on all data. The paper takes ResNet-50 features of CIFAR-10, as this does if ``weights`` names a
file of ResNet-50's weights. Without this file features are those of a small ResNet that is trained here, if
``pretraining`` is above 0 (the share of the images that train it), or else those of fixed random convolutions. The
paper does not say how features are scaled, nor how the layer starts: here they are standardised, the layer has a bias,
and all parameters start at 0. It gives curves, no numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src import storage
from fedtangent._src.data import features
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.experiments.local_gd import pretrained
from fedtangent._src.output.run_plots import curves
from fedtangent.types import Algorithm, Partition, Verdict

SUBJECT = "Local-GD, section 5"
FLOOR = 0.5  # of the distance after round 1: our reading of "decreases to a small error floor"
SIMILAR = 0.02  # of accuracy: our reading of "very similar"
COLOURED = ("cifar10",)
REMARKS = (
    "distance: |w / |w| - c / |c||, weights and bias as one vector, to the centralised model at its end",
    "one node: a node that trains as long on its own data and is never averaged, the control",
    f"a small floor is taken as below {FLOOR:g} of the distance after round 1, very similar as within {SIMILAR:g}",
    "chance: two centralised models that draw other minibatches",
)


@dataclass(frozen=True)
class LastLayerSettings:
    """Settings of fig. 1(h) and 1(i) of Local-GD, and how features are computed."""

    num_clients: int = within(10, least=2)
    share: float = within(0.5, above=0, at_most=1)  # share of a node's data that is of its own class
    num_train: int = within(0, least=0)  # the first so many training examples; 0: all
    num_test: int = within(0, least=0)
    num_features: int = within(1024, least=4)  # of random convolutions, or of the network that is trained here
    filter_size: int = 3
    pretraining: float = within(0.0, at_least=0, below=1)  # share of the images that train a network; 0: none
    epochs: int = 20  # of its training
    weights: str = ""  # a file of ResNet-50's weights, for colour images; none: random convolutions
    learning_rate: float = within(0.01, above=0)
    batch_size: int = 128
    local_steps: int = 60
    num_rounds: int = within(60, least=4)


class Layers(NamedTuple):
    """The last layers that one seed's four runs train, and their accuracies.

    The runs are "local_gd", "centralised", "chance" (centralised with other minibatches) and "one node".

    Attributes:
        weights: For each run the P parameters of the layer after every round, [R + 1, P].
        accuracy: For each run the test accuracy after every round, [R + 1].
    """

    seed: int
    weights: dict[str, np.ndarray]
    accuracy: dict[str, np.ndarray]

    def distance(self, run: str) -> np.ndarray:
        """Computes the distance in direction of a run's layers from the last centralised layer, [R].

        ``run`` is a key of ``weights``; its layers are those after rounds 1 to R.
        """
        return ft.theory.direction_distance(self.weights[run][1:], self.weights["centralised"][-1])


def check(study: Study) -> None:
    """Raises ``ValueError`` for wrong settings; tries the features of one image.

    Wrong are weights of ResNet-50 for images without colours or together with ``pretraining``, numbers of features that
    cannot be computed, and numbers of nodes among which the images cannot be divided.
    """
    settings, loaded = study.settings, _images(study, study.seeds[0])
    if settings.weights and study.dataset not in COLOURED:
        names = " or ".join(COLOURED)
        raise ValueError(f"weights: got {settings.weights} for {study.dataset}, must be left out: they are for {names}")
    if settings.pretraining:
        pretrained.check(settings.pretraining, settings.num_features, settings.weights)
    else:
        _featured(study, loaded._replace(x_train=loaded.x_train[:1], x_test=loaded.x_test[:1]), None, study.seeds[0])
    ft.partition.majority(loaded.y_train, settings.num_clients, settings.share, study.seeds[0])


def _images(study: Study, seed: int) -> ft.data.Dataset:
    settings = study.settings
    sizes = {name: count for name in ("num_train", "num_test") if (count := getattr(settings, name))}
    return ft.data.load(study.dataset, study.data_dir, seed, **sizes)


def _featured(study: Study, loaded: ft.data.Dataset, folder: Path | None, seed: int) -> ft.data.Dataset:
    """Returns the data set with standardised features in place of images.

    Args:
        study: The study.
        loaded: The data set of images.
        folder: Folder that stores features of fixed networks, which are computed only once; None to store none.
        seed: Seed of the network that is trained here, if there is one; the images that train it are left out.
    """
    settings, tick = study.settings, _tenths(study.say)
    if settings.pretraining:
        return pretrained.with_trained_features(
            loaded, settings.pretraining, settings.epochs, settings.num_features, seed
        )
    if settings.weights:
        compute = partial(features.resnet50_features, weights=settings.weights, folder=folder, tick=tick)
        return features.with_features(loaded, compute)
    sizes = {"num_features": settings.num_features, "filter_size": settings.filter_size}
    return features.with_features(loaded, partial(features.random_convolution, **sizes, folder=folder, tick=tick))


def _tenths(say: Callable[[str], None]) -> Callable[[int, int], None]:
    """Returns a callback (images done, all images) that calls ``say`` with a line of text after each tenth.

    For fewer than 10,000 images it does nothing.
    """
    tenths = 0

    def tick(done: int, total: int) -> None:
        nonlocal tenths
        if total >= 10_000 and 10 * done // total != tenths:
            tenths = 10 * done // total
            say(f"features of {done} of {total} images")

    return tick


def _run(panel: str, study: Study) -> lab.Outcome:
    """Runs fig. 1(h) or 1(i) of Local-GD (``panel`` "h" or "i"): trains Local-GD and its controls on every seed."""
    results, source, settings = list[Layers](), "", study.settings
    for seed in study.each_seed():
        loaded = _images(study, seed)
        folder = None if loaded.info.read_from == "embedded" else storage.cache_directory() / "features"
        featured = _featured(study, loaded, folder, seed)
        source = featured.info.source.split("; ", 1)[1]
        layers = _train(featured, settings, seed)
        results.append(layers)
        for name, values in layers.accuracy.items():
            study.keep(lab.metric_rows(name, seed, range(settings.num_rounds + 1), {"accuracy": values}, "test"))
        for name in layers.weights:
            distances = {"direction_distance": layers.distance(name)}
            study.keep(lab.metric_rows(name, seed, range(1, settings.num_rounds + 1), distances))
    return _conclude(study, results, panel, source)


def _train(loaded: ft.data.Dataset, settings: LastLayerSettings, seed: int) -> Layers:
    """Trains Local-GD on all nodes, two centralised models with different minibatches, and one node on its own.

    ``loaded`` has the features in place of images. The seed decides which node trains on its own.
    """
    nodes = ft.partition.majority(loaded.y_train, settings.num_clients, settings.share, seed)
    everything = ft.partition.of([np.sort(nodes.indices)], len(loaded.y_train))
    alone = ft.partition.of([nodes.client(seed % settings.num_clients)], len(loaded.y_train))
    runs = {
        "local_gd": (nodes, seed),
        "centralised": (everything, seed),
        "chance": (everything, seed + 2**16),
        "one node": (alone, seed),
    }
    paths = {name: _path(loaded, clients, settings, key) for name, (clients, key) in runs.items()}
    return Layers(seed, *({name: path[i] for name, path in paths.items()} for i in (0, 1)))


def _path(
    loaded: ft.data.Dataset, clients: Partition, settings: LastLayerSettings, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Trains the last layer on ``clients``; returns its P parameters [R + 1, P] and test accuracy [R + 1] by round.

    ``loaded`` has the features in place of images.
    """
    algorithm = _algorithm(loaded.x_train.shape[1], loaded.num_classes, clients.num_clients, settings)
    data = ft.data.federated_data(loaded.x_train, loaded.y_train, clients, jnp.float32)
    path = ft.params_by_round(algorithm, data, num_rounds=settings.num_rounds, seed=seed)
    weights, biases = (part[:, 0] for part in path[0])
    guesses = [np.argmax(loaded.x_test @ w + b, axis=1) for w, b in zip(weights, biases, strict=True)]
    accuracy = np.array([np.mean(guess == loaded.y_test) for guess in guesses])
    return np.concatenate([part.reshape(len(part), -1) for part in (weights, biases)], axis=1), accuracy


@functools.cache
def _algorithm(num_features: int, num_classes: int, num_clients: int, settings: LastLayerSettings) -> Algorithm:
    """Builds Local-GD on a linear layer, cached so that all seeds share one compiled program."""
    return ft.fed_avg(
        ft.models.logistic(num_features, num_classes),
        ft.schedules.all_clients(num_clients),
        client_learning_rate=settings.learning_rate,
        loss="cross_entropy",
        work=ft.Work(steps=settings.local_steps, batch_size=settings.batch_size),
        averaging=ft.Averaging(weighting="uniform"),
    )


def _conclude(study: Study, results: list[Layers], panel: str, source: str) -> lab.Outcome:
    """Builds table, figure and claims of Local-GD's fig. 1(h) or 1(i) (``panel``); ``source`` names the features."""
    ends = {name: np.array([f.distance(name)[-1] for f in results]) for name in ("local_gd", "chance", "one node")}
    first = np.array([f.distance("local_gd")[0] for f in results])
    middle = np.array([f.distance("local_gd")[study.settings.num_rounds // 2 - 1] for f in results])
    right = {name: np.array([f.accuracy[name][-1] for f in results]) for name in results[0].accuracy}
    rows = []
    for name, accuracies in right.items():
        row: lab.Row = {"run": name, "accuracy": float(accuracies.mean()), "accuracies": accuracies}
        distance = None if name == "centralised" else float(ends[name].mean())
        rows.append({**row, "distance": distance, "distances": ends.get(name)})
    title = f"last layer on {study.dataset}, round {study.settings.num_rounds}: mean of {len(results)} seeds"
    sheet = lab.table(
        title, rows, "run: {run} | distance to centralised: {distance:.4f} | test accuracy: {accuracy:.4f}"
    )
    claims, verdicts = _judge_h(first, middle, ends) if panel == "h" else _judge_i(right)
    if study.settings.pretraining:
        claims = tuple(c._replace(claim=f"{c.claim}, features of a network trained here") for c in claims)
    _draw(study, results, panel)
    failed = tuple(f"{name} diverged" for name in right if not all(np.isfinite(f.weights[name]).all() for f in results))
    failed += lab.disagreeing(verdicts)
    return lab.Outcome((sheet,), rows, claims, remarks=(*REMARKS, source), failed=failed, verdicts=verdicts)


def _judge_h(
    first: np.ndarray, middle: np.ndarray, ends: dict[str, np.ndarray]
) -> tuple[tuple[lab.Claim, ...], tuple[Verdict, ...]]:
    """Judges fig. 1(h): how Local-GD's distance from the centralised model falls with the rounds.

    ``first`` and ``middle`` are its distances after the first round and after half of the rounds, [seeds]. ``ends`` has
    the distances of "local_gd", "chance" (centralised with other minibatches) and "one node" after the last round.
    """
    falls, late = lab.interval(ends["local_gd"] - first), lab.interval(ends["local_gd"] - middle)
    above = lab.interval(ends["local_gd"] - ends["chance"])
    claims = (
        falls.claim_below("the difference decreases with rounds", "last - first round: {:+.4f}"),
        late.claim_below("it still falls in the second half of the rounds", "last - middle: {:+.4f}"),
        above.claim_above("an error floor is left, above that of minibatches", "less chance: {:+.4f}"),
    )
    share, control = ends["local_gd"] / first, ends["one node"] / first
    verdict = _verdict("distance at the end / after round 1", FLOOR, share, control)
    return claims, (verdict,)


def _judge_i(right: dict[str, np.ndarray]) -> tuple[tuple[lab.Claim, ...], tuple[Verdict, ...]]:
    """Judges fig. 1(i): whether Local-GD's last test accuracy is less than 0.02 below the centralised model's.

    The control is one node that trains without the others. ``right`` has the test accuracies [seeds] of each run after
    the last round.
    """
    lost = lab.interval(right["centralised"] - right["local_gd"])
    claims = (lost.claim_below("accuracies are very similar at last", "centralised - Local-GD: {:+.4f}", SIMILAR),)
    off = (right["centralised"] - right[name] for name in ("local_gd", "one node"))
    verdict = _verdict("accuracy of the centralised model less Local-GD's", SIMILAR, *off)
    return claims, (verdict,)


def _verdict(statement: str, most: float, values: np.ndarray, alone: np.ndarray) -> Verdict:
    """Judges whether ``values`` [seeds] are all below ``most``; ``statement`` says what they are.

    The control is the training of one node without the others: the mean of its values ``alone`` [seeds] must be above
    ``most``.
    """
    largest, control = float(values.max()), float(alone.mean())
    right = f"{largest:.3g}", f"< {most:g}", largest < most
    wrong = "one node alone, mean", f"{control:.3g}", control > most
    return Verdict.of(SUBJECT, statement, "the worst seed", right, wrong)


def _draw(study: Study, results: list[Layers], panel: str) -> None:
    names = {"local_gd": "Local-GD", "centralised": "centralised", "chance": "chance", "one node": "one node alone"}
    title = f"fig. 1({panel}) on {study.dataset}: last layer, {study.settings.num_clients} nodes"
    rounds = range(1, study.settings.num_rounds + 1)
    metric, curves_of = "distance of directions", [{n: f.distance(n) for n in names} for f in results]
    if panel == "i":
        del names["chance"]
        metric, curves_of = "test accuracy", [{n: f.accuracy[n][1:] for n in names} for f in results]
    lines = {label: np.stack([of_seed[name] for of_seed in curves_of]) for name, label in names.items()}
    curves({metric: lines}, rounds, title, study.figures.path(f"fig1{panel}"))


PAPER = LastLayerSettings()
SMALL = with_changes(PAPER, "num_features=256 local_steps=30 num_rounds=12")
IMAGES = by_scale(
    with_changes(SMALL, "num_train=2000 num_test=1000"),
    with_changes(PAPER, "num_train=10000 num_test=2000 num_features=512"),
    PAPER,
)
SCALES = {
    "digits": by_scale(SMALL, with_changes(PAPER, "num_features=256"), PAPER),
    "fashion_mnist": IMAGES,
    "cifar10": IMAGES,
}
QUANTITIES = {
    "fig1h": "fig. 1(h): distance of the last linear layer to the centralised one",
    "fig1i": "fig. 1(i): test accuracy of the last linear layer",
}
SUMMARIES = {name: f"Local-GD, {quantity} by round, on fixed features" for name, quantity in QUANTITIES.items()}
ENTRIES = tuple(
    experiment(__name__, partial(_run, part[0][-1]), SCALES, ("localgd",), check=check, least_seeds=2, part=part)
    for part in SUMMARIES.items()
)
