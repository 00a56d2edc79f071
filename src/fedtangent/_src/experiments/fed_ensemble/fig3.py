"""The loss on the plane through three models of an ensemble (FE-2024, Fig. 3 and section V-D; FE-2021, Fig. 3).

The paper reads off its figure that the models are "different local minima with a high loss barrier on the segment
connecting them". Here the barrier is measured, and beside it that of two controls: one model at three of its last
rounds, which must have next to none, and models that start from the same weights and differ in schedule and batches.
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

from fedtangent._src import data, pytrees
from fedtangent._src.data import partition
from fedtangent._src.engine import Devices, Evaluation, simulate
from fedtangent._src.experiments.fed_ensemble.versus_fed_avg import network
from fedtangent._src.experiments.lab.results import Claim, Outcome, Sheet, interval, table
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.federated import schedule
from fedtangent._src.federated.algorithms.common import Averaging, AveragingParts, train_and_average, trained
from fedtangent._src.federated.compose import Parts
from fedtangent._src.federated.local import Work
from fedtangent._src.measures import loss_surface
from fedtangent._src.optimizers import staircase_decay
from fedtangent._src.output.files import Metric
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
    """How the ensemble is trained, and the grid of the plane."""

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
    num_points: int = within(61, least=2)
    margin: float = within(0.3, at_least=0)


class ImageData(NamedTuple):
    """Data of one seed."""

    held: FederatedData  # the whole training set
    x_test: Array


class Triple(NamedTuple):
    """Three models, and the loss between them."""

    params: list[PyTree]
    losses: np.ndarray  # [3] at the models
    gradients: np.ndarray  # [3] norm of the loss's gradient
    at_mean: float  # loss at the mean of the three weights
    segments: np.ndarray  # [3, q] loss along each of PAIRS
    distances: np.ndarray  # [3] between the weights of each pair
    disagreement: np.ndarray  # [3] share of test examples that a pair classifies differently

    @property
    def barriers(self) -> np.ndarray:
        """The loss barrier of each pair, [3]."""
        return np.array([loss_surface.barrier(values) for values in self.segments])


def ensemble(s: BarrierSettings, model: Model, common_start: bool = False) -> Algorithm:
    """Builds Fed-ensemble with per-client permutations; with ``common_start`` all models start from the first one."""
    plan = schedule.per_client_permutations(s.num_clients, s.num_models)
    rate, work = staircase_decay(s.learning_rate, s.decay, 10), Work(epochs=s.local_epochs, batch_size=s.batch_size)
    training = trained(model, rate, None, work, "cross_entropy")
    replaced = AveragingParts(parts=Parts(common_start=common_start))
    return train_and_average("fed_ensemble", training, plan, Averaging(), replaced)


def train(algorithm: Algorithm, held: FederatedData, num_rounds: int, seed: int) -> dict[int, PyTree]:
    """Trains, and returns all models' weights, [K, ...], by round: at the start, and after 1/2, 3/4 and all rounds."""
    every = num_rounds // 4

    def look(_: Algorithm, state: PyTree) -> dict[str, PyTree]:
        return {"params": jax.tree.map(np.array, state.server.params)}

    seen = simulate(
        algorithm, held, num_rounds=num_rounds, seed=seed, evaluation=Evaluation(every, look), devices=Devices("scan")
    ).history.evaluations
    return {e.round: e.metrics["params"] for e in seen if e.round != every}


def measurer(model: Model, loss: loss_surface.Loss) -> Callable[[list[PyTree], ImageData], Triple]:
    """Returns a function ``(three models, data) -> Triple``, compiled once."""
    both = jax.jit(jax.value_and_grad(loss))
    classify = jax.jit(lambda params, x: jnp.argmax(model.apply(params, x), axis=-1))
    shares = np.linspace(0, 1, SEGMENT_POINTS)

    def measure(params: list[PyTree], images: ImageData) -> Triple:
        given = images.held.x, images.held.y
        at = [both(p, *given) for p in params]
        mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *params)
        classes = [np.asarray(classify(p, images.x_test)) for p in params]
        return Triple(
            params,
            np.array([float(value) for value, _ in at]),
            np.array([float(pytrees.norm(gradient)) for _, gradient in at]),
            float(both(mean, *given)[0]),
            np.stack([loss_surface.segment(loss, params[i], params[j], shares, given) for i, j in PAIRS]),
            _distances(params),
            np.array([np.mean(classes[i] != classes[j]) for i, j in PAIRS]),
        )

    return measure


