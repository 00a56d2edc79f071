"""``fedtangent train``: one federated run, simulated."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedtangent._src import checks
from fedtangent._src.cli import trained
from fedtangent._src.cli.arguments import FigureOptions, MachineOptions
from fedtangent._src.cli.trained import Diagnostics, RunFiles
from fedtangent._src.comparison.laziness import LazinessDiagnostics, laziness_diagnostics
from fedtangent._src.data.cache import given_directory
from fedtangent._src.engine import Evaluation, memory
from fedtangent._src.engine.building import Built, build, key_path, seed_digest
from fedtangent._src.engine.checkpoints import Checkpoints, has_checkpoint
from fedtangent._src.engine.clients import parse
from fedtangent._src.engine.description import Description, check_used
from fedtangent._src.engine.history import Run
from fedtangent._src.engine.loop import Reported
from fedtangent._src.engine.processes import is_main
from fedtangent._src.engine.run import Resolved, measured, resolve_mapping, simulate_rounds
from fedtangent._src.engine.sweeps import parse_seeds
from fedtangent._src.entries import Values, lasting, option
from fedtangent._src.federated import predict as personal
from fedtangent._src.losses import targets_of
from fedtangent._src.measures.tangent_kernels import kernel_diagnostics
from fedtangent._src.output import files
from fedtangent._src.output.files import Ended, check_tensorboard
from fedtangent._src.types import Algorithm, Array, FederatedData, PyTree

DIAGNOSTICS = ("none", *trained.SHOWN)
LOGS = ("none", "tensorboard")


@dataclass(frozen=True)
class TrainOptions:
    """Options of the evaluations of a run, of repetitions with other seeds, and of the output."""

    evaluate_every: int = 5
    """Rounds between evaluations."""
    seeds: str | None = option(None, may_differ=True)
    """Repeat with seeds 0:10 or 0,3,7; data and clients stay --seed's."""
    diagnostics: str = "none"
    """Measure at evaluations: none, kernel, or laziness (distance from the linearised network)."""
    diagnostics_examples: int = option(256, used_with="diagnostics")
    """Examples to measure on (laziness: of each split)."""
    log: str = option("none", may_differ=True)
    """none, or tensorboard: evaluations also go to OUTPUT/tensorboard."""
    resume: bool = option(False, may_differ=True)
    """Continue the run in OUTPUT; --num-rounds may be larger."""
    output: Path | None = option(None, may_differ=True)
    """Folder for the run's files (default: results/train)."""


class TrainJob(NamedTuple):
    """A run of ``fedtangent train`` whose options are checked and whose data and algorithm are built."""

    options: TrainOptions  # options of evaluations and output
    machine: MachineOptions  # options of the computation, such as its mapping and checkpoints
    built: Built  # data and algorithm
    config: Values  # values that a resumed run must share with the run that it continues
    mapping: Resolved  # mapping of clients onto the devices, and the memory plan
    checkpoints: dict[int, Checkpoints]  # checkpoints of the run of each seed, by seed
    diagnostics: Diagnostics | None  # further measure of the run, or None
    files: RunFiles  # writer of the run's files


def continues(options: Mapping[str, object]) -> bool:
    """Tells whether the user set ``--resume``, to continue the run in the output folder."""
    return bool(options["resume"])


