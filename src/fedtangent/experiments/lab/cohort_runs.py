"""Runs of methods round by round: one compiled round for all rates and seeds, and finished runs kept on disk."""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.data.federated import max_client_size
from fedtangent.engine.history import at_start, charge
from fedtangent.engine.sweeps import single_device_engine
from fedtangent.experiments.lab.cohort_methods import Method, methods
from fedtangent.experiments.lab.cohort_settings import Settings
from fedtangent.experiments.lab.cohort_trials import fingerprint
from fedtangent.experiments.lab.trials import Split, Trial
from fedtangent.measures import uncertainty
from fedtangent.output.files import Metric
from fedtangent.types import Algorithm, Array, Cost, Engine, FederatedData, Key, PyTree

Say = Callable[[str], None]
Runs = dict[str, list["Curve"]]


class Config(NamedTuple):
    """A method with its hyper-parameters."""

    method: str
    rate: float
    steps: int  # in a round; 0 where the method has no such choice

    def __str__(self) -> str:
        return f"{self.method} learning_rate={self.rate:g}" + (f" steps={self.steps}" if self.steps else "")


class Curve(NamedTuple):
    """One run: accuracy and bytes after 0 .. R rounds, and what each of the R rounds reported."""

    test: np.ndarray  # [R + 1]
    validation: np.ndarray  # [R + 1]
    uplink: np.ndarray  # [R + 1] int64, from the first round on
    downlink: np.ndarray  # [R + 1] int64
    times: np.ndarray  # [R] int32, NTK-FL's chosen number of steps; 0 where there is none
    status: np.ndarray  # [R] int32, NTK-FL's: 0 fine, 1 every candidate diverged, 2 no examples
    seconds: float

    @property
    def num_rounds(self) -> int:
        """Rounds R."""
        return len(self.test) - 1


def accuracies(algorithm: Algorithm, state: PyTree, splits: dict[str, Split]) -> dict[str, Array]:
    """Accuracy of the prediction on each split; of outputs that are not finite, 0."""
    found = {}
    for name, (x, labels) in splits.items():
        members = algorithm.predict(state, x).members
        value = uncertainty.accuracy(members, labels)
        found[name] = jnp.where(jnp.all(jnp.isfinite(members)), value, 0.0)
    return found


# The settings that a run depends on, besides its data and its configuration.
DECISIVE = ("clients_per_round", "width", "last_w_std", "batch_size", "loss", "times", "momentum", "beta",
            "projected", "sparsity", "value_bits", "shared")  # fmt: skip


@dataclass
class Bench:
    """Where the runs of one comparison take place. Holds one seed's data at a time."""

    settings: Settings
    trial: Callable[[int], Trial]
    folder: Path  # of the finished runs
    say: Say
    keep: Callable[[list[Metric]], None]
    compiled: dict[tuple[str, int, int], Program] = field(default_factory=dict)
    current: tuple[int, str, dict[str, Method]] | None = None  # seed, fingerprint of its trial, methods

    def methods(self, seed: int) -> dict[str, Method]:
        """The methods on the data of ``seed``."""
        if self.current is None or self.current[0] != seed:
            trial = self.trial(seed)
            self.current = (seed, fingerprint(trial), methods(self.settings, trial))
        return self.current[2]


def play(bench: Bench, config: Config, seed: int, num_rounds: int) -> Curve:
    """The run of ``config`` with ``seed``: read from the folder if it is there, computed and written if not.

    Runs of a method that differ in steps, rate and seed share one compiled round.
    """
    method = bench.methods(seed)[config.method]
    path = bench.folder / f"{config.method}-{_digest(bench, config)}.npz"
    curve = _read(path, num_rounds)
    if curve is None:
        curve = _compute(bench, method, config, seed, num_rounds)
        _write(path, curve)
    bench.keep(_metrics(config, seed, curve))
    return curve


