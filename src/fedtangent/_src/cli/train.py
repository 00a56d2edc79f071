"""``fedtangent train``: one federated run, simulated."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src import checks
from fedtangent._src.cli.arguments import FigureOptions, MachineOptions
from fedtangent._src.cli.trained import SHOWN, counted, ended_as, mean_cost, remarks, rows_of, table_of, whose
from fedtangent._src.comparison.laziness.along import LazinessDiagnostics, check_linearisable, laziness_diagnostics
from fedtangent._src.data.cache import given_directory
from fedtangent._src.engine import Evaluation, memory
from fedtangent._src.engine.building import Built, build, key_path, seed_digest
from fedtangent._src.engine.checkpoints import Checkpoints, has_checkpoint
from fedtangent._src.engine.clients import parse
from fedtangent._src.engine.description import Description, check_used
from fedtangent._src.engine.history import Measurement, Run
from fedtangent._src.engine.processes import is_main
from fedtangent._src.engine.run import Resolved, measured, predict, resolve_mapping, simulate
from fedtangent._src.engine.sweeps import parse_seeds
from fedtangent._src.entries import lasting, option
from fedtangent._src.federated import predict as personal
from fedtangent._src.losses import targets_of
from fedtangent._src.measures import uncertainty
from fedtangent._src.measures.tangent_kernels import KernelDiagnostics, check_watchable, kernel_diagnostics, spectrum
from fedtangent._src.measures.uncertainty import Reliability
from fedtangent._src.output.files import (
    Ended,
    Metric,
    held_by,
    output_folder,
    write_config,
    write_metrics,
    write_result,
)
from fedtangent._src.output.tables import console
from fedtangent._src.output.tensorboard import check_tensorboard, tensorboard
from fedtangent._src.types import Algorithm, Array

DIAGNOSTICS = ("none", *SHOWN)
LOGS = ("none", "tensorboard")
Watch = KernelDiagnostics | LazinessDiagnostics


@dataclass(frozen=True)
class TrainOptions:
    """What is measured, and where it goes."""

    evaluate_every: int = 5
    """Rounds between evaluations."""
    seeds: str | None = option(None, may_differ=True)
    """Several runs, as 0:10 or 0,3,7; data and clients stay --seed's."""
    diagnostics: str = "none"
    """none; at evaluations kernel, or laziness: how far from linear."""
    diagnostics_examples: int = option(256, used_with="diagnostics")
    """Training examples (laziness: test ones too)."""
    log: str = option("none", may_differ=True)
    """none, or tensorboard: every evaluation in OUTPUT/tensorboard, too."""
    resume: bool = option(False, may_differ=True)
    """Continue from OUTPUT; --num-rounds may have grown."""
    output: Path | None = option(None, may_differ=True)
    """Folder of what the run writes (default: results/train)."""


class TrainJob(NamedTuple):
    """Checked run, ready to start."""

    options: TrainOptions
    machine: MachineOptions
    figures: FigureOptions
    built: Built
    seeds: tuple[int, ...]
    config: dict[str, Any]  # what tells this run from another

    @property
    def title(self) -> str:
        """Names of the algorithm and the data set."""
        return f"{self.built.algorithm.name} on {self.built.description.dataset.entry.name}"


def continues(options: Mapping[str, Any]) -> bool:
    """Tells whether the run continues the one in its folder."""
    return bool(options["resume"])


def prepare(options: TrainOptions, machine: MachineOptions, figures: FigureOptions, described: Description) -> TrainJob:
    """Checks every option and builds the run; raises ``ValueError``.

    Writes nothing except the key file of a projection, if that does not exist.
    """
    seeds = _check(options, machine, described)
    built = build(described)
    if options.diagnostics != "none":
        check_watchable(built.algorithm, built.model, built.data.num_clients, options.diagnostics_examples)
    if options.diagnostics == "laziness":
        check_linearisable(built.model, built.data.x[:2])
    config = described.identity() | {name: getattr(options, name) for name in lasting(options)}
    if described.run.projection is not None:
        config["projection_seed"] = seed_digest(described.run)
    return TrainJob(options, machine, figures, built, seeds, config)


