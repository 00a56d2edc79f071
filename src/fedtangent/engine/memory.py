"""Peak memory of a run, predicted before it starts.

A round holds the data, the state, the accumulators, the round infos and, for every slot that is trained at the same
time, what one client's update holds: its parameters, gradients, optimiser state, batch and activations. The last is
read off the traced program of one slot by liveness: which intermediate arrays exist at the same time.
"""

from __future__ import annotations

import collections
import functools
import math
import os
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
from jax.extend import core

from fedtangent import pytrees
from fedtangent.engine.clients import Mapping, scan_clients, side_by_side
from fedtangent.engine.loop import state_shapes
from fedtangent.types import Aggregate, Algorithm, Engine, FederatedData, PyTree, Slots

# The device's own program, buffers in flight and fragmentation: the rest of its memory may be planned with.
USABLE = 0.9


@functools.cache
def memory_limit() -> int:
    """Bytes that a run may use on a device: the accelerator's own limit, or the host's memory (cgroups included)."""
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
    """Predicted peak bytes of a run on one device."""

    data: int  # examples, targets, partition, and those of a cohort again where they are fetched together
    state: int  # models, server and client state, schedule, with the copy that the last good round is kept in
    aggregate: int  # accumulators and the server's work on them
    slot: int  # one client's update
    concurrent: int  # slots trained at the same time on one device
    outputs: int  # what the slots return, and the infos of the rounds between two evaluations
    limit: int  # bytes the device has

    @property
    def total(self) -> int:
        """Peak bytes."""
        return self.fixed + self.slot * self.concurrent

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the mapping."""
        return self.data + self.state + self.aggregate + self.outputs

    @property
    def largest_chunk(self) -> int:
        """Most slots at a time that fit; 0 when not even one does."""
        return max(0, int((USABLE * self.limit - self.fixed) // max(self.slot, 1)))

    @property
    def fits(self) -> bool:
        """Whether the peak is within the usable part of the memory."""
        return self.total <= USABLE * self.limit


def _bytes(var: Any) -> int:
    aval = var.aval
    if isinstance(var, core.Literal) or not hasattr(aval, "shape"):
        return 0
    return math.prod(aval.shape) * pytrees.item_bytes(aval.dtype)


def _inner(equation: Any) -> list[core.Jaxpr]:
    """The jaxprs that an equation runs."""
    found = []
    for value in jax.tree.leaves(equation.params, is_leaf=lambda v: isinstance(v, core.ClosedJaxpr | core.Jaxpr)):
        if isinstance(value, core.ClosedJaxpr):
            found.append(value.jaxpr)
        elif isinstance(value, core.Jaxpr):
            found.append(value)
    return found


# What compilers fuse into its consumer when there is one only, so that it is never written out.
FUSED = frozenset(
    ("abs", "add", "add_any", "and", "broadcast_in_dim", "convert_element_type", "copy", "cos", "div", "eq", "exp")
    + ("ge", "gt", "integer_pow", "iota", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg")
    + ("not", "or", "pow", "reshape", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "squeeze", "sub", "tanh")
)


def peak_bytes(jaxpr: core.Jaxpr, loop: bool = False) -> int:
    """Most bytes of intermediate arrays of ``jaxpr`` alive at once; its inputs and constants are not counted.

    An elementwise result with one consumer counts nothing: it is fused into that. Of a loop's body (``loop``) the
    results count nothing either: they are written over the loop's own.
    """
    last, uses = {}, collections.Counter[Any]()
    for i, equation in enumerate(jaxpr.eqns):
        last.update({v: i for v in equation.invars if isinstance(v, core.Var)})
        uses.update(v for v in equation.invars if isinstance(v, core.Var))
    last.update({v: len(jaxpr.eqns) for v in jaxpr.outvars if isinstance(v, core.Var)})
    uses.update({v: 2 for v in jaxpr.outvars if isinstance(v, core.Var)})
    live, peak = 0, 0
    alive: dict[Any, int] = {}
    for i, equation in enumerate(jaxpr.eqns):
        fused = equation.primitive.name in FUSED
        free = {v for v in equation.outvars if (fused and uses[v] == 1) or (loop and v in jaxpr.outvars)}
        made = {v: 0 if v in free else _bytes(v) for v in equation.outvars}
        live += sum(made.values())
        alive.update(made)
        body = equation.primitive.name in ("while", "scan")
        peak = max(peak, live + max((peak_bytes(inner, body) for inner in _inner(equation)), default=0))
        for var in [v for v in alive if last.get(v, -1) <= i]:
            live -= alive.pop(var)
    return peak


class _TracedSlot(NamedTuple):
    slot: int
    outputs: int
    accumulators: int
    block: int  # the cohort's examples, where they are fetched together


def _look(algorithm: Algorithm, data: PyTree, state: PyTree, max_client_size: int) -> tuple[_TracedSlot, PyTree]:
    """One traced round: what a slot holds and returns, and the shapes of the infos."""
    seen: list[_TracedSlot] = []

    def spy(train: Any, held: PyTree, aggregate: Aggregate, acc: PyTree, slots: Slots) -> tuple[PyTree, PyTree]:
        row = pytrees.take(slots, 0)
        closed = jax.make_jaxpr(train)(held, row)
        outputs = jax.eval_shape(lambda r: train(held, r)[-1], row)
        held_bytes = (peak_bytes(closed.jaxpr), *map(pytrees.num_bytes, (outputs, acc, slots.block)))
        seen.append(_TracedSlot(*held_bytes))
        return scan_clients(train, held, aggregate, acc, slots)

    engine = Engine(spy, max_client_size)
    infos = jax.eval_shape(lambda s, d: algorithm.step(s, d, engine)[1], state, data)
    return seen[0], infos


@functools.lru_cache(maxsize=64)
def _plan(algorithm: Algorithm, shapes: tuple[Any, ...], max_client_size: int, num_clients: int) -> tuple[Any, ...]:
    data: Any = FederatedData(*(cast(Any, jax.ShapeDtypeStruct(shape, dtype)) for shape, dtype in shapes))
    state = state_shapes(algorithm, num_clients)
    seen, infos = _look(algorithm, data, state, max_client_size)
    return seen, pytrees.num_bytes(state), pytrees.num_bytes(infos)


def plan(algorithm: Algorithm, data: FederatedData, mapping: Mapping, max_client_size: int, rounds: int) -> MemoryPlan:
    """The plan of running ``algorithm`` on ``data`` with ``rounds`` rounds between two stops. Nothing is run."""
    shapes = tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in data)
    seen, state, infos = _plan(algorithm, shapes, max_client_size, data.num_clients)
    slots = -(-algorithm.schedule.num_slots // mapping.devices)
    copies = 1 if mapping.kind == "scan" and mapping.devices == 1 else 3  # others arrange the slots
    return MemoryPlan(
        data=pytrees.num_bytes(data) + copies * seen.block,
        state=2 * state,
        aggregate=3 * seen.accumulators,
        slot=seen.slot,
        concurrent=min(slots, mapping.width or slots, side_by_side(seen.accumulators // algorithm.schedule.num_models)),
        outputs=seen.outputs * slots + infos * rounds,
        limit=memory_limit(),
    )


def check(algorithm: Algorithm, data: FederatedData, mapping: Mapping, max_client_size: int, rounds: int) -> MemoryPlan:
    """The plan for ``mapping``.

    Raises ``ValueError`` naming the largest chunk that fits if it does not.
    """
    found = plan(algorithm, data, mapping, max_client_size, rounds)
    if found.fits:
        return found
    needs = f"{mapping} needs {size(found.total)}, the device has {size(found.limit)}"
    if found.largest_chunk >= 1:
        raise ValueError(f"mapping: {needs}; the largest chunk that fits is chunked:{found.largest_chunk}")
    raise ValueError(
        f"mapping: {needs}, and no mapping fits: data and state take {size(found.fixed)}, one client {size(found.slot)}"
    )


def size(num_bytes: float) -> str:
    """Bytes for people: ``1.5 GiB``."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    power = min(int(math.log(num_bytes, 1024)), 3)
    return f"{num_bytes / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def describe(found: MemoryPlan) -> str:
    """The plan on one line."""
    return (
        f"memory: {size(found.total)} of {size(found.limit)} predicted at the peak (data {size(found.data)}, state "
        f"{size(found.state)}, aggregate {size(found.aggregate)}, {found.concurrent} x {size(found.slot)} clients, "
        f"outputs {size(found.outputs)})"
    )