def prepare(options: TrainOptions, machine: MachineOptions, figures: FigureOptions, described: Description) -> TrainJob:
    """Checks every option, builds the run, and chooses how its clients are mapped onto the devices.

    Writes nothing except the key file of a random projection of the inputs, if that does not exist.

    Args:
        options: Options of evaluations and output.
        machine: Options of where and how the run is computed.
        figures: Format of the figures.
        described: The run.

    Raises:
        ValueError: An option is not allowed, data are missing, or the run does not fit into memory.
    """
    assert options.output is not None  # the command line names one
    seeds = _check(options, machine, described)
    built, run = build(described), described.run
    diagnostics = _diagnostics(options, built, seeds[0])
    digest = {} if run.projection is None else {"projection_seed": seed_digest(run)}
    config = described.identity() | {name: getattr(options, name) for name in lasting(options)} | digest
    checkpoints = {seed: _checkpoints(options, machine, seed, config) for seed in seeds}
    first = checkpoints[seeds[0]]
    evaluated = [split.x for split in (built.examples.train, built.examples.test) if split is not None]
    resumed = first if first.resume else None
    mapping = resolve_mapping(
        built.algorithm, built.data, run.num_rounds, machine.mapping, resumed, evaluated=evaluated
    )
    directory = given_directory(run.data_dir)
    automatic = {
        "mapping": mapping.mapping,
        "seconds_a_round": mapping.seconds,
        "data_dir": None if directory is None else str(directory.absolute()),
        **digest,
    }
    values = described.values() | asdict(options) | asdict(machine) | asdict(figures)
    writer = RunFiles(
        folder=options.output,
        built=built,
        figures=figures.within(options.output),
        config={"config": values, "resolved": automatic},
        notices=[*_notices(diagnostics), *_described(mapping)],
        logs=options.log == "tensorboard",
    )
    return TrainJob(options, machine, built, config, mapping, checkpoints, diagnostics, writer)


def _check(options: TrainOptions, machine: MachineOptions, described: Description) -> tuple[int, ...]:
    """Checks the options of ``train`` and returns the seeds of its runs; raises ``ValueError`` for a bad option."""
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
        raise ValueError(f"key_file: there is no {path}; to resume, name the key file with which the run began")
    seeds = (described.run.seed,) if options.seeds is None else parse_seeds(options.seeds)
    earlier = files.config_of(options.output) if options.resume and options.output is not None else None
    if earlier is not None:
        before = earlier.get("options", {}).get("seeds")  # metrics.csv is written whole: no run may be left out
        earlier_seeds = {described.run.seed} if before is None else set(parse_seeds(before))
        if (before is None) != (options.seeds is None) or not earlier_seeds <= set(seeds):
            got, run = "none" if options.seeds is None else options.seeds, f"the run in {options.output}"
            must = f"be left out, as for {run}" if before is None else f"include those of {run}: {before}"
            raise ValueError(f"seeds: got {got}, must {must}")
    return seeds


def _diagnostics(options: TrainOptions, built: Built, seed: int) -> Diagnostics | None:
    """Builds the measure that ``--diagnostics`` names (of tangent kernels or of laziness); None if it is "none".

    ``seed`` is the seed of the first run, whose initial kernels are computed. The seed in the run's description draws
    the examples; the measure of laziness uses only that one. ``of_seed`` of the result makes the measure of another
    run.

    Raises ``ValueError`` if the run does not allow the measure.
    """
    if options.diagnostics == "laziness":
        return laziness_diagnostics(built, options.evaluate_every, options.diagnostics_examples)
    if options.diagnostics == "kernel":
        examples_seed = built.description.run.seed
        return kernel_diagnostics(
            built.algorithm, built.model, built.data, seed, options.diagnostics_examples, examples_seed
        )
    return None


def _checkpoints(options: TrainOptions, machine: MachineOptions, seed: int, config: Values) -> Checkpoints:
    """Returns the settings of checkpoints for the run of ``seed``; with ``--seeds`` each run has its own folder.

    With ``--resume`` a run that has no checkpoint starts from the beginning. ``config`` has the option values that a
    resumed run must share with the run that it continues.
    """
    assert options.output is not None
    folder = options.output / "checkpoints" / ("" if options.seeds is None else f"seed-{seed}")
    resume = options.resume and has_checkpoint(folder)  # of several runs, some may not have begun
    return Checkpoints(folder, machine.checkpoint_every or None, config, resume=resume, notify=trained.say)


def _notices(diagnostics: Diagnostics | None) -> list[str]:
    if not isinstance(diagnostics, LazinessDiagnostics):
        return []
    reason = diagnostics.why_no_limit
    missing = f", but not compared with infinite width: {reason}" if reason else ""
    return [f"laziness: the linearised networks are trained as well{missing}"]


