"""The loss on the plane through three models of an ensemble (FE-2024, Fig. 3 and section V-D; FE-2021, Fig. 3).

The paper concludes from its figure that the models are "different local minima with a high loss barrier on the segment
connecting them". Here the barrier is measured, and compared with two controls: one model after three of its last
rounds, which must have almost no barrier, and models that start from the same weights and differ in schedule and
batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src import pytrees
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.fed_ensemble.versus_fed_avg import network
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.experiments.lab.trials import IID, dealt
from fedtangent._src.measures.loss_surface import Loss
from fedtangent._src.output.surface_plots import SurfacePanel, loss_segments, loss_surfaces
from fedtangent._src.types import Algorithm, Array, FederatedData, Model, PyTree

PAIRS = tuple(combinations(range(3), 2))
SEGMENT_POINTS = 41
ENSEMBLE, SAME_START, SAME_MODEL = "ensemble", "same start", "one model"
LABELS = {
    ENSEMBLE: "three models of Fed-ensemble",
    SAME_START: "three models, one start",
    SAME_MODEL: "one model, three rounds",
}


@dataclass(frozen=True)
class BarrierSettings:
    """Settings of the ensemble's training, and of the grid on the plane through three of its models."""

    num_clients: int = 50
    classes_per_client: int = 10
    num_models: int = within(5, least=3)  # a plane goes through three
    num_rounds: int = within(60, least=4)
    local_epochs: int = 5
    batch_size: int = 16
    model: str = within("mlp", of=("mlp", "cnn"))
    width: int = 64
    learning_rate: float = within(0.5, above=0)
    decay: float = 0.99
    num_train: int = within(0, least=0)  # 0: all
    num_points: int = within(61, least=2)  # of the grid, along each direction
    margin: float = within(0.3, at_least=0)  # of the grid around the models, as a share of their extent


class ImageData(NamedTuple):
    """One seed's training data, divided among clients, and test inputs."""

    train: FederatedData  # the whole training set
    x_test: Array


class Triple(NamedTuple):
    """Three models, the loss at and between them, and how far their weights and predictions differ.

    Attributes:
        params: Weights of the three models.
        losses, gradients: Training loss at each model, and norm of its gradient, [3].
        at_mean: Training loss at the mean of the three weights.
        segments: Training loss at q points of the straight segment between each pair of models, [3, q].
        distances: Euclidean distance between the weights of each pair, [3].
        disagreement: Share of test examples that a pair classifies differently, [3].
    """

    params: list[PyTree]
    losses: np.ndarray
    gradients: np.ndarray
    at_mean: float
    segments: np.ndarray
    distances: np.ndarray
    disagreement: np.ndarray

    @property
    def barriers(self) -> np.ndarray:
        """The loss barrier of each pair, [3]: the highest loss on the segment minus the loss at its worse end."""
        return np.array([ft.measures.barrier(values) for values in self.segments])


def _ensemble(settings: BarrierSettings, model: Model, common_start: bool = False) -> Algorithm:
    """Builds Fed-ensemble with per-client permutations; with ``common_start`` all models start with equal weights."""
    schedule = ft.schedules.per_client_permutations(settings.num_clients, settings.num_models)
    rate = ft.optimizers.staircase_decay(settings.learning_rate, settings.decay, 10)
    work = ft.Work(epochs=settings.local_epochs, batch_size=settings.batch_size)
    training = ft.parts.trained(model, rate, None, work, "cross_entropy")
    replaced = ft.parts.AveragingParts(parts=ft.parts.Parts(common_start=common_start))
    return ft.parts.train_and_average("fed_ensemble", training, schedule, ft.Averaging(), replaced)


def _train(algorithm: Algorithm, data: FederatedData, num_rounds: int, seed: int) -> dict[int, PyTree]:
    """Trains an ensemble; returns its K models' weights [K, ...] by round: at start, half, 3/4 and end of training."""
    every = num_rounds // 4

    def look(_: Algorithm, state: PyTree) -> dict[str, PyTree]:
        return {"params": jax.tree.map(np.array, state.server.params)}

    evaluation, devices = ft.Evaluation(every, look), ft.Devices("scan")
    run = ft.simulate(algorithm, data, num_rounds=num_rounds, seed=seed, evaluation=evaluation, devices=devices)
    return {e.round: e.metrics["params"] for e in run.history.evaluations if e.round != every}


def _measurer(model: Model, loss: Loss) -> Callable[[list[PyTree], ImageData], Triple]:
    """Returns a function, compiled once, that measures losses and distances: ``(three models, data) -> Triple``."""
    both = jax.jit(jax.value_and_grad(loss))
    classify = jax.jit(lambda params, x: jnp.argmax(model.apply(params, x), axis=-1))
    shares = np.linspace(0, 1, SEGMENT_POINTS)

    def measure(params: list[PyTree], images: ImageData) -> Triple:
        examples = images.train.x, images.train.y
        at = [both(p, *examples) for p in params]
        mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *params)
        classes = [np.asarray(classify(p, images.x_test)) for p in params]
        return Triple(
            params,
            np.array([float(value) for value, _ in at]),
            np.array([float(pytrees.norm(gradient)) for _, gradient in at]),
            float(both(mean, *examples)[0]),
            np.stack([ft.measures.segment(loss, params[i], params[j], shares, examples) for i, j in PAIRS]),
            _distances(params),
            np.array([np.mean(classes[i] != classes[j]) for i, j in PAIRS]),
        )

    return measure