def _compute(bench: Bench, method: Method, config: Config, seed: int, num_rounds: int) -> Curve:
    start = time.perf_counter()
    largest = -(-max_client_size(method.data) // 8) * 8  # clients of like size share a program
    engine = single_device_engine(method.data, "auto")._replace(max_client_size=largest)
    key = (config.method, largest, method.pool_size)
    if key not in bench.compiled:
        bench.compiled[key] = _compile(method, config, engine)
    program = bench.compiled[key]
    cost = program.cost
    steps, rate = jnp.int32(config.steps), jnp.asarray(config.rate, jnp.float32)
    state, score = program.begin(jax.random.key(seed), method.splits)
    scores = [score]
    infos: list[dict[str, Any]] = []
    sent = [at_start(cost)]
    for _ in range(num_rounds):
        state, score, info = program.one(state, steps, rate, method.data, method.splits)
        scores.append(score)
        infos.append(jax.tree.map(np.asarray, info))
        up, down = charge(cost, jax.tree.map(lambda leaf: leaf[None], infos[-1]))
        sent.append((sent[-1][0] + up, sent[-1][1] + down))
    bytes_sent = np.array(sent, np.int64)
    return Curve(
        test=np.array([float(s["test"]) for s in scores]),
        validation=np.array([float(s["validation"]) for s in scores]),
        uplink=bytes_sent[:, 0],
        downlink=bytes_sent[:, 1],
        times=np.array([int(np.max(i.get("time", 0))) for i in infos], np.int32),
        status=np.array([int(np.max(i.get("status", 0))) for i in infos], np.int32),
        seconds=time.perf_counter() - start,
    )


REPORTED = ("cohort", "contacted", "examples", "time", "status")


class Program(NamedTuple):
    """A method's run in two compiled parts, for all steps, rates, seeds and data of the same shapes."""

    begin: Callable[..., Any]  # (key, splits) -> (state, accuracies)
    one: Callable[..., Any]  # (state, steps, rate, data, splits) -> (state, accuracies, info) of one round
    cost: Cost


def _compile(method: Method, config: Config, engine: Engine) -> Program:
    algorithm, num_clients = method.build(config.steps, config.rate), method.data.num_clients

    @jax.jit
    def begin(key: Key, splits: dict[str, Split]) -> tuple[PyTree, dict[str, Array]]:
        state = algorithm.init(key, num_clients)
        return state, accuracies(algorithm, state, splits)

    @jax.jit
    def one(
        state: PyTree, steps: Array, rate: Array, held: FederatedData, splits: dict[str, Split]
    ) -> tuple[PyTree, Any, Any]:
        of_rate = method.build(steps, rate)
        state, info = of_rate.step(state, held, engine)
        return state, accuracies(of_rate, state, splits), {k: v for k, v in info.items() if k in REPORTED}

    return Program(begin, one, algorithm.cost(method.data, engine))


def _digest(bench: Bench, config: Config) -> str:
    """A name for a run: what it depends on."""
    assert bench.current is not None
    of = {name: getattr(bench.settings, name) for name in DECISIVE}
    text = json.dumps([bench.current[0], bench.current[1], *config, of], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(path: Path, num_rounds: int) -> Curve | None:
    """The first ``num_rounds`` rounds of a finished run, or None if there is none so long."""
    if not path.is_file():
        return None
    with np.load(path, allow_pickle=False) as held:
        found = {name: held[name] for name in Curve._fields}
    curve = Curve(**{**found, "seconds": float(found["seconds"])})
    if curve.num_rounds < num_rounds:
        return None
    first = {n: getattr(curve, n)[: num_rounds + 1] for n in ("test", "validation", "uplink", "downlink")}
    return curve._replace(**first, times=curve.times[:num_rounds], status=curve.status[:num_rounds])


def _write(path: Path, curve: Curve) -> None:
    """Write a finished run so that a kill leaves the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez(content, **{name: np.asarray(value) for name, value in curve._asdict().items()})  # type: ignore[arg-type]
    part = path.with_suffix(".part")
    part.write_bytes(content.getvalue())
    part.replace(path)


def _metrics(config: Config, seed: int, curve: Curve) -> list[Metric]:
    return [
        Metric(r, str(config), seed, split, "accuracy", float(values[r]), int(curve.uplink[r]), int(curve.downlink[r]))
        for split, values in (("validation", curve.validation), ("test", curve.test))
        for r in range(curve.num_rounds + 1)
    ]


class Tuned(NamedTuple):
    """What a method took, and the whole grid."""

    config: Config
    score: float  # mean validation accuracy over the last quarter of the tuning rounds
    at_edge: tuple[str, ...]  # "rate" or "steps", where the choice is at an end of its grid
    grid: dict[Config, float]


def tune(bench: Bench, name: str) -> Tuned:
    """The rate and steps of a method that are best on validation examples, on a seed of their own.

    The score is the mean accuracy over the last quarter of ``tuning_rounds``, as single rounds swing.
    """
    s = bench.settings
    method, start = bench.methods(s.tuning_seed)[name], time.perf_counter()
    grid: dict[Config, float] = {}
    for steps in method.steps:
        for rate in method.rates:
            config = Config(name, rate, steps)
            curve = play(bench, config, s.tuning_seed, s.tuning_rounds)
            grid[config] = float(curve.validation[-max(1, s.tuning_rounds // 4) :].mean())
    best = max(grid, key=lambda c: grid[c])
    tried = {"rate": method.rates, "steps": method.steps}
    edge = tuple(n for n, values in tried.items() if len(values) > 1 and getattr(best, n) in (min(values), max(values)))
    bench.say(
        f"{method.label}: {best} of {len(grid)}, validation accuracy {grid[best]:.3f}, "
        f"{time.perf_counter() - start:.0f} s"
    )
    return Tuned(best, grid[best], edge, grid)


def repeat(bench: Bench, configs: dict[str, Config], seeds: tuple[int, ...], num_rounds: dict[str, int]) -> Runs:
    """``{method: one curve for each seed}``; a seed's methods share its data, clients, cohorts and initial network."""
    found: Runs = {name: [] for name in configs}
    for seed in seeds:
        for name, config in configs.items():
            curve = play(bench, config, seed, num_rounds[name])
            found[name].append(curve)
            per = curve.seconds / max(curve.num_rounds, 1)
            bench.say(f"seed {seed}, {config}: test accuracy {curve.test[-1]:.3f}, {per:.2f} s a round")
    return found
