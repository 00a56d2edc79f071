"""Peak memory of a run, predicted before it starts.

Throughout a run, memory holds the data, the state, the algorithm's constants and the infos of rounds. During a round it
also holds the intermediate arrays of the schedule, the server and the aggregate and, for every slot that is trained at
the same time, one client's parameters, gradients, optimiser state, batch and activations. Making the first state and
evaluating predictions have their own peaks. Each part is read off a traced program by liveness analysis, which finds
the intermediate arrays that exist at the same time.
"""

from __future__ import annotations

import collections
import functools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, cast

import jax
from jax.extend import core

from fedtangent._src import pytrees
from fedtangent._src.engine.clients import Mapping, Train, scan_clients, side_by_side
from fedtangent._src.engine.loop import state_shapes
from fedtangent._src.types import Aggregate, Algorithm, Array, Engine, FederatedData, PyTree, Slots

Arguments = ParamSpec("Arguments")
USABLE = 0.9  # share of the memory to plan with; the rest is for programs, buffers in flight and fragmentation


@functools.cache
def memory_limit() -> int:
    """Returns the bytes that a run may use on a device: the accelerator's limit, or the host's (cgroups included)."""
    statistics = jax.local_devices()[0].memory_stats()
    if statistics and statistics.get("bytes_limit"):
        return int(statistics["bytes_limit"])
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            host = min(host, int((Path("/sys/fs/cgroup") / name).read_text()))
        except (OSError, ValueError):  # no such control group, or "max"
            continue
    return host


