"""How a round's cohort is mapped onto the device."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh

from fedtangent.data.federated import max_client_size
from fedtangent.mapping import AXIS, chunked, sharded
from fedtangent.types import Aggregate, Engine, FederatedData, PyTree, Slots

MAPPINGS = ("auto", "scan", "vmap", "chunked:<n>", "sharded", "sharded:<scan, vmap or chunked:<n>>")


def scan_clients(
    train: Callable[..., Any], held: PyTree, aggregate: Aggregate, acc: PyTree, slots: Slots
) -> tuple[PyTree, PyTree]:
    """Train the slots one after another; each client costs what it holds, and one message is held at a time."""

    def one(acc: PyTree, row: Slots) -> tuple[PyTree, PyTree]:
        row, message, out = train(held, row)
        single = jax.tree.map(lambda leaf: leaf[None], (row, message))
        return aggregate.add(acc, *single), out

    return jax.lax.scan(one, acc, slots)


def vmap_clients(
    train: Callable[..., Any], held: PyTree, aggregate: Aggregate, acc: PyTree, slots: Slots
) -> tuple[PyTree, PyTree]:
    """Train all slots at once as one batched program; every slot costs what the largest client of its batch costs.

    On a CPU the batches are of as many slots as its caches hold: more would wait for memory at every local step.
    """
    width = side_by_side(sum(leaf.size // leaf.shape[0] * leaf.dtype.itemsize for leaf in jax.tree.leaves(acc)))
    width = min(width, slots.client.shape[0])
    if width == 1:
        return scan_clients(train, held, aggregate, acc, slots)
    cut = _lockstep if width == slots.client.shape[0] else chunked(width, _lockstep)
    return cut(train, held, aggregate, acc, slots)


# A CPU's small batched products are slow: measured on two cores (MLPs of width 8 to 1024), where fewer than about so
# many clients fit into the cache, one after another is faster.
WORTH = 16


def side_by_side(message_bytes: int) -> int:
    """How many slots with messages of that size are best trained in lockstep on one device of this machine.

    Each has its parameters, their gradient and what becomes of them. An accelerator is given all that there are, a CPU
    as many as its cache holds, and one at a time where those are few.
    """
    if jax.default_backend() != "cpu":
        return sys.maxsize
    held = cache_bytes() // (3 * max(message_bytes, 1))
    return held if held >= WORTH else 1


@functools.cache
def cache_bytes() -> int:
    """Bytes of second-level cache of the cores of one device; 1 MiB a core where the system does not tell."""
    name = "SC_LEVEL2_CACHE_SIZE"
    of_a_core = os.sysconf(name) if name in os.sysconf_names else 0
    cores = max((os.cpu_count() or 1) // jax.local_device_count(), 1)
    return cores * (of_a_core if of_a_core > 0 else 2**20)


def _lockstep(
    train: Callable[..., Any], held: PyTree, aggregate: Aggregate, acc: PyTree, slots: Slots
) -> tuple[PyTree, PyTree]:
    received, messages, outs = jax.vmap(train, in_axes=(None, 0))(held, slots)
    return aggregate.add(acc, received, messages), outs


class Mapping(NamedTuple):
    """A mapping by its parts; ``str`` of it is its name."""

    kind: str  # "scan", "vmap" or "chunked"
    width: int | None  # slots at a time on one device; None: all
    devices: int  # over which the slots are divided

    def __str__(self) -> str:
        inner = f"chunked:{self.width}" if self.kind == "chunked" else self.kind
        return inner if self.devices == 1 else f"sharded:{inner}"


def parse(name: str, devices: int | None = None) -> Mapping:
    """The mapping called ``name``: ``scan``, ``vmap``, ``chunked:<n>``, or ``sharded:`` before one of them.

    ``sharded`` alone is ``sharded:scan`` on a CPU and ``sharded:vmap`` on an accelerator; ``devices`` are all by
    default. Raises ``ValueError`` for any other name.
    """
    kind, colon, rest = name.partition(":")
    over = (jax.device_count() if devices is None else devices) if kind == "sharded" else 1
    inner = name if kind != "sharded" else (rest if colon else default_kind())
    if inner in ("scan", "vmap"):
        return Mapping(inner, 1 if inner == "scan" else None, over)
    kind, _, width = inner.partition(":")
    if kind == "chunked" and width.isdecimal() and int(width) >= 1:
        return Mapping(kind, int(width), over)
    raise ValueError(f"mapping: got {name!r}, allowed are {', '.join(MAPPINGS)}")


def default_kind() -> str:
    """What suits one device: one client after another on a CPU, all at once on an accelerator."""
    return "scan" if jax.default_backend() == "cpu" else "vmap"


def default_mapping() -> Mapping:
    """What ``auto`` is before any measurement: one after another on a CPU, all at once on an accelerator."""
    return parse("sharded" if jax.device_count() > 1 else default_kind())


@functools.cache
def device_mesh(devices: int) -> Mesh:
    """The first ``devices`` devices along one axis, of all processes."""
    return jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def engine_for(data: FederatedData, mapping: str | Mapping = "auto") -> Engine:
    """The engine for ``data`` under ``mapping``, a name of ``parse`` or ``"auto"`` (``default_mapping``).

    Raises ``ValueError`` for an unknown mapping.
    """
    chosen = default_mapping() if mapping == "auto" else parse(mapping) if isinstance(mapping, str) else mapping
    inner = {"scan": scan_clients, "vmap": vmap_clients}.get(chosen.kind) or chunked(chosen.width or 1, vmap_clients)
    largest = max_client_size(data)
    if chosen.devices == 1:
        return Engine(inner, largest)
    mesh = device_mesh(chosen.devices)
    return Engine(sharded(inner, mesh), largest, mesh)
