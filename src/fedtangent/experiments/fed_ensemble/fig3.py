"""The loss on the plane through three models of an ensemble (FE-2024, Fig. 3 and section V-D; FE-2021, Fig. 3).

The paper reads off its figure that the models are "different local minima with a high loss barrier on the segment
connecting them". Here the barrier is measured, and beside it that of two controls: one model at three of its last
rounds, which must have next to none, and models that start from the same weights and differ in schedule and batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedtangent import data, models, pytrees
from fedtangent.data import partition
from fedtangent.experiments.lab import bands, trials
from fedtangent.experiments.lab.bands import Summary
from fedtangent.experiments.lab.contract import Experiment, Outcome, Prepared, Request, Sheet, changed, choose
from fedtangent.experiments.lab.triples import (
    PAIRS,
    Images,
    Triple,
    from_one_start,
    lowest_point,
    mean_distance,
    measurer,
    train,
)
from fedtangent.federated import algorithms, schedule
from fedtangent.federated.local import Work
from fedtangent.federated.rates import staircase_decay
from fedtangent.measures import loss_surface
from fedtangent.output.files import Metric, check_data_dir
from fedtangent.types import Algorithm, Model

ENSEMBLE, SAME_START, SAME_MODEL = "ensemble", "same start", "one model"
LABELS = {
    ENSEMBLE: "three models of Fed-ensemble",
    SAME_START: "three models, one start",
    SAME_MODEL: "one model, three rounds",
}


@dataclass(frozen=True)
class Settings:
    """How the ensemble is trained, and how finely the plane is drawn."""

    num_clients: int = 50
    classes_per_client: int = 10
    num_models: int = 5
    num_rounds: int = 60
    local_epochs: int = 5
    batch_size: int = 16
    model: str = "mlp"
    width: int = 64
    learning_rate: float = 0.5
    decay: float = 0.99
    num_train: int = 0
    num_points: int = 61
    margin: float = 0.3


IMAGES = Settings(num_rounds=40, batch_size=20, learning_rate=0.1, num_train=2000, num_points=31)
# The paper's MNIST: 100 clients, 10 epochs of batch 16, a CNN; 1.7 million parameters.
MNIST = Settings(num_clients=100, num_rounds=100, local_epochs=10, model="cnn", learning_rate=0.01, num_points=41)
SETTINGS = {
    ("digits", "smoke"): Settings(),
    ("digits", "paper"): Settings(num_rounds=400, local_epochs=10, num_points=121),
    ("fashion_mnist", "smoke"): IMAGES,
    ("fashion_mnist", "paper"): MNIST,
    ("mnist", "smoke"): IMAGES,
    ("mnist", "paper"): MNIST,
}


def prepare(request: Request) -> Prepared:
    """Check the request, build the algorithm and load the first seed's data; raises ``ValueError``."""
    name = choose(EXPERIMENT, request)
    check_data_dir(request.data_dir)
    seeds = trials.several(request.seeds)
    s = changed(SETTINGS[name, request.scale], request.changes)
    names = ("num_clients", "classes_per_client", "num_models", "local_epochs", "batch_size", "width", "num_points")
    trials.check_numbers(s, names)
    if s.num_models < 3:
        raise ValueError(f"num_models: got {s.num_models}, a plane needs at least 3")
    if s.num_rounds < 4 or s.num_rounds % 4:
        raise ValueError(f"num_rounds: got {s.num_rounds}, must be a multiple of 4, for three rounds of one model")
    if s.num_points < 2 or not (math.isfinite(s.margin) and s.margin >= 0):
        raise ValueError(f"num_points, margin: got {s.num_points} and {s.margin}, must be at least 2 and at least 0")

    def images(seed: int) -> Images:
        return _images(s, name, request.data_dir, seed)

    model = _model(s, images(seeds[0]))
    algorithm = _algorithm(s, model)

    def run(say: Callable[[str], None], keep: Callable[[Sequence[Metric]], None], figures: Path) -> Outcome:
        return _run(s, name, seeds, images, model, algorithm, say, keep, figures)

    return Prepared(s, name, run)


def _images(s: Settings, name: str, data_dir: Path | None, seed: int) -> Images:
    loaded = data.load(name, data_dir=data_dir, seed=seed)
    if s.num_train < 0 or s.num_train > len(loaded.x_train):
        raise ValueError(f"num_train: got {s.num_train}, must be from 0 (all) to {len(loaded.x_train)}")
    rows = np.random.default_rng(seed).permutation(len(loaded.x_train))[: s.num_train or None]
    y = loaded.y_train[rows]
    if s.classes_per_client == loaded.num_classes:
        clients = partition.iid(len(y), s.num_clients, seed)
    else:
        clients = partition.classes(y, s.num_clients, s.classes_per_client, seed)
    held = data.federated_data(np.asarray(loaded.x_train[rows], np.float32), y, clients, jnp.float32)
    return Images(held, jnp.asarray(loaded.x_test, jnp.float32))