def _check(options: TrainOptions, machine: MachineOptions, described: Description) -> tuple[int, ...]:
    """Returns the seeds of the runs; raises ``ValueError`` for an option out of range."""
    checks.whole("evaluate_every", options.evaluate_every)
    checks.choice("diagnostics", options.diagnostics, DIAGNOSTICS)
    checks.choice("log", options.log, LOGS)
    if options.log == "tensorboard":
        check_tensorboard()
    checks.whole("diagnostics_examples", options.diagnostics_examples, 2)
    if machine.mapping != "auto":
        parse(machine.mapping)
    check_used(asdict(options) | asdict(machine), {"train": TrainOptions(), "machine": MachineOptions()})
    if machine.checkpoint_every is not None:
        checks.whole("checkpoint_every", machine.checkpoint_every, 0)
    if options.resume and machine.checkpoint_every == 0:
        raise ValueError("checkpoint_every: got 0, must be at least 1, or left out, with resume")
    if options.resume and described.run.projection is not None and not key_path(described.run).exists():
        path = key_path(described.run)
        raise ValueError(f"key_file: got {path}, must be the file of the seed that the resumed run began with")
    seeds = (described.run.seed,) if options.seeds is None else parse_seeds(options.seeds)
    held = held_by(options.output) if options.resume and options.output is not None else None
    if held is not None:
        before = held.get("options", {}).get("seeds")  # metrics.csv is written whole: no run may be left out
        kept = {described.run.seed} if before is None else set(parse_seeds(before))
        if (before is None) != (options.seeds is None) or not kept <= set(seeds):
            raise ValueError(f"seeds: got {options.seeds}, must have those of the run in {options.output}: {before}")
    return seeds


def checkpoints_of(job: TrainJob, seed: int) -> Checkpoints:
    """Returns the settings of checkpoints for the run of ``seed``; each of several runs has its own folder."""
    assert job.options.output is not None
    folder = job.options.output / "checkpoints" / ("" if job.options.seeds is None else f"seed-{seed}")
    resume = job.options.resume and has_checkpoint(folder)  # of several runs, some may not have begun
    return Checkpoints(folder, job.machine.checkpoint_every or None, job.config, resume=resume, notify=say)


def say(line: str) -> None:
    """Prints one line for the user to standard error."""
    print(f"fedtangent: {line}", file=sys.stderr)


def _resolved(job: TrainJob, mapping: Resolved) -> dict[str, Any]:
    """Returns the values that automatic options take on this machine."""
    run = job.built.description.run
    folder = given_directory(run.data_dir)
    return {
        "mapping": mapping.mapping,
        "seconds_a_round": mapping.seconds,
        "data_dir": None if folder is None else str(folder.absolute()),
        **({} if run.projection is None else {"projection_seed": seed_digest(run)}),
    }


