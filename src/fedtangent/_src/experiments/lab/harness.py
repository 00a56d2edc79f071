"""The harness of all papers' comparisons: methods x settings x seeds, with rates by validation.

Each run is computed once and kept on disk, where it is found again after a kill.
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
"""By split an ``EvaluationSet``, or ``FederatedData`` if clients are tested on examples of their own."""
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
    """Builds a method's algorithm from its hyper-parameters."""

    def __call__(self, steps: Steps, rate: float | Array) -> Algorithm:
        """Builds the algorithm.

        Args:
            steps: Steps in a round, of each client or of the server; may be traced.
            rate: Learning rate; may be traced.
        """


class Method(NamedTuple):
    """A method on one seed's data: the function that builds its algorithm, and the grids of its hyper-parameters."""

    label: str
    rates: tuple[float, ...]
    steps: tuple[int, ...]  # steps in a round, of each client or of the server; (0,) where there is no such choice
    build: BuildAlgorithm
    data: FederatedData  # the trial's, in the form that this method trains on
    splits: EvaluationSets  # what it is evaluated on
    pool_size: int = 0  # the most examples that the server of NTK-FL pools
    bound_to_seed: bool = False  # whether the algorithm itself holds arrays of the seed, as FedBE's server does


class Config(NamedTuple):
    """A method with its hyper-parameters."""

    method: str
    rate: float
    steps: int = 0  # in a round; 0 where the method has no such choice

    def __str__(self) -> str:
        return f"{self.method} learning_rate={self.rate:g}" + (f" steps={self.steps}" if self.steps else "")


class Record(NamedTuple):
    """Results of a run: metrics and bytes at each of E evaluations, and the status of each of R rounds."""

    rounds: np.ndarray  # [E], from 0
    metrics: dict[str, np.ndarray]  # "split.score" -> [E, ...]
    sent: np.ndarray  # [E, 2] int64, bytes sent until then, up and down
    status: np.ndarray  # [R] int32, of NTK-FL: 0 fine, 1 every candidate diverged, 2 no examples
    seconds: float

    @property
    def num_rounds(self) -> int:
        """Rounds R."""
        return len(self.status)

    @property
    def test(self) -> np.ndarray:
        """Test accuracy, [E]."""
        return self.metrics["test.accuracy"].astype(np.float64)


Runs = dict[str, list[Record]]  # by method, one for each seed


def finite_accuracy(members: Array, labels: Array) -> Array:
    """Computes the accuracy of the mean of members' outputs [K, n, C]; 0 if some output is not finite.

    Args:
        members: Outputs of the models, [K, n, C].
        labels: Labels, [n].
    """
    return jnp.where(jnp.all(jnp.isfinite(members)), uncertainty.accuracy(members, labels), 0.0)


def _accuracies(algorithm: Algorithm, state: PyTree, splits: EvaluationSets) -> dict[str, Array]:
    """Computes ``{"test.accuracy": [], ...}``: ``finite_accuracy`` of the prediction on each split."""
    return {
        f"{name}.accuracy": finite_accuracy(algorithm.predict(state, x).members, labels)
        for name, (x, labels) in splits.items()
    }


def all_scores(algorithm: Algorithm, state: PyTree, splits: EvaluationSets) -> dict[str, Array]:
    """Computes SCORES and the members' mean accuracy on every split, and the bins of the test reliability diagram.

    Args:
        algorithm: The algorithm.
        state: Its state.
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
    """All runs of a comparison: their data, methods and compiled programs; holds one seed's methods at a time."""

    study: Study
    trial: Callable[[int], Trial]
    methods_of: Callable[[Trial], dict[str, Method]]
    depends_on: Mapping[str, object]  # the settings that a run depends on besides its data and configuration
    measure: Measure = _accuracies
    every: int = 1  # rounds between two evaluations
    largest_client: int = 0  # size of the largest client of any seed; 0: each seed's own, rounded up
    judged_by: str = "validation.accuracy"  # the metric by which rates are chosen, the larger the better
    called: str = ""  # added to a run's name in the metrics, to tell runs of equal configurations apart
    compiled: dict[tuple[object, ...], TrialProgram] = field(default_factory=dict)
    current: tuple[int, str, dict[str, Method]] | None = None  # a seed, the fingerprint of its trial, its methods

    def methods(self, seed: int) -> dict[str, Method]:
        """Returns the methods on the data of ``seed``."""
        if self.current is None or self.current[0] != seed:
            trial = self.trial(seed)
            self.current = (seed, fingerprint(trial), self.methods_of(trial))
        return self.current[2]