def _model(s: Settings, images: Images) -> Model:
    size, outputs = math.prod(images.held.x.shape[1:]), int(jnp.max(images.held.y)) + 1
    if s.model == "mlp":
        return models.build("mlp", size, outputs, widths=(s.width,), parameterization="standard")
    if s.model == "cnn":
        side = math.isqrt(size)
        return models.build("cnn", size, outputs, input_shape=(side, side, 1))
    raise ValueError(f"model: got {s.model!r}, allowed are mlp, cnn")


def _algorithm(s: Settings, model: Model) -> Algorithm:
    return algorithms.fed_ensemble(
        model,
        schedule.per_client_permutations(s.num_clients, s.num_models),
        client_learning_rate=staircase_decay(s.learning_rate, s.decay, 10),
        work=Work(epochs=s.local_epochs, batch_size=s.batch_size),
        loss="cross_entropy",
    )


def _run(
    s: Settings,
    dataset: str,
    seeds: tuple[int, ...],
    images: Callable[[int], Images],
    model: Model,
    algorithm: Algorithm,
    say: Callable[[str], None],
    keep: Callable[[Sequence[Metric]], None],
    figures: Path,
) -> Outcome:
    loss = loss_surface.mean_loss(model, "cross_entropy")
    measure, joint = measurer(model, loss), from_one_start(algorithm)
    found: dict[str, list[Triple]] = {kind: [] for kind in LABELS}
    starts: list[float] = []
    for seed in seeds:
        start, here = time.perf_counter(), images(seed)
        separate = train(algorithm, here.held, s.num_rounds, seed)
        of_one_start = train(joint, here.held, s.num_rounds, seed)[s.num_rounds]
        triples = {
            ENSEMBLE: [pytrees.take(separate[s.num_rounds], k) for k in range(3)],
            SAME_START: [pytrees.take(of_one_start, k) for k in range(3)],
            SAME_MODEL: [pytrees.take(separate[share * s.num_rounds // 4], 0) for share in (2, 3, 4)],
        }
        for kind, params in triples.items():
            found[kind].append(measure(params, here))
        keep(_metrics(s, seed, {kind: of[-1] for kind, of in found.items()}))
        barriers = ", ".join(f"{kind} {np.mean(of[-1].barriers):.3f}" for kind, of in found.items())
        starts.append(mean_distance(separate[0]))
        say(f"seed {seed}: {time.perf_counter() - start:.0f} s, barriers: {barriers}")
    lowest = _draw(s, dataset, {kind: of[0] for kind, of in found.items()}, loss, images(seeds[0]), figures)
    claims = judge(found)
    failed = tuple(
        f"{LABELS[k]}: the loss is not finite" for k, of in found.items()
        if not all(np.all(np.isfinite(t.segments)) for t in of)
    )  # fmt: skip
    details = {"settings": s, "dataset": dataset, "claims": [{"claim": c, "holds": ok} for c, _, ok in claims]}
    sheets = _kinds(found, len(seeds)), _pairs(found, seeds[0]), _claims(claims)
    return Outcome(sheets, _rows(seeds, found), details, _remarks(s, model, starts, lowest), failed)


def judge(found: dict[str, list[Triple]]) -> list[tuple[str, str, bool]]:
    """The paper's claim in parts: what is claimed, the numbers, whether it holds beyond its 95 % interval."""
    own = {kind: np.array([np.mean(t.barriers) for t in of]) for kind, of in found.items()}
    apart = bands.summary("barrier", own[ENSEMBLE])
    peak = float(np.mean([t.segments.max() for t in found[ENSEMBLE]]))
    mode = float(np.mean([t.losses.max() for t in found[ENSEMBLE]]))
    claims = [
        ("a loss barrier on the segments between models of the ensemble",
         f"barrier {_text(apart)}; loss {mode:.4f} at the worst model, {peak:.3f} at the highest point",
         bool(apart.low > 0))
    ]  # fmt: skip
    for kind in (SAME_MODEL, SAME_START):
        more = bands.summary("barrier", own[ENSEMBLE] - own[kind])
        claims.append((f"it is higher than that of {LABELS[kind]}", f"difference {_text(more)}", bool(more.low > 0)))
    return claims


def _text(v: Summary) -> str:
    return f"{v.mean:.3f} [{v.low:.3f}, {v.high:.3f}]"


def _rows(seeds: tuple[int, ...], found: dict[str, list[Triple]]) -> list[dict[str, Any]]:
    return [
        {"models": kind, "seed": seed, "pair": f"{i + 1}-{j + 1}", "loss_of_first": t.losses[i],
         "loss_of_second": t.losses[j], "highest_loss": t.segments[p].max(), "barrier": t.barriers[p],
         "distance": t.distances[p], "disagreement": t.disagreement[p], "loss_at_mean_of_three": t.at_mean}
        for kind, of in found.items() for seed, t in zip(seeds, of, strict=True) for p, (i, j) in enumerate(PAIRS)
    ]  # fmt: skip


def _metrics(s: Settings, seed: int, triples: dict[str, Triple]) -> list[Metric]:
    return [
        Metric(s.num_rounds, f"{kind} {i + 1}-{j + 1}", seed, split, name, float(values[p]), 0, 0)
        for kind, t in triples.items() for p, (i, j) in enumerate(PAIRS)
        for split, name, values in (("train", "barrier", t.barriers), ("train", "distance", t.distances),
                                    ("test", "disagreement", t.disagreement))
    ]  # fmt: skip


def _kinds(found: dict[str, list[Triple]], num_seeds: int) -> Sheet:
    rows = []
    for kind, of in found.items():
        barriers = bands.summary("barrier", [np.mean(t.barriers) for t in of])
        parts = [np.mean([getattr(t, name) for t in of]) for name in ("losses", "gradients", "at_mean")]
        highest = np.mean([t.segments.max(axis=1) for t in of])
        rows.append((LABELS[kind], f"{parts[0]:.4f}", f"{parts[1]:.4f}", f"{parts[2]:.3f}", f"{highest:.3f}",
                     _text(barriers), f"{np.mean([t.distances for t in of]):.2f}",
                     f"{np.mean([t.disagreement for t in of]):.1%}"))  # fmt: skip
    columns = ("models", "loss at them", "gradient norm", "loss at their mean", "highest on a segment", "barrier",
               "distance", "test examples told apart")  # fmt: skip
    title = (
        f"Cross entropy on the whole training set: means over pairs and {num_seeds} seeds, 95 % intervals over seeds"
    )
    return Sheet(title, columns, tuple(rows))


def _pairs(found: dict[str, list[Triple]], seed: int) -> Sheet:
    rows = tuple(
        (f"{LABELS[kind]}, {i + 1} and {j + 1}", f"{t.losses[i]:.4f}", f"{t.losses[j]:.4f}",
         f"{t.segments[p].max():.3f}", f"{t.barriers[p]:.3f}", f"{t.distances[p]:.2f}", f"{t.disagreement[p]:.1%}")
        for kind, t in ((kind, of[0]) for kind, of in found.items()) for p, (i, j) in enumerate(PAIRS)
    )  # fmt: skip
    columns = ("pair", "loss of the first", "of the second", "highest between", "barrier", "distance", "told apart")
    return Sheet(f"Each pair of seed {seed}: the models of the figure", columns, rows)


def _claims(claims: Sequence[tuple[str, str, bool]]) -> Sheet:
    rows = tuple((claim, number, "holds" if ok else "DOES NOT HOLD") for claim, number, ok in claims)
    title = "FE-2024, section V: different models are different minima with a high loss barrier between them"
    return Sheet(title, ("claim", "measured, means over pairs [95 % over seeds]", ""), rows)


def _remarks(s: Settings, model: Model, starts: Sequence[float], lowest: str) -> tuple[str, ...]:
    return (
        f"settings: {', '.join(f'{name} {value}' for name, value in vars(s).items())}",
        f"barrier: the highest loss on a segment minus that at its worse end, in nats; guessing has "
        f"{math.log(model.output_size):.3f}. Distances are Euclidean in weights",
        f"before training the ensemble's models are {np.mean(starts):.2f} apart: compare their distance at the end",
        lowest,
        "a barrier on the straight segment does not exclude a curve of low loss around it (Garipov et al., 2018)",
    )


def _draw(
    s: Settings, dataset: str, triples: dict[str, Triple], loss: loss_surface.Loss, images: Images, figures: Path
) -> str:
    """Draw both figures; returns where the first plane is lowest."""
    from fedtangent.output.surface_plots import SurfacePanel, loss_segments, loss_surfaces

    given, panels = (images.held.x, images.held.y), []
    for kind, t in triples.items():
        plane = loss_surface.plane_through(t.params)
        a, b = loss_surface.grid(plane, s.num_points, s.margin)
        values = loss_surface.surface(loss, plane, a, b, given, progress=True)
        rounds = [str(share * s.num_rounds // 4) for share in (2, 3, 4)]
        names, label = (
            (rounds, f"one model, rounds {', '.join(rounds)}") if kind == SAME_MODEL else ("123", LABELS[kind])
        )
        panels.append(SurfacePanel(label, a, b, values, plane.coordinates, tuple(names)))
    title = f"{dataset}, {s.model}, {s.num_clients} clients, {s.num_rounds} rounds"
    loss_surfaces(panels, f"{title}: cross entropy on the whole training set", figures / "loss_surface.png")
    pairs = [f"{i + 1} to {j + 1}" for i, j in PAIRS]
    lines = {LABELS[kind]: dict(zip(pairs, t.segments, strict=True)) for kind, t in triples.items()}
    loss_segments(lines, f"{title}: loss on the segments", figures / "segments.png")
    return lowest_point(panels[0].a, panels[0].b, panels[0].loss, panels[0].models, triples[ENSEMBLE])


EXPERIMENT = Experiment(
    "the loss on the plane through three models of an ensemble (FE-2024, Fig. 3), and the barriers between them",
    ("digits", "fashion_mnist", "mnist"),
    prepare,
)
