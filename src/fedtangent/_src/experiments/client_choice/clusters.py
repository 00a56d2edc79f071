"""IFCA on clients in clusters, beside one model for all clients and a model for each client (Ghosh et al., 2020).

The images of a cluster are rotated by a multiple of 90 degrees, as in the paper's Rotated MNIST. Each client is tested
on images of its cluster, with the model that has the lowest loss on its training examples. In the control no image is
rotated, so that the clusters are alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src import checks
from fedtangent._src.data.partition.drawn import assemble
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab import harness, trials
from fedtangent._src.experiments.lab.harness import Bench, EvaluationSets, Method, Runs, Steps, Tuned
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.experiments.lab.trials import NetworkSettings, Trial
from fedtangent._src.output.run_plots import curves
from fedtangent._src.types import Algorithm, Array, PyTree, Schedule

GLOBAL, OWN, IFCA = "global", "own", "ifca"
LABELS = {GLOBAL: "FedAvg, one model", OWN: "a model for each client", IFCA: "IFCA"}
ROTATED, ALIKE = "rotated", "control, not rotated"
PAIRS = "train.pairs"
DECISIVE = "num_clusters width local_steps batch_size"
COLUMNS = (
    "clients: {clients} | method: {method} | learning rate: {rate:g} | accuracy: {accuracy:.4f} | "
    "IFCA minus it, 95 % interval: {lead:+.4f} | pairs of clients: {pairs:.3f} | "
    "seeds with all clusters: {found:d} | MiB: {mib:.2f}"
)
REMARKS = (
    "accuracy: of each client's model on test images rotated as its own, mean over clients after the last round",
    "pairs of clients: share of pairs that train the same model if they are in the same cluster, and different models "
    "if they are in different clusters; seeds with all clusters: those in which this is so of every pair",
)


@dataclass(frozen=True)
class ClusterSettings(NetworkSettings):
    """Settings of the clusters and the rounds, beside the settings of the network and its training.

    Every cluster has all ``num_train`` training images, in its own rotation.

    Attributes:
        num_clusters: Number of clusters, and of IFCA's models.
        clients_per_cluster: Number of clients in a cluster, who divide all training images at random.
        num_rounds: Number of rounds.
        tuning_rounds: Rounds of a run that tries a learning rate.
    """

    num_clusters: int = within(4, least=2, most=4)
    clients_per_cluster: int = 10
    num_rounds: int = 60
    tuning_rounds: int = 30


def divide(study: Study, kind: str, seed: int) -> Trial:
    """Draws the images of one seed, copies them for each cluster in its rotation, and divides the copies among clients.

    Client i is in cluster ``i // clients_per_cluster``. Validation and test images are in the order of the clusters.

    Args:
        study: The study.
        kind: "rotated" for images of cluster c that are rotated by c times 90 degrees; else the clusters are alike.
        seed: Seed of the draw and the division.

    Raises:
        ValueError: The data set cannot be loaded, or has too few images.
    """
    settings: ClusterSettings = study.settings
    loaded = ft.data.load(study.dataset, data_dir=study.data_dir, seed=seed, flatten=True)
    examples = trials.draw(loaded, seed, settings.num_train, settings.num_validation, settings.num_test)
    count, side = settings.num_clusters, round(loaded.x_train.shape[1] ** 0.5)

    def copies(x: np.ndarray) -> np.ndarray:
        images = x.reshape(-1, side, side)
        turned = [np.rot90(images, cluster * (kind == ROTATED), axes=(1, 2)) for cluster in range(count)]
        return np.concatenate(turned).reshape(-1, side * side)

    rows = [
        part + cluster * settings.num_train
        for cluster in range(count)
        for part in np.array_split(examples.rng.permutation(settings.num_train), settings.clients_per_cluster)
    ]
    x = {part: copies(values) for part, values in examples.x.items()}
    y = {part: np.tile(values, count) for part, values in examples.y.items()}
    return trials.trial_of(examples._replace(x=x, y=y), assemble(rows), seed, loaded.num_classes)


def methods_of(settings: ClusterSettings, trial: Trial) -> dict[str, Method]:
    """Builds IFCA, FedAvg of one model, and training of a model for each client, on one seed's data, by name.

    Args:
        settings: The settings.
        trial: Data and clients of the seed.
    """
    count = settings.num_clusters * settings.clients_per_cluster
    model, work = settings.network(trial), settings.work
    schedules = {
        GLOBAL: ft.schedules.all_clients(count),
        OWN: ft.schedules.own_models(count),
        IFCA: ft.schedules.best_fitting(count, settings.num_clusters),
    }
    sets = {"train": trial.data, **trial.splits}

    def method(name: str, schedule: Schedule) -> Method:
        def build(steps: Steps, rate: float | Array) -> Algorithm:
            return ft.fed_avg(model, schedule, rate, work, "cross_entropy", averaging=ft.Averaging(weighting="uniform"))

        return Method(LABELS[name], settings.learning_rates, (0,), build, trial.data, sets)

    return {name: method(name, schedule) for name, schedule in schedules.items()}


def measure(num_clusters: int, algorithm: Algorithm, state: PyTree, sets: EvaluationSets) -> dict[str, Array]:
    """Computes the mean accuracy of clients' models on images of their clusters, and the share of correct pairs.

    A client's model is the one with the lowest loss on its training examples. Outputs that are not finite are wrong. A
    pair of clients is correct if they have the same model in the same cluster, or different models in different
    clusters. Keys of the result are "validation.accuracy", "test.accuracy" and "train.pairs" (the share of pairs).

    Args:
        num_clusters: Number of clusters.
        algorithm: The algorithm.
        state: State of its run.
        sets: The clients' training data, and validation and test images in the order of the clusters.
    """
    train = sets["train"]
    count = train.num_clients
    owner = jnp.zeros(train.indices.shape[0], jnp.int32).at[train.offsets[1:-1]].add(1).cumsum()
    outputs = algorithm.predict(state, train.x).members[:, train.indices]
    log_p = jax.nn.log_softmax(outputs)[:, jnp.arange(len(owner)), train.y[train.indices]]
    loss = -jax.vmap(lambda of_model: jax.ops.segment_sum(of_model, owner, count))(log_p)  # [K, N]
    chosen = jnp.argmin(jnp.where(jnp.isfinite(loss), loss, jnp.inf), axis=0)
    cluster = jnp.arange(count) // (count // num_clusters)
    alike = (chosen[:, None] == chosen[None]) == (cluster[:, None] == cluster[None])
    metrics = {PAIRS: (jnp.sum(alike) - count) / (count * (count - 1))}
    for part in ("validation", "test"):
        members = algorithm.predict(state, sets[part].x).members
        right = (members.argmax(axis=-1) == sets[part].labels[None]) & jnp.isfinite(members).all(axis=-1)
        by_cluster = right.reshape(len(members), num_clusters, -1).mean(axis=-1)
        metrics[f"{part}.accuracy"] = by_cluster[chosen, cluster].mean()
    return metrics


def bench_of(study: Study, kind: str) -> Bench:
    """Builds the ``Bench`` that tunes and trains all three methods on one kind of clients.

    Args:
        study: The study.
        kind: "rotated", or the control, whose images are not rotated (as in ``divide``).
    """
    settings = study.settings
    of_clusters, depends_on = partial(measure, settings.num_clusters), harness.decisive(settings, DECISIVE)
    return Bench(
        study, partial(divide, study, kind), partial(methods_of, settings), depends_on, of_clusters, called=kind
    )


def _claims(runs: Mapping[str, Runs]) -> Iterator[lab.Claim]:
    """Judges IFCA's last accuracy against one model for all and against a model for each client.

    On clients whose clusters are alike, the control, its lead over one model for all should be smaller. ``runs`` has
    the runs of every method by kind of clients, "rotated" and the control.
    """
    last = {kind: {name: final(of_kind, name, "test.accuracy") for name in LABELS} for kind, of_kind in runs.items()}
    for other in (GLOBAL, OWN):
        lead = lab.interval(last[ROTATED][IFCA] - last[ROTATED][other])
        yield lead.claim_above(f"IFCA is above {LABELS[other]}", "by {:+.4f}")
    lead, control = (last[kind][IFCA] - last[kind][GLOBAL] for kind in (ROTATED, ALIKE))
    yield lab.interval(control).claim_above(f"ours: {ALIKE}: IFCA is above {LABELS[GLOBAL]}", "by {:+.4f}")
    yield lab.interval(lead - control).claim_above("ours: the lead over FedAvg comes from the clusters", "by {:+.4f}")


def final(runs: Runs, name: str, metric: str) -> np.ndarray:
    """Returns a metric of one method after the last round, [seeds].

    Args:
        runs: Runs of each method, one for each seed.
        name: Name of the method.
        metric: Name of the metric.
    """
    return np.array([record.metrics[metric][-1] for record in runs[name]], np.float64)


def _rows(kind: str, runs: Runs, tuned: Mapping[str, Tuned]) -> Iterator[lab.Row]:
    """Yields the row of every method on clients of ``kind`` ("rotated" or the control), with means over seeds.

    ``tuned`` has the tuned learning rates. In the control, without rotations, a row has no share of correct pairs.
    """
    for name, records in runs.items():
        accuracy, pairs = final(runs, name, "test.accuracy"), final(runs, name, PAIRS)
        lead = None if name == IFCA else lab.interval(final(runs, IFCA, "test.accuracy") - accuracy)
        row = {"clients": kind, "method": LABELS[name], "rate": tuned[name].config.rate, "lead": lead}
        sent = float(np.mean([record.sent[-1].sum() / 2**20 for record in records]))
        yield {
            **row,
            "accuracy": float(accuracy.mean()),
            "pairs": float(pairs.mean()) if kind == ROTATED else None,
            "found": int(np.sum(pairs == 1)) if kind == ROTATED else None,
            "mib": sent,
        }


def run(study: Study) -> lab.Outcome:
    """Tunes and trains every method on rotated and on unrotated images with every seed; compares last accuracies."""
    benches = {kind: bench_of(study, kind) for kind in (ROTATED, ALIKE)}
    harness.plan(benches[ROTATED], len(benches), len(benches))
    tuned = {kind: harness.tune_all(bench) for kind, bench in benches.items()}
    runs = {kind: harness.repeat_all(bench, tuned[kind]) for kind, bench in benches.items()}
    rows = [row for kind in runs for row in _rows(kind, runs[kind], tuned[kind])]
    num_rounds = study.settings.num_rounds
    measured, of_seeds = f"accuracy of clients' models on {study.dataset}", f"mean of {len(study.seeds)} seeds"
    title = f"{measured} after {num_rounds} rounds, {of_seeds}"
    panels = {
        f"accuracy, {kind}": harness.by_round({LABELS[name]: records for name, records in of_kind.items()})
        for kind, of_kind in runs.items()
    }
    curves(panels, range(num_rounds + 1), f"{measured}, {of_seeds}", study.figures.path("by_round"))
    choices = {f"{LABELS[name]}, {kind}": one for kind, of_kind in tuned.items() for name, one in of_kind.items()}
    remarks = (*REMARKS, *harness.edges(choices))
    return lab.Outcome((lab.table(title, rows, COLUMNS),), rows, tuple(_claims(runs)), remarks=remarks)


def check(study: Study) -> None:
    """Raises ``ValueError`` for wrong settings.

    Wrong are a tuning seed among the seeds, more clients in a cluster than training images, and settings with which a
    method cannot be built.
    """
    harness.check_tuning_seed(study)
    checks.whole("clients_per_cluster", study.settings.clients_per_cluster, most=study.settings.num_train)
    harness.build_all(methods_of(study.settings, divide(study, ROTATED, study.seeds[0])))


DEFAULT = ClusterSettings(batch_size=20, learning_rates=(3.0, 10.0, 30.0, 100.0))
SMALL = with_changes(DEFAULT, "clients_per_cluster=8 num_train=400")
IMAGES = with_changes(DEFAULT, "num_train=4000 num_test=2000")
SCALES = {"digits": by_scale(SMALL, DEFAULT), "mnist": by_scale(SMALL, IMAGES)}
ENTRIES = (experiment(__name__, run, SCALES, ("ghosh2020",), check=check, least_seeds=2),)