class MemoryPlan(NamedTuple):
    """The predicted peak bytes of a run on one device."""

    data: int  # examples, targets, partition, constants, and the copy of a cohort's examples if there is one
    state: int  # models, server, client and schedule state, twice: the last good round is kept as a copy
    start: int  # making the first state
    server: int  # a round's accumulators, draws, aggregation and server update
    slot: int  # one client's update
    concurrent: int  # slots trained at the same time on one device
    outputs: int  # results of the slots, and infos of the rounds between two stops
    evaluation: int  # predictions
    limit: int  # bytes that the device has

    @property
    def total(self) -> int:
        """Peak bytes of the run."""
        return self.fixed + max(self.server + self.slot * self.concurrent, self.start, self.evaluation)

    @property
    def fixed(self) -> int:
        """Bytes that are in use throughout the run."""
        return self.data + self.state + self.outputs

    @property
    def largest_chunk(self) -> int:
        """Largest number of slots that fit at the same time; 0 if not even one fits."""
        return max(0, int((USABLE * self.limit - self.fixed - self.server) // max(self.slot, 1)))

    @property
    def fits(self) -> bool:
        """Whether the peak is within the usable part of the memory."""
        return self.total <= USABLE * self.limit


def _bytes(var: core.Var | core.Literal) -> int:
    aval: Any = var.aval
    if isinstance(var, core.Literal) or not hasattr(aval, "shape"):
        return 0
    return math.prod(aval.shape) * pytrees.item_bytes(aval.dtype)


def _inner(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """Returns the jaxprs that an equation runs."""
    kinds = core.ClosedJaxpr | core.Jaxpr
    values = jax.tree.leaves(equation.params, is_leaf=lambda value: isinstance(value, kinds))
    return [v.jaxpr if isinstance(v, core.ClosedJaxpr) else v for v in values if isinstance(v, kinds)]


# Operations that compilers fuse into the operation that uses their result, if there is only one: it is not stored.
FUSED = frozenset(
    ("abs", "add", "add_any", "and", "broadcast_in_dim", "convert_element_type", "copy", "cos", "div", "eq", "exp")
    + ("ge", "gt", "integer_pow", "iota", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg")
    + ("not", "or", "pow", "reshape", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "squeeze", "sub", "tanh")
)


def peak_bytes(jaxpr: core.Jaxpr, loop: bool = False) -> int:
    """Returns the most bytes of intermediate arrays of ``jaxpr`` alive at once, without its inputs and constants.

    An elementwise result with one consumer counts nothing, because it is fused into the consumer.

    Args:
        jaxpr: The traced program.
        loop: Whether ``jaxpr`` is the body of a loop, whose results count nothing because they overwrite the loop's
            buffers.
    """
    users = collections.defaultdict[core.Var, list[int]](list)
    for i, equation in enumerate(jaxpr.eqns):
        for var in equation.invars:
            if isinstance(var, core.Var):
                users[var].append(i)
    returned = {v for v in jaxpr.outvars if isinstance(v, core.Var)}
    for var in returned:
        users[var].append(len(jaxpr.eqns))
    needed = _needed_until(jaxpr, users)
    live, peak, ends = 0, 0, collections.Counter[int]()
    for i, equation in enumerate(jaxpr.eqns):
        for var in equation.outvars:
            free = _is_fused(jaxpr, i, users[var]) or (loop and var in returned)
            size_of_result = 0 if free else _bytes(var)
            live += size_of_result
            ends[max((needed[j] for j in users[var]), default=i)] += size_of_result
        body = equation.primitive.name in ("while", "scan")
        inside = max((peak_bytes(inner, body) for inner in _inner(equation)), default=_work_bytes(equation))
        peak = max(peak, live + inside)
        live -= ends[i]
    return peak


def _is_fused(jaxpr: core.Jaxpr, i: int, users: list[int]) -> bool:
    """Returns whether the result of equation ``i`` has a single consumer that computes it on the fly."""
    if not _is_elementwise(jaxpr.eqns[i]) or len(users) != 1 or users[0] == len(jaxpr.eqns):
        return False
    user = jaxpr.eqns[users[0]]
    return _is_elementwise(user) or user.primitive.name.startswith(("reduce_", "arg"))


def _is_elementwise(equation: core.JaxprEqn) -> bool:
    """Returns whether an operation, or a function such as relu, computes each number of its result independently."""
    if equation.primitive.name in FUSED:
        return True
    inner = [] if equation.primitive.name in ("while", "scan", "cond") else _inner(equation)
    return bool(inner) and all(_is_elementwise(one) for jaxpr in inner for one in jaxpr.eqns)


def _needed_until(jaxpr: core.Jaxpr, users: dict[core.Var, list[int]]) -> list[int]:
    """Computes until which equation the operands of each equation have to be kept.

    It is the equation itself or, for an elementwise one with consumers, the last equation until which any of them keeps
    the operands it reads: compilers may compute an elementwise result anew wherever it is used.

    Args:
        jaxpr: The traced program, of n equations.
        users: The numbers of the equations that use each variable; n stands for the results of ``jaxpr``.

    Returns:
        The number of the last equation, for each of the n equations and for n itself.
    """
    until = list(range(len(jaxpr.eqns) + 1))
    for i in reversed(range(len(jaxpr.eqns))):
        used = [j for var in jaxpr.eqns[i].outvars for j in users[var] if j < len(jaxpr.eqns)]
        if _is_elementwise(jaxpr.eqns[i]) and used:
            until[i] = max(until[j] for j in used)
    return until


def _work_bytes(equation: core.JaxprEqn) -> int:
    """Returns the work space of an operation: products rearrange stacked matrices, LAPACK needs work arrays."""
    if equation.primitive.name == "dot_general":
        operands = (*equation.invars, *equation.outvars)
        return sum(_bytes(v) for v in operands if len(getattr(v.aval, "shape", ())) > 2)
    return 2 * max(map(_bytes, equation.outvars)) if equation.primitive.name in ("eigh", "svd") else 0


def _held_bytes(run: Callable[Arguments, object], *arguments: Arguments.args, **options: Arguments.kwargs) -> int:
    """Returns the most bytes that a traced function has at once, besides its arguments.

    They are constants, results and intermediate arrays.
    """
    closed = jax.make_jaxpr(run)(*arguments, **options)
    return pytrees.num_bytes(closed.consts) + peak_bytes(closed.jaxpr)


class _TracedRound(NamedTuple):
    constants: int
    start: int
    state: PyTree  # shapes of the state
    server: int
    slot: int
    outputs: int
    infos: int
    block: int  # copy of the cohort's examples, 0 without one
    message: int  # bytes of the accumulators of one model


@functools.lru_cache(maxsize=64)
def _trace(algorithm: Algorithm, shapes: tuple[Any, ...], max_client_size: int, num_clients: int) -> _TracedRound:
    """Returns the bytes of one round, with a slot's part apart from the rest."""
    data = FederatedData(*(cast(Any, jax.ShapeDtypeStruct(shape, dtype)) for shape, dtype in shapes))
    state, of_slots = state_shapes(algorithm, num_clients), dict[str, int]()

    def spy(train: Train, shared: PyTree, aggregate: Aggregate, acc: PyTree, slots: Slots) -> tuple[PyTree, PyTree]:
        row = pytrees.take(slots, 0)
        closed = jax.make_jaxpr(train)(shared, row)
        outputs = jax.eval_shape(lambda: scan_clients(train, shared, aggregate, acc, slots)[1])
        of_slots.update(
            slot=peak_bytes(closed.jaxpr),
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
    """Predicts the memory of running ``algorithm`` on ``data``; nothing is run.

    Args:
        algorithm: The algorithm.
        data: Training examples of all clients.
        mapping: Mapping of clients onto devices.
        max_client_size: Number of examples of the largest client.
        rounds: Rounds between two stops, whose infos are in memory at the same time.
        evaluated: Inputs [n, ...] at which the models are evaluated during the run.
    """
    shapes = tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in data)
    traced = _trace(algorithm, shapes, max_client_size, data.num_clients)
    slots = -(-algorithm.schedule.num_slots // mapping.devices)
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
        limit=memory_limit(),
    )


def check(
    algorithm: Algorithm,
    data: FederatedData,
    mapping: Mapping,
    max_client_size: int,
    rounds: int,
    evaluated: Sequence[Array] = (),
) -> MemoryPlan:
    """Returns the memory plan of a run if it fits.

    Args:
        algorithm, data, mapping, max_client_size, rounds, evaluated: As in ``plan``.

    Raises:
        ValueError: The run does not fit; the message names the largest chunk that fits, or the part that is too large.
    """
    planned = plan(algorithm, data, mapping, max_client_size, rounds, evaluated)
    if planned.fits:
        return planned
    needs = f"{mapping} needs {size(planned.total)}, the device has {size(planned.limit)}"
    if planned._replace(concurrent=0).fits and planned.largest_chunk >= 1:
        raise ValueError(f"mapping: {needs}; the largest chunk that fits is chunked:{planned.largest_chunk}")
    raise ValueError(
        f"mapping: {needs}, and no mapping fits: data and state take {size(planned.fixed)}, the first state "
        f"{size(planned.start)}, the server {size(planned.server)}, one client {size(planned.slot)}, an evaluation "
        f"{size(planned.evaluation)}"
    )


def check_program(
    name: str, run: Callable[Arguments, object], *arguments: Arguments.args, **options: Arguments.kwargs
) -> None:
    """Raises ``ValueError`` if a function and its arguments do not fit into memory.

    Args:
        name: Beginning of the error message.
        run: The function.
        arguments, options: Its arguments, or their shapes.
    """
    needed = pytrees.num_bytes((arguments, options)) + _held_bytes(run, *arguments, **options)
    if needed > USABLE * memory_limit():
        raise ValueError(f"{name}, which needs {size(needed)} of memory, the device has {size(memory_limit())}")


def size(num_bytes: float) -> str:
    """Returns a number of bytes as text, such as ``1.5 GiB``."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    power = min(int(math.log(num_bytes, 1024)), 3)
    return f"{num_bytes / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def describe(planned: MemoryPlan) -> str:
    """Returns a memory plan as one line of text."""
    clients = f"{planned.concurrent} x {size(planned.slot)} clients"
    return (
        f"memory: {size(planned.total)} of {size(planned.limit)} predicted at the peak (data {size(planned.data)}, "
        f"state {size(planned.state)}, server {size(planned.server)}, {clients}, outputs {size(planned.outputs)}, "
        f"evaluation {size(planned.evaluation)})"
    )
