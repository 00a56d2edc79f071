"""How a round's cohort is mapped onto the device."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from fedtangent.data.federated import max_client_size
from fedtangent.types import Aggregate, Array, Engine, FederatedData, PyTree, Slots

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


# A CPU's small batched products are slow: where fewer clients than this fit into its cache, one after another is faster
# (measured on two cores, for MLPs of width 8 to 1024).
WORTH = 16


def side_by_side(message_bytes: int) -> int:
    """How many slots with messages of that size are best trained in lockstep on one device of this machine.

    An accelerator takes all of them. A CPU takes as many as its cache holds, counting three arrays of the message's
    size for each (parameters, gradient, new parameters), or one at a time if that is fewer than ``WORTH``.
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


@dataclasses.dataclass(frozen=True)
class Devices:
    """How work is mapped onto the devices; this does not change a result beyond rounding.

    Attributes:
        mapping: Of a round's clients: ``scan`` (one after another), ``vmap`` (all at once), ``chunked:<n>`` (n at a
            time, of like size), ``sharded`` or ``sharded:<one of these>`` (divided over all devices), or ``auto``.
        runs: Of the runs of a sweep: ``map``, one after another, each as long as it takes; ``vmap``, all at once, every
            client as long as the largest and the memory of all runs; ``auto`` is map on a CPU, vmap on an accelerator.
    """

    mapping: str = "auto"
    runs: str = "auto"


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
    """The mapping of one device: ``scan`` on a CPU, ``vmap`` on an accelerator."""
    return "scan" if jax.default_backend() == "cpu" else "vmap"


def default_mapping() -> Mapping:
    """What ``auto`` means without a measurement: ``default_kind``, ``sharded`` where there are several devices."""
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


AXIS = "clients"
MapClients = Callable[..., tuple[PyTree, PyTree]]


def _by_size(slots: Slots) -> Array:
    """Slots in falling order of size, [S] int32; equals stay in the cohort's order."""
    return jnp.argsort(slots.size, stable=True, descending=True).astype(jnp.int32)


def _arrange(slots: Slots, order: Array) -> Slots:
    """The slots at ``order`` [...]; an entry of S, beyond the last slot, becomes an empty slot."""
    return jax.tree.map(lambda leaf: leaf.at[order].get(mode="fill", fill_value=0), slots)


def _restore(outs: PyTree, order: Array, num_slots: int) -> PyTree:
    """Undo ``_arrange`` on results whose leading axis is that of the flat ``order``."""
    back = jnp.zeros((num_slots,), jnp.int32).at[order].set(jnp.arange(order.shape[0], dtype=jnp.int32), mode="drop")
    return jax.tree.map(lambda leaf: leaf[back], outs)


@functools.cache
def chunked(size: int, batch: MapClients) -> MapClients:
    """The mapping that trains ``size`` slots at a time with ``batch``, one chunk after another.

    A chunk costs what its largest client costs, and holds ``size`` clients' parameters, gradients and activations.
    """

    def chunked_clients(
        train: Callable[..., object], held: PyTree, aggregate: Aggregate, acc: PyTree, slots: Slots
    ) -> tuple[PyTree, PyTree]:
        num_slots = slots.client.shape[0]
        width = min(size, num_slots)
        chunks = -(-num_slots // width)
        order = jnp.full((chunks * width,), num_slots, jnp.int32).at[:num_slots].set(_by_size(slots))
        rows = _arrange(slots, order.reshape(chunks, width))
        acc, outs = jax.lax.scan(lambda acc, chunk: batch(train, held, aggregate, acc, chunk), acc, rows)
        flat = jax.tree.map(lambda leaf: leaf.reshape((chunks * width, *leaf.shape[2:])), outs)
        return acc, _restore(flat, order, num_slots)

    return chunked_clients


def _deal(num_slots: int, devices: int) -> np.ndarray:
    """Places, in the falling order of size, of the slots of each device, [D, ceil(S / D)]: dealt back and forth.

    So devices get equal shares of the work. An entry of S or more is no slot.
    """
    rows = -(-num_slots // devices)
    hands = np.arange(rows * devices).reshape(rows, devices)
    hands[1::2] = hands[1::2, ::-1]
    return hands.T


@functools.cache
def sharded(inner: MapClients, mesh: Mesh) -> MapClients:
    """The slots divided over the devices of ``mesh``, each mapping its own with ``inner``; accumulators are merged.

    Every device holds the data and the models. Relies on ``aggregate.init`` being neutral: each device starts with it.
    """

    def sharded_clients(
        train: Callable[..., object], held: PyTree, aggregate: Aggregate, acc: PyTree, slots: Slots
    ) -> tuple[PyTree, PyTree]:
        num_slots, devices = slots.client.shape[0], math.prod(mesh.devices.shape)
        hands = _deal(num_slots, devices)
        by_size = jnp.concatenate([_by_size(slots), jnp.full((hands.size - num_slots,), num_slots, jnp.int32)])
        order = by_size[jnp.asarray(hands.reshape(-1))]

        def mine(held: PyTree, acc: PyTree, rows: Slots) -> tuple[PyTree, PyTree]:
            acc, outs = inner(train, held, aggregate, acc, rows)
            return aggregate.merge(acc, AXIS), jax.lax.all_gather(outs, AXIS, tiled=True)

        acc, outs = jax.shard_map(
            mine,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec(AXIS)),
            out_specs=(PartitionSpec(), PartitionSpec()),
            check_vma=False,
        )(held, acc, _arrange(slots, order))
        return acc, _restore(outs, order, num_slots)

    return sharded_clients
