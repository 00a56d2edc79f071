"""The harness of comparisons between methods: every method in every setting with every seed, learning rates tuned.

Each run is computed once and kept in a file, so that an experiment that was killed continues where it was.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src.data import files
from fedtangent._src.data.federated import max_client_size
from fedtangent._src.engine.sweeps import single_device_engine
from fedtangent._src.engine.trials import TrialProgram, run_trial, trial_program
from fedtangent._src.experiments.lab.runner import AnySettings, Study
from fedtangent._src.experiments.lab.trials import PARTS, Trial, fingerprint
from fedtangent._src.measures import uncertainty
from fedtangent._src.output.files import Metric
from fedtangent._src.storage import sha256, write_atomically
from fedtangent._src.types import Algorithm, Array, ArrayLike, FederatedData, PyTree

EvaluationSets = dict[str, Any]
"""Maps each split to its ``EvaluationSet``, or to ``FederatedData`` if clients are tested on their own examples."""
Steps = Any
"""A number of steps in a round, which may be traced."""
Measure = Callable[[Algorithm, PyTree, EvaluationSets], dict[str, Array]]
"""Computes metrics ``"split.score"`` of an algorithm's state on the evaluation sets."""
SCORES: dict[str, Callable[[Array, Array], Array]] = {
    "accuracy": uncertainty.accuracy,
    "nll": uncertainty.negative_log_likelihood,
    "ece": uncertainty.expected_calibration_error,
    "brier": uncertainty.brier_score,
}


@runtime_checkable
class BuildAlgorithm(Protocol):
    """Function that builds the algorithm of a method from its hyper-parameters."""

    def __call__(self, steps: Steps, rate: float | Array) -> Algorithm:
        """Builds the algorithm.

        Args:
            steps: Steps in a round, of each client or of the server; may be a JAX tracer.
            rate: Learning rate; may be a JAX tracer.
        """


class Method(NamedTuple):
    """A method on the data of one seed: how its algorithm is built, and the grids of its hyper-parameters.

    Attributes:
        label: Name in tables.
        rates: Learning rates to try.
        steps: Numbers of steps in a round to try, of each client or of the server; (0,) without such a choice.
        build: Builds the algorithm from a number of steps and a rate.
        pool_size: The most examples that the server of NTK-FL pools.
        bound_to_seed: Whether the algorithm contains arrays of this seed, as FedBE's does, so that other seeds cannot
            share its compiled program.
    """

    label: str
    rates: tuple[float, ...]
    steps: tuple[int, ...]
    build: BuildAlgorithm
    data: FederatedData  # training data of the seed, in the form that this method trains on
    splits: EvaluationSets  # examples on which it is evaluated
    pool_size: int = 0
    bound_to_seed: bool = False


class Config(NamedTuple):
    """A method's name with a choice of its hyper-parameters; ``steps`` is 0 if the method has no such choice."""

    method: str
    rate: float
    steps: int = 0  # in a round; 0 where the method has no such choice

    def __str__(self) -> str:
        return f"{self.method} learning_rate={self.rate:g}" + (f" steps={self.steps}" if self.steps else "")


class Record(NamedTuple):
    """Results of a run: metrics and bytes at each of E evaluations, and the status of each of R rounds.

    Attributes:
        rounds: Rounds of the evaluations, from 0, [E].
        metrics: Values [E, ...] by name, such as "test.accuracy".
        sent: Bytes sent until each evaluation, up and down, [E, 2].
        status: Largest status of a round over the models of NTK-FL, [R]: 0, or a reason why the round failed, such as
            ``types.DIVERGED``. Other algorithms have 0.
        seconds: Wall time of the run with its compilation; of the longer run, if these are its first rounds.
    """

    rounds: np.ndarray
    metrics: dict[str, np.ndarray]
    sent: np.ndarray
    status: np.ndarray
    seconds: float

    @property
    def num_rounds(self) -> int:
        """Number R of rounds."""
        return len(self.status)

    @property
    def test(self) -> np.ndarray:
        """Test accuracy at each of the E evaluations, [E]."""
        return self.metrics["test.accuracy"].astype(np.float64)


Runs = dict[str, list[Record]]  # by method, one for each seed