def _described(resolved: Resolved) -> list[str]:
    """Returns two lines of text for the user: how clients are mapped onto devices, and the expected memory."""
    devices = f" over {jax.device_count()} devices" if resolved.mapping.startswith("sharded") else ""
    times = ", ".join(f"{name} {seconds:.3g}" for name, seconds in resolved.seconds.items())
    timed = f" (seconds a round: {times})" if times else ""
    return [f"mapping: {resolved.mapping}{devices}{timed}", memory.describe(resolved.plan)]


def run_job(job: TrainJob) -> Ended:
    """Trains once for each seed, writes files during training and at the end; returns the outcome."""
    first = next(iter(job.checkpoints.values()))
    if job.options.resume and not first.resume and is_main():
        trained.say(f"there is no checkpoint in {first.folder}: starting from the beginning")
    runs: dict[int, Run] = {}
    with job.files.log() as log:
        for seed in job.checkpoints:
            run = _simulated(job, seed, functools.partial(job.files.write, log, seed))
            if run.signal:
                return Ended(run.status, 128 + run.signal, "continue with the same options and --resume")
            runs[seed] = run
    job.files.finish(runs, job.diagnostics)
    return trained.ended_as(runs, job.machine.stop_on_divergence)


def _simulated(job: TrainJob, seed: int, write: Reported) -> Run:
    """Trains the run of one seed; calls ``write`` with every evaluation."""
    built, diagnostics = job.built, job.diagnostics
    if diagnostics is not None:
        diagnostics = diagnostics.of_seed(built.algorithm, built.data.num_clients, seed)
    evaluation = Evaluation(
        every=job.options.evaluate_every,
        measure=functools.partial(_measured, built, job.options.diagnostics, diagnostics),
        report=write,
        stop_on_divergence=job.machine.stop_on_divergence,
        progress=is_main(),
    )
    return simulate_rounds(
        built.algorithm,
        built.data,
        num_rounds=built.description.run.num_rounds,
        seed=seed,
        evaluation=evaluation,
        mapping=job.mapping.mapping,
        checkpoints=None if job.machine.checkpoint_every == 0 else job.checkpoints[seed],
    )


def _measured(
    built: Built, kind: str, diagnostics: Diagnostics | None, algorithm: Algorithm, state: PyTree
) -> dict[str, dict[str, float]]:
    """Computes the metrics of an evaluation by split and name, ``{split: {metric: value}}``.

    Args:
        built: Data and algorithm of the run.
        kind: Name of the diagnostics, under which their metrics are returned.
        diagnostics: A further measure of the run, or None.
        algorithm: The algorithm.
        state: State of the algorithm at the evaluation.
    """
    metrics = measured(built.examples, algorithm, state)
    if built.of_clients is not None:
        metrics["clients"] = _measured_on_clients(built, built.of_clients, state)
    if diagnostics is not None:
        metrics[kind] = diagnostics(algorithm, state)
    return metrics


def _measured_on_clients(built: Built, tests: FederatedData, state: PyTree) -> dict[str, float]:
    """Computes the accuracy of each client's predictions on its examples in ``tests``, or the MSE without class labels.

    Returns two means by name: over clients (such as "accuracy"), and over examples ("accuracy_over_examples").
    """
    if built.examples.train.labels is None:
        name, score = "mse", personal.mse
    else:
        takes_classes = targets_of(built.loss) == "classes"
        name, score = "accuracy", personal.accuracy if takes_classes else _accuracy_of_targets
    scores = personal.evaluate_clients(built.algorithm, state, built.data, tests, score)
    return {name: float(scores.mean), f"{name}_over_examples": float(scores.weighted_mean)}


def _accuracy_of_targets(outputs: Array, targets: Array, mask: Array) -> Array:
    """Computes the accuracy []: the share of examples whose largest output is at the class.

    The class of an example is the position of the largest of its ``targets`` [m, C]; ``outputs`` are [m, C], too.
    ``mask`` [m] tells which examples count.
    """
    return personal.accuracy(outputs, jnp.argmax(targets, axis=-1), mask)
