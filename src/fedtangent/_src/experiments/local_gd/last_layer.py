"""Local-GD, fig. 1(h) and 1(i): the last linear layer trained on fixed features by nodes of unlike classes (section 5).

Ten nodes, half of a node's data of one class, cross entropy, SGD; the centralised model takes as many steps on all
data. The paper takes ResNet-50 features of CIFAR-10: with ``weights``, a file of ResNet-50's weights, this does too.
Without it features are those of fixed random convolutions. Features are standardised, the layer has a bias, and all
start at 0, of which the paper says nothing. Its numbers stand in curves only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedtangent._src import data as datasets
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.data import features, partition
from fedtangent._src.data.dataset import Dataset
from fedtangent._src.engine.run import params_by_round
from fedtangent._src.experiments.lab.results import Claim, Outcome, disagreeing, interval, table
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.local import Work
from fedtangent._src.models.dense import logistic
from fedtangent._src.output.files import Metric
from fedtangent._src.output.run_plots import curves
from fedtangent._src.storage import cache_directory
from fedtangent._src.theory.local_gd.max_margin import direction_distance
from fedtangent._src.types import Algorithm, Partition

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
    """The paper's settings."""

    num_clients: int = within(10, least=2)
    share: float = within(0.5, above=0, at_most=1)  # share of a node's data that is of its own class
    num_train: int = within(0, least=0)  # the first so many training examples; 0: all
    num_test: int = within(0, least=0)
    num_features: int = within(1024, least=4)  # of random convolutions
    filter_size: int = 3
    weights: str = ""  # a file of ResNet-50's weights, for colour images; none: random convolutions
    learning_rate: float = within(0.01, above=0)
    batch_size: int = 128
    local_steps: int = 60
    num_rounds: int = within(60, least=4)


class Layers(NamedTuple):
    """Runs of one seed."""

    seed: int
    weights: dict[str, np.ndarray]  # by run, the layer after every round, [R + 1, P]
    accuracy: dict[str, np.ndarray]  # by run, on the test set, [R + 1]

    def distance(self, run: str) -> np.ndarray:
        """Computes the distance of directions to the final centralised model after rounds 1 to R, [R]."""
        return direction_distance(self.weights[run][1:], self.weights["centralised"][-1])


def check(study: Study) -> None:
    """Computes the features of one image, reads the file of weights and forms the nodes; raises ``ValueError``."""
    s, loaded = study.settings, _images(study, study.seeds[0])
    if s.weights and study.dataset not in COLOURED:
        raise ValueError(
            f"weights: got {s.weights} for {study.dataset}, must be left out but for {', '.join(COLOURED)}"
        )
    _featured(study, loaded._replace(x_train=loaded.x_train[:1], x_test=loaded.x_test[:1]), None)
    partition.majority(loaded.y_train, s.num_clients, s.share, study.seeds[0])


def _images(study: Study, seed: int) -> Dataset:
    s = study.settings
    given = {name: count for name in ("num_train", "num_test") if (count := getattr(s, name))}
    return datasets.load(study.dataset, study.data_dir, seed, **given)


def _featured(study: Study, loaded: Dataset, folder: Path | None) -> Dataset:
    """Returns the data set with features in place of images; features kept in ``folder`` are not computed again."""
    s = study.settings
    made: Callable[..., features.Features] = (
        partial(features.resnet50_features, weights=s.weights) if s.weights
        else partial(features.random_convolution, num_features=s.num_features, filter_size=s.filter_size)
    )  # fmt: skip
    return features.with_features(loaded, partial(made, folder=folder, tick=_tenths(study.say)))


def _tenths(say: Callable[[str], None]) -> Callable[[int, int], None]:
    """Returns a callback that reports progress at each tenth of a large number of images."""
    said = 0

    def tick(done: int, total: int) -> None:
        nonlocal said
        if total >= 10_000 and 10 * done // total != said:
            said = 10 * done // total
            say(f"features of {done} of {total} images")

    return tick


