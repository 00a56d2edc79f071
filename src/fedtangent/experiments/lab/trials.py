"""Paired trials of classifiers: data divided anew for each seed, and the metrics of every evaluation."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import data
from fedtangent.checks import whole
from fedtangent.data import partition
from fedtangent.engine.clients import engine_for
from fedtangent.engine.history import at_start, charge, check_rounds
from fedtangent.engine.sweeps import Sweep, check_seeds, choose_over, map_members, member, stretches
from fedtangent.federated.compose import keys
from fedtangent.federated.schedule import unroll
from fedtangent.measures import uncertainty
from fedtangent.measures.uncertainty import Reliability
from fedtangent.types import Algorithm, Array, Engine, FederatedData, Key, PyTree

SCORES: dict[str, Callable[[Array, Array], Array]] = {
    "accuracy": uncertainty.accuracy,
    "nll": uncertainty.negative_log_likelihood,
    "ece": uncertainty.expected_calibration_error,
    "brier": uncertainty.brier_score,
}
HIGHER_IS_BETTER = ("accuracy",)


class Split(NamedTuple):
    """Examples to evaluate on."""

    x: Array
    labels: Array  # [n] int32


class Trial(NamedTuple):
    """What all methods share under one seed: training data and clients, and two sets to evaluate on."""

    seed: int
    data: FederatedData
    splits: dict[str, Split]  # validation, test
    num_classes: int


def divide(
    name: str,
    data_dir: str | os.PathLike[str] | None,
    seed: int,
    *,
    num_clients: int,
    classes_per_client: int,
    num_train: int,
    num_validation: int,
    num_test: int,
) -> Trial:
    """The data of one seed: training and validation examples drawn from the training set, test examples from the other.

    ``num_train`` and ``num_test`` are 0 for all that there are (after validation). Clients hold exactly
    ``classes_per_client`` classes (``partition.classes``). Raises ``ValueError`` for more examples than there are.
    """
    loaded = data.load(name, data_dir=data_dir, seed=seed)
    rng = np.random.default_rng(seed)
    train, held_out, test = draw_rows(rng, loaded, num_train, num_validation, num_test)
    y = loaded.y_train[train]
    clients = partition.classes(y, num_clients, classes_per_client, seed)
    held = data.federated_data(np.asarray(loaded.x_train[train], np.float32), y, clients, jnp.float32)
    splits = {
        "validation": _split(loaded.x_train[held_out], loaded.y_train[held_out]),
        "test": _split(loaded.x_test[test], loaded.y_test[test]),
    }
    return Trial(seed, held, splits, loaded.num_classes)


def draw_rows(
    rng: np.random.Generator, loaded: data.Dataset, num_train: int, num_validation: int, num_test: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows to train on and to validate on, both of the training set, and rows of the test set.

    ``num_train`` and ``num_test`` are 0 for all that there are. Raises ``ValueError`` for more than there are.
    """
    order, others = rng.permutation(len(loaded.x_train)), rng.permutation(len(loaded.x_test))
    num_train, num_test = num_train or len(order) - num_validation, num_test or len(others)
    for option, wanted, most in (
        ("num_validation", num_validation, len(order) - 1),
        ("num_train", num_train, len(order) - num_validation),
        ("num_test", num_test, len(others)),
    ):
        if not 1 <= wanted <= most:
            raise ValueError(f"{option}: got {wanted}, must be from 1 to {most}")
    return order[num_validation : num_validation + num_train], order[:num_validation], others[:num_test]


def _split(x: np.ndarray, y: np.ndarray) -> Split:
    return Split(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.int32))


