"""``simulate`` runs an algorithm on federated data; ``params_by_round`` returns its models along the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.data.federated import max_client_size
from fedtangent.engine import auto, memory
from fedtangent.engine.checkpoints import Checkpoints, store
from fedtangent.engine.checkpoints.options import identity
from fedtangent.engine.clients import Mapping, default_mapping, engine_for, parse
from fedtangent.engine.history import Evaluation, Run, check_options, check_rounds
from fedtangent.engine.loop import (
    Evaluate,
    RunSetup,
    chunk_length,
    go,
    info_shapes,
    run_chunk,
    start,
    state_shapes,
)
from fedtangent.engine.processes import replicate, stop_signals
from fedtangent.progress import headline, progress_of
from fedtangent.types import Algorithm, Array, FederatedData, Key, Prediction, PyTree


@partial(jax.jit, static_argnames=("algorithm",))
def predict(algorithm: Algorithm, state: PyTree, x: Array) -> Prediction:
    """The algorithm's prediction at ``x`` [n, ...], compiled once per algorithm and shape."""
    return algorithm.predict(state, x)


class Resolved(NamedTuple):
    """The mapping that a run uses, its memory plan, and the measurements that chose it."""

    mapping: str
    plan: memory.MemoryPlan
    seconds: dict[str, float]  # a round's, by mapping, where ``auto`` measured some


def resolve_mapping(
    algorithm: Algorithm,
    data: FederatedData,
    num_rounds: int,
    mapping: str = "auto",
    checkpoint: Checkpoints | None = None,
    measure: bool = True,
    evaluated: Sequence[Array] = (),
) -> Resolved:
    """The mapping that ``simulate`` uses, and its memory plan, with predictions at the inputs ``evaluated`` [n, ...].

    ``auto`` is the mapping of the run that is resumed, if that was on this device. Otherwise it is the fastest one that
    fits into memory, by a measurement that is kept on this machine; the default one if ``measure`` is off or the run
    is short.

    Raises ``ValueError`` for an unknown mapping or one that does not fit into memory, ``CheckpointError`` where there
    is nothing to resume.
    """
    largest = max_client_size(data)
    before = store.mapping_of(store.open_store(checkpoint)) if mapping == "auto" and checkpoint is not None else mapping
    chosen, seconds = parse(before) if before and before != "auto" else None, dict[str, float]()
    state = state_shapes(algorithm, data.num_clients)
    engine = engine_for(data, default_mapping() if chosen is None else chosen)
    length = chunk_length(info_shapes(algorithm, engine, state, data))
    if chosen is None and not measure:
        chosen = auto.that_fit(algorithm, data, largest, length)[0]
    if chosen is None:
        probe = partial(_probe, algorithm, data, length)
        chosen, seconds = auto.choose(algorithm, data, largest, num_rounds, length, probe)
    return Resolved(str(chosen), memory.check(algorithm, data, chosen, largest, length, evaluated), seconds)


def _probe(algorithm: Algorithm, data: FederatedData, length: int, mapping: Mapping) -> float:
    """Seconds a round under ``mapping``, in the very program that the run would use."""
    engine = engine_for(data, mapping)
    held = replicate(data, engine.mesh)
    return auto.seconds_a_round(
        lambda state, rounds: run_chunk(algorithm, engine, length, state, held, jnp.int32(rounds)),
        lambda: replicate(algorithm.init(0, data.num_clients), engine.mesh),
    )


class RunOptions(TypedDict, total=False):
    """Further options of ``simulate``.

    Args:
        init_key: initialise the models from this key instead (schedule and training keys stay the seed's).
        on_evaluation: called with each evaluation as soon as it is there, so that nothing computed is lost; when a run
            is resumed, first with those of the checkpoint.
        progress: show a bar on a terminal; elsewhere a line every ten seconds or more.
        checkpoint: write checkpoints, and continue from one if told so. A run that was stopped, or killed, and resumed
            returns what the uninterrupted run returns, bit for bit, history included, seconds aside; so does a finished
            one that is resumed with more rounds. While it runs, the first SIGTERM or SIGINT makes it finish what it
            computes, save, and return with ``status`` "stopped by ...".
        stop_on_divergence: look, between chunks, whether the server's numbers are finite and whether any client's loss
            is; if not, return state and history of the last round for which they were, with ``status`` "diverged at
            round ..."; and likewise before a round that the server could not make, "unstable at round ...". Keeps a
            second copy of the state on the device. Without it the run goes on, and ``status`` tells at its end.
    """

    init_key: Key | None
    on_evaluation: Callable[[Evaluation], None] | None
    progress: bool
    checkpoint: Checkpoints | None
    stop_on_divergence: bool