def run(panel: str, study: Study) -> Outcome:
    """Trains Local-GD, the centralised model twice, and one node alone on every seed; ``panel`` is "h" or "i"."""
    found, made = list[Layers](), ""
    for seed in study.each_seed():
        loaded = _images(study, seed)
        kept = None if loaded.info.read_from == "embedded" else cache_directory() / "features"
        own = _featured(study, loaded, kept)
        made = own.info.source.split("; ", 1)[1]
        found.append(train(own, study.settings, seed))
        study.keep([
            Metric(r, name, seed, "test", "accuracy", float(v), 0, 0)
            for name, values in found[-1].accuracy.items() for r, v in enumerate(values)
        ] + [
            Metric(r + 1, name, seed, "train", "direction_distance", float(v), 0, 0)
            for name in found[-1].weights for r, v in enumerate(found[-1].distance(name))
        ])  # fmt: skip
    return conclude(study, found, panel, made)


def train(loaded: Dataset, s: LastLayerSettings, seed: int) -> Layers:
    """Trains all runs of one seed; the node that trains alone is number ``seed`` modulo N."""
    nodes = partition.majority(loaded.y_train, s.num_clients, s.share, seed)
    everything = partition.of([np.sort(nodes.indices)], len(loaded.y_train))
    alone = partition.of([nodes.client(seed % s.num_clients)], len(loaded.y_train))
    weights, accuracy = {}, {}
    for name, held, key in (
        ("local_gd", nodes, seed),
        ("centralised", everything, seed),
        ("chance", everything, seed + 2**16),
        ("one node", alone, seed),
    ):
        weights[name], accuracy[name] = _path(loaded, held, s, key)
    return Layers(seed, weights, accuracy)