def first_at(record: Record, target: float) -> int:
    """Returns the number of the first evaluation after training has begun whose test accuracy reaches a target.

    Evaluations are numbered from 0, the untrained model's. The result is E, their count, if none reaches it.

    Args:
        record: The run.
        target: Test accuracy to reach.
    """
    return 1 + int(np.argmax(np.append(record.test[1:], np.inf) >= target))


def finite_accuracy(members: Array, labels: Array) -> Array:
    """Computes the accuracy of an ensemble by its models' mean class probabilities; 0 if an output is not finite.

    Args:
        members: Logits of the K models on n examples, [K, n, C].
        labels: Labels, [n].
    """
    return jnp.where(jnp.all(jnp.isfinite(members)), uncertainty.accuracy(members, labels), 0.0)


def _accuracies(algorithm: Algorithm, state: PyTree, splits: EvaluationSets) -> dict[str, Array]:
    """Computes the accuracy of an algorithm's ensemble on each split of the data; 0 if an output is not finite.

    Keys of the result have the form ``"test.accuracy"``.
    """
    return {
        f"{name}.accuracy": finite_accuracy(algorithm.predict(state, x).members, labels)
        for name, (x, labels) in splits.items()
    }


def all_scores(algorithm: Algorithm, state: PyTree, splits: EvaluationSets) -> dict[str, Array]:
    """Computes accuracy, NLL, calibration error and Brier score of an ensemble on every split of the data.

    It adds the mean accuracy of single models on every split, and the bins of the reliability diagram on test data.
    Keys of the result have the form ``"test.nll"``.

    Args:
        algorithm: The algorithm.
        state: State of the algorithm.
        splits: Inputs and labels of each split.
    """
    metrics: dict[str, Array] = {}
    for name, (x, labels) in splits.items():
        members = algorithm.predict(state, x).members
        metrics |= {f"{name}.{score}": function(members, labels) for score, function in SCORES.items()}
        correct = members.argmax(axis=-1) == labels[None]
        metrics[f"{name}.accuracy_of_members"] = jnp.mean(correct.astype(members.dtype))
        if name == "test":
            metrics |= {f"bins.{part}": v for part, v in uncertainty.reliability(members, labels)._asdict().items()}
    return metrics


@dataclass
class Bench:
    """The common parts of a comparison's runs: data, methods, compiled programs, and the function that measures them.

    The methods of only one seed are in memory at a time.

    Attributes:
        study: The checked request.
        trial: Function from a seed to its data.
        methods_of: Function from these data to the methods, by name.
        depends_on: Settings that a run depends on besides its data and configuration.
        measure: Function that computes the metrics of a state.
        every: Number of rounds between two evaluations.
        largest_client: Number of examples of the largest client over all seeds. With 0 each seed takes its largest
            client's number, rounded up to a multiple of 8.
        judged_by: Metric by which rates are chosen, larger is better.
        called: Text added to a run's name in the metrics.
        compiled: Programs compiled so far, by method, largest client, pool size, and seed if bound to it.
    """

    study: Study
    trial: Callable[[int], Trial]
    methods_of: Callable[[Trial], dict[str, Method]]
    depends_on: Mapping[str, object]
    measure: Measure = _accuracies
    every: int = 1  # rounds between two evaluations
    largest_client: int = 0
    judged_by: str = "validation.accuracy"
    called: str = ""
    compiled: dict[tuple[object, ...], TrialProgram] = field(default_factory=dict)
    current: tuple[int, str, dict[str, Method]] | None = None  # a seed, the fingerprint of its trial, its methods

    def methods(self, seed: int) -> dict[str, Method]:
        """Returns the methods on the data of ``seed``, by name; frees the methods of the seed used before."""
        if self.current is None or self.current[0] != seed:
            trial = self.trial(seed)
            self.current = (seed, fingerprint(trial), self.methods_of(trial))
        return self.current[2]


def decisive(settings: AnySettings, names: str) -> dict[str, object]:
    """Returns the named settings as a dictionary, for ``Bench.depends_on``: if one changes, a run is computed again.

    Args:
        settings: Settings of the experiment.
        names: Names of fields, separated by spaces.
    """
    return {name: getattr(settings, name) for name in names.split()}