def _distances(params: list[PyTree]) -> np.ndarray:
    return np.array([float(pytrees.norm(pytrees.subtract(params[i], params[j]))) for i, j in PAIRS])


def check(study: Study) -> None:
    """Loads the first seed's data and builds the algorithm; raises ``ValueError``."""
    s, images = study.settings, load(study, study.seeds[0])
    if s.num_rounds % 4:
        raise ValueError(f"num_rounds: got {s.num_rounds}, must be a multiple of 4, for three rounds of one model")
    ensemble(s, network(s, images.held.x, int(jnp.max(images.held.y)) + 1))


def load(study: Study, seed: int) -> ImageData:
    """Loads the data of one seed, with the whole test set."""
    s = study.settings
    loaded = data.load(study.dataset, data_dir=study.data_dir, seed=seed, flatten=True)
    if s.num_train > len(loaded.x_train):
        raise ValueError(f"num_train: got {s.num_train}, must be from 0 (all) to {len(loaded.x_train)}")
    rows = np.random.default_rng(seed).permutation(len(loaded.x_train))[: s.num_train or None]
    y = loaded.y_train[rows]
    if s.classes_per_client == loaded.num_classes:
        clients = partition.iid(len(y), s.num_clients, seed)
    else:
        clients = partition.classes(y, s.num_clients, s.classes_per_client, seed)
    held = data.federated_data(np.asarray(loaded.x_train[rows], np.float32), y, clients, jnp.float32)
    return ImageData(held, jnp.asarray(loaded.x_test, jnp.float32))