def run_job(job: TrainJob) -> Ended:
    """Trains with each of the seeds, and writes metrics.csv at every evaluation; returns the outcome."""
    o, built, run = job.options, job.built, job.built.description.run
    assert o.output is not None
    folder = output_folder(o.output)
    checkpoints = {seed: checkpoints_of(job, seed) for seed in job.seeds}
    first = checkpoints[job.seeds[0]]
    if o.resume and not first.resume and is_main():
        say(f"there is no checkpoint in {first.folder}: starting from the beginning")
    evaluated = [split.x for split in (built.examples.train, built.examples.test) if split is not None]
    resumed = first if first.resume else None
    mapping = resolve_mapping(
        built.algorithm, built.data, run.num_rounds, job.machine.mapping, resumed, evaluated=evaluated
    )
    metrics: list[Metric] = []
    logging = tensorboard(folder) if o.log == "tensorboard" and is_main() else contextlib.nullcontext()
    watch, takes_classes = _watch(job), targets_of(built.loss) == "classes"

    def evaluate(watch: Watch | None, algorithm: Algorithm, state: Any) -> dict[str, Any]:
        found: dict[str, Any] = measured(built.examples, algorithm, state)
        found |= {} if built.of_clients is None else {"clients": _measure_clients(built, state)}
        return found | ({} if watch is None else {o.diagnostics: watch(algorithm, state)})

    def note(seed: int, e: Measurement) -> None:
        if not is_main():
            return
        if not metrics:  # the first thing that happens, once a checkpoint that cannot be resumed has been refused
            options = built.description.values() | asdict(o) | asdict(job.machine) | asdict(job.figures)
            write_config(folder, "train", options, resolved=_resolved(job, mapping))
            _announce(mapping)
        told, sent = (e.round, built.algorithm.name, seed), (e.uplink_bytes, e.downlink_bytes, e.seconds)
        new = [Metric(*told, s, name, value, *sent) for s, found in e.metrics.items() for name, value in found.items()]
        metrics.extend(new)
        write_metrics(folder, metrics)
        if log is not None:
            log(new)

    runs: dict[int, Run] = {}
    bins: list[Reliability] = []
    with logging as log:
        for seed in job.seeds:
            runs[seed] = simulate(
                built.algorithm,
                built.data,
                num_rounds=run.num_rounds,
                seed=seed,
                evaluation=Evaluation(
                    every=o.evaluate_every,
                    measure=functools.partial(
                        evaluate, watch and watch.of_seed(built.algorithm, built.data.num_clients, seed)
                    ),
                    report=functools.partial(note, seed),
                    stop_on_divergence=job.machine.stop_on_divergence,
                    progress=is_main(),
                ),
                devices=mapping,
                checkpoints=None if job.machine.checkpoint_every == 0 else checkpoints[seed],
            )
            if runs[seed].signal:
                return Ended(runs[seed].status, 128 + runs[seed].signal, "continue with the same options and --resume")
            test = built.examples.test
            # every process takes part in a prediction
            if takes_classes and test is not None and test.labels is not None:
                members = np.asarray(predict(built.algorithm, runs[seed].state, test.x).members, np.float64)
                bins.append(uncertainty.reliability(jnp.asarray(members), test.labels))
    if is_main():
        if watch is not None:
            _draw_diagnostics(job, watch, runs[job.seeds[0]], metrics, folder)
        _finish(job, runs, metrics, bins, folder)
    return ended_as(runs, job.machine.stop_on_divergence)


def _watch(job: TrainJob) -> Watch | None:
    """Builds the diagnostics of the runs, on the examples of --seed; None if none are requested."""
    o, built = job.options, job.built
    if o.diagnostics == "none":
        return None
    if o.diagnostics == "kernel":
        given = built.algorithm, built.model, built.data, job.seeds[0]
        return kernel_diagnostics(*given, o.diagnostics_examples, built.description.run.seed)
    watch = laziness_diagnostics(built, o.evaluate_every, o.diagnostics_examples)
    if is_main():
        missing = f", and not beside infinite width: {watch.why_no_limit}" if watch.why_no_limit else ""
        console().print(f"laziness: the linearised networks are trained as well{missing}", highlight=False)
    return watch


def _measure_clients(built: Built, state: Any) -> dict[str, float]:
    """Measures every client on its own test examples: the mean over clients, and over examples."""
    assert built.of_clients is not None
    if built.examples.train.labels is None:
        name, score = "mse", personal.mse
    else:
        takes_classes = targets_of(built.loss) == "classes"
        name, score = "accuracy", personal.accuracy if takes_classes else _accuracy_of_targets
    found = personal.evaluate_clients(built.algorithm, state, built.data, built.of_clients, score)
    return {name: float(found.mean), f"{name}_over_examples": float(found.weighted_mean)}


