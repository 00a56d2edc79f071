"""Mappings of a round's clients onto the devices.

A slot is one place in a round's cohort: a client that trains a model.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from fedtangent._src.data.federated import max_client_size
from fedtangent._src.programs import usable_cores
from fedtangent._src.types import Aggregate, Array, Engine, FederatedData, PyTree, Slots

MAPPINGS = ("auto", "scan", "vmap", "chunked:<n>", "sharded", "sharded:<scan, vmap or chunked:<n>>")

Train = Callable[[PyTree, Slots], tuple[Slots, PyTree, PyTree]]  # (shared, slot) -> (slot, message, info)
MapClients = Callable[[Train, PyTree, Aggregate, PyTree, Slots], tuple[PyTree, PyTree]]  # see ``scan_clients``


def scan_clients(
    train: Train, shared: PyTree, aggregate: Aggregate, acc: PyTree, slots: Slots
) -> tuple[PyTree, PyTree]:
    """Trains a round's clients one after another, so that memory holds one message and small clients take little time.

    Args:
        train: ``(shared, slot) -> (slot, message, info)``: trains one slot, a client with its model.
        shared: Tree that every slot reads, such as the data.
        aggregate: Reduction that adds up the messages.
        acc: Accumulator that the messages are added to, empty at the beginning of a round.
        slots: The round's slots, [S] each.

    Returns:
        The accumulator with all messages added, and every slot's info (numbers for the history), arrays [S].
    """

    def one(acc: PyTree, row: Slots) -> tuple[PyTree, PyTree]:
        row, message, out = train(shared, row)
        single = jax.tree.map(lambda leaf: leaf[None], (row, message))
        return aggregate.add(acc, *single), out

    return jax.lax.scan(one, acc, slots)


def vmap_clients(
    train: Train, shared: PyTree, aggregate: Aggregate, acc: PyTree, slots: Slots
) -> tuple[PyTree, PyTree]:
    """Trains a round's clients in parallel, as one batched program in which each takes as long as the largest client.

    On a CPU a batch has as many clients as fit into the cache, and the batches are trained one after another; if fewer
    than 16 (``WORTH``) fit, single clients are.

    Args:
        train, shared, aggregate, acc, slots: As in ``scan_clients``.
    """
    width = side_by_side(sum(leaf.size // leaf.shape[0] * leaf.dtype.itemsize for leaf in jax.tree.leaves(acc)))
    width = min(width, slots.client.shape[0])
    if width == 1:
        return scan_clients(train, shared, aggregate, acc, slots)
    cut = _lockstep if width == slots.client.shape[0] else chunked(width, _lockstep)
    return cut(train, shared, aggregate, acc, slots)


# A CPU's small batched products are slow: where fewer clients than this fit into its cache, one after another is faster
# (measured on two cores, for MLPs of width 8 to 1024).
WORTH = 16


def side_by_side(message_bytes: int) -> int:
    """Returns how many clients, with messages of ``message_bytes`` bytes, one device should train as one batch.

    An accelerator takes all of them. A CPU takes as many as its cache holds, counting three arrays of the message's
    size for each client (parameters, gradient, new parameters), or one if fewer than 16 (``WORTH``) fit.
    """
    if jax.default_backend() != "cpu":
        return sys.maxsize
    fitting = cache_bytes() // (3 * max(message_bytes, 1))
    return fitting if fitting >= WORTH else 1


@functools.cache
def cache_bytes() -> int:
    """Returns the bytes of second-level (L2) cache of the processor cores that make up a JAX device.

    If the size is unknown, 1 MiB for each core is assumed.
    """
    name = "SC_LEVEL2_CACHE_SIZE"
    of_a_core = os.sysconf(name) if name in os.sysconf_names else 0
    cores = max(usable_cores() // jax.local_device_count(), 1)
    return cores * (of_a_core if of_a_core > 0 else 2**20)


def _lockstep(train: Train, shared: PyTree, aggregate: Aggregate, acc: PyTree, slots: Slots) -> tuple[PyTree, PyTree]:
    received, messages, outs = jax.vmap(train, in_axes=(None, 0))(shared, slots)
    return aggregate.add(acc, received, messages), outs


class Mapping(NamedTuple):
    """A mapping of a round's clients onto devices; ``str`` of it gives its name, such as ``chunked:4``.

    Attributes:
        kind: "scan" (one client after another), "vmap" (all at once) or "chunked" (``width`` at a time).
        width: Number of clients at a time on one device; None for all.
        devices: Number of devices over which the clients are divided.
    """

    kind: str
    width: int | None
    devices: int

    def __str__(self) -> str:
        inner = f"chunked:{self.width}" if self.kind == "chunked" else self.kind
        return inner if self.devices == 1 else f"sharded:{inner}"


@dataclasses.dataclass(frozen=True)
class Devices:
    """The mapping of clients and of runs onto the devices, which does not change a result beyond rounding.

    Attributes:
        mapping: Mapping of a round's clients: ``scan`` (one after another), ``vmap`` (all at once; on a CPU at most as
            many as suit its cache), ``chunked:<n>`` (n at a time, of like size), ``sharded`` or ``sharded:<one of
            these>`` (divided over all devices), or ``auto``: for a short run or a sweep scan on a CPU and vmap on an
            accelerator, for a long run of ``simulate`` the fastest that fits into memory.
        runs: Mapping of the runs of a sweep: ``map`` (one after another), ``vmap`` (all at once, which needs the memory
            of all runs, and every client takes as long as the largest), or ``auto`` (map on a CPU, vmap on an
            accelerator).
    """

    mapping: str = "auto"
    runs: str = "auto"


def parse(name: str, devices: int | None = None) -> Mapping:
    """Returns the mapping called ``name``: ``scan``, ``vmap``, ``chunked:<n>``, or ``sharded:`` before one of them.

    ``sharded`` without a colon is ``sharded:scan`` on a CPU and ``sharded:vmap`` on an accelerator.

    Args:
        name: Name of the mapping.
        devices: Number of devices of a sharded mapping; None for all.

    Raises:
        ValueError: ``name`` is not the name of a mapping; here "auto" is not one.
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
    """Returns the default mapping on one device: ``scan`` on a CPU, ``vmap`` on an accelerator."""
    return "scan" if jax.default_backend() == "cpu" else "vmap"