def run(study: Study) -> Outcome:
    """Trains the ensemble and the control with one start for every seed, and measures the three kinds of triple."""
    s, first = study.settings, load(study, study.seeds[0])
    model = network(s, first.held.x, int(jnp.max(first.held.y)) + 1)
    algorithm, joint = ensemble(s, model), ensemble(s, model, common_start=True)
    loss = loss_surface.mean_loss(model, "cross_entropy")
    measure, starts = measurer(model, loss), list[float]()
    found: dict[str, list[Triple]] = {kind: [] for kind in LABELS}
    for seed in study.each_seed():
        here = load(study, seed)
        separate = train(algorithm, here.held, s.num_rounds, seed)
        of_one_start = train(joint, here.held, s.num_rounds, seed)[s.num_rounds]
        triples = {
            ENSEMBLE: [pytrees.take(separate[s.num_rounds], k) for k in range(3)],
            SAME_START: [pytrees.take(of_one_start, k) for k in range(3)],
            SAME_MODEL: [pytrees.take(separate[share * s.num_rounds // 4], 0) for share in (2, 3, 4)],
        }
        for kind, params in triples.items():
            found[kind].append(measure(params, here))
        study.keep([
            Metric(s.num_rounds, f"{kind} {i + 1}-{j + 1}", seed, split, name, float(values[p]), 0, 0)
            for kind, t in ((kind, of[-1]) for kind, of in found.items()) for p, (i, j) in enumerate(PAIRS)
            for split, name, values in (("train", "barrier", t.barriers), ("train", "distance", t.distances),
                                        ("test", "disagreement", t.disagreement))
        ])  # fmt: skip
        starts.append(float(np.mean(_distances([pytrees.take(separate[0], k) for k in range(3)]))))
    _draw(study, first, {kind: of[0] for kind, of in found.items()}, loss)
    failed = tuple(
        f"{LABELS[k]}: the loss is not finite" for k, of in found.items()
        if not all(np.all(np.isfinite(t.segments)) for t in of)
    )  # fmt: skip
    rows = [
        {"models": kind, "seed": seed, "pair": f"{i + 1}-{j + 1}", "loss_of_first": t.losses[i],
         "loss_of_second": t.losses[j], "highest_loss": t.segments[p].max(), "barrier": t.barriers[p],
         "distance": t.distances[p], "disagreement": t.disagreement[p], "loss_at_mean_of_three": t.at_mean}
        for kind, of in found.items() for seed, t in zip(study.seeds, of, strict=True) for p, (i, j) in enumerate(PAIRS)
    ]  # fmt: skip
    remarks = (
        f"barrier: the highest loss on a segment minus that at its worse end, in nats; guessing has "
        f"{math.log(model.output_size):.3f}. Distances are Euclidean in weights",
        f"before training the ensemble's models are {np.mean(starts):.2f} apart: compare their distance at the end",
        "a barrier on the straight segment does not exclude a curve of low loss around it (Garipov et al., 2018)",
    )
    return Outcome((_sheet(found),), rows, judge(found), remarks=remarks, failed=failed)


def judge(found: dict[str, list[Triple]]) -> tuple[Claim, ...]:
    """Judges the claims of section V-D: models are different minima with a high loss barrier between them."""
    own = {kind: np.array([np.mean(t.barriers) for t in of]) for kind, of in found.items()}
    apart = interval(own[ENSEMBLE])
    peak = float(np.mean([t.segments.max() for t in found[ENSEMBLE]]))
    mode = float(np.mean([t.losses.max() for t in found[ENSEMBLE]]))
    more = {kind: interval(own[ENSEMBLE] - own[kind]) for kind in (SAME_MODEL, SAME_START)}
    return (
        Claim("a loss barrier on the segments between models of the ensemble",
              f"barrier {apart:.3f}; loss {mode:.4f} at the worst model, {peak:.3f} at the highest point",
              apart.above()),
        *(Claim(f"it is higher than that of {LABELS[kind]}", f"difference {d:.3f}", d.above())
          for kind, d in more.items()),
    )  # fmt: skip


def _sheet(found: dict[str, list[Triple]]) -> Sheet:
    means = ("losses", "gradients", "at_mean", "distances", "disagreement")
    shown = [
        {"label": LABELS[kind], **{name: np.mean([getattr(t, name) for t in of]) for name in means},
         "highest": np.mean([t.segments.max(axis=1) for t in of]),
         "barrier": interval([np.mean(t.barriers) for t in of])}
        for kind, of in found.items()
    ]  # fmt: skip
    title = "Cross entropy on the whole training set: means over pairs and seeds, 95 % intervals over seeds"
    return table(title, shown, {
        "models": "{label}", "loss at them": "{losses:.4f}", "gradient norm": "{gradients:.4f}",
        "loss at their mean": "{at_mean:.3f}", "highest on a segment": "{highest:.3f}", "barrier": "{barrier:.3f}",
        "distance": "{distances:.2f}", "test examples told apart": "{disagreement:.1%}",
    })  # fmt: skip


def _draw(study: Study, images: ImageData, triples: dict[str, Triple], loss: loss_surface.Loss) -> None:
    """Draws the loss on the planes and along the segments, of one seed's triples."""
    s, figures = study.settings, study.figures
    given, panels = (images.held.x, images.held.y), []
    rounds = tuple(str(share * s.num_rounds // 4) for share in (2, 3, 4))
    for kind, t in triples.items():
        plane = loss_surface.plane_through(t.params)
        a, b = loss_surface.grid(plane, s.num_points, s.margin)
        values = loss_surface.surface(loss, plane, a, b, given, progress=True)
        names = rounds if kind == SAME_MODEL else ("1", "2", "3")
        panels.append(SurfacePanel(LABELS[kind], a, b, values, plane.coordinates, names))
    title = f"{study.dataset}, {s.model}, {s.num_clients} clients, {s.num_rounds} rounds"
    loss_surfaces(panels, f"{title}: cross entropy on the whole training set", figures.path("loss_surface"))
    pairs = [f"{i + 1} to {j + 1}" for i, j in PAIRS]
    lines = {LABELS[kind]: dict(zip(pairs, t.segments, strict=True)) for kind, t in triples.items()}
    loss_segments(lines, f"{title}: loss on the segments", figures.path("segments"))


DIGITS = BarrierSettings()
LONG = BarrierSettings(num_rounds=400, local_epochs=10, num_points=121)
IMAGES = BarrierSettings(num_rounds=40, batch_size=20, learning_rate=0.1, num_train=2000, num_points=31)
# The paper's MNIST: 100 clients, 10 epochs of batch 16, a CNN; 1.7 million parameters.
MNIST = BarrierSettings(
    num_clients=100, num_rounds=100, local_epochs=10, model="cnn", learning_rate=0.01, num_points=41
)
SCALES = {
    "digits": by_scale(DIGITS, BarrierSettings(num_rounds=120), LONG),
    **dict.fromkeys(("fashion_mnist", "mnist"), by_scale(IMAGES, paper=MNIST)),
}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), check=check, least_seeds=2),)
