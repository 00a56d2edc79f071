"""The loop of a run: it calls one compiled program for each chunk of rounds, and evaluates and saves between chunks.

``simulate`` and the trials of an experiment use the same loop with different programs (``RunSetup.chunk`` and
``RunSetup.measure``). ``evaluated_rounds`` is the loop inside another traced program.

The number of rounds of a chunk is a run-time value. The buffer for their infos, the numbers that each round reports,
has a fixed size. So the result does not depend on where a run is cut into chunks, and a second run of the same
algorithm on data of the same shapes compiles nothing.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from fedtangent._src.checks import whole
from fedtangent._src.engine.checkpoints.store import Saved, Store, due, restore, save
from fedtangent._src.engine.history import (
    FINISHED,
    History,
    Measurement,
    Metrics,
    Run,
    at_start,
    charge,
    first_rounds,
    stacked,
)
from fedtangent._src.engine.processes import local
from fedtangent._src.types import DIVERGED, Algorithm, Array, ArrayLike, Cost, Engine, FederatedData, PyTree


@runtime_checkable
class Measure(Protocol):
    """A function that measures the models of a run, such as their accuracy, at an evaluated round."""

    def __call__(self, algorithm: Algorithm, state: PyTree, /) -> Metrics:
        """Returns metrics by name; the metrics of a split, such as "test", are a dictionary under its name.

        Args:
            algorithm: The algorithm.
            state: State after the round; the next rounds reuse its buffers, so copy arrays that are kept.
        """


@runtime_checkable
class Reported(Protocol):
    """A function that is called with each measurement of a run as soon as it exists."""

    def __call__(self, row: Measurement, /) -> object:
        """Receives a measurement; the return value is ignored.

        Args:
            row: Metrics, bytes and seconds at a round.
        """


_INFO_BYTES = 8 * 2**20  # the most bytes of a chunk's infos (one round may need more)
_INFO_ROUNDS = 128
_SECONDS = 1.0  # duration of a chunk in a run with checkpoints, which so reacts to a signal soon


@partial(jax.jit, static_argnames=("algorithm", "engine"), inline=True)
def _step(algorithm: Algorithm, engine: Engine, state: PyTree, data: FederatedData) -> tuple[PyTree, PyTree]:
    """Computes one round; while it is traced, raises an error if the state or the cohort has wrong shapes."""
    import chex  # here: it is heavy, and needed only when a round is traced

    after, info = algorithm.step(state, data, engine)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    chex.assert_shape([*info["cohort"], info["examples"]], (algorithm.schedule.num_slots,))
    return after, info


def info_shapes(algorithm: Algorithm, engine: Engine, state: PyTree, data: FederatedData) -> PyTree:
    """Returns the shapes of one round's infos: the numbers that it reports for the history, such as clients' losses.

    Args:
        algorithm: The algorithm.
        engine: Mapping of clients onto devices.
        state: A state of the run, or its shapes.
        data: Training examples of all clients.
    """
    return jax.eval_shape(_step, algorithm, engine, state, data)[1]


@partial(jax.jit, static_argnames=("algorithm", "num_clients"))
def _initial(algorithm: Algorithm, num_clients: int) -> PyTree:
    """Returns a run's state before the first round, with seed 0; jitted, so that its shapes are traced once."""
    return algorithm.init(0, num_clients)


def state_shapes(algorithm: Algorithm, num_clients: int) -> PyTree:
    """Returns the shapes of an algorithm's state: server, clients, schedule and keys.

    Args:
        algorithm: The algorithm.
        num_clients: Number of clients.
    """
    return jax.eval_shape(_initial, algorithm, num_clients)