def _accuracy_of_targets(outputs: Array, targets: Array, mask: Array) -> Array:
    """Computes the accuracy for targets [m, C] whose largest entry stands at the class of the example."""
    return personal.accuracy(outputs, jnp.argmax(targets, axis=-1), mask)


def _announce(found: Resolved) -> None:
    """Prints the mapping of the run and its expected memory."""
    devices = f" over {jax.device_count()} devices" if found.mapping.startswith("sharded") else ""
    times = ", ".join(f"{name} {seconds:.3g}" for name, seconds in found.seconds.items())
    measured = f" (seconds a round: {times})" if times else ""
    console().print(f"mapping: {found.mapping}{devices}{measured}", highlight=False)
    console().print(memory.describe(found.plan), highlight=False)


def _finish(job: TrainJob, runs: dict[int, Run], metrics: list[Metric], bins: list[Reliability], folder: Path) -> None:
    """Writes and prints the results."""
    good = counted(runs)
    screen, rows, last = console(), rows_of(good), mean_cost(good)
    sent = {"uplink_bytes": last.uplink_bytes, "downlink_bytes": last.downlink_bytes}
    write_result(folder, rows, rounds=last.round, **sent)
    _draw(job, metrics, bins, folder)
    screen.print(table_of(f"{job.title}, {whose(runs, good)}", rows, last))
    screen.print(_setting(job), highlight=False)
    remark = job.built.remark(last.round)
    if remark:
        screen.print(remark, highlight=False)
    screen.print(f"numbers in {folder / 'metrics.csv'}, figures in {folder / 'figures'}", highlight=False)
    for seed, run in runs.items():
        for line in remarks(run):
            say(line if len(runs) == 1 else f"seed {seed}: {line}")


def _setting(job: TrainJob) -> str:
    """Returns one line with the choices on which the table's numbers depend most."""
    described = job.built.description
    rate, loss = described.algorithm.options.client_learning_rate, job.built.loss.replace("_", " ")
    how = f"{described.model.entry.name}, {described.partition.entry.name} on {job.built.data.num_clients} clients"
    return f"{how}; {loss}, client learning rate {rate:.4g}"


def _draw(job: TrainJob, metrics: list[Metric], bins: list[Reliability], folder: Path) -> None:
    from fedtangent._src.output.run_plots import learning_curves, reliability_diagram

    loss, figures = uncertainty.metric_of(job.built.loss), job.figures.within(folder)
    learning_curves(metrics, loss, job.title, figures.path("learning_curves"))
    if bins:
        title = f"{job.title}, test examples" + ("" if len(bins) == 1 else f" of {len(bins)} seeds")
        reliability_diagram({job.built.algorithm.name: bins}, title, figures.path("reliability"))


def _draw_diagnostics(job: TrainJob, watch: Watch, run: Run, metrics: list[Metric], folder: Path) -> None:
    """Draws the diagnostics of all seeds and models by round, and the first and last spectrum of the first seed."""
    from fedtangent._src.output.run_plots import kernel_figure, laziness_figure

    mine = [m for m in metrics if m.split == job.options.diagnostics]
    several = any("_model_" in m.metric for m in mine)
    series: dict[str, dict[int, list[float]]] = {}
    for m in mine:
        name, _, model = m.metric.partition("_model_")
        if model or not several:  # the models' own values, of which the others are means
            series.setdefault(name, {}).setdefault(m.round, []).append(m.value)
    path = job.figures.within(folder).path(job.options.diagnostics)
    if isinstance(watch, LazinessDiagnostics):
        laziness_figure(series, f"{job.title}: distance to its linearisation and to infinite width", path)
        return
    spectra = [
        [spectrum(theta).eigenvalues for theta in kernels] for kernels in (watch.initial, watch.kernels(run.state))
    ]
    title = f"{job.title}: tangent kernels on {len(watch.watched.rows)} training examples"
    kernel_figure(series, spectra[0], spectra[1], mine[-1].round, title, path)