def play(bench: Bench, config: Config, seed: int, num_rounds: int) -> Record:
    """Returns one run of a method: reads it from its file if there is one, else computes and writes it.

    Files lie in the folder ``runs`` next to the figures. From the file of a longer run it takes the first rounds, if
    there is an evaluation at ``num_rounds``. Runs of a method that differ only in steps, rate and seed share one
    compiled program, unless the method is bound to its seed. The run's metrics go to ``bench.study.keep``.

    Args:
        bench: The comparison that the run belongs to.
        config: Method and hyper-parameters.
        seed: Seed of the run.
        num_rounds: Number of rounds.
    """
    method, time_left = bench.methods(seed)[config.method], bench.study.time_left
    name = f"{config.method}-{_digest(bench, config)}"
    finished = read_finished(bench.study, name)
    record = None if finished is None else _record_of(finished, num_rounds)
    if record is None:
        record = _compute(bench, method, config, seed, num_rounds)
        parts = record._asdict()
        arrays = {**parts.pop("metrics"), **parts}
        write_finished(bench.study, name, {name: np.asarray(array) for name, array in arrays.items()})
        time_left.finish(num_rounds, record.seconds)
    else:
        time_left.planned -= num_rounds
    bench.study.keep(_metrics(", ".join(filter(None, (str(config), bench.called))), seed, record))
    return record