def decisive(settings: AnySettings, names: str) -> dict[str, object]:
    """Returns the settings of these names, which spaces separate, for ``Bench.depends_on``.

    Args:
        settings: Settings of the experiment.
        names: Names of fields.
    """
    return {name: getattr(settings, name) for name in names.split()}


def play(bench: Bench, config: Config, seed: int, num_rounds: int) -> Record:
    """Returns the run of ``config`` with ``seed``: read from its file, or computed and written.

    Files lie in the folder ``runs`` next to the figures. Runs of a method that differ only in steps, rate and seed
    share one compiled program.

    Args:
        bench: The bench.
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
    """Runs a configuration, with the program compiled for the method if there is one."""
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
    """Computes a digest of all that a run depends on, which is part of its file's name."""
    assert bench.current is not None
    settings = {**bench.depends_on, "every": bench.every, "largest_client": bench.largest_client}
    text = json.dumps([bench.current[0], bench.current[1], *config, settings], sort_keys=True)
    return sha256(text)[:16]


def _record_of(arrays: Mapping[str, np.ndarray], num_rounds: int) -> Record | None:
    """Builds the record of the first ``num_rounds`` rounds; None if the run was not evaluated at that round."""
    ends = int(np.searchsorted(arrays["rounds"], num_rounds)) + 1
    if ends > len(arrays["rounds"]) or arrays["rounds"][ends - 1] != num_rounds:
        return None
    metrics = {name: values[:ends] for name, values in arrays.items() if "." in name}
    status, seconds = arrays["status"][:num_rounds], float(arrays["seconds"])
    return Record(arrays["rounds"][:ends], metrics, arrays["sent"][:ends], status, seconds)


def _runs_folder(study: Study) -> Path:
    return study.figures.folder.parent / "runs"


def read_finished(study: Study, name: str) -> dict[str, np.ndarray] | None:
    """Reads the arrays of a finished run; None if none was kept, or if its file is damaged, which is reported.

    Args:
        study: The study, next to whose figures the folder ``runs`` lies.
        name: Name of the run, with a digest of all that it depends on.
    """
    path = _runs_folder(study) / f"{name}.npz"
    if not path.exists():
        return None
    try:
        arrays = files.arrays("finished run", path)
        if arrays.pop("sha256", np.empty(0)).tolist() != _sum(arrays):
            raise ValueError(f"finished run: {path} is not as it was written")
    except ValueError as error:
        study.say(f"{error}; it is computed again")
        return None
    return dict(arrays)


