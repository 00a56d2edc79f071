"""Runs of several methods, with every rate of a grid, on several seeds.

Each run is computed once and kept on disk; rates are chosen on validation examples.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedtangent._src.data import files
from fedtangent._src.data.federated import max_client_size
from fedtangent._src.engine.sweeps import single_device_engine
from fedtangent._src.engine.trials import TrialProgram, run_trial, trial_program
from fedtangent._src.experiments.lab.runner import Clock, Study
from fedtangent._src.experiments.lab.trials import PARTS, Trial, fingerprint
from fedtangent._src.measures import uncertainty
from fedtangent._src.output.files import Metric
from fedtangent._src.storage import sha256, write_atomically
from fedtangent._src.types import Algorithm, Array, FederatedData, PyTree

EvaluationSets = dict[str, Any]  # by split an EvaluationSet, or FederatedData if clients have own examples to test on
SCORES: dict[str, Callable[[Array, Array], Array]] = {
    "accuracy": uncertainty.accuracy,
    "nll": uncertainty.negative_log_likelihood,
    "ece": uncertainty.expected_calibration_error,
    "brier": uncertainty.brier_score,
}


class Method(NamedTuple):
    """A method on one seed's data: the function that builds its algorithm, and the grids of its hyper-parameters."""

    label: str
    rates: tuple[float, ...]
    steps: tuple[int, ...]  # steps in a round, of each client or of the server; (0,) where there is no such choice
    build: Callable[..., Algorithm]  # (steps, rate) -> algorithm; both may be traced
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


TIMED = 1, 3  # rounds of the two runs whose difference in time gives the time of a round
Runs = dict[str, list[Record]]  # by method, one for each seed


def finite_accuracy(members: Array, labels: Array) -> Array:
    """Computes the accuracy of the mean of members' outputs [K, n, C]; 0 if some output is not finite."""
    return jnp.where(jnp.all(jnp.isfinite(members)), uncertainty.accuracy(members, labels), 0.0)


def accuracies(algorithm: Algorithm, state: PyTree, splits: EvaluationSets) -> dict[str, Array]:
    """Computes ``{"test.accuracy": [], ...}``: ``finite_accuracy`` of the prediction on each split."""
    return {
        f"{name}.accuracy": finite_accuracy(algorithm.predict(state, x).members, labels)
        for name, (x, labels) in splits.items()
    }


def all_scores(algorithm: Algorithm, state: PyTree, splits: EvaluationSets) -> dict[str, Array]:
    """Computes SCORES and the members' mean accuracy on every split, and the bins of the test reliability diagram."""
    found: dict[str, Array] = {}
    for name, (x, labels) in splits.items():
        members = algorithm.predict(state, x).members
        found |= {f"{name}.{score}": function(members, labels) for score, function in SCORES.items()}
        correct = members.argmax(axis=-1) == labels[None]
        found[f"{name}.accuracy_of_members"] = jnp.mean(correct.astype(members.dtype))
        if name == "test":
            found |= {f"bins.{part}": v for part, v in uncertainty.reliability(members, labels)._asdict().items()}
    return found


@dataclass
class Bench:
    """Runs of a comparison: their data, methods and compiled programs; holds one seed's data at a time."""

    study: Study
    trial: Callable[[int], Trial]
    methods_of: Callable[[Trial], dict[str, Method]]
    depends_on: Mapping[str, Any]  # the settings that a run depends on besides its data and configuration
    measure: Callable[[Algorithm, PyTree, EvaluationSets], dict[str, Array]] = accuracies
    every: int = 1  # rounds between two evaluations
    largest_client: int = 0  # size of the largest client of any seed; 0: each seed's own, rounded up
    judged_by: str = "validation.accuracy"  # the metric by which rates are chosen, the larger the better
    called: str = ""  # added to a run's name in the metrics, where its configuration does not tell it from others
    compiled: dict[tuple[Any, ...], TrialProgram] = field(default_factory=dict)
    current: tuple[int, str, dict[str, Method]] | None = None  # a seed, the fingerprint of its trial, its methods

    def methods(self, seed: int) -> dict[str, Method]:
        """Returns the methods on the data of ``seed``."""
        if self.current is None or self.current[0] != seed:
            trial = self.trial(seed)
            self.current = (seed, fingerprint(trial), self.methods_of(trial))
        return self.current[2]


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
    method = bench.methods(seed)[config.method]
    if bench.study.clock is not None:
        return _time(bench, bench.study.clock, method, config, seed, num_rounds)
    path = bench.study.figures.folder.parent / "runs" / f"{config.method}-{_digest(bench, config)}.npz"
    record = _read(bench.study, path, num_rounds)
    if record is None:
        record = _compute(bench, method, config, seed, num_rounds)
        _write(path, record)
    bench.study.keep(_metrics(", ".join(filter(None, (str(config), bench.called))), seed, record))
    return record