def default_mapping() -> Mapping:
    """Returns the mapping that ``auto`` takes without a measurement.

    It is ``scan`` on a CPU and ``vmap`` on an accelerator, divided over the devices if there are several.
    """
    return parse("sharded" if jax.device_count() > 1 else default_kind())


@functools.cache
def device_mesh(devices: int) -> Mesh:
    """Returns a mesh of the first ``devices`` devices of all processes, along one axis."""
    return jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def engine_for(data: FederatedData, mapping: str | Mapping = "auto") -> Engine:
    """Returns the engine that trains a round's clients on the devices by a mapping.

    Args:
        data: Training examples of all clients.
        mapping: A mapping, its name, or "auto" for ``default_mapping``.

    Raises:
        ValueError: An unknown mapping.
    """
    chosen = default_mapping() if mapping == "auto" else parse(mapping) if isinstance(mapping, str) else mapping
    inner = {"scan": scan_clients, "vmap": vmap_clients}.get(chosen.kind) or chunked(chosen.width or 1, vmap_clients)
    largest = max_client_size(data)
    if chosen.devices == 1:
        return Engine(inner, largest)
    mesh = device_mesh(chosen.devices)
    return Engine(sharded(inner, mesh), largest, mesh)


AXIS = "clients"


def _by_size(slots: Slots) -> Array:
    """Returns the indices of slots (clients of a round) from the largest client to the smallest, [S] int32.

    Ties keep their order.
    """
    return jnp.argsort(slots.size, stable=True, descending=True).astype(jnp.int32)


def _arrange(slots: Slots, order: Array) -> Slots:
    """Returns the slots (clients of a round) with the indices ``order`` [...].

    An index beyond the last slot gives an empty slot.
    """
    return jax.tree.map(lambda leaf: leaf.at[order].get(mode="fill", fill_value=0), slots)


def _restore(outs: PyTree, order: Array, num_slots: int) -> PyTree:
    """Returns the clients' results in the order of the cohort again, without empty slots, which only pad a batch.

    It undoes ``_arrange``: row j of ``outs`` belongs to slot ``order[j]``, where ``num_slots`` marks an empty slot.
    """
    back = jnp.zeros((num_slots,), jnp.int32).at[order].set(jnp.arange(order.shape[0], dtype=jnp.int32), mode="drop")
    return jax.tree.map(lambda leaf: leaf[back], outs)


