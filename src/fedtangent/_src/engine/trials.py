"""Trials: many runs of one compiled program, which takes data, hyper-parameters and evaluation sets as arguments.

``simulate`` compiles for one algorithm with fixed hyper-parameters. Here an algorithm is a function of the numbers that
are tried, such as rates, so that another rate, seed or draw of data of the same shapes compiles nothing again. The
rounds are those of ``loop.run_chunk``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src.engine import memory
from fedtangent._src.engine.clients import parse
from fedtangent._src.engine.history import at_start, charge, first_rounds, stacked
from fedtangent._src.engine.loop import chunk_length, info_shapes, run_chunk, state_shapes
from fedtangent._src.types import Algorithm, Array, Cost, Engine, FederatedData, Key, PyTree

Build = Callable[..., Algorithm]  # of the numbers that are tried, by name; they may be traced


class TrialProgram(NamedTuple):
    """A run in two compiled parts, for all numbers, seeds, data and evaluation sets of the same shapes."""

    begin: Callable[[Key], PyTree]  # key -> state
    advance: Callable[..., Any]  # (state, numbers, data, sets, rounds) -> (state, metrics, infos)
    cost: Cost
    shapes: PyTree  # shapes of one round's infos
    length: int  # largest number of rounds that ``advance`` takes


class TrialRun(NamedTuple):
    """The evaluations, bytes and infos of one trial."""

    rounds: np.ndarray  # [E] rounds done at each evaluation, 0 first
    metrics: dict[str, np.ndarray]  # name -> [E, ...]
    sent: np.ndarray  # [E, 2] int64, bytes up and down
    infos: dict[str, Any]  # infos of every round, [R, ...]


def trial_program(
    build: Build,
    numbers: Mapping[str, Any],
    data: FederatedData,
    engine: Engine,
    evaluate: Callable[[Algorithm, PyTree, PyTree], dict[str, Array]],
    every: int = 1,
) -> TrialProgram:
    """Builds the program that all trials share; it is compiled when it is first used.

    Args:
        build: ``(**numbers) -> algorithm``; the model and the schedule do not depend on the numbers.
        numbers: Numbers of one of the runs, which ``build`` checks.
        data: Data of one of the trials.
        engine: Mapping of clients onto devices; its ``max_client_size`` must suit the largest client of all trials.
        evaluate: ``(algorithm, state, sets) -> {name: array}``, traced.
        every: Rounds between evaluations.
    """
    first, num_clients = build(**numbers), data.num_clients
    shapes = info_shapes(first, engine, state_shapes(first, num_clients), data)
    length = min(chunk_length(shapes), every)
    memory.check(first, data, parse("scan"), engine.max_client_size, length)

    @jax.jit
    def advance(
        state: PyTree, numbers: dict[str, Array], data: FederatedData, sets: PyTree, rounds: Array
    ) -> tuple[PyTree, dict[str, Array], PyTree]:
        algorithm = build(**numbers)
        state, infos = run_chunk(algorithm, engine, length, state, data, rounds)
        return state, evaluate(algorithm, state, sets), infos

    begin = jax.jit(lambda key: first.init(key, num_clients))
    return TrialProgram(begin, advance, first.cost(data, engine), shapes, length)


def run_trial(
    program: TrialProgram,
    seed: int,
    numbers: Mapping[str, Any],
    data: FederatedData,
    sets: PyTree,
    num_rounds: int,
    every: int = 1,
) -> TrialRun:
    """Runs one trial, with evaluations at the start, every ``every`` rounds and at the end.

    Args:
        program: The program that all trials share.
        seed: Seed of the run.
        numbers: Arguments of ``build``, by name.
        data: Training examples of all clients.
        sets: Evaluation sets, the last argument of ``evaluate``.
        num_rounds: Rounds R.
        every: Rounds between evaluations.
    """
    given = {name: jnp.asarray(value) for name, value in numbers.items()}
    state, done, sent = program.begin(jax.random.key(seed)), 0, at_start(program.cost)
    seen, chunks = list[tuple[int, dict[str, Array], tuple[int, int]]](), list[PyTree]()
    while not seen or done < num_rounds:
        rounds = min(every - done % every, num_rounds - done, program.length) if seen else 0
        state, metrics, infos = program.advance(state, given, data, sets, jnp.int32(rounds))
        chunks.append(first_rounds(infos, rounds))
        up, down = charge(program.cost, chunks[-1])
        done, sent = done + rounds, (sent[0] + up, sent[1] + down)
        if done % every == 0 or done == num_rounds:
            seen.append((done, metrics, sent))
    found = {name: np.stack([np.asarray(m[name]) for _, m, _ in seen]) for name in seen[0][1]}
    return TrialRun(
        np.array([r for r, _, _ in seen]),
        found,
        np.array([s for _, _, s in seen], np.int64),
        stacked(program.shapes, chunks),
    )