def _distances(params: list[PyTree]) -> np.ndarray:
    return np.array([float(pytrees.norm(pytrees.subtract(params[i], params[j]))) for i, j in PAIRS])


def check(study: Study) -> None:
    """Raises ``ValueError`` for wrong settings: loads the first seed's data and builds the algorithm."""
    settings, images = study.settings, _load(study, study.seeds[0])
    if settings.num_rounds % 4:
        why = "one model is compared after half, three quarters and all of the rounds"
        raise ValueError(f"num_rounds: got {settings.num_rounds}, must be a multiple of 4: {why}")
    _ensemble(settings, network(settings, images.train.x, int(jnp.max(images.train.y)) + 1))


def _load(study: Study, seed: int) -> ImageData:
    """Draws the training examples of one seed, divides them among clients, and loads all test inputs.

    If ``classes_per_client`` is the number of all classes, the examples are dealt at random. Raises ``ValueError`` if
    the data set has fewer than ``num_train`` examples.
    """
    settings = study.settings
    loaded = ft.data.load(study.dataset, data_dir=study.data_dir, seed=seed, flatten=True)
    if settings.num_train > len(loaded.x_train):
        raise ValueError(f"num_train: got {settings.num_train}, must be from 0 (all) to {len(loaded.x_train)}")
    rows = np.random.default_rng(seed).permutation(len(loaded.x_train))[: settings.num_train or None]
    y, is_iid = loaded.y_train[rows], settings.classes_per_client == loaded.num_classes
    clients = dealt(y, settings.num_clients, IID if is_iid else settings.classes_per_client, seed)
    data = ft.data.federated_data(np.asarray(loaded.x_train[rows], np.float32), y, clients, jnp.float32)
    return ImageData(data, jnp.asarray(loaded.x_test, jnp.float32))


