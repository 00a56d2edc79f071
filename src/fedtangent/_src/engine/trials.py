"""Trials: the runs of an experiment, in the loop of ``simulate``.

They share one compiled program for all seeds, hyper-parameters and data of the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedtangent._src.engine import loop, memory
from fedtangent._src.engine.history import Run
from fedtangent._src.engine.sweeps import Build, Values
from fedtangent._src.types import Algorithm, Array, ArrayLike, Cost, Engine, FederatedData, Key, PyTree


class TrialProgram(NamedTuple):
    """The compiled functions of an experiment's runs, for all hyper-parameters, seeds and data of the same shapes.

    Attributes:
        begin: ``key -> state``.
        chunk: ``(hyper-parameters, data, state, rounds) -> (state, infos, all_finite)``; reuses the state's buffers.
            Infos are the numbers that rounds report.
        measure: ``(hyper-parameters, evaluation sets, state) -> metrics``.
        cost: Bytes of a message and of a broadcast.
        shapes: Shapes of one round's infos.
        length: Largest number of rounds that ``chunk`` takes.
    """

    begin: Callable[[Key], PyTree]
    chunk: Callable[[Values, FederatedData, PyTree, ArrayLike], tuple[PyTree, PyTree, Array]]
    measure: Callable[[Values, PyTree, PyTree], dict[str, Array]]
    cost: Cost
    shapes: PyTree
    length: int


def trial_program(
    build: Build,
    numbers: Mapping[str, ArrayLike],
    data: FederatedData,
    engine: Engine,
    measure: Callable[[Algorithm, PyTree, PyTree], dict[str, Array]],
    every: int = 1,
) -> TrialProgram:
    """Builds the program that all trials (runs) of an experiment share; it is compiled when it is first used.

    ``simulate`` compiles one algorithm with fixed hyper-parameters. Here hyper-parameters such as rates are arguments,
    so that another rate, seed or draw of data of the same shapes compiles nothing again.

    Args:
        build: ``(**numbers) -> algorithm``; the numbers may be traced, and model and schedule must not depend on them.
        numbers: Hyper-parameters of one of the trials, which ``build`` checks.
        data: Data of one of the trials.
        engine: Mapping of clients onto devices; its ``max_client_size`` must suit the largest client of all trials.
        measure: ``(algorithm, state, evaluation sets) -> {name: array}``, traced.
        every: Rounds between evaluations.

    Raises:
        DoesNotFit: A trial needs more memory than the device has.
    """
    first, num_clients = build(**numbers), data.num_clients
    state = loop.state_shapes(first, num_clients)
    shapes = loop.info_shapes(first, engine, state, data)
    length = min(loop.chunk_length(shapes), every)

    @partial(jax.jit, donate_argnames=("state",))
    def chunk(numbers: Values, data: FederatedData, state: PyTree, rounds: ArrayLike) -> tuple[PyTree, PyTree, Array]:
        return loop.run_chunk(build(**numbers), engine, length, state, data, rounds)

    traced = {name: jnp.asarray(value) for name, value in numbers.items()}
    memory.check_program("engine: got one", chunk, traced, data, state, jnp.int32(length))

    @jax.jit
    def metrics_of(numbers: Values, sets: PyTree, state: PyTree) -> dict[str, Array]:
        return measure(build(**numbers), state, sets)

    begin = jax.jit(lambda key: first.init(key, num_clients))
    return TrialProgram(begin, chunk, metrics_of, first.cost(data, engine), shapes, length)


def run_trial(
    program: TrialProgram,
    seed: int,
    numbers: Mapping[str, ArrayLike],
    data: FederatedData,
    sets: PyTree,
    num_rounds: int,
    every: int = 1,
) -> Run:
    """Simulates one trial (run) of an experiment, and evaluates it at the start, every ``every`` rounds and at the end.

    Args:
        program: The program that all trials share.
        seed: Seed of the run.
        numbers: Hyper-parameters, the arguments of ``build`` by name.
        data: Training examples of all clients.
        sets: Evaluation sets, the last argument of ``measure``.
        num_rounds: Rounds R.
        every: Rounds between evaluations.
    """
    traced = {name: jnp.asarray(value) for name, value in numbers.items()}
    setup = loop.RunSetup(
        chunk=partial(program.chunk, traced, data),
        measure=partial(program.measure, traced, sets),
        num_rounds=num_rounds,
        evaluation=loop.Evaluation(every),
        report=lambda row: None,
        cost=program.cost,
        shapes=program.shapes,
        length=program.length,
    )
    past = loop.first_past(setup, program.begin(jax.random.key(seed)))
    return loop.go(setup, past, lambda: None, lambda rounds: None)