@partial(jax.jit, static_argnames=("algorithm", "engine", "length"), donate_argnames=("state",))
def run_chunk(
    algorithm: Algorithm, engine: Engine, length: int, state: PyTree, data: FederatedData, rounds: ArrayLike
) -> tuple[PyTree, PyTree, Bool[Array, ""]]:
    """Computes ``rounds`` rounds in one program, for instance all rounds between two evaluations.

    Returns the state after them, their infos [length, ...], and whether this state is finite (``all_finite``).

    Args:
        algorithm: The algorithm.
        engine: Mapping of clients onto devices.
        length: Rows of the buffer for infos, the numbers that rounds report; rows beyond ``rounds`` are zero.
        state: State before the rounds; its buffers are reused.
        data: Training examples of all clients.
        rounds: Number of rounds, [] int32, at most ``length``.
    """
    shapes = info_shapes(algorithm, engine, state, data)
    infos = jax.tree.map(lambda leaf: jnp.zeros((length, *leaf.shape), leaf.dtype), shapes)

    def one(i: Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        state, infos = carry
        state, info = _step(algorithm, engine, state, data)
        return state, jax.tree.map(partial(_with_row, i), infos, info)

    state, infos = jax.lax.fori_loop(0, rounds, one, (state, infos))
    return state, infos, all_finite(state)


def _with_row(i: Array, rows: Array, row: Array) -> Array:
    # not rows.at[i].set(row), a scatter, which takes longer to compile
    return jax.lax.dynamic_update_index_in_dim(rows, jnp.asarray(row, rows.dtype), i, 0)


def chunk_length(shapes: PyTree) -> int:
    """Returns how many rounds one call of ``run_chunk`` may compute, a power of two up to 128.

    The infos (reported numbers) of so many rounds fit into a buffer of 8 MiB. If one round needs more, the result is 1.
    ``shapes`` are the shapes of one round's infos.
    """
    of_a_round = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    return 2 ** int(np.log2(min(max(_INFO_BYTES // max(of_a_round, 1), 1), _INFO_ROUNDS)))


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The evaluation of a run: its metrics, when they are measured, and reports. It does not change the result.

    Attributes:
        every: Rounds between evaluations; None: only at the start and at the end.
        measure: ``(algorithm, state) -> metrics by name``, called on the initial state, every ``every`` rounds and at
            the end. The next rounds reuse the state's buffers, so copy arrays that are kept.
        report: Called with each ``Measurement`` as soon as it exists; when a run is resumed, first with the
            measurements of the checkpoint.
        stop_on_divergence: Whether to end the run when the server's numbers are no longer finite, no client's loss or
            state is, or the server refuses a learning rate. The run then returns state and history of the last good
            round, with the status "diverged at round .." or, for a refusal, "unstable at round ..". This keeps a second
            copy of the state on the device. If False, the run continues, and ``status`` reports the divergence at its
            end.
        progress: Whether to show progress: a bar on a terminal, elsewhere a line every ten seconds or more. None: only
            if the run is long and nothing else shows its progress.
    """

    every: int | None = None
    measure: Measure | None = None
    report: Reported | None = None
    stop_on_divergence: bool = False
    progress: bool | None = None

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for an interval that is not a whole number of at least 1."""
        if self.every is not None:
            whole("evaluation.every", self.every)


def evaluated_rounds(
    algorithm: Algorithm,
    engine: Engine,
    measure: Callable[[Algorithm, PyTree], PyTree],
    lengths: np.ndarray | Sequence[int],
    state: PyTree,
    data: FederatedData,
) -> PyTree:
    """Simulates rounds inside another traced program, and returns the metrics of each of E evaluations, [E, ...].

    Args:
        algorithm: The algorithm.
        engine: Mapping of clients onto devices.
        measure: ``(algorithm, state) -> metrics``, traced.
        lengths: Number of rounds between each of the E evaluations and the one before it.
        state: State before the rounds.
        data: Training examples of all clients.
    """

    def stretch(state: PyTree, rounds: Array) -> tuple[PyTree, PyTree]:
        state = jax.lax.fori_loop(0, rounds, lambda _, before: algorithm.step(before, data, engine)[0], state)
        return state, measure(algorithm, state)

    return jax.lax.scan(stretch, state, jnp.asarray(lengths, jnp.int32))[1]


class RunSetup(NamedTuple):
    """The settings and compiled functions of a run, which stay the same from round to round.

    Attributes:
        chunk: Compiled rounds, ``(state, number of rounds) -> (state, infos, all_finite)``; reuses the state's buffers.
            Infos are the numbers that rounds report.
        measure: ``state -> metrics``; None for a run without metrics.
        num_rounds: Rounds R.
        evaluation: Evaluated rounds, and whether to stop at a divergence.
        report: Called with each measurement.
        cost: Bytes of a message and of a broadcast.
        shapes: Shapes of one round's infos.
        length: Largest number of rounds in a chunk, which is one call of ``chunk``.
        store: Checkpoints, or None.
    """

    chunk: Callable[[PyTree, ArrayLike], tuple[PyTree, PyTree, Array]]
    measure: Callable[[PyTree], Metrics] | None
    num_rounds: int
    evaluation: Evaluation
    report: Reported
    cost: Cost
    shapes: PyTree
    length: int
    store: Store | None = None


class Past(NamedTuple):
    """The progress of a run so far: state, history, bytes and seconds. Its lists grow as the run goes on.

    Attributes:
        round: Rounds done.
        state: State after these rounds.
        chunks: Numbers that the rounds reported, one tree of arrays for each chunk of rounds.
        evaluations: Evaluations so far.
        sent: Bytes sent by clients, and bytes sent to them.
        saved: The last checkpoint.
        begun: Start of the run by ``time.monotonic``, as if a resumed run had not been interrupted.
        saved_chunks, saved_evaluations: How many of ``chunks`` and of ``evaluations`` are in the last checkpoint.
        is_finite: Whether the numbers of the state are finite; None before the first chunk of this process.
    """

    round: int
    state: PyTree
    chunks: list[PyTree]
    evaluations: list[Measurement]
    sent: tuple[int, int]  # bytes up and down
    saved: Saved
    begun: float
    saved_chunks: int = 0
    saved_evaluations: int = 0
    is_finite: Array | None = None


def first_past(setup: RunSetup, fresh: PyTree) -> Past:
    """Returns the progress from which a run begins: none or, if the run is resumed, that in the newest checkpoint.

    Evaluations in the checkpoint at rounds that this run evaluates too are kept, and ``setup.report`` is called with
    them.

    Args:
        setup: Settings of the run.
        fresh: State before the first round.

    Raises:
        CheckpointError: ``restore`` refuses the checkpoint.
    """
    store = setup.store
    if store is None or not store.options.resume:
        now = time.monotonic()
        return Past(0, fresh, [], [], at_start(setup.cost), Saved(0, None, now, 0.0), now)
    before = restore(store, setup.num_rounds, fresh)
    # The final evaluation of the shorter run that is continued may be at a round that this run does not evaluate.
    evaluations = [e for e in before.evaluations if _is_evaluated(setup, e.round)]
    for evaluation in evaluations:
        setup.report(evaluation)
    up, down = charge(setup.cost, stacked(setup.shapes, before.infos))
    first_up, first_down = at_start(setup.cost)
    return Past(
        round=before.saved.round,
        state=before.state,
        chunks=before.infos,
        evaluations=evaluations,
        sent=(up + first_up, down + first_down),
        saved=before.saved,
        begun=time.monotonic() - before.seconds,
        saved_chunks=len(before.infos),
        saved_evaluations=len(evaluations),
    )


def _is_evaluated(setup: RunSetup, round_: int) -> bool:
    every = setup.evaluation.every
    return round_ in (0, setup.num_rounds) or (every is not None and round_ % every == 0)


def _next_stop(setup: RunSetup, done: int) -> int:
    """Returns the next round after ``done`` in which the loop evaluates, saves, or checks for divergence."""
    intervals = [setup.evaluation.every, setup.store.options.every if setup.store else None]
    intervals += [setup.length if setup.evaluation.stop_on_divergence else None]
    return min([done - done % n + n for n in intervals if n is not None] + [setup.num_rounds])


def _agreed(number: int) -> int:
    """Returns the largest of the numbers that the processes of a run pass, so that all of them go on with the same one.

    Their numbers may differ if they depend on a clock or a signal.
    """
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


def _chunk(setup: RunSetup, past: Past, rounds: int) -> Past:
    """Computes ``rounds`` more rounds in one program, reuses the state's buffers, and returns the new progress."""
    state, infos, is_finite = setup.chunk(past.state, np.int32(rounds))
    past.chunks.append(first_rounds(infos, rounds))
    up, down = charge(setup.cost, past.chunks[-1])
    sent = past.sent[0] + up, past.sent[1] + down
    return past._replace(round=past.round + rounds, state=state, sent=sent, is_finite=is_finite)


def go(setup: RunSetup, past: Past, signalled: Callable[[], int | None], advance: Callable[[int], object]) -> Run:
    """Continues a run to its last round and returns the ``Run``; a divergence or a signal may end it earlier.

    A divergence ends only runs with ``stop_on_divergence``, and a signal only runs that write checkpoints.

    Args:
        setup: Settings of the run.
        past: Progress so far.
        signalled: Returns the number of a signal, such as SIGTERM, once one has arrived, else None.
        advance: Called with the number of rounds that were just computed.
    """
    past, stop = _look(setup, past), 0
    while past.round < setup.num_rounds and not stop:
        chunks = len(past.chunks)
        good = past._replace(state=copied(past.state)) if setup.evaluation.stop_on_divergence else None
        past, stop = _to_next_stop(setup, past, signalled, advance)
        if good is not None and not _is_good(past, chunks):
            return _diverged(setup, good, chunks, past)
        past = _look(setup, past, save=bool(stop))
    status = f"stopped by {signal.Signals(stop).name} at round {past.round}" if stop else _end(past)
    return _run(setup, past, status)._replace(signal=stop)


def _to_next_stop(
    setup: RunSetup, past: Past, signalled: Callable[[], int | None], advance: Callable[[int], object]
) -> tuple[Past, int]:
    """Computes rounds until an evaluation, a checkpoint or a test for divergence is due, or a signal arrives.

    Returns the progress, and the number of the signal (0 without one).

    Args:
        setup: Settings of the run.
        past: Progress so far.
        signalled: Returns the number of a signal that has arrived, else None; asked only if the run writes checkpoints.
        advance: Called with the number of rounds that were just computed.
    """
    aim, stop, store = _next_stop(setup, past.round), 0, setup.store
    pace = setup.length if store is None else 1
    while past.round < aim and not stop:
        begun, rounds = time.monotonic(), min(aim - past.round, pace)
        past = _chunk(setup, past, rounds)
        advance(rounds)
        if store is not None:
            measured = int(rounds * _SECONDS / max(time.monotonic() - begun, 1e-6))
            pace = _agreed(min(max(measured, 1), setup.length))
            stop = _agreed(signalled() or 0)
            if _agreed(due(store, past.saved)):
                break
    return past, stop


def _look(setup: RunSetup, past: Past, save: bool = False) -> Past:
    """Evaluates the models and writes a checkpoint, each if it is due; returns the new progress.

    ``save`` forces a checkpoint, before a run ends early.
    """
    if _is_evaluated(setup, past.round):
        _evaluate(setup, past)
    store = setup.store
    if store is None or past.round == past.saved.round:
        return past
    every, last = store.options.every, past.round == setup.num_rounds
    is_due = past.round % every == 0 if every else bool(_agreed(due(store, past.saved)))
    return _save(setup, store, past) if is_due or save or last else past


def _evaluate(setup: RunSetup, past: Past) -> None:
    if past.evaluations and past.evaluations[-1].round == past.round:
        return
    seconds = _seconds(past)
    metrics = {} if setup.measure is None else setup.measure(local(past.state))
    if not isinstance(metrics, dict):
        raise ValueError(f"measure: returned a {type(metrics).__name__}, must return a dictionary of metrics by name")
    past.evaluations.append(Measurement(past.round, metrics, *past.sent, seconds))
    setup.report(past.evaluations[-1])


def _save(setup: RunSetup, store: Store, past: Past) -> Past:
    infos = stacked(setup.shapes, past.chunks[past.saved_chunks :])
    news = past.evaluations[past.saved_evaluations :]
    saved = save(store, past.saved, past.round, local(past.state), infos, news, _seconds(past))
    return past._replace(saved=saved, saved_chunks=len(past.chunks), saved_evaluations=len(past.evaluations))


def _seconds(past: Past) -> float:
    """Returns the run's time so far in seconds, rounded to the millisecond."""
    return round(time.monotonic() - past.begun, 3)


def _is_good(past: Past, chunks: int) -> bool:
    """Returns whether a run's state is finite, and no round after its first ``chunks`` chunks of rounds is bad.

    A round is bad if no client had a finite loss, or if ``_refused_round`` returns it.
    """
    news = past.chunks[chunks:]
    return _is_finite(past) and all(broken_round(i) is None and _refused_round(i) is None for i in news)


def _refused(past: Past, chunks: int = 0) -> tuple[int, str] | None:
    """Returns the first round, from 1, that ``_refused_round`` finds, and the reason; None without one.

    The first ``chunks`` chunks of rounds are not searched.
    """
    done = past.round - sum(_rounds(infos) for infos in past.chunks[chunks:])
    for infos in past.chunks[chunks:]:
        refusal = _refused_round(infos)
        if refusal is not None:
            return done + refusal[0] + 1, refusal[1]
        done += _rounds(infos)
    return None


def _end(past: Past) -> str:
    """Returns the final status of a run, as in ``Run``: finished, unstable (see ``_refused_round``), or diverged."""
    refused = _refused(past)
    if refused is not None:
        return f"unstable at round {refused[0]}: {refused[1]}"
    done = 0
    for infos in past.chunks:
        if (row := broken_round(infos)) is not None:
            return f"diverged by round {done + row + 1}"
        done += _rounds(infos)
    return FINISHED if _is_finite(past) else f"diverged by round {past.round}"


def _rounds(infos: PyTree) -> int:
    return int(jax.tree.leaves(infos)[0].shape[0])


def _diverged(setup: RunSetup, good: Past, chunks: int, bad: Past) -> Run:
    """Ends a run that has diverged: evaluates, saves and returns it as it was after its last good round.

    It finds that round by bisection, for which it computes rounds again.

    ``good`` is the progress before the bad rounds, with ``chunks`` chunks of rounds, and ``bad`` the progress after
    them.
    """
    refused = _refused(bad, chunks)

    def replay(round_: int) -> Past:
        del good.chunks[chunks:]
        past = good._replace(state=copied(good.state))
        while past.round < round_:
            past = _chunk(setup, past, min(round_ - past.round, setup.length))
        return past

    low, high = good.round, bad.round if refused is None else refused[0]
    if refused is not None and _is_good(replay(high - 1), chunks):
        low = high - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _is_good(replay(middle), chunks) else (low, middle)
    past = replay(low)
    _evaluate(setup, past)
    if setup.store is not None and past.round > past.saved.round:
        past = _save(setup, setup.store, past)
    if refused is not None and refused[0] == high:
        return _run(setup, past, f"unstable at round {high}: {refused[1]}")
    return _run(setup, past, f"diverged at round {high}")


def _run(setup: RunSetup, past: Past, status: str) -> Run:
    return Run(local(past.state), History(past.evaluations, stacked(setup.shapes, past.chunks), setup.cost), status)


@jax.jit
def all_finite(state: PyTree) -> Bool[Array, ""]:
    """Returns whether the server's numbers are finite, and each array of the clients has a client of finite numbers.

    A single client may diverge; if no client's numbers are finite, the models have diverged.

    Args:
        state: State of a run; if it has no fields ``server`` and ``client``, all of it counts as the server's.
    """
    finite, some = jnp.bool_(True), jnp.bool_(True)
    for leaf in _inexact(getattr(state, "server", state)):
        finite &= jnp.all(jnp.isfinite(leaf))
    for leaf in _inexact(getattr(state, "client", ())):  # [K, N, ...]
        some &= jnp.any(jnp.all(jnp.isfinite(leaf), axis=(0, *range(2, leaf.ndim))))
    return finite & some


def _inexact(tree: PyTree) -> list[Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def _is_finite(past: Past) -> bool:
    return bool(all_finite(past.state) if past.is_finite is None else past.is_finite)


def broken_round(infos: dict[str, PyTree]) -> int | None:
    """Returns the index of the first round in which no client that trained had a finite loss, or None.

    ``infos`` are the reported numbers [r, ...] of r rounds; if they have no loss for each slot, returns None. One
    client's infinite loss is a problem of its data, not of the model.
    """
    if "loss" not in infos:
        return None
    active = infos["cohort"].weight > 0
    finite = np.isfinite(infos["loss"])
    if finite.shape != active.shape:
        return None
    rows = np.flatnonzero(active.any(axis=1) & ~(finite & active).any(axis=1))
    return int(rows[0]) if rows.size else None


def _refused_round(infos: dict[str, PyTree]) -> tuple[int, str] | None:
    """Returns the index and the reason of the first round in which a server refused its learning rate; or None.

    A round in which the loss was infinite after each candidate number of steps (NTK-FL) counts too. ``infos`` are the
    rounds' reported numbers [r, ...].
    """
    if "refused" not in infos:
        return None
    refused, lost = np.asarray(infos["refused"]), np.asarray(infos["status"]) == DIVERGED
    rows = np.flatnonzero((refused | lost).any(axis=1))
    if rows.size == 0:
        return None
    row = int(rows[0])
    if not refused[row].any():
        return row, "the loss is finite after none of the candidate numbers of steps"
    model = int(np.flatnonzero(refused[row])[0])
    rate, stable = (float(infos[name][row][model]) for name in ("learning_rate", "stable_learning_rate"))
    return row, f"learning rate {rate:.6g} is above {stable:.6g}, the largest stable one"


@jax.jit
def copied(state: PyTree) -> PyTree:
    """Returns a copy of a run's state in new buffers, because ``run_chunk`` overwrites its argument's buffers."""
    return jax.tree.map(jnp.copy, state)