def _time(bench: Bench, clock: Clock, method: Method, config: Config, seed: int, num_rounds: int) -> Record:
    """Adds the expected time of a run to ``clock``; returns a record that repeats a short run's last evaluation.

    A round is assumed to take a fixed time plus a time for each training example. If all of many clients take part, it
    is therefore timed with the examples of one client and of three, and extrapolated. All rates, and clients of any
    classes, are assumed to need the same time.
    """
    depends_on = {name: value for name, value in bench.depends_on.items() if name != "classes"}
    key = config.method, config.steps, json.dumps(depends_on, sort_keys=True)
    if (known := clock.by_run.get(key)) is None:
        algorithm = method.build(config.steps, config.rate)
        sizes = np.diff(np.asarray(method.data.offsets))
        shares = (1, 3) if algorithm.schedule.num_slots >= len(sizes) > 6 else (len(sizes),)
        seconds = []
        for number in shares:
            timed = method._replace(data=_only(method.data, number), bound_to_seed=False)
            _compute(bench, timed, config, seed, TIMED[0])  # compiles
            short, record = (_compute(bench, timed, config, seed, rounds) for rounds in TIMED)
            seconds.append(max(record.seconds - short.seconds, 0.0) / (TIMED[1] - TIMED[0]))
        counts = [int(sizes[:number].sum()) for number in shares]
        more = (seconds[-1] - seconds[0]) / max(counts[-1] - counts[0], 1) * (int(sizes.sum()) - counts[-1])
        known = clock.by_run[key] = seconds[-1] + max(more, 0.0), record
    per_round, record = known
    clock.seconds += per_round * num_rounds
    rounds = np.unique([*range(0, num_rounds, bench.every), num_rounds])
    metrics = {name: np.repeat(v[-1:], len(rounds), axis=0) for name, v in record.metrics.items()}
    sent = np.outer(rounds, record.sent[-1] // TIMED[1])
    return Record(rounds, metrics, sent, np.zeros(num_rounds, np.int32), per_round * num_rounds)


def _only(data: FederatedData, number: int) -> FederatedData:
    """Returns the data with examples of the first ``number`` clients only, in arrays of the same shapes."""
    offsets = jnp.minimum(data.offsets, data.offsets[number])
    return data._replace(offsets=offsets)


def _compute(bench: Bench, method: Method, config: Config, seed: int, num_rounds: int) -> Record:
    """Runs a configuration, with the program compiled for the method if there is one."""
    start = time.perf_counter()
    largest = bench.largest_client or -(-max_client_size(method.data) // 8) * 8  # one program for like sizes
    engine = single_device_engine(method.data, "auto")._replace(max_client_size=largest)
    key = (config.method, largest, method.pool_size, seed if method.bound_to_seed else None)
    if key not in bench.compiled:
        numbers: dict[str, Any] = {"steps": config.steps, "rate": config.rate}
        bench.compiled[key] = trial_program(method.build, numbers, method.data, engine, bench.measure, bench.every)
    traced = {"steps": np.int32(config.steps), "rate": config.rate}
    history = run_trial(bench.compiled[key], seed, traced, method.data, method.splits, num_rounds, bench.every).history
    seen = history.evaluations
    metrics = {name: np.stack([np.asarray(e.metrics[name]) for e in seen]) for name in seen[0].metrics}
    sent = np.array([(e.uplink_bytes, e.downlink_bytes) for e in seen], np.int64)
    status = np.asarray(history.rounds.get("status", np.zeros(num_rounds))).reshape(num_rounds, -1).max(axis=1)
    rounds = np.array([e.round for e in seen])
    return Record(rounds, metrics, sent, status.astype(np.int32), time.perf_counter() - start)


def _digest(bench: Bench, config: Config) -> str:
    """Computes a digest of all that a run depends on, which is part of its file's name."""
    assert bench.current is not None
    of = {**bench.depends_on, "every": bench.every, "largest_client": bench.largest_client}
    text = json.dumps([bench.current[0], bench.current[1], *config, of], sort_keys=True)
    return sha256(text)[:16]


def _read(study: Study, path: Path, num_rounds: int) -> Record | None:
    """Reads the first ``num_rounds`` rounds of a kept run; None if no run was kept and evaluated at that round.

    A damaged file is reported, and the run computed again.
    """
    if not path.exists():
        return None
    try:
        found = files.arrays("finished run", path)
        if found.pop("sha256", np.empty(0)).tolist() != _sum(found):
            raise ValueError(f"finished run: {path} is not as it was written")
    except ValueError as error:
        study.say(f"{error}; it is computed again")
        return None
    ends = int(np.searchsorted(found["rounds"], num_rounds)) + 1
    if ends > len(found["rounds"]) or found["rounds"][ends - 1] != num_rounds:
        return None
    metrics = {name: values[:ends] for name, values in found.items() if "." in name}
    status, seconds = found["status"][:num_rounds], float(found["seconds"])
    return Record(found["rounds"][:ends], metrics, found["sent"][:ends], status, seconds)


def _write(path: Path, record: Record) -> None:
    """Writes a finished run with its checksum; a kill or a power failure leaves the complete file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content, parts = io.BytesIO(), record._asdict()
    held = {name: np.asarray(value) for name, value in {**parts.pop("metrics"), **parts}.items()}
    np.savez(content, sha256=np.array(_sum(held)), **held)  # type: ignore[arg-type]
    write_atomically(path, content.getvalue(), durable=True)


def _sum(arrays: Mapping[str, np.ndarray]) -> str:
    """Computes the SHA-256 of arrays, their names, dtypes and shapes."""
    items = sorted(arrays.items())
    return sha256(*(part for name, array in items for part in (f"{name} {array.dtype} {array.shape} ", array)))


def _metrics(called: str, seed: int, record: Record) -> list[Metric]:
    """Builds rows of metrics.csv from every scalar metric of every evaluation; ``called`` is the run's name."""
    names = [tuple(name.split(".")) for name, values in record.metrics.items() if values.ndim == 1]
    return [
        Metric(int(r), called, seed, split, score, float(record.metrics[f"{split}.{score}"][e]),
               *map(int, record.sent[e]))
        for split, score in sorted(names, key=lambda name: PARTS.index(name[0])) for e, r in enumerate(record.rounds)
    ]  # fmt: skip


class Tuned(NamedTuple):
    """Configuration chosen for a method, and the scores of its whole grid."""

    config: Config
    score: float  # the mean of the bench's ``judged_by``
    at_edge: tuple[str, ...]  # "rate" or "steps", where the choice is at an end of its grid
    grid: dict[Config, float]


def choose(method: Method, scores: dict[Config, float]) -> Tuned:
    """Selects the configuration with the best of ``scores``; one that is not finite only if all are not."""
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
        seen = play(bench, config, seed, num_rounds).metrics[bench.judged_by]
        grid[config] = float(seen[-max(1, num_rounds // 4) :].mean(dtype=np.float64))
    found = choose(method, grid)
    bench.study.say(
        f"{method.label}: {found.config} of {len(grid)}, {bench.judged_by} {found.score:.3g}, "
        f"{time.perf_counter() - start:.0f} s"
    )
    return found


def repeat(bench: Bench, configs: dict[str, Config], num_rounds: dict[str, int]) -> Runs:
    """Plays every method with every seed: ``{method: records}``.

    The methods of a seed share its data, clients, cohorts and first network.

    Args:
        bench: The bench.
        configs: Configuration of each method.
        num_rounds: Rounds of each method.
    """
    found: Runs = {name: [] for name in configs}
    shown = bench.judged_by.replace("validation", "test")
    for seed in bench.study.seeds:
        for name, config in configs.items():
            record = play(bench, config, seed, num_rounds[name])
            found[name].append(record)
            per = record.seconds / max(record.num_rounds, 1)
            bench.study.say(f"seed {seed}, {config}: {shown} {record.metrics[shown][-1]:.3g}, {per:.2f} s a round")
    return found
