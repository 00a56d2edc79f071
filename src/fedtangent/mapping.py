"""Mappings beyond one loop and one batch: chunks of clients of like size, and clients over several devices.

Both sort the slots by size first, so that slots which run side by side have as many steps to do as each other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from fedtangent.types import Aggregate, Array, PyTree, Slots

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
    """``size`` slots at a time, as one batched program (``batch``), one chunk after another.

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
    """Which of the slots in falling order each device takes, [D, ceil(S / D)]: dealt back and forth.

    An entry of S or more is no slot.
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