def measure(algorithm: Algorithm, state: PyTree, splits: dict[str, Split]) -> dict[str, Array]:
    """``{"test.accuracy": [], ...}``: SCORES and the members' mean accuracy on every split, and the bins of test."""
    found: dict[str, Array] = {}
    for name, (x, labels) in splits.items():
        members = algorithm.predict(state, x).members
        found |= {f"{name}.{score}": function(members, labels) for score, function in SCORES.items()}
        correct = members.argmax(axis=-1) == labels[None]
        found[f"{name}.accuracy_of_members"] = jnp.mean(correct.astype(members.dtype))
        if name == "test":
            found |= {f"bins.{part}": v for part, v in uncertainty.reliability(members, labels)._asdict().items()}
    return found


def runner(
    build: Callable[..., Algorithm], engine: Engine, num_rounds: int, evaluate_every: int, over: str = "auto"
) -> Callable[[Trial, Sequence[float]], Sweep]:
    """``(trial, rates) -> Sweep`` of one seed: ``sweep`` whose data, too, are arguments of the program.

    Trials of equal shapes share what is compiled. ``engine`` must suit the largest client of all of them.
    """
    lengths = stretches(num_rounds, check_rounds(num_rounds, evaluate_every))
    how = choose_over(over)

    @jax.jit
    def program(key: Key, rates: Array, held: FederatedData, splits: dict[str, Split]) -> dict[str, Array]:
        def run(rate: Array) -> dict[str, Array]:
            evaluate = partial(measure, splits=splits)
            return member(build, engine, evaluate, {}, lengths, key, {"learning_rate": rate}, held)

        return map_members(how, run, rates)

    def runs(trial: Trial, rates: Sequence[float]) -> Sweep:
        found = program(jax.random.key(trial.seed), jnp.asarray(rates), trial.data, trial.splits)
        values = {name: np.asarray(v)[None] for name, v in found.items()}
        configs = tuple({"learning_rate": rate} for rate in rates)
        return Sweep(configs, (trial.seed,), np.cumsum(lengths), values)

    return runs


def bins_of(metrics: dict[str, np.ndarray], at: Any) -> Reliability:
    """The bins that ``measure`` found, of one run and evaluation."""
    return Reliability(*(metrics[f"bins.{part}"][at] for part in Reliability._fields))


def bytes_on_the_wire(algorithm: Algorithm, held: FederatedData, seed: int, rounds: np.ndarray) -> np.ndarray:
    """Bytes up and down after each of ``rounds`` [E], [E, 2] int64, of the run with ``seed``: its own cohorts' sum.

    For schedules whose every contacted client answers.
    """
    cost = algorithm.cost(held, engine_for(held, "scan"))
    cohort = unroll(algorithm.schedule, keys(seed).schedule, max(int(rounds[-1]), 1))
    sizes = np.diff(np.asarray(held.offsets))[np.asarray(cohort.client)]
    filled = (np.asarray(cohort.weight) > 0) & (sizes > 0)
    infos = {"cohort": cohort._replace(weight=filled), "contacted": filled.sum(axis=1), "examples": filled * sizes}
    first = at_start(cost)

    def sent(done: int) -> tuple[int, int]:
        up, down = charge(cost, jax.tree.map(lambda leaf: leaf[:done], infos))
        return first[0] + up, first[1] + down

    return np.array([sent(int(done)) for done in rounds], np.int64)


def check_numbers(settings: Any, names: tuple[str, ...], least: int = 1) -> None:
    """Raise ``ValueError`` unless the settings called ``names`` are whole numbers of at least ``least``."""
    for name in names:
        whole(name, getattr(settings, name), least)


def check_different(settings: Any, names: tuple[str, ...]) -> None:
    """Raise ``ValueError`` unless the settings called ``names`` are different whole numbers of at least 1."""
    for name in names:
        values = getattr(settings, name)
        if not values or min(values) < 1 or len(set(values)) < len(values):
            raise ValueError(f"{name}: got {values}, must be different whole numbers of at least 1")


def several(seeds: Sequence[int]) -> tuple[int, ...]:
    """Checked seeds, of which an interval needs two; raises ``ValueError``."""
    checked = check_seeds(seeds)
    if len(checked) < 2:
        raise ValueError("seeds: got 1, an interval needs at least 2")
    return checked
