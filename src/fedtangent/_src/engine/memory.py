"""Peak memory of a run, predicted before it starts.

Throughout a run, memory holds the data, the state, the algorithm's constants and the numbers that rounds report. During
a round it also holds the intermediate arrays of the schedule, the server and the aggregate and, for every client that
is trained at the same time, its parameters, gradients, optimiser state, batch and activations. Making the first state
and evaluating have their own peaks. The intermediate arrays of each part are counted in its traced program
(``liveness``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, cast

import jax

from fedtangent._src import liveness, pytrees
from fedtangent._src.engine.clients import Mapping, Train, scan_clients, side_by_side
from fedtangent._src.engine.loop import state_shapes
from fedtangent._src.liveness import USABLE, peak_bytes, size
from fedtangent._src.types import Aggregate, Algorithm, Array, Engine, FederatedData, PyTree, Slots

Arguments = ParamSpec("Arguments")


class DoesNotFit(ValueError):
    """Error for a run that needs more than the share ``USABLE``, 90 %, of the device's memory."""


class MemoryPlan(NamedTuple):
    """The predicted bytes of a run on one device, by part.

    Attributes:
        data: Examples, targets, partition, constants, and the copies of a cohort's examples if there are any.
        state: Models and the states of server, clients and schedule, twice: the last good round is kept as a copy.
        start: Computation of the first state.
        server: A round's accumulators, random draws, aggregation and server update.
        slot: One client's update.
        concurrent: Number of clients that are trained at the same time on the device (not bytes).
        outputs: Results of the clients of a round, and the reported numbers of all rounds of one compiled call.
        evaluation: Predictions at the evaluated inputs.
        limit: Bytes that the device has.
    """

    data: int
    state: int
    start: int
    server: int
    slot: int
    concurrent: int
    outputs: int  # results of the slots, and infos of the rounds between two stops
    evaluation: int
    limit: int

    @property
    def total(self) -> int:
        """Predicted peak of the run's memory, in bytes."""
        return self.fixed + max(self.server + self.slot * self.concurrent, self.start, self.evaluation)

    @property
    def fixed(self) -> int:
        """Bytes that are in use throughout the run: ``data``, ``state`` and ``outputs``."""
        return self.data + self.state + self.outputs

    @property
    def largest_chunk(self) -> int:
        """Largest number of clients that can be trained at the same time; 0 if not even one fits into memory.

        The memory of ``start`` and ``evaluation`` does not count here.
        """
        return max(0, int((USABLE * self.limit - self.fixed - self.server) // max(self.slot, 1)))

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is at most the share ``USABLE`` of the device's memory."""
        return self.total <= USABLE * self.limit


def _held_bytes(run: Callable[Arguments, object], *arguments: Arguments.args, **options: Arguments.kwargs) -> int:
    """Traces ``run`` for its arguments; returns the peak bytes of its constants, results and intermediate arrays."""
    closed = jax.make_jaxpr(run)(*arguments, **options)
    return pytrees.num_bytes(closed.consts) + peak_bytes(closed.jaxpr)


class _TracedRound(NamedTuple):
    constants: int
    start: int
    state: PyTree  # shapes of the state
    server: int
    slot: int
    slots: int  # of the cohort, or of the questions of a poll if they are more
    outputs: int
    infos: int
    block: int  # copy of the cohort's examples, 0 without one
    message: int  # bytes of the accumulators of one model


@functools.lru_cache(maxsize=64)
def _trace(algorithm: Algorithm, shapes: tuple[Any, ...], max_client_size: int, num_clients: int) -> _TracedRound:
    """Traces one round, without computing it, and returns the bytes that each part of the round needs.

    Args:
        algorithm: The algorithm.
        shapes: Shape and dtype of each array of the training data.
        max_client_size: Number of examples of the largest client.
        num_clients: Number of clients.
    """
    data = FederatedData(*(cast(Any, jax.ShapeDtypeStruct(shape, dtype)) for shape, dtype in shapes))
    state, of_slots = state_shapes(algorithm, num_clients), dict[str, int]()

    def spy(train: Train, shared: PyTree, aggregate: Aggregate, acc: PyTree, slots: Slots) -> tuple[PyTree, PyTree]:
        row = pytrees.take(slots, 0)
        closed = jax.make_jaxpr(train)(shared, row)
        outputs = jax.eval_shape(lambda: scan_clients(train, shared, aggregate, acc, slots)[1])
        of_slots.update(  # training comes after a poll
            slot=max(peak_bytes(closed.jaxpr), of_slots.get("slot", 0)),
            slots=max(slots.client.shape[0], of_slots.get("slots", 0)),
            block=pytrees.num_bytes(slots.block),
            message=pytrees.num_bytes(acc) // algorithm.schedule.num_models,
            outputs=pytrees.num_bytes(outputs) // algorithm.schedule.num_slots,
        )
        return acc, pytrees.zeros_like(outputs)

    engine = Engine(spy, max_client_size)

    def step(state: PyTree, data: FederatedData) -> tuple[PyTree, PyTree]:
        return algorithm.step(state, data, engine)

    closed, (_, infos) = jax.make_jaxpr(step, return_shape=True)(state, data)
    return _TracedRound(
        constants=pytrees.num_bytes(closed.consts),
        start=_held_bytes(lambda: algorithm.init(0, num_clients)),
        state=state,
        server=peak_bytes(closed.jaxpr),
        infos=pytrees.num_bytes(infos),
        **of_slots,
    )


def plan(
    algorithm: Algorithm,
    data: FederatedData,
    mapping: Mapping,
    max_client_size: int,
    rounds: int,
    evaluated: Sequence[Array] = (),
) -> MemoryPlan:
    """Predicts the memory that a run of ``algorithm`` on ``data`` needs on a device, without running it.

    Args:
        algorithm: The algorithm.
        data: Training examples of all clients.
        mapping: Mapping of clients onto devices.
        max_client_size: Number of examples of the largest client.
        rounds: Rounds that one compiled call computes; the numbers that they report are in memory at the same time.
        evaluated: Inputs [n, ...] at which the models are evaluated during the run.
    """
    shapes = tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in data)
    traced = _trace(algorithm, shapes, max_client_size, data.num_clients)
    slots = -(-traced.slots // mapping.devices)
    copies = 1 if mapping.kind == "scan" and mapping.devices == 1 else 3  # others arrange the slots
    others = [x for x in evaluated if x is not data.x]
    return MemoryPlan(
        data=pytrees.num_bytes((data, others)) + traced.constants + copies * traced.block,
        state=2 * pytrees.num_bytes(traced.state),
        start=traced.start,
        server=traced.server,
        slot=traced.slot,
        concurrent=min(slots, mapping.width or slots, side_by_side(traced.message)),
        outputs=traced.outputs * slots + traced.infos * rounds,
        evaluation=max((_held_bytes(algorithm.predict, traced.state, x) for x in evaluated), default=0),
        limit=liveness.memory_limit(),
    )


def check(
    algorithm: Algorithm,
    data: FederatedData,
    mapping: Mapping,
    max_client_size: int,
    rounds: int,
    evaluated: Sequence[Array] = (),
) -> MemoryPlan:
    """Predicts the memory of a run as ``plan`` does, and raises an error unless it fits into 90 % of the device's.

    Args:
        algorithm, data, mapping, max_client_size, rounds, evaluated: As in ``plan``.

    Returns:
        The plan, if the run fits.

    Raises:
        DoesNotFit: The run needs more than the share ``USABLE`` of the memory. The message names the largest chunk of
            clients that fits or, if none does, the size of every part.
    """
    planned = plan(algorithm, data, mapping, max_client_size, rounds, evaluated)
    if planned.fits:
        return planned
    needs = f"{mapping} needs {size(planned.total)}, the device has {size(planned.limit)}"
    if planned._replace(concurrent=0).fits and planned.largest_chunk >= 1:
        raise DoesNotFit(f"mapping: {needs}; the largest chunk that fits is chunked:{planned.largest_chunk}")
    raise DoesNotFit(
        f"mapping: {needs}, and no mapping fits: data and state take {size(planned.fixed)}, initialisation "
        f"{size(planned.start)}, the server {size(planned.server)}, one client {size(planned.slot)}, an evaluation "
        f"{size(planned.evaluation)}"
    )


def check_program(
    name: str, run: Callable[Arguments, object], *arguments: Arguments.args, **options: Arguments.kwargs
) -> None:
    """Raises ``DoesNotFit`` if a function's constants, arguments and arrays need more than 90 % of the device's memory.

    Args:
        name: Beginning of the error message.
        run: The function.
        arguments, options: Its arguments, or their shapes.
    """
    needed = pytrees.num_bytes((arguments, options)) + _held_bytes(run, *arguments, **options)
    if needed > USABLE * liveness.memory_limit():
        raise DoesNotFit(
            f"{name}, which needs {size(needed)} of memory, the device has {size(liveness.memory_limit())}"
        )


def describe(planned: MemoryPlan) -> str:
    """Returns a memory plan, the predicted bytes of a run by part, as one line of text."""
    clients = f"{planned.concurrent} x {size(planned.slot)} clients"
    return (
        f"memory: {size(planned.total)} of {size(planned.limit)} predicted at the peak (data {size(planned.data)}, "
        f"state {size(planned.state)}, server {size(planned.server)}, {clients}, outputs {size(planned.outputs)}, "
        f"evaluation {size(planned.evaluation)})"
    )