def run(study: Study) -> lab.Outcome:
    """Trains ensembles from different and from equal weights for every seed, and measures loss barriers of models.

    They lie between the first three models of each ensemble, and as a control between the weights of one model after
    half, three quarters and all of the rounds.
    """
    settings, first = study.settings, _load(study, study.seeds[0])
    model = network(settings, first.train.x, int(jnp.max(first.train.y)) + 1)
    algorithm, joint = _ensemble(settings, model), _ensemble(settings, model, common_start=True)
    loss = ft.measures.mean_loss(model, "cross_entropy")
    measure, starts, rows = _measurer(model, loss), list[float](), list[lab.Row]()
    by_kind: dict[str, list[Triple]] = {kind: [] for kind in LABELS}
    for seed in study.each_seed():
        images = _load(study, seed)
        separate = _train(algorithm, images.train, settings.num_rounds, seed)
        of_one_start = _train(joint, images.train, settings.num_rounds, seed)[settings.num_rounds]
        triples = {
            ENSEMBLE: [pytrees.take(separate[settings.num_rounds], k) for k in range(3)],
            SAME_START: [pytrees.take(of_one_start, k) for k in range(3)],
            SAME_MODEL: [pytrees.take(separate[share * settings.num_rounds // 4], 0) for share in (2, 3, 4)],
        }
        for kind, params in triples.items():
            t = measure(params, images)
            by_kind[kind].append(t)
            for p, (i, j) in enumerate(PAIRS):
                name, values = f"{kind} {i + 1}-{j + 1}", {"barrier": t.barriers[p], "distance": t.distances[p]}
                study.keep(lab.metric_rows(name, seed, settings.num_rounds, values))
                study.keep(
                    lab.metric_rows(name, seed, settings.num_rounds, {"disagreement": t.disagreement[p]}, "test")
                )
        starts.append(float(np.mean(_distances([pytrees.take(separate[0], k) for k in range(3)]))))
    _draw(study, first, {kind: of_seeds[0] for kind, of_seeds in by_kind.items()}, loss)
    failed = tuple(
        f"{LABELS[kind]}: the loss is not finite"
        for kind, of_seeds in by_kind.items()
        if not all(np.all(np.isfinite(t.segments)) for t in of_seeds)
    )
    for kind, of_seeds in by_kind.items():
        for seed, t in zip(study.seeds, of_seeds, strict=True):
            rows += [{"models": kind, "seed": seed, **_pair_row(t, pair)} for pair in range(len(PAIRS))]
    remarks = (
        f"barrier: the highest loss on a segment minus that at its worse end, in nats; guessing has "
        f"{math.log(model.output_size):.3f}. Distances are Euclidean in weights",
        f"before training the ensemble's models are {np.mean(starts):.2f} apart: compare their distance at the end",
        "a barrier on the straight segment does not exclude a curve of low loss around it (Garipov et al., 2018)",
    )
    return lab.Outcome((_sheet(by_kind),), rows, judge(by_kind), remarks=remarks, failed=failed)


def _pair_row(t: Triple, pair: int) -> lab.Row:
    """Builds the row of one pair of the three models in result.json; ``pair`` is 0, 1 or 2."""
    i, j = PAIRS[pair]
    return {
        "pair": f"{i + 1}-{j + 1}",
        "loss_of_first": t.losses[i],
        "loss_of_second": t.losses[j],
        "highest_loss": t.segments[pair].max(),
        "barrier": t.barriers[pair],
        "distance": t.distances[pair],
        "disagreement": t.disagreement[pair],
        "loss_at_mean_of_three": t.at_mean,
    }


def judge(by_kind: dict[str, list[Triple]]) -> tuple[lab.Claim, ...]:
    """Judges whether there is a loss barrier between models of an ensemble, higher than in two controls (FE-2024, V-D).

    The barrier is the mean over the three pairs of models. ``by_kind`` has each seed's triple by kind: an ensemble, an
    ensemble with equal start, one model at three rounds.
    """
    barriers = {kind: np.array([np.mean(t.barriers) for t in of_seeds]) for kind, of_seeds in by_kind.items()}
    peak = float(np.mean([t.segments.max() for t in by_kind[ENSEMBLE]]))
    mode = float(np.mean([t.losses.max() for t in by_kind[ENSEMBLE]]))
    losses = f"loss {mode:.4f} at the worst model, {peak:.3f} at the highest point"
    statement = "a loss barrier on the segments between models of the ensemble"
    claims = [lab.interval(barriers[ENSEMBLE]).claim_above(statement, f"barrier {{:.3f}}; {losses}")]
    for kind in (SAME_MODEL, SAME_START):
        more = lab.interval(barriers[ENSEMBLE] - barriers[kind])
        claims.append(more.claim_above(f"it is higher than that of {LABELS[kind]}", "difference {:.3f}"))
    return tuple(claims)


def _sheet(by_kind: dict[str, list[Triple]]) -> lab.Sheet:
    means, rows = ("losses", "gradients", "at_mean", "distances", "disagreement"), []
    for kind, of_seeds in by_kind.items():
        row: lab.Row = {name: np.mean([getattr(t, name) for t in of_seeds]) for name in means}
        highest = np.mean([t.segments.max(axis=1) for t in of_seeds])
        barrier = lab.interval(np.mean(t.barriers) for t in of_seeds)
        rows.append({"label": LABELS[kind], **row, "highest": highest, "barrier": barrier})
    title = "Cross entropy on the whole training set: means over pairs and seeds, 95 % intervals over seeds"
    columns = "models: {label} | loss at them: {losses:.4f} | gradient norm: {gradients:.4f} | "
    columns += "loss at their mean: {at_mean:.3f} | highest on a segment: {highest:.3f} | barrier: {barrier:.3f} | "
    columns += "distance: {distances:.2f} | test examples told apart: {disagreement:.1%}"
    return lab.table(title, rows, columns)


def _draw(study: Study, images: ImageData, triples: dict[str, Triple], loss: Loss) -> None:
    """Plots the loss on the planes and along the segments, of one seed's three kinds of models."""
    settings, figures = study.settings, study.figures
    examples, panels = (images.train.x, images.train.y), []
    rounds = tuple(str(share * settings.num_rounds // 4) for share in (2, 3, 4))
    for kind, t in triples.items():
        plane = ft.measures.plane_through(t.params)
        a, b = ft.measures.grid(plane, settings.num_points, settings.margin)
        values = ft.measures.surface(loss, plane, a, b, examples, progress=True)
        names = rounds if kind == SAME_MODEL else ("1", "2", "3")
        panels.append(SurfacePanel(LABELS[kind], a, b, values, plane.coordinates, names))
    title = f"{study.dataset}, {settings.model}, {settings.num_clients} clients, {settings.num_rounds} rounds"
    loss_surfaces(panels, f"{title}: cross entropy on the whole training set", figures.path("loss_surface"))
    pairs = [f"{i + 1} to {j + 1}" for i, j in PAIRS]
    lines = {LABELS[kind]: dict(zip(pairs, t.segments, strict=True)) for kind, t in triples.items()}
    loss_segments(lines, f"{title}: loss on the segments", figures.path("segments"))


DIGITS = BarrierSettings()
LONG = with_changes(DIGITS, "num_rounds=400 local_epochs=10 num_points=121")
IMAGES = with_changes(DIGITS, "num_rounds=40 batch_size=20 learning_rate=0.1 num_train=2000 num_points=31")
# The paper's MNIST: 100 clients, 10 epochs of batch 16, a CNN; 1.7 million parameters.
MNIST = with_changes(
    DIGITS, "num_clients=100 num_rounds=100 local_epochs=10 model=cnn width=32 learning_rate=0.01 num_points=41"
)
SCALES = {
    "digits": by_scale(DIGITS, BarrierSettings(num_rounds=120), LONG),
    **dict.fromkeys(("fashion_mnist", "mnist"), by_scale(IMAGES, paper=MNIST)),
}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), check=check, least_seeds=2),)