def simulate(
    algorithm: Algorithm,
    data: FederatedData,
    num_rounds: int,
    seed: int | Key = 0,
    mapping: str = "auto",
    evaluate_every: int | None = None,
    evaluate: Evaluate | None = None,
    **options: Unpack[RunOptions],
) -> Run:
    """Run ``num_rounds`` rounds of ``algorithm`` on ``data``.

    Args:
        seed: an int or a typed key; initialisation, schedule and training keys are derived from it.
        mapping: how a cohort is mapped onto the devices, which does not change the result beyond rounding: ``scan``
            (one client after another), ``vmap`` (all at once), ``chunked:<n>`` (n at a time, of like size),
            ``sharded`` or ``sharded:<one of these>`` (divided over all devices), ``auto`` (see ``resolve_mapping``).
        evaluate_every: rounds between evaluations (default: once at the end); it does not change the result.
        evaluate: ``state -> metrics``, called on the initial state and after every ``evaluate_every`` rounds. The
            state's buffers are re-used by the next rounds: copy what is to be kept.
        options: ``init_key``, ``on_evaluation``, ``progress``, ``checkpoint``, ``stop_on_divergence``; see
            ``RunOptions``.

    Returns ``Run(state, history, status)``. Raises ``ValueError`` for bad arguments, and for a run that does not fit
    into memory (with the largest chunk that would), before any work;
    ``CheckpointError``, which is one, for a checkpoint that cannot be continued from.

    Example, FedAvg with half of ten clients in every round:

        >>> import fedtangent as ft
        >>> digits = ft.data.load("digits", num_train=200)
        >>> clients = ft.partition.iid(200, num_clients=10, seed=0)
        >>> data = ft.data.federated_data(digits.x_train, digits.y_train, clients, num_classes=10)
        >>> model = ft.models.logistic(64, 10)
        >>> half = ft.federated.schedule.uniform_sampling(10, clients_per_round=5)
        >>> work = ft.federated.local.Work(epochs=1, batch_size=10)
        >>> fed_avg = ft.federated.algorithms.fed_avg(
        ...     model, half, client_learning_rate=0.1, work=work, loss="cross_entropy"
        ... )
        >>> run = ft.simulate(fed_avg, data, num_rounds=20, seed=0, mapping="scan")
        >>> fed_avg.predict(run.state, digits.x_test).mean.shape == (len(digits.x_test), 10)
        True
    """
    check_options("simulate", options, RunOptions)
    check_rounds(num_rounds, evaluate_every)
    checkpoint, init_key = options.get("checkpoint"), options.get("init_key")
    saves = None if checkpoint is None else store.open_store(checkpoint)
    mapping = resolve_mapping(algorithm, data, num_rounds, mapping, checkpoint).mapping
    engine = engine_for(data, mapping)
    state = algorithm.init(seed, data.num_clients, init_key)
    shapes = info_shapes(algorithm, engine, state, data)
    if saves is not None:
        who = identity(algorithm.name, data, seed, init_key, evaluate_every)
        if not saves.options.config:
            who["traced round"] = auto.fingerprint(algorithm, data, state)
        saves = store.for_run(saves, who, mapping, shapes)
    setup = RunSetup(
        algorithm=algorithm,
        engine=engine,
        data=data,
        num_rounds=num_rounds,
        evaluate_every=evaluate_every,
        evaluate=evaluate or (lambda state: {}),
        on_evaluation=options.get("on_evaluation") or (lambda evaluation: None),
        cost=algorithm.cost(data, engine),
        shapes=shapes,
        length=chunk_length(shapes),
        store=saves,
        stop_on_divergence=options.get("stop_on_divergence", False),
    )
    with store.claimed(saves):
        return _run(setup, state, options.get("progress", False))


def params_by_round(
    algorithm: Algorithm,
    data: FederatedData,
    num_rounds: int,
    seed: int | Key = 0,
    *,
    every: int = 1,
    mapping: str = "auto",
    init_key: Key | None = None,
) -> PyTree:
    """The server's parameters at the start and after each ``every`` rounds: NumPy, leaves [1 + R / every, K, ..].

    Arguments are those of ``simulate``. Where the run diverges they are not finite from there on. Raises as
    ``simulate`` does, and ``ValueError`` for an algorithm without global models.
    """
    read = algorithm.params
    if read is None:
        raise ValueError(f"algorithm: got {algorithm.name}, must be one of global models")

    def look(state: PyTree) -> dict[str, PyTree]:
        return {"params": jax.tree.map(lambda leaf: np.array(leaf), read(state))}

    run = simulate(algorithm, data, num_rounds, seed, mapping, every, look, init_key=init_key)
    seen = [evaluation.metrics["params"] for evaluation in run.history.evaluations]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *seen)


def _run(setup: RunSetup, state: PyTree, progress: bool) -> Run:
    begin = start(setup, state)
    mesh = setup.engine.mesh
    setup = setup._replace(data=replicate(setup.data, mesh))
    begin = begin._replace(state=replicate(begin.state, mesh))
    told = progress_of(setup.num_rounds, setup.algorithm.name, done=begin.round, shown=progress)
    with stop_signals(setup.store is not None) as signalled, told as bar:

        def note(evaluation: Evaluation) -> None:
            if said := headline(evaluation.metrics):
                bar.set_postfix_str(f"{said} after round {evaluation.round}", refresh=False)
            setup.on_evaluation(evaluation)

        return go(setup._replace(on_evaluation=note), begin, signalled, bar.update)
