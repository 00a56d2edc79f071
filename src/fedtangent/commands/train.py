"""``fedtangent train``: one federated run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.table import Table

from fedtangent import data, models
from fedtangent.commands import catalogue
from fedtangent.commands.options import TrainOptions
from fedtangent.engine import engine_for
from fedtangent.kernels.gram import check_finite
from fedtangent.report.files import Metric, check_data_dir, output_folder, write_config, write_metrics, write_result
from fedtangent.report.tables import console, number
from fedtangent.simulate import Evaluation, predict, simulate
from fedtangent.types import Algorithm, Array, FederatedData, Prediction

DIVERGED = 100.0  # times the initial loss
EVALUATED_TRAIN = 10_000  # training examples that train metrics are measured on, at most


class Split(NamedTuple):
    """Examples to evaluate on."""

    x: Array
    targets: Array  # [n, C] what the squared error compares with
    labels: Array | None  # [n] class labels, None for regression


class Job(NamedTuple):
    """A checked run, ready to start."""

    options: TrainOptions
    algorithm: Algorithm
    data: FederatedData
    splits: dict[str, Split]


def prepare(options: TrainOptions) -> Job:
    """Check every option, load and divide the data, compose the algorithm; raises ``ValueError``, writes nothing."""
    o = options
    if o.local_steps is None and o.local_epochs is None:
        o = dataclasses.replace(o, local_epochs=5)
    if not 0 <= o.seed < 2**32:
        raise ValueError(f"seed: got {o.seed}, must be from 0 to 2**32 - 1")
    if o.batch_size < 0:
        raise ValueError(f"batch_size: got {o.batch_size}, must be 0 or more")
    for name in ("num_rounds", "evaluate_every", "num_clients", "num_models"):
        if getattr(o, name) < 1:
            raise ValueError(f"{name}: got {getattr(o, name)}, must be at least 1")
    check_data_dir(o.data_dir)
    entry = cast(catalogue.AlgorithmEntry, catalogue.choose("algorithm", o.algorithm, dict(catalogue.ALGORITHMS)))
    divide = cast(catalogue.PartitionEntry, catalogue.choose("partition", o.partition, dict(catalogue.PARTITIONS)))
    name = entry.schedule if o.schedule == "default" else o.schedule
    plan_of = cast(catalogue.ScheduleEntry, catalogue.choose("schedule", name, dict(catalogue.SCHEDULES)))
    given = {} if o.num_train is None else {"num_train": o.num_train}
    loaded = data.load(o.dataset, data_dir=o.data_dir, seed=o.seed, **given)
    clients = divide.build(o, loaded)
    train, test = _split(loaded, "train"), _split(loaded, "test")
    model = _model(o, int(np.prod(loaded.x_train.shape[1:])), train.targets.shape[1])
    plan = plan_of.build(o, clients.num_clients)
    if o.algorithm == "fed_ensemble" and plan.num_models != o.num_models:
        raise ValueError(f"schedule: {name!r} trains {plan.num_models} model, but num_models is {o.num_models}")
    algorithm = entry.build(o, model, plan)
    if o.loss == "cross_entropy" and train.labels is None:
        raise ValueError(f"loss: cross_entropy needs class labels, but the data set {loaded.name} has none")
    y = train.labels if o.loss == "cross_entropy" else train.targets
    federated = data.federated_data(np.asarray(loaded.x_train, np.float32), np.asarray(y), clients, dtype=jnp.float32)
    engine_for(federated, o.mapping)
    some = jax.tree.map(lambda a: a[:EVALUATED_TRAIN], train)
    return Job(o, algorithm, federated, {"train": some, "test": test})


def _split(loaded: data.Dataset, which: str) -> Split:
    x, y = getattr(loaded, f"x_{which}"), getattr(loaded, f"y_{which}")
    check_finite(f"x_{which}", x)
    check_finite(f"y_{which}", y)
    inputs = jnp.asarray(x, jnp.float32)
    if loaded.num_classes == 0:
        return Split(inputs, jnp.asarray(y, jnp.float32), None)
    targets = data.classification_targets(y, loaded.num_classes, centred=True)
    return Split(inputs, jnp.asarray(targets, jnp.float32), jnp.asarray(y, jnp.int32))


def _model(o: TrainOptions, input_size: int, output_size: int) -> Any:
    given: dict[str, Any] = {}
    if o.model == "mlp":
        given = {"widths": o.widths, "activation": o.activation, "parameterization": o.parameterization}
    return models.build(o.model, input_size, output_size, **given)


def measure(predicted: Prediction, split: Split, loss: str) -> dict[str, float]:
    """Metrics of an ensemble's prediction: its error, its members' mean error, its knowledge uncertainty."""
    members, mean = np.asarray(predicted.members, np.float64), np.asarray(predicted.mean, np.float64)
    found: dict[str, float] = {}
    if loss == "cross_entropy":
        probability = np.exp(members - members.max(axis=-1, keepdims=True))
        probability /= probability.sum(axis=-1, keepdims=True)
        mean = probability.mean(axis=0)
        picked = np.take_along_axis(mean, np.asarray(split.labels)[:, None], axis=1)
        found["nll"] = float(-np.mean(np.log(np.maximum(picked, 1e-300))))
    else:
        found["mse"] = float(np.mean((mean - np.asarray(split.targets)) ** 2))
    if split.labels is not None:
        labels = np.asarray(split.labels)
        found["accuracy"] = float(np.mean(mean.argmax(axis=-1) == labels))
        found["accuracy_of_members"] = float(np.mean(members.argmax(axis=-1) == labels))
    if len(members) > 1:
        found["knowledge_variance"] = float(np.mean(members.var(axis=0)))
    return found


def run_job(job: Job) -> int:
    """Run, with metrics.csv written at every evaluation; returns the exit code."""
    o, screen = job.options, console()
    folder = output_folder(o.output)
    write_config(folder, "train", o)
    metrics: list[Metric] = []

    def evaluate(state: Any) -> dict[str, Any]:
        return {
            name: measure(predict(job.algorithm, state, split.x), split, o.loss) for name, split in job.splits.items()
        }

    def note(e: Evaluation) -> None:
        for split, found in e.metrics.items():
            metrics.extend(
                Metric(e.round, job.algorithm.name, o.seed, split, name, value, e.uplink_bytes, e.downlink_bytes)
                for name, value in found.items()
            )
        write_metrics(folder, metrics)

    run = simulate(
        job.algorithm,
        job.data,
        o.num_rounds,
        seed=o.seed,
        mapping=o.mapping,
        evaluate_every=o.evaluate_every,
        evaluate=evaluate,
        on_evaluation=note,
        progress=True,
    )
    last = run.history.evaluations[-1]
    rows = [{"split": s, "metric": m, "value": v} for s, found in last.metrics.items() for m, v in found.items()]
    write_result(folder, rows, rounds=last.round, uplink_bytes=last.uplink_bytes, downlink_bytes=last.downlink_bytes)
    _draw(job, metrics, folder)
    screen.print(_table(job, last))
    screen.print(f"numbers in {folder / 'metrics.csv'}, figure in {folder / 'figures'}", highlight=False)
    diverged = not all(np.isfinite(row["value"]) for row in rows)
    if diverged:
        screen.print("[bold red]the run diverged: some metrics are not finite; lower the learning rate[/bold red]")
    return 1 if diverged else 0


def _table(job: Job, last: Evaluation) -> Table:
    title = f"{job.algorithm.name} on {job.options.dataset}, round {last.round}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("split", "metric"):
        table.add_column(name)
    table.add_column("value", justify="right")
    for split, found in last.metrics.items():
        for name, value in found.items():
            table.add_row(split, name.replace("_", " "), number(value, 4))
    table.add_row("", "uplink MiB", number(last.uplink_bytes / 2**20, 2))
    table.add_row("", "downlink MiB", number(last.downlink_bytes / 2**20, 2))
    return table


def _draw(job: Job, metrics: list[Metric], folder: Path) -> None:
    from fedtangent.report.plots import curves

    chosen = "accuracy" if job.splits["test"].labels is not None else "mse"
    series = {
        split: [(m.round, m.value) for m in metrics if m.split == split and m.metric == chosen] for split in job.splits
    }
    curves(series, chosen, f"{job.algorithm.name} on {job.options.dataset}", folder / "figures" / f"{chosen}.png")