def write_finished(study: Study, name: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a finished run with its checksum; a kill or a power failure leaves the complete file or none.

    Args:
        study: The study.
        name: Name of the run.
        arrays: Its arrays.
    """
    path = _runs_folder(study) / f"{name}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez(content, sha256=np.array(_sum(arrays)), **arrays)  # type: ignore[arg-type]
    write_atomically(path, content.getvalue(), durable=True)


def _sum(arrays: Mapping[str, np.ndarray]) -> str:
    """Computes the SHA-256 of arrays, their names, dtypes and shapes."""
    items = sorted(arrays.items())
    return sha256(*(part for name, array in items for part in (f"{name} {array.dtype} {array.shape} ", array)))


def _metrics(called: str, seed: int, record: Record) -> list[Metric]:
    """Builds rows of metrics.csv from every scalar metric of every evaluation; ``called`` is the run's name."""
    names = [tuple(name.split(".")) for name, values in record.metrics.items() if values.ndim == 1]
    return [
        Metric(int(round_), called, seed, split, score, float(value), int(up), int(down))
        for split, score in sorted(names, key=lambda name: PARTS.index(name[0]))
        for round_, value, (up, down) in zip(
            record.rounds, record.metrics[f"{split}.{score}"], record.sent, strict=True
        )
    ]


class Tuned(NamedTuple):
    """Configuration chosen for a method, and the scores of its whole grid."""

    config: Config
    score: float  # the mean of the bench's ``judged_by``
    at_edge: tuple[str, ...]  # "rate" or "steps", where the choice is at an end of its grid
    grid: dict[Config, float]


def choose(method: Method, scores: dict[Config, float]) -> Tuned:
    """Selects the configuration with the best of ``scores``; one that is not finite only if all are not.

    Args:
        method: The method, with its grids.
        scores: Score of each configuration.
    """
    best = max(scores, key=lambda c: scores[c] if np.isfinite(scores[c]) else -np.inf)
    tried = {"rate": method.rates, "steps": method.steps}
    edge = tuple(n for n, values in tried.items() if len(values) > 1 and getattr(best, n) in (min(values), max(values)))
    return Tuned(best, scores[best], edge, scores)


def build_all(methods: Mapping[str, Method]) -> None:
    """Builds every method with each of its rates; raises the ``ValueError`` of a recipe."""
    for method in methods.values():
        for rate in method.rates:
            method.build(method.steps[0], rate)


def tune(bench: Bench, name: str, seed: int, num_rounds: int) -> Tuned:
    """Finds the rate and steps of a method that are best on validation examples of ``seed``.

    The score is the mean of ``judged_by`` over the last quarter of ``num_rounds``, as single rounds fluctuate.

    Args:
        bench: The bench.
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
    """Announces the cells of benches like this one to the study, which then knows the time left.

    Args:
        bench: One of the benches; settings name its seeds and rounds.
        tunings: Number of benches for ``tune_all``.
        repetitions: Number of benches for ``repeat_all``.
        rounds: Rounds of a repetition by method, if not ``num_rounds`` of the settings.
    """
    settings = bench.study.settings
    methods = bench.methods(settings.tuning_seed)
    grid = sum(len(method.rates) * len(method.steps) for method in methods.values()) * settings.tuning_rounds
    runs = sum(rounds.get(name, settings.num_rounds) for name in methods) * len(bench.study.seeds)
    bench.study.time_left.planned += tunings * grid + repetitions * runs


def tune_all(bench: Bench) -> dict[str, Tuned]:
    """Tunes the hyper-parameters of every method on the settings' ``tuning_seed``."""
    settings = bench.study.settings
    return {
        name: tune(bench, name, settings.tuning_seed, settings.tuning_rounds)
        for name in bench.methods(settings.tuning_seed)
    }


def repeat_all(bench: Bench, tuned: Mapping[str, Tuned], rounds: Mapping[str, int] = {}) -> Runs:
    """Plays every method with its tuned configuration and every seed: ``{method: records}``.

    The methods of a seed share its data, clients, cohorts and first network.

    Args:
        bench: The bench.
        tuned: Tuned configuration of each method.
        rounds: Rounds by method, where they are not ``num_rounds`` of the settings.
    """
    study, runs = bench.study, Runs()
    metric = bench.judged_by.replace("validation", "test")
    for seed in study.seeds:
        for name, (config, *_) in tuned.items():
            record = play(bench, config, seed, rounds.get(name, study.settings.num_rounds))
            runs.setdefault(name, []).append(record)
            per_round = record.seconds / max(record.num_rounds, 1)
            value = record.metrics[metric][-1]
            study.say(f"seed {seed}, {config}: {metric} {value:.3g}, {per_round:.2f} s a round; {study.time_left}")
    return runs


def edges(tuned: Mapping[str, Tuned], separator: str = "; ") -> tuple[str, ...]:
    """Returns a remark that names the choices at an edge of their grid; none without such a choice.

    Args:
        tuned: Choices by the label that names them.
        separator: Text between two labels.
    """
    labels = [label for label, choice in tuned.items() if choice.at_edge]
    return (f"rates at an edge of the grid: {separator.join(labels)}",) if labels else ()


def by_round(runs: Mapping[str, list[Record]], metric: str = "test.accuracy") -> dict[str, np.ndarray]:
    """Returns a metric of each method's runs by label, [seeds, E].

    Args:
        runs: Runs of each method by label, one for each seed.
        metric: Name of the metric.
    """
    return {label: np.stack([r.metrics[metric].astype(np.float64) for r in records]) for label, records in runs.items()}


def evaluated_rounds(runs: Mapping[str, list[Record]]) -> list[int]:
    """Returns the rounds at which the first method's first run was evaluated."""
    return [int(round_) for round_ in next(iter(runs.values()))[0].rounds]