@functools.cache
def chunked(size: int, batch: MapClients) -> MapClients:
    """Builds the mapping that trains ``size`` clients at a time by another mapping, one such chunk after another.

    Clients are first sorted by size, so that a chunk has clients of like size. Trained as one batch, a chunk takes as
    long as its largest client, and the memory of ``size`` clients.

    Args:
        size: Slots (clients with their models) of a chunk.
        batch: Mapping that trains the slots of a chunk.
    """

    def chunked_clients(
        train: Train, shared: PyTree, aggregate: Aggregate, acc: PyTree, slots: Slots
    ) -> tuple[PyTree, PyTree]:
        num_slots = slots.client.shape[0]
        width = min(size, num_slots)
        chunks = -(-num_slots // width)
        order = jnp.full((chunks * width,), num_slots, jnp.int32).at[:num_slots].set(_by_size(slots))
        rows = _arrange(slots, order.reshape(chunks, width))
        acc, outs = jax.lax.scan(lambda acc, chunk: batch(train, shared, aggregate, acc, chunk), acc, rows)
        flat = jax.tree.map(lambda leaf: leaf.reshape((chunks * width, *leaf.shape[2:])), outs)
        return acc, _restore(flat, order, num_slots)

    return chunked_clients


def _deal(num_slots: int, devices: int) -> np.ndarray:
    """Divides S slots (clients of a round) over D devices so that each device has small and large clients.

    Returns the ranks by size of each device's clients, [D, ceil(S / D)]. Rank 0 is the largest client; a rank of S or
    more is no client.
    """
    rows = -(-num_slots // devices)
    hands = np.arange(rows * devices).reshape(rows, devices)
    hands[1::2] = hands[1::2, ::-1]
    return hands.T


def _gathered(outs: PyTree) -> PyTree:
    """Collects the results of the clients of all devices on each device.

    Arrays of one dtype travel together, because every collective operation waits for all processes.
    """
    leaves, structure = jax.tree.flatten(outs)
    gathered = list(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        places = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat = [leaves[i].reshape(leaves[i].shape[0], -1) for i in places]
        ends = np.cumsum([columns.shape[1] for columns in flat])[:-1].tolist()
        together = jax.lax.all_gather(jnp.concatenate(flat, axis=1), AXIS, tiled=True)
        for i, columns in zip(places, jnp.split(together, ends, axis=1), strict=True):
            gathered[i] = columns.reshape(columns.shape[0], *leaves[i].shape[1:])
    return jax.tree.unflatten(structure, gathered)


@functools.cache
def sharded(inner: MapClients, mesh: Mesh) -> MapClients:
    """Builds the mapping that divides a round's clients over several devices and merges the sums of their messages.

    Every device holds the data and the models, and starts from an empty accumulator.

    Args:
        inner: Mapping that trains the clients of one device.
        mesh: The devices.
    """

    def sharded_clients(
        train: Train, shared: PyTree, aggregate: Aggregate, acc: PyTree, slots: Slots
    ) -> tuple[PyTree, PyTree]:
        num_slots, devices = slots.client.shape[0], math.prod(mesh.devices.shape)
        hands = _deal(num_slots, devices)
        by_size = jnp.concatenate([_by_size(slots), jnp.full((hands.size - num_slots,), num_slots, jnp.int32)])
        order = by_size[jnp.asarray(hands.reshape(-1))]

        def on_device(shared: PyTree, acc: PyTree, slots: Slots, order: Array) -> tuple[PyTree, PyTree]:
            mine = order.reshape(hands.shape)[jax.lax.axis_index(AXIS)]
            acc, outs = inner(train, shared, aggregate, acc, _arrange(slots, mine))
            return aggregate.merge(acc, AXIS), _gathered(outs)

        # Every device reads the whole cohort: divided at the entry, its order would be gathered again behind it.
        everywhere = PartitionSpec()
        acc, outs = jax.shard_map(
            on_device, mesh=mesh, in_specs=(everywhere,) * 4, out_specs=(everywhere, everywhere), check_vma=False
        )(shared, acc, slots, order)
        return acc, _restore(outs, order, num_slots)

    return sharded_clients