def _compute(bench: Bench, method: Method, config: Config, seed: int, num_rounds: int) -> Record:
    """Runs a method with the hyper-parameters of ``config``; compiles its program unless ``bench`` has it."""
    start = time.perf_counter()
    largest = bench.largest_client or -(-max_client_size(method.data) // 8) * 8  # one program for like sizes
    engine = single_device_engine(method.data, "auto")._replace(max_client_size=largest)
    key = (config.method, largest, method.pool_size, seed if method.bound_to_seed else None)
    if key not in bench.compiled:
        numbers = {"steps": config.steps, "rate": config.rate}
        bench.compiled[key] = trial_program(method.build, numbers, method.data, engine, bench.measure, bench.every)
    traced: dict[str, ArrayLike] = {"steps": np.int32(config.steps), "rate": config.rate}
    history = run_trial(bench.compiled[key], seed, traced, method.data, method.splits, num_rounds, bench.every).history
    evaluations = history.evaluations
    names = evaluations[0].metrics
    metrics = {name: np.stack([np.asarray(e.metrics[name]) for e in evaluations]) for name in names}
    sent = np.array([(e.uplink_bytes, e.downlink_bytes) for e in evaluations], np.int64)
    status = np.asarray(history.rounds.get("status", np.zeros(num_rounds))).reshape(num_rounds, -1).max(axis=1)
    rounds = np.array([e.round for e in evaluations])
    return Record(rounds, metrics, sent, status.astype(np.int32), time.perf_counter() - start)


def _digest(bench: Bench, config: Config) -> str:
    """Computes a hash of all that a run depends on (seed, data, configuration, settings) for its file's name."""
    assert bench.current is not None
    settings = {**bench.depends_on, "every": bench.every, "largest_client": bench.largest_client}
    text = json.dumps([bench.current[0], bench.current[1], *config, settings], sort_keys=True)
    return sha256(text)[:16]


def _record_of(arrays: Mapping[str, np.ndarray], num_rounds: int) -> Record | None:
    """Builds the ``Record`` of a run's first rounds from its file's arrays; None if round ``num_rounds`` is missing."""
    ends = int(np.searchsorted(arrays["rounds"], num_rounds)) + 1
    if ends > len(arrays["rounds"]) or arrays["rounds"][ends - 1] != num_rounds:
        return None
    metrics = {name: values[:ends] for name, values in arrays.items() if "." in name}
    status, seconds = arrays["status"][:num_rounds], float(arrays["seconds"])
    return Record(arrays["rounds"][:ends], metrics, arrays["sent"][:ends], status, seconds)


def _run_file(study: Study, name: str) -> Path:
    return study.figures.folder.parent / "runs" / f"{name}-{ft.__version__}.npz"


def read_finished(study: Study, name: str) -> dict[str, np.ndarray] | None:
    """Reads the arrays of a finished run from its file; None without a file. A damaged file is reported and ignored.

    Args:
        study: The study; the file is in the folder ``runs`` next to its figures. Its name has the package's version.
        name: Name of the run, with a hash of all that it depends on.
    """
    path = _run_file(study, name)
    if not path.exists():
        return None
    try:
        arrays = files.arrays("finished run", path)
        if arrays.pop("sha256", np.empty(0)).tolist() != _sum(path.name, arrays):
            raise ValueError(f"finished run: {path} is damaged or renamed: its contents do not match its checksum")
    except ValueError as error:
        study.say(f"{error}; it is computed again")
        return None
    return dict(arrays)


def write_finished(study: Study, name: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the arrays of a finished run to its file, with a checksum; a kill leaves the complete file or none.

    Args:
        study: The study; the file is in the folder ``runs`` next to its figures.
        name: Name of the run, with a hash of all that it depends on.
        arrays: The run's arrays by name.
    """
    path = _run_file(study, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez(content, sha256=np.array(_sum(path.name, arrays)), **arrays)  # type: ignore[arg-type]
    write_atomically(path, content.getvalue(), durable=True)


def _sum(file: str, arrays: Mapping[str, np.ndarray]) -> str:
    """Computes the SHA-256 checksum of a file's name and of its arrays' names, dtypes, shapes and values."""
    items = sorted(arrays.items())
    return sha256(file, *(part for name, array in items for part in (f"{name} {array.dtype} {array.shape} ", array)))


def _metrics(called: str, seed: int, record: Record) -> list[Metric]:
    """Builds the rows of metrics.csv from all scalar metrics of a run; ``called`` is the name of the run."""
    names = [tuple(name.split(".")) for name, values in record.metrics.items() if values.ndim == 1]
    return [
        Metric(int(round_), called, seed, split, score, float(value), int(up), int(down))
        for split, score in sorted(names, key=lambda name: PARTS.index(name[0]))
        for round_, value, (up, down) in zip(
            record.rounds, record.metrics[f"{split}.{score}"], record.sent, strict=True
        )
    ]


class Tuned(NamedTuple):
    """The hyper-parameters chosen for a method, and the score of each point of its grid.

    ``at_edge`` names "rate" or "steps" if the choice is at an end of this grid, where a wider one might do better.
    """

    config: Config
    score: float  # of ``config``; larger is better
    at_edge: tuple[str, ...]  # "rate" or "steps", where the choice is at an end of its grid
    grid: dict[Config, float]


def choose(method: Method, scores: dict[Config, float]) -> Tuned:
    """Selects the configuration with the highest score; scores that are not finite count as the lowest.

    Args:
        method: The method, with its grids of rates and steps.
        scores: Score of each configuration.
    """
    best = max(scores, key=lambda c: scores[c] if np.isfinite(scores[c]) else -np.inf)
    tried = {"rate": method.rates, "steps": method.steps}
    edge = tuple(n for n, values in tried.items() if len(values) > 1 and getattr(best, n) in (min(values), max(values)))
    return Tuned(best, scores[best], edge, scores)


def build_all(methods: Mapping[str, Method]) -> None:
    """Builds every method's algorithm at each rate, so that wrong settings raise ``ValueError`` before any training.

    Of the numbers of steps only the first is tried.
    """
    for method in methods.values():
        for rate in method.rates:
            method.build(method.steps[0], rate)


def check_tuning_seed(study: Study) -> None:
    """Raises ``ValueError`` if the seed of the tuning runs is one of the seeds that are measured."""
    if study.settings.tuning_seed in study.seeds:
        raise ValueError(
            f"tuning_seed: got {study.settings.tuning_seed}, must not be among the seeds that are measured"
        )


def tune(bench: Bench, name: str, seed: int, num_rounds: int) -> Tuned:
    """Finds the learning rate and number of steps of a method that score best on validation examples.

    The score is the mean of the metric ``bench.judged_by`` over the last ``num_rounds // 4`` evaluations, at least one,
    as single evaluations fluctuate. The choice is reported to ``bench.study.say``.

    Args:
        bench: The comparison.
        name: Name of the method.
        seed: Seed of the tuning runs.
        num_rounds: Rounds of each run.
    """
    method, start = bench.methods(seed)[name], time.perf_counter()
    grid: dict[Config, float] = {}
    for config in (Config(name, rate, steps) for steps in method.steps for rate in method.rates):
        scores = play(bench, config, seed, num_rounds).metrics[bench.judged_by]
        grid[config] = float(scores[-max(1, num_rounds // 4) :].mean(dtype=np.float64))
    tuned = choose(method, grid)
    bench.study.say(
        f"{method.label}: {tuned.config} of {len(grid)}, {bench.judged_by} {tuned.score:.3g}, "
        f"{time.perf_counter() - start:.0f} s; {bench.study.time_left}"
    )
    return tuned


def plan(bench: Bench, tunings: int = 1, repetitions: int = 1, rounds: Mapping[str, int] = {}) -> None:
    """Adds the rounds that a comparison will take to the total from which the study estimates the time left.

    Args:
        bench: The comparison, or one of several that have the same methods, seeds and rounds.
        tunings: Number of these comparisons for which ``tune_all`` will be called.
        repetitions: Number of these comparisons for which ``repeat_all`` will be called.
        rounds: Rounds of a final run by method, where they are not ``num_rounds`` of the settings.
    """
    settings = bench.study.settings
    methods = bench.methods(settings.tuning_seed)
    grid = sum(len(method.rates) * len(method.steps) for method in methods.values()) * settings.tuning_rounds
    runs = sum(rounds.get(name, settings.num_rounds) for name in methods) * len(bench.study.seeds)
    bench.study.time_left.planned += tunings * grid + repetitions * runs


def tune_all(bench: Bench) -> dict[str, Tuned]:
    """Tunes every method with the tuning seed and rounds of the settings; returns the choices by method name."""
    settings = bench.study.settings
    return {
        name: tune(bench, name, settings.tuning_seed, settings.tuning_rounds)
        for name in bench.methods(settings.tuning_seed)
    }


def repeat_all(bench: Bench, tuned: Mapping[str, Tuned], rounds: Mapping[str, int] = {}) -> Runs:
    """Runs every method with its tuned hyper-parameters and every seed; returns ``{method: records}``.

    For each seed all methods have the same data and clients, and start from the same random key.

    Args:
        bench: The comparison.
        tuned: Tuned hyper-parameters of each method.
        rounds: Rounds by method, where they are not ``num_rounds`` of the settings.
    """
    study, runs = bench.study, Runs()
    metric = bench.judged_by.replace("validation", "test")
    for seed in study.seeds:
        for name, (config, *_) in tuned.items():
            record = play(bench, config, seed, rounds.get(name) or study.settings.num_rounds)
            runs.setdefault(name, []).append(record)
            per_round = record.seconds / max(record.num_rounds, 1)
            value = record.metrics[metric][-1]
            study.say(f"seed {seed}, {config}: {metric} {value:.3g}, {per_round:.2f} s a round; {study.time_left}")
    return runs


def edges(tuned: Mapping[str, Tuned], separator: str = "; ") -> tuple[str, ...]:
    """Returns a remark that names each choice at an end of its grid, where a wider grid might do better; () if none is.

    Args:
        tuned: Choices by the label that the remark shows.
        separator: Text between two labels.
    """
    labels = [f"{label} ({' and '.join(choice.at_edge)})" for label, choice in tuned.items() if choice.at_edge]
    return (f"at an edge of the grid: {separator.join(labels)}",) if labels else ()


def by_round(runs: Mapping[str, list[Record]], metric: str = "test.accuracy") -> dict[str, np.ndarray]:
    """Returns the values of one metric at all evaluations, for each method an array [seeds, E].

    Args:
        runs: Runs of each method by label, one for each seed.
        metric: Name of the metric.
    """
    return {label: np.stack([r.metrics[metric].astype(np.float64) for r in records]) for label, records in runs.items()}


def evaluated_rounds(runs: Mapping[str, list[Record]]) -> list[int]:
    """Returns the rounds at which runs were evaluated, read from the first method's first run."""
    return [int(round_) for round_ in next(iter(runs.values()))[0].rounds]
