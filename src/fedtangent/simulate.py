"""Run an algorithm: chunks of rounds as one compiled program, evaluation between them.

A chunk's number of rounds is a run-time value, so a run traces its loss once whatever the number of rounds, and a
second run of the same algorithm on data of the same shape compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from fedtangent.engine import engine_for
from fedtangent.types import Algorithm, Array, Cost, Engine, FederatedData, Key, Prediction, PyTree


@partial(jax.jit, static_argnames=("algorithm", "engine", "length"), donate_argnames=("state",))
def _run_chunk(
    algorithm: Algorithm, engine: Engine, length: int, state: PyTree, data: FederatedData, rounds: Array
) -> tuple[PyTree, PyTree]:
    """``rounds`` (at most ``length``) rounds; infos come back stacked, rows beyond ``rounds`` are zeros."""
    shapes = jax.eval_shape(lambda s: algorithm.step(s, data, engine)[1], state)
    infos = jax.tree.map(lambda leaf: jnp.zeros((length, *leaf.shape), leaf.dtype), shapes)

    def one(i: Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        state, infos = carry
        state, info = algorithm.step(state, data, engine)
        return state, jax.tree.map(lambda all_, row: all_.at[i].set(row), infos, info)

    return jax.lax.fori_loop(0, rounds, one, (state, infos))


@partial(jax.jit, static_argnames=("algorithm",))
def predict(algorithm: Algorithm, state: PyTree, x: Array) -> Prediction:
    """The algorithm's prediction at ``x`` [n, ...], compiled once per algorithm and shape."""
    return algorithm.predict(state, x)


class Evaluation(NamedTuple):
    """What was seen after ``round`` rounds (0 is the initial state)."""

    round: int
    metrics: dict[str, Any]
    uplink_bytes: int
    downlink_bytes: int


class History(NamedTuple):
    """A run's evaluations, and the infos of every round stacked along a leading axis R."""

    evaluations: list[Evaluation]
    rounds: dict[str, Any]  # NumPy arrays [R, ...]; "cohort" is a Cohort of arrays [R, S]
    cost: Cost


class Run(NamedTuple):
    """The final state and the history of a run."""

    state: PyTree
    history: History


Evaluate = Callable[[PyTree], dict[str, Any]]


def _first(infos: PyTree, rounds: int) -> PyTree:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:rounds], infos)


def _charge(cost: Cost, infos: dict[str, Any]) -> tuple[int, int]:
    active = int(np.sum(infos["cohort"].weight > 0))
    examples = int(np.sum(infos["examples"], dtype=np.int64))
    return cost.uplink * active + cost.uplink_per_example * examples, cost.downlink * active


def _validate(num_rounds: int, evaluate_every: int | None) -> int:
    for name, value in (("num_rounds", num_rounds), ("evaluate_every", evaluate_every)):
        if value is not None and (int(value) != value or value < 1):
            raise ValueError(f"{name}: got {value}, must be a whole number of at least 1")
    return min(evaluate_every or num_rounds, num_rounds)


def simulate(
    algorithm: Algorithm,
    data: FederatedData,
    num_rounds: int,
    seed: int | Key = 0,
    mapping: str = "auto",
    evaluate_every: int | None = None,
    evaluate: Evaluate | None = None,
    init_key: Key | None = None,
    on_evaluation: Callable[[Evaluation], None] | None = None,
    progress: bool = False,
) -> Run:
    """Run ``num_rounds`` rounds of ``algorithm`` on ``data``.

    Args:
        seed: an int or a typed key; initialisation, schedule and training keys are derived from it.
        mapping: how a cohort is mapped onto the device; it does not change the result beyond rounding.
        evaluate_every: rounds between evaluations (default: once at the end); it does not change the result.
        evaluate: ``state -> metrics``, called on the initial state and after every ``evaluate_every`` rounds. The
            state's buffers are re-used by the next rounds: copy what is to be kept.
        init_key: initialise the models from this key instead (schedule and training keys stay the seed's).
        on_evaluation: called with each evaluation as soon as it is there, so that nothing computed is lost.
        progress: show a progress bar (on a terminal).

    Returns ``Run(state, history)``. Raises ``ValueError`` for bad arguments, before any work.
    """
    every = _validate(num_rounds, evaluate_every)
    engine = engine_for(data, mapping)
    state = algorithm.init(seed, data.num_clients, init_key)
    measure = evaluate if evaluate is not None else (lambda state: {})
    cost = algorithm.cost(data, engine)
    evaluations: list[Evaluation] = []

    def note(evaluation: Evaluation) -> None:
        evaluations.append(evaluation)
        if on_evaluation is not None:
            on_evaluation(evaluation)

    note(Evaluation(0, measure(state), 0, 0))
    chunks, done, uplink, downlink = [], 0, 0, 0
    with tqdm(
        total=num_rounds, desc=algorithm.name, unit="round", disable=None if progress else True, leave=False
    ) as bar:
        while done < num_rounds:
            rounds = min(every, num_rounds - done)
            state, infos = _run_chunk(algorithm, engine, every, state, data, jnp.int32(rounds))
            chunks.append(_first(infos, rounds))
            done += rounds
            charged = _charge(cost, chunks[-1])
            uplink, downlink = uplink + charged[0], downlink + charged[1]
            note(Evaluation(done, measure(state), uplink, downlink))
            bar.update(rounds)
    stacked = jax.tree.map(lambda *leaves: np.concatenate(leaves), *chunks)
    return Run(state, History(evaluations, stacked, cost))