def _path(loaded: Dataset, held: Partition, s: LastLayerSettings, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the layer after every round [R + 1, P] and its test accuracy [R + 1]; with one node this is plain SGD."""
    algorithm = _algorithm(loaded.x_train.shape[1], loaded.num_classes, held.num_clients, s)
    held_data = datasets.federated_data(loaded.x_train, loaded.y_train, held, jnp.float32)
    path = params_by_round(algorithm, held_data, num_rounds=s.num_rounds, seed=seed)
    weights, biases = (part[:, 0] for part in path[0])
    right = [np.mean(np.argmax(loaded.x_test @ w + b, axis=1) == loaded.y_test)
             for w, b in zip(weights, biases, strict=True)]  # fmt: skip
    return np.concatenate([weights.reshape(len(weights), -1), biases.reshape(len(biases), -1)], axis=1), np.array(right)


@functools.cache
def _algorithm(num_features: int, num_classes: int, num_clients: int, s: LastLayerSettings) -> Algorithm:
    """Builds the algorithm, cached so that all seeds share one compiled program."""
    return algorithms.fed_avg(
        logistic(num_features, num_classes),
        schedule.all_clients(num_clients),
        client_learning_rate=s.learning_rate,
        loss="cross_entropy",
        work=Work(steps=s.local_steps, batch_size=s.batch_size),
        averaging=Averaging(weighting="uniform"),
    )


def conclude(study: Study, found: list[Layers], panel: str, made: str) -> Outcome:
    """Builds table, figure and claims of a panel; ``made`` describes the features."""
    ends = {name: np.array([f.distance(name)[-1] for f in found]) for name in ("local_gd", "chance", "one node")}
    first = np.array([f.distance("local_gd")[0] for f in found])
    middle = np.array([f.distance("local_gd")[study.settings.num_rounds // 2 - 1] for f in found])
    right = {name: np.array([f.accuracy[name][-1] for f in found]) for name in found[0].accuracy}
    rows = [
        {"run": name, "accuracy": float(right[name].mean()), "accuracies": right[name],
         "distance": None if name == "centralised" else float(ends[name].mean()), "distances": ends.get(name)}
        for name in right
    ]  # fmt: skip
    title = f"last layer on {study.dataset}, round {study.settings.num_rounds}: mean of {len(found)} seeds"
    sheet = table(title, rows, {
        "run": "{run}", "distance to centralised": "{distance:.4f}", "test accuracy": "{accuracy:.4f}",
    })  # fmt: skip
    judged = _judge_h(first, middle, ends) if panel == "h" else _judge_i(right)
    _draw(study, found, panel)
    failed = tuple(f"{name} diverged" for name in right if not all(np.isfinite(f.weights[name]).all() for f in found))
    failed += disagreeing(judged[1])
    return Outcome((sheet,), rows, judged[0], remarks=(*REMARKS, made), failed=failed, verdicts=judged[1])


def _judge_h(
    first: np.ndarray, middle: np.ndarray, ends: dict[str, np.ndarray]
) -> tuple[tuple[Claim, ...], tuple[Verdict, ...]]:
    falls, late = interval(ends["local_gd"] - first), interval(ends["local_gd"] - middle)
    above = interval(ends["local_gd"] - ends["chance"])
    claims = (
        Claim("the difference decreases with rounds", f"last - first round: {falls:+.4f}", falls.below()),
        Claim("it still falls in the second half of the rounds", f"last - middle: {late:+.4f}", late.below()),
        Claim("an error floor is left, above that of minibatches", f"less chance: {above:+.4f}", above.above()),
    )
    share, control = ends["local_gd"] / first, ends["one node"] / first
    verdict = _verdict("distance at the end / after round 1", FLOOR, share, control)
    return claims, (verdict,)


def _judge_i(right: dict[str, np.ndarray]) -> tuple[tuple[Claim, ...], tuple[Verdict, ...]]:
    lost = interval(right["centralised"] - right["local_gd"])
    claims = (
        Claim("accuracies are very similar at last", f"centralised - Local-GD: {lost:+.4f}", lost.below(SIMILAR)),
    )
    off = (right["centralised"] - right[name] for name in ("local_gd", "one node"))
    verdict = _verdict("accuracy of the centralised model less Local-GD's", SIMILAR, *off)
    return claims, (verdict,)


def _verdict(statement: str, most: float, found: np.ndarray, wrong: np.ndarray) -> Verdict:
    """Checks that the worst seed is below ``most``; control: the mean of the node that trains alone is not."""
    worst, control = float(found.max()), float(wrong.mean())
    return Verdict.of(SUBJECT, statement, "the worst seed", (f"{worst:.3g}", f"< {most:g}", worst < most),
                      ("one node alone, mean", f"{control:.3g}", control > most))  # fmt: skip


def _draw(study: Study, found: list[Layers], panel: str) -> None:
    names = {"local_gd": "Local-GD", "centralised": "centralised", "chance": "chance", "one node": "one node alone"}
    title = f"fig. 1({panel}) on {study.dataset}: last layer, {study.settings.num_clients} nodes"
    rounds = range(1, study.settings.num_rounds + 1)
    if panel == "h":
        lines = {label: np.stack([f.distance(name) for f in found]) for name, label in names.items()}
        metric = "distance of directions"
    else:
        del names["chance"]
        lines = {label: np.stack([f.accuracy[name][1:] for f in found]) for name, label in names.items()}
        metric = "test accuracy"
    curves({metric: lines}, rounds, title, study.figures.path(f"fig1{panel}"))


SMALL: dict[str, Any] = {"num_features": 256, "local_steps": 30, "num_rounds": 12}
LARGE: dict[str, Any] = {"num_train": 10_000, "num_test": 2_000, "num_features": 512}
IMAGES = by_scale(
    LastLayerSettings(num_train=2_000, num_test=1_000, **SMALL), LastLayerSettings(**LARGE), LastLayerSettings()
)
SCALES = {
    "digits": by_scale(LastLayerSettings(**SMALL), LastLayerSettings(num_features=256), LastLayerSettings()),
    "fashion_mnist": IMAGES,
    "cifar10": IMAGES,
}
SUMMARIES = {
    "h": "Local-GD, fig. 1(h): distance of the last linear layer to the centralised one by round, on fixed features",
    "i": "Local-GD, fig. 1(i): test accuracy of the last linear layer by round, on fixed features",
}
ENTRIES = tuple(
    experiment(
        __name__, partial(run, panel), SCALES, ("localgd",), check=check, least_seeds=2,
        name=f"fig1{panel}", summary=summary,
    )
    for panel, summary in SUMMARIES.items()
)  # fmt: skip
